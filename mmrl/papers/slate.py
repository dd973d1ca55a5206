"""SLATE (arXiv 2602.23440): score candidates of every turn, and continue with one of them.

Title: Truncated Step-Level Sampling with Process Rewards for Retrieval-Augmented Reasoning
Formula: p(candidate j) = softmax(A / choice_temperature), A = (R - mean) / (std + eps); an early
answer earns coef (budget - t) / budget.
Our reading: turns of all conversations have equal weight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from mmrl.config.registry import engine, reward
from mmrl.config.schema import ConfigError
from mmrl.core.episodes import EPISODE, TURN, turn_number
from mmrl.core.types import CHANGED, Outcome, Prompt, Rollouts, Trajectory
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.ray_rewards import with_actors
from mmrl.runtime.reward_calls import call_all, checked
from mmrl.runtime.scoring import Scoring
from mmrl.vision.decoding.decoding import inverse_cdf
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.tools.conversation import CALL, INSTEAD, Conversation, copied, images_of
from mmrl.vision.tools.replies import shrunk

SCORE = "step_reward"  # under which the sum of the rewards of a step is recorded


def continuation(scores: Tensor, *, temperature: float = 0.7, eps: float = 1e-6) -> Tensor:
    """Compute the probability that a conversation goes on from each candidate: softmax of A / temperature.

    A = (R - mean) / (std + eps) of the scores (k,), where the deviation divides by k - 1. Equal scores give
    equal probabilities.
    """
    advantage = (scores - scores.mean()) / (scores.std(correction=min(1, len(scores) - 1)) + eps)
    return (advantage / temperature).softmax(0)


@engine(scope="vision", sets_tags={EPISODE, TURN, "state", "finish", CHANGED})
@dataclass(eq=False)
class WithStepCandidates(WithTools):
    """Sample several candidates of every turn of a conversation, and go on from a good one (SLATE).

    arXiv 2602.23440. At every turn as many candidates as the prompt has entries are sampled from the one
    conversation so far, and scored; it goes on from candidate j with probability
    softmax(A / choice_temperature), A = (R - mean) / (std + eps), and only the calls of that one are made.
    Every candidate is a row: its prompt is all that was read, its steps are the tokens of the turn, and the
    candidates of one turn are a group of their own. Its tags are `turn`, from 0, and `finish`: `call` where
    it calls a tool, else as `vision.with_tools` says. A row is a sample of one turn, not an episode: so
    statistics are those of turns, and `max_rounds` counts turns as groups.

    Scores are recorded under the names of the rewards, and their weighted sum as `step_reward`: the rewards
    of the run are `{name: precomputed, key: step_reward}`, so that nothing is scored twice. What a reward
    logs is a metric of the run. A turn for which a reward fails, with `on_error: skip`, goes on from any
    candidate; its rows have no score, and are not learned from. Evaluations get whole conversations. All else
    is as `vision.with_tools` does it, whose place this engine takes.

    Args:
        reward: What scores candidates, with the settings of `rewards`: `weight`, `label`, `at`, and so on. It
            reads the conversation so far as the prompt. `at: finish=call` asks about calls alone, `at:
            finish=stop` about answers; of the rewards at least one has to apply to every candidate.
        choice_temperature: Temperature of the choice of a candidate (the paper: 0.7).
        eps: Added to the deviation of scores.
        tool: Functions that the model may call, as `vision.with_tools` has them.
        max_turns: The most turns of the policy; a call in the last one is not made.
        max_completion_length: The most tokens that the policy chooses in a conversation.
        max_images: The most images and videos that tools show in a conversation.
        only_n_most_recent_images: Images and videos of tools that stay in the prompt; 0: all.
        max_context: The most tokens of a conversation, read and chosen; 0: the positions of the model.
        max_reply_chars: The most characters of the texts that a tool returns at once; the rest is cut off.
        max_image_pixels: The most pixels of an image, or of all of a video, that a tool returns; more are an
            error of the tool.
        turn_outcomes: Of evaluations: make an outcome of every turn instead of the last alone.
        score_target: Not of conversations that part.
        opener: Goes with `score_target`.
    """

    _: KW_ONLY
    reward: tuple[Callable, ...]
    choice_temperature: PositiveFloat = 0.7
    eps: NonNegativeFloat = 1e-6
    instead: ClassVar[str] = INSTEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        training = self.stream.purpose == "train"  # evaluations score nothing here
        self.rewards: list[Bound] = with_actors([make() for make in self.reward]) if training else []
        names = [bound.name for bound in self.rewards]
        if len({*names, SCORE}) <= len(names):
            raise ConfigError(
                f"`reward` of vision.with_step_candidates must name rewards of different names, none of them "
                f"'{SCORE}', not {names}; give one a `label`"
            )
        if training and not any(bound.weight for bound in self.rewards):
            raise ConfigError(
                "`reward` of vision.with_step_candidates must name a reward with a weight, by which "
                "candidates are compared"
            )
        self.logged: dict[str, list[float]] = defaultdict(list)

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Hold a conversation about every distinct prompt, with as many candidates as it has entries."""
        if self.stream.purpose != "train":
            return super().rollout(prompts)
        distinct, counts = {prompt.uid: prompt for prompt in prompts}, Counter(p.uid for p in prompts)
        size = len(counts) or 1
        if self.engine.batch_size:
            size = max(1, self.engine.batch_size // max(counts.values(), default=1))
        uids, rows = list(counts), defaultdict[str, list[Trajectory]](list)
        for at in range(0, len(uids), size):
            talks = self.begin([(distinct[uid], 0) for uid in uids[at : at + size]])
            for row in self._advance(talks, counts):
                rows[row.prompt.uid].append(row)
        self.counts.update(conversations=len(uids))
        return tuple(row for uid in uids for row in rows[uid])

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics of `vision.with_tools`, and means of the values that rewards logged."""
        logged, self.logged = self.logged, defaultdict(list)
        return {**super().pop_metrics(), **{name: fmean(values) for name, values in logged.items()}}

    def _advance(self, live: list[Conversation], counts: Mapping[str, int]) -> list[Trajectory]:
        """Hold conversations to their ends; returns the candidates of all turns."""
        turns, rows = self.engine.converse(), []
        for turn in range(self.max_turns):
            candidates = [[copied(talk, i) for i in range(counts[talk.prompt.uid])] for talk in live]
            turns.part(
                {
                    (new.prompt.uid, new.index): (talk.prompt.uid, talk.index)
                    for talk, sampled in zip(live, candidates, strict=True)
                    for new in sampled
                }
            )
            self._choose([talk for sampled in candidates for talk in sampled], turn, turns)
            last = turn + 1 == self.max_turns
            made = [[self._candidate(talk, turn, last) for talk in sampled] for sampled in candidates]
            made = self._scored(made)
            rows += [row for sampled in made for row in sampled]
            live = [
                sampled[self._drawn(scored, turn)] for sampled, scored in zip(candidates, made, strict=True)
            ]
            self.counts["turns"] += len(live)
            live = [talk for talk in live if not talk.finish]
            self._reply(live, last)
            live = [talk for talk in live if not talk.finish]
            if not live:
                break
        return rows

    def _begin_early(self, talk: Conversation, ids: Tensor) -> None:
        """Begin no calls before a candidate is chosen: a call may have effects."""
        if self.stream.purpose != "train":
            super()._begin_early(talk, ids)

    def _candidate(self, talk: Conversation, turn: int, last: bool) -> Trajectory:
        """Make the row of a conversation's latest turn."""
        (first, _), (read, ids) = talk.turns[0], talk.turns[-1]
        finish = talk.finish or ("turns" if last else CALL)
        tags = {TURN: str(turn), "finish": finish, CHANGED: "yes"}
        outcome = replace(talk.outcomes[-1], end=len(ids), tags=tags)
        prompt, written = talk.prompt, torch.cat([read.ids[len(first.ids) :], ids])
        return Trajectory(
            replace(prompt, messages=(*prompt.messages, *talk.messages[:-1])),
            f"{prompt.uid}/{self.stream.round}/{turn}",
            (outcome,),
            TokenRow(read, ids, talk.temperature),
            len(ids),
            talk.notes[-1],
            logged={"conversation": self.policy.prompt_encoder.transcript(written), "finish": finish},
            turns=(talk.messages[-1],),
            shown=tuple(map(shrunk, talk.images[len(images_of(prompt)) :])),
        )

    def _scored(self, made: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """Record the rewards of all candidates of a turn, and their weighted sum."""
        rows = [row for sampled in made for row in sampled]
        scores = iter(self._measured(rows))
        return [[_recorded(row, next(scores)) for row in sampled] for sampled in made]

    def _measured(self, rows: Sequence[Trajectory]) -> list[dict[str, float]]:
        """Measure candidates with all rewards; turns with a failed reward have no scores."""
        prompts, outcomes = [row.prompt for row in rows], [row.outcomes[-1] for row in rows]
        tokens = [row.steps.ids.tolist() for row in rows]
        scoring = Scoring(tokens, [row.turns for row in rows], range(len(rows)))
        results = call_all(self.rewards, prompts, outcomes, [True] * len(rows), scoring)
        columns, broken = {}, set[str]()
        for bound, result in zip(self.rewards, results, strict=True):
            columns[bound.name], faulty = checked(bound, result, prompts, outcomes)
            broken |= {rows[i].group for i in faulty}
            for name, numbers in result.logged.metrics.items():
                self.logged[name] += numbers
        weights = {bound.name: bound.weight for bound in self.rewards if bound.weight}
        found: list[dict[str, float]] = []
        for i, row in enumerate(rows):
            values = {name: float(column[i]) for name, column in columns.items() if not column[i].isnan()}
            if row.group in broken:
                found.append({})
                continue
            if not weights.keys() & values.keys():
                raise ConfigError(
                    f"no reward of vision.with_step_candidates applies to a candidate of prompt "
                    f"'{row.prompt.uid}' whose tag `finish` is '{outcomes[i].tags['finish']}', so that it "
                    "cannot be compared; set `at: every` on one of them"
                )
            total = sum(weight * values.get(name, 0.0) for name, weight in weights.items())
            found.append({**values, SCORE: total})
        return found

    def _drawn(self, scored: Sequence[Trajectory], turn: int) -> int:
        """Draw the candidate that a conversation goes on from."""
        known = [row.outcomes[-1].recorded.get(SCORE, 0.0) for row in scored]  # of a turn: all, or none
        share = continuation(
            torch.tensor(known, dtype=torch.float64), temperature=self.choice_temperature, eps=self.eps
        )
        generator = self.stream.generator("candidate", scored[0].prompt.uid, turn)
        uniform = torch.rand(1, dtype=torch.float64, generator=generator)
        return int(inverse_cdf(share[None], uniform))


def _recorded(row: Trajectory, scores: Mapping[str, float]) -> Trajectory:
    (outcome,) = row.outcomes
    return replace(row, outcomes=(replace(outcome, recorded={**outcome.recorded, **scores}),))


@reward
@per_outcome
def early_answer(
    prompt: Prompt, outcome: Outcome, *, budget: PositiveInt = 4, coef: NonNegativeFloat = 0.1
) -> float:
    """Reward an answer for the turns that it did not need: coef (budget - t) / budget (SLATE).

    arXiv 2602.23440; t is the number of the turn that answers, from 1, where its tag `turn` counts from 0. It
    is 0 beyond the budget, and for a turn that is no answer: one that calls a tool, or that was cut (its tag
    `finish` is not `stop`).

    Args:
        budget: Turns that an answer may take (the paper: 4).
        coef: Largest reward.
    """
    if outcome.tags.get("finish", "stop") != "stop":
        return 0.0
    return coef * max(0, budget - turn_number(outcome.tags) - 1) / budget
