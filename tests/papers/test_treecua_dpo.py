"""Trees of conversations: which turns are shared, what is drawn, read and called, and who is credited."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.step_table import spread
from mmrl.objectives.compare import sigmoid
from mmrl.papers.spo_tree import tree_values
from mmrl.papers.treecua_dpo import WithTurnBranches, branch_pairs
from mmrl.rewards.adapters import per_outcome
from mmrl.training.score import score
from mmrl.vision.decoding.turns import TurnReader
from mmrl.vision.engines.generate import Generate
from mmrl.vision.tools.images import crop
from tests.support.tables import reward_table, step_table
from tests.vision import tiny
from tests.vision.parting import CALLED, Alone, CallsCounted, CallsFailing, counted
from tests.vision.talking import calls_of, ruled

FAMILY = "qwen2_5_vl"
ENDED = {"max_completion_length": 60}  # of a turn, which ends at every third token


class Branching(WithTurnBranches):
    """Tools that are called by rule."""

    parse = staticmethod(calls_of)


class Counting(CallsCounted, WithTurnBranches):
    """A tool is called in every turn."""


class Failing(CallsFailing, WithTurnBranches):
    """A tool that fails is called in every turn."""


class Followed(Stream):
    """Draws every turn of a conversation with the number of the part of the tree that it is in."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def generator(self, uid, index, *turn):
        return super().generator(uid, self.path[min(turn[1] if turn else 0, len(self.path) - 1)], *turn)


@pytest.fixture
def policy(exact, monkeypatch):
    made = exact(FAMILY)
    encoder = made.prompt_encoder
    monkeypatch.setattr(encoder, "end", [encoder.end[0], *range(0, 256, 3)])
    return made


def asked(num=2, each=8):
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num) for _ in range(each)]


def grown(policy, prompts, kind=Branching, *, stream=None, kept=True, generate=(), **options):
    stream = stream or Stream(0)
    inner = Generate(policy, stream=stream, **{"max_completion_length": 5, **dict(generate)})
    if not kept:
        inner.turns = lambda: SimpleNamespace(
            begin=lambda rows: inner.reader([row.encoded for row in rows]), part=lambda parents: None
        )
    options = {"tool": (crop, ruled), "branching": (2, 2), **options}
    return kind(inner, stream=stream, **options).rollout(prompts)


def said(rows):
    return [row.steps.ids.tolist() for row in rows]


def test_rows_of_one_node_have_the_same_tokens_and_each_is_its_whole_conversation(policy):
    rows = grown(policy, asked())
    shared, numbers = {}, set()
    for row in rows:
        nodes = row.notes["node"].int().tolist()
        assert len(nodes) == row.length == row.outcomes[-1].end
        for t, (node, token) in enumerate(zip(nodes, row.steps.ids.tolist(), strict=True)):
            assert shared.setdefault((row.group, node, t), token) == token
        numbers.add((row.group, tuple(dict.fromkeys(nodes))))
    assert len(numbers) == len(rows) > 6
    # Of eight answers two begin (0, 1); their continuations are 2 to 5, and of these 6 to 13.
    paths = {(i, 2 + 2 * i + j, 6 + 4 * i + 2 * j + k) for i, j, k in product(range(2), repeat=3)}
    whole = {path for _, path in numbers}
    assert all(path in {p[: len(path)] for p in paths} for path in whole)
    assert any(len(path) == 3 for path in whole) and any(len(path) < 3 for path in whole)
    branches = {path[-2:][0] if len(path) > 1 else "start" for path in whole}
    assert {row.outcomes[-1].tags["branch"] for row in rows} == set(map(str, branches))
    # The engine noted the log-probabilities that learning computes, replies included.
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)


