"""ImageReward (arXiv 2304.05977)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import (
    LinearHead,
    as_pil,
    device_of,
    fill,
    find_weights,
    once,
    picture_of,
    read_weights,
    shared,
    warn_of_cuts,
)

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the published head's output
TOKENS = 35  # of the prompt
HEAD_SIZE = 64  # of every BLIP, in both encoders
MEAN_COLOUR, STD_COLOUR = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@reward
class ImageReward:
    """Predict how people rate a picture for its prompt: a BLIP reads the prompt while looking at the
    picture, and linear layers score its first token (arXiv 2304.05977). Standardised: 0 is average, and it
    may be negative.

    `weights` is `ImageReward.pt`, a file or `owner/name:file` of the hub; its names are mapped onto the BLIP
    of transformers, and a file with others is refused. `tokenizer` is a folder or a model of the hub. Of a
    clip the first frame counts.
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
        self.judge = shared(("image_reward", weights, str(self.device)), lambda: self._load(weights))
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"image_reward: cannot load the tokenizer '{tokenizer}': {error}") from error
        if len(self.tokenizer) > self.judge.vocabulary:
            raise ValueError(
                f"image_reward: the tokenizer '{tokenizer}' has {len(self.tokenizer)} tokens, the weights "
                "are for "
                f"{self.judge.vocabulary}; name the one they were trained with, bert-base-uncased"
            )

    def _load(self, weights: str) -> Judge:
        judge = Judge(read_weights("image_reward", find_weights("image_reward", weights)))
        return judge.eval().requires_grad_(False).to(self.device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        texts = [prompt.text for prompt in prompts]
        warn_of_cuts(
            "image_reward", texts, lambda text: len(self.tokenizer(text, verbose=False).input_ids), TOKENS
        )
        pictures = [picture_of(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        looks = once(self._look, pictures, self.batch_size)
        values: list[float] = []
        for at in range(0, len(texts), self.batch_size):
            cut = slice(at, at + self.batch_size)
            values += self._read(texts[cut], torch.stack(looks[cut])).tolist()
        return [(value - MEAN) / STD for value in values]

    def _look(self, pictures: Sequence[Tensor]) -> Tensor:
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

        size = self.judge.image_size
        prepare = Compose(
            [
                Resize(size, interpolation=InterpolationMode.BICUBIC),
                CenterCrop(size),
                ToTensor(),
                Normalize(MEAN_COLOUR, STD_COLOUR),
            ]
        )
        pixels = torch.stack([prepare(as_pil(picture)) for picture in pictures])
        return self.judge.look(pixels.to(self.device))

    @torch.no_grad()
    def _read(self, texts: Sequence[str], looks: Tensor) -> Tensor:
        given = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.device)
        return self.judge(given["input_ids"], given["attention_mask"], looks).double().cpu()


class Judge(nn.Module):
    """BLIP's two encoders and the head, of the size of the weights they are made from."""

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
        fill("image_reward", self, state)

    def look(self, pixels: Tensor) -> Tensor:
        """Encode pictures: (B, patches + 1, width)."""
        return self.vision(pixel_values=pixels).last_hidden_state

    def forward(self, ids: Tensor, mask: Tensor, looks: Tensor) -> Tensor:
        """Judge pictures by texts (B, S): (B,)."""
        seen = torch.ones(looks.shape[:2], dtype=torch.long, device=looks.device)
        read = self.text(
            input_ids=ids, attention_mask=mask, encoder_hidden_states=looks, encoder_attention_mask=seen
        )
        return self.head(read.last_hidden_state[:, 0])


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
    """Give published tensors the names of our modules; a name that is not known is an error."""
    renamed = {}
    for name, tensor in published.items():
        if re.search(_UNUSED, name):
            continue
        found = [re.sub(pattern, ours, name) for pattern, ours in _NAMES if re.match(pattern, name)]
        if not found:
            raise ValueError(
                f"image_reward: the weights hold '{name}', which ImageReward-v1.0 does not; name its "
                "checkpoint "
                "ImageReward.pt"
            )
        renamed[found[0]] = tensor.float()
    return renamed


def _sizes(state: Mapping[str, Tensor]) -> tuple[dict, dict]:
    """Read the sizes of both encoders off their weights."""
    try:
        patches = state["vision.embeddings.patch_embedding.weight"]
        places = state["vision.embeddings.position_embedding"].shape[1] - 1
        words = state["text.embeddings.word_embeddings.weight"]
        wide = state["vision.encoder.layers.0.mlp.fc1.weight"].shape[0]
        deep = state["text.encoder.layer.0.intermediate.dense.weight"].shape[0]
        long = state["text.embeddings.position_embeddings.weight"].shape[0]
    except KeyError as error:
        raise ValueError(
            f"image_reward: the weights do not hold {error}; name the checkpoint ImageReward.pt"
        ) from error
    width, patch, side = patches.shape[0], patches.shape[-1], round(places**0.5)
    vision = {
        "hidden_size": width,
        "intermediate_size": wide,
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
        "intermediate_size": deep,
        "num_hidden_layers": _count(state, r"text\.encoder\.layer\.(\d+)\."),
        "num_attention_heads": words.shape[1] // HEAD_SIZE,
        "max_position_embeddings": long,
        "layer_norm_eps": 1e-12,
        "is_decoder": True,  # which makes the layers that look at the picture
    }
    return vision, text


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in state if (found := re.match(pattern, name)))
