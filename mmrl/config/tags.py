"""Checks that every tag that a piece reads is set by a piece of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mmrl.config.binding import Bound, Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import TagName, marks
from mmrl.core.episodes import ORDER, TURN
from mmrl.core.reward_table import RewardTable


def check_tags(pieces: Pieces, checked: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a piece reads a tag that no engine, sampler, game or data set sets."""
    tags = RewardTable.IDS.union(*(entry.sets_tags for entry in pieces.entries))
    tags |= {ORDER} if TURN in tags else set()
    for place, bound in checked.items():
        missing = sorted(set(tags_read(bound)) - tags) if isinstance(bound, Bound) else []
        if missing:
            raise ConfigError(
                f"{place}: '{bound.entry.full_name}' reads the tag '{missing[0]}' of outcomes, which no "
                f"engine, sampler, game or data set of this run sets; they set "
                f"{', '.join(sorted(tags - RewardTable.IDS)) or 'none'}. One of your own declares the tags "
                f"that it sets: `sets_tags = frozenset({{'{missing[0]}'}})`"
            )


def check_replay(engines: Sequence[Bound]) -> None:
    """Raise `ConfigError` if a replay engine wraps an engine whose rows it cannot rebuild, such as `play`."""
    tags = [engine.entry.sets_tags for engine in engines]
    for place, own in enumerate(tags):
        for inner, below in zip(engines[:place], tags, strict=False):
            images = getattr(inner.entry.target, "makes", "") == "images"
            if "replay" in own and "changed" in below and ("episode" in below or images):
                raise ConfigError(
                    f"'{engines[place].entry.full_name}' would store nothing: it makes rows again from a "
                    f"prompt of the data and tokens, or from a conversation with tools, and "
                    f"'{inner.entry.full_name}' answers other prompts. Leave one of them out"
                )


def tags_read(bound: Bound) -> Iterator[str]:
    """List the tags that a piece and its inner pieces declare, or name in options or in the key `at`."""
    for piece, hint, value in options_in(bound):
        yield from piece.entry.needs.tags
        at = piece.call.get("at", "last")
        if at not in ("last", "every"):
            yield at.partition("=")[0]
        if marks(hint, TagName):
            yield from texts_in(value)


def named_in(bounds: Iterable[Bound], names: Iterable[str]) -> set[str]:
    """Return the `names` (such as reward names) that occur in options of pieces or of inner pieces."""
    values = [value for bound in bounds for _, _, value in options_in(bound)]
    return set(names).intersection(text for value in values for text in texts_in(value))


def options_in(bound: Bound) -> Iterator[tuple[Bound, Any, Any]]:
    """Yield (piece, type, value) for every option of a piece and of its inner pieces."""
    yield bound, None, None  # once per piece, so that a piece without options is included
    for name, option in bound.entry.options.items():
        # A piece that is an object may hold the option as an attribute instead of in `bound.options`.
        value = bound.options.get(name, getattr(bound.function, name, option.default))
        yield bound, bound.entry.hints.get(name), value
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Bound):
                yield from options_in(inner)


def texts_in(value: Any) -> list[str]:
    """List the texts in an option's value: a text, the texts of a tuple, or the keys of a mapping."""
    listed = [value] if isinstance(value, str) else value if isinstance(value, tuple | Mapping) else ()
    return [text for text in listed if isinstance(text, str)]
