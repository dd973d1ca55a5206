"""CRAFT-GUI: pools of prompts, their shares from stage to stage, and rewards of arguments."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from mmrl.cli import main
from mmrl.config.schema import ConfigError
from mmrl.core.answers import word_f1
from mmrl.core.types import Outcome, Prompt
from mmrl.papers.craft_gui import Pools, action_argument
from tests.support.observing import by_source, made, next_step, uids
from tests.support.toys import plan, prompts, toy_run

ABC = by_source(*"aaabbbccc")


def pools(**options):
    return made(Pools, data=ABC, **{"by": "source", "pools": ("a", "b", "c"), **options})


def counted(drawn):
    return Counter(prompt.columns["source"] for prompt in drawn)


def test_a_stage_keeps_a_share_of_earlier_pools():
    sampler = pools()
    assert list(sampler.shares.values()) == [1.0, 0.0, 0.0]
    sampler.stage = 1.0
    assert list(sampler.shares.values()) == pytest.approx([0.2, 0.8, 0.0])
    sampler.stage = 2.0
    assert list(sampler.shares.values()) == pytest.approx([0.1, 0.1, 0.8])
    sampler.stage = 9.0
    assert list(sampler.shares.values()) == pytest.approx([0.1, 0.1, 0.8]), "the last stage stays"


def test_earlier_pools_share_by_their_sizes():
    sampler = made(
        Pools, data=by_source(*"aaabcc"), by="source", pools=("a", "b", "c"), earlier=0.4, stage=2.0
    )
    assert list(sampler.shares.values()) == pytest.approx([0.3, 0.1, 0.6])


def test_stages_by_weights_are_interpolated():
    sampler = pools(stages=({"a": 1.0}, {"a": 1.0, "c": 3.0}), stage=0.5)
    assert list(sampler.shares.values()) == pytest.approx([0.625, 0.0, 0.375])


def test_a_draw_has_the_shares_on_average_and_nearly_each_time():
    sampler, drawn = pools(stages=({"a": 0.5, "b": 0.3, "c": 0.2},)), Counter()
    for _ in range(400):
        next_step(sampler)
        now = sampler.draw(4, 2)
        assert len(now) == 8 and len(set(uids(now))) == 4
        found = counted(now)
        assert found["a"] == 4 and found["b"] in (2, 4) and found["c"] in (0, 2)
        drawn += found
    assert drawn["b"] / 3200 == pytest.approx(0.3, abs=0.03)


def test_a_small_pool_leaves_its_part_to_the_others():
    sampler = pools(stages=({"a": 0.9, "b": 0.1},))
    assert counted(sampler.draw(5, 1)) == {"a": 3, "b": 2}
    assert counted(sampler.draw(9, 1)) == {"a": 3, "b": 3}, "and a pool without a share none"


def test_every_prompt_of_a_pool_comes_once_per_epoch():
    sampler = pools()
    epochs = [uids(sampler.draw(2, 1)) + uids(sampler.draw(1, 1)) for _ in range(3)]
    assert all(sorted(epoch) == ["p0", "p1", "p2"] for epoch in epochs)


def test_ranges_have_their_upper_end():
    # CRAFT-GUI: at most 3 steps, 4 to 7, 8 and more.
    data = [replace(prompts(num=12)[i], columns={"steps": i}) for i in range(12)]
    sampler = made(Pools, data=data, by="steps", pools=("short", "middle", "long"), edges=(3.0, 7.0))
    found = {name: [prompt.columns["steps"] for prompt in pool.data] for name, pool in sampler.pools.items()}
    assert found == {"short": [0, 1, 2, 3], "middle": [4, 5, 6, 7], "long": [8, 9, 10, 11]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "level"}, "prompt 'p0' has no column 'level'"),
        (
            {"pools": ("a", "b")},
            "the column 'source' has the value 'c', which is none of the pools a, b; add",
        ),
        ({"pools": ("a", "b", "c", "d")}, "the pool 'd' is empty.*there are a: 3, b: 3, c: 3, d: 0"),
        ({"pools": ("a", "b", "b")}, "two pools have one name"),
        ({"pools": ()}, "`pools` is empty"),
        ({"stages": ({"a": 1.0}, {"A": 1.0})}, r"stages\[1\]: no pool is called 'A'"),
        ({"stages": ({"a": 0.0},)}, r"the weights of stages\[0\] sum to 0, so there is nothing to draw"),
        ({"edges": (1.0,), "by": "difficulty"}, "3 pools need 2 `edges` between them, not 1"),
        ({"edges": (1.0, 2.0)}, "the column 'source' .* must hold numbers, but that of prompt 'p0' is 'a'"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        pools(**options)


def test_pools_tell_and_believe():
    sampler = pools(stages=({"a": 1.0, "b": 1.0},))
    sampler.draw(4, 1)
    assert sampler.pop_metrics()["sampler/share/b"] == 0.5
    assert sampler.pop_metrics()["sampler/entropy"] == pytest.approx(math.log(2) / math.log(3))
    assert (sampler.shares["a"], len(sampler.pools["a"].data), sampler.pools["a"].drawn) == (0.5, 3, 2)


def test_a_wrong_pool_ends_a_run_with_exit_code_2(tmp_path, capsys):
    data, sampler = "tests.support.observing:sourced", {"name": "pools", "by": "source", "pools": ["even"]}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(plan(tmp_path / "out", data=data, sampler=sampler)))
    assert main(["train", str(path)]) == 2
    assert "has the value 'odd', which is none of the pools even" in capsys.readouterr().err
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_the_stage_follows_a_schedule(tmp_path):
    stage = {"name": "sliding_window", "stop": 1, "every": 2, "roll_back": False}
    sampler = {"name": "pools", "by": "source", "pools": ["even", "odd"], "earlier": 0.0, "stage": stage}
    run = toy_run(tmp_path, data="tests.support.observing:sourced", sampler=sampler)
    asked = []
    for step in range(4):
        run.tick(step)
        asked.append({prompt.columns["source"] for prompt in run.method.sampler.draw(2, 1)})
    assert asked == [{"even"}, {"even"}, {"odd"}, {"odd"}]


CLICK = '{"action": "click", "value": null, "position": [0.2, 0.3]}'


def of_one(reward, target, text, **options):
    return reward([Prompt("a", (), target)], [Outcome(text=text)], **options)[0]


def act(action):
    return f"<think>\n\n</think><action>{action}</action>"


def click(x, y):
    return act(f"{{'action': 'CLICK', 'value': None, 'position': [{x}, {y}]}}")


def test_a_click_into_the_box_of_the_target_counts():
    target = {"action": "click", "bbox": [0.2, 0.2, 0.4, 0.4]}
    assert of_one(action_argument, target, click(0.4, 0.2)) == 1
    assert of_one(action_argument, target, click(0.41, 0.2)) == 0
    # A box is compared with a box: they share a half of each, so a third of both.
    boxed = act("{'action': 'click', 'bbox': [0.3, 0.2, 0.5, 0.4]}")
    assert of_one(action_argument, target, boxed) == pytest.approx(1 / 3)
    assert of_one(action_argument, CLICK, click(0.34, 0.3)) == 1
    assert of_one(action_argument, CLICK, click(0.5, 0.5)) == 0


@pytest.mark.parametrize(
    "text", [None, "", "<action></action>", act("__import__('os').getcwd()"), act("[" * 3000)]
)
def test_an_answer_that_cannot_be_read_earns_0(text):
    assert of_one(action_argument, CLICK, text) == 0


def test_a_text_earns_the_f1_of_its_words():
    target = {"action": "type", "value": "cheap flights to Rome"}
    said = lambda words: act(f"{{'action': 'type', 'value': '{words}'}}")
    assert of_one(action_argument, target, said("Cheap flights, to Rome!")) == 1
    # 2 of 3 words, of 4 wanted: 2 * 2 / (3 + 4).
    assert of_one(action_argument, target, said("flights to Paris")) == pytest.approx(4 / 7)
    assert of_one(action_argument, target, said("")) == 0
    assert word_f1("...", "...") == 1 and word_f1("", "...") == 0


def test_an_action_without_an_argument_earns_its_type_and_a_question_is_for_a_judge():
    assert of_one(action_argument, {"action": "back"}, act("{'action': 'back'}")) == 1
    assert of_one(action_argument, {"action": "back"}, click(0, 0)) == 0
    assert of_one(action_argument, {"action": "answer", "value": "7"}, act("{'action': 'answer'}")) is None
