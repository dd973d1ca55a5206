"""What a checkpoint leaves for people: the best one, a card, and an upload."""

from __future__ import annotations

import sys
import types

import pytest

from mmrl.build import check
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, ConfigError, load, parse
from mmrl.reporting.metrics import Journal
from mmrl.reporting.model_card import config_hash, variant_of, write_card
from mmrl.runtime import checkpoint
from mmrl.runtime.files import HubError, push
from mmrl.training.loop import train
from mmrl.training.trainer import Best
from tests.support.toys import plan, toy_run

pytestmark = pytest.mark.usefixtures("no_page")

EVALUATED = {
    "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}},
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 1,
    "max_steps": 4,
}


# ---- the best


@pytest.mark.parametrize(("greater", "wanted"), [(True, 2), (False, 3)])
def test_the_best_of_values_is_the_first_of_equals(greater, wanted):
    best = Best()
    for step, value in enumerate((float("nan"), 0.5, 0.1, 0.5, 0.1), start=1):
        best.see(step, value, greater)
    assert best.step == wanted


@pytest.mark.parametrize("greater", [True, False])
def test_the_best_checkpoint_is_kept_besides_the_latest(tmp_path, greater):
    name = "eval_brevity"
    run = toy_run(tmp_path, **EVALUATED, metric_for_best_model=name, greater_is_better=greater)
    train(run)
    values = [record[name] for record in run.journal.read()]
    best = (max if greater else min)(range(4), key=lambda i: (values[i], -i if greater else i)) + 1
    assert run.progress.best.step == best and run.progress.best.value == values[best - 1]
    assert {checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)} == {best, 4}


def test_the_best_is_remembered_over_a_stop(tmp_path):
    changes = {**EVALUATED, "metric_for_best_model": "eval_brevity"}
    whole = toy_run(tmp_path / "whole", **changes)
    train(whole)
    for steps in (2, 4):
        run = toy_run(tmp_path / "run", **{**changes, "max_steps": steps})
        train(run)
    assert run.progress.best == whole.progress.best


def test_a_metric_that_is_not_there_is_named_once(tmp_path):
    run = toy_run(tmp_path, **EVALUATED, metric_for_best_model="eval_breviti")
    train(run)
    (said,) = [text for text in run.report.raised if "metric_for_best_model" in text]
    assert said.endswith("did you mean 'eval_brevity'?")


def test_a_metric_must_be_measured_where_checkpoints_are_written():
    changes = {**EVALUATED, "eval_steps": 2, "metric_for_best_model": "eval_brevity"}
    with pytest.raises(ConfigError, match=r"'save_steps' \(1\) must be a multiple of 'eval_steps' \(2\)"):
        check(parse(plan("x", **changes), Config))


# ---- the card


def card_of(folder):
    return (folder / "model" / "README.md").read_text()


def test_a_card_tells_what_a_model_was_made_from_and_what_was_measured(tmp_path):
    run = toy_run(tmp_path / "mine", **{**EVALUATED, "eval_steps": 0}, advantage=["total", "group_normalize"])
    train(run)
    text = card_of(tmp_path / "mine" / "checkpoint-4")
    assert text.startswith("---\ntags: [mmrl") and "# mine" in text
    for line in (
        "| base model | tests.support.toys:ToyText |",
        "| data | tests.support.toys:prompts |",
        "| reward | tests.support.toys:share_right, weight 1 |",
        "| reward | tests.support.toys:brevity, weight 0.5 |",
        "| rollouts | 4 prompts of 4 a step |",
        "| seed | 0 |",
        f"| configuration | {config_hash(run.config)} |",
    ):
        assert line in text, line
    assert "torch " in text and "mmrl " in text
    # The last evaluation came after the last checkpoint, and is in its card with its interval.
    value = run.final.metrics["brevity"]
    low, high = run.final.intervals["brevity"]
    assert f"| brevity | {value:.4g} | {low:.4g} to {high:.4g} |" in text
    checkpoint.read_state(tmp_path / "mine" / "checkpoint-4")


