"""CLIP and SigLIP models of open_clip, shared by rewards and retrieval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmrl.config.loading import nearest
from mmrl.core import plain_text
from mmrl.runtime.modules import reward_device

CONFIG = "open_clip_config.json"


@dataclass
class Towers:
    """The two encoders of a CLIP model, with their image preprocessing and tokenizer."""

    model: Any
    prepare: Callable[[Any], Tensor]
    tokenizer: Any
    device: torch.device

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.length = self.tokenizer.context_length
        inner = getattr(self.tokenizer, "tokenizer", None)  # None for open_clip's tokenizer
        self.words = plain_text.control_words(inner) if inner else plain_text.OPEN_CLIP
        self.factor = float(self.model.logit_scale.exp())  # logits are factor * cosine + bias (SigLIP)
        bias = self.model.logit_bias
        self.bias = None if bias is None else float(bias)

    def fits(self, text: str) -> bool:
        """Whether the model reads a text without truncation."""
        text = plain_text.parted(text, self.words)
        short, long = (self.tokenizer([text], context_length=self.length + more)[0] for more in (0, 1))
        # Tokenize with a longer context: if the next token is a word, the text would be truncated.
        return bool((short == long[: self.length]).all())

    @torch.no_grad()
    def look(self, images: Sequence[Tensor]) -> Tensor:
        """Encode images to unit vectors (images, dimensions) in float32."""
        from PIL import Image

        pixels = [self.prepare(Image.fromarray(image.cpu().permute(1, 2, 0).numpy())) for image in images]
        return normalize(self.model.encode_image(torch.stack(pixels).to(self.device)).float(), dim=-1).cpu()

    @torch.no_grad()
    def read(self, texts: Sequence[str]) -> Tensor:
        """Encode texts to unit vectors (texts, dimensions) in float32."""
        texts = [plain_text.parted(text, self.words) for text in texts]
        ids = self.tokenizer(texts, context_length=self.length).to(self.device)
        return normalize(self.model.encode_text(ids).float(), dim=-1).cpu()


# Rewards that use the same model share one copy, e.g. the rewards of a training and of its evaluation.
_LOADED: WeakValueDictionary[tuple, Towers] = WeakValueDictionary()


def load_towers(model: str, pretrained: str | None, device: str) -> Towers:
    """Load a model in float32, or return the copy that is already loaded; missing weights are an error."""
    device = reward_device(device)
    key = (model, pretrained, device)
    towers = _LOADED.get(key)
    if towers is None:
        towers = _LOADED[key] = _load(model, pretrained, torch.device(device))
    return towers


def _load(model: str, pretrained: str | None, device: torch.device) -> Towers:
    try:
        import open_clip
    except ImportError as error:
        raise ImportError("clip_score needs open_clip: pip install 'mmrl[clip]'") from error
    # Names of model and weights for open_clip; `weights` is None if the files of the model include weights.
    name, weights = model.removeprefix("local-dir:"), None
    architectures = [name.lower() for name in open_clip.list_models()]
    if name.startswith("hf-hub:") or Path(name).is_dir():
        if pretrained is not None:
            raise ValueError(
                f"'{model}' brings its own weights; leave out `pretrained`, which is '{pretrained}'"
            )
        name = name if name.startswith("hf-hub:") else f"local-dir:{name}"
    elif name.replace("/", "-").lower() in architectures:
        weights = pretrained or "openai"
    else:
        hint = nearest(name.lower(), architectures) or f"a folder holds {CONFIG} and weights"
        raise ValueError(
            f"clip_score: '{model}' is neither a folder nor an architecture of open_clip; {hint}"
        )
    # Build the model with QuickGELU if its weights were trained with it; open_clip would only warn.
    settings = open_clip.get_pretrained_cfg(name, weights) if weights else {}
    try:
        loaded, _, prepare = open_clip.create_model_and_transforms(
            name,
            pretrained=weights,
            precision="fp32",
            device=device,
            force_quick_gelu=bool(settings.get("quick_gelu")),
            require_pretrained=True,  # otherwise it only warns, and the weights are random
            weights_only=True,  # so that a pickled file cannot run code
        )
        return Towers(loaded, prepare, open_clip.get_tokenizer(name), device)
    # Catch all: open_clip, the hub and torch raise many types of errors for an unusable model.
    except Exception as error:
        raise ValueError(
            f"clip_score cannot load '{model}'"
            + (f" with the weights '{weights}'" if weights else "")
            + f": {error}. "
            "Name an architecture of open_clip with a tag or a file as `pretrained`, a folder that holds "
            f"{CONFIG} and weights, or hf-hub:owner/name"
        ) from error
