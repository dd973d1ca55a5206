"""The model of the image demo: a small Emu3 with a VQ tokenizer that is trained on images of shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from examples.picture_tokens.counted_shapes import (
    ASKED,
    CELL,
    PLANNED,
    SIDE,
    cells_of,
    draw_image,
    plan,
    read_cells,
)
from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import builder, engine
from mmrl.core.protocols import Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.builders.tiny_image_writers import TinyEmu3

LOG_INTERVAL = 40  # updates between two lines of progress


@builder
@dataclass(kw_only=True)
class ShapeTokenizer:
    """Train the VQ tokenizer of a small Emu3 on images of shapes; its language model stays random.

    A plain autoencoder at first, whose latents give the first codebook by k-means, then a VQ-VAE
    (arXiv 1711.00937) with straight-through gradients. Reports the share of test images in which the judge
    reads the same before and after.

    Args:
        width: Hidden size of the language model.
        layers: Number of layers of the language model.
        codes: Size of the codebook.
        steps: Updates.
        plain_steps: Updates before the codebook.
        batch_size: Images of an update.
        learning_rate: Peak, after ten updates of warm-up; it falls linearly to a twentieth.
        commitment: Weight of the distance of latents from their codes.
    """

    stream: Stream
    width: PositiveInt = 96
    layers: PositiveInt = 3
    codes: PositiveInt = 64
    steps: PositiveInt = 240
    plain_steps: PositiveInt = 30
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 8e-3
    commitment: PositiveFloat = 0.25

    def build(self, output: Path) -> dict[str, Any]:
        """Write the folder of the model; return its size and the share of images that stay readable."""
        from transformers import Emu3ForConditionalGeneration

        texts = [
            f"user {PLANNED.format(one.caption)} assistant {plan(one, [*range(one.count)])}" for one in ASKED
        ]
        sizes = {
            "width": self.width,
            "layers": self.layers,
            "codes": self.codes,
            "levels": CELL.bit_length() - 1,
        }
        built = TinyEmu3(stream=self.stream, texts=tuple(texts), vocab_size=400, init=0.06, **sizes).build(
            output
        )
        model = Emu3ForConditionalGeneration.from_pretrained(output)
        self._fit(model.model.vqmodel)
        model.save_pretrained(output)
        return {**built, "readable": readable(model.model.vqmodel, self.stream.fixed("test images"))}

    def _fit(self, vq: Any) -> None:
        vq.requires_grad_(True)
        codes = vq.quantize.embedding.weight
        generator = self.stream.fixed("pictures")

        def update(step: int) -> Tensor:
            pixels = draw(self.batch_size, generator) / 127.5 - 1
            latents = encode(vq, pixels)  # (B, height, width, channels)
            if step < self.plain_steps:
                return mse_loss(decode(vq, latents), pixels)
            if step == self.plain_steps:
                codes.data.copy_(k_means(latents.detach().flatten(0, 2), self.codes))
            chosen = codes[torch.cdist(latents.flatten(0, 2), codes).argmin(1)].view_as(latents)
            near = mse_loss(chosen, latents.detach()) + self.commitment * mse_loss(latents, chosen.detach())
            return near + mse_loss(decode(vq, latents + (chosen - latents).detach()), pixels)

        fit(vq, update, self.learning_rate, self.steps)
        vq.requires_grad_(False)


def fit(vq: Any, update: Callable[[int], Tensor], rate: float, steps: int) -> None:
    """Train by a loss per step with Adam, printing progress."""
    optimizer = torch.optim.Adam(vq.parameters(), betas=(0.9, 0.95))
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - 0.95 * step / steps)
        loss = update(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vq.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % LOG_INTERVAL == 0 or step + 1 == steps:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1)
            print(
                f"tokenizer {step + 1}/{steps}  loss {float(loss.detach()):.4f}  eta {left:.0f} s", flush=True
            )


def draw(count: int, generator: Generator) -> Tensor:
    """Draw images (count, 3, side, side) uint8 of random captions."""
    chosen = [ASKED[i] for i in torch.randint(len(ASKED), (count,), generator=generator).tolist()]
    return torch.stack([draw_image(asked, cells_of(asked, generator)) for asked in chosen])


def encode(vq: Any, pixels: Tensor) -> Tensor:
    """Encode pixels (B, 3, side, side) from -1 to 1 to latents (B, rows, columns, channels)."""
    latents = vq.quant_conv(vq.encoder(pixels[:, None]).transpose(1, 2))
    return latents[:, :, 0].permute(0, 2, 3, 1)


def decode(vq: Any, latents: Tensor) -> Tensor:
    """Decode latents (B, rows, columns, channels) to pixels (B, 3, side, side)."""
    quantized = latents.permute(0, 3, 1, 2)[:, :, None]
    return vq.decoder(vq.post_quant_conv(quantized).transpose(1, 2), quantized.transpose(1, 2))


def k_means(points: Tensor, count: int, rounds: int = 20) -> Tensor:
    """Cluster points (N, D) into `count` centres; every first centre is the farthest from those before."""
    centres, far = [points[0]], (points - points[0]).square().sum(1)
    for _ in range(count - 1):
        centres.append(points[far.argmax()])
        far = torch.minimum(far, (points - centres[-1]).square().sum(1))
    found = torch.stack(centres)
    for _ in range(rounds):
        own = one_hot(torch.cdist(points, found).argmin(1), count).to(points)  # (N, count)
        sizes = own.sum(0)[:, None]
        found = torch.where(sizes > 0, own.T @ points / sizes.clamp(min=1), found)
    return found


@torch.no_grad()
def readable(vq: Any, generator: Generator, count: int = 200) -> float:
    """Compute the share of images in which the judge reads the same after encoding and decoding."""
    images = draw(count, generator)
    codes = vq.encode(images / 127.5 - 1, [(SIDE, SIDE)] * count).image_tokens
    again = ((vq.decode(torch.stack(codes)).clamp(-1, 1) + 1) * 127.5).round().byte()
    same = [read_cells(a) == read_cells(b) for a, b in zip(images, again, strict=True)]
    return sum(same) / count


@engine
class EncodedOnce:
    """The engine `offline` for one answer per prompt, which encodes every answer once."""

    notes: frozenset[str] = frozenset()
    reads_answers = needs_answers = True

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rows: dict[str, Trajectory] = {}

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Encode the answers that are new."""
        for prompt in prompts:
            if prompt.uid not in self.rows:
                self.rows[prompt.uid] = self.policy.encode(prompt, prompt.answers[0])
        return tuple(self.rows[prompt.uid] for prompt in prompts)
