"""Rewards by models that write their scores: EditScore and UnifiedReward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.reward_inputs import RewardInputs
from mmrl.core.types import Media, Message, Outcome, Part, Prompt
from mmrl.diffusion.reward_base import frames_of
from mmrl.diffusion.rewards.edits import source_media
from mmrl.diffusion.rewards.qwen_scorer import published_prompts
from mmrl.rewards.asking import Asking, Unread, media_of
from mmrl.runtime.scoring import by_prompt

LIST = re.compile(r"""["']score["']\s*:\s*\[([^\[\]]*)\]""")
RANGE = 25  # highest score that a reply can give an edit
# Maps each form of UnifiedReward to the labels of its scores, which are from 1 to 5.
LABELS = {
    "image": ("Alignment Score", "Coherence Score", "Style Score"),
    "video": ("Alignment Score", "Physics Score", "Style Score"),
    "final_score": ("Final Score",),
}
Scores = tuple[float, ...]
OF_IMAGE_EDITS = RewardInputs(frozenset({"image"}), source=True)


class Written(Asking):
    """Base of rewards by a model that writes its scores as a text, in answer to published prompts."""

    name: str
    image_labels = False

    def __post_init__(self) -> None:
        self.asker = self.make_asker()

    def ask(
        self,
        prompt: str,
        uids: Sequence[str],
        texts: Sequence[str],
        media: Sequence[Sequence[Media]],
        wanted: str,
        read: Callable[[str], Scores | None],
    ) -> list[Scores | Unread]:
        """Ask the model a published prompt about each text with its images, and parse the scores."""
        questions = []
        for uid, text, shown in zip(uids, texts, media, strict=True):
            filled = published_prompts()[prompt].replace("{text_prompt}", text)
            parts = [part for number, image in enumerate(shown, 1) for part in self._labelled(number, image)]
            message = Message("user", (*parts, Part(filled, quoted=True)))
            questions.append(Prompt(f"{self.name}/{prompt}/{uid}", (message,)))
        return self.asker.ask(questions, "", wanted, read)

    def edit_scores(
        self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome], following: str, quality: str, turn: int
    ) -> list[float | Unread]:
        """Score edits from 0 to 10: the square root of the product of two numbers.

        These are the lowest score in the reply to the published prompt `following`, and in that to `quality`.
        """
        if missing := [p.uid for p, o in zip(prompts, outcomes, strict=True) if o.image is None]:
            raise ValueError(f"{self.name} scores edited images; an outcome of prompt '{missing[0]}' is none")
        uids = [f"{uid}/{turn}" for uid in unique_names(prompts)]
        results = [media_of(outcome)[0] for outcome in outcomes]
        pairs = [(source_media(p, self.name), result) for p, result in zip(prompts, results, strict=True)]
        texts, wanted = [prompt.text for prompt in prompts], f'"score": [a, b] from 0 to {RANGE}'
        follows = self.ask(following, uids, texts, pairs, wanted, read_list)
        looks = self.ask(quality, uids, texts, [(result,) for result in results], wanted, read_list)
        return [overall(*both) for both in zip(follows, looks, strict=True)]

    def _labelled(self, number: int, image: Media) -> Iterator[Part]:
        if self.image_labels:
            yield Part(f"<img{number}>: ")
        yield Part(media=image)


def unique_names(prompts: Sequence[Prompt]) -> list[str]:
    """Name every outcome by its prompt and its number among the outcomes of this prompt."""
    names = [""] * len(prompts)
    for members in by_prompt(prompts).values():
        for number, i in enumerate(members):
            names[i] = f"{prompts[i].uid}/{number}"
    return names


def read_list(text: str) -> Scores | None:
    """Parse the two numbers of the last `"score": [a, b]`; None if missing, or outside 0 to 25."""
    found = LIST.findall(text)
    return _numbers(found[-1].split(","), 2, 0, RANGE) if found else None


def read_labels(labels: Sequence[str]) -> Callable[[str], Scores | None]:
    """Create a parser of the last number behind each label; it returns None unless all are in [1, 5]."""

    def read(text: str) -> Scores | None:
        found = [re.findall(rf"{label}[^:\n]*:\s*(-?[\d.]+)", text) for label in labels]
        return _numbers([values[-1].rstrip(".") for values in found if values], len(labels), 1, 5)

    return read


def _numbers(words: Sequence[str], count: int, low: float, high: float) -> Scores | None:
    if len(words) != count or not all(re.fullmatch(r"\s*\d+(\.\d+)?\s*", word) for word in words):
        return None
    values = tuple(map(float, words))
    return values if all(low <= value <= high for value in values) else None


def _inputs_of(form: str) -> RewardInputs:
    """Return the inputs (kind of media, source image) that a `form` of `UnifiedReward` requires."""
    kind = "video" if form == "video" else "image"
    return OF_IMAGE_EDITS if form == "edit" else RewardInputs(frozenset({kind}))


