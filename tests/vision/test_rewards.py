"""Rewards of grounding and highlights: best, worst and malformed answers, and every form."""

from __future__ import annotations

import math

import pytest

from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.time_spans import Moments
from mmrl.vision.rewards.grounding import (
    consensus_span,
    highlight_ap,
    highlight_hit,
    saliency,
    span_confidence,
    span_set_iou,
    temporal_iou,
    window_ap,
)

CLOSE = 2e-6
HUGE = "9" * 200  # a float whose square is not
MALFORMED = [
    None,
    "",
    "no idea",
    "<answer></answer>",
    "<answer>9 to 2</answer>",
    "<answer>-1 to 2</answer>",
    "[[NaN, 1]]",
    "[[1, 2, 3]]",
    "{}",
    "[" * 2000 + "]]",
]


def asked(*spans, duration=40.0, saliency=(), uid="a"):
    return Prompt(uid, (), Moments(tuple(spans), duration, saliency))


def say(*texts):
    return [Outcome(text=text) for text in texts]


def of_one(reward, prompt, text, **options):
    return reward([prompt], say(text), **options)[0]


def test_temporal_iou_of_best_worst_and_partial_answers():
    prompt = asked((12, 22))
    answers = say("<answer>12 to 22</answer>", "<answer>30 to 40</answer>", "<answer>10 to 20</answer>")
    # 10 to 20 shares 8 of a hull of 12.
    assert temporal_iou([prompt] * 3, answers) == pytest.approx([1, 0, 2 / 3], abs=CLOSE)


@pytest.mark.parametrize("form", ["iou", "giou", "timestamp_aware"])
@pytest.mark.parametrize("text", MALFORMED)
def test_temporal_iou_of_malformed_answers_is_0(form, text):
    assert of_one(temporal_iou, asked((12, 22)), text, form=form) == 0
    assert of_one(temporal_iou, asked((12, 22)), text, reader="time_r1") == 0


@pytest.mark.parametrize("form", ["iou", "giou", "timestamp_aware"])
def test_temporal_iou_is_a_number_for_numbers_out_of_all_proportion(form):
    for digits in (200, 400):
        text = f"<answer>5 to {'9' * digits}</answer>"
        for reader in ("ours", "time_r1", "videochat_r1", "evaluator"):
            assert 0 <= of_one(temporal_iou, asked((12, 22)), text, form=form, reader=reader) <= 1


def test_temporal_iou_in_its_forms():
    prompt = asked((12, 22))
    # GIoU is 2/3 as well (nothing of the hull is uncovered) and 1/2 once it is mapped: (2/3 + 1) / 2 = 5/6.
    assert of_one(temporal_iou, prompt, "10 to 20", form="giou") == pytest.approx(5 / 6, abs=CLOSE)
    # Both ends are 2 s off in 40 s: 2/3 * 0.95 * 0.95.
    text = "10 to 20"
    assert of_one(temporal_iou, prompt, text, form="timestamp_aware") == pytest.approx(0.601667, abs=CLOSE)
    # Of (0, 5) and (15, 20) half the hull is uncovered: (-0.5 + 1) / 2.
    assert of_one(temporal_iou, asked((15, 20)), "0 to 5", form="giou") == 0.25
    assert of_one(temporal_iou, asked((15, 20)), "0 to 5") == 0


def test_temporal_iou_takes_the_best_of_several_targets():
    prompt = asked((0, 2), (10, 20))
    assert of_one(temporal_iou, prompt, "10 to 20") == 1
    assert of_one(temporal_iou, prompt, "10 to 15") == 0.5
    assert of_one(temporal_iou, prompt, "10 to 15", form="giou") == 0.75
    # The factors of (10, 20) are 1 and 1 - 5/40; those of (0, 2) go with an IoU of 0.
    assert of_one(temporal_iou, prompt, "10 to 15", form="timestamp_aware") == pytest.approx(0.5 * 35 / 40)


def test_temporal_iou_relaxed_widens_the_target_on_both_sides():
    # A quarter of 8 s on both sides makes (12, 20) the target (10, 22).
    assert of_one(temporal_iou, asked((12, 20)), "10 to 22", relax=0.25) == 1
    assert of_one(temporal_iou, asked((12, 20)), "12 to 20", relax=0.25) == pytest.approx(8 / 12)
    # It reaches beyond the start of the clip: a target of (-2, 10), of which 0 to 8 is 8/12.
    assert of_one(temporal_iou, asked((0, 8)), "0 to 8", relax=0.25) == pytest.approx(8 / 12)


def test_temporal_iou_reads_less_as_time_r1_does():
    prompt = asked((12, 22))
    assert of_one(temporal_iou, prompt, "<answer>12-22</answer>") == 1
    assert of_one(temporal_iou, prompt, "<answer>12-22</answer>", reader="time_r1") == 0
    assert of_one(temporal_iou, prompt, "<answer>12 to 22</answer>", reader="time_r1") == 1
    # A span out of order is read, and overlaps nothing.
    for form in ("iou", "giou", "timestamp_aware"):
        assert of_one(temporal_iou, prompt, "<answer>24 to 11</answer>", reader="time_r1", form=form) == 0


