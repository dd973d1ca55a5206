"""The text-rendering reward: reads an image by OCR and compares it with the quoted text of the prompt."""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mmrl.config.registry import reward
from mmrl.core.answer_text import spelled
from mmrl.core.answers import targets_of
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import frames_of, import_function
from mmrl.rewards.adapters import OwnAnswer

# Maps an image (3, height, width) uint8 to texts with confidences.
Recogniser = Callable[[Tensor], Sequence[tuple[str, float]]]
FRAME_STRIDE = 4  # every fourth frame of a video is read


def _own_texts(prompt: Prompt, *, column: str) -> OwnAnswer:
    return OwnAnswer(tuple(wanted(prompt, column)))


@reward(own_answer=_own_texts, inputs=RewardInputs(VISUAL))
class TextInImage:
    """Fraction of a prompt's quoted text that can be read in its image, in [0, 1].

    The reward of Flow-GRPO (arXiv 2505.05470). The wanted text is between the first quotes of the prompt, see
    `quoted`. Spaces, case and the Unicode form of a letter are ignored. All text recognised with a confidence
    above 0 is joined in the order of the recogniser, so lines in another order cost edits, as in the source.
    An image that contains the wanted text earns 1. Otherwise it earns 1 minus the edit distance per letter of
    the wanted text, at least 0. Every fourth frame of a video is read, and must show only the wanted text;
    frames that earn 0 are left out of the mean. A prompt without quotes is an error. An empty wanted text
    earns 0 (our reading), and so does an image at which the recogniser fails.

    Args:
        recogniser: `package.module:function` that maps an image (3, height, width) uint8 to pairs (text,
            confidence); by default rapidocr.
        column: Data column with the wanted text, or with a list of accepted texts; empty: the text is quoted
            in the prompt.
    """

    column: str = ""  # empty: the prompt quotes the wanted text

    def __init__(self, *, recogniser: str = "", column: str = "") -> None:
        self.column = column
        self.recognise = import_function("text_in_image", recogniser) if recogniser else rapid_ocr()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every outcome."""
        rewards = []
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            targets, frames = wanted(prompt, self.column), frames_of(prompt, outcome)[::FRAME_STRIDE]
            image = outcome.image is not None
            texts = [self.read(frame) for frame in frames]
            values = [max(text_match(target, text, more=image) for target in targets) for text in texts]
            earned = [value for value in values if value > 0]
            rewards.append(sum(earned) / len(earned) if earned else 0.0)
        return rewards

    @staticmethod
    def grade_texts(prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, column: str) -> list[float]:
        """Grade the text of each outcome as if it had been recognised in an image."""
        return [
            max(text_match(target, outcome.text or "", more=True) for target in wanted(prompt, column))
            for prompt, outcome in zip(prompts, outcomes, strict=True)
        ]

    def read(self, image: Tensor) -> str:
        """Recognise the texts in an image (3, height, width), and join them."""
        try:
            texts = self.recognise(image)
        except Exception as error:  # as Flow-GRPO, count a failure as no text; but warn
            warnings.warn(f"the recogniser of text_in_image failed, which earns 0: {error!r}", stacklevel=2)
            return ""
        return "".join(text for text, confidence in texts if confidence > 0)


def wanted(prompt: Prompt, column: str) -> list[str]:
    """Return the accepted texts of a prompt: from the column, or without a column the quoted text."""
    if not column:
        return [quoted(prompt)]
    targets = [] if prompt.columns.get(column) == "" else targets_of(prompt.columns.get(column))
    if not targets:
        raise ValueError(
            f"text_in_image needs the wanted text in the column '{column}', but prompt '{prompt.uid}' has "
            f"{prompt.columns.get(column)!r} there; its columns are {', '.join(prompt.columns)}"
        )
    return targets


# Maps opening to closing quotes. The first non-empty pair counts; double quotes come before single quotes.
DOUBLE = {
    '"': '"”',
    "“": '”“"',
    "„": '“”"',
    "‟": '”"',
    "”": "”",
    "«": "»",
    "»": "«",
    "「": "」",
    "『": "』",
    "〝": "〞〟",
}
SINGLE = {"'": "'’", "‘": "’'", "‚": "‘’", "‹": "›", "`": "`'"}


def quoted(prompt: Prompt) -> str:
    """Find the text between the first quotes of a prompt, of any form: "OPEN", “OPEN”, «OPEN», 'OPEN'.

    Inch marks (quotes after a digit) and apostrophes are no quotes. Quotes can be escaped or doubled.
    """
    text = re.sub(r"\\+(?=[\"'])", "", html.unescape(prompt.text)).replace(",,", "„")
    text = re.sub(r'"{2,}(?=\S)([^"]*[^"\s])"{2,}', r'"\1"', text.replace("``", "“").replace("''", "”"))
    empty = False
    for pairs in (DOUBLE, SINGLE):
        at = 0
        while at < len(text):
            end = _end(text, at, pairs) if text[at] in pairs else 0
            if end and text[at + 1 : end].strip():
                return text[at + 1 : end].strip()
            empty |= bool(end) and pairs is DOUBLE
            at = max(at, end) + 1
    if not empty:
        raise ValueError(
            f"text_in_image needs the wanted text in quotes or in a `column`, but prompt '{prompt.uid}' "
            f"reads {prompt.text!r}"
        )
    return ""


def _end(text: str, at: int, pairs: Mapping[str, str]) -> int:
    """Return the index of the quote that closes the one at `at`; 0 if there is none."""
    mark, before = text[at], text[at - 1 : at] if at else ""
    apostrophe = mark in "'‘`" and (before.isalnum() or re.match(r"\d\ds\b", text[at + 1 : at + 4]))
    if apostrophe or (mark in "\"'”" and before.isdigit()):
        return 0
    for end in range(at + 1, len(text)):
        if text[end] not in pairs[mark]:
            continue
        inside, after = text[end - 1], text[end + 1 : end + 2]
        word = text[end] in "'’" and after.isalnum()  # the mark is an apostrophe, as in don't
        inches = text[end] == '"' and inside.isdigit() and text[end + 1 :].count('"') % 2
        if end > at + 1 and (word or inches or (pairs is SINGLE and inside.isspace())):
            continue
        return end
    return 0


def text_match(target: str, text: str, *, more: bool) -> float:
    """Compare two texts: 1 if equal, 0 if nothing agrees. With `more`, text around the target is allowed."""
    target, text = ("".join(spelled(words).casefold().split()) for words in (target, text))
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
        # rapidocr takes BGR images with channels last.
        result = engine(image.flip(0).permute(1, 2, 0).contiguous().cpu().numpy())
        return list(zip(result.txts or (), result.scores or (), strict=True))

    # Models are loaded at first use; run them now, so that a missing model is noticed before training.
    blank = torch.full((3, 48, 96), 255, dtype=torch.uint8)
    recognise(blank)
    engine(blank.permute(1, 2, 0).numpy(), use_det=False, use_cls=False)
    return recognise
