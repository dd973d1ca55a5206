"""open-rs: rewards of length and of a closed thought, by its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.loading import read
from mmrl.config.schema import as_piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.papers.open_rs import think_closed


def scored(text, length, target="7", **options):
    piece = {"name": "cosine_length", "reward": "exact_match", "max_completion_length": 3584, **options}
    bound = Pieces(Stream()).make("reward", as_piece(piece, "rewards[0]"))
    (value,) = bound([Prompt("p", (), target)], [Outcome(text=text, end=length)])
    return value


@pytest.mark.parametrize(
    ("text", "wanted"), [("<answer>7</answer>", [1, 0.75, 0.5]), ("<answer>8</answer>", [-1, -0.75, -0.5])]
)
def test_cosine_length_at_its_start_its_middle_and_its_end(text, wanted):
    assert [scored(text, length) for length in (0, 1792, 3584)] == pytest.approx(wanted)


def test_cosine_length_as_the_script_of_open_rs_has_it():
    values = [scored("<answer>8</answer>", length, wrong=[0.0, -0.5]) for length in (0, 1792, 3584)]
    assert values == pytest.approx([0, -0.25, -0.5])


def test_cosine_length_beyond_the_limit_and_in_characters():
    right = "<answer>7</answer>"  # of 18 characters
    assert scored(right, 7168) == 0.5 and scored(right, 7168, clamp=False) == pytest.approx(1.0)
    assert scored(right, 0, unit="characters", max_completion_length=18) == pytest.approx(0.5)
    assert scored(right, None, unit="characters", max_completion_length=36) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="counts steps, but the outcome of prompt 'p' has none"):
        scored(right, None)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("so\n</think>\n7", 1), ("so </think> 7", 0), ("a\n</think>\nb\n</think>\n7", 0), ("", 0)],
)
def test_think_closed_wants_one_line_that_ends_the_thought(text, wanted):
    assert think_closed([Prompt("p", ())], [Outcome(text=text)]) == [wanted]


def test_the_thought_counts_once_and_the_length_twice():
    path = Path(__file__).parents[2] / "configs" / "methods" / "grpo" / "open_rs.yaml"
    rewards = [Pieces(Stream()).make("reward", as_piece(one, "rewards")) for one in read(path)["rewards"]]
    assert {reward.name: reward.weight for reward in rewards} == {"think_closed": 1.0, "cosine_length": 2.0}
