"""Steering vectors: what they add, what learns, what is saved, and training with them on pairs."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.build import build
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.rng import Stream
from mmrl.papers.yapo import Steering, steering
from mmrl.training.loop import train
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.trained_part import part_of
from tests.vision import mixed
from tests.vision.test_inner_runs import plan, questions
from tests.vision.test_tokens import EVERY, learning, loaded, recorded, said

__all__ = ["questions"]
FAMILY = "qwen2_5_vl"


def steered(checkpoint, family=FAMILY, *, values=None, policy=None, **options):
    """Load a policy with a steering vector of the given numbers, random ones (True), or zeros (None)."""
    transform = partial(steering, **{"layer": 0, **options})
    made = loaded(checkpoint, family, transform=(transform,), **(policy or {}))
    if values is not None:
        with torch.no_grad():
            noise = torch.randn(made.part.vector.shape, generator=torch.Generator().manual_seed(1))
            made.part.vector.copy_(noise if values is True else values)
    return made


def random_encoder(path, width=32, features=96):
    generator = torch.Generator().manual_seed(2)
    shapes = {"W_enc": (width, features), "b_enc": (features,), "W_dec": (features, width), "b_dec": (width,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file({**weights, "threshold": torch.full((features,), 0.5)}, path)
    return str(path)


def test_a_vector_is_added_to_hidden_states():
    steering = Steering(2, 0, 0.5, {}, torch.float32)
    with torch.no_grad():
        steering.vector.copy_(torch.tensor([1.0, -4.0]))
    hidden = torch.tensor([[3.0, 1.0]])
    assert steering(hidden, 1.0).tolist() == [[3.5, -1.0]]
    assert steering(hidden, -1.0).tolist() == [[2.5, 3.0]]


@pytest.mark.parametrize(("threshold", "wanted"), [(None, [[3.0, -2.0]]), (1.5, [[3.0, -1.0]])])
def test_features_of_an_autoencoder_are_steered(threshold, wanted):
    # h = (1, 2), features relu(1, 2 - 3, 2) = (1, 0, 2), with a threshold of 1.5 (0, 0, 2). The vector
    # (-3, 2, -1) makes them (0, 2, 1). Their changes (-1, 2, -1), or (0, 2, -1), times the rows (0, 1),
    # (1, -1), (0, 1) of W_dec are (2, -4), or (2, -3).
    encoder = {
        "W_enc": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]),
        "b_enc": torch.tensor([0.0, -3.0, 0.0]),
        "W_dec": torch.tensor([[0.0, 1.0], [1.0, -1.0], [0.0, 1.0]]),
    }
    if threshold is not None:
        encoder["threshold"] = torch.full((3,), threshold)
    steering = Steering(2, 0, 1.0, encoder, torch.float64)
    with torch.no_grad():
        steering.vector.copy_(torch.tensor([-3.0, 2.0, -1.0]))
    hidden = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert steering(hidden, 1.0).tolist() == wanted


@EVERY
def test_the_hidden_states_after_the_layer_are_moved_by_the_vector(checkpoint, family):
    plain, zeros = loaded(checkpoint, family), steered(checkpoint, family)
    moved = steered(checkpoint, family, values=True, scale=0.5)
    assert torch.equal(said(plain, family), said(zeros, family))
    assert (said(moved, family) - said(plain, family)).abs().max() > 1e-3
    ids = torch.tensor([[5, 6, 7]])
    states = [
        policy.model.get_decoder()(input_ids=ids, output_hidden_states=True).hidden_states[1]
        for policy in (plain, moved)
    ]
    torch.testing.assert_close(states[1] - states[0], (0.5 * moved.part.vector).expand(1, 3, -1))


def test_only_the_vector_learns(checkpoint):
    policy = steered(checkpoint)
    assert [name.rsplit(".", 2)[-2:] for name in learning(policy)] == [["steering", "vector"]]
    policy(recorded(policy, FAMILY)).logp.sum().backward()
    reached = [name for name, weight in policy.module.named_parameters() if weight.grad is not None]
    assert reached == learning(policy)
    assert policy.part.vector.grad.abs().max() > 0


@pytest.mark.parametrize("encoder", [False, True])
def test_a_saved_vector_is_loaded_bit_for_bit(checkpoint, tmp_path, encoder):
    options = {"sae": random_encoder(tmp_path / "sae.safetensors")} if encoder else {}
    policy = steered(checkpoint, values=True, **options)
    policy.save(tmp_path / "model")
    assert list(load_file(tmp_path / "model" / "steering.safetensors")) == ["vector"]
    assert not list((tmp_path / "model").glob("model*.safetensors"))
    resumed = steered(checkpoint, **options)
    resumed.load(tmp_path / "model")
    begun = steered(checkpoint, weights=str(tmp_path / "model"), **options)
    for other in (resumed, begun):
        assert torch.equal(said(other, FAMILY), said(policy, FAMILY))
    with pytest.raises(ConfigError, match="is for layer 0, but the transform's has .* and is for layer 1"):
        steered(checkpoint, **{**options, "layer": 1}).load(tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be written as a model of its own"):
        policy.merge()


def test_an_adapter_may_learn_beside_a_vector_that_stays(checkpoint, tmp_path):
    steered(checkpoint, values=True).save(tmp_path)
    policy = steered(checkpoint, weights=str(tmp_path), policy={"lora_rank": 2})
    assert policy.part is None and part_of(policy.model) is not None
    assert all("lora_" in name for name in learning(policy))


def test_what_does_not_fit_is_named(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="wants a layer from 0 to 1, got 2"):
        steered(checkpoint, layer=2)
    with pytest.raises(ConfigError, match="cannot read the sparse autoencoder"):
        steered(checkpoint, sae=str(tmp_path / "none.safetensors"))
    save_file({"W_enc": torch.zeros(2, 2)}, tmp_path / "part.safetensors")
    with pytest.raises(ConfigError, match="lacks b_enc, W_dec, b_dec"):
        steered(checkpoint, sae=str(tmp_path / "part.safetensors"))
    narrow = random_encoder(tmp_path / "narrow.safetensors", width=8)
    with pytest.raises(ConfigError, match=r"has the shape \(8, 96\), but hidden states of width 32"):
        steered(checkpoint, sae=narrow)
    with pytest.raises(ConfigError, match="cannot read the steering vector"):
        steered(checkpoint, weights=str(tmp_path))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_other_direction_is_that_of_the_negated_vector(checkpoint, checkpointed):
    policy = steered(checkpoint, values=True, policy={"gradient_checkpointing": checkpointed})
    negated = steered(checkpoint, values=-policy.part.vector.detach())
    output = policy(recorded(policy, FAMILY), frozenset({"reversed_logp"}))
    reversed_logp = output.extra["reversed_logp"]
    torch.testing.assert_close(reversed_logp.detach(), said(negated, FAMILY))
    assert policy.part.sign == 1.0
    # d/dv f(-v) = -f'(-v); the layers that checkpointing runs again must keep their direction.
    reversed_logp.sum().backward()
    negated(recorded(negated, FAMILY)).logp.sum().backward()
    torch.testing.assert_close(policy.part.vector.grad, -negated.part.vector.grad)


def test_answers_are_sampled_from_the_steered_model(checkpoint):
    policy = steered(checkpoint, values=True)
    rows = Generate(policy, stream=Stream(0), max_completion_length=6).rollout(mixed.prompts(FAMILY))
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
        with policy.part.reversed():
            other = policy(batch).logp
    noted = torch.where(batch.mask > 0, batch.notes["logp"], 0.0)
    torch.testing.assert_close(logp * batch.mask, noted, rtol=1e-4, atol=1e-4)
    assert ((other - logp) * batch.mask).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [False, True])
def test_yapo_trains_the_vector_alone(questions, checkpoint, tmp_path, monkeypatch, encoder):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    piece = {"name": "vision.steering", "layer": 1}
    piece |= {"sae": random_encoder(tmp_path / "sae.safetensors")} if encoder else {}
    with pytest.raises(ConfigError, match=r"reads \['reversed_logp'\] of the policy, which 'vision.tokens'"):
        build(parse(plan("yapo", questions, checkpoint, tmp_path / "none"), Config), quiet=True)
    raw = plan("yapo", questions, checkpoint, tmp_path / "run", policy={"transform": [piece]}, save_steps=2)
    run = build(parse(raw, Config), quiet=True)
    before = {name: weight.clone() for name, weight in run.policy.module.state_dict().items()}
    train(run)
    lines = (Path(raw["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # both directions are the reference
    assert all(step["grad_norm"] > 0 and "reversed/rewards/margins" in step for step in steps)
    changed = [n for n, w in run.policy.module.state_dict().items() if not torch.equal(w, before[n])]
    assert [name.rsplit(".", 1)[1] for name in changed] == ["vector"]
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "model" / "steering.safetensors")
    assert torch.equal(saved["vector"], run.policy.part.vector.detach())


@pytest.mark.slow
def test_a_resumed_run_has_the_same_vector(questions, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    policy = {"transform": [{"name": "vision.steering", "layer": 1}]}

    def trained(folder, steps):
        raw = plan("yapo", questions, checkpoint, tmp_path / folder, policy=policy, save_steps=1)
        train(build(parse({**raw, "max_steps": steps}, Config), quiet=True))
        return load_file(tmp_path / folder / f"checkpoint-{steps}" / "model" / "steering.safetensors")

    trained("parts", 1)
    assert torch.equal(trained("parts", 3)["vector"], trained("whole", 3)["vector"])
