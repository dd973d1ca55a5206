"""Hints for misplaced keys, and for keys with other trainers' names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmrl.config.binding import CALLED_WITH, FILLED, Pieces
from mmrl.config.keys import keys_of
from mmrl.config.loading import ConfigError, UnknownKey
from mmrl.config.plain import as_mapping, lookup
from mmrl.config.registry import HOMES, find
from mmrl.config.schema import LOCATE, Piece, as_plain
from mmrl.trl.names import advice

CLOSE = 0.8  # minimum similarity (difflib's ratio) of a suggested key at another place
# Maps common names of keys, other than the arguments of TRL's training classes, to our keys.
WORDS = {
    "peft_config": "policy.lora_rank, such as 64",
    "train_dataset": "data, such as {name: vision.visual_qa, path: data/questions.jsonl}",
    "eval_dataset": "evaluation.data",
    "lr": "learn.learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
}


def located(error: UnknownKey, raw: Mapping[str, Any], kind: type) -> ConfigError:
    """Add to an error about an unknown key the places where keys of the same or a similar name belong.

    Args:
        error: The error that the parser or a piece raised.
        raw: The whole configuration, as plain mappings.
        kind: The dataclass of the configuration.
    """
    places = [place for place in _places(raw, kind) if place != error.place]
    hint = _among(error, places) or _of_trl(error.key)
    if not hint and not error.near:
        names = {place.rpartition(".")[2]: place for place in reversed(places)}
        near = difflib.get_close_matches(error.key, names, 1, cutoff=CLOSE)
        hint = f"did you mean `{names[near[0]]}`?" if near else ""
    return ConfigError(f"{error.what}; {hint or error.hint}")


LOCATE.append(located)


def check_all(pieces: Pieces, config: Any) -> dict[str, Any]:
    """Call `Pieces.check_all`; errors about unknown keys get a hint where the key belongs."""
    try:
        return pieces.check_all(config)
    except UnknownKey as error:
        raise located(error, as_plain(config), type(config)) from None


def _among(error: UnknownKey, places: Iterable[str]) -> str:
    """Sort suggested keys of the same name: keys in the same section first, keys in `evaluation` last."""
    section = error.place.partition(".")[0] + "."
    paths = [place for place in dict.fromkeys(places) if place.rpartition(".")[2] == error.key]
    paths.sort(key=lambda place: (not place.startswith(section), place.startswith("evaluation.")))
    others = ", ".join(f"`{place}`" for place in paths[1:4])
    return f"did you mean `{paths[0]}`?{f' (there is {others} as well)' if others else ''}" if paths else ""


def _of_trl(key: str) -> str:
    """Return a hint for an argument of TRL or another common name of a key; empty for other names."""
    if key in WORDS:
        return f"here that is {WORDS[key]}"
    return advice(key)


def _places(raw: Mapping[str, Any], kind: type) -> Iterator[str]:
    """List the dotted paths of all keys of a configuration, including the options of its pieces."""
    keys = list(keys_of(kind))
    yield from (key.place for key in keys)
    for key in keys:
        if key.kind:
            value = lookup(raw, key.place)
            yield from _options(key.kind.name, key.default if value is None else value, key.place)


def _options(kind: str, value: Any, place: str) -> Iterator[str]:
    """List the dotted paths of the options of the pieces in a value, including nested pieces."""
    match value:
        case Piece():
            yield from _options(kind, as_plain(value), place)
        case str() | {"name": str()}:
            given = as_mapping(value)
            try:
                options = find(kind, given["name"]).options
            except ConfigError:
                return
            names = [*(name for name in options if name not in FILLED), *CALLED_WITH.get(kind, ())]
            yield from (f"{place}.{name}" for name in names)
            for name, parameter in options.items():
                if name in HOMES:
                    yield from _options(name, given.get(name, parameter.default), f"{place}.{name}")
        case Mapping():
            for name, inner in value.items():
                yield from _options(kind, inner, f"{place}.{name}")
        case list() | tuple():
            for i, inner in enumerate(value):
                yield from _options(kind, inner, f"{place}.{i}")
