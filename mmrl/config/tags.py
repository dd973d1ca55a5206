"""Checks that the tags which pieces read are set by a piece of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.config.binding import Bound, Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import TagName, marks
from mmrl.core.episodes import ORDER, TURN
from mmrl.core.reward_table import RewardTable


def check_tags(pieces: Pieces, checked: Mapping[str, Any]) -> None:
    """Raise where a piece reads a tag that no engine, sampler, game or data set of the run sets."""
    known = RewardTable.IDS.union(*(entry.sets_tags for entry in pieces.entries))
    known |= {ORDER} if TURN in known else set()
    for place, bound in checked.items():
        missing = sorted(set(tags_read(bound)) - known) if isinstance(bound, Bound) else []
        if missing:
            raise ConfigError(
                f"{place}: '{bound.entry.full_name}' reads the tag '{missing[0]}' of outcomes, which no "
                f"engine, sampler, game or data set of this run sets; they set "
                f"{', '.join(sorted(known - RewardTable.IDS)) or 'none'}. One of your own declares the tags "
                f"that it sets: `sets_tags = frozenset({{'{missing[0]}'}})`"
            )


def tags_read(bound: Bound) -> Iterator[str]:
    """List the tags that a piece and those inside it read: declared, in options, or asked for by `at`."""
    yield from bound.entry.needs.tags
    at = bound.call.get("at", "last")
    if at not in ("last", "every"):
        yield at.partition("=")[0]
    for name, option in bound.entry.options.items():
        # An object was given its options when it was made, and keeps them as attributes.
        value = bound.options.get(name, getattr(bound.function, name, option.default))
        if marks(bound.entry.hints.get(name), TagName):
            yield from [value] if isinstance(value, str) else value or ()
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Bound):
                yield from tags_read(inner)
