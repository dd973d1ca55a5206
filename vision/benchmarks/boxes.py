"""Boxes in images: parsers of answers, IoU, COCO's average precision, VLM-R1's detection score."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from typing import Any, Literal

from mmrl.core.answer_text import answer_part, spelled, tagged
from mmrl.vision.benchmarks.qvhighlights import THRESHOLDS

Box = tuple[float, float, float, float]  # left, top, right, bottom
Reader = Literal["ours", "vlm_r1"]

# Recall levels of COCO. As in pycocotools they are i * 0.01, not i / 100, which rounds 0.7 differently.
RECALLS = tuple(i * 0.01 for i in range(101))
MAX_DETECTIONS = 100  # maximum number of detections per class that COCO's evaluation reads
NEAR_ONE = 1 - 1e-10  # cap on IoU thresholds, as in pycocotools
POSITION, COMPLETENESS = 0.7, 0.3  # weights in `detection_score`; the label accuracy has weight 0
NOWHERE = ((0.0, 0.0, 0.0, 0.0), "")  # stands for an unparsable detection; matches no target

_NUMBER = r"\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+))\s*"
# One bracket with four numbers, or two corners in the format of Qwen2-VL: (1, 2), (3, 4).
_BOX = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:,|[\])]\s*,?\s*[\[(]){_NUMBER},{_NUMBER}[\])]")
_PUBLISHED = re.compile(r"\[(\d+),\s*(\d+),\s*(\d+),\s*(\d+)]")
_POINT = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}[\])]")


@dataclass(frozen=True)
class Boxes:
    """The target boxes of a prompt in pixels of the image, each with a label that may be empty.

    `unit` is the (width, height) in pixels of one unit of the coordinates in answers: (1, 1) for pixels,
    (image width / 1000, image height / 1000) for thousandths of the image.
    """

    boxes: tuple[Box, ...]
    labels: tuple[str, ...] = ()
    unit: tuple[float, float] = (1.0, 1.0)

    def in_pixels(self, box: Sequence[float]) -> Box:
        """Convert a box from the coordinates of answers to pixels of the image."""
        (across, down), (left, top, right, bottom) = self.unit, box
        return left * across, top * down, right * across, bottom * down

    def in_answers(self, box: Sequence[float]) -> Box:
        """Convert a box from pixels of the image to the coordinates of answers."""
        (across, down), (left, top, right, bottom) = self.unit, box
        return left / across, top / down, right / across, bottom / down


def decimal(value: float) -> str:
    """Format a number without an exponent; whole numbers have no decimals."""
    return f"{Decimal(repr(float(value))):f}".removesuffix(".0")


def is_box(box: Sequence[float]) -> bool:
    """Whether four numbers are finite and span a box: left < right, top < bottom."""
    left, top, right, bottom = box
    return all(map(math.isfinite, box)) and left < right and top < bottom


def parse_box(text: str, reader: Reader = "ours") -> Box | None:
    """Parse the box of an answer, in the coordinates of the answer. Return None without a valid box.

    `ours`: the first box in the last answer block, or in the whole text if there is no block (our reading).
    The box has the form `[left, top, right, bottom]`, or `(left, top), (right, bottom)` as in Qwen2-VL.
    `vlm_r1`: the first four integers in brackets in the first answer block, as in VLM-R1 (arXiv 2504.07615).
    """
    if reader == "vlm_r1":
        match = _PUBLISHED.search((tagged(text, "answer") or [""])[0])
    else:
        match = _BOX.search(spelled(answer_part(text)))
    if match is None:
        return None
    left, top, right, bottom = (float(number) for number in match.groups())
    box = (left, top, right, bottom)
    return box if is_box(box) else None


def parse_point(text: str) -> tuple[float, float] | None:
    """Parse the point of an answer: the first `[x, y]` or the centre of the first box; None if neither."""
    searched = spelled(answer_part(text))
    point, corners = _POINT.search(searched), _BOX.search(searched)
    if point and corners and point.start() == corners.start():
        point = None  # these numbers are the first corner of a box
    if point and math.isfinite(float(point[1])) and math.isfinite(float(point[2])):
        return float(point[1]), float(point[2])
    box = parse_box(text)
    return box and ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)


def parse_detections(text: str) -> list[tuple[Box, str]] | None:
    """Parse a JSON list of objects with `bbox_2d` and `label` from the last answer block of a text.

    Without an answer block, the whole text is parsed. The list may be inside a ```json fence. `None` and `[]`
    give an empty list. An item without a valid box becomes `NOWHERE`, because it still counts as a detection
    (our reading). Returns None for a text that cannot be parsed.
    """
    searched = answer_part(text).strip()
    fences = re.findall(r"```(?:json)?(.*?)```", searched, re.DOTALL)
    searched = (fences[-1] if fences else searched).strip()
    if searched.lower() == "none":
        return []
    try:
        items = json.loads(searched)
    except (ValueError, RecursionError):
        return None
    return [_detection(item) for item in items] if isinstance(items, list) else None


def _detection(item: Any) -> tuple[Box, str]:
    match item:
        case {"bbox_2d": [left, top, right, bottom], "label": str(label)}:
            try:
                box = float(left), float(top), float(right), float(bottom)
            except (TypeError, ValueError, OverflowError):
                return NOWHERE
            return (box, normal_label(label)) if is_box(box) else NOWHERE
    return NOWHERE


def normal_label(label: str) -> str:
    """Lower-case a label and strip white space, as VLM-R1 does before it compares labels."""
    return label.strip().lower()


# ---- measures of boxes in pixels


def box_iou(a: Box, b: Box, *, inclusive: bool = False) -> float:
    """Compute the intersection over union (IoU) of two boxes.

    With `inclusive`, the IoU is 0 if the intersection is at most one pixel wide or high, as in VLM-R1 (arXiv
    2504.07615). Its code treats the edge pixels as part of a box: it subtracts 1 from right and bottom edges,
    requires them to exceed the left and top edges, and adds 1 to both extents again. Nothing else differs.
    """
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if min(width, height) <= (1 if inclusive else 0):
        return 0.0
    shared = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if 0 < union < math.inf else 0.0  # products of huge coordinates can be infinite


def average_precision(targets: Sequence[Box], answered: Sequence[Box], threshold: float) -> float:
    """Compute COCO's average precision of one class in one image, with equal scores for all detections.

    Detections are matched in the order of the answer. Each detection takes the unmatched target with the
    highest IoU of at least `threshold` (ties: the last). Precision is interpolated at 101 recall levels.
    """
    free, hits = set(range(len(targets))), []
    for box in answered[:MAX_DETECTIONS]:
        near = max(((box_iou(box, targets[i]), i) for i in free), default=(-1.0, -1))
        hits.append(near[0] >= min(threshold, NEAR_ONE))
        free -= {near[1]} if hits[-1] else set()
    counts = list(accumulate(hits))
    recalls = [count / len(targets) for count in counts]
    # Interpolated precision at a recall level is the maximum over all ranks with at least this recall.
    precisions = [count / rank for rank, count in enumerate(counts, 1)]
    best = [*reversed(list(accumulate(reversed(precisions), max))), 0.0]
    return sum(best[bisect_left(recalls, recall)] for recall in RECALLS) / len(RECALLS)


def mean_average_precision(target: Boxes, answered: Sequence[tuple[Box, str]]) -> float:
    """Compute COCO's mAP of one image: the mean over target classes and IoU thresholds 0.5 to 0.95.

    Detections of classes without a target are ignored, as in VLM-R1 (arXiv 2504.07615).
    """
    precisions = []
    for label in dict.fromkeys(target.labels):
        truth = [box for box, name in zip(target.boxes, target.labels, strict=True) if name == label]
        boxes = [box for box, name in answered if name == label]
        precisions += [average_precision(truth, boxes, threshold) for threshold in THRESHOLDS]
    return sum(precisions) / len(precisions)


def detection_score(target: Boxes, answered: Sequence[tuple[Box, str]], threshold: float = 0.5) -> float:
    """Compute VLM-R1's weighted sum of position and completeness (arXiv 2504.07615), in [0, 1].

    Detections and targets are matched greedily in order of decreasing IoU, down to the threshold. The score
    is 0.7 times the mean IoU over the targets (0 for a match with a wrong label), plus 0.3 (1 - (fraction of
    missed targets + fraction of unmatched detections) / 2). The third term, the label accuracy, has weight 0.
    """
    missed, spare = set(range(len(target.boxes))), set(range(len(answered)))
    overlaps = sorted(
        (
            (-box_iou(box, truth, inclusive=True), i, j)
            for i, (box, _) in enumerate(answered)
            for j, truth in enumerate(target.boxes)
        ),
    )
    position = 0.0
    for negative, i, j in overlaps:
        if -negative >= threshold and i in spare and j in missed:
            position += -negative * (answered[i][1] == target.labels[j])
            spare.remove(i)
            missed.remove(j)
    faults = len(missed) / len(target.boxes) + len(spare) / len(answered)
    return POSITION * position / len(target.boxes) + COMPLETENESS * (1 - faults / 2)
