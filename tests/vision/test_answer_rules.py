"""The rules of the benchmarks give the numbers of the benchmarks' own code.

`benchmark_answers.json` has texts, and what the functions and commits named there made of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from mmrl.vision.benchmarks.answer_rules import (
    RULES,
    Question,
    chartqa,
    mathvista,
    mathvista_answer,
    mathvista_normal,
    mmbench_letter,
    mmmu,
    mmmu_letter,
    mmmu_phrases,
    mvbench,
    own_answer,
    video_mme,
)
from mmrl.vision.benchmarks.boxes import Boxes, box_iou, parse_box
from mmrl.vision.benchmarks.time_spans import iou, parse_span

OFFICIAL = json.loads((Path(__file__).parent / "benchmark_answers.json").read_text())


def cases(name):
    return [(case, question(case)) for case in OFFICIAL[name]["cases"]]


def question(case):
    answers = case["answer"] if isinstance(case["answer"], list) else [case["answer"]]
    return Question(
        "q",
        answers,
        case.get("choices") or (),
        case.get("answer_type", ""),
        case.get("precision"),
        case.get("dataset", ""),
    )


@pytest.mark.parametrize("name", sorted(OFFICIAL))
def test_the_reference_names_its_code_and_has_both_verdicts(name):
    found = OFFICIAL[name]
    assert len(found["commit"]) == 40 and found["repository"].count("/") == 1 and found["functions"]
    verdicts = {bool(case.get("right", case.get("hit", case.get("iou", 0) > 0.5))) for case in found["cases"]}
    assert verdicts == {True, False}


@pytest.mark.parametrize("name", ["mathvista", "mmbench", "ocrbench", "chartqa", "video_mme"])
def test_a_rule_agrees_with_the_official_code(name):
    for case, asked in cases(name):
        assert RULES[name](case["text"], asked)[0] == case["right"], case


def test_mmmu_letters_agree_and_only_other_answers_are_drawn():
    for case, asked in cases("mmmu"):
        assert mmmu_letter(case["text"], asked) == case["letter"], case
        right, parsed = mmmu(case["text"], asked)
        assert parsed == (case["letter"] is not None)
        assert not parsed or right == case["right"], case


def test_mmmu_open_answers_agree():
    for case, asked in cases("mmmu_open"):
        assert mmmu(case["text"], asked)[0] == case["right"], case
        assert sorted(set(map(str, mmmu_phrases(case["text"])))) == case["parsed"], case


def test_a_drawn_letter_depends_on_the_question_alone_and_is_right_as_often_as_chance():
    drawn = [mmmu("no idea", Question(f"q{i}", ["B"], ["a", "b", "c", "d"])) for i in range(2000)]
    assert drawn == [mmmu("no idea", Question(f"q{i}", ["B"], ["a", "b", "c", "d"])) for i in range(2000)]
    assert 0.2 < sum(right for right, _ in drawn) / 2000 < 0.3  # five standard deviations of 1 / 4
    assert not any(parsed for _, parsed in drawn)


def test_mathvista_extractions_and_predictions_agree():
    for case, asked in cases("mathvista"):
        extracted = mathvista_answer(case["text"], asked)
        assert extracted == case["extraction"], case
        assert mathvista_normal(extracted, asked) == case["prediction"], case
    # Nothing is extracted, so the shortest choice counts, as in the code.
    assert mathvista("maybe", Question("q", ["b"], ["long", "b", "c"])) == (True, False)


def test_mmbench_letters_agree():
    for case, asked in cases("mmbench"):
        assert mmbench_letter(case["text"], asked) == case["inferred"], case


def test_mmbench_rotations_agree():
    for group in OFFICIAL["mmbench_circular"]["cases"]:
        right = [RULES["mmbench"](row["text"], question(row))[0] for row in group["rows"]]
        assert min(right) == group["hit"], group


def test_video_mme_letters_agree():
    for case, asked in cases("video_mme"):
        assert video_mme(case["text"], asked)[1] == (case["letter"] is not None), case


def test_mvbench_agrees_but_for_answers_without_a_word():
    apart = [
        case["text"] for case, asked in cases("mvbench") if mvbench(case["text"], asked)[0] != case["right"]
    ]
    assert {text.strip().split(" ")[0] for text in apart} <= {""}
    assert not any(mvbench("", asked)[0] for _, asked in cases("mvbench"))


def test_tvgbench_spans_and_scores_agree():
    found = OFFICIAL["tvgbench"]
    overlaps = []
    for case in found["cases"]:
        span = parse_span(case["text"], "evaluator")
        overlaps.append(0.0 if span is None else iou(span, (case["start"], case["end"])))
        assert overlaps[-1] == pytest.approx(case["iou"]), case
    shares = {f"{bar}": 100 * sum(x > bar for x in overlaps) / len(overlaps) for bar in (0.3, 0.5, 0.7)}
    shares["mIoU"] = 100 * sum(overlaps) / len(overlaps)
    assert shares == pytest.approx({name: found["scores"][name] for name in shares})


def test_refcoco_boxes_agree():
    for case in OFFICIAL["refcoco"]["cases"]:
        target, box = Boxes((tuple(case["bbox"]),), unit=tuple(case["size"])), parse_box(case["text"])
        found = 0.0 if box is None else box_iou(target.in_pixels(box), target.boxes[0])
        assert found == pytest.approx(case["iou"], abs=1e-9), case


def test_relaxed_accuracy_by_hand():
    def right(text, *answers):
        return chartqa(text, Question("q", answers))[0]

    assert right("105", "100") and not right("105.1", "100") and right("95", "100")
    assert right("50%", "0.5") and not right("50", "50%")  # a per cent is a hundredth
    assert right("yes", "Yes") and not right("Yes.", "Yes") and right("0", "0") and not right("0.01", "0")
    assert right("b", "a", "B")


def test_own_answers_earn_full_marks():
    """The first case of every kind, with its own answer."""
    seen = defaultdict(int)
    for name in RULES:
        for _, asked in cases(name)[:60] + (cases("mmmu_open") if name == "mmmu" else []):
            if "inf" in asked.answers:  # no number is within 5 % of it
                continue
            for text in own_answer(name, asked):
                assert RULES[name](text, asked) == (True, True), (name, text, asked)
                seen[name] += 1
    assert min(seen.values()) >= 10