def test_span_set_iou_of_best_worst_and_partial_answers():
    prompt = asked((0, 4), (10, 14))
    assert of_one(span_set_iou, prompt, "<answer>10 to 14, 0 to 4</answer>") == 1
    assert of_one(span_set_iou, prompt, "<answer>20 to 30</answer>") == 0
    # One of two spans: 4 of 8. All of both and the gap of 6: 8 of 14.
    assert of_one(span_set_iou, prompt, "<answer>0 to 4</answer>") == 0.5
    assert of_one(span_set_iou, prompt, "<answer>0 to 14</answer>") == pytest.approx(8 / 14)


@pytest.mark.parametrize("text", MALFORMED)
def test_span_set_iou_of_malformed_answers_is_0(text):
    assert of_one(span_set_iou, asked((0, 4)), text) == 0


URPA = say("10 to 20", "11 to 21", "9 to 19", "10 to 22")


def test_consensus_span_of_the_worked_group():
    # The mean span is (10, 20.5). IoU: 10 / 10.5, 9.5 / 11, 9 / 11.5, 10.5 / 12.
    wanted = [10 / 10.5, 9.5 / 11, 9 / 11.5, 10.5 / 12]
    assert consensus_span([asked()] * 4, URPA) == pytest.approx(wanted, abs=CLOSE)


def test_span_confidence_of_the_worked_group():
    # Starts deviate by sqrt(1/2), ends by sqrt((0.25 + 0.25 + 2.25 + 2.25) / 4): 1.82514 in all, by the
    # count.
    sure = span_confidence([asked()] * 4, URPA, gamma=0.1, normalise_by="none")
    assert sure == pytest.approx([0.83317] * 4, abs=5e-6)
    assert sure[0] == pytest.approx(math.exp(-0.1 * (0.5**0.5 + 1.25**0.5)), abs=CLOSE)
    # As a share of 40 s, five times: exp(-5 * 1.82514 / 40).
    assert span_confidence([asked()] * 4, URPA) == pytest.approx(
        [math.exp(-5 * 1.825141 / 40)] * 4, abs=CLOSE
    )


def test_the_worked_rewards_of_confidence_times_consensus():
    # 0.5 * format + 0.5 * c * IoU with all answers well formed.
    pairs = zip(
        consensus_span([asked()] * 4, URPA),
        span_confidence([asked()] * 4, URPA, gamma=0.1, normalise_by="none"),
        strict=True,
    )
    wanted = [0.89675, 0.85978, 0.82602, 0.86451]
    assert [0.5 + 0.5 * sure * near for near, sure in pairs] == pytest.approx(wanted, abs=5e-6)


@pytest.mark.parametrize("reward", [consensus_span, span_confidence])
def test_a_group_with_fewer_than_two_spans_has_no_pseudo_label(reward):
    assert reward([asked()], say("1 to 2")) == [None]
    assert reward([asked()] * 3, say("1 to 2", "no idea", None)) == [None, None, None]
    assert reward([], []) == []


def test_answers_without_a_span_are_left_out_of_the_consensus_and_earn_0():
    said = say("0 to 10", "no idea", "0 to 10", "9 to 2")
    assert consensus_span([asked()] * 4, said) == [1, 0, 1, 0]
    assert span_confidence([asked()] * 4, said) == [1, 1, 1, 1]


def test_groups_are_told_apart_by_uid_in_any_order():
    prompts = [asked(uid="a"), asked(uid="b"), asked(uid="a"), asked(uid="b", duration=10.0)]
    said = say("0 to 10", "0 to 2", "0 to 10", "0 to 4")
    # b: mean (0, 3), IoU 2/3 and 3/4; the ends deviate by 1, a share of 1/40 and of 1/10.
    assert consensus_span(prompts, said) == pytest.approx([1, 2 / 3, 1, 3 / 4])
    assert span_confidence(prompts, said, gamma=1) == pytest.approx(
        [1, math.exp(-1 / 40), 1, math.exp(-1 / 10)]
    )


def test_spans_out_of_all_proportion_leave_no_confidence():
    said = say("0 to 2", f"0 to {HUGE}")
    assert span_confidence([asked()] * 2, said) == [0, 0]
    assert all(0 <= near <= 1 for near in consensus_span([asked()] * 2, said))


def test_window_ap_ranks_answered_spans_in_their_order():
    prompt = asked((0, 10), (20, 30))
    assert of_one(window_ap, prompt, "<answer>0 to 10, 20 to 30</answer>") == 1
    assert of_one(window_ap, prompt, "<answer>31 to 39</answer>") == 0
    # hit, miss, hit: 1/2 * 1 + 1/2 * 2/3, at every threshold.
    assert of_one(window_ap, prompt, "0 to 10, 32 to 39, 20 to 30") == pytest.approx(5 / 6)
    # hit, miss: 1/2 * 1. miss, hit: 1/2 * 1/2.
    assert of_one(window_ap, prompt, "0 to 10, 32 to 39") == 0.5
    assert of_one(window_ap, prompt, "32 to 39, 0 to 10") == 0.25


