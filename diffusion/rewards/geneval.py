"""The GenEval reward: counts, colours and positions of a prompt's objects (arXiv 2310.11513)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import frames_of, import_function
from mmrl.rewards.frames import mean_over_frames

# Maps class names to objects: {"box": [left, top, right, bottom], "score": confidence, "color": name}.
Detections = Mapping[str, Sequence[Mapping[str, Any]]]
# Clauses: {"class", "count", and optionally "color" and "position": [relation, index of another clause]}
Clauses = Sequence[Mapping[str, Any]]

CONFIDENCE, COUNTING_CONFIDENCE = 0.3, 0.9
MAX_OBJECTS = 16  # number of objects per class that count
MARGIN = 0.1  # fraction of the sizes of two boxes that is subtracted from the distance of centres
DIRECTION = 0.5  # a relation holds if its axis has more than this fraction of the centres' distance


@reward
class Geneval:
    """Fraction of a prompt's objects that an image shows in the right number, colour and position.

    GenEval (arXiv 2310.11513), as a reward in Flow-GRPO (arXiv 2505.05470). The prompt's columns `include`,
    `exclude` and `tag` are those of the benchmark. Detections with confidences up to 0.3 (0.9 for counting),
    and all after the first 16 of a class, are ignored.

    Args:
        detector: `package.module:function` that maps an image (3, height, width) uint8 and the prompt's
            columns to detections: class names to lists of `{box: [left, top, right, bottom], score, color}`.
            By default, JSON in the outcome's tag or the prompt's column `detections` is read.
        form: `clauses`: the training reward, a mean over the clauses. `strict`: 1 if all clauses are right
            with exact numbers. `official`: 1 if an image is correct in the benchmark, where more objects are
            allowed, except in counting prompts.
        clamp: Score a count above twice the wanted number as 0, not as a negative value (our reading).
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
    """

    def __init__(
        self,
        *,
        detector: str = "",
        form: Literal["clauses", "strict", "official"] = "clauses",
        clamp: bool = False,
        frames: PositiveInt = 8,
    ) -> None:
        self.frames = frames
        self.detect = import_function("geneval", detector) if detector else None
        self.form, self.clamp = form, clamp

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames if self.detect else 1)

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""
        return [self.measure(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]

    def measure(self, prompt: Prompt, outcome: Outcome) -> float:
        """Compute the reward of one outcome."""
        columns = prompt.columns
        if not columns.get("include"):
            raise ValueError(
                f"geneval needs the column `include` of the benchmark, which prompt '{prompt.uid}' lacks"
            )
        if self.detect:
            detections = self.detect(frames_of(prompt, outcome)[0], columns)
        else:
            detections = outcome.tags.get("detections", columns.get("detections"))
            detections = json.loads(detections) if type(detections) is str else detections
        if detections is None:
            raise ValueError(
                f"geneval found no detections for prompt '{prompt.uid}'; name a `detector`, or record them "
                "as JSON in the outcome's tag or the prompt's column `detections`"
            )
        objects = confident(detections, columns.get("tag", ""))
        if self.form == "official":
            return float(official(objects, columns))
        correct, values = evaluate_clauses(objects, columns["include"], exact=True)
        if self.form == "strict":
            return float(correct)
        return sum(max(value, 0.0) if self.clamp else value for value in values) / len(values)


def confident(detections: Detections, tag: str) -> dict[str, list[Mapping[str, Any]]]:
    """Keep the most confident objects of every class, most confident first."""
    threshold = COUNTING_CONFIDENCE if tag == "counting" else CONFIDENCE
    kept = {}
    for name, objects in detections.items():
        above = (detected for detected in objects if detected["score"] > threshold)
        kept[name] = sorted(above, key=lambda detected: -detected["score"])[:MAX_OBJECTS]
    return kept


def evaluate_clauses(detections: Detections, clauses: Clauses, *, exact: bool) -> tuple[bool, list[float]]:
    """Return whether all clauses hold, and their scores: for the count, and for colour or position.

    Unless `exact`, additional objects are allowed, and the most confident objects are used. As in the
    reward's source code, a wrong position adds both a 0 and a 1, so it earns half.
    """
    values: list[float] = []
    groups: list[Sequence | None] = []  # the objects of every clause; None if the clause is wrong
    for clause in clauses:
        wanted = clause["count"]
        objects = detections.get(clause["class"], [])
        objects = objects if exact else objects[:wanted]
        values.append(1 - abs(wanted - len(objects)) / wanted)  # negative if more than twice as many
        correct = len(objects) == wanted
        if not correct and ("color" in clause or "position" in clause):
            values.append(0.0)
        if correct and "color" in clause:
            if blank := [sorted(detected) for detected in objects if "color" not in detected]:
                raise ValueError(
                    f"geneval needs a colour, but the detector gives none for a '{clause['class']}'; it "
                    f"gives {blank[0]}"
                )
            painted = sum(detected["color"] == clause["color"] for detected in objects)
            values.append(1 - abs(wanted - painted) / wanted)
            correct = painted == wanted
        if correct and "position" in clause:
            relation, target = clause["position"]
            others = groups[target]
            correct = others is not None and all(
                relation in relative_position(a["box"], b["box"]) for a in objects for b in others
            )
            values += [1.0] if correct else [0.0] if others is None else [0.0, 1.0]
        groups.append(objects if correct else None)
    return all(group is not None for group in groups), values


def official(detections: Detections, columns: Mapping[str, Any]) -> bool:
    """Return whether an image is correct by the rules of the GenEval benchmark."""
    correct, _ = evaluate_clauses(detections, columns["include"], exact=False)
    excluded = [(clause["class"], clause["count"]) for clause in columns.get("exclude") or ()]
    if columns.get("tag") == "counting":
        excluded += [(clause["class"], clause["count"] + 1) for clause in columns["include"]]
    return correct and not any(len(detections.get(name, ())) >= count for name, count in excluded)


def relative_position(box: Sequence[float], other: Sequence[float]) -> set[str]:
    """Return where a box lies relative to another: up to two of left of, right of, above, below.

    The vector between the centres is shortened on each axis by a tenth of the sum of both box sizes, and
    divided by its original length. An axis counts if the result is above a half.
    """
    offset, shortened = [], []
    for low, high in ((0, 2), (1, 3)):  # indices of left and right, then of top and bottom
        gap = (box[low] + box[high] - other[low] - other[high]) / 2  # between the centres
        margin = MARGIN * (abs(box[high] - box[low]) + abs(other[high] - other[low]))
        offset.append(gap)
        shortened.append(max(abs(gap) - margin, 0.0) * (1 if gap > 0 else -1))
    if max(map(abs, shortened)) < 1e-3:  # no distance remains on either axis
        return set()
    x, y = (shift / (offset[0] ** 2 + offset[1] ** 2) ** 0.5 for shift in shortened)
    relations = {
        "left of": x < -DIRECTION, "right of": x > DIRECTION, "above": y < -DIRECTION, "below": y > DIRECTION,
    }  # fmt: skip
    return {relation for relation, holds in relations.items() if holds}
