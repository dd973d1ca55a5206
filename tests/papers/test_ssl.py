"""Tiers of proximity that are added to outcomes."""

from __future__ import annotations

import itertools

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from tests.support.tables import assert_rows, reward_table

NEAR = [1.0, 0.882497, 0.486752, 0.043937]
OPTIONS = {"of": "near", "outcome": "hit"}


def shaped(hits, near=NEAR, **options):
    table = reward_table({"hit": hits, "near": near}, weights={"hit": 1.0, "near": 0.0})
    piece = Pieces(Stream()).make("advantage", Piece("tiers", {**OPTIONS, **options}))
    return piece(table).values[:, 0, 0]


def test_the_worked_tiers():
    # Four zones: 1 and 0.88 are in the last, 0.49 in the second of 0, 1/3, 2/3, 1, 0.04 in the first.
    assert_rows(shaped([1, 1, 1, 0]), [1.2, 1.2, 1.066667, 0])


def test_only_correct_outcomes_may_earn_the_bonus():
    assert_rows(shaped([0, 1, 1, 0], only_if_correct=True), [0, 1.2, 1.066667, 0])
    assert_rows(shaped([0, 1, 1, 0]), [0.2, 1.2, 1.066667, 0])


def test_two_zones_are_the_halves_and_1_is_in_the_last():
    assert_rows(shaped([1, 1, 1, 1], [0.0, 0.49, 0.5, 1.0], zones=2), [1, 1, 1.2, 1.2])


def test_the_order_of_outcomes_is_kept():
    generator = torch.Generator().manual_seed(0)
    for zones, alpha in itertools.product((2, 4, 9), (0.1, 0.5, 0.99)):
        hits = torch.randint(0, 3, (40,), generator=generator).tolist()
        values = shaped(hits, torch.rand(40, generator=generator).tolist(), zones=zones, alpha=alpha)
        for (hit, value), (other, theirs) in itertools.combinations(zip(hits, values, strict=True), 2):
            assert (hit < other) <= bool(value < theirs) and (hit > other) <= bool(value > theirs)


def test_a_proximity_that_does_not_apply_adds_nothing():
    assert_rows(shaped([1, 1], [float("nan"), 1.0]), [1, 1.2])


@pytest.mark.parametrize(
    ("hits", "near", "message"),
    [
        ([0.0, 0.1], [1, 1], "outcomes of 'hit' are only 0.1 apart"),
        ([0, 1], [0.5, 1.5], "wants 'near' in \\[0, 1\\], got 0.5 to 1.5"),
    ],
)
def test_what_could_change_the_order_is_an_error(hits, near, message):
    with pytest.raises(ValueError, match=message):
        shaped(hits, near)


@pytest.mark.parametrize("wrong", [{"zones": 1}, {"alpha": 1.0}, {"alpha": -0.1}])
def test_one_zone_and_a_bonus_of_1_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        shaped([0, 1], [0, 1], **wrong)


def test_a_reward_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="reads 'far', but the chain has hit, near"):
        shaped([1, 1, 1, 1], of="far")
    with pytest.raises(ValueError, match="reads 'near', but the chain has hit "):
        shaped([1, 1, 1, 1], outcome="near")
