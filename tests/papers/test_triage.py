"""Triage of conversations by signals: the worked score, qualities, draws and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mmrl.config.schema import ConfigError
from mmrl.papers.triage import Triage, quality_of, quality_score
from tests.support.observing import made, next_step, uids
from tests.support.toys import prompts


def with_signals(*signals):
    return [
        replace(prompts(num=len(signals))[i], columns={"signals": counted})
        for i, counted in enumerate(signals)
    ]


@pytest.mark.parametrize(
    ("signals", "score"),
    [
        ({}, 50.0),
        ({"satisfaction": 1, "failures": 2, "loops": 1}, 41.0),  # 50 + 12 - 16 - 5
        ({"satisfaction": 2}, 66.0),
        ({"satisfaction": 9}, 69.0),
        ({"disengagement_severity": 2}, 30.0),
        ({"misalignment_severity": 1, "misalignment_ratio": 0.3}, 50.0),
        ({"misalignment_severity": 1, "misalignment_ratio": 0.31}, 35.0),
        ({"stagnation_severity": 2, "stagnation_count": 2}, 50.0),
        ({"stagnation_severity": 2, "stagnation_count": 3, "exhaustions": 1}, 31.0),
        ({"failures": 40}, 0.0),
    ],
)
def test_the_score_of_the_source(signals, score):
    assert quality_score(signals) == pytest.approx(score)


@pytest.mark.parametrize(
    ("signals", "quality"),
    [
        ({"satisfaction": 3}, "good"),
        ({}, "neutral"),
        ({"failures": 2}, "poor"),
        ({"failures": 4}, "severe"),
        ({"satisfaction": 3, "escalations": 1}, "severe"),
        ({"satisfaction": 3, "misalignment_severity": 3}, "severe"),
    ],
)
def test_qualities_have_least_scores_and_escalation_is_severe(signals, quality):
    assert quality_of(signals) == quality


def test_draws_follow_the_weights_whatever_the_sizes():
    data = with_signals(*[{}] * 20, *[{"failures": 4}] * 3, {"satisfaction": 2})
    sampler, drawn = made(Triage, data=data, weights={"neutral": 1.0, "severe": 3.0}), Counter()
    for _ in range(400):
        next_step(sampler)
        drawn.update("severe" if uid in ("p20", "p21", "p22") else uid for uid in uids(sampler.draw(1, 1)))
    assert drawn["severe"] / 400 == pytest.approx(0.75, abs=0.06) and drawn["p23"] == 0
    assert len(set(uids(sampler.draw(30, 1)))) == 23, "the good one has no weight"
    assert sampler.scores[20] == 18.0 and float(sampler.weights[sampler.among.source[20]]) == 0.75
    assert sampler.pop_metrics()["sampler/share/good"] == 0.0


@pytest.mark.parametrize(
    ("signals", "options", "words"),
    [
        ({}, {"by": "log"}, "prompt 'p0' has no column 'log'"),
        ({"failure": 1}, {}, "the signals of prompt 'p0' must be numbers from 0 .* not 'failure': 1"),
        ({"failures": -1}, {}, "not 'failures': -1"),
        (["failures"], {}, r"not \['failures'\]"),
        ({}, {}, "no prompt has a quality with a weight above 0; there are neutral"),
        ({}, {"weights": {"netural": 1.0}}, "no quality is called 'netural' .*'neutral'"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(signals, options, words):
    with pytest.raises(ConfigError, match=words):
        made(Triage, data=with_signals(signals), **options)
