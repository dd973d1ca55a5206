"""Trees of answers: which tokens are shared, what is drawn and computed, and who is credited."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.advantages.trees import tree_values
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.rng import Stream
from mmrl.papers.spo_tree import WithBranches
from mmrl.vision.engines.generate import Generate
from tests.vision.test_contrastive_decoding import pictures, plainly, said


@pytest.fixture
def policy(exact):
    return exact("llava")


@pytest.fixture
def endless(policy, monkeypatch):
    """Let no token end an answer, so that all are as long as they may be."""
    monkeypatch.setattr(policy.prompt_encoder, "end", [-2])
    return policy


def branching(policy, prompts, *, generate=(), stream=None, **options):
    """Answer with up to six tokens, which part after two and after four."""
    stream = stream or Stream(0)
    inner = Generate(policy, stream=stream, **{"max_completion_length": 6, **dict(generate)})
    options = {"branching": (2, 2), "segment_length": 2, **options}
    return WithBranches(inner, stream=stream, **options).rollout(prompts)


def test_rows_of_one_node_have_the_same_tokens(endless):
    first, second = pictures()
    rows = branching(endless, [first, second, first] * 4, generate={"temperature": 0.7})
    assert [row.group for row in rows] == [first.uid] * 8 + [second.uid] * 4
    nodes = [row.notes["node"].tolist() for row in rows[:8]]
    # Two parts start from the prompt, four after them (2 to 5), eight after those (6 to 13).
    assert nodes == [[i // 4, i // 4, 2 + i // 2, 2 + i // 2, 6 + i, 6 + i] for i in range(8)]
    assert [row.outcomes[0].tags["branch"] for row in rows[:8]] == [str(2 + i // 2) for i in range(8)]
    shared = {}
    for row in rows[:8]:
        for t, (node, token) in enumerate(zip(row.notes["node"].tolist(), row.steps.ids, strict=True)):
            assert shared.setdefault((node, t), int(token)) == int(token)
        assert row.length == 6 and row.on_policy and row.steps.temperature == 0.7
        logp = (plainly(endless, row.prompt, row.steps.ids) / 0.7).log_softmax(-1)
        chosen = logp.gather(1, row.steps.ids[:, None])[:, 0]
        torch.testing.assert_close(row.notes["logp"], chosen, rtol=0, atol=2e-5)
    assert len({tuple(ids) for ids in said(rows[:8])}) > 4  # parts that go on differ


def test_a_tree_is_drawn_alike_in_any_batch(endless):
    first, second = pictures()
    rows = branching(endless, [first, second] * 4)
    assert said(branching(endless, [second, first] * 4, batch_size=1)) == [
        *said(rows[4:]),
        *said(rows[:4]),
    ]
    assert said(branching(endless, [first] * 4)) == said(rows[:4])
    stream = Stream(0)
    stream.step = 1
    assert said(branching(endless, [first] * 4, stream=stream)) != said(rows[:4])


def test_shared_tokens_are_computed_once(endless):
    seen = []
    hook = endless.core.register_forward_pre_hook(
        lambda module, inputs, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    try:
        (row, *_) = branching(endless, pictures()[:1] * 4)
    finally:
        hook.remove()
    # The prompt; its last token and the first two of one part, two of two parts, one of four. A last token
    # is never read.
    assert sum(seen) == len(row.steps.prompt.ids) - 1 + 3 + 2 * 2 + 4 * 1


def test_a_part_that_ends_the_answer_has_no_continuations(policy, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", [policy.prompt_encoder.end[0], *range(0, 256, 3)])
    rows = branching(policy, pictures() * 16)
    lengths = {row.length for row in rows}
    assert len(rows) < 32 and len(lengths) > 3
    for row in rows:
        stopped = int(row.steps.ids[-1]) in policy.prompt_encoder.end
        assert row.outcomes[0].tags["finish"] == ("stop" if stopped else "length")
        assert stopped or row.length == 6
        assert row.outcomes[0].end == row.length == len(row.notes["node"])


@per_outcome
def length(prompt, outcome):
    """Prefer long texts."""
    return float(len(outcome.text))


def test_the_credit_of_a_tree_adds_up_to_the_reward(endless):
    from mmrl.config.binding import Bound, Pieces
    from mmrl.config.schema import Piece
    from mmrl.training.score import score

    rows = branching(endless, pictures()[:1] * 4)
    reward: Bound = Pieces(Stream()).make("reward", Piece(f"{__name__}:length", {}))
    table = total(score([reward], rows, notes=frozenset({"node"})))
    credit = tree_values(table)
    # Of each row: its reward less the mean is the sum of what its three parts add.
    added = credit.values[:, 0, ::2].sum(-1)
    torch.testing.assert_close(added, table.values[:, 0, 0] - table.values[:, 0, 0].mean())
    assert (credit.learn.sum(0) <= torch.tensor([1, 1, 2, 2, 4, 4])).all()


def test_wrong_numbers_are_named(policy):
    with pytest.raises(ValueError, match=r"multiples of 4 answers .* but 6 were asked for prompt 'p0'"):
        branching(policy, pictures()[:1] * 6)
    with pytest.raises(ValueError, match="after 4 tokens at last .* they end after 4; set"):
        branching(policy, pictures(), generate={"max_completion_length": 4})


def test_evaluations_get_answers_that_share_nothing(policy):
    prompts = pictures()
    stream = Stream(0, purpose="evaluate")
    rows = branching(policy, prompts, stream=stream)
    plain = Generate(policy, stream=replace(stream), max_completion_length=6).rollout(prompts)
    assert said(rows) == said(plain)
