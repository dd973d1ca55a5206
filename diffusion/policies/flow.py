"""The flow policy: an image or video model whose steps are choices on the way from noise to data."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mmrl.config.ranges import NonNegativeInt, PositiveFloat
from mmrl.config.registry import policy
from mmrl.config.schema import Piece
from mmrl.core.byte_lru import Kept
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.diffusion import loading, lora
from mmrl.diffusion.latents import default_of
from mmrl.diffusion.model_family import Condition, Family, family_of, frames_per_latent
from mmrl.diffusion.steps import Asked, FlowRow, FlowSteps, Likelihood
from mmrl.runtime.modules import DTYPES, LOW, keep_training_precision

CONDITION_BYTES = 2 << 30  # what the network was told about texts, kept on the CPU


class FlowNetwork(nn.Module):
    """A network and how its family asks it, as one module to be trained."""

    def __init__(self, network: nn.Module, family: Family, compute: torch.dtype) -> None:
        super().__init__()
        self.network, self.family, self.compute = network, family, compute

    def forward(
        self, latents: Tensor, sigma: Tensor, condition: Condition, empty: Condition | None, guidance: float
    ) -> Tensor:
        """Give guided velocities (B, *L) in float32 or better.

        With `empty` the network is asked twice in one batch, and guided away from what it says of no text.
        """
        scale = torch.full_like(sigma, guidance)
        with torch.autocast(latents.device.type, self.compute, enabled=self.compute in LOW):
            if empty is None:
                said = self.family.velocity(self.network, latents, sigma, condition, scale)
                return _exact(said)
            both = {name: torch.cat([value, condition[name]]) for name, value in empty.items()}
            twice = (torch.cat([part, part]) for part in (latents, sigma, scale))
            latents, sigma, scale = twice
            without, with_text = _exact(
                self.family.velocity(self.network, latents, sigma, both, scale)
            ).chunk(2)
        return self.family.guide(with_text, without, guidance)


def _exact(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


@policy(packages={"diffusers": "diffusion"})
class Flow:
    """A flow-matching pipeline of diffusers, by hub id or folder: a step is what `likelihood` says it is.

    `lora_rank` above 0 trains an adapter (float32) over the frozen network; `adapter` goes on with a saved
    one of that rank. Without it the whole network learns. Text encoders and decoder stay frozen; what the
    network is told about a text is kept. Trained weights are held in float32 and computed with in `dtype`,
    arithmetic of steps in float32. `negative_prompt` is what guidance leads away from; `max_sequence_length`
    is by default that of the pipeline. `evaluations` counts the rows that went through the network, guidance
    twice.
    """

    says = frozenset({"mean", "std", "dt", "velocity", "time", "target", "error"})

    def __init__(
        self,
        *,
        model: str,
        likelihood: Likelihood = Piece("diffusion.matching"),
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        lora_rank: NonNegativeInt = 0,
        lora_alpha: PositiveFloat | None = None,
        adapter: str = "",
        gradient_checkpointing: bool = False,
        negative_prompt: str = "",
        max_sequence_length: NonNegativeInt = 0,
    ) -> None:
        self.pipe = loading.load_pipeline(model, dtype=dtype)
        self.family = family_of(type(self.pipe).__name__)
        self.likelihood, self.says = likelihood, likelihood.says
        self.network: nn.Module = self.pipe.transformer
        self.negative_prompt = negative_prompt
        self.max_sequence_length = max_sequence_length or default_of(self.pipe, "max_sequence_length")
        self.adapted = bool(lora_rank)
        if adapter and not lora_rank:
            raise ValueError(f"to go on with the adapter '{adapter}', `lora_rank` must name its rank")
        if lora_rank:
            lora.add(self.network, lora_rank, lora_alpha or 2.0 * lora_rank, self.family.targets)
            if adapter:
                lora.load(self.network, Path(adapter))
        else:
            self.network.requires_grad_(True)
        keep_training_precision(self.network)
        if gradient_checkpointing:
            self.network.enable_gradient_checkpointing()
        loading.decode_exactly(self.pipe, dtype)
        self.module: nn.Module = FlowNetwork(self.network, self.family, DTYPES[dtype])
        self.conditions: Kept[Condition] = Kept(CONDITION_BYTES, _bytes)
        self.evaluations = 0

    @property
    def device(self) -> torch.device:
        """Tell where the network is."""
        return next(self.network.parameters()).device

    @property
    def precision(self) -> torch.dtype:
        """Tell in what steps are computed: float32, or float64 where the network is."""
        return torch.float64 if next(self.network.parameters()).dtype == torch.float64 else torch.float32

    # ---- what engines ask for

    def condition(self, text: str) -> Condition:
        """Read a text, once."""
        return self.conditions.get(text, lambda: self._encode(text))

    @torch.no_grad()
    def _encode(self, text: str) -> Condition:
        self._follow()
        try:
            return self.family.encode(self.pipe, [text], self.max_sequence_length)[0]
        except ValueError as error:
            raise ValueError(f"cannot read the prompt '{text}': {error}") from error

    def passes(self, guidance: float) -> int:
        """Count the network calls of one guided velocity."""
        return 1 if guidance == 1 or self.family.embedded_guidance else 2

    def velocity(self, latents: Tensor, sigma: Tensor, asked: Asked) -> Tensor:
        """Give velocities (B, *L) of latents at times (B,), in the precision of steps."""
        device, rows = self.device, asked.which.to(self.device)
        empty = [self.condition(self.negative_prompt)] if asked.passes > 1 else []
        stacked = {
            name: value.to(device) for name, value in self.family.stack([*asked.conditions, *empty]).items()
        }
        condition = {name: value[rows] for name, value in stacked.items()}
        without = {name: value[-1:].expand_as(condition[name]) for name, value in stacked.items()}
        self.evaluations += len(latents) * asked.passes
        return self.module(
            latents.to(device), sigma.to(device), condition, without if empty else None, asked.guidance
        )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Make pictures (B, 3, height, width) or videos (B, F, 3, height, width), uint8, on the CPU."""
        self._follow()
        pixels = self.family.decode(self.pipe, latents.to(self.device))
        broken = ~pixels.flatten(1).isfinite().all(1)
        if broken.any():
            raise FloatingPointError(
                f"the decoder made {int(broken.sum())} of {len(pixels)} pictures that hold NaN or infinity "
                f"out of finite latents (largest {latents.abs().max():.3g}); its precision overflows: set "
                "`policy.dtype` to bfloat16 or float32"
            )
        return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu()

    def _follow(self) -> None:
        """Bring encoders and decoder to where the network is."""
        for part in loading.modules_of(self.pipe, but=("transformer",)):
            if next(part.parameters()).device != self.device:
                part.to(self.device)

    # ---- what the loops ask for

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Turn a recorded picture or video into a row that has no path."""
        seen = outcome.image if outcome.video is None else outcome.video
        if seen is None:
            raise ValueError(
                f"a recorded answer of prompt '{prompt.uid}' holds neither a picture nor a video, which "
                "`diffusion.flow` learns from"
            )
        self._follow()
        pixels = seen[None].to(self.device) / 255
        with torch.no_grad():
            latents = self.family.compress(self.pipe, pixels)[0].to(self.precision).cpu()
        nothing = torch.zeros(0)
        frames = frames_per_latent(self.family, self.pipe, tuple(latents.shape))
        row = FlowRow(self.condition(prompt.text), latents[None], nothing.long(), nothing, frames=frames)
        return Trajectory(prompt, prompt.uid, (outcome,), row, self.likelihood.length(row), on_policy=False)

    def collate(self, rollouts: Rollouts) -> Batch:
        """Line rows up; all have the same number of steps."""
        steps = self.likelihood.collate([row.steps for row in rollouts], [row.prompt.uid for row in rollouts])
        num_steps = max(row.length for row in rollouts)
        missing = torch.full((1, num_steps), float("nan"))
        names = sorted({name for row in rollouts for name in row.notes})
        notes = {
            name: cat_padded([row.notes[name][None] if name in row.notes else missing for row in rollouts])
            for name in names
        }
        return Batch.of(steps, torch.ones(len(rollouts), num_steps), notes)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        steps: FlowSteps = batch.steps
        latents, times = steps.states()
        rows = torch.arange(len(times)).repeat_interleave(times.shape[1])
        velocity = self.velocity(latents.flatten(0, 1), times.flatten(), steps.asked[rows])
        return steps.read(velocity.unflatten(0, times.shape), extra)

    def save(self, folder: Path) -> None:
        """Write LoRA as `load_lora_weights` of the pipeline reads it, or the whole pipeline."""
        if self.adapted:
            lora.save(type(self.pipe), self.network, folder)
        else:
            loading.save_pipeline(self.pipe, folder)

    def load(self, folder: Path) -> None:
        """Take up the weights that `save` wrote, bit for bit."""
        if self.adapted:
            lora.load(self.network, folder)
        else:
            loading.load_network(self.network, folder)


def _bytes(condition: Condition) -> int:
    return sum(value.nbytes for value in condition.values())
