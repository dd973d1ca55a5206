"""Contrastive decoding: next-token distributions with and without the image, mixed by a ratio."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count, pairwise
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, PositiveShare, Probability, Range
from mmrl.config.registry import engine
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.engines.generate import Generate
from mmrl.vision.media.prompts import add_noise, map_frames, random_crop, without_media
from mmrl.vision.models.processor import EncodedPrompt

TRIES = 1000  # maximum number of draws of a ratio; then the ratio is the previous one plus `gap`
LATEST = 20.0  # upper limit of decay_gamma * t, because exp(20) is far beyond any logit

Mix = Literal["log", "prob"]


@engine(sets_tags={"dial"})
@dataclass(eq=False)
class ContrastiveDecoding:
    """Mix next-token distributions with the image (p) and without it (q): p^(1 - h) q^h, normalised.

    h is the hallucination ratio of arXiv 2411.17760 (h-ratio; the form is our reading), drawn for every
    answer: 0 is plain decoding, 1 ignores the image, below 0 is contrastive decoding. VCD (arXiv 2311.16922)
    is `contrast_alpha: [-0.5], contrast_alpha_std: [0.0], against: noised, plausibility_threshold: 0.1`. M3ID
    (arXiv 2403.14003) is `contrast_alpha: [-1.0], contrast_alpha_std: [0.0]` with a `decay_gamma`.

    Temperature and truncation apply to the mixture. An answer records its ratio as `contrast_alpha`, and the
    index of the ratio's mean as the tag `dial`. Answers with a ratio other than 0 are off-policy. The engine
    wraps `vision.generate`; rows that need only one of the two distributions are run only once.

    Args:
        engine: The wrapped engine.
        contrast_alpha: Means of h, at most 1, in rising order; the answers to a prompt cycle through them. h
            is clamped to [0, 1] if its mean is at least 0, otherwise to values up to 0.
        contrast_alpha_std: Standard deviations of h, one per mean.
        gap: Minimal distance between neighbouring ratios of one cycle.
        mix: "log" mixes log-probabilities; "prob" mixes probabilities, (1 - h) p + h q.
        against: Input of q. "blind": no media. "noised": media with VCD's noise. "cropped": a small crop.
        noise_step: Diffusion step of the noise, 0 to 999; VCD: 500.
        plausibility_threshold: Remove tokens whose p is below this fraction of the highest p; VCD: 0.1.
        decay_gamma: M3ID's decay: multiplies h by exp(decay_gamma t) - 1 at token t; 0: constant h.
        confidence_threshold: Mix only at tokens where the highest p is below this (M3ID); 1: at all tokens.
    """

    engine: Generate
    _: KW_ONLY
    stream: Stream
    contrast_alpha: tuple[Annotated[float, Range(high=1)], ...] = (0.6,)
    contrast_alpha_std: tuple[NonNegativeFloat, ...] = (0.15,)
    gap: NonNegativeFloat = 0.0
    mix: Mix = "log"
    against: Literal["blind", "noised", "cropped"] = "blind"
    noise_step: Annotated[int, Range(0, 999)] = 500
    plausibility_threshold: Probability = 0.0
    decay_gamma: NonNegativeFloat = 0.0
    confidence_threshold: PositiveShare = 1.0
    notes: ClassVar[frozenset[str]] = frozenset()
    in_process: ClassVar[str] = "mixes two distributions at every token"

    def __post_init__(self) -> None:
        means, stds = list(self.contrast_alpha), list(self.contrast_alpha_std)
        if not means or len(means) != len(stds):
            raise ValueError(
                "`contrast_alpha` and `contrast_alpha_std` must list as many numbers, at least one, not "
                f"{means} and {stds}"
            )
        if any(b - a < self.gap for a, b in pairwise(means)):
            raise ValueError(f"`contrast_alpha` must rise by the `gap` of {self.gap}, not be {means}")
        if self.mix == "prob" and (min(means) < 0 or self.decay_gamma):
            raise ValueError(
                "`mix: prob` takes ratios in [0, 1] and no `decay_gamma`: a probability cannot be negative; "
                "use `log`"
            )
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an answer for every entry of `prompts`, in order, and record the ratios."""
        counters: dict[str, count[int]] = defaultdict(count)
        rows = []
        for row in self.engine.decode(prompts, self._begin):
            index = next(counters[row.prompt.uid])
            ratio = self.ratio(row.prompt.uid, index)
            rows.append(record_ratio(row, ratio, str(index % len(self.contrast_alpha))))
        return tuple(rows)

    def ratio(self, uid: str, index: int) -> float:
        """Draw the hallucination ratio h of answer `index`, at least `gap` above the one before it."""
        turn, place = divmod(index, len(self.contrast_alpha))
        generator = self.stream.generator("contrast_alpha", uid, turn)  # one generator per cycle of ratios
        last = -math.inf
        for mean, std in list(zip(self.contrast_alpha, self.contrast_alpha_std, strict=True))[: place + 1]:
            low, high = (0.0, 1.0) if mean >= 0 else (-math.inf, 0.0)
            for _ in range(TRIES if std else 1):
                value = mean + std * float(torch.randn((), generator=generator, dtype=torch.float64))
                value = min(max(value, low), high)
                if value - last >= self.gap:
                    break
            else:
                value = last + self.gap  # no draw was large enough
            last = value
        return last

    def _begin(self, rows: Sequence[GenerationRequest]) -> LogitsReader:
        """Create a reader that runs each row with the image, without it, or both, as its ratio requires."""
        device = self.policy.core.get_input_embeddings().weight.device
        ratio = torch.tensor([self.ratio(row.prompt.uid, row.index) for row in rows], device=device)
        # Thresholds and decay need p even in rows with ratio 1.
        needs_p = self.plausibility_threshold > 0 or self.decay_gamma > 0 or self.confidence_threshold < 1
        distinct = {row.prompt.uid: row for row in rows}
        corrupted = {uid: self._corrupted(row) for uid, row in distinct.items()}
        halves = []
        for needed, prompts in (
            ((ratio != 1) | needs_p, [row.encoded for row in rows]),
            (ratio != 0, [corrupted[row.prompt.uid] for row in rows]),
        ):
            prompts = [prompts[i] for i in needed.nonzero()[:, 0].tolist()]
            halves.append((needed, self.engine.reader(prompts) if prompts else None))
        return MixtureReader(halves, ratio, self)

    def _corrupted(self, row: GenerationRequest) -> EncodedPrompt:
        """Encode the prompt of q: without media, with noised media, or with cropped media."""
        generator = self.stream.generator("distortion", row.prompt.uid)  # same noise for all answers
        encode = self.policy.prompt_encoder.encode
        if self.against == "blind":
            return encode(without_media(row.prompt))
        if self.against == "cropped":
            return encode(map_frames(row.prompt, lambda frames: random_crop(frames, generator, (0.01, 0.2))))
        pixels = {
            name: add_noise(value, generator, self.noise_step) if name.startswith("pixel_values") else value
            for name, value in row.encoded.media.items()
        }
        return replace(row.encoded, media=pixels)


