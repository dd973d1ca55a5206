"""Shared code of image rewards: access to images, checkpoints of scoring models, batched encoding."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.modules import model_source


def frames_of(prompt: Prompt, outcome: Outcome) -> Tensor:
    """Get the frames of an outcome, (F, 3, height, width) uint8; an image is one frame."""
    frames = outcome.video if outcome.image is None else outcome.image[None]
    if frames is None:
        raise ValueError(f"an outcome of prompt '{prompt.uid}' has neither an image nor a video")
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[1] != 3:
        raise ValueError(
            f"images are (3, height, width) uint8, not {tuple(frames.shape[1:])} {frames.dtype} as in an "
            f"outcome of prompt '{prompt.uid}'"
        )
    return frames


def image_of(prompt: Prompt, outcome: Outcome) -> Tensor:
    """Get the image that is scored, (3, height, width) uint8: of a video the first frame."""
    return frames_of(prompt, outcome)[0]


def images_of(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[Tensor]:
    """Get the image that is scored of every outcome."""
    return [image_of(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]


def device_of(name: str) -> torch.device:
    """Resolve a device name; `auto` is the current GPU, or else the CPU."""
    # With its index: rewards run in threads of their own, whose current device is another.
    if name != "auto":
        return torch.device(name)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


@torch.no_grad()
def encode_distinct(
    encode: Callable[[Sequence], Tensor], items: Sequence[Tensor] | Sequence[str], batch_size: int
) -> list[Tensor]:
    """Encode every distinct text or image once, `batch_size` at a time; give one row per item, in order."""
    keys = [item if type(item) is str else _hash(item) for item in items]
    distinct = dict(zip(keys, items, strict=True))
    values = list(distinct.values())
    chunks = [values[at : at + batch_size] for at in range(0, len(values), batch_size)]
    rows = dict(zip(distinct, (row for chunk in chunks for row in encode(chunk)), strict=True))
    return [rows[key] for key in keys]


def _hash(image: Tensor) -> tuple:
    data = image.cpu().contiguous().numpy().tobytes()
    return (*image.shape, hashlib.blake2b(data, digest_size=16).digest())


def warn_of_truncation(reward: str, texts: Sequence[str], count: Callable[[str], int], limit: int) -> None:
    """Warn if a published reward reads only the first `limit` tokens of some prompts."""
    long = sum(count(text) > limit for text in dict.fromkeys(texts))
    if long:
        warnings.warn(
            f"{reward} reads {limit} tokens of a prompt, as it was published; {long} prompts of this round "
            "are longer and were cut",
            stacklevel=2,
        )


def import_function(reward: str, name: str) -> Callable:
    """Import a function by its name `package.module:function`."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{reward} cannot import '{name}', which must read package.module:function: {error}"
        ) from error


# ---- checkpoints


def find_weights(reward: str, name: str) -> Path:
    """Locate a checkpoint: a local path, or `owner/name:file` of the hub."""
    if Path(name).is_file():
        return Path(name)
    repository, colon, file = name.partition(":")
    if not colon or repository.count("/") != 1:
        raise ValueError(f"{reward}: there is no file '{name}'; name a file, or owner/name:file of the hub")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(repository, file))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ValueError(
            f"{reward}: cannot fetch '{file}' of '{repository}': {' '.join(str(error).split())}. Fetch it "
            "once where there is a network, or name a local file"
        ) from error


def read_weights(reward: str, path: Path) -> dict[str, Tensor]:
    """Read named tensors from safetensors or a torch checkpoint, without running code."""
    import pickle

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"{reward}: cannot read '{path}' as named tensors: {' '.join(str(error).split())}. Files that "
            "hold code are refused; store the tensors as safetensors"
        ) from error
    match state:
        case {"state_dict": Mapping() as inner}:
            return dict(inner)
        case Mapping():
            return dict(state)
    raise ValueError(f"{reward}: '{path}' holds a {type(state).__name__}, not named tensors")


def load_strictly(reward: str, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load named tensors into a module; missing, unknown and misshapen ones are errors."""
    wanted = module.state_dict()
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & state.keys())
        if state[name].shape != wanted[name].shape
    ]
    if missing or unknown or shapes:
        raise ValueError(
            f"{reward}: these are other weights: missing {missing[:3] or 'nothing'}, unknown "
            f"{unknown[:3] or 'nothing'}, of another shape {shapes[:3] or 'nothing'}"
        )
    module.load_state_dict(dict(state))


_LOADED: WeakValueDictionary[tuple, Any] = WeakValueDictionary()


def shared_model(key: tuple, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model, or reuse the one of another reward with the same key, as in training and evaluation."""
    model = _LOADED.get(key)
    if model is None:
        model = _LOADED[key] = make()
    return model


def load_pretrained(reward: str, kind: type, name: str) -> nn.Module:
    """Load a frozen model of transformers in float32; a checkpoint that lacks weights is an error."""
    try:
        model, report = kind.from_pretrained(
            model_source(name),
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{reward}: cannot load '{name}': {' '.join(str(error).split())}. Name a local folder, or a "
            "model of the hub"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{reward}: '{name}' does not hold the weights {missing[:3]}")
    return model.eval().requires_grad_(False)


class LinearHead(nn.Module):
    """Scoring head of ImageReward and the aesthetic predictor: five linear layers without activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Dropout has no weights, but its places give the others their published names: 0, 2, 4, 6 and 7.
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, width) features to (B,) scores."""
        return self.layers(features)[:, 0]
