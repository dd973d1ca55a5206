"""A flow in two dimensions that learns in a second, with both likelihoods and an engine with probes; and a
policy over tokens that says whatever a flow says."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.loading import merge
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Message, Outcome, Part, Prompt, Rollouts, Trajectory, Unit
from mmrl.rewards.adapters import per_outcome
from tests.support.toys import ToyText


@dataclass(frozen=True)
class HasMetrics:
    """A look-up table of tokens that makes up the fields of a flow: log-probabilities of tokens are its
    latents (N, T, vocab), and a step's place gives its time."""

    toy: ToyText

    outputs = ToyText.outputs | {
        "mean",
        "velocity",
        "target",
        "error",
        "std",
        "dt",
        "time",
        "value",
        "value_logit",
        "score",
    }

    @property
    def table(self) -> Tensor:
        return self.toy.table

    @property
    def module(self) -> nn.Module:
        return self.toy.module

    def collate(self, rollouts) -> Batch:
        return self.toy.collate(rollouts)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        said = self.toy(batch, frozenset(extra))
        steps = batch.steps
        places = torch.arange(steps.start, steps.start + steps.tokens.shape[1])
        field = self.module()[steps.prompt][:, places].log_softmax(-1)
        target = (torch.arange(field.shape[-1]) * 0.3 - 2.0).to(field).expand_as(field)
        along = places.to(field).expand_as(said.logp)
        fields = {
            "mean": field,
            "velocity": field,
            "target": target,
            "error": (field - target).square().mean(-1),
            "std": 0.5 + 0.1 * along,
            "dt": -0.1 - 0.05 * along,
            "time": 0.9 - 0.2 * along,
            "value": field[..., 1],
            "value_logit": field[..., 1],
            "score": said.logp,  # rows of a prompt differ
        }
        return StepOutput(said.logp, {**said.extra, **{name: fields[name] for name in extra & set(fields)}})


# ---- a flow


TIMES = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])  # the last step is not learned from
STOCHASTIC = 3
NOISE = 0.5  # per root of time


def spots(*, num: int = 4, answers: int = 6) -> list[Prompt]:
    """Ask for a spot in the plane; recorded answers stand further and further away from it."""
    asked = []
    for i in range(num):
        spot = torch.tensor([1.0 - 0.5 * i, 0.5 * (-1) ** i])
        recorded = tuple(Outcome(image=spot + torch.tensor([0.6, -0.4]) * k) for k in range(answers))
        message = Message("user", (Part(f"spot {i}"),))
        asked.append(Prompt(uid=f"p{i}", messages=(message,), target=spot, answers=recorded))
    return asked


@per_outcome
def nearness(prompt: Prompt, outcome: Outcome) -> float:
    """Measure how near the point is, or one coordinate of it where the outcome is a segment."""
    segment = outcome.tags.get("segment")
    wanted = prompt.target if segment is None else prompt.target[int(segment)]
    return -float((outcome.image - wanted).square().mean())


