"""Checks, without weights, that data and policy provide the inputs that rewards need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.core.reward_inputs import FrameSize, RewardInputs
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, PromptError
from mmrl.data.readable import PromptCheck
from mmrl.runtime.reward_calls import matches

Outcomes = Callable[[Prompt], Iterable[tuple[str, FrameSize]]]
TEXT = [("text", (0, 0, 0))]


def check_reward_inputs(
    text: bool,
    make_check: Callable[[], PromptCheck | None],
    prompts: Sequence[Prompt],
    rewards: Sequence[Piece],
    place: str,
    *,
    complete: bool = False,
) -> None:
    """Raise `ConfigError` if prompts or outcomes lack inputs of a reward (see `RewardInputs`).

    Args:
        text: Whether all outcomes are texts.
        make_check: Function that creates the prompt check. If the check has a method `outcomes`, it lists
            kind and size of the outcomes for a prompt.
        prompts: Rows of the data. Rewards with `where` are checked with the rows that match.
        rewards: The rewards.
        place: Configuration key of the rewards.
        complete: Whether `prompts` is all data. Then a reward that applies to no row is an error.
    """
    pieces = Pieces(Stream())
    for i, piece in enumerate(rewards):
        bound = pieces.name("reward", piece, f"{place}[{i}]")
        inputs = bound.entry.inputs(bound.options)
        if inputs is None:
            continue
        where = bound.call.get("where")
        asked = [prompt for prompt in prompts if not where or matches(prompt, where)]
        rows = [prompt for prompt in asked if inputs.applies(prompt)]
        raises = bound.weight and bound.call.get("on_absent", "raise") == "raise"
        if complete and raises and asked and not rows:
            named = " and ".join(f"`{name}`" for name in inputs.optional)
            raise ConfigError(f"{place}[{i}]: '{bound.name}' reads {named}, which no row of the data has")
        at = f"{place}[{i}]: '{bound.name}'"
        _check_prompts(inputs, rows, at)
        if text or not inputs.any_size:
            check = None if text else make_check()
            unknown: Outcomes = lambda prompt: TEXT if text else ()
            _check_outcomes(inputs, rows, getattr(check and check.check, "outcomes", unknown), at)


def _check_prompts(inputs: RewardInputs, rows: Sequence[Prompt], reward: str) -> None:
    lacking = [(prompt, what) for prompt in rows if (what := inputs.missing(prompt))]
    if lacking:
        prompt, what = lacking[0]
        raise ConfigError(
            f"{reward} needs {what}, and row '{prompt.uid}' has none ({len(lacking)} of {len(rows)} rows); "
            "mend the rows, choose another reward, or limit it to some rows by `where`"
        )


def _check_outcomes(inputs: RewardInputs, rows: Sequence[Prompt], outcomes: Outcomes, reward: str) -> None:
    for prompt in rows:
        try:
            reasons = [inputs.unfit(*outcome) for outcome in outcomes(prompt)]
        except PromptError as error:
            raise ConfigError(str(error)) from error
        if reason := next(filter(None, reasons), ""):
            raise ConfigError(f"{reward} {reason} (row '{prompt.uid}'); choose another reward or engine")
