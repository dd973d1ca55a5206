"""ADHint: hints by difficulty, and the factor of hinted successes."""

from __future__ import annotations

import pytest

from mmrl.advantages.normalize import group_normalize
from mmrl.core.rng import Stream
from mmrl.papers.adhint import WithDifficultyHints, scale_hinted
from mmrl.samplers.uniform import Uniform
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import hinted_prompts


def test_the_factor_stays_between_0_and_1_and_needs_plain_rows():
    harder = reward_table([1, 1, 1, 0], tags={"hint": ["", "", "partial", "partial"]})
    assert_rows(scale_hinted(harder, of="reward").values[:, 0, 0], [1, 1, 1, 0])  # (1 - 1/2) / eps
    alone = reward_table([1, 0], tags={"hint": ["partial", "partial"]})
    assert_rows(scale_hinted(alone, of="reward").values[:, 0, 0], [1, 0])
    solved = reward_table([0, 1], tags={"hint": ["", "partial"]})
    assert_rows(scale_hinted(solved, of="reward").values[:, 0, 0], [0, 0])


def test_hinted_successes_are_worth_the_share_of_the_difficulty_that_was_left():
    rewards, hints = [0, 0, 0, 1, 1, 1, 1, 0], ["", "", "", "", *["partial"] * 4]
    normalized = group_normalize(reward_table(rewards, tags={"hint": hints}), by=("group", "place", "hint"))
    scaled = scale_hinted(normalized, of="reward")
    # (1 - 3/4) / (1 - 1/4) = 1/3, of positive advantages of hinted rows only.
    factor = scaled.values / normalized.values
    assert_rows(factor[:, 0, 0], [1, 1, 1, 1, 1 / 3, 1 / 3, 1 / 3, 1])


def by_difficulty(**options):
    data = hinted_prompts(num=2)
    options = {"train_prompts": data, "hint_column": "solution", **options}
    return WithDifficultyHints(Uniform(data[:1], stream=Stream()), **options)


def test_half_of_a_group_gets_a_hint_that_grows_with_the_difficulty():
    sampler = by_difficulty(max_hint=1.0)
    drawn = sampler.draw(1, 4)
    assert [prompt.tags.get("hint", "") for prompt in drawn] == ["", "", "partial", "partial"]
    assert drawn[-1].text.endswith("Hint: First add. Then divide.")  # difficulty 1/2 of four sentences
    for _ in range(6):
        sampler.observe((), reward_table([0.0], group=["p0"]))
    # 1 - (0 + 1) / (6 + 2) = 7/8: three and a half sentences, rounded down.
    assert sampler.difficulty("p0") == 0.875
    assert sampler.draw(1, 2)[-1].text.endswith("Then divide. Then round.")
    assert sampler.pop_metrics() == {"hints/prompts": 2.0, "hints/share": pytest.approx((0.5 + 0.75) / 2)}


def test_answers_with_a_hint_do_not_count_for_the_difficulty():
    sampler = by_difficulty()
    sampler.observe((), reward_table([1.0, 0.0], group=["p0", "p0"], tags={"hint": ["partial", ""]}))
    assert sampler.difficulty("p0") == pytest.approx(1 - 1 / 3)


def test_an_easy_prompt_stays_plain():
    sampler = by_difficulty()
    for _ in range(8):
        sampler.observe((), reward_table([2.0], group=["p0"]))  # above the reward of a perfect answer
    # The tag is there, because the advantage reads it in every step.
    assert {prompt.tags["hint"] for prompt in sampler.draw(1, 4)} == {""}
