"""Rows in the memory of a Python program: datasets of `datasets`, or any list of dictionaries."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.data.fields import RowError
from mmrl.data.media import as_rgb, is_image, to_image
from mmrl.data.sound import plain_sounds


def put_rows(name: str, data: Any, split: str) -> str:
    """Register a dataset under a name that a configuration can give as the `path` of its data.

    Args:
        name: The name, such as "train_dataset".
        data: A dataset of `datasets`, also streamed or with a single split, or an iterable of rows. Images of
            PIL, arrays and tensors (see `mmrl.data.media.to_image`) are stored as PNG, decoded sounds as WAV.
        split: Name of the split if the data have none; also part of the id of rows without an id.
    """
    match data:
        # Datasets of `datasets` are recognized by `with_format`, without importing the library.
        case Mapping(with_format=_) if len(data) != 1:  # a DatasetDict: do not guess the split
            raise ConfigError(
                f"'{name}' has the splits {', '.join(data)}; give one of them, dataset['train']"
            )
        case object(with_format=_):
            pass
        case Mapping():
            raise ConfigError(
                f"'{name}' is a dictionary; wanted rows, a dictionary each, or `Dataset.from_dict` of columns"
            )
        case _:
            try:
                data = list(data)  # an iterator ends after one pass, but rows are read again
            except TypeError as error:
                raise ConfigError(
                    f"'{name}' must be a dataset, an iterable of dictionaries, or a path, not {data!r}"
                ) from error
    return objects.put(name, (data, split))


def tables(name: str) -> dict[str, Any] | None:
    """Return the tables of a dataset of `datasets`, by split; None if rows must be read one by one."""
    parts = _parts(name)
    # A streamed dataset has no table; a transform applies only to rows read through the dataset.
    as_stored = [hasattr(part, "num_rows") and part.format["type"] != "custom" for part in parts.values()]
    return parts if parts and all(as_stored) else None


def _parts(name: str) -> dict[str, Any]:
    """Return the splits of a dataset of `datasets`, by name; empty for other kinds of rows."""
    data, split = objects.get(name)
    match data:
        case Mapping(with_format=_):  # a DatasetDict
            return dict(data)
        case object(with_format=_):
            return {str(data.split or split): data}
    return {}


def loose_rows(name: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (split, columns, fault) of rows that are not in arrow tables; `fault` is "" for good rows."""
    data, split = objects.get(name)
    for part, rows in (_parts(name) or {split: data}).items():
        for columns in rows:
            try:
                yield part, plain(columns), ""
            except RowError as error:
                yield part, {}, str(error)


def plain(value: Any) -> Any:
    """Replace all images inside a value by PNG bytes, and decoded sounds by WAV bytes."""
    if sound := plain_sounds(value, "a sound"):
        return sound
    match value:
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
    return as_png(value) if is_image(value) else value


def as_png(image: Any, name: str = "an image") -> dict[str, Any]:
    """Encode an image (see `to_image`) as upright 8-bit PNG: {"bytes", "path"}, as `datasets` stores it."""
    buffer = io.BytesIO()
    image = to_image(image, name)
    as_rgb(image, name, transparent=image.has_transparency_data).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}
