"""MiMo-VL-Miloco's first stage: thoughts, and answers alone where they are asked for."""

from __future__ import annotations

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.config.stages import load_stages
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from tests.support.configs import CONFIGS

DIRECT = "Do not think first: give the answer alone."


def rows(*, count: int = 200, form: str = "<think>it is {}</think> <answer>{}</answer>"):
    """Make rows with a demonstration each."""
    asked = (Message("user", (Part("how many?"),)),)
    return [Prompt(f"r{i}", asked, str(i), (Outcome(form.format(i, i)),)) for i in range(count)]


def budgeted(seed=0, form=None, **options):
    inner = {"name": f"{__name__}:rows", **({"form": form} if form else {})}
    return Pieces(Stream(seed)).prompts(Piece("token_budget", {"data": inner, **options}), "data")


def test_half_of_the_rows_ask_for_the_answer_alone_and_show_it():
    prompts = budgeted()
    direct = [prompt for prompt in prompts if prompt.text.endswith(DIRECT)]
    assert 70 < len(direct) < 130  # 200 coins: 100 with a deviation of 7
    assert all(p.answers[0].text == f"<answer>{p.target}</answer>" for p in direct)
    thinking = [prompt for prompt in prompts if prompt not in direct]
    assert all(p.text == "how many?" and f"<think>it is {p.target}" in p.answers[0].text for p in thinking)
    assert budgeted() == prompts != budgeted(seed=1)


def test_without_a_share_all_rows_stay_and_without_thoughts_there_is_no_budget():
    assert budgeted(share=0.0) == rows() and budgeted(share=0.0, form="{}{}")[0].answers[0].text == "00"
    with pytest.raises(ConfigError, match="no demonstration with a block <think> in 200 rows"):
        budgeted(form="<answer>{}{}</answer>")


def test_the_first_stage_tunes_and_the_second_is_grpo():
    tune, grpo = load_stages(CONFIGS / "train/mimo_vl_miloco.yaml")
    assert [stage.config.data.options["share"] for stage in (tune, grpo)] == [0.5, 0.0]
    demos = [piece.get("demo") for piece in tune.config.data.options["data"]["data"][1:]]
    assert demos == ["<think>{thought}</think><answer>{answer}</answer>"] * 2
    assert [piece.name for piece in tune.config.advantage] == ["constant"]
    assert not tune.config.objective.options["penalty"]
    assert tune.config.rollout.engine[0].name == "offline" and tune.config.rollout.num_prompts == 128
    assert "demo" not in grpo.config.data.options["data"]["data"][1]
