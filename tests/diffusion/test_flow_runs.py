"""Whole runs of small pipelines: weights move, a stop changes nothing, and red is learned."""

from __future__ import annotations

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.training.loop import train

pytestmark = pytest.mark.usefixtures("no_page")

MATCHING = {"name": "diffusion.matching", "draws": 2, "time_type": "uniform"}


def plan(model, folder, likelihood, **changes):
    """Write down a small run, as YAML would hold it; `changes` are merged over it."""
    engine = {
        "name": "diffusion.denoise",
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
        "height": 32,
        "width": 32,
    }
    if likelihood == "diffusion.transition":
        engine["solver"] = "diffusion.flow_sde"
    policy = {"name": "diffusion.flow", "model": str(model), "dtype": "float32", "max_sequence_length": 1}
    usual = {
        "policy": {**policy, "likelihood": likelihood},
        "data": "tests.diffusion.flows:data",
        "rollout": {"engine": [engine], "num_prompts": 2, "num_generations": 3},
        "rewards": ["tests.diffusion.flows:redness"],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        "learn": {"learning_rate": 1e-3, "micro_batch_steps": 4},
        "report": {"trackers": []},
        "max_steps": 2,
        "output_dir": str(folder),
    }
    return merge(usual, changes)


def run_of(model, folder, likelihood, **changes):
    return build(parse(plan(model, folder, likelihood, **changes), Config), quiet=True)


def weights(run):
    return {name: p.detach().clone() for name, p in run.policy.module.named_parameters() if p.requires_grad}


LORA = {"policy": {"lora_rank": 2}}
ANCHORED = {
    "references": {"ema": {"name": "ema", "decay": 0.5}, "ref": "frozen"},
    "objective": {"penalty": [{"name": "velocity_mse", "against": name} for name in ("ema", "ref")]},
}
KEPT_NEAR = {
    "references": {"ref": "frozen"},
    "objective": {"penalty": [{"name": "gaussian_kl", "against": "ref"}]},
    "learn": {"minibatches": 2},
}
NEGATIVE_AWARE = {
    "references": {"ema": {"name": "ema", "decay": 0.5}},
    "rollout": {"policy": "ema"},
    "objective": {"surrogate": "diffusion_nft"},
    "learn": {"num_iterations": 2},
}
RUNS = {
    "transition": ("diffusion.transition", {}),
    "transition-lora": ("diffusion.transition", merge(LORA, KEPT_NEAR)),
    "matching": (MATCHING, ANCHORED),
    "matching-lora": (MATCHING, merge(LORA, ANCHORED)),
    "negative-aware": (MATCHING, NEGATIVE_AWARE),
}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_two_updates_move_the_weights(checkpoint, tmp_path, name):
    likelihood, changes = RUNS[name]
    run = run_of(checkpoint("sd3"), tmp_path / "run", likelihood, **changes)
    before, frozen = weights(run), [p.clone() for p in run.policy.pipe.vae.parameters()]
    train(run)
    after = weights(run)
    assert all(value.isfinite().all() for value in after.values())
    moved = [not torch.equal(before[name], after[name]) for name in before]
    assert sum(moved) > 0.8 * len(moved)
    assert all(("lora" in key) == ("policy" in changes) for key in after)
    assert all(torch.equal(a, b) for a, b in zip(frozen, run.policy.pipe.vae.parameters(), strict=True))
    records = run.journal.read()
    assert len(records) == 2 and all(record["grad_norm"] > 0 for record in records)
    if name == "transition":
        # On-policy the ratio is 1, so the loss is minus the mean advantage, which is 0 in every group.
        assert abs(records[0]["loss"]) < 1e-6 and not records[0]["clip_ratio/region_mean"]
    # What was written is what a plain run of the policy reads.
    again = run_of(checkpoint("sd3"), tmp_path / "again", likelihood, **changes)
    again.policy.load(tmp_path / "run" / "checkpoint-2" / "model")
    for key, value in weights(again).items():
        assert torch.equal(value, after[key]), key


@pytest.mark.parametrize("name", ["transition-lora", "matching"])
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(checkpoint, tmp_path, name):
    likelihood, changes = RUNS[name]
    whole = run_of(checkpoint("sd3"), tmp_path / "whole", likelihood, **changes, max_steps=3)
    train(whole)
    for steps in (1, 3):  # stopped behind the first step, then given more
        parts = run_of(
            checkpoint("sd3"), tmp_path / "parts", likelihood, **changes, max_steps=steps, save_steps=1
        )
        train(parts)
    found, wanted = weights(parts), weights(whole)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for key, reference in whole.method.references.items():
        for part, value in reference.weights.items():
            assert torch.equal(parts.method.references[key].weights[part], value)
    untimed = lambda run: [
        {key: value for key, value in record.items() if "time" not in key} for record in run.journal.read()
    ]
    assert untimed(parts) == untimed(whole)


def test_a_trained_pipeline_is_an_ordinary_one(checkpoint, tmp_path):
    from tests.diffusion import tiny

    run = run_of(checkpoint("sd3"), tmp_path, "diffusion.transition")
    train(run)
    pipe = tiny.load(tmp_path / "checkpoint-2" / "model")
    for key, value in run.policy.network.state_dict().items():
        assert torch.equal(pipe.transformer.state_dict()[key], value), key


@pytest.mark.parametrize("likelihood", ["diffusion.transition", {**MATCHING, "draws": 4, "weighting": "t"}])
@pytest.mark.slow
def test_a_small_model_learns_to_paint_red(checkpoint, tmp_path, likelihood):
    side = {"height": 4, "width": 4, "num_inference_steps": 4}
    engine = {"name": "diffusion.denoise", "guidance_scale": 1.0, **side}
    if likelihood == "diffusion.transition":
        engine["solver"] = "diffusion.flow_sde"
    run = run_of(
        checkpoint("sd3_pixel"),
        tmp_path,
        likelihood,
        rollout={"engine": [engine], "num_prompts": 2, "num_generations": 12},
        learn={"learning_rate": 2e-3, "micro_batch_steps": 1000},
        max_steps=8,
    )
    train(run)
    reward = [record["reward"] for record in run.journal.read()]
    assert reward[0] < 0.5 and reward[-1] > 0.9


def test_an_objective_that_reads_what_the_likelihood_does_not_say_is_refused(checkpoint, tmp_path):
    wanted = {
        "objective": {"penalty": [{"name": "gaussian_kl", "against": "ref"}]},
        "references": {"ref": "frozen"},
    }
    with pytest.raises(ConfigError, match=r"mean"):
        run_of(checkpoint("sd3"), tmp_path, MATCHING, **wanted)
