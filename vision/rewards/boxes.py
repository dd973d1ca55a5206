"""Rewards for boxes in images: referring expressions, screen elements, object detection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer, per_outcome
from mmrl.vision.benchmarks import boxes
from mmrl.vision.benchmarks.boxes import (
    Box,
    Boxes,
    Reader,
    decimal,
    detection_score,
    mean_average_precision,
    parse_box,
    parse_detections,
)


def _own_box(prompt: Prompt, *, inclusive: bool, reader: Reader) -> OwnAnswer | None:
    """Format each target box as an answer; `vlm_r1` rounds it to integers, so its IoU may be below 1."""
    target = _target(prompt)
    if target is None or not target.boxes:
        return None
    texts, full = [], 1.0
    for truth in target.boxes:
        box = target.in_answers(truth)
        if reader == "vlm_r1":
            left, top, right, bottom = box = tuple(map(round, box))
            near = target.in_pixels((left, top, right, bottom))
            full = min(full, max(0.5, boxes.box_iou(near, truth, inclusive=inclusive)))
        texts.append(f"<answer>[{', '.join(map(decimal, box))}]</answer>")
    return OwnAnswer(tuple(texts), full)


@reward(own_answer=_own_box)
@per_outcome
def box_iou(
    prompt: Prompt, outcome: Outcome, *, inclusive: bool = False, reader: Reader = "ours"
) -> float | None:
    """Return the highest IoU of the answered box with a target box; None if the target is not `Boxes`.

    An answer without a valid box gets 0. The data set `vision.boxes` provides prompts with target boxes.

    Args:
        inclusive: Whether an overlap of at most one pixel in width or height counts as no overlap. This is
            the effect of inclusive pixel edges in VLM-R1 (arXiv 2504.07615). Our default is the plain IoU,
            which does not depend on the image size.
        reader: Parser of answers. `ours`: our parser. `vlm_r1`: as in the code of VLM-R1 (see `parse_box`).
    """
    target = _target(prompt)
    if target is None:
        return None
    box = parse_box(outcome.text or "", reader)
    if box is None:
        return 0.0
    answered = target.in_pixels(box)
    return max((boxes.box_iou(answered, truth, inclusive=inclusive) for truth in target.boxes), default=0.0)


Form = Literal["map", "length_penalty", "weighted_sum"]


def _own_detections(prompt: Prompt, *, form: Form) -> OwnAnswer | None:
    target = _target(prompt)
    if target is None:
        return None
    pairs = list(zip(target.boxes, target.labels, strict=True))
    items = [{"bbox_2d": list(target.in_answers(box)), "label": label} for box, label in pairs]
    # The target's own score is below 1 if the image has more objects than COCO's evaluation reads.
    return OwnAnswer((json.dumps(items),), _score(target, pairs, form) or 1.0)


@reward(own_answer=_own_detections)
@per_outcome
def detection_map(prompt: Prompt, outcome: Outcome, *, form: Form = "map") -> float | None:
    """Score detected objects against all target objects of an image (VLM-R1, arXiv 2504.07615).

    The answer is a JSON list of `{"bbox_2d": [left, top, right, bottom], "label": "dog"}`, or the word None
    for no object. `map`: COCO's mAP of the image, with equal scores for all detections. `length_penalty`:
    `map` times min(1, targets / detections). `weighted_sum`: 0.7 mean IoU + 0.3 completeness (see
    `detection_score`). Labels are compared without case. An answer that cannot be parsed gets 0. An empty
    list gets 1 if the image has no target objects, else 0. The reward is None if the target is not `Boxes`.
    """
    target = _target(prompt)
    if target is None:
        return None
    detections = parse_detections(outcome.text or "")
    if detections is None:
        return 0.0
    return _score(target, [(target.in_pixels(box), label) for box, label in detections], form)


def _score(target: Boxes, answered: Sequence[tuple[Box, str]], form: Form) -> float:
    """Score detections against the target boxes, both in pixels of the image."""
    if not answered or not target.boxes:
        return float(not answered and not target.boxes)
    if form == "weighted_sum":
        return detection_score(target, answered)
    penalty = min(1.0, len(target.boxes) / len(answered)) if form == "length_penalty" else 1.0
    return penalty * mean_average_precision(target, answered)


def _target(prompt: Prompt) -> Boxes | None:
    return prompt.target if isinstance(prompt.target, Boxes) else None
