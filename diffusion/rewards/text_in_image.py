"""The text-rendering reward: reads an image by OCR and compares it with the quoted text of the prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import frames_of, import_function

# From an image (3, height, width) uint8 to texts with confidences.
Recogniser = Callable[[Tensor], Sequence[tuple[str, float]]]
FRAME_STRIDE = 4  # of a video


@reward
class TextInImage:
    """Share of a prompt's quoted text that can be read in its image, in [0, 1].

    As in Flow-GRPO (arXiv 2505.05470). The text is what is between the first two double quotes; spaces and
    case do not matter. All text recognised with a confidence above 0 is joined. An image that shows the text
    and more earns 1; otherwise the edit distance, at most the length of the text, is taken off. Of a video
    every fourth frame is read, and must show the text alone; frames that earn nothing are left out of the
    mean. A prompt without quotes is an error, an empty text earns 0 (our reading), and so does an image at
    which the recogniser fails.

    `recogniser` is `package.module:function` from an image (3, height, width) uint8 to (text, confidence)
    pairs; by default rapidocr.
    """

    def __init__(self, *, recogniser: str = "") -> None:
        self.recognise = import_function("text_in_image", recogniser) if recogniser else rapid_ocr()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        rewards = []
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            target, frames = quoted(prompt), frames_of(prompt, outcome)[::FRAME_STRIDE]
            image = outcome.image is not None
            values = [text_match(target, self.read(frame), more=image) for frame in frames]
            earned = [value for value in values if value > 0]
            rewards.append(sum(earned) / len(earned) if earned else 0.0)
        return rewards

    def read(self, image: Tensor) -> str:
        """Join the texts of an image (3, height, width)."""
        try:
            texts = self.recognise(image)
        except Exception as error:  # the source counts a failure as an image without text; here it warns
            warnings.warn(f"the recogniser of text_in_image failed, which earns 0: {error!r}", stacklevel=2)
            return ""
        return "".join(text for text, confidence in texts if confidence > 0)


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


def text_match(target: str, text: str, *, more: bool) -> float:
    """Compare two texts: 1 if equal, 0 if nothing agrees. With `more`, text around the target is allowed."""
    target, text = (words.replace(" ", "").lower() for words in (target, text))
    if not target:
        return 0.0
    if more and target in text:
        return 1.0
    return 1.0 - min(edit_distance(text, target), len(target)) / len(target)


def edit_distance(text: str, other: str) -> int:
    """Count the letters to insert, delete or replace between two texts (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(text, 1):  # row[j] becomes the distance of text[:i] and other[:j]
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def rapid_ocr() -> Recogniser:
    """Build a recogniser from rapidocr, whose models come with the package."""
    try:
        import rapidocr

        engine = rapidocr.RapidOCR(params={"Global.text_score": 0.0, "Global.log_level": "critical"})
    except ImportError as error:
        raise ImportError(
            "text_in_image reads with rapidocr and onnxruntime: pip install 'mmrl[ocr]'"
        ) from error

    def recognise(image: Tensor) -> list[tuple[str, float]]:
        # rapidocr takes BGR, channels last
        result = engine(image.flip(0).permute(1, 2, 0).contiguous().cpu().numpy())
        return list(zip(result.txts or (), result.scores or (), strict=True))

    # Models are loaded at first use; a missing one should be noticed before training.
    blank = torch.full((3, 48, 96), 255, dtype=torch.uint8)
    recognise(blank)
    engine(blank.permute(1, 2, 0).numpy(), use_det=False, use_cls=False)
    return recognise
