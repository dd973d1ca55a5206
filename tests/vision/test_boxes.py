"""Rewards of boxes: IoU, COCO's mAP against two other computations, VLM-R1's detection score."""

from __future__ import annotations

import contextlib
import io
import json
import random

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks import boxes
from mmrl.vision.benchmarks.boxes import (
    Boxes,
    mean_average_precision,
    parse_box,
    parse_detections,
    parse_point,
)
from mmrl.vision.rewards.boxes import box_iou, detection_map

HUGE = "9" * 400
MALFORMED = [
    None,
    "",
    "no idea",
    "<answer></answer>",
    "[1, 2, 3]",
    "[3, 0, 1, 2]",
    f"[0, 0, {HUGE}, 1]",
    "[" * 5000,
]


def asked(*found, unit=(1.0, 1.0)):
    """Make a prompt whose target is (box, label) pairs, or bare boxes."""
    pairs = [box if isinstance(box[0], tuple) else (box, "thing") for box in found]
    return Prompt("a", (), Boxes(tuple(b for b, _ in pairs), tuple(name for _, name in pairs), unit))


def of_one(reward, prompt, text, **options):
    return reward([prompt], [Outcome(text=text)], **options)[0]


def detected(*pairs):
    items = [{"bbox_2d": list(box), "label": label} for box, label in pairs]
    return f"<answer>```json\n{json.dumps(items)}\n```</answer>"


# ---- one box


def test_box_iou_of_best_worst_and_partial_answers():
    prompt = asked((0, 0, 10, 10))
    assert of_one(box_iou, prompt, "<answer>[0, 0, 10, 10]</answer>") == 1
    assert of_one(box_iou, prompt, "<answer>[20, 20, 30, 30]</answer>") == 0
    # They share 5 x 10 of 100 + 100 - 50.
    assert of_one(box_iou, prompt, "<answer>[5, 0, 15, 10]</answer>") == pytest.approx(1 / 3)


def test_box_iou_takes_the_best_of_several_targets():
    assert of_one(box_iou, asked((0, 0, 10, 10), (5, 0, 15, 10)), "[5, 0, 15, 10]") == 1


@pytest.mark.parametrize("text", MALFORMED)
def test_box_iou_of_malformed_answers_is_0(text):
    assert of_one(box_iou, asked((0, 0, 10, 10)), text) == 0
    assert of_one(box_iou, asked((0, 0, 10, 10)), text, reader="vlm_r1") == 0


def test_rewards_of_boxes_do_not_apply_to_other_targets():
    prompt = Prompt("a", (), "a word")
    assert of_one(box_iou, prompt, "[0, 0, 1, 1]") is None
    assert of_one(detection_map, prompt, "[]") is None


@pytest.mark.parametrize("inclusive", [False, True])
def test_identical_boxes_give_exactly_1(inclusive):
    for box in [(0, 0, 10, 10), (3, 7, 120, 45), (0.1, 0.2, 7.7, 3.4)]:
        assert boxes.box_iou(box, box, inclusive=inclusive) == 1


def published_iou(a, b):
    """Compute as the source does: 1 off the right and bottom edges, and 1 onto the extents."""
    left, top = max(a[0], b[0]), max(a[1], b[1])
    right, bottom = min(a[2], b[2]) - 1, min(a[3], b[3]) - 1
    inside = left < right and top < bottom
    shared = (right - left + 1) * (bottom - top + 1) if inside else 0
    area = lambda box: (box[2] - box[0]) * (box[3] - box[1])
    return shared / (area(a) + area(b) - shared)


def test_inclusive_pixels_only_leave_out_overlaps_of_one_pixel():
    draw = random.Random(0)
    differ = 0
    for _ in range(2000):
        a, b = (
            (x, y, x + draw.randint(1, 9), y + draw.randint(1, 9))
            for x, y in ((draw.randint(0, 9), draw.randint(0, 9)) for _ in range(2))
        )
        assert boxes.box_iou(a, b, inclusive=True) == published_iou(a, b)
        plain = boxes.box_iou(a, b)
        thin = min(min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])) == 1
        assert (plain != published_iou(a, b)) == thin
        differ += thin
    assert differ > 50


def test_answers_in_other_units_are_converted_to_pixels():
    # An image of 200 x 100: thousandths are a fifth and a tenth of a pixel.
    prompt = asked((20, 10, 100, 50), unit=(0.2, 0.1))
    assert of_one(box_iou, prompt, "<answer>[100, 100, 500, 500]</answer>") == 1
    assert prompt.target.in_answers((20, 10, 100, 50)) == (100, 100, 500, 500)


