"""Hashes of a run's prompts, media and weights, which do not depend on the number of processes.

They are computed once, when a run starts, within seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mmrl.core.types import Media, Prompt, Readable
from mmrl.runtime.fsdp import full

ENDS = 16384  # bytes read at each end of a media file
PROMPTS = 1024  # prompts hashed at a time
CHUNK = 1 << 22  # elements of a tensor per checksum
STRIDE = 1024  # sums per chunk
LATER = {"size", "tools", "asked", "turns"}  # fields of prompts and messages that old versions lack


def of_prompts(prompts: Sequence[Prompt], *, named: bool = True) -> dict[str, str]:
    """Return a hash of all prompt texts (with their uids if `named`) and a hash of their media.

    A media file is hashed by its size and 16 KiB at each end, media in memory by all their bytes.
    """
    texts, media, count = hashlib.sha256(), hashlib.sha256(), 0
    file_hashes: dict[Path, str] = {}  # several prompts may share a file
    left = iter(prompts)
    with ThreadPoolExecutor(16) as pool:  # threads, because reading waits for disk or network
        while some := list(islice(left, PROMPTS)):  # `left` may build prompts lazily
            sources: list[Path | bytes | Readable | None] = []
            for prompt in some:
                texts.update(_text(prompt if named else replace(prompt, uid=""), sources).encode())
            distinct = [source for source in dict.fromkeys(sources) if source not in file_hashes]
            hashes = dict(zip(distinct, pool.map(_of_source, distinct), strict=True))
            file_hashes |= {source: digest for source, digest in hashes.items() if isinstance(source, Path)}
            for source in sources:
                digest = file_hashes[source] if isinstance(source, Path) else hashes[source]
                media.update((f"\n{digest}" if count else digest).encode())
                count += 1
    return {
        "prompts": f"{len(prompts)} prompts, {texts.hexdigest()[:16]}",
        "media": f"{count} media, {media.hexdigest()[:16]}",
    }


def _of_source(source: Path | bytes | Readable | None) -> str:
    """Hash one media source: the size and both ends of a file, or all bytes in memory."""
    match source:
        case Path():
            try:
                with source.open("rb") as file:
                    size, ends = file.seek(0, 2), hashlib.sha256()
                    for at in (0, max(0, size - ENDS)):  # the ends of a short file overlap
                        file.seek(at)
                        ends.update(file.read(ENDS))
            except OSError as error:
                return type(error).__name__  # not the message, which has the path
            return f"{size} {ends.hexdigest()}"
        case object(read=read):
            return hashlib.sha256(read()).hexdigest()
    return hashlib.sha256(source or b"").hexdigest()


def of_file(path: Path) -> str:
    """Return the SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(paths: Iterable[Path]) -> str:
    """Hash the names and contents of files (SHA-256), including all files inside of folders."""
    content = hashlib.sha256()
    for path in paths:
        for inner in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if inner.is_file():
                content.update(f"{inner.relative_to(path.parent)} {of_file(inner)}\n".encode())
    return content.hexdigest()


def _text(value: Any, sources: list) -> str:
    """Serialise any value as JSON that is equal in every process; append its media sources to `sources`."""

    def keyed(value: Any) -> Any:
        """Convert mappings to sorted key-value pairs, because JSON keys can only be strings."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case dict():
                return sorted([_text(key, sources), keyed(inner)] for key, inner in value.items())
            case list() | tuple():
                return [keyed(inner) for inner in value]
        return keyed(_plain(value, sources))

    default = partial(_plain, sources=sources)
    try:
        return json.dumps(value, default=default, sort_keys=True)
    except TypeError:
        return json.dumps(keyed(value), default=default)


def _plain(value: Any, sources: list) -> Any:
    """Convert the outermost level of a value to JSON types; append its media sources to `sources`."""
    kind = type(value).__qualname__
    match value:
        case Media():
            sources.append(value.source)
            return [value.kind, value.name]
        case Path():
            sources.append(value)
            return value.name
        case Tensor():
            return of_tensors([value])
        case bytes() | bytearray():
            return hashlib.sha256(value).hexdigest()
        case AbstractSet():
            return sorted(_text(member, sources) for member in value)  # sets are unordered
        case type():
            return value.__qualname__
        case object(tobytes=tobytes):  # numpy arrays, PIL images
            return [str(getattr(value, "dtype", "")), hashlib.sha256(tobytes()).hexdigest()]
        case _ if is_dataclass(value):
            held = {field.name: getattr(value, field.name) for field in fields(value)}
            # Leave out unset fields of `LATER`: prompts then keep the hash that older versions computed.
            return [kind, {name: inner for name, inner in held.items() if name not in LATER or inner}]
        case Mapping():
            return dict(value)
        case Sequence():
            return list(value)
        case object(__qualname__=name):  # functions and methods
            return name
        case object(__dict__=_) | Callable():
            return kind
    # `object.__repr__` shows an address, which differs between processes.
    return kind if type(value).__repr__ is object.__repr__ else repr(value)


# ---- weights


def of_weights(thing: Any, leave: Iterable[Tensor] = ()) -> str:
    """Hash the parameters and saved buffers of a model, or of the models in an object's attributes.

    Tensors in `leave` and fake tensors, which have no data, are left out. Returns "" if no tensor remains.
    """
    left_out = {id(tensor) for tensor in leave}
    tensors: dict[int, Tensor] = {}  # by id, so that a shared tensor counts once
    for owner in (owner for model in _models(thing, 3) for owner in model.modules()):
        saved = {k: v for k, v in owner._buffers.items() if k not in owner._non_persistent_buffers_set}
        for tensor in (*owner._parameters.values(), *saved.values()):
            if tensor is not None and id(tensor) not in left_out and not isinstance(tensor, FakeTensor):
                tensors[id(tensor)] = tensor
    return of_tensors(tensors.values()) if tensors else ""


def _models(thing: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the outermost modules in the attributes of an object, searching `depth` levels."""
    match thing:
        case nn.Module():
            yield thing
        case object(__dict__=attributes) if depth:
            for inner in attributes.values():
                yield from _models(inner, depth - 1)


def of_tensors(tensors: Iterable[Tensor]) -> str:
    """Hash the bits of tensors to 64 hexadecimal digits, whatever their order and device.

    The bits are read as 64-bit integers. In each chunk of `CHUNK` elements, integers at a distance of
    `STRIDE` are summed modulo 2^64, and these sums are hashed. This runs at memory speed. It detects
    accidental changes, not deliberate ones. Every process must call it, since shards are gathered in turn.
    """
    return hashlib.sha256("\n".join(sorted(map(_of_tensor, tensors))).encode()).hexdigest()


@torch.no_grad()
def _of_tensor(tensor: Tensor) -> str:
    bits = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for chunk in full(tensor.detach()).reshape(-1).split(CHUNK):
        whole = len(chunk) - len(chunk) % (8 * STRIDE)  # whole rows of STRIDE 64-bit integers
        for part in (chunk[:whole], chunk[whole:]):
            # View aligned memory as 64-bit integers; copy and pad other memory.
            if part.storage_offset() * part.itemsize % 8 or len(part) * part.itemsize % (8 * STRIDE):
                part = part.clone().view(torch.uint8)
                part = nn.functional.pad(part, (0, -len(part) % (8 * STRIDE)))
            # Integer sums wrap around and do not depend on the order, so they are equal on every device.
            sums = part.view(torch.int64).view(-1, STRIDE).sum(0).cpu()
            bits.update(sums.view(torch.uint8).numpy().data)
    return bits.hexdigest()