class Field(nn.Module):
    """A velocity per prompt that is linear in the point, the time and 1."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(num, 2, 4))

    def forward(self, prompt: Tensor, points: Tensor, times: Tensor) -> Tensor:
        """Give velocities (N, T, 2) at points (N, T, 2) and times (N, T)."""
        along = torch.cat([points, times[..., None], torch.ones_like(times)[..., None]], -1)
        return torch.einsum("nij,ntj->nti", self.table[prompt], along)


@dataclass(frozen=True, eq=False)
class PointSteps:
    """Where steps stand, and what they lead to: the next point of a path, or the velocity to be matched."""

    prompt: Tensor  # (N,)
    here: Tensor  # (N, T, 2)
    time: Tensor  # (N, T)
    following: Tensor  # (N, T)
    wanted: Tensor  # (N, T, 2)
    segments: int
    unit: Unit

    def cost(self, rows: Tensor) -> int:
        return len(rows) * self.time.shape[1]

    def __getitem__(self, cut: tuple[Tensor, slice]) -> PointSteps:
        rows, columns = cut
        parts = {
            name: getattr(self, name)[rows][:, columns] for name in ("here", "time", "following", "wanted")
        }
        return replace(self, prompt=self.prompt[rows], **parts)


class ToyFlow:
    """A flow in the plane. `form` is `transition`, where a step is a stochastic step of a path, or
    `matching`, where it is a draw of time and noise; of a draw each coordinate may be a segment."""

    def __init__(
        self,
        *,
        stream: Stream,
        form: Literal["transition", "matching"] = "transition",
        draws: int = 3,
        segments: int = 1,
        num: int = 4,
    ) -> None:
        self.module, self.stream = Field(num), stream
        self.form, self.draws, self.segments = form, draws, segments

    outputs = frozenset({"mean", "std", "dt", "velocity", "time", "target", "error"})

    @property
    def table(self) -> Tensor:
        return next(iter(self.module.parameters()))

    @property
    def num_steps(self) -> int:
        return STOCHASTIC if self.form == "transition" else self.draws * self.segments

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        outcomes = (replace(outcome, end=self.num_steps),)
        if self.segments > 1:
            outcomes = tuple(
                Outcome(image=outcome.image[f], end=f + 1, tags={"segment": str(f)})
                for f in range(self.segments)
            )
        row = (int(prompt.uid[1:]), outcome.image[None])
        return Trajectory(prompt, prompt.uid, outcomes, row, self.num_steps, {}, False)

    def collate(self, rollouts: Rollouts) -> Batch:
        prompt = torch.tensor([row.steps[0] for row in rollouts])
        paths = [row.steps[1] for row in rollouts]
        shape = (len(rollouts), self.num_steps)
        if self.form == "transition":
            path = torch.stack(paths)
            time, following = (TIMES[k : k + STOCHASTIC].expand(shape) for k in (0, 1))
            steps = PointSteps(
                prompt, path[:, :STOCHASTIC], time, following, path[:, 1 : STOCHASTIC + 1], 1, Unit.STEP
            )
        else:
            clean = torch.stack([path[-1] for path in paths])[:, None]
            time = torch.linspace(0.9, 0.3, self.draws).expand(shape[0], -1)
            noise = torch.stack([self._noise(row) for row in rollouts])
            mixed = (1 - time[..., None]) * clean + time[..., None] * noise
            unit = Unit.STEP if self.segments == 1 else Unit.ROW
            steps = PointSteps(prompt, mixed, time, time, noise - clean, self.segments, unit)
        return Batch.of(steps, torch.ones(shape), {})

    def _noise(self, row: Trajectory) -> Tensor:
        """Draw noise that the rows of a prompt share."""
        return torch.randn(self.draws, 2, generator=self.stream.generator("noise", row.prompt.uid))

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        steps = batch.steps
        velocity = self.module(steps.prompt, steps.here, steps.time)
        if self.form == "transition":
            dt = steps.following - steps.time
            mean, std = steps.here + velocity * dt[..., None], NOISE * (-dt).sqrt()
            logp = (-(steps.wanted - mean).square().mean(-1) / (2 * std.square())) - std.log()
            said = {"mean": mean, "std": std, "dt": dt, "velocity": velocity, "time": steps.time}
        else:
            squared = (velocity - steps.wanted).square()
            error = squared.mean(-1) if self.segments == 1 else squared.flatten(1)
            logp = -error
            said = {
                "velocity": velocity.repeat_interleave(self.segments, 1),
                "target": steps.wanted.repeat_interleave(self.segments, 1),
                "time": steps.time.repeat_interleave(self.segments, 1),
                "error": error,
            }
        return StepOutput(logp, {name: said[name] for name in extra})

    save, load = ToyText.save, ToyText.load


class ToyDenoise:
    """Draw points: stochastic steps, and one that follows the flow."""

    notes = frozenset({"logp"})

    def __init__(self, policy: ToyFlow, *, stream: Stream) -> None:
        self.policy, self.stream = policy, stream

    @torch.no_grad()
    def finish(self, place: int, point: Tensor, start: int) -> Tensor:
        """Follow the flow to the end."""
        for here, there in zip(TIMES[start:-1], TIMES[start + 1 :], strict=True):
            point = point + (there - here) * self.velocity(place, point, here)
        return point

    def velocity(self, place: int, point: Tensor, time: Tensor) -> Tensor:
        return self.policy.module(torch.tensor([place]), point[None, None], time[None, None])[0, 0]

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            index = asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            generator = self.stream.generator(prompt.uid, index)
            place = int(prompt.uid[1:])
            path = [torch.randn(2, generator=generator)]
            for here, there in zip(TIMES[:STOCHASTIC], TIMES[1:], strict=False):
                drift = (there - here) * self.velocity(place, path[-1], here)
                noise = NOISE * (here - there).sqrt() * torch.randn(2, generator=generator)
                path.append(path[-1] + drift + noise)
            path.append(self.finish(place, path[-1], STOCHASTIC))
            length = self.policy.num_steps
            outcome = Outcome(image=path[-1], end=length)
            rows.append(Trajectory(prompt, prompt.uid, (outcome,), (place, torch.stack(path)), length))
        return tuple(rows)


class ToyProbes:
    """Look at every prefix: finished along the flow, or with `one_step` the clean estimate behind every
    step."""

    notes = frozenset()

    def __init__(self, engine: ToyDenoise, *, one_step: bool = False) -> None:
        self.engine, self.policy, self.one_step = engine, engine.policy, one_step

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        return tuple(self._with(row) for row in self.engine.rollout(prompts))

    def _with(self, row: Trajectory) -> Trajectory:
        place, path = row.steps
        probes = []
        for k in range(int(self.one_step), STOCHASTIC):
            jump = path[k] - TIMES[k] * self.engine.velocity(place, path[k], TIMES[k])
            point = jump if self.one_step else self.engine.finish(place, path[k], k)
            probes.append(Outcome(image=point, end=k))
        return replace(row, outcomes=(*probes, *row.outcomes))


def flow_plan(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """Write down a small run of the flow, as YAML would hold it; `changes` are merged over it."""
    usual = {
        "policy": "tests.support.toy_flow:ToyFlow",
        "data": "tests.support.toy_flow:spots",
        "rollout": {"engine": ["tests.support.toy_flow:ToyDenoise"], "num_prompts": 4, "num_generations": 8},
        "rewards": ["tests.support.toy_flow:nearness"],
        "learn": {"learning_rate": 0.05},
        "report": {"trackers": [], "log_completions": False},
        "max_steps": 3,
        "output_dir": str(folder),
    }
    return merge(usual, changes)
