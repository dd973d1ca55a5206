"""Collections that are made twice: what a cheaper engine saves, and how often it says the same."""

from __future__ import annotations

from functools import partial

import pytest

from mmrl.compression import engines
from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.engines import FidelityGate, SpeedupProbe
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.protocols import HasMetrics
from mmrl.core.rng import Stream
from mmrl.vision.engines.generate import Generate
from tests.vision import mixed

FAMILY = "llava"


def engine(policy, **options):
    return Generate(policy, stream=Stream(0), max_completion_length=4, **options)


def cheap(policy, nbits=1):
    return engine(policy, cache=partial(visual_quant, nbits=nbits))


def texts(rows):
    return [row.outcomes[-1].text for row in rows]


@pytest.fixture
def clock(monkeypatch):
    """Let a second pass for every row that is answered with the full cache, and a quarter with another."""
    now = [0.0]
    monkeypatch.setattr(engines.time, "perf_counter", lambda: now[0])

    def watched(made):
        ask = made.rollout

        def rollout(prompts):
            now[0] += len(prompts) * (1.0 if made.cache is None else 0.25)
            return ask(prompts)

        made.rollout = rollout
        return made

    return watched


def test_seconds_of_both_are_told_once_and_the_rows_are_the_cheap_ones(exact, clock):
    policy, asked = exact(FAMILY), mixed.prompts(FAMILY)
    compared = SpeedupProbe(clock(cheap(policy)), at=1)
    assert isinstance(compared, HasMetrics)
    first = compared.rollout(asked)
    assert compared.pop_metrics() == {}
    assert texts(compared.rollout(asked)) == texts(first) == texts(cheap(policy).rollout(asked))
    told = compared.pop_metrics()
    # 3 rows: 3 seconds, and 3 quarters of one
    assert (told["rollout/exact_seconds"], told["rollout/seconds"]) == (3.0, 0.75)
    assert told["rollout/speedup"] == 4.0
    assert compared.pop_metrics() == {}
    compared.rollout(asked)
    assert compared.pop_metrics() == {}


def test_the_same_answers_are_counted_on_the_same_draws(exact):
    policy, asked = exact(FAMILY), mixed.prompts(FAMILY) * 2
    told = {}
    for nbits in (16, 1):
        compared = SpeedupProbe(cheap(policy, nbits), at=0)
        compared.rollout(asked)
        told[nbits] = compared.pop_metrics()["rollout/agreement"]
    exactly = texts(engine(policy).rollout(asked))
    same = [a == b for a, b in zip(texts(cheap(policy).rollout(asked)), exactly, strict=True)]
    assert told == {16: 1.0, 1: sum(same) / 6}
    assert told[1] < 1


@pytest.mark.parametrize("at, every, wanted", [(0, 0, [0]), (2, 0, [2]), (1, 3, [1, 4]), (0, 1, range(6))])
def test_the_collections_to_compare_are_counted(exact, clock, at, every, wanted):
    compared = SpeedupProbe(clock(cheap(exact(FAMILY))), at=at, every=every)
    found = []
    for number in range(6):
        compared.rollout(mixed.prompts(FAMILY)[:1])
        if compared.pop_metrics():
            found.append(number)
    assert found == list(wanted)


def test_it_goes_around_a_gate_and_a_gate_around_it(exact, capsys):
    policy, asked = exact(FAMILY), mixed.prompts(FAMILY)
    for made in (
        SpeedupProbe(FidelityGate(cheap(policy, 16), num_tokens=2), at=0),
        FidelityGate(SpeedupProbe(cheap(policy, 16), at=0), num_tokens=2),
    ):
        assert texts(made.rollout(asked)) == texts(engine(policy).rollout(asked))
        assert capsys.readouterr().out.count("cache: 100.0%") == 1
        assert made.cache is not None and made.rollout_policy is policy


def test_an_engine_that_is_exact_is_refused(exact):
    with pytest.raises(ValueError, match="`speedup_probe` compares an accelerated engine with its policy"):
        SpeedupProbe(engine(exact(FAMILY)))
    with pytest.raises(ConfigError, match=".at' must be at least 0, not -1"):
        Pieces(Stream()).check("engine", Piece("compression.speedup_probe", {"at": -1}), "engine")
