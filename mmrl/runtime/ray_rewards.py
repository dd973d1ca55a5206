"""Rewards with `workers`: computed by Ray actors, optionally in a separate environment."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from mmrl.config.binding import Bound, Elsewhere, Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Outcome, Prompt
from mmrl.runtime.ray_actors import Actors, ActorsLost, check_environments
from mmrl.runtime.reward_calls import RemoteFault, RemoteReward
from mmrl.runtime.scoring import SCORING, NotNumbers, Scoring, by_prompt, called

_ACTORS: WeakValueDictionary[str, Actors] = WeakValueDictionary()  # shared by training and evaluation


@dataclass(frozen=True)
class Asked:
    """A request to an actor: outcomes to score, with the step and the clock of the run."""

    piece: Piece
    prompts: list[Prompt]
    outcomes: list[Outcome]
    call: Scoring
    moment: tuple[int, int, str]  # step, round and purpose, which seed the random streams
    clock: Clock
    seconds: float  # time limit for the answer


@dataclass(frozen=True)
class Scored:
    """Result of a request: values and logged metrics, or the class, message and traceback of an error."""

    values: list
    call: Scoring
    fault: tuple[str, str, str] = ("", "", "")


class RewardWorker:
    """A reward of a run, rebuilt in another process."""

    def __init__(self, piece: Piece, policy: Piece | None, seed: int, stage: int) -> None:
        self.stream = Stream(seed, stage=stage)
        self.pieces = Pieces(self.stream, policy)
        self.reward: Bound = self.pieces.make("reward", piece, place="rewards[0]")

    def score(self, asked: Asked) -> Scored:
        """Score outcomes; return an error of the reward as part of the result, so that the actor survives."""
        self.stream.step, self.stream.round, self.stream.purpose = asked.moment
        self.pieces.tick(asked.clock)
        try:
            values = called(self.reward, asked.prompts, asked.outcomes, asked.call, asked.seconds)
            return Scored(values, asked.call)
        # Also catch SystemExit, which would end the actor. Rewards that run in a thread are treated likewise.
        except BaseException as error:
            kind = "" if isinstance(error, NotNumbers) else type(error).__name__
            return Scored([], asked.call, (kind or "NotNumbers", str(error), traceback.format_exc()))


@dataclass(frozen=True)
class RayReward(RemoteReward):
    """A reward computed by Ray actors; each group goes to one actor, since rewards may compare its rows."""

    source: Elsewhere
    actors: Actors

    def wait(self) -> None:
        """Wait until the actors have started."""
        self.actors.ready()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome], **_: Any) -> list:
        """Score outcomes as the reward would in this process.

        Errors of the reward are raised as `NotNumbers` or `RemoteFault`.
        """
        check_environments(outcomes)
        call, stream = SCORING.get(None) or Scoring([None] * len(outcomes)), self.source.stream
        left = call.deadline - time.monotonic()
        shares = shared(prompts, self.actors.workers.num)
        requests = [
            (
                Asked(
                    self.source.piece,
                    [prompts[i] for i in rows],
                    [outcomes[i] for i in rows],
                    replace(call.about(rows), deadline=math.inf),
                    (stream.step, stream.round, stream.purpose),
                    self.source.clock(),
                    left,
                ),
            )
            for rows in shares
        ]
        try:
            answers: list[Scored] = self.actors.collect(self.actors.begin(requests, method="score"), left)
        except ActorsLost as error:
            raise RemoteFault("ActorsLost", str(error), lasting=True) from error
        values: list[Any] = [None] * len(outcomes)
        columns: dict[str, list[Any]] = {}
        for rows, answer in zip(shares, answers, strict=True):
            kind, words, trace = answer.fault
            if kind:
                raise NotNumbers(words) if kind == "NotNumbers" else RemoteFault(kind, words, trace)
            for name, logged in answer.call.metrics.items():
                call.metrics.setdefault(name, []).extend(logged)
            for name, column in answer.call.columns.items():
                whole = columns.setdefault(name, [None] * len(outcomes))
                for i, value in zip(rows, column, strict=True):
                    whole[i] = value
            for i, value in zip(rows, answer.values, strict=True):
                values[i] = value
        call.columns |= columns
        return values


def shared(prompts: Sequence[Prompt], number: int) -> list[list[int]]:
    """Split prompt indices among `number` actors; each group goes to the actor with the fewest prompts."""
    shares: list[list[int]] = [[] for _ in range(number)]
    for places in by_prompt(prompts).values():
        min(shares, key=len).extend(places)
    return [sorted(share) for share in shares if share]


def with_actors(rewards: Sequence[Bound]) -> list[Bound]:
    """Attach Ray actors to the rewards that have `workers`; the actors start at the first call."""
    result = []
    for bound in rewards:
        match bound.function:
            case Elsewhere() as source:
                parts = source.piece, source.policy, source.stream.seed, source.stream.stage
                workers = bound.call["workers"]
                # Include the reward's name: concurrent rewards must not share actors.
                key = repr((bound.name, parts, workers))
                what = f"the actors of the reward '{bound.name}'"
                actors = _ACTORS.get(key) or Actors(RewardWorker, parts, workers, what)
                _ACTORS[key] = actors
                bound = replace(bound, function=RayReward(source, actors))
        result.append(bound)
    return result
