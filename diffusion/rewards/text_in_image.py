"""Whether a picture shows the text that its prompt asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import frames_of, imported

Recogniser = Callable[
    [Tensor], Sequence[tuple[str, float]]
]  # (3, height, width) uint8 to texts with confidences
EVERY = 4  # frame of a clip


@reward
class TextInImage:
    """Measure how much of the quoted text of a prompt can be read in its picture, in [0, 1] (Flow-GRPO,
    arXiv 2505.05470).

    The text is what stands between the first two double quotes; spaces and case do not matter. All that is
    recognised with a confidence above 0 is joined. A picture that shows the text and more earns 1; otherwise
    the edit distance, at most the length of the text, is taken off. Of a clip every fourth frame is read,
    and what it shows must be the text alone; frames that earn nothing are left out of the mean. A prompt
    without quotes is an error, an empty text earns 0 (our reading), and so does a picture at which the
    recogniser fails.

    `recogniser` is `package.module:function` from a picture (3, height, width) uint8 to (text, confidence)
    pairs; without it rapidocr reads.
    """

    def __init__(self, *, recogniser: str = "") -> None:
        self.recognise = imported("text_in_image", recogniser) if recogniser else rapid()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        return [self._measure(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]

    def _measure(self, prompt: Prompt, outcome: Outcome) -> float:
        target, frames = quoted(prompt), frames_of(prompt, outcome)
        if outcome.image is not None:
            return shown(target, self._read(frames[0]), more=True)
        rewards = [shown(target, self._read(frame), more=False) for frame in frames[::EVERY]]
        earned = [value for value in rewards if value > 0]
        return sum(earned) / len(earned) if earned else 0.0

    def _read(self, picture: Tensor) -> str:
        try:
            found = self.recognise(picture)
        except (
            Exception
        ) as error:  # the source counts a failure as a picture without text, but not in silence
            warnings.warn(f"the recogniser of text_in_image failed, which earns 0: {error!r}", stacklevel=2)
            return ""
        return "".join(text for text, confidence in found if confidence > 0)


def quoted(prompt: Prompt) -> str:
    """Find the text between the first two double quotes of a prompt."""
    before, _, rest = prompt.text.partition('"')
    text, closed, _ = rest.partition('"')
    if not closed:
        raise ValueError(
            f"text_in_image needs the wanted text in double quotes, but prompt '{prompt.uid}' reads "
            f"{prompt.text!r}"
        )
    return text


def shown(target: str, found: str, *, more: bool) -> float:
    """Compare two texts: 1 where they agree, 0 where nothing does. With `more`, what stands around the
    target does not matter."""
    target, found = (text.replace(" ", "").lower() for text in (target, found))
    if not target:
        return 0.0
    if more and target in found:
        return 1.0
    return 1.0 - min(edit_distance(found, target), len(target)) / len(target)


def edit_distance(one: str, other: str) -> int:
    """Count the letters to insert, delete or replace between two texts (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def rapid() -> Recogniser:
    """Make the recogniser of rapidocr, whose models come with the package."""
    try:
        import rapidocr

        engine = rapidocr.RapidOCR(params={"Global.text_score": 0.0, "Global.log_level": "critical"})
    except ImportError as error:
        raise ImportError(
            "text_in_image reads with rapidocr and onnxruntime: pip install 'mmrl[ocr]'"
        ) from error

    def recognise(picture: Tensor) -> list[tuple[str, float]]:
        # It wants blue before red, and rows of pixels.
        result = engine(picture.flip(0).permute(1, 2, 0).contiguous().cpu().numpy())
        return list(zip(result.txts or (), result.scores or (), strict=True))

    # It loads its models when it first needs them; a missing one should be found before training.
    blank = torch.full((3, 48, 96), 255, dtype=torch.uint8)
    recognise(blank)
    engine(blank.permute(1, 2, 0).numpy(), use_det=False, use_cls=False)
    return recognise
