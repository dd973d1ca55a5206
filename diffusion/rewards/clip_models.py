"""Rewards by tuned CLIP models: PickScore, HPS v2.1 and the LAION aesthetic predictor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.plain_text import OPEN_CLIP, PlainText, parted
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion import reward_base as base
from mmrl.diffusion.image_io import to_pil
from mmrl.rewards.frames import mean_over_frames
from mmrl.runtime.modules import model_source


class TextImageSimilarity:
    """Base of rewards that are `factor` times the cosine of a text and an image embedding."""

    name: str
    model: nn.Module
    batch_size: int
    frames: int  # number of frames of a video to score
    max_tokens: int  # maximum number of tokens that the text encoder reads
    factor: float = 1.0
    count_tokens: Callable[[str], int]  # counts tokens of the full text, with special tokens
    embed_images: Callable[[Sequence[Tensor]], Tensor]  # maps B images to (B, D)
    embed_texts: Callable[[Sequence[str]], Tensor]  # maps B texts to (B, D)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames)

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""
        texts, images = [prompt.text for prompt in prompts], base.images_of(prompts, outcomes)
        base.warn_of_truncation(self.name, texts, self.count_tokens, self.max_tokens)
        unit = lambda embed: lambda items: normalize(embed(items), dim=-1).cpu()
        shown = base.encode_distinct(unit(self.embed_images), images, self.batch_size)
        read = base.encode_distinct(unit(self.embed_texts), texts, self.batch_size)
        return [self.factor * float(image @ text) for image, text in zip(shown, read, strict=True)]


@reward(inputs=RewardInputs(VISUAL))
class PickScore(TextImageSimilarity):
    """Predicted preference of an image for its prompt, by a tuned CLIP (PickScore, arXiv 2305.01569).

    The score is exp(logit_scale) cos(text, image).

    Args:
        model: Folder or hub id of the CLIP model.
        processor: Folder or hub id of its processor.
        scale: `logit`: the score above, 20 to 24 for current models. `cosine`: the cosine alone (DanceGRPO).
        divide_by: Divisor of the score; Flow-GRPO uses 26 on the logit.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        batch_size: Number of images or texts per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    name = "pick_score"

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: Literal["logit", "cosine"] = "logit",
        divide_by: float = 1.0,
        frames: PositiveInt = 8,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        from transformers import CLIPModel, CLIPProcessor

        load = lambda: base.load_pretrained(self.name, CLIPModel, model)
        self.frames = frames
        self.model, self.batch_size = base.shared_model(self.name, device, load, model), batch_size
        with base.explained(f"pick_score: cannot load the processor '{processor}'"):
            # The authors resize with Pillow; torchvision differs by up to one of 255 levels.
            options = {"backend": "pil", "trust_remote_code": False}
            self.processor = CLIPProcessor.from_pretrained(model_source(processor), **options)
        self.plain = PlainText(self.processor.tokenizer, any_case=True)
        self.factor = (float(self.model.logit_scale.exp()) if scale == "logit" else 1.0) / divide_by
        self.max_tokens = self.model.config.text_config.max_position_embeddings

    def count_tokens(self, text: str) -> int:
        return len(self.plain.batch([text], verbose=False)["input_ids"][0])

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        inputs = self.processor(images=[to_pil(image) for image in images], return_tensors="pt")
        pixels = inputs["pixel_values"].to(self.model.device)
        return self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        padding = {"padding": "max_length", "truncation": True, "max_length": self.max_tokens}
        inputs = self.plain.batch(texts, return_tensors="pt", **padding).to(self.model.device)
        encoded = self.model.text_model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return self.model.text_projection(encoded.pooler_output)


