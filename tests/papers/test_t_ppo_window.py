"""Answers that are cut at a window and go on in the next step."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.papers.t_ppo import WithUnfinished, WithWindow
from mmrl.samplers.uniform import Uniform
from mmrl.training.loop import train
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from tests.vision.test_contrastive_decoding import pictures
from tests.vision.test_inner_runs import plan, questions

__all__ = ["questions"]

LENGTH = 8


@pytest.fixture
def policy(exact, monkeypatch):
    policy = exact("qwen2_5_vl")
    monkeypatch.setattr(policy.prompt_encoder, "end", [-2])  # no answer ends by itself
    return policy


def steps_of(policy, window, count, temperature=1.0):
    """Run steps of two rollouts; return the rows of each."""
    stream, data = Stream(0), list(pictures())
    inner = Generate(policy, stream=stream, max_completion_length=LENGTH, temperature=temperature)
    engine = WithWindow(inner, stream=stream, window=window)
    sampler = WithUnfinished(Uniform(data, stream=stream, shuffle=False), stream=stream, train_prompts=data)
    done = []
    for step in range(count):
        stream.step = step
        rows = engine.rollout(sampler.draw(2, 1))
        sampler.observe(rows, score([], rows, notes=frozenset({"token", "logp", "entropy"})))
        done.append(rows)
    return done


def test_an_answer_goes_on_until_the_limit(policy):
    first, second, third, fourth = steps_of(policy, 3, 4)
    assert [[row.length for row in rows] for rows in (first, second, third, fourth)] == [
        [3, 3], [6, 6], [8, 8], [3, 3]
    ]  # fmt: skip
    for before, after in ((first, second), (second, third)):
        for i, j in zip(before, after, strict=True):
            assert i.prompt.uid == j.prompt.uid and i.outcomes[-1].tags["unfinished"] == "yes"
            assert torch.equal(j.steps.ids[: i.length], i.steps.ids)
            assert all(j.notes[name][: i.length].isnan().all() for name in ("logp", "entropy"))
            assert "changed" in j.outcomes[-1].tags and "changed" not in first[0].outcomes[-1].tags
            assert j.steps.chosen.tolist() == [False] * i.length + [True] * (j.length - i.length)
    assert first[0].steps.chosen is None
    assert "unfinished" not in third[0].outcomes[-1].tags and third[0].outcomes[-1].tags["finish"] == "length"
    assert not torch.equal(fourth[0].steps.ids, first[0].steps.ids), "a new answer, of its own draws"
    assert all(not row.prompt.columns.get("begun_answer") for row in second)


def test_windows_write_what_one_pass_writes(policy):
    windows = steps_of(policy, 3, 3, temperature=0)
    whole = steps_of(policy, LENGTH, 1, temperature=0)[0]
    for made, wanted in zip(windows[-1], whole, strict=True):
        assert torch.equal(made.steps.ids, wanted.steps.ids)
        torch.testing.assert_close(made.notes["logp"][6:], wanted.notes["logp"][6:])  # of the last window


def test_the_policy_learns_the_tokens_of_the_window_with_the_probabilities_they_had(policy):
    rows = steps_of(policy, 3, 2)[-1]
    batch = policy.collate(rows)
    assert batch.mask.tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    with torch.no_grad():
        logp = policy(batch).logp
    torch.testing.assert_close(logp.float()[:, 3:], batch.notes["logp"][:, 3:], rtol=1e-4, atol=1e-4)


def test_evaluations_get_whole_answers(policy):
    stream = Stream(0, purpose="evaluation")
    inner = Generate(policy, stream=stream, max_completion_length=LENGTH)
    rows = WithWindow(inner, stream=stream, window=3).rollout(list(pictures()))
    assert [row.length for row in rows] == [LENGTH, LENGTH]


def test_an_answer_that_ends_inside_the_window_is_done(policy, monkeypatch):
    ids = steps_of(policy, 3, 1, temperature=0)[0][0].steps.ids
    monkeypatch.setattr(policy.prompt_encoder, "end", [int(ids[1])])
    row = steps_of(policy, 3, 1, temperature=0)[0][0]
    assert row.length <= 2 and row.outcomes[-1].tags["finish"] == "stop"
    assert "unfinished" not in row.outcomes[-1].tags


@pytest.mark.slow
def test_t_ppo_goes_on_with_unfinished_answers_after_a_resume(questions, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)

    def trained(folder, steps):
        raw = plan("t_ppo", questions, checkpoint, tmp_path / folder, save_steps=1)
        critic = {"policy": {"name": "vision.critic", "policy": raw["policy"]}, "learning_rate": 1e-3}
        engine = [raw["rollout"]["engine"][0], {"name": "vision.with_window", "window": 4}]
        rollout = {"engine": engine, "num_prompts": 2, "num_generations": 1}
        raw = merge(raw, {"references": {"critic": critic}, "rollout": rollout, "max_steps": steps})
        train(build(parse(raw, Config), quiet=True))
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return load_file(tmp_path / folder / f"checkpoint-{steps}" / "model" / "model.safetensors"), [
            json.loads(line) for line in lines
        ]

    trained("parts", 1)
    parts, steps = trained("parts", 3)
    whole, _ = trained("whole", 3)
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())
    assert steps[0]["sampler/unfinished"] >= 1
    assert steps[1]["completions/mean_length"] > steps[0]["completions/mean_length"]
