"""Replay of conversations with tools, environments and trees: learned from as when they were fresh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.build import build
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, Piece, parse
from mmrl.core.byte_lru import ByteLRU
from mmrl.core.reward_table import Collection
from mmrl.core.rng import Stream
from mmrl.engines.replay import RECALLED, WithReplay
from mmrl.papers.treecua_dpo import branch_pairs
from mmrl.rewards.adapters import per_outcome
from mmrl.runtime.checkpoint import read_state, write_state
from mmrl.training.loop import train
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from mmrl.vision.tools.images import crop
from tests.runtime.test_real_processes import SPEAKING, TALKING
from tests.support.real_worker import seen
from tests.support.resuming import without_times
from tests.vision.parting import Branching
from tests.vision.playing import Ladder, Playing
from tests.vision.talking import Talkative, ruled

METHODS = Path(__file__).parents[2] / "configs" / "methods"
QWEN = "qwen2_5_vl"
KINDS = {
    "tools": (Talkative, {"tool": (crop, ruled), "turn_outcomes": True}),
    "images that leave": (Talkative, {"tool": (crop, ruled), "only_n_most_recent_images": 1}),
    "environment": (Playing, {"environment": Ladder, "turn_outcomes": True}),
}


def remembering(policy, kind, **options):
    """Hold conversations, and store all of them; returns the replay buffer and the fresh rows."""
    stream, prompts, (engine, given) = Stream(0), seen(), KINDS[kind]
    inner = engine(Generate(policy, stream=stream, max_completion_length=9), stream=stream, **given)
    memory = WithReplay(inner, stream=stream, train_prompts=prompts, **options)
    sent = []

    def gathered(packed):
        sent.extend(json.loads(json.dumps(packed)))  # as between processes
        return [sent]

    memory.connect(memory.rollout, gathered)
    rows = memory.rollout(prompts * 3)
    table = score([], rows, notes=RECALLED)
    everything = torch.ones(len(rows), dtype=torch.bool)
    memory.remember(everything, table, table, rollouts=rows)
    # Another process, which has no rows of its own, stores the same.
    other, elsewhere = (
        WithReplay(inner, stream=stream, train_prompts=prompts, **options),
        table.replace(rank=1),
    )
    other.connect(other.rollout, lambda packed: [sent, packed])
    other.remember(everything, elsewhere, elsewhere)
    assert str(other.conversations.state_dict()) == str(memory.conversations.state_dict())
    return memory, rows


@pytest.fixture
def policy(exact, monkeypatch):
    made = exact(QWEN)
    monkeypatch.setattr(made.prompt_encoder, "end", made.prompt_encoder.end)  # the engines of tests set it
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_stored_conversations_are_learned_from_as_when_they_were_fresh(policy, kind, tmp_path, monkeypatch):
    memory, rows = remembering(policy, kind)
    write_state(tmp_path / "state", memory.state_dict())
    other = WithReplay(memory.engine, stream=memory.stream, train_prompts=seen())
    other.load_state_dict(read_state(tmp_path / "state"))
    # Everything is encoded anew.
    monkeypatch.setattr(policy.prompt_encoder, "_encoded", ByteLRU(0, lambda encoded: encoded.bytes))
    (table, _) = other.bring_back(torch.arange(len(rows)))
    back = other.restore_rows(table)
    assert any(row.steps.suffix and row.steps.suffix.media for row in rows), "replies show images"
    assert kind != "images that leave" or len(rows) > 6
    for one, again in zip(rows, back, strict=True):
        assert torch.equal(one.steps.ids, again.steps.ids)
        assert one.steps.temperature == again.steps.temperature
        parts = [(one.steps.prompt, again.steps.prompt)]
        parts += [(one.steps.suffix, again.steps.suffix)] if one.steps.suffix else []
        for old, new in parts:
            assert torch.equal(old.ids, new.ids) and torch.equal(old.positions, new.positions)
            assert old.media.keys() == new.media.keys()
            assert all(torch.equal(old.media[name], new.media[name]) for name in old.media)
        told = [(outcome.text, outcome.end) for outcome in one.outcomes]
        assert [(outcome.text, outcome.end) for outcome in again.outcomes] == told
        tags = [{**outcome.tags, "replay": "yes"} for outcome in one.outcomes]
        assert [outcome.tags for outcome in again.outcomes] == tags
    with torch.no_grad():
        fresh, replayed = (policy(policy.collate(part)).logp for part in (rows, back))
    assert torch.equal(fresh, replayed)


def test_conversations_are_bounded_whole_and_of_one_step(policy):
    memory, rows = remembering(policy, "images that leave")
    sizes = [memory.conversations.size(number) for number in range(1, len(rows) + 1)]
    assert min(sizes) > 0
    episode = memory.stored.ids["episode"][:, 0]
    own = score([], rows, notes=RECALLED).ids["episode"][:, 0]
    assert ((own != 0) == (episode != 0)).all() and not torch.isin(episode[episode != 0], own).any()
    small, _ = remembering(policy, "images that leave", max_bytes=sum(sizes) - 1)
    kept = small.stored.ids["stored"][:, 0]
    assert 0 < len(kept) < len(rows) and 1 not in kept
    dropped = torch.isin(episode, episode[0]) if episode[0] else torch.arange(len(rows)) == 0
    assert torch.equal(kept, memory.stored.ids["stored"][:, 0][~dropped])
    small.state_dict()  # drops what nothing refers to
    assert small.conversations.texts.keys() == set(kept.tolist())
    prompts = seen()
    hinted = [replace(prompts[0], messages=prompts[0].messages * 2), prompts[1]]
    changed = [row.outcomes[-1].tags.get("changed") for row in memory.rollout(hinted)]
    assert changed[:2] == ["yes", None], "a prompt that a sampler changed is not stored"


@per_outcome
def even(prompt, outcome):
    """Reward an even number of letters."""
    return float(len(outcome.text) % 2 == 0)


def test_a_stored_tree_comes_back_whole_with_its_pairs(policy):
    stream, prompts = Stream(0), seen()
    generate = Generate(policy, stream=stream, max_completion_length=9)
    tree = Branching(generate, stream=stream, tool=(crop, ruled), branching=(2, 2))
    memory = WithReplay(tree, stream=stream, train_prompts=prompts, granularity="group")
    reward = Pieces(stream).make("reward", Piece(f"{__name__}:even", {}))

    def step(number, prompt, alive):
        stream.step = number
        rows = memory.rollout([prompt] * 8)
        table = score([reward], rows, notes=RECALLED | {"node"})
        credit = branch_pairs(total(table))
        credit = credit if alive else credit.put(torch.zeros_like(credit.values))
        return rows, credit, memory.replay_after(Collection(rows, table, table, rows[0]), credit)

    rows, credit, _ = step(0, prompts[0], True)
    assert (credit.values != 0).any()
    more, _, _ = step(1, prompts[0], True)  # another tree of the prompt, which must not mix with it
    _, _, (keep, table, back) = step(2, prompts[1], False)
    assert not keep.any() and len(back) >= 2 and set(back.uids) == {prompts[0].uid}
    for group in back.group.unique():
        signs = back.values[back.group == group, 0].sum(-1).sign().tolist()
        assert sorted(signs) == [-1, 1], "a chosen branch and its sibling"
    restored = {tuple(row.notes["node"].tolist()) for row in memory.restore_rows(table)}
    trees = [{tuple(row.notes["node"].tolist()) for row in grown} for grown in (rows, more)]
    assert restored <= trees[0] or restored <= trees[1]


@pytest.fixture
def trained(checkpoint, tmp_path):
    def go(name, method, **changes):
        policy = {"name": "vision.tokens", "model": str(checkpoint(QWEN)), "dtype": "float32"}
        usual = {**SPEAKING, "policy": policy, "rewards": [f"{__name__}:even"], "references": {}}
        own = read(METHODS / f"{method}.yaml")
        plan = merge({**usual, **own}, {"output_dir": str(tmp_path / name), "max_steps": 4, **changes})
        run = build(parse(plan, Config), quiet=True)
        train(run)
        return run

    return go


@pytest.mark.slow  # three runs of a model
def test_a_run_of_gui_owl_replays_conversations_and_is_resumed_bit_for_bit(trained):
    generate, talk = TALKING["rollout"]["engine"]
    talk = {**talk, "turn_outcomes": True, "only_n_most_recent_images": 1}
    rollout = {**SPEAKING["rollout"], "policy": "", "num_generations": 2}
    rollout["engine"] = [generate, talk, {"name": "with_successes", "of": "even"}]
    whole = trained("whole", "grpo/gui_owl", rollout=rollout)
    trained("half", "grpo/gui_owl", rollout=rollout, max_steps=2)
    again = trained("half", "grpo/gui_owl", rollout=rollout)
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    records = [record for record in whole.journal.read() if "replay/rows" in record]
    assert str(without_times(whole.journal.read())) == str(without_times(again.journal.read()))
    assert sum(record["replay/rows"] for record in records[2:]) > 0, "after the stop, too"
    stored = whole.method.engine.conversations
    assert stored.media and len(stored.texts) == records[-1]["replay/stored"]
