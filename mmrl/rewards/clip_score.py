"""Image-text similarity with a CLIP or SigLIP model of open_clip: CLIPScore, RefCLIPScore, SigLIP."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.plain import as_list
from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import reward
from mmrl.core import plain_text
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.frames import mean_over_frames
from mmrl.runtime.clip_model import load_towers

WEIGHT = 2.5  # factor of CLIPScore, arXiv 2104.08718
PREFIX = "A photo depicts "


@reward(packages={"open_clip": "clip"})
class ClipScore:
    """Image-text similarity of a CLIP or SigLIP model: cosine, logit or CLIPScore (arXiv 2104.08718).

    SigLIP is arXiv 2303.15343. An image is compared with the text in `against`. An outcome with only text is
    a caption, which is compared with the prompt's only image.

    A text that the model would truncate is split into sentences, and long sentences at commas and `and`;
    fragments of fewer than three words count only if there is nothing else. The cosines of these parts are
    clamped at 0 and pooled. An empty text has the cosine 0. Splitting and pooling are our reading.

    Args:
        model: Architecture of open_clip, a folder with open_clip's config JSON and weights, or
            `hf-hub:owner/name`.
        pretrained: Tag or file of weights for an architecture; null is `openai`.
        scale: `cosine`, the model's `logit` (exp(t) cos + b), or `clipscore`, 2.5 max(cos, 0).
        divide_by: Divisor of the result; published trainings divide the logit by 30 or 100.
        against: What an image is compared with: `prompt`, `target`, or a column of the prompt.
        references: Column of reference captions. If set, the reward is RefCLIPScore: the harmonic mean of
            CLIPScore and the cosine with the best reference; None for a prompt without references. A negative
            cosine with the best reference counts as 0, as in the paper (its code keeps negative values).
        prefix: Text before every caption. Null: "A photo depicts " if `scale` is `clipscore` and the model is
            not SigLIP, else no text.
        split: Split texts that are too long (`long`), or every text (`always`).
        pool: How to pool the parts of a text: `mean`, `length` (mean weighted by words), `min` or `soft_min`.
        tau: Temperature of `soft_min`, above 0, in units of the cosine.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean of their scores.
        batch_size: Images or texts per forward pass.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str = "ViT-L-14",
        pretrained: str | None = None,
        scale: Literal["cosine", "logit", "clipscore"] = "cosine",
        divide_by: float = 1.0,
        against: str = "prompt",
        references: str = "",
        prefix: str | None = None,
        split: Literal["long", "always"] = "long",
        pool: Literal["mean", "length", "min", "soft_min"] = "mean",
        tau: PositiveFloat = 0.05,
        frames: PositiveInt = 8,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        if references and scale != "clipscore":
            raise ValueError(
                f"RefCLIPScore takes `scale: clipscore`, not '{scale}'; set it, or drop `references`"
            )
        if divide_by == 0:
            raise ValueError("clip_score needs a `divide_by` other than 0")
        self.towers, self.frames = load_towers(model, pretrained, device), frames
        own = PREFIX if scale == "clipscore" and self.towers.bias is None else ""
        self.prefix = own if prefix is None else prefix
        self.scale, self.divide_by, self.against, self.references = scale, divide_by, against, references
        self.always, self.pool, self.tau, self.batch_size = split == "always", pool, tau, batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome; None if `references` is set and a prompt has none."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames)

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every image or caption."""
        pairs = [self._pair(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        keys = [_content_key(image) for image, _ in pairs]
        parts = [self._parts(text, self.always) for _, text in pairs]
        references = []  # for each prompt: the parts of its reference captions
        for prompt in prompts:
            captions = as_list(prompt.columns.get(self.references) if self.references else None)
            references.append([part for text in captions for part in self._parts(text, False)])
        images = self._encode(self.towers.look, dict(zip(keys, (image for image, _ in pairs), strict=True)))
        all_texts = [text for texts in (*parts, *references) for text in texts]
        texts = self._encode(self.towers.read, dict(zip(all_texts, all_texts, strict=True)))
        return [
            self._reward(images[key], own, [texts[part] for part in own], [texts[part] for part in others])
            for key, own, others in zip(keys, parts, references, strict=True)
        ]

    def reads_whole(self, text: str) -> bool:
        """Whether a caption fits into the model's context, so that it is scored without splitting."""
        return not self.always and self.towers.fits(self.prefix + text)

    def _pair(self, prompt: Prompt, outcome: Outcome) -> tuple[Tensor, str]:
        """Return (image (3, height, width) uint8, text to compare it with)."""
        if outcome.image is not None:
            columns = {"prompt": prompt.text, "target": prompt.target, **prompt.columns}
            if columns.get(self.against) is None:
                raise ValueError(
                    f"clip_score compares with '{self.against}', which prompt '{prompt.uid}' does not have; "
                    f"it has {', '.join(name for name, value in columns.items() if value is not None)}"
                )
            return outcome.image, str(columns[self.against])
        if outcome.text is None:
            raise ValueError(
                f"clip_score found neither an image nor a text in an outcome of prompt '{prompt.uid}'"
            )
        if len(prompt.media) != 1:
            raise ValueError(
                "clip_score compares a caption with the one image of its prompt, but prompt "
                f"'{prompt.uid}' has {len(prompt.media)}"
            )
        return prompt.media[0].load().pixels[0], outcome.text

    def _parts(self, text: str, always: bool) -> list[str]:
        """Split a text into parts that fit the model, each with the prefix; empty for an empty text."""
        text = plain_text.whole(text)
        if not text.strip():
            return []
        fits = lambda part: self.towers.fits(self.prefix + part)
        whole = not always and fits(text)
        return [self.prefix + part for part in ([text] if whole else split_text(text, fits))]

    def _encode(self, encode: Callable[[Sequence], Tensor], distinct: Mapping[Any, Any]) -> dict[Any, Tensor]:
        """Encode distinct images or texts in batches; return a mapping of their keys to unit vectors."""
        inputs = list(distinct.values())
        chunks = [inputs[at : at + self.batch_size] for at in range(0, len(inputs), self.batch_size)]
        return dict(zip(distinct, (row for chunk in chunks for row in encode(chunk)), strict=True))

    def _reward(
        self, image: Tensor, parts: Sequence[str], texts: Sequence[Tensor], references: Sequence[Tensor]
    ) -> float | None:
        """Compute the reward from the vectors of the image, the text parts and the references."""
        if self.references and not references:
            return None
        cosines = [float(text @ image) for text in texts]
        if len(cosines) > 1 or self.scale == "clipscore":
            cosines = [max(cosine, 0.0) for cosine in cosines]
        value = self._pooled(cosines, parts) if cosines else 0.0  # an empty text has no parts
        if self.scale == "logit":
            value = self.towers.factor * value + (self.towers.bias or 0.0)
        elif self.scale == "clipscore":
            value = WEIGHT * value
            if references and texts:
                best = [max(0.0, *(float(text @ reference) for reference in references)) for text in texts]
                value = harmonic_mean(value, self._pooled(best, parts))
        return value / self.divide_by

    def _pooled(self, cosines: Sequence[float], parts: Sequence[str]) -> float:
        low = min(cosines)
        if self.pool == "min":
            return low
        if self.pool == "soft_min":
            # -tau log mean exp(-cos / tau), with the smallest cosine factored out against underflow.
            mean = sum(math.exp((low - cosine) / self.tau) for cosine in cosines) / len(cosines)
            return low - self.tau * math.log(mean)
        weights = [len(part.split()) if self.pool == "length" else 1 for part in parts]
        return sum(c * w for c, w in zip(cosines, weights, strict=True)) / sum(weights)


