"""Engines whose rollouts are answers recorded in the data set, or answers to other prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import engine, find
from mmrl.config.schema import Piece
from mmrl.core.protocols import EncodesConversations, Engine, Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, PromptError, Rollouts, Trajectory, reading

ROWS = ("assistant_only_loss", "max_length")


@engine
class Offline:
    """Use recorded answers as rollouts: demonstrations, or the rows of preference pairs.

    The answers of a prompt are used in order, and again from the first after the last. With `shuffle`, every
    step draws a new order, so that a random subset is compared (GDRO, arXiv 2601.02036, ranks 6 of 16).

    Args:
        shuffle: Draw a new order of a prompt's answers in every step.
        completion_only_loss: Train only on the tokens of the recorded answer. False: also on the prompt's,
            except placeholders of media. None: True, unless `assistant_only_loss` is set.
        assistant_only_loss: Train on all assistant turns of a recorded conversation, not only the last one.
        max_length: Maximum number of tokens of a row, media included. A longer row is a bad row: an error, or
            dropped with `bad_rows: drop`. Rows are never cut. 0: the model's limit.
    """

    notes: frozenset[str] = frozenset()
    reads_answers = True
    needs_answers = True  # every prompt must have a recorded answer
    makes = ""  # kind of outcomes: depends on the data

    def __init__(
        self,
        policy: Policy,
        *,
        stream: Stream,
        shuffle: bool = False,
        completion_only_loss: bool | None = None,
        assistant_only_loss: bool = False,
        max_length: NonNegativeInt = 0,
    ) -> None:
        self.policy, self.stream, self.shuffle = policy, stream, shuffle
        self.learn = "all" if completion_only_loss is False else "completion"
        self.learn = "assistant" if assistant_only_loss else self.learn
        self.max_length = max_length

    @staticmethod
    def check_learning(policy: Piece, options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if options clash, or if the policy can train only on the tokens of answers."""
        given = [name for name in ROWS if options.get(name)]
        given += ["completion_only_loss"] if options.get("completion_only_loss") is False else []
        if given and not hasattr(find("policy", policy.name).target, "encode_conversation"):
            raise ConfigError(
                f"'{given[0]}' of `offline` is not for the policy '{policy.name}'; leave it out"
            )
        if options.get("assistant_only_loss") and options.get("completion_only_loss"):
            raise ConfigError(
                "`assistant_only_loss` learns all turns of the assistant, `completion_only_loss` the last "
                "one; give one of the two"
            )

    def _encode(self, prompt: Prompt, answer: Outcome) -> Trajectory:
        if self.learn == "completion" and not self.max_length:
            return self.policy.encode(prompt, answer)
        assert isinstance(self.policy, EncodesConversations)  # `check_learning` refuses other policies
        return self.policy.encode_conversation(prompt, answer, learn=self.learn, max_length=self.max_length)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Encode one recorded answer for every entry of `prompts`."""
        following: dict[str, int] = {}  # index of the next answer to each prompt
        rows = []
        for prompt in prompts:
            count = len(prompt.answers)
            if not count:
                reason = f"prompt '{prompt.uid}' has no recorded answers; the engine `offline` needs them"
                raise PromptError(prompt.uid, reason)
            place = following.get(prompt.uid, 0)
            following[prompt.uid] = (place + 1) % count
            if self.shuffle:  # one order for all rollouts of a prompt
                place = torch.randperm(count, generator=self.stream.generator(prompt.uid)).tolist()[place]
            with reading(prompt):
                rows.append(self._encode(prompt, prompt.answers[place]))
        return tuple(rows)


@engine
class WithDemos:
    """Replace the last `per_group` rollouts of a prompt by its recorded answers, marked as off-policy.

    A prompt without recorded answers keeps all its rollouts. Replaced rollouts are never sampled.
    """

    notes: frozenset[str] = frozenset()  # demonstrations have no log-probabilities
    reads_answers = True

    def __init__(self, engine: Engine, *, per_group: PositiveInt = 1) -> None:
        self.engine, self.policy, self.per_group = engine, engine.policy, per_group

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Append demonstrations, and sample only the other rollouts with the wrapped engine."""
        counts = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        shown = {
            uid: min(self.per_group, counts[uid]) if prompt.answers else 0 for uid, prompt in distinct.items()
        }
        wanted = [prompt for uid, prompt in distinct.items() for _ in range(counts[uid] - shown[uid])]
        sampled = self.engine.rollout(wanted) if wanted else ()
        demos = [
            self.policy.encode(prompt, prompt.answers[turn % len(prompt.answers)])
            for uid, prompt in distinct.items()
            for turn in range(shown[uid])
        ]
        return sampled + tuple(demos)


@engine(sets_tags={"unrelated"})
class WithMismatched:
    """Replace the last rollout of every prompt by an answer to another prompt (KTO, arXiv 2402.01306).

    The replacement is the first answer to the next prompt, with the tag `unrelated`. The last prompt of a
    process gets the answer to its first prompt; a single prompt gets its own. A prompt with only one rollout
    keeps it.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample one answer fewer per prompt with the wrapped engine, and append the mismatched answers."""
        counts = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        wanted = [prompt for uid, prompt in distinct.items() for _ in range(max(1, counts[uid] - 1))]
        rows = self.engine.rollout(wanted)
        # Iterate in reverse, so that the first row of each prompt remains in the dict.
        first = {row.prompt.uid: row.outcomes[-1] for row in reversed(rows)}
        ring = list(distinct)
        mismatched = []
        for uid, following in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            if counts[uid] > 1:
                row = self.policy.encode(distinct[uid], first[following])
                last = row.outcomes[-1]
                tags = {**last.tags, "unrelated": "yes"}
                # Drop `recorded`, because these rewards belong to the other prompt.
                outcome = Outcome(last.text, last.image, last.video, last.times, last.end, tags=tags)
                mismatched.append(replace(row, outcomes=(outcome,)))
        return (*rows, *mismatched)
