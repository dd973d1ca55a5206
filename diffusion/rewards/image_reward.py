"""The ImageReward model: human preference of an image for its prompt (arXiv 2304.05977)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

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
    load_strictly,
    read_weights,
    shared_model,
    warn_of_truncation,
)
from mmrl.runtime.modules import model_source

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the published head's output
MAX_TOKENS = 35  # of the prompt
HEAD_SIZE = 64  # of every BLIP, in both encoders
MEAN_COLOUR, STD_COLOUR = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@reward
class ImageReward:
    """Predicted preference of an image for its prompt, by BLIP and linear layers (arXiv 2304.05977).

    BLIP reads the prompt with attention to the image, and linear layers score its first token. Standardised:
    0 is average, and it may be negative. Of a video the first frame counts.

    Args:
        weights: `ImageReward.pt`: a file, or `owner/name:file` of the hub. Its names are mapped onto the BLIP
            of transformers; a file with other names is refused.
        tokenizer: Folder or hub id.
        batch_size: Images or prompts in the model at once.
        device: Of the model; `auto` takes the GPU if there is one.
    """

    def __init__(
        self,
        *,
        weights: str = "THUDM/ImageReward:ImageReward.pt",
        tokenizer: str = "bert-base-uncased",
        batch_size: PositiveInt = 16,
        device: str = "auto",
    ) -> None:
        from transformers import AutoTokenizer

        self.device, self.batch_size = device_of(device), batch_size
        self.scorer = shared_model(("image_reward", weights, str(self.device)), lambda: self._load(weights))
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model_source(tokenizer), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"image_reward: cannot load the tokenizer '{tokenizer}': {error}") from error
        if len(self.tokenizer) > self.scorer.vocabulary:
            raise ValueError(
                f"image_reward: the tokenizer '{tokenizer}' has {len(self.tokenizer)} tokens, the weights "
                f"are for {self.scorer.vocabulary}; name the one they were trained with, bert-base-uncased"
            )

    def _load(self, weights: str) -> BlipScorer:
        scorer = BlipScorer(read_weights("image_reward", find_weights("image_reward", weights)))
        return scorer.eval().requires_grad_(False).to(self.device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        texts = [prompt.text for prompt in prompts]
        count_tokens = lambda text: len(self.tokenizer(text, verbose=False).input_ids)
        warn_of_truncation("image_reward", texts, count_tokens, MAX_TOKENS)
        features = encode_distinct(self._encode, images_of(prompts, outcomes), self.batch_size)
        values: list[float] = []
        for at in range(0, len(texts), self.batch_size):
            batch = slice(at, at + self.batch_size)
            values += self._score(texts[batch], torch.stack(features[batch])).tolist()
        return [(value - MEAN) / STD for value in values]

    def _encode(self, images: Sequence[Tensor]) -> Tensor:
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

        size = self.scorer.image_size
        prepare = Compose(
            [
                Resize(size, interpolation=InterpolationMode.BICUBIC),
                CenterCrop(size),
                ToTensor(),
                Normalize(MEAN_COLOUR, STD_COLOUR),
            ]
        )
        pixels = torch.stack([prepare(to_pil(image)) for image in images]).to(self.device)
        return self.scorer.vision(pixel_values=pixels).last_hidden_state

    @torch.no_grad()
    def _score(self, texts: Sequence[str], features: Tensor) -> Tensor:
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self.device)
        return self.scorer(tokens["input_ids"], tokens["attention_mask"], features).double().cpu()


class BlipScorer(nn.Module):
    """BLIP's two encoders and the head, sized by the weights they are made from."""

    def __init__(self, published: Mapping[str, Tensor]) -> None:
        super().__init__()
        from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        state = rename(published)
        vision, text = _sizes(state)
        self.vision = BlipVisionModel(BlipVisionConfig(**vision))
        self.text = BlipTextModel(BlipTextConfig(**text), add_pooling_layer=False)
        self.head = LinearHead(text["hidden_size"])
        self.image_size, self.vocabulary = vision["image_size"], text["vocab_size"]
        load_strictly("image_reward", self, state)

    def forward(self, ids: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        """Score texts (B, S) with the features (B, patches + 1, width) of their images: (B,)."""
        seen = torch.ones(features.shape[:2], dtype=torch.long, device=features.device)
        encoded = self.text(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=features, encoder_attention_mask=seen
        )
        return self.head(encoded.last_hidden_state[:, 0])


# Published name to ours. The encoders are BLIP's; its authors and transformers name the same things.
_NAMES = (
    (r"^mlp\.layers\.", "head.layers."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (
        r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.",
        r"vision.encoder.layers.\1.self_attn.projection.",
    ),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
)
# Projections for a loss of BLIP's own training, and a buffer.
_UNUSED = r"^blip\.(vision_proj|text_proj|itm_head)\.|\.position_ids$"


def rename(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map published tensor names to our modules; an unknown name is an error."""
    renamed = {}
    for name, tensor in published.items():
        if re.search(_UNUSED, name):
            continue
        matches = [re.sub(pattern, ours, name) for pattern, ours in _NAMES if re.match(pattern, name)]
        if not matches:
            raise ValueError(
                f"image_reward: the weights hold '{name}', which ImageReward-v1.0 does not; name its "
                "checkpoint ImageReward.pt"
            )
        renamed[matches[0]] = tensor.float()
    return renamed


def _sizes(state: Mapping[str, Tensor]) -> tuple[dict, dict]:
    """Infer the sizes of both encoders from their weights."""
    try:
        patches = state["vision.embeddings.patch_embedding.weight"]
        positions = state["vision.embeddings.position_embedding"].shape[1] - 1
        words = state["text.embeddings.word_embeddings.weight"]
        vision_mlp = state["vision.encoder.layers.0.mlp.fc1.weight"].shape[0]
        text_mlp = state["text.encoder.layer.0.intermediate.dense.weight"].shape[0]
        max_length = state["text.embeddings.position_embeddings.weight"].shape[0]
    except KeyError as error:
        raise ValueError(
            f"image_reward: the weights do not hold {error}; name the checkpoint ImageReward.pt"
        ) from error
    width, patch, side = patches.shape[0], patches.shape[-1], round(positions**0.5)
    vision = {
        "hidden_size": width,
        "intermediate_size": vision_mlp,
        "num_hidden_layers": _count(state, r"vision\.encoder\.layers\.(\d+)\."),
        "num_attention_heads": width // HEAD_SIZE,
        "image_size": side * patch,
        "patch_size": patch,
        "layer_norm_eps": 1e-6,
    }
    text = {
        "vocab_size": words.shape[0],
        "hidden_size": words.shape[1],
        "encoder_hidden_size": width,
        "intermediate_size": text_mlp,
        "num_hidden_layers": _count(state, r"text\.encoder\.layer\.(\d+)\."),
        "num_attention_heads": words.shape[1] // HEAD_SIZE,
        "max_position_embeddings": max_length,
        "layer_norm_eps": 1e-12,
        "is_decoder": True,  # which adds the layers of cross-attention to the image
    }
    return vision, text


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max(int(match[1]) for name in state if (match := re.match(pattern, name)))
