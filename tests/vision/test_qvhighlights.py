"""The evaluator of QVHighlights gives the numbers that its definition gives by hand."""

from __future__ import annotations

import math

import pytest

from mmrl.vision.benchmarks.qvhighlights import (
    LEVELS,
    THRESHOLDS,
    detection_ap,
    highlight_metrics,
    saliency_ap,
    saliency_of_windows,
)
from tests.support.official_metrics import qvhighlights_metrics


def row(qid=1, windows=((0, 10),), duration=20, clips=(0,), scores=((4, 4, 4),)):
    return {
        "qid": qid,
        "query": "q",
        "vid": "v",
        "duration": duration,
        "relevant_windows": [list(window) for window in windows],
        "relevant_clip_ids": list(clips),
        "saliency_scores": [list(rated) for rated in scores],
    }


def test_thresholds_and_levels_are_the_published_ones():
    assert THRESHOLDS == (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    assert LEVELS == {"Fair": 2, "Good": 3, "VeryGood": 4}


def test_detection_ap_interpolates_precision_over_recall():
    # hit, miss, hit: precision 1 at recall 1/2, then 2/3 at recall 1. Area 1/2 * 1 + 1/2 * 2/3.
    windows = [(20, 30, 0.7), (0, 10, 0.9), (50, 60, 0.8)]
    assert detection_ap([(0, 10), (20, 30)], windows, 0.5) == pytest.approx(5 / 6)
    # miss, hit, hit: precision 1/2 at recall 1/2, but 2/3 at recall 1, which lifts it too.
    windows = [(50, 60, 0.9), (0, 10, 0.8), (20, 30, 0.7)]
    assert detection_ap([(0, 10), (20, 30)], windows, 0.5) == pytest.approx(2 / 3)


def test_detection_ap_takes_every_target_once():
    # The second window finds nothing that is left.
    assert detection_ap([(0, 10), (20, 30)], [(0, 10, 0.9), (1, 10, 0.8)], 0.5) == 0.5
    # It takes the next best target where that is near enough: (0, 8) has IoU 0.8 with (0, 10).
    assert detection_ap([(0, 10), (0, 8)], [(0, 10, 0.9), (0, 10, 0.8)], 0.5) == 1
    assert detection_ap([(0, 10), (0, 8)], [(0, 10, 0.9), (0, 10, 0.8)], 0.85) == 0.5


def test_detection_ap_gives_a_window_its_nearest_target():
    # The first window has IoU 0.94 with (0, 10) and 0.957 with (0, 9). Were it to take the former, the second
    # one would be left with (0, 9), of IoU 0.9.
    assert detection_ap([(0, 10), (0, 9)], [(0, 9.4, 0.9), (0, 10, 0.8)], 0.92) == 1


def test_detection_ap_counts_an_overlap_of_exactly_the_threshold():
    assert detection_ap([(0, 5)], [(0, 10, 1.0)], 0.5) == 1
    assert detection_ap([(0, 5)], [(0, 10, 1.0)], 0.55) == 0


def test_detection_ap_without_windows_is_0():
    assert detection_ap([(0, 10)], [], 0.5) == 0


def test_saliency_ap_averages_precision_over_rises_of_recall():
    # hit, miss, hit, miss: precision 1, then 2/3.
    assert saliency_ap([1, 0, 1, 0], [0.9, 0.8, 0.7, 0.1]) == pytest.approx((1 + 2 / 3) / 2)
    # Three clips tie: one rise to recall 1 with precision 3/4. It weighs as much as the first, though it is
    # twice as high: (1 + 3/4) / 2 and not 1/3 * 1 + 2/3 * 3/4.
    assert saliency_ap([1, 1, 1, 0], [0.9, 0.5, 0.5, 0.5]) == pytest.approx(0.875)
    # miss, hit, hit: precision 1/2 at recall 1/2, but 2/3 at recall 1, which lifts it too.
    assert saliency_ap([0, 1, 1], [0.9, 0.8, 0.7]) == pytest.approx(2 / 3)
    # miss, hit: precision 1/2 alone.
    assert saliency_ap([0, 1], [0.9, 0.1]) == 0.5


def test_saliency_ap_of_one_label_alone():
    assert saliency_ap([0, 0], [0.9, 0.1]) == 0
    assert saliency_ap([1, 1], [0.1, 0.9]) == 1


def test_saliency_ap_pads_scores_with_0_and_cuts_them():
    # Without scores all clips tie: precision 1/2 at recall 1.
    assert saliency_ap([1, 0], []) == 0.5
    assert saliency_ap([0, 1], [-1.0]) == 1  # the missing score of 0 is the higher one
    assert saliency_ap([1, 0], [0.9, 0.1, 5.0]) == 1


def test_saliency_of_windows_lays_ratings_over_videos_of_two_seconds():
    rated = row(duration=9, clips=(1, 3), scores=((1, 2, 3), (4, 0, 0)))
    assert saliency_of_windows(rated) == [[0, 0, 0], [1, 2, 3], [0, 0, 0], [4, 0, 0]]


@pytest.mark.parametrize(
    ("clips", "scores"),
    [((4,), ((1, 1, 1),)), ((-1,), ((1, 1, 1),)), ((0,), ((1, 1),)), ((0, 1), ((1, 1, 1),))],
)
def test_saliency_of_windows_refuses_ratings_that_fit_no_clip(clips, scores):
    with pytest.raises((IndexError, ValueError)):
        saliency_of_windows(row(duration=8, clips=clips, scores=scores))


def test_highlight_metrics_average_annotators_for_ap_and_take_the_kindest_for_a_hit():
    clips = [[4, 0, 4], [0, 4, 4], [0, 0, 4], [0, 0, 4]]
    # Ranked 0, 1, 2, 3. First annotator: 1. Second: precision 1/2 at rank 2. Third: all clips, 1.
    ap, hit = highlight_metrics(clips, [0.9, 0.8, 0.7, 0.6], 4)
    assert ap == pytest.approx((1 + 0.5 + 1) / 3)
    assert hit == 1
    # Clip 3 is a highlight for the third annotator only.
    assert highlight_metrics(clips, [0, 0, 0, 1], 4)[1] == 1
    assert highlight_metrics([[3, 3, 3], [4, 0, 0]], [1, 0], 4)[1] == 0
    assert highlight_metrics([[3, 3, 3], [4, 0, 0]], [1, 0], 3)[1] == 1


def test_highlight_metrics_miss_without_scores_and_after_the_last_clip():
    assert highlight_metrics([[4, 4, 4], [0, 0, 0]], [], 4) == (0.5, 0)
    assert highlight_metrics([[4, 4, 4], [4, 0, 0]], [0, 0, 1], 4)[1] == 0


def test_evaluate_of_a_perfect_submission():
    truth = [row(1, windows=((0, 8), (10, 18)), clips=(0, 4), scores=((4, 4, 4), (2, 2, 2)))]
    said = [
        {
            "qid": 1,
            "pred_relevant_windows": [[0, 8, 0.9], [10, 18, 0.8]],
            "pred_saliency_scores": [1.0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0],
        }
    ]
    metrics = qvhighlights_metrics(said, truth)
    for name in (
        "MR-full-mAP",
        "MR-short-mAP@0.95",
        "MR-full-R1@0.5",
        "HL-min-VeryGood-mAP",
        "HL-min-Fair-Hit1",
    ):
        assert metrics[name] == 100
    # No window is longer than 10 s.
    assert math.isnan(metrics["MR-middle-mAP"]) and math.isnan(metrics["MR-long-R1@0.5"])


def test_evaluate_averages_over_thresholds_and_queries_in_percent():
    # The first query has IoU 0.6 and passes 3 of 10 thresholds (0.5, 0.55, 0.6), the second passes none.
    truth = [row(1), row(2)]
    said = [
        {"qid": 1, "pred_relevant_windows": [[0, 6, 1.0]]},
        {"qid": 2, "pred_relevant_windows": [[12, 20, 1.0]]},
    ]
    metrics = qvhighlights_metrics(said, truth)
    assert metrics["MR-full-mAP"] == 15
    assert metrics["MR-full-mAP@0.5"] == metrics["MR-full-R1@0.6"] == 50
    assert metrics["MR-full-mAP@0.65"] == metrics["MR-full-R1@0.65"] == 0
    assert not any(name.startswith("HL") for name in metrics)


def test_evaluate_rounds_to_two_decimals():
    truth = [row(i) for i in range(3)]
    said = [{"qid": i, "pred_relevant_windows": [[0, 10 * (i == 0) or 1, 1.0]]} for i in range(3)]
    assert qvhighlights_metrics(said, truth)["MR-full-R1@0.5"] == 33.33


def test_evaluate_takes_the_first_window_for_r1_and_ten_for_map():
    # The first window misses, whatever its score; the eleventh is not looked at.
    windows = [[12, 20, 0.1]] + [[11, 20, 0.1]] * 9 + [[0, 10, 0.9]]
    metrics = qvhighlights_metrics([{"qid": 1, "pred_relevant_windows": windows}], [row()])
    assert metrics["MR-full-R1@0.5"] == metrics["MR-full-mAP@0.5"] == 0
    # Second in the list, but of the highest score: the top for mAP, not for R1.
    windows = [[12, 20, 0.1], [0, 10, 0.9]]
    metrics = qvhighlights_metrics([{"qid": 1, "pred_relevant_windows": windows}], [row()])
    assert metrics["MR-full-R1@0.5"] == 0
    assert metrics["MR-full-mAP@0.5"] == 100


def test_evaluate_sorts_windows_into_lengths_by_their_upper_end():
    truth = [row(1, windows=((0, 10), (20, 50)), duration=60)]
    said = [{"qid": 1, "pred_relevant_windows": [[0, 10, 0.9], [20, 50, 0.8]]}]
    metrics = qvhighlights_metrics(said, truth)
    # 10 s is short, 30 s is middle; each bucket sees the other's window as a false positive.
    assert metrics["MR-short-mAP@0.5"] == 100
    assert metrics["MR-middle-mAP@0.5"] == 50
    assert metrics["MR-full-mAP@0.5"] == 100
    assert math.isnan(metrics["MR-long-mAP@0.5"])


def test_a_query_without_windows_counts_as_0_and_is_skipped_only_as_the_official_evaluator_does():
    truth = [row(1), row(2)]
    said = [
        {"qid": 1, "pred_relevant_windows": [[0, 10, 1.0]]},
        {"qid": 2, "pred_relevant_windows": []},
    ]
    metrics = qvhighlights_metrics(said, truth)
    assert metrics["MR-full-mAP"] == metrics["MR-full-R1@0.5"] == 50
    with pytest.raises(IndexError):
        qvhighlights_metrics(said, truth, official=True)


def test_queries_of_one_side_only_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"same queries.*\[2, 3\]"):
        qvhighlights_metrics([{"qid": 2, "pred_relevant_windows": []}], [row(3)])
