"""Selection of prompts by difficulty."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mmrl.config.schema import ConfigError
from mmrl.samplers.pools import SelectedByDifficulty
from tests.support.observing import made
from tests.support.toys import prompts

# ---- selection by difficulty


def scored(scores):
    return [replace(prompts(num=len(scores))[i], columns={"iou": score}) for i, score in enumerate(scores)]


def selected(scores, **options):
    sampler = made(SelectedByDifficulty, data=scored(scores), by="iou", **options)
    return [prompt.columns["iou"] for prompt in sampler.data]


def test_0070_takes_scores_at_equal_distances():
    scores = [0.0, 0.7, 0.71, 0.1, 0.3, 0.5, 0.2, 0.4, 0.6, 1.0]
    assert sorted(selected(scores, rule="0070_all", num_selected=3)) == [0.1, 0.4, 0.7]
    assert len(selected(scores, rule="0070_all")) == 7


@pytest.mark.slow
def test_gaussian_03_prefers_scores_about_it_and_drops_zero():
    near, far, never = [0.3] * 200, [0.7] * 200, [0.0] * 200
    found = Counter(selected(near + far + never, num_selected=60))
    assert found[0.0] == 0 and sum(found.values()) == 60
    # Weights 1 and exp(-2) = 0.135: 0.88 of the draws, a little fewer as they run out.
    assert found[0.3] / 60 == pytest.approx(0.87, abs=0.1)
    assert len(selected([0.5, 0.0, 0.9])) == 2


def test_nothing_suitable_is_refused():
    with pytest.raises(
        ConfigError, match="no prompt has a 'iou' above 0 and up to 0.7; they are from 0 to 0.9"
    ):
        selected([0.0, 0.9], rule="0070_all")
    with pytest.raises(ConfigError, match="must hold numbers, but that of prompt 'p1' is 'hard'"):
        selected([0.1, "hard"])
