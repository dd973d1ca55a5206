"""The hallucination dial: next-token distributions with and without the picture, mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, PositiveShare, Probability, Range
from mmrl.config.registry import engine
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.decoding import (
    CachedReader,
    GenerationRequest,
    LogitsReader,
    PartialReader,
    TokenEngine,
)
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.media.corruptions import add_noise, map_frames, random_crop, without_media
from mmrl.vision.models.processor import EncodedPrompt

TRIES = 1000  # draws of a ratio that keeps its distance
LATEST = 20.0  # growth times position beyond which a ratio grows no further

Mix = Literal["log", "prob"]


@engine
class ContrastiveDecoding:
    """Mix what the model says with the picture (p) and without it (q): p^(1 - h) q^h, normalised, or with
    `mix: prob` (1 - h) p + h q.

    h, the hallucination ratio (arXiv 2411.17760; the form is our reading), is drawn for every answer around
    `contrast_alpha` with the deviation `contrast_alpha_std`, and stays on its side: in [0, 1], or below 0.
    Several ratios are taken in turn by the answers to a prompt, each at least `gap` above the one before: 0
    is plain decoding, 1 is blind. Below 0 it is contrastive decoding. VCD (arXiv 2311.16922) is
    `contrast_alpha: [-0.5], contrast_alpha_std: [0.0], against: noised, plausible: 0.1`: tokens of less than
    `plausible` times the highest probability are out. M3ID (arXiv 2403.14003) is `contrast_alpha: [-1.0],
    contrast_alpha_std: [0.0]` with a `growth`, by which h is multiplied by exp(growth t) - 1 at token t,
    where the highest probability is below `unsure`.

    The mixture comes before temperature and cuts. Answers hold their `contrast_alpha` among what is recorded,
    and which ratio it was as the tag `dial`; with h other than 0 they are not on policy. It wraps
    `vision.generate`. Rows without need of one of the two are read only once.
    """

    notes: frozenset[str] = frozenset()

    def __init__(
        self,
        engine: TokenEngine,
        *,
        stream: Stream,
        contrast_alpha: tuple[Annotated[float, Range(high=1)], ...] = (0.6,),
        contrast_alpha_std: tuple[NonNegativeFloat, ...] = (0.15,),
        gap: NonNegativeFloat = 0.0,
        mix: Mix = "log",
        against: Literal["blind", "noised", "cropped"] = "blind",
        noise_step: Annotated[int, Range(0, 999)] = 500,
        plausible: Probability = 0.0,
        growth: NonNegativeFloat = 0.0,
        unsure: PositiveShare = 1.0,
    ) -> None:
        _refuse(contrast_alpha, contrast_alpha_std, gap, mix, noise_step, plausible, growth, unsure)
        self.engine, self.policy, self.stream = engine, engine.policy, stream
        self.contrast_alpha, self.contrast_alpha_std, self.gap, self.mix = (
            contrast_alpha,
            contrast_alpha_std,
            gap,
            mix,
        )
        self.against, self.noise_step = against, noise_step
        self.plausible, self.growth, self.unsure = plausible, growth, unsure

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order, and tell its ratio."""
        rows = self.engine.decode(prompts, self._begin)
        asked: dict[str, int] = {}
        told = []
        for row in rows:
            index = asked[row.prompt.uid] = asked.get(row.prompt.uid, -1) + 1
            told.append(self._told(row, index))
        return tuple(told)

    def ratio(self, uid: str, index: int) -> float:
        """Draw the ratio of one answer to a prompt."""
        turn, place = divmod(index, len(self.contrast_alpha))
        generator = self.stream.generator("contrast_alpha", uid, turn)
        last = -math.inf
        for mean, std in list(zip(self.contrast_alpha, self.contrast_alpha_std, strict=True))[: place + 1]:
            last = self._draw(mean, std, last, generator)
        return last

    def _draw(self, mean: float, std: float, last: float, generator: torch.Generator) -> float:
        low, high = (0.0, 1.0) if mean >= 0 else (-math.inf, 0.0)
        for _ in range(TRIES if std else 1):
            value = mean + std * float(torch.randn((), generator=generator, dtype=torch.float64))
            value = min(max(value, low), high)
            if value - last >= self.gap:
                return value
        return last + self.gap

    def _told(self, row: Trajectory, index: int) -> Trajectory:
        ratio, answer = self.ratio(row.prompt.uid, index), row.outcomes[-1]
        answer = replace(
            answer,
            tags={**answer.tags, "dial": str(index % len(self.contrast_alpha))},
            recorded={**answer.recorded, "contrast_alpha": ratio},
        )
        return replace(row, outcomes=(*row.outcomes[:-1], answer), on_policy=row.on_policy and ratio == 0)

    def _begin(self, rows: Sequence[GenerationRequest]) -> LogitsReader:
        device = self.policy.core.get_input_embeddings().weight.device
        ratio = torch.tensor([self.ratio(row.prompt.uid, row.index) for row in rows], device=device)
        always = self.plausible > 0 or self.growth > 0 or self.unsure < 1
        other: dict[str, EncodedPrompt] = {}
        for row in rows:
            if row.prompt.uid not in other:
                other[row.prompt.uid] = self._other(row)
        return MixtureReader(
            PartialReader(
                (ratio != 1) | always,
                lambda here: CachedReader(
                    self.engine.rollout_policy, [rows[i].encoded for i in here], self.engine.cache
                ),
            ),
            PartialReader(
                ratio != 0,
                lambda here: CachedReader(
                    self.engine.rollout_policy, [other[rows[i].prompt.uid] for i in here], self.engine.cache
                ),
            ),
            ratio,
            self,
        )

    def _other(self, row: GenerationRequest) -> EncodedPrompt:
        """Encode a prompt for the branch that hallucinates."""
        generator = self.stream.generator("distortion", row.prompt.uid)
        if self.against == "blind":
            return self.policy.prompt_encoder.encode(without_media(row.prompt))
        if self.against == "cropped":
            less = map_frames(row.prompt, lambda frames: random_crop(frames, generator, (0.01, 0.2)))
            return self.policy.prompt_encoder.encode(less)
        pixels = {
            name: add_noise(value, generator, self.noise_step) if name.startswith("pixel_values") else value
            for name, value in row.encoded.media.items()
        }
        return replace(row.encoded, media=pixels)


