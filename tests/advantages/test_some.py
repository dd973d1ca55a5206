"""Chains for some rewards, or for some rows."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import leave_one_out
from mmrl.advantages.shape import scale, total
from mmrl.advantages.some import for_some
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from tests.support.tables import assert_rows, reward_table


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


def test_what_an_inner_piece_needs_is_asked_for():
    chain = Pieces(Stream())
    listed = [{"name": "high_entropy", "top": 0.5}, "kl_in_reward"]
    bound = chain.make("advantage", Piece("for_some", {"advantage": listed}))
    assert bound.needs.notes == {"entropy", "logp"} and set(bound.needs.others) == {"ref"}
    assert chain.notes >= {"entropy", "logp"}


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