class MixtureReader:
    """Runs each row with the image, without it, or both, depending on its ratio, and mixes the logits.

    `halves` is a pair for p and a pair for q. Each has the mask (n,) of the rows that need this distribution,
    and the reader of these rows, or None if there are none.
    """

    def __init__(
        self,
        halves: Sequence[tuple[Tensor, LogitsReader | None]],
        ratio: Tensor,
        settings: ContrastiveDecoding,
    ) -> None:
        self.halves, self.ratio, self.settings = halves, ratio, settings
        placeholders = settings.policy.prompt_encoder.placeholders
        self.forbidden = torch.tensor(placeholders, dtype=torch.int64, device=ratio.device)
        self.length = 0

    def read(self, token: Tensor | None) -> Tensor:
        """Append one token per row (n,) in both readers, and return the mixed logits (n, V)."""
        settings, ratio = self.settings, self.ratio[:, None]
        p, q = (self._logp(needed, reader, token) for needed, reader in self.halves)
        if settings.decay_gamma:
            # M3ID weighs p - q by (1 - exp(-gamma t)) / exp(-gamma t) = exp(gamma t) - 1.
            ratio = ratio * math.expm1(min(settings.decay_gamma * self.length, LATEST))
        if settings.confidence_threshold < 1:
            unsure = p.max(-1, keepdim=True).values < math.log(settings.confidence_threshold)
            ratio = torch.where(unsure, ratio, 0.0)
        mixture = mixed(p, q, ratio, settings.mix)
        if settings.plausibility_threshold > 0:
            # Remove tokens with p < threshold * max p, but not in rows with ratio 0, which decode plainly.
            limit = p.max(-1, keepdim=True).values + math.log(settings.plausibility_threshold)
            mixture = mixture.masked_fill((p < limit) & (self.ratio[:, None] != 0), FORBIDDEN)
        self.length += 1
        # Forbid placeholders again: a large ratio could make their huge negative logits positive.
        return mixture.index_fill(-1, self.forbidden, FORBIDDEN)

    def _logp(self, needed: Tensor, reader: LogitsReader | None, token: Tensor | None) -> Tensor | float:
        """Return log-probabilities (n, V), 0 in rows that do not need them; the float 0 without a reader."""
        if reader is None:
            return 0.0
        logp = reader.read(token if token is None else token[needed]).log_softmax(-1)
        if needed.all():
            return logp
        return logp.new_zeros(len(needed), logp.shape[1]).index_put((needed,), logp)

    def keep(self, rows: Tensor) -> None:
        """Keep only the answers (rows) with these indices (k,) in the batch."""
        halves = []
        for needed, reader in self.halves:
            # Convert to indices in the reader, which has only the rows that need it.
            inside = (needed.cumsum(0) - 1)[rows][needed[rows]]
            if reader is not None and len(inside):
                reader.keep(inside)
            halves.append((needed[rows], reader if len(inside) else None))
        self.halves, self.ratio = halves, self.ratio[rows]


def mixed(p: Tensor | float, q: Tensor | float, ratio: Tensor, mix: Mix) -> Tensor:
    """Mix log-probabilities p and q (n, V) with ratios (n, 1); the result is not normalised."""
    if mix == "log":
        return (1 - ratio) * p + ratio * q  # the logarithm of p^(1 - h) q^h
    p, q = (torch.as_tensor(part, dtype=ratio.dtype, device=ratio.device) for part in (p, q))
    return ((1 - ratio) * p.exp() + ratio * q.exp()).log().clamp(min=FORBIDDEN)


def record_ratio(row: Trajectory, ratio: float, dial: str) -> Trajectory:
    """Record the hallucination ratio in an answer's row; mark the row off-policy if the ratio is not 0."""
    answer = row.outcomes[-1]
    answer = replace(
        answer,
        tags={**answer.tags, "dial": dial},
        recorded={**answer.recorded, "contrast_alpha": ratio},
    )
    return replace(row, outcomes=(*row.outcomes[:-1], answer), on_policy=row.on_policy and ratio == 0)
