"""Trees of answers: which tokens are shared, what is drawn and computed, and who is credited."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.core.rng import Stream
from mmrl.core.step_table import spread
from mmrl.papers.spo_tree import WithBranches, tree_values
from mmrl.rewards.adapters import per_outcome
from mmrl.vision.engines.generate import Generate
from tests.support.tables import assert_rows, reward_table, step_table
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


LEAVES = [1, 0, 1, 0, 0, 0, 1, 1, 1]


FIRST = {"none": [0.111111, -0.555556, 0.444444], "siblings": [0.267261, -1.336306, 1.069045]}


def tree(**columns):
    """Lay three parts of two tokens out, each with three continuations of one token."""
    nodes = [[i // 3, i // 3, 3 + i] for i in range(9)]
    return reward_table(LEAVES, group="a" * 9, length=[3] * 9, notes={"node": nodes}, **columns)


@pytest.mark.parametrize("scale", FIRST)
def test_spo_credits_each_part_with_what_it_adds(scale):
    table = tree_values(total(tree()), scale=scale)
    assert_rows(table.values[:, 0, 0], [FIRST[scale][i // 3] for i in range(9)])
    assert torch.equal(table.values[:, 0, 0], table.values[:, 0, 1])
    third = 1 / 3 if scale == "none" else 1 / 3 / (2 / 9) ** 0.5  # values 1, 0, 1 have a variance of 2/9
    assert_rows(table.values[:, 0, 2], [third, -2 * third, third, *[0] * 6], tolerance=1e-6)


def test_shared_tokens_are_learned_from_once_and_parts_that_add_nothing_never():
    batch = spread(tree_values(total(tree())), step_table([[0.0] * 3] * 9)[1])
    wanted = torch.zeros(9, 3)
    wanted[[0, 3, 6], :2] = 1
    wanted[:3, 2] = 1
    assert batch.mask.equal(wanted.to(batch.mask))
    assert batch.advantage.ne(0).equal(wanted.bool())


def test_the_value_of_a_part_is_the_mean_of_its_continuations_and_not_of_leaves():
    # part 0 ended its answer; part 1 has two continuations: root (1 + (0 + 1) / 2) / 2 = .75
    table = reward_table([1, 0, 1], length=[1, 2, 2], notes={"node": [[0], [1, 2], [1, 3]]})
    assert_rows(tree_values(table).values[:, 0], [[0.25], [-0.25, -0.5], [-0.25, 0.5]])


def test_trees_of_several_groups_and_rows_without_a_tree():
    table = reward_table(
        [1, 0, 1, None, 0.5], group="aabbb", length=[1] * 5, notes={"node": [[0], [1], [0], [1], [None]]}
    )
    table = tree_values(table)
    assert_rows(table.values[:, 0], [[0.5], [-0.5], [0.25], [0], [-0.25]])
    assert table.valid[:, 0, 0].tolist() == [True, True, True, False, True]
