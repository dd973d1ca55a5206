"""Shared code of image rewards: access to images, loading of scoring models, batched encoding."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mmrl.config.registry import import_name
from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.modules import model_source
from mmrl.runtime.weights import load_whole

# Weak references to shared models, which are freed with the last reward that uses them.
_LOADED: WeakValueDictionary[tuple[str, ...], nn.Module] = WeakValueDictionary()


def frames_of(prompt: Prompt, outcome: Outcome) -> Tensor:
    """Return the frames of an outcome, (F, 3, height, width) uint8; an image is one frame."""
    frames = outcome.video if outcome.image is None else outcome.image[None]
    if frames is None:
        raise ValueError(f"an outcome of prompt '{prompt.uid}' has neither an image nor a video")
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[1] != 3:
        raise ValueError(
            f"images are (3, height, width) uint8, not {tuple(frames.shape[1:])} {frames.dtype} as in an "
            f"outcome of prompt '{prompt.uid}'"
        )
    return frames


def images_of(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[Tensor]:
    """Return the image of each outcome, (3, height, width) uint8; outcomes must be images."""
    return [frames_of(prompt, outcome)[0] for prompt, outcome in zip(prompts, outcomes, strict=True)]


@torch.no_grad()
def encode_distinct(
    encode: Callable[[Sequence], Tensor], items: Sequence[Tensor] | Sequence[str], batch_size: int
) -> list[Tensor]:
    """Encode every distinct text or image once, in batches; returns one row per item, in order."""
    digest = lambda image: hashlib.blake2b(image.cpu().numpy().tobytes(), digest_size=16).digest()
    # The key includes the shape: images of different shapes may have the same bytes.
    keys = [item if type(item) is str else (item.shape, digest(item)) for item in items]
    distinct = dict(zip(keys, items, strict=True))
    values = list(distinct.values())
    chunks = [values[at : at + batch_size] for at in range(0, len(values), batch_size)]
    rows = dict(zip(distinct, (row for chunk in chunks for row in encode(chunk)), strict=True))
    return [rows[key] for key in keys]


def warn_of_truncation(reward: str, texts: Sequence[str], count: Callable[[str], int], limit: int) -> None:
    """Warn if a reward with a published limit of tokens truncates some prompts."""
    if long := sum(count(text) > limit for text in dict.fromkeys(texts)):
        warnings.warn(
            f"{reward} reads {limit} tokens of a prompt, as it was published; {long} prompts of this round "
            "are longer and were cut",
            stacklevel=2,
        )


# ---- loading


@contextmanager
def explained(
    problem: str, cure: str = "", errors: tuple = (OSError, ValueError, RuntimeError)
) -> Iterator[None]:
    """Convert errors of libraries to a `ValueError` that names the problem and what to do."""
    try:
        yield
    except errors as error:
        reason = " ".join(str(error).split())[:500]  # cut, because torch lists every missing name
        raise ValueError(f"{problem}: {reason}" + (f". {cure}" if cure else "")) from error


def import_function(reward: str, name: str) -> Callable:
    """Import a function by its name `package.module:function`."""
    problem = f"{reward} cannot import '{name}', which must read package.module:function"
    with explained(problem, errors=(ImportError, AttributeError, ValueError)):
        return import_name(name)


def find_weights(reward: str, name: str) -> Path:
    """Return the path of a checkpoint: a local file, or `owner/name:file`, downloaded from the hub."""
    if Path(name).is_file():
        return Path(name)
    repository, colon, file = name.partition(":")
    if not colon or repository.count("/") != 1:
        raise ValueError(f"{reward}: there is no file '{name}'; name a file, or owner/name:file of the hub")
    from huggingface_hub import hf_hub_download

    cure = "Fetch it once where there is a network, or name a local file"
    with explained(f"{reward}: cannot fetch '{file}' of '{repository}'", cure):
        return Path(hf_hub_download(repository, file))


def read_weights(reward: str, name: str | Path) -> dict[str, Tensor]:
    """Read named tensors from safetensors or a torch checkpoint, without running code; see `find_weights`."""
    from safetensors.torch import load_file

    path = find_weights(reward, str(name))
    errors = (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError)
    cure = "Files that hold code are refused; store the tensors as safetensors"
    with explained(f"{reward}: cannot read '{path}' as named tensors", cure, errors):
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    match state:
        case {"state_dict": Mapping() as inner}:
            return dict(inner)
        case Mapping():
            return dict(state)
    raise ValueError(f"{reward}: '{path}' holds a {type(state).__name__}, not named tensors")


def load_pretrained(reward: str, kind: type, name: str) -> nn.Module:
    """Load a transformers model in float32; raises if the checkpoint lacks weights."""
    with explained(f"{reward}: cannot load '{name}'", "Name a local folder, or a model of the hub"):
        return load_whole(kind, model_source(name), dtype=torch.float32, trust_remote_code=False)


def shared_model(reward: str, device: str, make: Callable[[], nn.Module], *key: str) -> nn.Module:
    """Return the frozen model for `key` and `device`; `make` is called once for all rewards that share it.

    The device `auto` is the current GPU, or else the CPU.
    """
    if device == "auto":
        # Give the GPU an index: rewards run in threads, whose current device may differ.
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    key = (reward, *key, device)
    model = _LOADED.get(key)
    if model is None:
        model = _LOADED[key] = make().eval().requires_grad_(False).to(device)
    return model


class LinearHead(nn.Module):
    """Scoring head of ImageReward and the aesthetic predictor: five linear layers without activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # The published layer numbers also count dropout layers, which have no weights.
        sizes = {"0": (width, 1024), "2": (1024, 128), "4": (128, 64), "6": (64, 16), "7": (16, 1)}
        self.layers = nn.Sequential(OrderedDict((name, nn.Linear(*size)) for name, size in sizes.items()))

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, width) features to (B,) scores."""
        return self.layers(features)[:, 0]
