"""The kinds of media in prompts: images, videos, sounds. A new kind is one entry in `MODALITIES`.

An entry names the loader of files and the arguments of a model's processor. The model families
(`mmrl.vision.models.model_families`) count the features of media and set the positions of their tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from mmrl.core.types import Media


@dataclass(frozen=True)
class Late:
    """A function, given as `module:function`; the module is imported at the first call.

    `MODALITIES` is in the lowest layer of the package, so it cannot import functions of higher layers.
    """

    name: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return resolve_name(self.name)(*args, **options)


def digest_tensors(kind: str, loaded: Any) -> bytes:
    """Hash all fields of a dataclass: dtype, shape and values of tensors, and the repr of other fields."""
    import torch  # commands that print texts start without it

    digest = hashlib.blake2b(kind.encode())
    for item in (getattr(loaded, field.name) for field in fields(loaded)):
        is_tensor = isinstance(item, torch.Tensor)
        digest.update(repr((item.dtype, item.shape) if is_tensor else item).encode())
        if is_tensor:
            digest.update(item.flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def digest_frames(kind: str, loaded: Any) -> bytes:
    """Hash `Frames`: pixels, times and duration, and the sound if there is one."""
    digest = hashlib.blake2b(repr((kind, loaded.pixels.shape, loaded.duration)).encode())
    for tensor in (loaded.pixels, loaded.times):
        digest.update(tensor.contiguous().numpy())
    if loaded.sound is not None:
        digest.update(digest_tensors("audio", loaded.sound))
    return digest.digest()


def no_chat_parts(loaded: Any) -> list[dict[str, Any]]:
    """Raise ValueError: OpenAI's form has no parts for this kind of media."""
    raise ValueError("chat completions take text, images, videos and sounds only")


@dataclass(frozen=True)
class Modality:
    """A kind of media, such as images: how to load it, and how to pass it to processors and rewards.

    Args:
        kind: Name of the kind, also the type of message parts. For "image", the data columns are `image` and
            `images`, the mark in texts is `<image>`, and the placeholder token is `image_token_id` in the
            model's configuration and `image_token` in its processor.
        endings: Suffixes of its files, in lower case.
        load: Maps (path or bytes, name for errors, sampling options or nothing) to a dataclass of tensors,
            such as `Frames`. Raises `MediaError` for a file that cannot be read.
        argument: Name of the processor argument that takes media of this kind.
        arguments: Maps (processor, decoded media, pixel limits) to all processor arguments for these media.
            Raises ValueError if a processor takes no such media.
        token_type: Value of its tokens in the `mm_token_type_ids` of processors.
        nested: Whether processors take one list of media per text, instead of a single list.
        in_rows: Whether a data row can contain the bytes of a file.
        forms: Description of the values that `from_value` accepts, for errors.
        from_value: Maps (object in memory, place for errors) to a medium, or to None for unknown objects. By
            default all objects are unknown.
        check: Raises `MediaError` unless the file at a path can be read.
        shown: Maps a decoded medium to the object that rewards written for TRL get; by default the same.
        chat_parts: Maps a decoded medium to parts of a message in OpenAI's form.
        most_tokens: Maps (`PromptCheck`, medium) to an upper bound of the medium's tokens, without decoding.
            By default the context length, so that prompts with such media are encoded to count their tokens.
        digest: Maps (kind, decoded medium) to a hash of the content.
        borders: Keys of begin and end tokens in a model's configuration; answers must not contain them.
    """

    kind: str
    endings: tuple[str, ...]
    load: Callable[..., Any]
    argument: str
    arguments: Callable[[Any, Sequence[Any], Mapping[str, int]], dict[str, Any]]
    token_type: int
    nested: bool = False
    in_rows: bool = True
    forms: str = "a path"
    from_value: Callable[[Any, str], Media | None] = lambda value, place: None
    check: Callable[[Path], Any] | None = None
    shown: Callable[[Any], Any] = lambda loaded: loaded
    chat_parts: Callable[[Any], list[dict[str, Any]]] = no_chat_parts
    most_tokens: Callable[[Any, Media], int] = lambda check, medium: check.limit
    digest: Callable[[str, Any], bytes] = digest_tensors
    borders: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, str]:
        """The names of the data columns with one medium and with a list of media."""
        return self.kind, f"{self.kind}s"

    def check_file(self, path: Path) -> None:
        """Raise `MediaError` unless a file can be read."""
        if self.check:
            self.check(path)
        else:
            self.load(path, str(path))


