"""Why two evaluations differ: answers scored again, prompts rendered again, and the settings between them."""

from __future__ import annotations

import json
import math

import pytest

from mmrl.cli import main
from mmrl.config.changes import ABSENT
from mmrl.config.sweep import changed_config
from mmrl.inference.evaluations import explain, read_stored, rescore_both
from mmrl.reporting.answers import write_columns
from mmrl.reporting.effects import PromptDifference, prompt_difference
from mmrl.reporting.intervals import paired_interval
from mmrl.runtime.folders import MARK, mark_of
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint"]


def evaluate(folder, *overrides):
    assert main(["evaluate", str(folder / "e.yaml"), *overrides]) == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory, checkpoint):
    """Evaluations of a tiny model: `a`, and others with another parser, template variable, or engine."""
    folder = tmp_path_factory.mktemp("home")
    rows = [
        {"id": f"q{i}", "question": f"the quick fox {i}", "answer": answer} for i, answer in enumerate("1234")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "policy": {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float64"},
        "evaluation": {
            "data": {"name": "vision.visual_qa", "path": str(folder / "rows.jsonl")},
            "engine": [{"name": "vision.generate", "max_completion_length": 4, "temperature": 0}],
            "rewards": [{"name": "vision.short_answer", "form": "number"}],
        },
        "output_dir": str(folder / "a"),
    }
    (folder / "e.yaml").write_text(json.dumps(raw))
    evaluate(folder)
    return folder


@pytest.fixture
def answered(home, tmp_path):
    """Copy evaluation `a` to a new folder with other answers, rewards as `form: number` gives them."""

    def copy(name, answers, rewards, uid=(), **facts):
        from pyarrow import parquet

        table = parquet.read_table(home / "a" / "predictions.parquet").to_pydict()
        table |= {"completion": answers, "reward/short_answer": rewards, "reward": rewards}
        table |= {"correct": [value == 1 for value in rewards], "uid": list(uid) or table["uid"]}
        write_columns(tmp_path / name / "predictions.parquet", table, {b"correct": b"short_answer"})
        record = mark_of(home / "a")
        for key, value in facts.items():
            *above, last = key.split("__")
            inner = record["of"]
            for part in above:
                inner = inner[int(part) if isinstance(inner, list) else part]
            inner[last] = value
        (tmp_path / name / MARK).write_text(json.dumps(record))
        return tmp_path / name

    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    return copy


# Answers to the targets 1 to 4.
ANSWERS = ["1", "it is 2", "3 apples", "9"]


def test_an_evaluation_records_settings_packages_machine_and_prompts(home):
    record = mark_of(home / "a")
    assert record["record"]["config"]["policy"]["attn_implementation"] == "sdpa"  # a default
    assert any(text.startswith("torch ") for text in record["record"]["versions"])
    assert record["machine"]["devices"] and record["command"] == [str(home / "e.yaml")]
    row = read_stored(home / "a").predictions.rows[0]
    assert "the quick fox 0" in row["rendered"] and row["rendered"] != row["prompt"]
    assert len(row["inputs"].split()[0]) == 16


def test_stored_answers_are_scored_with_the_other_parser(answered):
    # `number` takes the last number, so 1, 2 and 3 are right; as a text only "1" is.
    first = read_stored(answered("x", ANSWERS, [1.0, 1.0, 1.0, 0.0]))
    second = read_stored(answered("y", ANSWERS, [1.0, 0.0, 0.0, 0.0], evaluation__rewards__0__form="text"))
    (effect,) = explain(first, second).effects
    assert (effect.setting, effect.first, effect.second) == ("evaluation.rewards.0.form", "number", "text")
    (change,) = effect.metrics
    assert (change.before, change.after) == (0.75, 0.25) and change.low <= -0.5 <= change.high
    assert effect.text.startswith("short_answer -0.5 (")
    joined, faults = rescore_both(first, second)
    assert faults == [] and len(joined) == 3
    for title, wanted in zip(list(joined)[1:], ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]), strict=True):
        for side in (0, 1):  # equal answers get equal rewards under one parser
            assert [pair[side][0]["reward/short_answer"] for pair in joined[title].pairs] == wanted


