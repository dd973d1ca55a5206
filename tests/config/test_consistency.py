"""What the parts of a configuration need of each other: outcomes of every turn, engines that fit."""

from __future__ import annotations

import re

import pytest

from mmrl.build import check
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, ConfigError, parse
from tests.support.configs import CONFIGS, method_file

PLAYED = [{"name": "play", "game": "tests.support.playing:Telephone"}]


def tools(variant=None, every=True, after=(), **changes):
    """Lay a method over the ready run with tools."""
    raw = read(CONFIGS / "train" / "tools.yaml")
    assert raw["rollout"]["engine"][1]["turn_outcomes"] is True
    if variant:
        raw = merge(merge(raw, read(method_file(variant))), {"group_filter": "keep_all"})
    generate, with_tools = raw["rollout"]["engine"]
    engine = [generate, {**with_tools, "turn_outcomes": every}, *after]
    return parse(merge(raw, {"rollout": {"engine": engine}, **changes}), Config)


@pytest.mark.parametrize("variant", ["gigpo", "hgpo", "gui_owl", "matchtir", "verpo"])
def test_methods_of_turns_need_an_outcome_of_every_turn(variant):
    check(tools(variant))
    wanted = (
        r"advantage\[\d\]: '\w+' needs an outcome of every turn, but the engine 'vision.with_tools' makes "
        "one of the last turn alone; set `turn_outcomes: true`"
    )
    with pytest.raises(ConfigError, match=wanted):
        check(tools(variant, every=False))
    check(tools(variant, every=False, after=PLAYED))  # every turn of a game is a row


@pytest.mark.parametrize("variant", [None, "otc_po", "e_grpo", "slate", "graphrag_r1", "cm2"])
@pytest.mark.parametrize("every", [False, True])
def test_other_methods_take_either(variant, every):
    check(tools(variant, every=every))


def test_metrics_of_turns_need_them_where_they_measure():
    check(tools(metrics=["turns"]))
    with pytest.raises(ConfigError, match=r"metrics\[0\]: 'turns' needs an outcome of every turn"):
        check(tools(every=False, metrics=["turns"]))
    held_out = {
        "data": {"name": "vision.visual_qa", "path": "data/small_things/test.jsonl"},
        "engine": [{"name": "vision.generate"}, {"name": "vision.with_tools", "tool": ["vision.crop"]}],
        "metrics": ["turns"],
    }
    with pytest.raises(ConfigError, match=r"evaluation.metrics\[0\]: 'turns' needs an outcome of every turn"):
        check(tools(evaluation=held_out))


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        (
            {"name": "vision.with_tools", "tool": ["vision.crop"]},
            "vision.with_branches",
            "wraps 'vision.generate' or 'vision.vllm', not 'vision.with_tools'; conversations with tools "
            "part at their turns with `vision.with_turn_branches`",
        ),
        (
            {"name": "vision.with_environments", "environment": "vision.grid_world"},
            {"name": "vision.with_turn_branches", "tool": ["vision.crop"]},
            "wraps 'vision.generate' or 'vision.openai_server' or 'vision.vllm', not "
            "'vision.with_environments'; it takes the place of "
            "`vision.with_tools`, with the same `tool`; the state of an environment cannot be copied",
        ),
        (
            "vision.with_greedy",
            "vision.with_exits",
            "wraps 'vision.generate' or 'vision.vllm', not 'vision.with_greedy'",
        ),
    ],
)
def test_an_engine_that_calls_the_parts_of_another_wraps_that_one_alone(inner, outer, message):
    raw = read(CONFIGS / "train" / "tools.yaml")
    engine = [raw["rollout"]["engine"][0], inner, outer]
    with pytest.raises(ConfigError, match=re.escape(f"rollout.engine[2]: '{named(outer)}' {message}")):
        check(parse(merge(raw, {"rollout": {"engine": engine}}), Config))


@pytest.mark.parametrize("replay", ["with_replay", "with_contrast", "with_successes"])
def test_replay_around_games_would_store_nothing(replay):
    raw = merge(read(CONFIGS / "train" / "tools.yaml"), read(method_file("grpo")))
    check(parse(merge(raw, {"rollout": {"engine": ["vision.generate", replay]}}), Config))
    tools = {"tool": ["vision.crop"]}
    engine = ["vision.generate", {"name": "vision.with_tools", **tools}, replay]
    check(parse(merge(raw, {"rollout": {"engine": engine}}), Config))
    engine[1] = {"name": "vision.with_step_candidates", **tools, "reward": ["think_format"]}
    with pytest.raises(ConfigError, match=f"'{replay}' would store nothing: .*with_step_candidates' answers"):
        check(parse(merge(raw, {"rollout": {"engine": engine}}), Config))


def test_visualizations_want_an_evaluation():
    raw = merge(read(CONFIGS / "train" / "image_flow_grpo.yaml"), {"evaluation": None})
    raw |= {"report": {"visualizations": ["diffusion.image_grid"]}, "eval_steps": 0}
    with pytest.raises(ConfigError, match="draw what an evaluation answered, and this run has none"):
        check(parse({name: value for name, value in raw.items() if name != "evaluation"}, Config))


def named(piece):
    return piece if isinstance(piece, str) else piece["name"]


@pytest.mark.parametrize(
    ("engine", "leaves"),
    [({"name": "vision.with_branches", "branching": [3, 2], "segment_length": 4}, 6),
     ({"name": "vision.with_branches", "segment_length": 4}, 36),
     ({"name": "vision.with_turn_branches", "tool": ["vision.crop"], "branching": [5], "max_turns": 3}, 5)],
)  # fmt: skip
def test_the_answers_to_a_prompt_fill_trees_before_a_model_is_loaded(engine, leaves):
    raw = merge(read(CONFIGS / "train" / "tools.yaml"), read(method_file("grpo")))

    def asked(number):
        rollout = {"engine": ["vision.generate", engine], "num_generations": number}
        return parse(merge(raw, {"rollout": rollout}), Config)

    check(asked(2 * leaves))
    wanted = (
        rf"rollout.num_generations is {leaves + 1}, but '{engine['name']}' makes multiples of {leaves} "
        rf"answers, the product of rollout.engine\[1\].branching; ask for {2 * leaves}, or change 'branching'"
    )
    with pytest.raises(ConfigError, match=wanted):
        check(asked(leaves + 1))
