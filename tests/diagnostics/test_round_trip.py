"""Every row's own target, given as the answer, earns full marks, and another row's does not."""

from __future__ import annotations

import json

import pytest

from mmrl.build import check_data
from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.config.registry import pieces
from mmrl.config.schema import Config, Piece, parse
from mmrl.core.types import Message, Part, Prompt
from mmrl.diagnostics.round_trip import check_targets, round_trips
from mmrl.rewards.adapters import OwnAnswer
from mmrl.vision.benchmarks.boxes import Boxes
from mmrl.vision.benchmarks.time_spans import Moments
from tests.support.toys import plan, toy_run

HERE = __name__
WORDS = ("cat", "-3", "3", "3%", "1/2", "C++", "C", "A", "t-shirt", "e\u0301", "a < b", "a > b")
COUNT = 24


def row(i, target=None, text="", **columns):
    return Prompt(f"r{i}", (Message("user", (Part(text),)),), target, columns=columns)


def rows(*targets, text="", **columns):
    return [row(i, target, text, **columns) for i, target in enumerate(targets)]


def spans(i):
    return (3.25 * i, 3.25 * i + 2.5), (90.0 + i, 91.125 + i)


def saliency(i):
    return tuple((float((i + window) % 5),) * 3 for window in range(10))


def calls(i):
    return [{"name": "find", "arguments": {"q": f"é<b> {i}", "k": i}}, {"name": "see", "arguments": {}}]


def boxes(i, unit=(1.0, 1.0)):
    return Boxes(((10.5 * i, 5, 10.5 * i + 8, 20.25), (3, 40 + 9 * i, 90, 48 + 9 * i)), ("dog", "cat"), unit)


def action(i):
    click = {"action": "click", "position": [i / COUNT, 0.5]}
    return click if i % 2 else {"action": "type", "value": f"word{i}"}


ASKED = r"Reason, then give \boxed{...}, or <answer>...</answer>."
TEXTS = rows(*WORDS), rows(*WORDS, text=ASKED), rows(*([word, f"not {word}"] for word in WORDS))
MOMENTS = [row(i, Moments(spans(i), 200.0, saliency(i))) for i in range(COUNT)]
BOXES = [row(i, boxes(i)) for i in range(COUNT)]
THOUSANDTHS = [row(i, boxes(i, (0.64, 0.48))) for i in range(COUNT)]
ACTIONS = [row(i, action(i) if i % 3 else json.dumps(action(i))) for i in range(COUNT)]
CALLS = [row(i, f"f(x={i}, y='a')\n", calls=calls(i)) for i in range(COUNT)]
LISTS = [row(i, [{"name": "f", "arguments": {"x": [i, "b"], "y": ["", "c"], "z": 1}}]) for i in range(COUNT)]
SIGNS = [row(i, None, f'A sign that says "É {i * 97}" at night', words=[f"LOW {i}x"]) for i in range(COUNT)]
OPTIONS = {
    "exact_match": [(each, {}) for each in TEXTS],
    "answer_f1": [(rows("cat", "a red dog", True, "9"), {})],
    "answer_recall": [(rows("cat", "a red dog that is much too long", ["b", "c"]), {})],
    "vision.short_answer": [
        *((each, {"form": "text"}) for each in TEXTS),
        (rows("3", -3, 3.5, "3%", "30", "1,000"), {}),
        (rows("A", "B", "C", text=ASKED), {}),
        (rows(1, 2, 3), {"tolerance": {"name": "linear", "start": 0.1, "end": 0.0}}),
        (rows("B", "C", "A", choices=["red", "blue", "green"]), {}),
        (rows("0", "2", "1", choices=["red", "blue", "green"]), {"form": "choice"}),
    ],
    "vision.binary_vqa": [
        (rows("Yes", False, "true", "no"), {"form": form}) for form in ("first_word", "pope", "exact")
    ],
    "vision.benchmark_answer": [
        (rows("3", "1.06", ["24/7", "3.429"]), {"form": "mmmu"}),
        (rows("red", "blue", "green", choices=["red", "blue", "green"]), {"form": "mathvista"}),
        (rows("3", "14", answer_type="integer"), {"form": "mathvista"}),
        *(
            (rows("A", "B", "C", choices=["x", "y", "z"]), {"form": form})
            for form in ("mmbench", "video_mme")
        ),
        (rows("He ran", "He sat", choices=["He sat", "He ran"]), {"form": "mvbench"}),
        *((rows("centre", "12.5", "5%"), {"form": form}) for form in ("ocrbench", "chartqa")),
    ],
    "vision.temporal_iou": [
        *((MOMENTS, {"form": form, "relax": 0.1}) for form in ("iou", "giou", "timestamp_aware")),
        *((MOMENTS, {"reader": name}) for name in ("ours", "time_r1", "videochat_r1", "evaluator")),
    ],
    "vision.span_set_iou": [(MOMENTS, {})],
    "vision.window_ap": [(MOMENTS, {}), (MOMENTS, {"threshold": 0.9})],
    "vision.highlight_ap": [(MOMENTS, {})],
    "vision.highlight_hit": [(MOMENTS, {})],
    "vision.saliency": [(MOMENTS, {})],
    "vision.box_iou": [(BOXES, {}), (BOXES, {"inclusive": True}), (THOUSANDTHS, {"reader": "vlm_r1"})],
    "vision.detection_map": [
        (each, {"form": form})
        for each in (BOXES, THOUSANDTHS, [*BOXES, row("none", Boxes((), ()))])
        for form in ("map", "length_penalty", "weighted_sum")
    ],
    "vision.click_inside": [(BOXES, {}), (THOUSANDTHS, {})],
    "vision.click_proximity": [(BOXES, {}), (THOUSANDTHS, {})],
    "vision.click_reward": [(ACTIONS, {"of": of, "threshold": 0.01}) for of in ("sum", "type", "value")],
    "vision.action_argument": [(ACTIONS, {"threshold": 0.01, "tag": "do"})],
    "function_calls": [
        (CALLS, {}),
        (CALLS, {"think": "think", "tag": ""}),
        (CALLS, {"target": "calls"}),
        (LISTS, {"allowed": "list"}),
    ],
    "call_match": [(CALLS, {"matching": each}) for each in ("greedy", "optimal", "soft")],
    "diffusion.text_in_image": [(SIGNS, {}), (SIGNS, {"column": "words"})],
}


