"""Rewards by tuned CLIP models: PickScore, HPS v2.1 and the LAION aesthetic predictor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.reward_base import (
    LinearHead,
    device_of,
    encode_distinct,
    find_weights,
    images_of,
    load_pretrained,
    load_strictly,
    read_weights,
    shared_model,
    warn_of_truncation,
)
from mmrl.runtime.modules import model_source


class TextImageSimilarity:
    """Base of rewards that are `factor` times the cosine of a text and an image embedding."""

    name: str
    batch_size: int
    max_tokens: int  # that the text encoder reads
    factor: float = 1.0

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text before truncation, special ones included."""
        raise NotImplementedError

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        """Embed images at length 1: (B, D)."""
        raise NotImplementedError

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Embed texts at length 1: (B, D)."""
        raise NotImplementedError

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        texts = [prompt.text for prompt in prompts]
        warn_of_truncation(self.name, texts, self.count_tokens, self.max_tokens)
        images = encode_distinct(self.embed_images, images_of(prompts, outcomes), self.batch_size)
        embedded = encode_distinct(self.embed_texts, texts, self.batch_size)
        return [self.factor * float(image @ text) for image, text in zip(images, embedded, strict=True)]


@reward
class PickScore(TextImageSimilarity):
    """Predicted preference of an image for its prompt, by a tuned CLIP (PickScore, arXiv 2305.01569).

    The score is exp(logit_scale) cos(text, image). Of a video the first frame counts.

    Args:
        model: Folder or hub id of the CLIP model.
        processor: Folder or hub id of its processor.
        scale: `logit`, about 20 to 24 for current models and what reports state, or `cosine` (DanceGRPO).
        divide_by: Divisor of the score; Flow-GRPO uses 26 on the logit.
        batch_size: Images or texts in the model at once.
        device: Of the model; `auto` takes the GPU if there is one.
    """

    name = "pick_score"

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: Literal["logit", "cosine"] = "logit",
        divide_by: float = 1.0,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        from transformers import CLIPModel, CLIPProcessor

        self.device, self.batch_size = device_of(device), batch_size
        load = lambda: load_pretrained("pick_score", CLIPModel, model).to(self.device)
        self.model = shared_model(("pick_score", model, str(self.device)), load)
        try:
            self.processor = CLIPProcessor.from_pretrained(model_source(processor), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"pick_score: cannot load the processor '{processor}': {error}") from error
        self.factor = (float(self.model.logit_scale.exp()) if scale == "logit" else 1.0) / divide_by
        self.max_tokens = self.model.config.text_config.max_position_embeddings

    def count_tokens(self, text: str) -> int:
        return len(self.processor.tokenizer(text, verbose=False).input_ids)

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        inputs = self.processor(images=[to_pil(image) for image in images], return_tensors="pt")
        pooled = self.model.vision_model(pixel_values=inputs["pixel_values"].to(self.device)).pooler_output
        return normalize(self.model.visual_projection(pooled), dim=-1).cpu()

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        padding = {"padding": "max_length", "truncation": True, "max_length": self.max_tokens}
        inputs = self.processor(text=list(texts), return_tensors="pt", **padding).to(self.device)
        pooled = self.model.text_model(
            inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).pooler_output
        return normalize(self.model.text_projection(pooled), dim=-1).cpu()


@reward(packages={"open_clip": "clip"})
class Hpsv2(TextImageSimilarity):
    """Predicted preference of an image for its prompt, by a tuned ViT-H-14 (HPS v2.1, arXiv 2306.09341).

    The cosine of text and image in a model of open_clip that was tuned to rankings, about 0.2 to 0.35. Of a
    video the first frame counts.

    Args:
        weights: `HPS_v2.1_compressed.pt`: a file, or `owner/name:file` of the hub.
        model: Architecture, by its name in open_clip.
        batch_size: Images or texts in the model at once.
        device: Of the model; `auto` takes the GPU if there is one.
    """

    name = "hpsv2"

    def __init__(
        self,
        *,
        weights: str = "xswu/HPSv2:HPS_v2.1_compressed.pt",
        model: str = "ViT-H-14",
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        try:
            import open_clip
        except ImportError as error:
            raise ImportError("hpsv2 needs open_clip: pip install 'mmrl[clip]'") from error
        self.device, self.batch_size = device_of(device), batch_size
        load = lambda: self._load(model, weights)
        self.model = shared_model(("hpsv2", weights, model, str(self.device)), load)
        settings = open_clip.transform.PreprocessCfg(**self.model.visual.preprocess_cfg)
        self.prepare = open_clip.transform.image_transform_v2(settings, is_train=False)
        self.tokenizer = open_clip.get_tokenizer(model)
        self.max_tokens = self.tokenizer.context_length

    def _load(self, model: str, weights: str) -> nn.Module:
        import open_clip

        path = find_weights("hpsv2", weights)
        try:
            loaded = open_clip.create_model(
                model, pretrained=str(path), precision="fp32", require_pretrained=True, weights_only=True
            )
        except Exception as error:  # open_clip, torch and pickle raise errors of many types
            raise ValueError(
                f"hpsv2: '{path}' does not hold the weights of '{model}' as named tensors, plain or as "
                f"`state_dict`: {' '.join(str(error).split())[:300]}"
            ) from error
        return loaded.eval().requires_grad_(False).to(self.device)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text)) + 2  # and the start and end tokens

    def embed_images(self, images: Sequence[Tensor]) -> Tensor:
        pixels = torch.stack([self.prepare(to_pil(image)) for image in images]).to(self.device)
        return normalize(self.model.encode_image(pixels), dim=-1).cpu()

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        return normalize(self.model.encode_text(self.tokenizer(list(texts)).to(self.device)), dim=-1).cpu()


@reward
class Aesthetic:
    """Predicted aesthetic rating of an image, about 1 to 10 (LAION); the prompt does not matter.

    The predictor `sac+logos+ava1-l14-linearMSE`: linear layers on the embedding of an image by CLIP ViT-L/14,
    at length 1. Of a video the first frame counts.

    Args:
        model: Folder or hub id of the CLIP vision model.
        weights: Of the linear layers: a file, or `owner/name:file` of the hub.
        batch_size: Images in the model at once.
        device: Of the model; `auto` takes the GPU if there is one.
    """

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        weights: str = "trl-lib/ddpo-aesthetic-predictor:aesthetic-model.pth",
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection

        self.device, self.batch_size = device_of(device), batch_size
        load = lambda: load_pretrained("aesthetic", CLIPVisionModelWithProjection, model).to(self.device)
        self.model = shared_model(("aesthetic", model, str(self.device)), load)
        self.processor = CLIPImageProcessor.from_pretrained(model_source(model))
        self.head = LinearHead(self.model.config.projection_dim)
        load_strictly("aesthetic", self.head, read_weights("aesthetic", find_weights("aesthetic", weights)))
        self.head.eval().requires_grad_(False).to(self.device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        ratings = encode_distinct(self._rate, images_of(prompts, outcomes), self.batch_size)
        return [float(rating) for rating in ratings]

    def _rate(self, images: Sequence[Tensor]) -> Tensor:
        inputs = self.processor(images=[to_pil(image) for image in images], return_tensors="pt")
        embedding = self.model(pixel_values=inputs["pixel_values"].to(self.device)).image_embeds
        return self.head(normalize(embedding, dim=-1)).cpu()
