"""The league table: which variants it takes, with what they share, and what it says of their differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import league
from benchmarks.league import main, run_one
from benchmarks.league_runs import Finished
from benchmarks.league_table import distinct, draw, markdown, summarise
from benchmarks.league_table import main as rewrite
from benchmarks.league_tasks import (
    AGAIN,
    BASE,
    FOLDERS,
    configuration,
    held_out,
    reason_to_skip,
    shared_by_all,
    variants,
)
from tests.examples.test_image_rl import sources

SHARED = {
    "policy": {"name": "vision.tokens", "model": "somewhere"},
    "data": {"name": "vision.visual_qa", "path": "rows.jsonl"},
    **shared_by_all("easy_vqa", 4, quick=False),
    "evaluation": held_out(Path("held_out.jsonl"), 4, 8),
}


def set_up(name, tmp_path, seed=0):
    return configuration(name, SHARED, tmp_path / name, seed)


def run(method, seed, scores, *, updates=30):
    found = {"method": method, "seed": seed, "scores": dict(enumerate(scores)), "updates": updates}
    return {**found, "rollouts": 64, "seconds": 2.0 * seed + 1, "groups_with_gradient": 0.5}


@pytest.mark.slow
def test_every_variant_is_taken_or_skipped_for_a_reason_and_all_have_the_same_rollouts(tmp_path):
    assert {path.stem for folder in FOLDERS for path in folder.glob("*.yaml")} < set(variants())
    assert list(variants())[:2] == [BASE, AGAIN]
    before = json.dumps(SHARED)
    made = {name: set_up(name, tmp_path) for name in variants()}
    assert json.dumps(SHARED) == before  # nothing of one variant reaches the next
    taken = {name: raw for name, raw in made.items() if not reason_to_skip(name, raw)}
    assert {"grpo", "dapo", "rloo", "gspo", "ppo", "two_grpo", AGAIN} < set(taken)
    assert {"ttrl", "scope", "multirole_r1", "dno", "aot", "spo_tree", "polychromic_vine"} < set(taken)
    for raw in taken.values():
        size = raw["rollout"]
        assert size["num_prompts"] * size["num_generations"] == 256
        assert size["engine"][0].items() >= SHARED["rollout"]["engine"][0].items()
        assert raw["evaluation"]["rewards"] == ["exact_match"]
        assert raw["learn"]["learning_rate"] == SHARED["learn"]["learning_rate"]
    assert made["dapo"]["rollout"]["max_rounds"] == 3 and made["grpo"]["rollout"]["max_rounds"] == 1
    assert made["gspo"]["learn"]["minibatches"] == 4  # the variant's own
    assert made["scope"]["rollout"]["engine"][0]["confidence_top_k"] == 20  # what its votes are weighted by
    assert made["scope"]["rewards"][0]["name"] == "subgroup_majority"
    assert made["ttrl"]["advantage"][0] == {"name": "keep_first", "keep": 4}  # half of a group, as 32 of 64
    assert (taken["two_grpo"]["rollout"]["num_generations"], taken[AGAIN]["seed"]) == (2, 1000)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("supervised", "demonstrations"),
        ("dpo", "recorded answers, pairs"),
        ("yapo", "recorded answers, pairs"),
        ("adar1", "a few tokens have no room"),
        ("ton", "a few tokens have no room for the tags that it asks for: its reward tag_format"),
        ("arena_rl", "there is no judge: its reward tournament"),
        ("ps_grpo", "rows have one wording of a question: its reward agreement"),
        ("gigpo", "turns of conversations"),
        ("v05", "do not have what it reads of them: predicted"),
        ("grpo_s", "reference texts, which rows do not have"),
        ("ssl", "other answers: its reward vision.click_inside"),
        ("siri", "schedule of the longest answer"),
    ],
)
def test_a_variant_that_means_nothing_here_is_skipped_for_its_reason(tmp_path, name, reason):
    assert reason in reason_to_skip(name, set_up(name, tmp_path))


def test_what_the_check_refuses_is_the_reason(tmp_path):
    raw = {**set_up("grpo", tmp_path), "references": {"ref": "frozn"}}
    assert "did you mean 'frozen'" in reason_to_skip("grpo", raw)


def test_differences_are_paired_and_count_only_beyond_what_grpo_differs_from_itself():
    start = dict.fromkeys(range(4), 0.25)
    runs = [run(BASE, seed, [0.5, 0.5, 0.5, 0.5]) for seed in (0, 1)]
    runs += [run(AGAIN, seed, [0.5, 0.6, 0.5, 0.6]) for seed in (0, 1)]
    runs += [run("rloo", seed, [0.6, 0.6, 0.6, 0.6]) for seed in (0, 1)]  # +0.1 everywhere
    runs += [run("sapo", seed, [0.9, 0.9, 0.9, 0.9]) for seed in (0, 1)]
    runs += [run("opo", 1, [0.1, 0.1, 0.1, 0.1])]
    found = {"task": "toy", **summarise(runs, start), "skipped": {"ssl": "clicks"}}
    rows = {row["method"]: row for row in found["rows"]}
    assert [row["method"] for row in found["rows"]] == ["sapo", "rloo", AGAIN, BASE, "opo"]
    assert found["start"] == 0.25 and found["noise"] == pytest.approx(0.1)
    assert rows["rloo"]["less_base"]["mean"] == pytest.approx(0.1)
    assert rows["rloo"]["less_base"]["verdict"] == "within noise"  # no more than GRPO and GRPO
    assert rows["sapo"]["less_base"]["verdict"] == "better"
    assert rows["opo"]["less_base"]["verdict"] == "one seed" and rows["opo"]["seeds"] == 1
    assert rows["sapo"]["seconds"] == 2.0 and "less_base" not in rows[BASE]
    assert "| sapo | 2 | 0.900 | +0.400 (+0.400 to +0.400) |" in markdown(found)
    assert "`ssl`: clicks" in markdown(found)


def test_a_variant_of_four_minibatches_is_compared_with_grpo_that_takes_as_many_updates(tmp_path):
    runs = [run(BASE, seed, [0.5, 0.5]) for seed in (0, 1)]
    runs += [run("grpo, 4 minibatches", seed, [0.7, 0.7], updates=120) for seed in (0, 1)]
    runs += [run("gspo", seed, [0.6, 0.6], updates=120) for seed in (0, 1)]
    found = {"task": "toy", **summarise(runs, {0: 0.5, 1: 0.5}), "skipped": {}}
    gspo = next(row for row in found["rows"] if row["method"] == "gspo")
    assert (gspo["less_base"]["verdict"], gspo["less_control"]["verdict"]) == ("better", "worse")
    assert gspo["less_control"]["mean"] == pytest.approx(-0.1)
    draw(found, tmp_path / "league.svg")
    assert (tmp_path / "league.svg").read_text().count("gspo") >= 1


def test_rows_whose_scores_are_equal_in_all_seeds_leave_the_table_and_are_named_below(tmp_path):
    runs = [run(BASE, seed, [0.5, 0.25]) for seed in (0, 1)]
    runs += [run("otc_po", seed, [0.5, 0.25]) for seed in (0, 1)]
    runs += [run("bnpo", seed, [0.75, 0.5]) for seed in (0, 1)]
    runs += [run("cispo", seed, [0.75, 0.5]) for seed in (0, 1)]
    runs += [run("vespo", 0, [0.75, 0.5]), run("vespo", 1, [0.75, 0.75])]  # equal in one seed only
    found = {"task": "toy", **summarise(runs, {0: 0.5, 1: 0.5}), "skipped": {}}
    assert [row["method"] for row in found["rows"]] == ["vespo", "bnpo", BASE]
    assert found["same"] == {BASE: ["otc_po"], "bnpo": ["cispo"]}
    said = markdown(found)
    assert "| cispo |" not in said and "`bnpo` (here with 1 update a collection): `cispo`" in said
    (tmp_path / "toy.json").write_text(json.dumps(found))
    assert rewrite([str(tmp_path / "toy.json")]) == 0  # what left stays named when the table is written again
    assert json.loads((tmp_path / "toy.json").read_text())["same"] == found["same"]
    assert (tmp_path / "toy.md").read_text() == said


def test_the_rows_that_left_the_table_of_text_have_as_many_right_answers_in_every_seed():
    results = Path(league.RESULTS)
    found = json.loads((results / "league_text.json").read_text())
    lines = [json.loads(line) for line in (results / "league_text_runs.jsonl").read_text().splitlines()[1:]]
    right = {(line["method"], line["seed"]): sum(map(int, line["right"])) for line in lines}
    assert distinct(found["rows"]) == (found["rows"], {}) and found["same"]["bnpo"] == ["cispo", "vespo"]
    for name, others in found["same"].items():
        for other in others:
            assert all(right[name, seed] == right[other, seed] for seed in range(3)), (name, other)


def test_finished_runs_are_read_back_and_runs_of_another_start_are_refused(tmp_path):
    path, settings = tmp_path / "runs.jsonl", {"task": "toy", "steps": 12}
    start = {"1+2": 0.25, "3+4": 0.5}
    made = {"method": BASE, "seed": 1, "updates": 12, "scores": {"1+2": 0.75, "3+4": 1.0}}
    Finished(path, settings, start).add(made)
    assert '"right": "34"' in path.read_text()
    assert Finished(path, settings, start).runs == {(BASE, 1): made}
    with pytest.raises(SystemExit, match="differ in right_before; remove it"):
        Finished(path, settings, {**start, "1+2": 0.5})
    with pytest.raises(SystemExit, match="differ in steps"):
        Finished(path, {**settings, "steps": 20}, start)


@pytest.mark.slow
def test_the_command_makes_a_table_and_a_second_call_trains_nothing(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    asked = ["--quick", "--methods", "two_grpo,adhint", "--output", str(tmp_path)]
    asked += ["--source", str(sources(tmp_path / "images"))]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "two_grpo seed 0:" in said and "skipped adhint: 'hint_column': no prompt has a hint" in said
    home = tmp_path / "easy_vqa_quick"
    first = (home / "league_easy_vqa.md").read_text()
    assert first.count("one seed") == 3  # of the three controls of GRPO
    assert "those of `grpo` (here with 1 update a collection): `two_grpo`" in first  # none is ever right
    assert (home / "league_easy_vqa.svg").exists()
    assert not list((home / "runs").iterdir())
    built = []
    monkeypatch.setattr(league, "run_one", lambda raw: built.append(raw) or run_one(raw))
    assert main(asked) == 0
    assert [raw["output_dir"] for raw in built] == [
        str(home / "runs" / "adhint-0")
    ]  # its rows are read again
    assert (home / "league_easy_vqa.md").read_text() == first
