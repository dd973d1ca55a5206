"""Replay of answers with image tokens: rows come back as they were, and a run goes on bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Part, Prompt
from mmrl.engines.replay import RECALLED, WithReplay
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.checkpoint import read_state, write_state
from mmrl.training.loop import train
from mmrl.training.score import score
from mmrl.vision.engines.generate_images import GenerateImages
from mmrl.vision.policies.tokens import Tokens
from tests.support.configs import method_file
from tests.support.resuming import without_times
from tests.vision.test_generate_images import SIZES, SLOW, writers

__all__ = ["writers"]

PROMPTS = [Prompt(words, (Message("user", (Part(words),)),)) for words in ("a red ball", "two")]


@pytest.mark.parametrize("family", ["emu3", *SLOW])
def test_rows_are_learned_from_as_when_they_were_fresh(writers, family, tmp_path):
    height, width = SIZES[family]
    for text, scale in ((0, 2.5), (6, 1.0)):
        policy = Tokens(model=str(writers(family)), dtype="float64", guidance_scale=scale)
        with torch.no_grad():  # some texts end before the limit
            policy.model.get_output_embeddings().weight[policy.images.begin] *= 3
        stream, size = Stream(0), {"height": height, "width": width, "max_text_length": text}
        inner = GenerateImages(policy, stream=stream, temperature=0.7, **size)
        memory = WithReplay(inner, stream=stream, train_prompts=PROMPTS)
        rows = memory.rollout([prompt for prompt in PROMPTS for _ in range(6)])
        table = score([], rows, notes=RECALLED)
        memory.remember(torch.ones(len(rows), dtype=torch.bool), table, table, rollouts=rows)
        write_state(tmp_path / "state", memory.state_dict())
        other = WithReplay(inner, stream=stream, train_prompts=PROMPTS)
        other.load_state_dict(read_state(tmp_path / "state"))
        back = other.restore_rows(other.bring_back(torch.arange(len(rows)))[0])
        assert len(back) == len(rows) == 12
        inserted = {bool(row.steps.chosen[policy.images.start(row.steps.ids)]) for row in rows}
        assert inserted == ({True, False} if text else {False}), "begin-of-image is sampled or inserted"
        for one, again in zip(rows, back, strict=True):
            assert torch.equal(one.steps.ids, again.steps.ids)
            assert torch.equal(one.steps.chosen, again.steps.chosen)
            assert again.steps.temperature == one.steps.temperature == pytest.approx(0.7)
            (told,), (found,) = one.outcomes, again.outcomes
            assert torch.equal(told.image, found.image) and told.text == found.text
            assert (told.end, {"replay": "yes"}) == (found.end, found.tags)  # as of a text
            assert torch.equal(one.notes["logp"].float(), again.notes["logp"]) and not again.on_policy
        batches = [policy.collate(part) for part in (rows, back)]
        with torch.no_grad():
            fresh, replayed = (policy(batch).logp for batch in batches)
        assert torch.equal(fresh, replayed) and torch.equal(batches[0].mask, batches[1].mask)
        mask = batches[1].mask.bool()
        torch.testing.assert_close(replayed[mask].float(), batches[1].notes["logp"][mask], rtol=0, atol=2e-6)


@per_outcome
def even(prompt, outcome):
    """Reward images with an even sum of pixels."""
    return float(outcome.image.sum() % 2 == 0)


def test_a_run_with_images_replays_them_and_is_resumed_bit_for_bit(writers, tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("a red ball", "two")))
    model = {
        "name": "vision.tokens",
        "model": str(writers("emu3")),
        "dtype": "float32",
        "guidance_scale": 2.0,
    }
    images = {"name": "vision.generate_images", "height": 8, "width": 12}
    plan = {
        "policy": model,
        "data": {"name": "diffusion.prompts", "path": str(lines)},
        "rewards": [f"{__name__}:even"],
        "rollout": {
            "num_prompts": 2, "num_generations": 2,
            "engine": [images, {"name": "with_successes", "of": "even"}],
        },
        "objective": {"ratio": {"name": "step_ratio", "against": "engine"}},
        "learn": {"learning_rate": 1e-3},
        "report": {"trackers": [], "log_completions": False},
        "save_steps": 3,
    }  # fmt: skip

    def trained(name, steps):
        raw = merge(merge(plan, read(method_file("grpo"))), {"objective": plan["objective"]})
        raw |= {"output_dir": str(tmp_path / name), "max_steps": steps, "references": {}}
        raw["objective"] |= {"penalty": []}
        run = build(parse(raw, Config), quiet=True)
        train(run)
        return run

    whole, _, again = trained("whole", 6), trained("half", 3), trained("half", 6)
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    records = whole.journal.read()
    assert str(without_times(records)) == str(without_times(again.journal.read()))
    assert sum(record.get("replay/rows", 0.0) for record in records[3:]) > 0, "after the stop, too"
