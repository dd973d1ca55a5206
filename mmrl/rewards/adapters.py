"""Adapters for reward functions: functions of one outcome, and functions with TRL's signature."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.core.chat import completion_of, shown_media
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.runtime.scoring import SCORING, Scoring


def log_metric(name: str, value: float) -> None:
    """Log a value of a metric, to be averaged over the training step; do nothing outside of a run."""
    if call := SCORING.get(None):
        call.log_metric(name, value)


def policy_turns(outcomes: Sequence[Outcome]) -> list[tuple[list[str], list[str]]]:
    """Return the texts of the policy's turns per scored outcome, as (earlier turns, new turns)."""
    both = policy_messages(outcomes)
    return [([turn.text for turn in before], [turn.text for turn in new]) for before, new in both]


def policy_messages(outcomes: Sequence[Outcome]) -> list[tuple[list[Message], list[Message]]]:
    """Return the policy's turns up to each scored outcome, as (earlier turns, new turns).

    Earlier turns are the turns up to the previous scored outcome of the same rollout. So the new turns of
    all scored outcomes are the whole conversation, whether a reward scores only the last turn or every
    turn (its setting `at`). Without a conversation, the text of the outcome is the only new turn.
    """
    scoring = SCORING.get(None) or Scoring()
    talks = scoring.turns or [()] * len(outcomes)
    parted: list[tuple[list[Message], list[Message]]] = []
    num_turns: dict[int, int] = {}  # maps a rollout to its number of earlier turns
    for outcome, talk, row in zip(outcomes, talks, scoring.rows or range(len(outcomes)), strict=True):
        turns = [turn for turn in talk if turn.role == "assistant"]
        if not talk:
            parted.append(([], [Message("assistant", (Part(outcome.text or ""),))]))
            continue
        before = num_turns.get(row, 0)
        parted.append((turns[:before], turns[before:]))
        num_turns[row] = len(turns)
    return parted


@dataclass(frozen=True)
class OwnAnswer:
    """The correct answer of a prompt in all accepted spellings, to check that a reward recognises it.

    The check requires a reward of at least `full` for each of `texts`, and less for answers of other prompts.
    For a reward of images, a text describes the image. `unfit` is a warning (or empty): the target does not
    have the form that the reward's option `form` names, although the reward accepts it.
    """

    texts: tuple[str, ...]
    full: float = 1.0
    unfit: str = ""


def per_outcome(measure: Callable[..., float | None]) -> Callable[..., list[float | None]]:
    """Turn a function that scores one prompt and outcome into a reward function for a batch."""

    @functools.wraps(measure)
    def reward(prompts: Sequence[Prompt], outcomes: Sequence[Outcome], **options: Any) -> list[float | None]:
        return [measure(*both, **options) for both in zip(prompts, outcomes, strict=True)]

    return reward


def by_rollout(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Group the indices of outcomes by rollout: one group per rollout, with e.g. its turns in order."""
    rows = (SCORING.get(None) or Scoring()).rows or range(len(outcomes))
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row, []).append(i)
    return list(groups.values())


def comparable_outcomes(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Group the indices of comparable outcomes: same prompt, and same position in their rollouts.

    The position counts the outcomes of a rollout that the reward scores. So a turn is compared with the same
    turn of other conversations, and a segment of a video with the same segment of other videos.
    """
    rows = (SCORING.get(None) or Scoring()).rows or range(len(prompts))
    groups: dict[tuple[str, int], list[int]] = {}
    places: Counter[int] = Counter()
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        groups.setdefault((prompt.uid, places[row]), []).append(i)
        places[row] += 1
    return list(groups.values())


TRL_OWN = ("prompt", "completion", "completion_ids")  # parameters that TRL itself fills


def from_trl(function: Callable) -> Callable:
    """Wrap a TRL reward `f(prompts, completions, **columns)`, plain or asynchronous, as a reward.

    If the data row of a prompt has messages, prompt and completion are messages, as in TRL; the completion of
    a conversation with tools has all turns, calls and replies (see `completion_of`). Otherwise the prompt is
    a text, and the completion is the text of the last turn. Completions of image and video models are their
    media. Columns are passed by name: all columns to a function with `**kwargs`, otherwise only columns
    that are parameters of the function. The media of the prompt are passed in the same way, as `image`,
    `images`, `video` and `videos` (decoded when they are read), and so are TRL's `completion_ids`,
    `trainer_state` (counts optimizer steps), `log_metric`, `log_extra` and, if any, `environments`.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def completion(outcome: Outcome, messages: list | None, turns: Sequence[Message]) -> Any:
        if outcome.text is None:
            return outcome.image if outcome.video is None else outcome.video
        if messages is None:
            return outcome.text
        return completion_of(turns) or [{"role": "assistant", "content": outcome.text}]

    @functools.wraps(function)
    def reward(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> Any:
        scoring = SCORING.get(None) or Scoring([None] * len(outcomes))
        columns = dict.fromkeys(key for prompt in prompts for key in prompt.columns if key not in TRL_OWN)
        turns = scoring.turns or [()] * len(outcomes)
        rows = [prompt.columns.get("prompt") for prompt in prompts]
        messages = [row if isinstance(row, list) else None for row in rows]
        offered = (
            shown_media(prompts)
            | {name: [prompt.columns.get(name) for prompt in prompts] for name in columns}
            | {
                "prompts": [p.text if m is None else m for p, m in zip(prompts, messages, strict=True)],
                "completions": [completion(*each) for each in zip(outcomes, messages, turns, strict=True)],
                "completion_ids": [ids if ids is None else list(ids) for ids in scoring.tokens],
                "trainer_state": scoring.state,
                "log_metric": scoring.log_metric,
                "log_extra": scoring.log_extra,
                "target": [p.target for p in prompts],
            }
        )
        if any(outcome.environment is not None for outcome in outcomes):
            offered["environments"] = [outcome.environment for outcome in outcomes]
        return function(**{k: v for k, v in offered.items() if takes_all or k in parameters})

    return reward