def harmonic_mean(a: float, b: float) -> float:
    """Return the harmonic mean of two non-negative numbers; 0 if both are 0 (our reading)."""
    return 2 * a * b / (a + b) if a + b >= 1e-8 else 0.0


def _content_key(image: Tensor) -> tuple:
    """Return the shape and content hash of an image; equal images have equal keys."""
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3:
        raise ValueError(
            "clip_score looks at images of (3, height, width) uint8, not at "
            f"{tuple(image.shape)} {image.dtype}"
        )
    data = image.cpu().contiguous().numpy().tobytes()
    return (*image.shape, hashlib.blake2b(data, digest_size=16).digest())


# ---- long texts

_SHORT = r"(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Mt|Fig|No|vs|etc|approx|e\.g|i\.e|a\.m|p\.m|cf|ca)\."
_LONGEST = 8  # longest abbreviation, in characters
_BULLET = re.compile(r"^\s*(?:[-*•–]|\d{1,3}[.)])\s+")


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Split a text into sentences and list items; split long ones into clauses, words or letters.

    Parts of fewer than three words or without a letter are dropped, unless nothing else is left.
    """
    parts = [part for sentence in split_sentences(text) for part in _cut(sentence, fits, _LEVELS)]
    phrases = [part for part in parts if len(part.split()) >= 3 and any(map(str.isalpha, part))]
    return phrases or parts


def split_sentences(text: str) -> list[str]:
    """Split at line ends and after `.`, `!` and `?` followed by space, but not after abbreviations."""
    sentences = []
    for line in text.splitlines():
        line = _BULLET.sub("", line)
        start = 0
        for match in re.finditer(r"(?<![.!?])[.!?]+[\"')\]]*\s+|[。！？]+", line):
            last = line[max(start, match.start() - _LONGEST) : match.start()] + match[0].rstrip()
            if not re.search(rf"(?:^|[\s(]){_SHORT}$", last):
                sentences.append(line[start : match.end()].strip())
                start = match.end()
        sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if sentence]


# Patterns of separators: each pattern splits the parts that are still too long after the previous pattern. A
# separator stays with the part before it.
_LEVELS = (r"(?<=;)\s+", r"(?<=,)\s+|\s+(?=and\s)", r"\s+", r"(?<=.)(?=.)")


def _cut(text: str, fits: Callable[[str], bool], levels: Sequence[str]) -> list[str]:
    """Split a text that does not fit the model; rejoin neighbouring parts while they fit (our reading)."""
    if fits(text):
        return [text]
    if not levels:
        raise ValueError("clip_score cannot read a single letter after this `prefix`; shorten it")
    glue = "" if len(levels) == 1 else " "
    parts: list[str] = []
    for piece in (part for whole in re.split(levels[0], text) for part in _cut(whole, fits, levels[1:])):
        joined = f"{parts[-1]}{glue}{piece}" if parts else piece
        parts[-1:] = [joined] if fits(joined) else [*parts[-1:], piece]
    return parts