def test_a_card_names_the_method_and_its_paper(tmp_path):
    run = load("train/charades_sta_tempsamp.yaml")
    assert variant_of(run).name == "tempsamp_r1"
    write_card(run, 3, {}, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| method | tempsamp_r1 ([arXiv 2509.18056](https://arxiv.org/abs/2509.18056)" in text
    assert 'base_model: "Qwen/Qwen2.5-VL-3B-Instruct"' in text
    assert "Nothing was measured on held-out prompts." in text


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_a_variant_is_recognised_by_its_chain_and_objective(name):
    raw = plan("x")
    run = parse(
        merge({k: v for k, v in raw.items() if k != "objective"}, read(f"methods/grpo/{name}.yaml")), Config
    )
    assert variant_of(run).name == name


def test_a_method_of_ones_own_is_told_by_its_chain(tmp_path):
    config = parse(plan("x", advantage=["total", "tests.support.toys:RunningMean"]), Config)
    assert variant_of(config) is None
    write_card(config, 1, {}, tmp_path)
    told = "| method | policy_gradient over the chain total, tests.support.toys:RunningMean |"
    assert told in (tmp_path / "README.md").read_text()


def test_the_hash_of_a_configuration_is_of_what_it_does():
    one, other, longer = (
        config_hash(parse(plan("x", **changes), Config)) for changes in ({}, {"seed": 1}, {"max_steps": 9})
    )
    assert one == longer != other and len(one) == 12


# ---- the upload


class Hub:
    """Stands where `huggingface_hub.HfApi` would."""

    calls, error = [], None

    def create_repo(self, name, **options):
        if Hub.error:
            raise Hub.error
        Hub.calls.append((name, options))

    def upload_folder(self, **options):
        Hub.calls.append(options)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Hub))
    Hub.calls, Hub.error = [], None
    return Hub


def test_a_finished_model_is_uploaded(tmp_path, hub):
    train(toy_run(tmp_path, push_to_hub=True, hub_model_id="me/mine", max_steps=2))
    (name, options), sent = hub.calls
    assert (name, options) == ("me/mine", {"private": True, "exist_ok": True})
    assert sent["folder_path"] == str(tmp_path / "checkpoint-2" / "model")
    assert (sent["repo_id"], sent["commit_message"]) == ("me/mine", "Step 2")


def test_the_best_model_is_uploaded_where_there_is_one(tmp_path, hub):
    run = toy_run(
        tmp_path, **EVALUATED, metric_for_best_model="eval_brevity", push_to_hub=True, hub_model_id="me/mine"
    )
    train(run)
    assert hub.calls[-1]["commit_message"] == f"Step {run.progress.best.step}"


def test_an_upload_that_fails_says_where_the_model_is_and_how_to_go_on(tmp_path, hub):
    hub.error = OSError("Name or service not known")
    config = parse(plan(tmp_path, push_to_hub=True, hub_model_id="me/mine"), Config)
    with pytest.raises(
        HubError, match="cannot upload '.*' to 'me/mine': OSError: Name or .* hf upload me/mine"
    ):
        push(config, tmp_path, 1)


def test_nothing_is_uploaded_unasked(tmp_path, hub):
    train(toy_run(tmp_path, max_steps=1))
    assert hub.calls == []


def test_a_run_goes_on_where_an_old_checkpoint_cannot_be_removed(tmp_path, monkeypatch):
    plain = checkpoint.discard

    def keeps_the_first(folder):
        if folder.name == "checkpoint-1" and folder.exists():
            raise PermissionError(13, "Permission denied")
        plain(folder)

    monkeypatch.setattr(checkpoint, "discard", keeps_the_first)
    run = toy_run(tmp_path, save_steps=1, save_total_limit=1, max_steps=3)
    train(run)
    assert {path.name for path in checkpoint.checkpoints(tmp_path)} == {"checkpoint-1", "checkpoint-3"}
    (warning,) = [line["text"] for line in Journal(tmp_path, "warnings.jsonl").read()]
    assert "checkpoint-1': PermissionError" in warning
