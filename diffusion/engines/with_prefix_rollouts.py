"""Engine that cuts denoising trajectories after some steps, finishes the prefixes, and decodes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.diffusion.engines.denoise import Denoise, check_finite, outcome_of
from mmrl.diffusion.flow_math import clean_estimate
from mmrl.diffusion.sizes import places_by
from mmrl.diffusion.steps import Conditioning, FlowRow


@engine
class WithPrefixRollouts:
    """Add an outcome for every prefix of the T stochastic steps, so that single steps can be credited.

    By default, prefixes of 0 .. T - 1 steps are completed by the deterministic solver with the row's guidance
    and schedule (TP-GRPO, arXiv 2602.06422). With the row's own image, this gives T + 1 outcomes; their field
    `end`, the number of stochastic steps taken, is 0 .. T. The prefix of 0 steps starts from the row's own
    noise, as in the definition (our reading: the published code draws other noise). With `one_step`, the
    clean estimate after every step is decoded instead (VGPO, arXiv 2512.12387), which gives T outcomes with
    ends 1 .. T; the last is the row's own image. The unfinished prefixes of one size share network calls of
    at most `batch_size` rows (0: all).
    """

    notes = frozenset()

    def __init__(self, engine: Denoise, *, one_step: bool = False, batch_size: NonNegativeInt = 0) -> None:
        if engine.solver is None or engine.share < 1:
            raise ValueError(
                "`diffusion.with_prefix_rollouts` completes prefixes of stochastic steps, so the engine it "
                f"wraps needs a `solver` (it has {engine.solver}) and `share: 1` (it has {engine.share})"
            )
        if not engine.policy.likelihood.stochastic and engine.stream.purpose == "train":
            raise ValueError(
                "`diffusion.with_prefix_rollouts` credits stochastic steps, but the steps of the policy's "
                "likelihood are draws; set it to `diffusion.transition`"
            )
        self.engine, self.policy = engine, engine.policy
        self.one_step, self.batch_size = one_step, batch_size

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run the wrapped engine, and add the outcomes of all prefixes of each denoising path."""
        rows = self.engine.rollout(prompts)
        if not rows or (self.one_step and len(rows[0].steps.at) == 1):
            return rows  # with a single step, the only outcome is the final image
        probed: dict[int, Trajectory] = {}
        for places in places_by(row.steps.path.shape for row in rows):
            probed |= zip(places, self._probe(tuple(rows[i] for i in places)), strict=True)
        return tuple(probed[i] for i in range(len(rows)))

    def _probe(self, rows: Rollouts) -> Iterator[Trajectory]:
        """Yield rows of one size with the outcomes of their prefixes added."""
        flat = self.finished(rows).flatten(0, 1)  # (N K, *L)
        parts = flat.split(self.batch_size or len(flat))
        images = iter([image for part in parts for image in self.policy.decode(part)])
        ends, fps = range(int(self.one_step), len(rows[0].steps.at)), self.engine.frames_per_second
        for row in rows:
            made = [outcome_of(next(images), fps, end) for end in ends]
            yield replace(row, outcomes=(*made, *row.outcomes))

    def finished(self, rows: Rollouts) -> Tensor:
        """Finish the K prefixes of each of N rows of one size; returns latents (N, K, *L).

        The prefixes have 0 .. T - 1 steps, or 1 .. T - 1 steps with `one_step`.
        """
        states: list[FlowRow] = [row.steps for row in rows]
        conditioning = Conditioning.of_rows(states, "diffusion.with_prefix_rollouts")
        times = states[0].times.to(self.policy.device)
        at = states[0].at[:-1] + 1 if self.one_step else states[0].at  # (K,) steps at which prefixes end
        latents = torch.stack([state.path[at] for state in states])  # (N, K, *L)

        def compute(function: Callable[[Conditioning, Tensor, Tensor], Tensor], columns: Tensor) -> Tensor:
            """Map `function(conditioning, latents, times)` over (N, columns), `batch_size` rows at a time."""
            flat = latents[:, columns].flatten(0, 1)  # (rows x columns, *L), columns of a row adjacent
            owner = torch.arange(len(rows)).repeat_interleave(len(columns))
            time = times[at[columns]].repeat(len(rows))
            parts = torch.arange(len(flat)).split(self.batch_size or len(flat))
            computed = [
                function(conditioning[owner[part]], flat[part].to(times.device), time[part]).cpu()
                for part in parts
            ]
            return torch.cat(computed).view(len(rows), len(columns), *latents.shape[2:])

        if self.one_step:
            velocity = self.policy.velocity
            return compute(
                lambda texts, x, time: clean_estimate(x, velocity(x, time, texts), time),
                torch.arange(len(at)),
            )
        for i in range(int(at[0]), len(times) - 1):
            started = (at <= i).nonzero()[:, 0]  # longer prefixes are completed from a later step
            step = lambda texts, x, _, i=i: self.engine.advance(texts, x, times[i], times[i + 1])
            latents[:, started] = moved = compute(step, started)
            check_finite(
                moved.flatten(0, 1), [row.prompt.uid for row in rows for _ in range(len(started))], i
            )
        return latents
