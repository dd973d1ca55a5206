"""Spans are read out of answers and measured as the published evaluators and rewards do."""

from __future__ import annotations

import math
import random
import re

import pytest

from mmrl.vision.benchmarks.time_spans import (
    giou,
    iou,
    last_answer,
    merged,
    parse_saliency,
    parse_span,
    parse_spans,
    set_iou,
    timestamp_aware_iou,
)

CLOSE = 2e-6
HUGE = "9" * 400  # a number that no float holds


def answer(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize(
    "text",
    [
        "2.5 to 7",
        "2.5 and 7",
        "2.5 - 7",
        "2.5-7",
        "2.5to7",
        "2.5 – 7",
        "2.50 TO 7.00",
        "2.5s to 7s",
        "2.5 s to 7 sec",
        "2.5 seconds and 7 seconds",
        "from 2.5 to 7.",
        "between 2.5 and 7 s.",
        '{"start_time": 2.5, "end_time": 7}',
        '{"start_time": "2.50", "end_time": "7.00"}',
    ],
)
def test_the_ways_to_write_a_span_are_read_alike(text):
    assert parse_span(answer(text)) == (2.5, 7)
    assert parse_span(text) == (2.5, 7)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("0:05 to 9:30", [(5, 570)]), ("00:00:05 to 00:00:09", [(5, 9)]), ("1:05.5-1:07", [(65.5, 67)]),
        ("00:00:05,000 --> 00:00:09,500", [(5, 9.5)]), ("１：０５ to １：３０", [(65, 90)]),
        ("9:30 to 0:05", []),
        ("5,5 to 7,5", [(5.5, 7.5)]), ("1,200 to 1,300 s", [(1200, 1300)]), ("5.0s — 10.0s", [(5, 10)]),
        ("[5.0, 10.0]", [(5, 10)]), ("(5,10)", [(5, 10)]), ("[[1, 2], [3.5, 4]]", [(1, 2), (3.5, 4)]),
        ("[1,5; 7,5]", [(1.5, 7.5)]), ("5.0, 10.0", [(5, 10)]), ("it is 5, 10 or so", []),
        ("[0:05, 0:09]", [(5, 9)]), ("1 to 2 min", [(60, 120)]), ("1 min to 90 s", [(60, 90)]),
        ("1 minute and 30 seconds to 2 minutes", [(90, 120)]), ("2m30s to 3m", [(150, 180)]),
        ("starts at 5 s and ends at 10 s", [(5, 10)]), ("Start: 5.0, End: 10.0", [(5, 10)]),
        ('{"start": "0:05", "end": "0:09"}', [(5, 9)]), ("**5** to **10**", [(5, 10)]),
        ("5秒から10秒", [(5, 10)]), ("<think>1 to 2</think> it is 3 to 4", [(3, 4)]), ("2024-05-06", []),
        ("0:00-0:05, 1:00-1:05", [(0, 5), (60, 65)]), ("1:2:3 to 5", []),
    ],
)  # fmt: skip
def test_times_as_models_write_them(text, spans):
    assert parse_spans(text) == spans


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no idea",
        "7",
        "7 to 2.5",
        "7 to 7",
        "-2.5 to 7",
        "2.5 to -7",
        "1.2.3 to 5",
        "1 to 5.2.3",
        f"1 to {HUGE}",
        f"{HUGE} to {HUGE}",
        '{"start_time": 2.5}',
        '{"start_time": -2.5, "end_time": 7}',
        '{"start_time": NaN, "end_time": 7}',
        '{"start_time": 1, "end_time": Infinity}',
        '{"start_time": [1], "end_time": 7}',
        '{"start_time": 1, "end_time": 1' + "0" * 400 + "}",
        "{start_time: 1}",
    ],
)
def test_what_is_no_span_is_none(text):
    assert parse_span(answer(text)) is None
    assert parse_span(text) is None


def test_the_last_span_of_the_last_answer_block_counts():
    text = f"9 to 10 {answer('1 to 2')} so {answer('3 to 4, no, 5 to 6')} or 7 to 8"
    assert last_answer(text) == "3 to 4, no, 5 to 6"
    assert parse_span(text) == (5, 6)
    # An answer block without a span is an answer without a span, whatever stands around it.
    assert parse_span(f"1 to 2 {answer('unsure')}") is None


def test_a_span_across_lines_is_read():
    assert parse_span("<answer>\n 1.00\nto\n 2.00 \n</answer>") == (1, 2)


