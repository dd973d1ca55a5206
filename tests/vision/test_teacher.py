"""A teacher: another model whose log-probabilities of the learner's own tokens are learned from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import PromptError
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.references.teacher import Teacher
from tests.vision import tiny
from tests.vision.test_tokens import learning, loaded, recorded, said, shaken

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    """Save a model with other weights; give its policy, its folder and a learner."""
    other, folder = shaken(loaded(checkpoint)), tmp_path_factory.mktemp("teacher")
    other.save(folder)
    return other, folder, loaded(checkpoint, lora_rank=2)


def objective():
    penalty = [{"name": "k2", "coef": 1.0, "against": "teacher"}]
    options = {"surrogate": "unclipped", "aggregation": "step_mean", "penalty": penalty}
    return Pieces(Stream()).make("objective", Piece("policy_gradient", options))


def test_a_teacher_says_what_its_own_model_says_and_does_not_learn(pair):
    other, folder, learner = pair
    before = learning(learner)
    teacher = Pieces(Stream()).make(
        "reference", Piece("vision.teacher", {"model": str(folder), "dtype": "float32"}), learner
    )
    batch = recorded(learner, FAMILY)
    output = teacher(batch, frozenset({"entropy"}))
    torch.testing.assert_close(output.logp, said(other, FAMILY), rtol=1e-5, atol=1e-5)
    assert not output.logp.requires_grad and output.extra["entropy"].shape == batch.mask.shape
    assert (output.logp - said(learner, FAMILY)).abs().max() > 0.01
    assert learning(learner) == before and not any(p.requires_grad for p in teacher.module.parameters())
    teacher.update()
    teacher.snapshot()
    teacher.load_state_dict(teacher.state_dict())
    assert teacher(batch).logp.equal(output.logp)
    with pytest.raises(ConfigError, match="names a teacher, which cannot sample"):
        teacher.rollout_weights()


def test_distillation_pulls_the_learner_to_its_teacher(pair):
    _, folder, learner = pair
    teacher, objective_ = Teacher(learner, model=str(folder), dtype="float32"), objective()
    batch = recorded(learner, FAMILY)
    batch = batch.replace(others={"teacher": teacher(batch)}, totals=batch.count())
    batch = batch.replace(weight=objective_.weigh(batch))
    optimizer = torch.optim.Adam([p for p in learner.module.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(8):
        loss, metrics = objective_(learner(batch), batch)
        losses.append(float(metrics["kl/teacher"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_that_reads_other_tokens_is_refused(pair, tmp_path):
    _, folder, learner = pair
    shutil.copytree(folder, tmp_path / "other")
    tokenizer = learner.processor.tokenizer.__class__.from_pretrained(folder)
    tokenizer.add_tokens(["zzz"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="has another vocabulary"):
        Teacher(learner, model=str(tmp_path / "other"))


def test_what_is_too_long_for_a_teacher_is_unreadable(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 20
    (folder / "config.json").write_text(json.dumps(config))
    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float32")
    long = tiny.ask("p", "the quick brown fox " * 9)
    policy.prompt_encoder.encode(long)
    Teacher(policy, model=str(folder), dtype="float32")
    with pytest.raises(PromptError, match="'q'.* positions, and the model has 20"):
        policy.prompt_encoder.encode(replace(long, uid="q"))