# Config keys of begin and end tokens of media: Qwen, GLM, Ernie; Gemma 3n and 4; Gemma 3 and Llama 4.
MEDIA_BORDERS = (
    *(f"{kind}_{place}_token_id" for kind in ("vision", "image", "video") for place in ("start", "end")),
    *("boi_token_id", "eoi_token_id", "boi_token_index", "eoi_token_index"),
)
MODALITIES: dict[str, Modality] = {
    "image": Modality(
        "image",
        (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
        Late("mmrl.data.media_root:decode_image"),
        "images",
        Late("mmrl.vision.models.media_arguments:image_arguments"),
        token_type=1,
        nested=True,
        forms="a path, a PIL image, an array or a tensor",
        from_value=Late("mmrl.data.media_reader:image_in_memory"),
        shown=Late("mmrl.core.chat:first_frame"),
        chat_parts=Late("mmrl.engines.chat_completions:image_parts"),
        most_tokens=Late("mmrl.vision.models.prompt_check:most_image_tokens"),
        digest=digest_frames,
        borders=MEDIA_BORDERS,
    ),
    "video": Modality(
        "video",
        (".mp4", ".webm", ".mkv", ".avi", ".mov", ".m4v"),
        Late("mmrl.data.video:load_video"),
        "videos",
        Late("mmrl.vision.models.media_arguments:video_arguments"),
        token_type=2,
        in_rows=False,
        from_value=Late("mmrl.data.media_reader:video_in_memory"),
        check=Late("mmrl.data.video:video_duration"),
        shown=Late("mmrl.core.chat:all_frames"),
        chat_parts=Late("mmrl.engines.chat_completions:video_parts"),
        most_tokens=Late("mmrl.vision.models.prompt_check:most_video_tokens"),
        digest=digest_frames,
        borders=MEDIA_BORDERS,
    ),
    "audio": Modality(
        "audio",
        (".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aiff", ".aif"),
        Late("mmrl.data.sound:load_sound"),
        "audio",
        Late("mmrl.vision.models.media_arguments:audio_arguments"),
        token_type=3,
        forms="a path, or an object with `array` and `sampling_rate`",
        from_value=Late("mmrl.data.sound:sound_in_memory"),
        check=Late("mmrl.data.sound:sound_duration"),
        shown=Late("mmrl.data.sound:as_array"),
        chat_parts=Late("mmrl.engines.chat_completions:sound_parts"),
        most_tokens=Late("mmrl.vision.models.prompt_check:most_audio_tokens"),
        borders=("audio_start_token_id", "audio_end_token_id"),
    ),
}


def media_columns() -> dict[str, str]:
    """Map the names of the data columns with media to the kind of media: "images" to "image"."""
    return {column: kind for kind, modality in MODALITIES.items() for column in modality.columns}


def media_marks() -> re.Pattern[str]:
    """Compile the pattern of media marks in texts, such as <image>; its group is the kind of media."""
    return re.compile(f"<({'|'.join(map(re.escape, MODALITIES))})>")


def tensor_bytes(loaded: Any) -> int:
    """Count the bytes of all tensors of a decoded medium."""
    from torch import Tensor

    values = [getattr(loaded, field.name) for field in fields(loaded)]
    inner = (tensor_bytes(value) for value in values if is_dataclass(value))
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) + sum(inner)


def digest_of(medium: Media) -> bytes:
    """Hash the content of a medium."""
    return MODALITIES[medium.kind].digest(medium.kind, medium.load())
