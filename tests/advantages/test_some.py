"""Chains for some rewards, or for some rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mmrl.advantages.normalize import leave_one_out
from mmrl.advantages.select import high_entropy, per_step
from mmrl.advantages.shape import scale, total
from mmrl.advantages.some import for_some
from mmrl.advantages.tokens import keep_steps
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.papers.adar1 import bilevel_pairs
from mmrl.papers.xrpo import novelty
from tests.support.tables import NAN, assert_rows, reward_table


def test_only_the_named_rewards_change():
    table = reward_table({"iou": [1.0, 0.0], "format": [1.0, 2.0]}, weights={"iou": 1.0, "format": 3.0})
    found = for_some(table, advantage=(lambda t: scale(t, factor=10.0),), of=("iou",))
    by = dict(zip(found.names, found.values[:, :, 0].T.tolist(), strict=True))
    assert by == {"format": [1.0, 2.0], "iou": [10.0, 0.0]} and found.weights == {"iou": 1.0, "format": 3.0}


def test_several_rewards_may_become_one():
    table = reward_table({"iou": [1.0, 0.0], "a": [1.0, 2.0], "b": [3.0, 4.0]})
    found = for_some(table, advantage=(total,), of=("a", "b"))
    assert dict(zip(found.names, found.values[:, :, 0].T.tolist(), strict=True)) == {
        "iou": [1.0, 0.0],
        "total": [4.0, 6.0],
    }


def test_only_rows_with_the_tag_change_and_are_compared_among_themselves():
    tags = {"role": ["spy", "civilian", "spy", "civilian"]}
    table = reward_table([1.0, 5.0, 3.0, 7.0], tags=tags)
    found = for_some(table, advantage=(leave_one_out,), where={"role": "spy"})
    assert_rows(found.values[:, 0], [[-2.0], [5.0], [2.0], [7.0]])


def test_rows_that_are_shorter_than_the_others_are_put_back_by_step():
    # the last two rows have two steps, the others three
    entropy = [[0.1] * 3, [0.1] * 3, [0.1, 0.9], [0.9, 0.1]]
    table = reward_table(
        [1, 2, 3, 4], length=[3, 3, 2, 2], notes={"entropy": entropy}, tags={"role": ["a", "a", "b", "b"]}
    )
    kept = partial(keep_steps, at_most=0.5)
    found = for_some(per_step(table), advantage=(kept,), where={"role": "b"})
    assert_rows(found.values[:, 0], [[1, 1, 1], [2, 2, 2], [3, 0], [0, 4]])
    assert found.valid[:, 0].sum(-1).tolist() == [3, 3, 2, 2]
    found = for_some(per_step(table), advantage=(kept,), where={"role": "nobody"})
    assert_rows(found.values[:, 0], [[1, 1, 1], [2, 2, 2], [3, 3], [4, 4]])


def test_some_rewards_are_put_back_by_step_where_the_longest_row_is_gone():
    table = reward_table(
        {"a": [1, 2], "b": [5, 6]}, length=[3, 2], notes={"entropy": [[0.1] * 3, [0.9, 0.1]]}
    )
    table = per_step(table).select(torch.tensor([1]))
    found = for_some(table, advantage=(partial(high_entropy, top=0.5),), of=("b",))
    by = dict(zip(found.names, found.values[0].tolist(), strict=True))
    assert by["a"][:2] == [2, 2] and by["b"][:2] == [6, 0]


def test_groups_and_labels_of_the_rows_are_put_back():
    tags = {"task": ["a", "a", "b", "b", "b", "b"]}
    measured = {"right": [1, 0, 1, 1, 1, 0], "skip_ratio": [0, 0, 1, 1, 1, 0]}
    table = reward_table(measured, length=[1, 1, 2, 3, 4, 2], group="xxyyyy", tags=tags)
    table = table.note("logp", torch.full((6, 4), -1.0, dtype=torch.float64))
    pairs = partial(bilevel_pairs, of="right", short="skip_ratio")
    found = for_some(table, advantage=(novelty, pairs), where={"task": "b"})
    # the short style is preferred: its shortest against its longest, and one that is left against the other
    assert found.values[2:, 0, 0].tolist() == [1, 1, -1, -1]
    groups = found.group.tolist()
    assert groups[2] == groups[4] != groups[3] == groups[5] and groups[0] == groups[1]
    assert_rows(found.scored["novelty"], [[NAN], [NAN], [0], [0], [0], [0]])


def test_what_an_inner_piece_needs_is_asked_for():
    chain = Pieces(Stream())
    listed = [{"name": "high_entropy", "top": 0.5}, "kl_in_reward"]
    bound = chain.make("advantage", Piece("for_some", {"advantage": listed}))
    assert bound.needs.notes == {"entropy", "logp"} and set(bound.needs.others) == {"ref"}
    assert chain.notes("advantage") >= {"entropy", "logp"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"of": ("iuo",)}, "no reward called 'iuo' here; it has iou, format"),
        ({"where": {"rolle": "spy"}}, "no outcome has the tag 'rolle'"),
        (
            {"where": {"role": "spy"}, "advantage": (total,)},
            "must keep the rewards and the places of its rows",
        ),
    ],
)
def test_what_cannot_be_put_back_is_refused(options, words):
    table = reward_table({"iou": [1.0, 0.0], "format": [1.0, 2.0]}, tags={"role": ["spy", "civilian"]})
    with pytest.raises(ValueError, match=words):
        for_some(table, **{"advantage": (), **options})