def test_readers_differ_in_blocks_and_numbers():
    text = "<answer>[1.5, 2, 3, 4]</answer> or <answer>[5, 6, 7, 8] or [1, 1, 2, 2]</answer>"
    assert parse_box(text) == (5, 6, 7, 8)
    assert parse_box(text, "vlm_r1") is None
    assert parse_box("[5, 6, 7, 8]") == (5, 6, 7, 8)
    assert parse_box("[5, 6, 7, 8]", "vlm_r1") is None
    assert parse_box('<answer>{"bbox_2d": [5, 6, 7, 8]}</answer>', "vlm_r1") == (5, 6, 7, 8)


@pytest.mark.parametrize(
    "text",
    ["(1,2),(3.5,4)", "<|box_start|>(1, 2), (3.5, 4)<|box_end|>", "[1., 2, 3.5, 4.0]", "[+1,２,３.5,4]"],
)
def test_boxes_are_read_as_models_write_them(text):
    assert parse_box(text) == (1, 2, 3.5, 4) and parse_point(text) == (2.25, 3)
    assert parse_box("[.1, .2, 0.3, .4]") == (0.1, 0.2, 0.3, 0.4)
    assert parse_box("[−1, 2, 3, 4]") == (-1, 2, 3, 4) and parse_box("[1,2],[3,4],[5,6]") == (1, 2, 3, 4)
    assert parse_point("(1, 2) or (3, 4)") == (1, 2)


# ---- detection

A, B, C = (0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 50, 10)
PAIR = asked((A, "cat"), (B, "cat"))


def test_detection_map_of_hand_derived_answers():
    best = detected((A, "cat"), (B, "cat"))
    assert of_one(detection_map, PAIR, best) == pytest.approx(1)
    # One of two: precision 1 up to recall 1/2, which are 51 of 101 points, at every threshold.
    assert of_one(detection_map, PAIR, detected((A, "cat"))) == pytest.approx(51 / 101)
    # A miss before the hit halves the precision, at the 51 points that it reaches.
    assert of_one(detection_map, PAIR, detected((C, "cat"), (A, "cat"))) == pytest.approx(51 / 202)
    assert of_one(detection_map, PAIR, detected((C, "cat"))) == 0
    # 6 of 10 pixels are an IoU of 0.6: it passes 0.5, 0.55 and 0.6 of ten thresholds.
    assert of_one(detection_map, asked((A, "cat")), detected(((0, 0, 10, 6), "cat"))) == pytest.approx(0.3)


def test_detection_map_averages_over_the_classes_of_the_target():
    two = asked((A, "cat"), (B, "dog"))
    assert of_one(detection_map, two, detected((A, "cat"), (B, "bird"))) == pytest.approx(0.5)
    assert of_one(detection_map, two, detected((A, " CAT "), (B, "Dog"))) == pytest.approx(1)


def test_the_length_penalty_is_the_ratio_of_targets_to_detections():
    spare = detected((A, "cat"), (B, "cat"), (C, "dog"), (C, "dog"))
    assert of_one(detection_map, PAIR, spare) == pytest.approx(1)
    assert of_one(detection_map, PAIR, spare, form="length_penalty") == pytest.approx(1 / 2)
    few = detected((A, "cat"))
    assert of_one(detection_map, PAIR, few, form="length_penalty") == pytest.approx(51 / 101)


@pytest.mark.parametrize("form", ["map", "length_penalty", "weighted_sum"])
def test_nothing_to_find_and_nothing_answered_is_1(form):
    for text in ("<answer>None</answer>", "<answer>[]</answer>", "<answer>```json\n[]\n```</answer>"):
        assert of_one(detection_map, asked(), text, form=form) == 1
        assert of_one(detection_map, PAIR, text, form=form) == 0
    assert of_one(detection_map, asked(), detected((A, "cat")), form=form) == 0
    for text in ("", "no idea", "<answer>{}</answer>", "<answer>" + "[" * 5000 + "</answer>"):
        assert of_one(detection_map, asked(), text, form=form) == 0, "unreadable is not empty"


def test_weighted_sum_of_worked_answers():
    one = asked((A, "car"))
    score = lambda prompt, *pairs: of_one(detection_map, prompt, detected(*pairs), form="weighted_sum")
    assert score(one, (A, "car")) == pytest.approx(1)
    # One match and one false alarm: 0.7 * 1 + 0.3 * (1 - (0 + 1/2) / 2).
    assert score(one, (A, "car"), (C, "person")) == pytest.approx(0.925)
    # Nothing matches: all targets missed, all detections false.
    assert score(one, (C, "person")) == pytest.approx(0)
    # Another label sets the IoU of the pair to 0, and it is still a pair: 0.7 * 0 + 0.3 * 1.
    assert score(one, (A, "person")) == pytest.approx(0.3)
    # IoU 0.6 for one of two targets: 0.7 * 0.6 / 2 + 0.3 * (1 - (1/2 + 0) / 2).
    assert score(PAIR, ((0, 0, 10, 6), "cat")) == pytest.approx(0.21 + 0.225)
    # An IoU of 0.4 is no match.
    assert score(one, ((0, 0, 10, 4), "car")) == pytest.approx(0)