def test_window_ap_averages_over_thresholds_or_takes_one():
    # 0 to 6 has IoU 0.6 with (0, 10): it passes 0.5, 0.55 and 0.6 of ten thresholds.
    assert of_one(window_ap, asked((0, 10)), "0 to 6") == pytest.approx(0.3)
    assert of_one(window_ap, asked((0, 10)), "0 to 6", threshold=0.5) == 1
    assert of_one(window_ap, asked((0, 10)), "0 to 6", threshold=0.7) == 0


def test_window_ap_looks_at_ten_spans():
    text = ", ".join(["30 to 39"] * 10 + ["0 to 10"])
    assert of_one(window_ap, asked((0, 10)), text) == 0


@pytest.mark.parametrize("text", MALFORMED)
def test_window_ap_of_malformed_answers_is_0(text):
    assert of_one(window_ap, asked((0, 10)), text) == 0


# Four clips of 2 s: all annotators rate the first 4, one rates the second 4, nobody the others.
RATED = asked((0, 4), duration=8.0, saliency=((4, 4, 4), (4, 0, 0), (0, 0, 0), (0, 0, 0)))


def test_highlight_ap_of_best_and_partial_answers():
    assert of_one(highlight_ap, RATED, "<answer>[[0, 4], [2, 3]]</answer>") == 1
    # Second clip first: for the first annotator still all right, for the others precision 1/2.
    assert of_one(highlight_ap, RATED, "[[0, 3], [2, 4]]") == pytest.approx((1 + 0.5 + 0.5) / 3)
    # Any second of a clip names the clip.
    assert of_one(highlight_ap, RATED, "[[1.9, 4], [3, 3]]") == 1


def test_highlight_ap_of_an_answer_without_ratings_is_that_of_a_tie():
    # All four clips tie: precision 2/4 for the first annotator, 1/4 for the others.
    for text in MALFORMED:
        assert of_one(highlight_ap, RATED, text) == pytest.approx((0.5 + 0.25 + 0.25) / 3)


def test_highlight_levels_are_thresholds():
    fair = asked(duration=4.0, saliency=((2, 2, 2), (1, 1, 1)))
    for level, wanted in (("Fair", 1), ("Good", 0), ("VeryGood", 0)):
        assert of_one(highlight_ap, fair, "[[0, 4]]", level=level) == wanted
        assert of_one(highlight_hit, fair, "[[0, 4]]", level=level) == wanted


def test_highlight_hit_of_best_worst_and_malformed_answers():
    assert of_one(highlight_hit, RATED, "[[0, 4]]") == 1
    assert of_one(highlight_hit, RATED, "[[2, 4], [0, 1]]") == 1  # one annotator is enough
    assert of_one(highlight_hit, RATED, "[[4, 4], [0, 1]]") == 0
    assert of_one(highlight_hit, RATED, "[[100, 4], [-3, 4]]") == 0  # outside the clip
    for text in MALFORMED:
        assert of_one(highlight_hit, RATED, text) == 0


def test_saliency_of_best_and_worst_answers():
    prompt = asked(duration=8.0, saliency=((4, 4, 4), (3, 3, 3), (0, 0, 0), (0, 0, 0)))
    assert of_one(saliency, prompt, "[[0, 4], [2, 3]]") == pytest.approx(1)
    assert of_one(saliency, prompt, "[[4, 4], [6, 3]]") == 0


def test_saliency_weighs_recall_over_precision_and_errors_by_the_rating():
    prompt = asked(duration=8.0, saliency=((4, 4, 4), (2, 2, 2), (0, 0, 0), (0, 0, 0)))
    # One of two clips, rightly rated: precision 1, recall 1/2, F2 = 5 * 0.5 / (4 + 0.5) = 5/9.
    assert of_one(saliency, prompt, "[[0, 4]]") == pytest.approx(0.6 * 5 / 9 + 0.4)
    # Both clips and two wrong ones: precision 1/2, recall 1, F2 = 2.5 / 3.
    assert of_one(saliency, prompt, "[[0, 4], [2, 2], [4, 1], [6, 1]]") == pytest.approx(0.6 * 2.5 / 3 + 0.4)
    # An error of 1 on the clip rated 2, of weight 4 in 16 + 4: WMSE 1/5. On the other clip it is 4/5.
    assert of_one(saliency, prompt, "[[0, 4], [2, 3]]") == pytest.approx(0.6 + 0.4 / 1.2)
    assert of_one(saliency, prompt, "[[0, 3], [2, 2]]") == pytest.approx(0.6 + 0.4 / 1.8)


def test_saliency_of_malformed_answers_is_0():
    for text in MALFORMED:
        assert of_one(saliency, RATED, text) == 0
    # A rating whose square is no float costs the part of the ratings only.
    assert of_one(saliency, RATED, "[[0, 1e300], [2, 1e300]]") == pytest.approx(0.6)


@pytest.mark.parametrize("reward", [highlight_ap, highlight_hit, saliency])
def test_highlight_rewards_do_not_apply_without_annotated_saliency(reward):
    assert of_one(reward, asked((0, 4)), "[[0, 4]]") is None