def test_a_leaf_is_the_conversation_that_is_drawn_alone_with_the_numbers_of_its_path(policy):
    for row in grown(policy, asked(1)):
        stream = Followed(list(dict.fromkeys(map(int, row.notes["node"].tolist()))))
        inner = Generate(policy, stream=stream, max_completion_length=5)
        (alone,) = Alone(inner, stream=stream, tool=(crop, ruled)).rollout(asked(1, 1))
        assert alone.steps.ids.tolist() == row.steps.ids.tolist()
        assert alone.logged == row.logged
        torch.testing.assert_close(alone.notes["logp"], row.notes["logp"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", [FAMILY, pytest.param("llava", marks=pytest.mark.slow)])
def test_branches_go_on_from_the_keys_and_values_of_one_conversation(exact, monkeypatch, family):
    policy, read = exact(family), []
    encoder = policy.prompt_encoder
    monkeypatch.setattr(encoder, "end", [encoder.end[0], *range(0, 256, 3)])
    chunk = TurnReader._read_chunk
    monkeypatch.setattr(
        TurnReader, "_read_chunk", lambda self, c: (read.append(len(c.ids)), chunk(self, c))[1]
    )
    rows = grown(policy, asked())
    assert max(read) >= 4 and len(read) == 3  # every turn after the first goes on
    anew = grown(policy, asked(), kept=False)
    assert said(rows) == said(anew)
    for row, other in zip(rows, anew, strict=True):
        torch.testing.assert_close(row.notes["logp"], other.notes["logp"], rtol=0, atol=1e-10)


def test_a_tree_is_drawn_alike_in_any_batch(policy):
    rows = grown(policy, asked())
    first = [row for row in rows if row.group == "p0"]
    assert said(grown(policy, asked(1))) == said(first)
    assert said(grown(policy, asked(), generate={"batch_size": 8})) == said(rows)  # a tree at a time
    assert said(grown(policy, asked(), generate={"batch_size": 3})) == said(rows)  # less than a tree
    later = Stream(0)
    later.step = 1
    assert said(grown(policy, asked(), stream=later)) != said(rows)


def test_calls_of_a_shared_turn_are_made_once(policy):
    CALLED.clear()
    rows = grown(policy, asked(1, 4), Counting, tool=(counted,), max_turns=3, generate=ENDED)
    assert len(rows) == 4 and all(row.outcomes[-1].tags["finish"] == "turns" for row in rows)
    assert len(CALLED) == 1 + 2  # of one first turn and two second ones; those of the last are not made


@pytest.mark.parametrize(("on_error", "finish"), [("tell", "turns"), ("skip", "tool_error")])
def test_a_tool_that_fails_ends_a_branch_or_is_read_by_its_continuations(policy, on_error, finish):
    tool = Pieces(Stream()).make("tool", Piece("tests.vision.parting:failing", {"on_error": on_error}))
    rows = grown(policy, asked(1, 4), Failing, tool=(tool,), max_turns=3, generate=ENDED)
    assert {row.outcomes[-1].tags["finish"] for row in rows} == {finish}
    assert len(rows) == (4 if on_error == "tell" else 1)  # a conversation that ended does not part


def test_limits_hold_in_every_branch(policy):
    rows = grown(policy, asked(), max_completion_length=7)
    assert {row.length for row in rows} >= {7} and max(row.length for row in rows) == 7
    assert any(row.outcomes[-1].tags["finish"] == "length" for row in rows)


@per_outcome
def length(prompt, outcome):
    """Prefer long texts."""
    return float(len(outcome.text))


@per_outcome
def odd(prompt, outcome):
    """Prefer texts of an odd length."""
    return float(len(outcome.text) % 2)


def table_of(rows, name, *notes):
    reward = Pieces(Stream()).make("reward", Piece(f"{__name__}:{name}", {}))
    return total(score([reward], rows, notes=frozenset(notes)))


def test_the_credit_of_a_tree_adds_up_to_the_reward_less_the_value_of_the_root(policy):
    rows = grown(policy, asked(1), Counting, tool=(counted,), max_turns=3, generate=ENDED)
    assert len(rows) == 8  # every conversation has all of its turns, so that the tree is even
    table = table_of(rows, "length", "node")
    credit = tree_values(table)
    for i, row in enumerate(rows):
        starts = [0, *(row.notes["node"].diff().nonzero()[:, 0] + 1).tolist()]
        added = credit.values[i, 0, starts].sum()
        torch.testing.assert_close(added, table.values[i, 0, 0] - table.values[:, 0, 0].mean())


def test_pairs_are_of_branches_that_begin_after_the_same_turn(policy):
    rows = grown(policy, asked(1, 16), Counting, tool=(counted,), max_turns=3, generate=ENDED)
    paired = branch_pairs(table_of(rows, "odd", "node", "token"))
    groups = paired.group[paired.learn.any(-1)].tolist()
    assert groups and all(groups.count(group) == 2 for group in groups)
    for group in set(groups):
        (a, b) = (paired.group == group).nonzero()[:, 0].tolist()
        nodes = [set(rows[i].notes["node"][paired.learn[i, : rows[i].length]].tolist()) for i in (a, b)]
        assert all(len(node) == 1 for node in nodes) and nodes[0] != nodes[1]


def test_evaluations_get_conversations_that_share_nothing(policy):
    rows = grown(policy, asked(1, 4), stream=Stream(0, purpose="evaluate"))
    inner = Generate(policy, stream=Stream(0, purpose="evaluate"), max_completion_length=5)
    plain = Alone(inner, stream=Stream(0, purpose="evaluate"), tool=(crop, ruled)).rollout(asked(1, 4))
    assert said(rows) == said(plain) and "node" not in rows[0].notes


def test_wrong_numbers_are_named(policy):
    with pytest.raises(ValueError, match=r"multiples of 4 answers .* but 6 were asked for prompt 'p0'"):
        grown(policy, asked(1, 6))
    with pytest.raises(ConfigError, match="after turn 2 at last .* they end after 2; set `max_turns`"):
        grown(policy, asked(1), max_turns=2)
    with pytest.raises(ConfigError, match="several rows to a conversation"):
        grown(policy, asked(1), only_n_most_recent_images=1)


LEAVES = [1, 0, 1, 0, 0, 0, 1, 1, 1]


def tokens(nodes):
    return [[10 * node for node in row] for row in nodes]


def test_branches_to_right_answers_are_preferred_to_siblings_without_any():
    nodes = [[i // 3, i // 3, 3 + i] for i in range(9)]
    table = reward_table(LEAVES, group="a" * 9, length=[3] * 9, notes={"node": nodes, "token": tokens(nodes)})
    pairs = branch_pairs(total(table))
    wanted = torch.zeros(9, 3, dtype=torch.float64)
    # Leaves 0 and 1 part at the last token; parts 0 and 1 at the first, by rows that are left.
    wanted[0, 2], wanted[1, 2] = 1, -1
    wanted[2, :2], wanted[3, :2] = 1, -1
    assert torch.equal(pairs.values[:, 0], wanted)
    assert torch.equal(pairs.learn, wanted != 0)
    group = pairs.ids["group"][:, 0].tolist()
    assert group[0] == group[1] != group[2] == group[3] and len({*group[:4], group[4]}) == 3


def test_the_worked_loss_of_a_pair_of_branches():
    table = reward_table(
        [1, 0], group="aa", length=[2, 2], notes={"node": [[0, 1], [0, 2]], "token": [[5, 6], [5, 7]]}
    )
    pairs = branch_pairs(table)
    rows, batch = step_table([[0.0] * 2] * 2)
    batch = spread(pairs, batch)
    ratio = torch.tensor([[9.0, 0.5], [-9.0, -0.3]], dtype=torch.float64)
    batch = batch.replace(totals=batch.count())
    assert sigmoid(ratio * batch.mask, batch, beta=0.1).item() == pytest.approx(0.653947, abs=1e-6)


def test_equal_siblings_are_one_branch_and_a_parting_without_contrast_makes_no_pair():
    nodes = [[0, 1], [0, 2], [0, 3], [4, 5]]
    same = [[5, 6], [5, 6], [5, 7], [5, 6]]
    table = reward_table([1, 0, 1, None], group="aaaa", length=[2] * 4, notes={"node": nodes, "token": same})
    assert not branch_pairs(table).learn.any()  # tokens 6 lead to a right answer, and so do tokens 7
    table = reward_table([1, 0, 0, None], group="aaaa", length=[2] * 4, notes={"node": nodes, "token": same})
    found = branch_pairs(table)
    assert found.values[:, 0].tolist() == [[0, 1], [0, 0], [0, -1], [0, 0]]
    alone = reward_table(
        [1, 0], group="ab", length=[1, 1], notes={"node": [[0], [None]], "token": [[1], [1]]}
    )
    assert not branch_pairs(alone).learn.any()
