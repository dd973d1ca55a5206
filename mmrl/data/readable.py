"""Checks that every prompt can be encoded for the model, while the data are read or before training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from mmrl.config.binding import Pieces
from mmrl.config.evaluation import evaluation_of
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find
from mmrl.config.schema import Config, EvaluateConfig, Piece, as_piece
from mmrl.core.types import Prompt, PromptError
from mmrl.data.row_fields import CHECK, NAMED, NamedColumns
from mmrl.data.row_files import bad_rows_error, log_dropped
from mmrl.data.row_prompts import chosen, uids_of

log = logging.getLogger("mmrl")
ADVICE = "mend them, or set `bad_rows: drop`"


def with_inner(place: str, data: Piece) -> Iterator[tuple[str, Piece]]:
    """Yield a data set and, recursively, those it wraps (option `data`), each with its dotted path."""
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
    """Whether a data set, or one that it wraps, has the option `bad_rows: drop`."""
    return any(piece.options.get("bad_rows") == "drop" for _, piece in with_inner("data", data))


class PromptCheck:
    """Calls `check`, which raises `PromptError`, once per prompt, and remembers the prompts that passed."""

    def __init__(self, check: Callable[[Prompt], None]) -> None:
        self.check, self.seen = check, set[str]()

    def __call__(self, prompt: Prompt) -> None:
        """Raise `PromptError` for a prompt that the model cannot read."""
        self.check(prompt)
        self.seen.add(prompt.uid)

    def rest(self, prompts: Sequence[Prompt], drop: bool, place: str) -> Sequence[Prompt]:
        """Check the prompts that were not checked yet; drop prompts that fail if `drop`, else raise."""
        bad: dict[int, str] = {}
        for at, uid in enumerate(uids_of(prompts)):
            if uid not in self.seen:
                try:
                    self(prompts[at])
                except PromptError as error:
                    bad[at] = str(error)
        if bad and not drop:
            raise ConfigError(str(bad_rows_error(place, list(bad.values()), ADVICE)))
        log_dropped(place, [*bad.values()], len(prompts))
        return chosen(prompts, [at for at in range(len(prompts)) if at not in bad]) if bad else prompts


def prompt_check(policy: Piece, engines: Sequence[Piece] = ()) -> PromptCheck | None:
    """Create the prompt check of a policy without loading its weights; None if the policy defines none.

    If the check has a method `check_engine`, this method gets the innermost engine, and raises `ConfigError`
    for options that the model cannot take. A missing or unusable model is not reported: the policy raises
    that error when it is built.
    """
    make = getattr(find("policy", policy.name).target, "prompt_check", None)
    if make is None:
        return None
    try:
        check = make(policy.options)
    except (ValueError, OSError, ImportError) as error:
        log.info("prompts are not read with the model yet: %s", error)
        return None
    if engines and hasattr(check, "check_engine"):
        check.check_engine(engines[0])
    return PromptCheck(check)


def checked_prompts(
    pieces: Pieces, data: Piece, place: str, named: NamedColumns, check: PromptCheck | None
) -> Sequence[Prompt]:
    """Read a data set; `named` are columns that pieces read. A prompt that fails `check` is a bad row."""
    tokens = NAMED.set(named), CHECK.set(check)
    try:
        prompts = pieces.prompts(data, place)
    finally:
        NAMED.reset(tokens[0])
        CHECK.reset(tokens[1])
    if check is not None:
        prompts = pieces.made[place] = check.rest(prompts, drops(data), place)
    return prompts


def engines_of(config: Config | EvaluateConfig) -> Mapping[str, Sequence[Piece]]:
    """Map the dotted path of each data set to the engines that answer its prompts, innermost first."""
    training = {"data": config.rollout.engine} if isinstance(config, Config) else {}
    return {"evaluation.data": evaluation_of(config).evaluation.engine, **training}


def check_engines(policy: Piece, engines: Sequence[Piece]) -> None:
    """Raise `ConfigError` if a model does not support its engine's options, such as an image size."""
    if has_size(engines):
        prompt_check(policy, engines)


def has_size(engines: Sequence[Piece]) -> bool:
    """Whether the innermost engine generates images or videos of a configurable size."""
    return bool(engines) and hasattr(find("engine", engines[0].name).target, "size_from")
