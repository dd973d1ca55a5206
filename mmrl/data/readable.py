"""Checks that every prompt can be encoded for the model, while the data are read or before training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from mmrl.config.loading import ConfigError
from mmrl.config.registry import find
from mmrl.config.schema import Piece, as_piece
from mmrl.core.types import Prompt, PromptError
from mmrl.data.dataset_io import bad_rows_error
from mmrl.data.row_prompts import chosen, uids_of

log = logging.getLogger("mmrl")
ADVICE = "mend them, or set `bad_rows: drop`"


def with_inner(place: str, data: Piece) -> Iterator[tuple[str, Piece]]:
    """Yield a data set and, recursively, the data sets in its option `data`, each with its dotted path."""
    yield place, data
    match data.options.get("data"):
        case None:
            return
        case list() | tuple() as inner:
            named = [(f"{place}.data.{i}", value) for i, value in enumerate(inner)]
        case value:
            named = [(f"{place}.data", value)]
    for at, value in named:
        yield from with_inner(at, as_piece(value, at))


def drops(data: Piece) -> bool:
    """Whether a data set, or an inner one, has `bad_rows: drop`."""
    return any(piece.options.get("bad_rows") == "drop" for _, piece in with_inner("data", data))


class PromptCheck:
    """Calls `check`, which raises `PromptError`, for each prompt once, and records which prompts passed."""

    def __init__(self, check: Callable[[Prompt], None]) -> None:
        self.check, self.seen = check, set[str]()

    def __call__(self, prompt: Prompt) -> None:
        """Raise `PromptError` for a prompt that the model cannot read."""
        self.check(prompt)
        self.seen.add(prompt.uid)

    def rest(self, prompts: Sequence[Prompt], drop: bool, place: str) -> Sequence[Prompt]:
        """Check all prompts that were not checked yet; return the good ones if `drop`, else raise."""
        bad: dict[int, str] = {}
        for at, uid in enumerate(uids_of(prompts)):
            if uid not in self.seen:
                try:
                    self(prompts[at])
                except PromptError as error:
                    bad[at] = str(error)
        if bad and not drop:
            raise ConfigError(str(bad_rows_error(place, list(bad.values()), ADVICE)))
        for line in bad.values():
            log.warning("dropped %s", line)
        return chosen(prompts, [at for at in range(len(prompts)) if at not in bad]) if bad else prompts


def prompt_check(policy: Piece) -> PromptCheck | None:
    """Create the prompt check of a policy without loading its weights; None if the policy defines none.

    This does not report a missing or unusable model: the policy raises that error when it is built.
    """
    make = getattr(find("policy", policy.name).target, "prompt_check", None)
    if make is None:
        return None
    try:
        return PromptCheck(make(policy.options))
    except (ValueError, OSError, ImportError) as error:
        log.info("prompts are not read with the model yet: %s", error)
        return None
