"""A reward that is None everywhere is named at once, and stops a run in which it stays so."""

from __future__ import annotations

import json

import pytest

from mmrl.cli import main
from mmrl.config.schema import ConfigError
from mmrl.rewards.adapters import per_outcome
from mmrl.training import collect
from mmrl.training.loop import train
from mmrl.training.score import RewardFault
from tests.support.tables import reward_table
from tests.support.toys import plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

ALWAYS = "tests.support.toys:brevity"


@per_outcome
def absent(prompt, outcome):
    """Read a column that no row has."""
    return prompt.columns.get("no such column")


@per_outcome
def only_first(prompt, outcome):
    return 1.0 if prompt.uid == "p0" else None


def run_with(folder, reward, steps, **changes):
    given = [{"name": f"{__name__}:{reward.pop('name')}", **reward}, ALWAYS]
    return toy_run(folder, rewards=given, max_steps=steps, **changes)


def warnings(folder):
    path = folder / "warnings.jsonl"
    return [json.loads(line)["text"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_reward_that_stays_absent_is_named_at_the_first_step_and_stops_the_run(tmp_path):
    # 4 of 8 prompts a step: all are asked after two, and the tenth round is the last.
    with pytest.raises(RewardFault, match=r"'absent' gave None for every answer to 40 prompts in 10 rounds"):
        train(run_with(tmp_path, {"name": "absent"}, 12))
    assert any(
        text.startswith("'absent' gave None for all 16 outcomes of 4 prompts") for text in warnings(tmp_path)
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 9


@pytest.mark.parametrize(
    "reward", [{"name": "absent", "weight": 0.0}, {"name": "absent", "on_absent": "warn"}]
)
def test_labels_and_rewards_that_may_be_absent_only_warn(tmp_path, reward):
    train(run_with(tmp_path, reward, 11))
    assert any(text.startswith("'absent' gave None") for text in warnings(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
def test_a_label_that_the_chain_reads_stops_the_run_like_a_reward(tmp_path, nested):
    reads = {"name": "scale_by", "of": "absent"}
    chain = ["total", {"name": "for_some", "advantage": [reads]} if nested else reads]
    label, goes_on = {"name": "absent", "weight": 0.0}, {"on_no_learning": "warn"}
    with pytest.raises(RewardFault, match=r"'absent' gave None for every answer to 40 prompts in 10 rounds"):
        train(run_with(tmp_path / "raise", {**label}, 12, advantage=chain, learn=goes_on))
    train(run_with(tmp_path / "warn", {**label, "on_absent": "warn"}, 11, advantage=chain, learn=goes_on))


def test_a_short_run_in_which_no_reward_applies_fails_at_its_end(tmp_path, capsys):
    reward = {"name": f"{__name__}:absent"}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(plan(tmp_path / "out", rewards=[reward], max_steps=2)))
    assert main(["train", str(path)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "no reward applied to any answer of the run ('absent')" in told
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    for other in ([ALWAYS, reward], [{**reward, "on_absent": "warn"}]):  # one applies, or may be absent
        train(toy_run(tmp_path / str(len(other)), rewards=other, max_steps=2))


def test_a_reward_of_rows_that_there_are_not_is_named_by_the_check(tmp_path, capsys):
    reward = {"name": ALWAYS, "where": {"wanted": 77}}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(plan(tmp_path / "out", rewards=[reward])))
    assert main(["check", str(path), "--data"]) == 0
    told = capsys.readouterr().out
    assert "rewards[0] 'brevity': no row has {'wanted': 77} (`where`), so it gives no reward" in told


def test_a_reward_of_a_rare_task_is_waited_for(tmp_path):
    # One prompt a step: p0, the only one to which it applies, comes once in eight steps.
    train(run_with(tmp_path, {"name": "only_first"}, 16, rollout={"num_prompts": 1}))


def test_all_prompts_are_asked_before_a_run_is_stopped():
    bound = toy_run_rewards()
    watch = collect.RewardCoverage(bound, prompts=30)
    for _ in range(14):
        watch.observe((), reward_table({"brevity": [None, None]}, group=["a", "b"]))
    with pytest.raises(RewardFault, match="to 30 prompts in 15 rounds"):
        watch.observe((), reward_table({"brevity": [None, None]}, group=["a", "b"]))


def test_what_was_seen_survives_a_stop(tmp_path):
    watch, fresh = (collect.RewardCoverage(toy_run_rewards(), prompts=1) for _ in range(2))
    for _ in range(9):
        watch.observe((), reward_table({"brevity": [None]}))
    fresh.load_state_dict(watch.state_dict())
    with pytest.raises(RewardFault, match="in 10 rounds"):
        fresh.observe((), reward_table({"brevity": [None]}))
    watch.observe((), reward_table({"brevity": [0.5]}))
    fresh.load_state_dict(watch.state_dict())
    for _ in range(10):  # it has applied once, so it may be absent
        fresh.observe((), reward_table({"brevity": [None]}))


def test_a_choice_that_there_is_not_is_named(tmp_path):
    with pytest.raises(ConfigError, match="on_absent' must be one of 'raise', 'warn', not 'skip'"):
        run_with(tmp_path, {"name": "absent", "on_absent": "skip"}, 1)


def test_an_evaluation_names_what_applies_to_nothing(tmp_path, capsys):
    rewards = [f"{__name__}:absent", ALWAYS]
    evaluation = {"data": "tests.support.toys:prompts", "rewards": rewards, "metrics": ["mean"]}
    train(toy_run(tmp_path / "run", max_steps=1, evaluation=evaluation))
    assert warnings(tmp_path / "run") == ["evaluation: 'absent' gave None for all 8 outcomes of 8 prompts"]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(plan(tmp_path / "alone", evaluation=evaluation)))
    assert main(["evaluate", str(path)]) == 0
    told = capsys.readouterr().out
    assert "warning: 'absent' gave None for all 8 outcomes of 8 prompts" in told and "nan" in told


def toy_run_rewards():
    from mmrl.config.binding import Pieces
    from mmrl.config.schema import Piece
    from mmrl.core.rng import Stream

    return [Pieces(Stream()).make("reward", Piece(ALWAYS))]
