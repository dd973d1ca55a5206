"""Checks that the model can read a prompt: while the data are read, or else before training."""

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
    """List a data set and, recursively, the data sets in its option `data`, with their places."""
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
    """Checks each prompt once; `check` raises `PromptError`."""

    def __init__(self, check: Callable[[Prompt], None]) -> None:
        self.check, self.seen = check, set[str]()

    def __call__(self, prompt: Prompt) -> None:
        """Raise `PromptError` for a prompt that the model cannot read."""
        self.check(prompt)
        self.seen.add(prompt.uid)

    def rest(self, prompts: Sequence[Prompt], drop: bool, place: str) -> Sequence[Prompt]:
        """Check the prompts that were not checked while rows were read; drop the bad ones, or raise."""
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
    """Make the check of prompts for a policy, without loading weights; None where the policy has none.

    A model that is missing or cannot be used is an error of the policy later, not here.
    """
    make = getattr(find("policy", policy.name).target, "prompt_check", None)
    if make is None:
        return None
    try:
        return PromptCheck(make(policy.options))
    except (ValueError, OSError, ImportError) as error:
        log.info("prompts are not read with the model yet: %s", error)
        return None