def test_a_span_may_begin_at_0_and_not_before():
    assert parse_spans("0 to 5") == [(0.0, 5.0)] and parse_spans("0.5 to 0.75") == [(0.5, 0.75)]
    assert parse_spans('{"start_time": -0.5, "end_time": 5}') == []


def test_answer_blocks_may_span_lines_in_any_case():
    assert last_answer("<Answer>\n1 to 2\n</ANSWER> 3 to 4") == "\n1 to 2\n"


def test_parse_spans_keeps_order_and_leaves_out_what_is_out_of_order():
    text = answer('8 to 9, {"start_time": 1, "end_time": 2}, 5 to 4, 3 to 4')
    assert parse_spans(text) == [(8, 9), (1, 2), (3, 4)]
    assert parse_spans("") == []


@pytest.mark.parametrize(
    ("text", "span"),
    [
        (answer("12.54 to 17.83"), (12.54, 17.83)),
        (answer("12.54 and 17.83"), (12.54, 17.83)),
        (answer("12.54 TO 17.83"), (12.54, 17.83)),
        (answer("1 to 2, no: 3 to 4"), (3, 4)),
        (answer("1 to 2") + answer("5 and 6"), (5, 6)),
        (answer("17.83 to 12.54"), (17.83, 12.54)),  # any order
        (answer("10. to 20."), (10, 20)),  # digits, a full stop, and no digits after it
        (answer("1.2.3 to 5.6.7"), (2.3, 5.6)),
        ("12.54 to 17.83", None),  # no block
        (answer("1 to 2") + answer("no"), None),  # the last block only
        (answer("12.54  to 17.83"), None),  # exactly one space
        (answer("12.54-17.83"), None),
        (answer("1 s to 2 s"), None),
        (answer(f"1 to {HUGE}"), None),
    ],
)
def test_it_reads_what_the_reward_of_time_r1_reads(text, span):
    assert parse_span(text, reader="time_r1") == span


@pytest.mark.parametrize(
    ("text", "reward", "evaluator"),
    [
        (answer("12.5 to 17."), (12.5, 17), (12.5, 17)),
        (answer("17 to 12"), None, (17, 12)),  # out of order
        (answer("12 to 12"), (12, 12), (12, 12)),
        (answer("12 TO 17"), (12, 17), None),  # the evaluator knows lower case only
        ("12 to 17", None, (12, 17)),  # no block
        (answer("1 to 2") + " or 3 and 4", (1, 2), (3, 4)),  # the whole text
        (answer(f"1 to {HUGE}"), None, None),
    ],
)
def test_it_reads_what_videochat_r1_and_the_evaluators_read(text, reward, evaluator):
    assert parse_span(text, "videochat_r1") == reward
    assert parse_span(text, "evaluator") == evaluator


PUBLISHED = r"(\d+\.?\d*) (to|and) (\d+\.?\d*)"


def test_the_published_expression_and_ours_find_the_same():
    draw = random.Random(0)
    found = 0
    for _ in range(5000):
        text = "".join(draw.choice(["1", "23", ".", " ", " to ", " and ", "-", "a"]) for _ in range(12))
        wanted = [(float(a), float(b)) for a, _, b in re.findall(PUBLISHED, text)]
        assert parse_span(text, "evaluator") == (wanted[-1] if wanted else None), text
        found += bool(wanted)
    assert found > 500


def test_iou_giou_and_timestamp_aware_iou_of_overlapping_spans():
    # Of (10, 20) and (12, 22): overlap 8, hull 12 = union, so IoU 8/12 and nothing of the hull is uncovered.
    # Both ends are 2 s off in 40 s: 2/3 * 0.95 * 0.95 = 0.601667.
    assert iou((10, 20), (12, 22)) == pytest.approx(2 / 3, abs=CLOSE)
    assert giou((10, 20), (12, 22)) == pytest.approx(2 / 3, abs=CLOSE)
    assert timestamp_aware_iou((10, 20), (12, 22), 40) == pytest.approx(0.601667, abs=CLOSE)


def test_iou_giou_and_timestamp_aware_iou_of_disjoint_spans():
    # Of (0, 5) and (15, 20): no overlap, union 10, hull 20, so GIoU = 0 - (20 - 10) / 20.
    assert iou((0, 5), (15, 20)) == 0
    assert giou((0, 5), (15, 20)) == -0.5
    assert timestamp_aware_iou((0, 5), (15, 20), 40) == 0


def test_equal_spans_agree_fully_and_touching_spans_not_at_all():
    for measure in (iou, giou, lambda a, b: timestamp_aware_iou(a, b, 10)):
        assert measure((1, 3), (1, 3)) == 1
        assert measure((1, 3), (3, 5)) == 0