class MixtureReader:
    """Reads rows twice, and mixes what both say."""

    def __init__(
        self, seeing: PartialReader, blind: PartialReader, ratio: Tensor, dial: ContrastiveDecoding
    ) -> None:
        self.seeing, self.blind, self.ratio, self.dial = seeing, blind, ratio, dial
        self.forbidden = torch.tensor(dial.policy.prompt_encoder.placeholders, device=ratio.device)
        self.length = 0

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token of every row in both ways."""
        dial, halves = self.dial, [self.seeing.read(token), self.blind.read(token)]
        seen, unseen = (half if type(half) is float else half.log_softmax(-1) for half in halves)
        ratio = self.ratio[:, None]
        if dial.growth:
            ratio = ratio * math.expm1(min(dial.growth * self.length, LATEST))
        if dial.unsure < 1:
            ratio = torch.where(seen.max(-1, keepdim=True).values < math.log(dial.unsure), ratio, 0.0)
        logits = mixed(seen, unseen, ratio, dial.mix)
        if dial.plausible > 0:
            limit = seen.max(-1, keepdim=True).values + math.log(dial.plausible)
            logits = logits.masked_fill((seen < limit) & (self.ratio[:, None] != 0), FORBIDDEN)
        self.length += 1
        # A large ratio takes what both forbid beyond all bounds.
        return logits.index_fill(-1, self.forbidden, FORBIDDEN)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows."""
        self.seeing.keep(rows)
        self.blind.keep(rows)
        self.ratio = self.ratio[rows]


def mixed(seen: Tensor | float, unseen: Tensor | float, ratio: Tensor, mix: Mix) -> Tensor:
    """Mix log-probabilities (n, V) with the picture and without it, by ratios (n, 1): unnormalised ones."""
    if mix == "log":
        return (1 - ratio) * seen + ratio * unseen
    parts = [torch.as_tensor(part, dtype=ratio.dtype, device=ratio.device) for part in (seen, unseen)]
    return ((1 - ratio) * parts[0].exp() + ratio * parts[1].exp()).log().clamp(min=FORBIDDEN)


def _refuse(
    contrast_alpha: tuple[float, ...],
    contrast_alpha_std: tuple[float, ...],
    gap: float,
    mix: Mix,
    noise_step: int,
    plausible: float,
    growth: float,
    unsure: float,
) -> None:
    if not contrast_alpha or len(contrast_alpha) != len(contrast_alpha_std) or min(contrast_alpha_std) < 0:
        raise ValueError(
            f"`contrast_alpha` and `contrast_alpha_std` must list as many numbers, deviations of 0 or more, not {list(contrast_alpha)} "
            f"and {list(contrast_alpha_std)}"
        )
    if (
        max(contrast_alpha) > 1
        or gap < 0
        or any(b - a < gap for a, b in zip(contrast_alpha, contrast_alpha[1:], strict=False))
    ):
        raise ValueError(
            f"`contrast_alpha` must not be above 1 and must rise by the `gap` of {gap}, not be {list(contrast_alpha)}"
        )
    if mix == "prob" and (min(contrast_alpha) < 0 or growth):
        raise ValueError(
            "`mix: prob` takes ratios in [0, 1] and no `growth`: a probability cannot be negative; use `log`"
        )
    if not 0 <= noise_step < 1000 or not 0 <= plausible <= 1 or growth < 0 or not 0 < unsure <= 1:
        raise ValueError(
            "`noise_step` must lie in [0, 1000), `plausible` in [0, 1], `unsure` in (0, 1] and `growth` must "
            f"be 0 or more, not {noise_step}, {plausible}, {unsure} and {growth}"
        )
