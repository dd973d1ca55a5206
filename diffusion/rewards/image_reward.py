"""The ImageReward model: human preference of an image for its prompt (arXiv 2304.05977)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.plain_text import PlainText
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion import reward_base as base
from mmrl.diffusion.image_io import to_pil
from mmrl.rewards.frames import mean_over_frames
from mmrl.runtime.modules import model_source

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # mean and deviation of the published head's output
MAX_TOKENS = 35  # tokens of the prompt that are read
HEAD_SIZE = 64  # size of an attention head in every BLIP, in both encoders
MEAN_COLOUR, STD_COLOUR = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@reward(inputs=RewardInputs(VISUAL))
class ImageReward:
    """Predicted preference of an image for its prompt, by BLIP and linear layers (arXiv 2304.05977).

    BLIP reads the prompt with attention to the image, and linear layers map the state of the first token to a
    score. It is standardised: 0 is average, and scores below average are negative.

    Args:
        weights: `ImageReward.pt`: a file, or `owner/name:file` of the hub. Its names are mapped onto the BLIP
            of transformers; a file with other names is refused.
        tokenizer: Folder or hub id of the tokenizer.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        batch_size: Number of images or prompts per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    def __init__(
        self,
        *,
        weights: str = "THUDM/ImageReward:ImageReward.pt",
        tokenizer: str = "bert-base-uncased",
        frames: PositiveInt = 8,
        batch_size: PositiveInt = 16,
        device: str = "auto",
    ) -> None:
        from transformers import AutoTokenizer

        self.frames = frames
        load = lambda: BlipScorer(base.read_weights("image_reward", weights))
        self.model, self.batch_size = base.shared_model("image_reward", device, load, weights), batch_size
        with base.explained(f"image_reward: cannot load the tokenizer '{tokenizer}'"):
            self.tokenizer = AutoTokenizer.from_pretrained(model_source(tokenizer), trust_remote_code=False)
        self.plain = PlainText(self.tokenizer)
        if len(self.tokenizer) > self.model.vocabulary:
            raise ValueError(
                f"image_reward: the tokenizer '{tokenizer}' has {len(self.tokenizer)} tokens, the weights "
                f"are for {self.model.vocabulary}; name the one they were trained with, bert-base-uncased"
            )

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames)

    @torch.no_grad()
    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""
        texts = [prompt.text for prompt in prompts]
        count_tokens = lambda text: len(self.plain.batch([text], verbose=False)["input_ids"][0])
        base.warn_of_truncation("image_reward", texts, count_tokens, MAX_TOKENS)
        features = base.encode_distinct(self.encode, base.images_of(prompts, outcomes), self.batch_size)
        padding = {"padding": "max_length", "truncation": True, "max_length": MAX_TOKENS}
        values: list[float] = []
        for at in range(0, len(texts), self.batch_size):
            batch = slice(at, at + self.batch_size)
            tokens = self.plain.batch(texts[batch], return_tensors="pt", **padding).to(self.model.device)
            scores = self.model(tokens["input_ids"], tokens["attention_mask"], torch.stack(features[batch]))
            values += scores.double().tolist()
        return [(value - MEAN) / STD for value in values]

    def encode(self, images: Sequence[Tensor]) -> Tensor:
        """Encode images to features (B, patches + 1, width)."""
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

        size = self.model.image_size
        resize = Resize(size, interpolation=InterpolationMode.BICUBIC)
        prepare = Compose([resize, CenterCrop(size), ToTensor(), Normalize(MEAN_COLOUR, STD_COLOUR)])
        pixels = torch.stack([prepare(to_pil(image)) for image in images]).to(self.model.device)
        return self.model.vision(pixel_values=pixels).last_hidden_state


class BlipScorer(nn.Module):
    """BLIP's two encoders and the head; the published weights determine their sizes."""

    def __init__(self, published: Mapping[str, Tensor]) -> None:
        super().__init__()
        from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        state = rename(published)
        with base.explained("image_reward: these are not the weights of ImageReward.pt", errors=(KeyError,)):
            patches = state["vision.embeddings.patch_embedding.weight"]  # (width, 3, patch, patch)
            num_patches = state["vision.embeddings.position_embedding"].shape[1] - 1  # without class token
            self.vocabulary, text_width = state["text.embeddings.word_embeddings.weight"].shape
            max_length = len(state["text.embeddings.position_embeddings.weight"])
            vision_mlp = len(state["vision.encoder.layers.0.mlp.fc1.weight"])
            text_mlp = len(state["text.encoder.layer.0.intermediate.dense.weight"])
        layers = [re.match(r"(vision|text)\.encoder\.layers?\.(\d+)\.", name) for name in state]
        depth = lambda part: 1 + max(int(match[2]) for match in layers if match and match[1] == part)
        width, patch = patches.shape[0], patches.shape[-1]
        self.image_size = round(num_patches**0.5) * patch
        vision = BlipVisionConfig(
            hidden_size=width,
            intermediate_size=vision_mlp,
            num_hidden_layers=depth("vision"),
            num_attention_heads=width // HEAD_SIZE,
            image_size=self.image_size,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        text = BlipTextConfig(
            vocab_size=self.vocabulary,
            hidden_size=text_width,
            encoder_hidden_size=width,
            intermediate_size=text_mlp,
            num_hidden_layers=depth("text"),
            num_attention_heads=text_width // HEAD_SIZE,
            max_position_embeddings=max_length,
            layer_norm_eps=1e-12,
            is_decoder=True,  # adds the cross-attention layers that read the image
        )
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        self.head = base.LinearHead(text_width)
        with base.explained("image_reward: these are not the weights of ImageReward.pt"):
            self.load_state_dict(state)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.vision.device

    def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        """Score texts (B, tokens) given the features (B, patches + 1, width) of their images: (B,)."""
        seen = torch.ones(features.shape[:2], dtype=torch.long, device=features.device)
        encoded = self.text(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=features, encoder_attention_mask=seen
        )
        return self.head(encoded.last_hidden_state[:, 0])  # at the first token, [CLS]


# Patterns that map the tensor names of BLIP's authors to the equivalent names of transformers.
BLOCK, LAYER = r"^blip\.visual_encoder\.blocks\.(\d+)\.", r"vision.encoder.layers.\1."
NAMES = (
    (r"^mlp\.layers\.", "head.layers."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (BLOCK + r"norm([12])\.", LAYER + r"layer_norm\2."),
    (BLOCK + r"attn\.qkv\.", LAYER + "self_attn.qkv."),
    (BLOCK + r"attn\.proj\.", LAYER + "self_attn.projection."),
    (BLOCK + r"mlp\.", LAYER + "mlp."),
)
# Not needed: projections for BLIP's pre-training losses, and a buffer.
UNUSED = r"^blip\.(vision_proj|text_proj|itm_head)\.|\.position_ids$"


def rename(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename published tensors to the names in `BlipScorer`; raises ValueError for an unknown name."""
    renamed = {}
    for name, tensor in published.items():
        if re.search(UNUSED, name):
            continue
        matches = [re.sub(pattern, ours, name) for pattern, ours in NAMES if re.match(pattern, name)]
        if not matches:
            raise ValueError(
                f"image_reward: the weights hold '{name}', which ImageReward-v1.0 does not; name its "
                "checkpoint ImageReward.pt"
            )
        renamed[matches[0]] = tensor.float()
    return renamed
