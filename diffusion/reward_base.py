"""What rewards of pictures have in common: which picture counts, where weights come from, and how they are
read."""

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


def frames_of(prompt: Prompt, outcome: Outcome) -> Tensor:
    """Find the pictures of an outcome: (F, 3, height, width) uint8, one frame where it is a picture."""
    frames = outcome.video if outcome.image is None else outcome.image[None]
    if frames is None:
        raise ValueError(f"an outcome of prompt '{prompt.uid}' has neither a picture nor a clip to look at")
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[1] != 3:
        raise ValueError(
            f"pictures are (3, height, width) uint8, not {tuple(frames.shape[1:])} {frames.dtype} as in an "
            "outcome of "
            f"prompt '{prompt.uid}'"
        )
    return frames


def picture_of(prompt: Prompt, outcome: Outcome) -> Tensor:
    """Find the picture that counts, (3, height, width) uint8: of a clip the first frame."""
    return frames_of(prompt, outcome)[0]


def as_pil(picture: Tensor) -> Any:
    """Hand a picture to Pillow."""
    from PIL import Image

    return Image.fromarray(picture.cpu().permute(1, 2, 0).numpy())


def device_of(name: str) -> torch.device:
    """Read a device, or find one for `auto`."""
    # With its number: rewards run in threads of their own, whose current device is another.
    if name == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    return torch.device(name)


@torch.no_grad()
def once(encode: Callable[[Sequence], Tensor], things: Sequence, batch_size: int) -> list[Tensor]:
    """Encode every distinct text or picture once, `batch_size` at a time, and give the rows in order."""
    names = [_name_of(thing) for thing in things]
    distinct = dict(zip(names, things, strict=True))
    listed = list(distinct.values())
    chunks = [listed[at : at + batch_size] for at in range(0, len(listed), batch_size)]
    rows = dict(zip(distinct, (row for chunk in chunks for row in encode(chunk)), strict=True))
    return [rows[name] for name in names]


def _name_of(thing: Any) -> Any:
    match thing:
        case Tensor():
            data = thing.cpu().contiguous().numpy().tobytes()
            return (*thing.shape, hashlib.blake2b(data, digest_size=16).digest())
    return thing


def warn_of_cuts(reward: str, texts: Sequence[str], count: Callable[[str], int], limit: int) -> None:
    """Say so where a published reward reads only the beginning of a prompt."""
    long = sum(count(text) > limit for text in dict.fromkeys(texts))
    if long:
        warnings.warn(
            f"{reward} reads {limit} tokens of a prompt, as it was published; {long} prompts of this round "
            "are longer "
            "and were cut",
            stacklevel=2,
        )


def imported(reward: str, name: str) -> Callable:
    """Find a function of somebody's module: `package.module:function`."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{reward} cannot import '{name}', which must read package.module:function: {error}"
        ) from error


# ---- weights


def find_weights(reward: str, name: str) -> Path:
    """Find a file: a local path, or `owner/name:file` of the hub."""
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
            "once where "
            "there is a network, or name a local file"
        ) from error


def read_weights(reward: str, path: Path) -> dict[str, Tensor]:
    """Read named tensors from safetensors or a checkpoint of torch, where code is never run."""
    import pickle

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"{reward}: cannot read '{path}' as named tensors: {' '.join(str(error).split())}. Files that "
            "hold code "
            "are refused; store the tensors as safetensors"
        ) from error
    match state:
        case {"state_dict": Mapping() as inner}:
            return dict(inner)
        case Mapping():
            return dict(state)
    raise ValueError(f"{reward}: '{path}' holds a {type(state).__name__}, not named tensors")


def fill(reward: str, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put tensors in their places; every place is filled and none is left over, or it is an error."""
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
            f"{unknown[:3] or 'nothing'}, "
            f"of another shape {shapes[:3] or 'nothing'}"
        )
    module.load_state_dict(dict(state))


_LOADED: WeakValueDictionary[tuple, Any] = WeakValueDictionary()


def shared(key: tuple, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model, or give the one that another reward of the same name holds: that of a training and of its
    evaluation are one."""
    model = _LOADED.get(key)
    if model is None:
        model = make()
        _LOADED[key] = model
    return model


def load_pretrained(reward: str, kind: type, name: str) -> nn.Module:
    """Load a model of transformers in float32; a checkpoint that leaves weights open is an error."""
    try:
        model, report = kind.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{reward}: cannot load '{name}': {' '.join(str(error).split())}. Name a local folder, or a "
            "model of the "
            "hub"
        ) from error
    open_weights = sorted(report["missing_keys"])
    if open_weights:
        raise ValueError(f"{reward}: '{name}' does not hold the weights {open_weights[:3]}")
    return model.eval().requires_grad_(False)


class LinearHead(nn.Module):
    """The head of ImageReward and of the aesthetic predictor: linear layers to 1024, 128, 64, 16 and 1
    numbers, with nothing between them at inference."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (width, 1024, 128, 64, 16, 1)
        linear = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
        # Dropout holds no weights, but its places give the others their published names: 0, 2, 4, 6 and 7.
        self.layers = nn.Sequential(
            linear[0],
            nn.Dropout(0.2),
            linear[1],
            nn.Dropout(0.2),
            linear[2],
            nn.Dropout(0.1),
            linear[3],
            linear[4],
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, width) features to (B,) numbers."""
        return self.layers(features)[:, 0]