def overall(following: Scores | Unread, quality: Scores | Unread) -> float | Unread:
    """Combine an edit's scores (0 to 25) to one score (0 to 10); returns `Unread` if one is `Unread`."""
    if isinstance(following, Unread):
        return following
    if isinstance(quality, Unread):
        return quality
    return math.sqrt(min(following) * min(quality)) * 10 / RANGE


@reward(inputs=OF_IMAGE_EDITS)
@dataclass(kw_only=True, eq=False)
class EditScore(Written):
    """Score an edit from 0 to 10 by EditScore, a tuned Qwen-VL that writes its scores (arXiv 2509.23909).

    Two published prompts ask for two scores each, from 0 to 25: success and restraint of the edit, given
    source and result; naturalness and artifacts of the result alone. The reward is the square root of the
    product of the lower score of each prompt, scaled to 10. Replies without two numbers are requested again.

    Args:
        engine: Generates the replies, as for `judge`. Published: `{name: vision.generate, temperature: 0.7,
            top_p: 0.9, top_k: 20, max_completion_length: 512}`.
        policy: The model, such as `{name: vision.tokens, model: Qwen/Qwen2.5-VL-7B-Instruct, adapter:
            EditScore/EditScore-7B, frozen: true}`.
        num_pass: Samples of each reply, whose scores are averaged.
        image_labels: Write <img1>: before the first image and so on, as published for Qwen2.5-VL; false for
            Qwen3-VL.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    num_pass: PositiveInt = 1
    image_labels: bool = True
    name = "edit_score"

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread]:
        """Compute the score of every edit, or `Unread` if a reply cannot be read."""
        prompt = ("edit_score_following", "edit_score_quality")
        passes = [self.edit_scores(prompts, outcomes, *prompt, turn) for turn in range(self.num_pass)]
        return [
            next((s for s in scores if isinstance(s, Unread)), None) or fmean(scores)
            for scores in zip(*passes, strict=True)
        ]


@reward(inputs=_inputs_of)
@dataclass(kw_only=True, eq=False)
class UnifiedReward(Written):
    """Score images, videos or edits by UnifiedReward, a Qwen-VL that writes scores (arXiv 2503.05236).

    If a reply lacks the numbers that the published prompt asks for, the model is asked again.

    Args:
        engine: Generates the replies, as for `judge`; published is greedy decoding.
        policy: The model, such as `{name: vision.tokens, model: CodeGoat24/UnifiedReward-2.0-qwen-7b, frozen:
            true}`.
        form: Published prompt. `image`: alignment, coherence and style from 1 to 5 (UnifiedReward 2.0).
            `video`: alignment, physics and style from 1 to 5 (UnifiedReward 2.0). `final_score`: one score
            of an image from 1 to 5 (first UnifiedReward). `edit`: from 0 to 10 (UnifiedReward-Edit), with
            scores combined as by `edit_score` (our reading).
        axis: One score of `image` or `video`, such as `Style Score`; empty: the mean of all (our reading).
        frames: Frames of a video that are shown as images.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    form: Literal["image", "video", "final_score", "edit"] = "image"
    axis: str = ""
    frames: PositiveInt = 16
    name = "unified_reward"

    def __post_init__(self) -> None:
        if self.axis and self.axis not in LABELS.get(self.form, ()):
            known = ", ".join(LABELS.get(self.form, ())) or "no single scores"
            raise ConfigError(f"unified_reward: `axis: {self.axis}`, but the form '{self.form}' has {known}")
        super().__post_init__()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread]:
        """Compute the score of every outcome, or `Unread` if a reply cannot be read."""
        if self.form == "edit":
            return self.edit_scores(prompts, outcomes, "unified_edit_following", "unified_edit_quality", 0)
        labels, texts = LABELS[self.form], [prompt.text for prompt in prompts]
        media = [self._shown(*both) for both in zip(prompts, outcomes, strict=True)]
        wanted = f"{', '.join(labels)} from 1 to 5"
        names = unique_names(prompts)
        replies = self.ask(f"unified_{self.form}", names, texts, media, wanted, read_labels(labels))
        of = (lambda scores: scores[labels.index(self.axis)]) if self.axis else fmean
        return [scores if isinstance(scores, Unread) else of(scores) for scores in replies]

    def _shown(self, prompt: Prompt, outcome: Outcome) -> Sequence[Media]:
        """Return the images that the model sees; a video gives evenly spaced frames without duplicates."""
        frames = frames_of(prompt, outcome)
        if (outcome.video is None) == (self.form == "video"):
            kind = "videos" if self.form == "video" else "images"
            raise ValueError(
                f"unified_reward with `form: {self.form}` scores {kind}; an outcome of prompt '{prompt.uid}' "
                "is none"
            )
        places = sorted({int(i * len(frames) / self.frames) for i in range(self.frames)})
        chosen = places if self.form == "video" else [0]
        return [media_of(replace(outcome, image=frames[i], video=None, times=None))[0] for i in chosen]