def test_two_points_agree_only_where_they_are_the_same():
    assert iou((3, 3), (3, 3)) == giou((3, 3), (3, 3)) == 1
    assert iou((3, 3), (4, 4)) == 0
    assert giou((3, 3), (4, 4)) == -1  # nothing of the hull is covered


def test_a_span_out_of_order_overlaps_nothing():
    assert iou((20, 10), (12, 18)) == 0
    assert timestamp_aware_iou((20, 10), (12, 18), 40) == 0


def test_timestamp_aware_iou_never_leaves_the_unit_interval():
    # Start and end are each 60 s off in 40 s: two factors of -0.5 would multiply to a reward.
    assert timestamp_aware_iou((0, 100), (60, 160), 40) == 0
    # Only the end is too far off; a start that fits must not rescue it.
    assert timestamp_aware_iou((0, 100), (0, 10), 40) == 0


def test_giou_is_iou_less_the_uncovered_share_and_symmetric():
    for a, b in [((0, 4), (1, 9)), ((0, 1), (5, 9)), ((2, 8), (3, 4))]:
        assert giou(a, b) == giou(b, a)
        assert -1 < giou(a, b) <= iou(a, b)


def test_merged_joins_overlapping_and_touching_spans():
    assert merged([(4, 6), (0, 1), (1, 2), (5, 9), (6, 7)]) == [(0, 2), (4, 9)]
    assert merged([]) == []


def test_set_iou_merges_each_side_before_it_measures():
    # Answered: (0, 4) and (3, 6) are (0, 6); target: (5, 10). Shared 1 of 6 + 5 - 1.
    assert set_iou([(0, 4), (3, 6)], [(5, 10)]) == pytest.approx(1 / 10)
    # Two pieces against one: shared 2 + 3, covered 10.
    assert set_iou([(0, 2), (7, 10)], [(0, 10)]) == pytest.approx(5 / 10)
    assert set_iou([(0, 3)], [(5, 7)]) == 0


def test_set_iou_of_empty_sets():
    assert set_iou([], []) == 1
    assert set_iou([], [(0, 1)]) == set_iou([(0, 1)], []) == 0


def test_set_iou_of_one_span_each_is_iou():
    for a, b in [((0.0, 4.0), (1.0, 9.0)), ((2.0, 8.0), (3.0, 4.0)), ((0.0, 1.0), (5.0, 9.0))]:
        assert set_iou([a], [b]) == pytest.approx(iou(a, b))


def test_parse_saliency_reads_the_last_list_of_pairs_in_the_answer():
    assert parse_saliency("[[9, 9]] " + answer("[[0, 1]] then [[2, 3.5], [4.0, 1]]")) == [(2, 3.5), (4, 1)]
    assert parse_saliency("[[0, 1],\n [2, 4]]") == [(0, 1), (2, 4)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "[]",
        "[[]]",
        "[[1]]",
        "[[1, 2, 3]]",
        "[[1, [2]]]",
        '[["a", 1]]',
        "[[1, 2",
        "[" * 5000 + "]]",
    ]
    + ["[[1, NaN]]", "[[Infinity, 1]]", "[[1, 1e999]]", "[[1" + "0" * 400 + ", 1]]"],
)
def test_malformed_saliency_is_empty(text):
    assert parse_saliency(answer(text)) == []


def test_malformed_saliency_does_not_hide_an_earlier_list():
    assert parse_saliency("[[2, 3]] [[4, NaN]]") == [(2, 3)]
    assert all(math.isfinite(x) for pair in parse_saliency("[[2, 3]]") for x in pair)


def test_overlaps_are_those_of_counted_cells():
    # spans of eighths of a second between 0 and 1: every pair, cell by cell
    spans = [(a, b) for a in range(7) for b in range(a + 1, 8)]
    for a in spans:
        for b in spans:
            one, other = (set(range(*span)) for span in (a, b))
            hull = max(a[1], b[1]) - min(a[0], b[0])
            both, either = len(one & other), len(one | other)
            short = [tuple(end / 8 for end in span) for span in (a, b)]
            assert iou(*short) == pytest.approx(both / hull)
            assert giou(*short) == pytest.approx(both / either - (hull - either) / hull)
            near = (1 - abs(a[0] - b[0]) / 16) * (1 - abs(a[1] - b[1]) / 16)
            assert timestamp_aware_iou(*short, 2.0) == pytest.approx(both / hull * near)