def test_equal_data_under_another_name_are_explained_and_scored_again(home, answered, tmp_path):
    first = read_stored(answered("x", ANSWERS, [1.0, 1.0, 1.0, 0.0]))
    rows = (home / "rows.jsonl").read_text().replace('"id": "q', '"id": "r')
    (tmp_path / "others.jsonl").write_text(rows)
    data = {"name": "vision.visual_qa", "path": str(tmp_path / "others.jsonl")}
    settings = {"evaluation__data": data, "evaluation__rewards__0__form": "text"}
    uids = [f"r{i}" for i in range(4)]
    second = read_stored(answered("y", ANSWERS, [1.0, 0.0, 0.0, 0.0], uid=uids, **settings))
    assert explain(first, second).stored_prompts == PromptDifference(0, 4)
    joined, faults = rescore_both(first, second)
    assert faults == [] and [len(one.pairs) for one in joined.values()] == [4, 4, 4]


def test_rewards_that_are_not_reproduced_are_named(answered):
    first = read_stored(answered("x", ANSWERS, [1.0, 1.0, 0.0, 0.0]))  # the third answer is right
    second = read_stored(answered("y", ANSWERS, [1.0, 0.0, 0.0, 0.0], evaluation__rewards__0__form="text"))
    (effect,) = explain(first, second).effects
    assert (
        "the answer to 'q2' gets 1 and not 0 from 'short_answer'" in effect.text
        and "needs a run" in effect.text
    )
    joined, (fault,) = rescore_both(first, second)
    assert len(joined) == 2 and "cannot be scored again" in fault


