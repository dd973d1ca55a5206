"""Disk cache of encoded prompts, shared by runs and processes, to avoid loading text encoders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.diffusion.model_family import Condition
from mmrl.runtime.content_hash import of_file
from mmrl.runtime.files import replacing
from mmrl.runtime.modules import model_source

ENDS = 4096  # bytes that are hashed at each end of a tensor
READ = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")  # files of encoders and tokenizers


class DamagedFile(ConfigError):
    """Error for a cached file of an encoded prompt that cannot be read."""

    ends_run = True  # an error of the folder, not of a row that could be dropped


class EncodedPrompts:
    """Disk cache of conditions (encoded prompts): one safetensors file each, named by its key's hash.

    Args:
        folder: Folder with a subfolder for every pipeline, named by the hash of `identity`.
        identity: JSON value of all settings that affect the encoding of every prompt.
    """

    def __init__(self, folder: str, identity: Any) -> None:
        self.folder = Path(folder).expanduser() / _hash(identity)[:16]

    @classmethod
    def at(
        cls, folder: str, model: str, parts: Mapping[str, Any], networks: Collection[str], dtype: str
    ) -> EncodedPrompts | None:
        """Open the cache of a pipeline's encoded prompts in `folder`; None if `folder` is empty.

        Args:
            folder: Folder that can hold the caches of several pipelines.
            model: Hub id or folder of the pipeline.
            parts: Configuration of the pipeline (`model_index.json`).
            networks: Names of the generating networks, whose weights do not affect the encoding.
            dtype: Dtype of the encoders.
        """
        check_usable(folder, model)
        return cls(folder, [encoders(model, parts, networks), dtype, _versions()]) if folder else None

    def file(self, key: Any) -> Path:
        """Return the file path for a key, which is a JSON value."""
        return self.folder / f"{_hash(key)[:32]}.safetensors"

    def get(self, key: Any, encode: Callable[[], Condition]) -> Condition:
        """Read the condition of a key from its file; without a file, call `encode` and write the result.

        Raises `DamagedFile` if the file cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        file = self.file(key)
        try:
            if file.is_file():
                return load_file(file)
        except (SafetensorError, OSError) as error:
            raise DamagedFile(
                f"cannot read the encoded prompt '{file}': {error}; delete the file, so that it is made anew"
            ) from error
        condition = encode()
        with replacing(file, f"{uuid4().hex}.tmp") as temporary:
            save_file({name: value.contiguous().clone() for name, value in condition.items()}, temporary)
        return condition


def encoders(model: str, parts: Mapping[str, Any], networks: Collection[str]) -> dict[str, Any]:
    """Return the configuration and file hashes of a pipeline's encoders (not `networks` and scheduler).

    The hash of a weight file covers its header and both ends of every tensor. Hub models are downloaded.
    """
    unread = {*networks, "scheduler", "_diffusers_version"}
    shaping = {name: value for name, value in parts.items() if name not in unread}
    names = [name for name, origin in shaping.items() if type(origin) is list]
    folder = Path(source := model_source(model))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, allow_patterns=[f"{n}/{r}" for n in names for r in READ]))
    files = sorted(file for name in names for form in READ for file in (folder / name).glob(form))
    hashes = {
        str(file.relative_to(folder)): _of_weights(file) if file.suffix == ".safetensors" else of_file(file)
        for file in files
    }
    return {"pipeline": shaping, "files": hashes}


def check_usable(folder: str, model: str) -> None:
    """Raise `ConfigError` if `folder` is a file, or `model` is a pipeline object in memory."""
    if folder and objects.is_object(model):
        raise ConfigError("`encoded_prompts` needs a `model` that is a folder or a model of the hub")
    if folder and Path(folder).expanduser().is_file():
        raise ConfigError(f"`encoded_prompts` is '{folder}', a file; name a folder, which need not exist")


def digest(image: Tensor) -> str:
    """Hash the shape and pixels of an image."""
    shape = repr(tuple(image.shape)).encode()
    return hashlib.blake2b(image.numpy().tobytes(), person=shape[:16]).hexdigest()


def _of_weights(file: Path) -> str:
    """Hash the header of a safetensors file, and both ends of every tensor."""
    with file.open("rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
        digest, first = hashlib.sha256(header), opened.tell()
        for name, tensor in json.loads(header).items():
            start, end = tensor.get("data_offsets", (0, 0)) if name != "__metadata__" else (0, 0)
            for at in (start, max(start, end - ENDS)):
                opened.seek(first + at)
                digest.update(opened.read(min(ENDS, end - at)))
    return digest.hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _versions() -> list[str]:
    """Return the versions of diffusers and transformers, which affect encoded prompts."""
    import diffusers
    import transformers

    return [diffusers.__version__, transformers.__version__]