@reward(packages={"open_clip": "clip"}, inputs=RewardInputs(VISUAL))
class Hpsv2(TextImageSimilarity):
    """Predicted preference of an image for its prompt, by a tuned ViT-H-14 (HPS v2.1, arXiv 2306.09341).

    The score is the cosine of text and image, about 0.2 to 0.35, in an open_clip model tuned to rankings. An
    image that is not square is padded with black bars, as by the authors.

    Args:
        weights: `HPS_v2.1_compressed.pt`: a file, or `owner/name:file` of the hub.
        model: Name of the architecture in open_clip.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        batch_size: Number of images or texts per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    name = "hpsv2"

    def __init__(
        self,
        *,
        weights: str = "xswu/HPSv2:HPS_v2.1_compressed.pt",
        model: str = "ViT-H-14",
        frames: PositiveInt = 8,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise ImportError("hpsv2 needs open_clip: pip install 'mmrl[clip]'") from error

        def load() -> nn.Module:
            path = str(base.find_weights("hpsv2", weights))
            problem = f"hpsv2: '{path}' does not hold the weights of '{model}' as named tensors"
            with base.explained(problem, errors=(Exception,)):  # open_clip, torch and pickle raise many types
                return open_clip.create_model(
                    model, pretrained=path, precision="fp32", require_pretrained=True, weights_only=True
                )

        self.frames = frames
        self.model, self.batch_size = base.shared_model("hpsv2", device, load, weights, model), batch_size
        # The authors scale the longest side and fill the rest with black, where open_clip would crop.
        given = {**self.model.visual.preprocess_cfg, "resize_mode": "longest", "fill_color": 0}
        settings = open_clip.transform.PreprocessCfg(**given)
        self.prepare = open_clip.transform.image_transform_v2(settings, is_train=False)
        self.tokenizer = open_clip.get_tokenizer(model)
        self.max_tokens = self.tokenizer.context_length

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(parted(text, OPEN_CLIP))) + 2  # plus the start and end tokens

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        pixels = torch.stack([self.prepare(to_pil(image)) for image in images])
        return self.model.encode_image(pixels.to(self.model.logit_scale.device))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        ids = self.tokenizer([parted(text, OPEN_CLIP) for text in texts])
        return self.model.encode_text(ids.to(self.model.logit_scale.device))


@reward(inputs=RewardInputs(VISUAL))
class Aesthetic:
    """Predicted aesthetic rating of an image, about 1 to 10 (LAION); ignores the prompt.

    The predictor `sac+logos+ava1-l14-linearMSE` has linear layers on the CLIP ViT-L/14 embedding of an image,
    which is normalised to length 1.

    Args:
        model: Folder or hub id of the CLIP vision model.
        weights: Weights of the linear layers: a file, or `owner/name:file` of the hub.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        batch_size: Number of images per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        weights: str = "trl-lib/ddpo-aesthetic-predictor:aesthetic-model.pth",
        frames: PositiveInt = 8,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        from transformers import AutoImageProcessor, CLIPVisionModelWithProjection

        load = lambda: base.load_pretrained("aesthetic", CLIPVisionModelWithProjection, model)
        self.frames = frames
        self.model, self.batch_size = base.shared_model("aesthetic", device, load, model), batch_size
        self.processor = AutoImageProcessor.from_pretrained(
            model_source(model), backend="pil", trust_remote_code=False
        )
        self.head = base.LinearHead(self.model.config.projection_dim)
        state = base.read_weights("aesthetic", weights)
        with base.explained(f"aesthetic: '{weights}' holds other weights"):
            self.head.load_state_dict(state)
        self.head.eval().requires_grad_(False).to(self.model.device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames)

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""

        def rate(images: Sequence[Tensor]) -> Tensor:
            inputs = self.processor(images=[to_pil(image) for image in images], return_tensors="pt")
            embedded = self.model(pixel_values=inputs["pixel_values"].to(self.model.device)).image_embeds
            return self.head(normalize(embedded, dim=-1)).cpu()

        images = base.images_of(prompts, outcomes)
        return [float(rating) for rating in base.encode_distinct(rate, images, self.batch_size)]