def test_every_reward_that_says_how_its_target_is_written_is_in_the_table():
    assert OPTIONS.keys() == {entry.full_name for entry in pieces("reward") if entry.own_answer}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_target_earns_full_marks_at_its_own_row_alone(name):
    for prompts, options in OPTIONS[name]:
        (trip,) = round_trips(prompts, [Piece(name, options)], "rewards")
        assert list(trip.wrong) == [], options
        # The best window of one row, and the type of an action, may be right elsewhere.
        assert name == "vision.highlight_hit" or options.get("of") == "type" or not trip.alike, options
        assert trip.compared or options.get("of") == "type"
        assert trip.rows == (COUNT // 2 if options.get("of") == "value" else len(prompts)), options


@pytest.mark.parametrize(
    ("form", "right", "other", "words"),
    [
        ("number", "3", "cow", "row 'r2': 'cow' is no number"),
        ("letter", "B", "cow", "row 'r2': 'cow' is no letter"),
        ("choice", "B", "cow", "row 'r2': 'cow' is no choice"),
    ],
)
def test_a_target_that_its_form_does_not_fit_is_named(form, right, other, words):
    reward = [Piece("vision.short_answer", {"form": form})]
    kept = ("1", right) if form == "number" else ("A", right)
    assert check_targets(rows(*kept, choices=["red", "blue"]), reward, "rewards") == []
    (said,) = check_targets(rows(*kept, other, choices=["red", "blue"]), reward, "rewards")
    assert "1 of 3 rows have a target of another form" in said and words in said


SPANS = [row(i, Moments(((5.0, 3.0) if i in (4, 7) else spans(i)[0],), 200.0)) for i in range(COUNT)]
PLANTED = {
    "a span that ends before its start": (SPANS, "vision.temporal_iou", {}, "r4", "5 to 3"),
    "a text for a span": (rows("3 to 5", "4 to 6"), "vision.temporal_iou", {}, "r0", "'str' object"),
    "a box without a width": (
        rows(Boxes(((5, 5, 5, 9),)), Boxes(((1, 1, 3, 3),))), "vision.box_iou", {}, "r0", "earns 0 of 1",
    ),
    "an action without its position": (
        rows(*[{"action": "click", "postion": [0.1, 0.2]}] * 3), "vision.click_reward", {}, "r0", "1 of 2",
    ),
    "an action that is a sentence": (
        rows("click the bin"), "vision.action_argument", {}, "r0", "wanted as its",
    ),
    "a call whose arguments are misspelled": (
        [row(i, None, calls=[{"name": "f", "argumnets": {"x": i}}]) for i in range(3)],
        "call_match", {}, "r0", "argumnets",
    ),
    "a function call that is a sentence": (
        rows("call f with x"), "function_calls", {}, "r0", "no function call",
    ),
    "no wanted text": ([row(0, None, "A sign")], "diffusion.text_in_image", {}, "r0", "in quotes"),
    "a column that is not there": (
        SIGNS, "diffusion.text_in_image", {"column": "caption"}, "r0", "the column 'caption'",
    ),
    "a prompt that asks for a box that cannot be closed": (
        rows("}", "{", text=ASKED), "vision.short_answer", {"form": "text"}, "r0", "boxed",
    ),
    "a tolerance that pays everything": (
        rows(*range(1, 9)), "vision.short_answer", {"tolerance": 100.0}, "r0", "as well: row 'r0': '1' and",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_named_by_its_row_and_stops_the_run(name):
    prompts, reward, options, uid, words = PLANTED[name]
    with pytest.raises(ConfigError) as error:
        check_targets(prompts, [Piece(reward, options)], "rewards")
    assert str(error.value).startswith(f"rewards[0] '{reward.rpartition('.')[2]}': ")
    assert f"row '{uid}': " in str(error.value) and words in str(error.value)


def test_a_few_bad_rows_are_named_and_do_not_stop():
    prompts = [*(row(i, Moments((spans(i % COUNT)[0],), 200.0)) for i in range(60)), row("x", "3 to 5")]
    (line,) = check_targets(prompts, [Piece("vision.temporal_iou")], "rewards")
    assert (
        line.startswith("rewards[0] 'temporal_iou': 1 of 61 rows do not give full marks") and "'rx'" in line
    )
    bad = [row(f"y{i}", "3 to 5") for i in range(3)]
    with pytest.raises(ConfigError, match="4 of 64 rows .*'rx'.*'ry0'.*'ry1'.*; and 1 more"):
        check_targets([*prompts, *bad], [Piece("vision.temporal_iou")], "rewards")


def test_rows_that_a_reward_is_not_asked_about_do_not_count():
    prompts = [row(0, Moments((spans(1)[0],), 200.0), kind="span"), row(1, "3 to 5", kind="text")]
    piece = Piece("vision.temporal_iou", {"where": {"kind": "span"}})
    (trip,) = round_trips(prompts, [piece, Piece("think_format")], "rewards")
    assert (trip.rows, list(trip.wrong)) == (1, [])
    (line,) = check_targets(rows(None, None), [Piece("vision.short_answer")], "rewards")
    assert line.startswith("rewards[0] 'short_answer': no row has a target that it reads")
    assert check_targets([], [Piece("vision.short_answer")], "rewards") == []  # a run without held-out data
    elsewhere = Piece("vision.short_answer", {"where": {"kind": "other"}})
    assert check_targets(rows(None, None, kind="span"), [elsewhere, Piece("think_format")], "rewards") == []
    (line,) = check_targets(rows(None, None, kind="span"), [elsewhere], "rewards")
    assert line == "rewards[0] 'short_answer': no row has {'kind': 'other'} (`where`), so it gives no reward"


# ---- in commands and runs


def says(completions, target, **columns):
    """A reward of TRL's form that says how its targets are written."""
    return [float(text == str(right)) for text, right in zip(completions, target, strict=True)]


says.own_answer = lambda prompt: OwnAnswer((str(prompt.target),))


def never(completions, target, **columns):
    """A reward of TRL's form that compares with the wrong side."""
    return [float(text == f"{right}!") for text, right in zip(completions, target, strict=True)]


never.own_answer = says.own_answer


def test_a_run_does_not_start_with_targets_that_its_reward_cannot_read(tmp_path):
    with pytest.raises(ConfigError, match="rewards.0. 'never': 8 of 8 rows .* earns 0 of 1"):
        toy_run(tmp_path / "bad", rewards=[f"{HERE}:never"])
    assert not (tmp_path / "bad").exists()
    toy_run(tmp_path / "good", rewards=[f"{HERE}:says"])


def test_check_reads_every_row_and_names_the_wrong_ones(tmp_path, capsys):
    file = tmp_path / "questions.jsonl"
    lines = [{"id": f"q{i}", "question": f"{i} {ASKED}", "answer": str(i)} for i in range(300)]
    lines[257]["answer"] = "}"
    file.write_text("\n".join(map(json.dumps, lines)))
    raw = plan(tmp_path / "out", data={"name": "vision.visual_qa", "path": str(file)})
    raw["rewards"] = [{"name": "vision.short_answer", "form": "text"}]
    said = check_data(parse(raw, Config))
    assert any("1 of 300 rows" in line and "row 'q257'" in line for line in said)
    for line in lines[::10]:
        line["answer"] = "}"
    file.write_text("\n".join(map(json.dumps, lines)))
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(raw))
    assert main(["check", str(config), "--data"]) == 2
    assert "31 of 300 rows do not give full marks to their own target" in capsys.readouterr().out
    assert main(["doctor", str(config)]) == 2
    assert "of 200 rows do not give full marks to their own target" in capsys.readouterr().err
