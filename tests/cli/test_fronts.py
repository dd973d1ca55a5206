"""Pareto fronts of several objectives: worked numbers, and volumes counted by cubes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mmrl.cli.pareto_front import (
    crowding_distance,
    front_of,
    hypervolume,
    loneliest,
    threshold,
)

FRONT = [(1.0, 4.0), (2.0, 3.0), (4.0, 1.0)]


def test_worked_numbers_of_a_front():
    assert hypervolume(FRONT, (0.0, 0.0)) == 9
    more = [*FRONT, (3.0, 2.5)]
    assert hypervolume(more, (0.0, 0.0)) == 10.5


def test_crowding_is_the_distance_of_neighbours():
    front = [(0.0, 10.0), (1.0, 8.0), (5.0, 5.0), (9.0, 1.0), (10.0, 0.0)]
    assert crowding_distance(front) == [math.inf, 1.0, 1.5, 1.0, math.inf]
    assert loneliest(front, 3) == [0, 4, 2] and loneliest(front, 4) == [0, 4, 2, 1]
    assert crowding_distance([(1.0, 2.0), (2.0, 1.0)]) == [math.inf] * 2
    assert crowding_distance([(1.0, 2.0)]) == [0.0]
    assert crowding_distance([(1.0, 0.0), (1.0, 1.0), (1.0, 3.0)]) == [math.inf, 1.0, math.inf]


def test_the_front_has_what_no_other_beats_once():
    points = [(1.0, 1.0), (2.0, 0.0), (1.0, 1.0), (0.5, 1.0), (0.0, 3.0), (9.0, math.nan), (math.inf, 9.0)]
    assert front_of(points) == [0, 1, 4]
    assert front_of(points, (0.5, 0.0)) == [0, 1]
    assert front_of([]) == []


def test_the_volume_is_that_of_the_cubes_that_are_beaten():
    points = torch.randint(0, 6, (7, 3), generator=torch.Generator().manual_seed(2)).tolist()
    cubes = sum(
        any(all(p > c for p, c in zip(point, corner, strict=True)) for point in points)
        for corner in itertools.product(range(6), repeat=3)
    )
    assert hypervolume([tuple(map(float, p)) for p in points], (0.0, 0.0, 0.0)) == cubes > 20
    assert hypervolume(FRONT, (4.0, 0.0)) == 0


def test_a_threshold_lies_below_its_start_whatever_the_sign():
    assert threshold(4.0, 0.9) == pytest.approx(3.6) and threshold(-10.0, 0.9) == pytest.approx(-11.0)