def test_other_rewards_are_compared_by_scoring_again(answered):
    first = read_stored(answered("x", ANSWERS, [1.0, 1.0, 1.0, 0.0]))
    other = {"name": "vision.short_answer", "form": "text", "label": "strict"}
    folder = answered("y", ANSWERS, [1.0, 0.0, 0.0, 0.0], evaluation__rewards=[other])
    second = read_stored(folder)
    rows = [
        {k.replace("short_answer", "strict"): v for k, v in row.items()} for row in second.predictions.rows
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    write_columns(folder / "predictions.parquet", columns, {b"correct": b"strict"})
    joined, faults = rescore_both(first, read_stored(folder))
    assert faults == [] and [one.measures[0] for one in joined.values()] == [
        "reward/strict",
        "reward/short_answer",
    ]


def test_a_reward_and_the_metric_that_names_it_are_one_setting(answered):
    """One without the other is no configuration: neither could be scored, nor its command run."""
    mean = lambda of: [{"name": "mean", "of": of, "label": "accuracy"}]
    given = [1.0, 1.0, 1.0, 0.0]
    first = read_stored(answered("x", ANSWERS, given, evaluation__metrics=mean("short_answer")))
    facts = {"evaluation__rewards": ["exact_match"], "evaluation__metrics": mean("exact_match")}
    (effect,) = explain(first, read_stored(answered("y", ANSWERS, given, **facts))).effects
    assert effect.setting == "evaluation.rewards.0 + evaluation.metrics.0.of"
    (change,) = effect.metrics
    assert (change.name, change.before, change.after) == ("accuracy", 0.75, 0.25)  # "1" alone is exact
    assert "evaluation.rewards.0=" in effect.command and "metrics.0.of=exact_match" in effect.command


def test_changed_data_are_noticed(home, answered):
    rows = home / "rows.jsonl"
    whole = rows.read_text()
    first = read_stored(answered("x", ANSWERS, [1.0, 1.0, 1.0, 0.0]))
    second = read_stored(answered("y", ANSWERS, [1.0, 0.0, 0.0, 0.0], evaluation__rewards__0__form="text"))
    try:
        rows.write_text(whole.replace('"answer": "1"', '"answer": "7"'))
        assert "prompt 'q0' has another target" in explain(first, second).effects[0].text
        rows.write_text(whole.partition("\n")[2])
        assert "the data have no prompt 'q0' any more" in explain(first, second).effects[0].fault
    finally:
        rows.write_text(whole)


def test_prompts_are_rendered_with_the_other_settings(home, answered, tmp_path, capsys):
    given = [1.0, 1.0, 1.0, 0.0]
    first = answered("x", ANSWERS, given)
    second = answered(
        "y",
        ANSWERS,
        given,
        evaluation__data={
            "name": "vision.visual_qa",
            "path": str(home / "rows.jsonl"),
            "prompt": "Be brief. {question}<script>",
        },
        policy__dtype="float32",
        evaluation__engine__0__temperature=0.5,
        seed=3,
    )
    effects = {effect.setting: effect for effect in explain(read_stored(first), read_stored(second)).effects}
    prompts = effects["evaluation.data.prompt"].prompts
    assert prompts, effects["evaluation.data.prompt"].text
    assert (prompts.different, prompts.prompts, prompts.uid) == (4, 4, "q0")
    (_, before), (_, after) = prompts.excerpts()
    assert before.startswith("the quick fox 0") and after.startswith("Be brief. the quick fox 0")
    for setting, value in (
        ("policy.dtype", "float32"),
        ("evaluation.engine.0.temperature", "0.5"),
        ("seed", "3"),
    ):
        assert effects[setting].prompts is None
        command = f"mmrl evaluate {home / 'e.yaml'} {setting}={value} output_dir="
        assert f"needs a run: {command}" in effects[setting].text
    page, numbers = tmp_path / "page.html", tmp_path / "c.json"
    assert main(["compare", str(first), str(second), "--output", str(page), "--json", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert (
        "settings that differ" in printed and "4 of 4 prompts differ" in printed and ">>>Be brief." in printed
    )
    text = page.read_text()
    assert "<mark>B</mark>e brief." in text and "&lt;script&gt;" in text
    written = json.loads(numbers.read_text())
    assert {one["setting"] for one in written["settings"]} == effects.keys()
    assert written["changes"]["as evaluated"][0]["p"] == 1


def test_a_folder_without_a_record_is_compared_by_its_answers(home, answered):
    first = answered("x", ANSWERS, [1.0, 1.0, 1.0, 0.0])
    (first / MARK).unlink()
    explanation = explain(read_stored(first), read_stored(home / "a"))
    assert explanation.effects == () and "no settings are recorded for" in explanation.notes[0]


def test_equal_evaluations_have_no_effects(home):
    stored = read_stored(home / "a")
    explanation = explain(stored, stored)
    assert explanation.effects == [] and explanation.notes == ["all recorded settings are equal"]
    assert explanation.stored_prompts == PromptDifference(0, 4)


def test_wrong_folders_are_errors_in_one_line(home, tmp_path, capsys):
    other = {"uid": ["z"], "prompt": ["why"], "reward": [1.0], "reward/short_answer": [1.0]}
    write_columns(tmp_path / "other.parquet", other)
    for second, words in (
        (tmp_path, "there are no predictions in"),
        (tmp_path / "gone.parquet", "there is no such file"),
        (tmp_path / "other.parquet", "have no prompt in common: no uid is in both"),
    ):
        assert main(["compare", str(home / "a"), str(second)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_settings_of_another_evaluation_are_applied(home):
    config = read_stored(home / "a").config
    changed = changed_config(config, {"policy.chat_template_kwargs": {"enable_thinking": True}})
    assert changed.policy.options["chat_template_kwargs"] == {"enable_thinking": True}
    again = changed_config(changed, {"policy.chat_template_kwargs.enable_thinking": ABSENT})
    assert again.policy.options["chat_template_kwargs"] == {}


def test_the_first_difference_of_prompts_is_found():
    first = {"a": ("same", "1 2"), "b": ("x" * 100 + "yes", "3 4"), "c": ("t", "5 6")}
    second = {"a": ("same", "1 2"), "b": ("x" * 100 + "no", "7 4"), "c": ("t", "5 8")}
    difference = prompt_difference(first, second, ["a", "b", "c"])
    assert (difference.different, difference.uid, difference.place, difference.media) == (2, "b", 100, False)
    assert difference.excerpts() == [("…" + "x" * 60, "yes"), ("…" + "x" * 60, "no")]
    assert prompt_difference(first, second, ["c"]).media  # equal tokens, other pixels


def test_paired_differences_have_intervals():
    # Every prompt gains 0.5: no spread over prompts, however the prompts differ.
    assert paired_interval([[0.0, 0.25, 0.5]], [[0.5, 0.75, 1.0]]) == pytest.approx((0.5, 0.5, 0.5))
    middle, low, high = paired_interval([[0.0] * 100], [[0.0, 1.0] * 50])
    # The standard error of a mean of 100 values 0 or 1 is 0.05, and 1.96 of it 0.098.
    assert middle == 0.5 and low == pytest.approx(0.402, abs=0.02) and high == pytest.approx(0.598, abs=0.02)
    # Two seeds per group at -1 and 1 around the same mean: their difference is -2 to 2.
    assert paired_interval([[-1.0], [1.0]], [[-1.0], [1.0]]) == pytest.approx((0.0, -2.0, 2.0))
    assert all(map(math.isnan, paired_interval([[]], [[]])))