def test_weighted_sum_matches_the_best_pair_first():
    # The first detection has IoU 0.6 with the target, the second 1: the second takes it.
    text = detected(((0, 0, 10, 6), "car"), (A, "car"))
    wanted = 0.7 * 1 + 0.3 * (1 - (0 + 1 / 2) / 2)
    assert of_one(detection_map, asked((A, "car")), text, form="weighted_sum") == pytest.approx(wanted)


def test_an_item_that_cannot_be_read_is_a_false_detection():
    good, bad = '{"bbox_2d": [0, 0, 10, 10], "label": "cat"}', '{"bbox_2d": ["x", 0, 1, 1], "label": "cat"}'
    text = f"<answer>[{good}, {bad}, 3]</answer>"
    assert len(parse_detections(text)) == 3
    assert of_one(detection_map, asked((A, "cat")), text) == pytest.approx(1)
    assert of_one(detection_map, asked((A, "cat")), text, form="length_penalty") == pytest.approx(1 / 3)


def crowd(draw, number):
    """Draw labelled boxes that overlap a lot."""
    corners = [(draw.randint(0, 20), draw.randint(0, 20)) for _ in range(number)]
    sizes = [(draw.randint(5, 20), draw.randint(5, 20)) for _ in range(number)]
    found = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(corners, sizes, strict=True)]
    return [(box, draw.choice("ab")) for box in found]


def pairs_of_crowds(count):
    draw = random.Random(1)
    for _ in range(count):
        targets = crowd(draw, draw.randint(1, 6))
        near = [
            (tuple(edge + draw.randint(-2, 2) for edge in box), label)
            for box, label in targets
            for _ in range(draw.randint(0, 2))
        ]
        answered = near + crowd(draw, draw.randint(0, 3))
        draw.shuffle(answered)
        yield targets, answered


def brute_force_map(targets, answered):
    """Compute the mAP by the definition: every threshold, every recall, every rank."""
    values = []
    for label in {name for _, name in targets}:
        truth = [box for box, name in targets if name == label]
        said = [box for box, name in answered if name == label]
        for threshold in [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]:
            left, hits = list(enumerate(truth)), []
            for box in said:
                overlaps = [(published_overlap(box, other), i) for i, other in left]
                best = max(overlaps, default=(0.0, -1))
                hit = best[0] >= threshold - 1e-12
                left = [(i, other) for i, other in left if not (hit and i == best[1])]
                hits.append(hit)
            total = 0.0
            for hundredth in range(101):
                reached = [
                    sum(hits[: k + 1]) / (k + 1)
                    for k in range(len(hits))
                    if sum(hits[: k + 1]) / len(truth) >= hundredth / 100 - 1e-12
                ]
                total += max(reached, default=0.0)
            values.append(total / 101)
    return sum(values) / len(values)


def published_overlap(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0, width) * max(0, height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def ours(targets, answered):
    named = Boxes(tuple(box for box, _ in targets), tuple(label for _, label in targets))
    return mean_average_precision(named, answered)


def test_map_agrees_with_the_definition():
    values = []
    for targets, answered in pairs_of_crowds(60):
        values.append(ours(targets, answered))
        # Rounding moves a point of recall, such as 0.7, to the other side: at most one of 101 a class.
        assert values[-1] == pytest.approx(brute_force_map(targets, answered), abs=1.01 / 101)
    assert len({round(value, 3) for value in values}) > 30


def test_map_agrees_with_pycocotools():
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    for targets, answered in pairs_of_crowds(60):
        ids = {label: i + 1 for i, label in enumerate(dict.fromkeys(name for _, name in targets))}
        as_coco = lambda box: [box[0], box[1], box[2] - box[0], box[3] - box[1]]
        known = [(box, label) for box, label in answered if label in ids]
        if not known:
            assert ours(targets, answered) == 0
            continue
        truth = coco.COCO()
        truth.dataset = {
            "images": [{"id": 0, "width": 100, "height": 100}],
            "categories": [{"id": i, "name": label} for label, i in ids.items()],
            "annotations": [
                {"id": i + 1, "image_id": 0, "category_id": ids[label], "bbox": as_coco(box), "iscrowd": 0}
                | {"area": as_coco(box)[2] * as_coco(box)[3]}
                for i, (box, label) in enumerate(targets)
            ],
        }
        with contextlib.redirect_stdout(io.StringIO()):
            truth.createIndex()
            found = truth.loadRes(
                [
                    {"image_id": 0, "category_id": ids[label], "bbox": as_coco(box), "score": 1.0}
                    for box, label in known
                ]
            )
            run = cocoeval.COCOeval(truth, found, "bbox")
            run.evaluate()
            run.accumulate()
            run.summarize()
        assert ours(targets, answered) == pytest.approx(run.stats[0], abs=1e-12)
