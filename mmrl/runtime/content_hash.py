"""Hashes of the prompts, media and weights that a run reads, equal on any number of processes.

They take seconds at most, and are computed once per start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.types import Media, Prompt

ENDS = 16384  # bytes read at both ends of a media file
CHUNK = 1 << 22  # elements of a tensor that are summed together
STRIDE = 1024  # sums of a chunk


def of_prompts(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Hash prompts as they were read, and the media of prompts and answers.

    A file is hashed by its size and 16 KiB at both ends, and not by its time, which differs between copies of
    a file; media in memory are hashed by their bytes.
    """
    plain = _Plain()
    name = hashlib.sha256()
    for prompt in prompts:
        name.update(plain.text(prompt).encode())
    media = hashlib.sha256("\n".join(plain.media()).encode())
    return {
        "prompts": f"{len(prompts)} prompts, {name.hexdigest()[:16]}",
        "media": f"{len(plain.sources)} media, {media.hexdigest()[:16]}",
    }


class _Plain:
    """Converts any value to JSON, equally in every process, and collects its media."""

    def __init__(self) -> None:
        self.sources: list[Path | bytes | None] = []
        self.known: dict[int, tuple[Any, Any]] = {}  # values that many prompts share are converted once

    def text(self, value: Any) -> str:
        try:
            return json.dumps(value, default=self._plain, sort_keys=True)
        except TypeError:  # keys that JSON lacks, or that cannot be sorted
            return json.dumps(self._keyed(value), default=self._plain)

    def _keyed(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case dict():
                return sorted([self.text(key), self._keyed(inner)] for key, inner in value.items())
            case list() | tuple():
                return [self._keyed(inner) for inner in value]
        return self._keyed(self._plain(value))

    def _plain(self, value: Any) -> Any:
        """Convert a value that JSON lacks."""
        match value:
            case Media():
                self.sources.append(value.source)
                return [value.kind, value.name]
            case Path():
                self.sources.append(value)
                return value.name
            case Tensor():
                return of_tensors([value])
            case bytes() | bytearray():
                return hashlib.sha256(value).hexdigest()
            case AbstractSet():
                return sorted(self.text(member) for member in value)
        if hasattr(value, "tobytes"):  # arrays of numpy, images of PIL
            return [str(getattr(value, "dtype", "")), hashlib.sha256(value.tobytes()).hexdigest()]
        if id(value) not in self.known:
            self.known[id(value)] = value, self._parts(value)
        return self.known[id(value)][1]

    def _parts(self, value: Any) -> Any:
        kind = type(value).__qualname__
        if is_dataclass(value) and not isinstance(value, type):
            return [kind, {field.name: getattr(value, field.name) for field in fields(value)}]
        match value:
            case Mapping():
                return dict(value)
            case Sequence():
                return list(value)
        if callable(value) or hasattr(value, "__dict__"):
            return getattr(value, "__qualname__", kind)
        return kind if type(value).__repr__ is object.__repr__ else repr(value)

    def media(self) -> list[str]:
        """Hash all media, in order; files are read concurrently, each once."""
        files = list(dict.fromkeys(source for source in self.sources if isinstance(source, Path)))
        with ThreadPoolExecutor(16) as pool:
            ends = dict(zip(files, pool.map(_ends, files), strict=True))
        return [
            ends[source] if isinstance(source, Path) else hashlib.sha256(source or b"").hexdigest()
            for source in self.sources
        ]


def _ends(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size, name = file.seek(0, 2), hashlib.sha256()
            for at in (0, max(0, size - ENDS)):
                file.seek(at)
                name.update(file.read(ENDS))
    except OSError as error:
        return type(error).__name__
    return f"{size} {name.hexdigest()}"


# ---- weights


def of_weights(thing: Any, leave: Iterable[Tensor] = ()) -> str:
    """Hash the parameters and saved buffers of a model, or of the models in an object's attributes.

    Tensors in `leave` are left out. Empty where there are none.
    """
    known, tensors = {id(tensor) for tensor in leave}, []
    for tensor in (tensor for model in _models(thing, 3) for tensor in _tensors(model)):
        if id(tensor) not in known:
            known.add(id(tensor))
            tensors.append(tensor)
    return of_tensors(tensors) if tensors else ""


def of_tensors(tensors: Iterable[Tensor]) -> str:
    """Hash the bits of tensors, in any order and on any device, to 64 hexadecimal digits.

    Bits are read as 64-bit integers. Of every `CHUNK` elements, the sums of every `STRIDE`-th integer modulo
    2^64 are hashed. This is as fast as memory, and detects accidents, though not forgery.
    """
    return hashlib.sha256("\n".join(sorted(map(_name, tensors))).encode()).hexdigest()


@torch.no_grad()
def _name(tensor: Tensor) -> str:
    name = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        whole = len(chunk) - len(chunk) % (8 * STRIDE)
        for part in (chunk[:whole], chunk[whole:]):
            if part.storage_offset() * part.itemsize % 8 or len(part) * part.itemsize % (8 * STRIDE):
                part = part.clone().view(torch.uint8)
                part = nn.functional.pad(part, (0, -len(part) % (8 * STRIDE)))
            sums = part.view(torch.int64).view(-1, STRIDE).sum(0).cpu()
            name.update(sums.view(torch.uint8).numpy().data)
    return name.hexdigest()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for owner in model.modules():
        yield from (parameter for parameter in owner._parameters.values() if parameter is not None)
        unsaved = owner._non_persistent_buffers_set
        buffers = owner._buffers.items()
        yield from (buffer for name, buffer in buffers if buffer is not None and name not in unsaved)


def _models(thing: Any, depth: int) -> Iterator[nn.Module]:
    """Find the outermost modules in the attributes of an object."""
    if isinstance(thing, nn.Module):
        yield thing
    elif depth and hasattr(thing, "__dict__"):
        for inner in vars(thing).values():
            yield from _models(inner, depth - 1)
