"""Tasks on web pages without a browser: pages, targets, scores, actions, and what must be installed."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from mmrl.build import build
from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, ConfigError, Piece, parse
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call, parse_calls
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_environments import WithEnvironments
from mmrl.vision.environments import browser, chromium
from mmrl.vision.environments.browser import KEYS, SCROLL, Browser, as_input
from mmrl.vision.environments.browser_tasks import COLORS, KINDS, TASK_NAMES, make_task
from mmrl.vision.environments.chromium import READ_FIELDS
from mmrl.vision.tools.functions import Tool, bind_call
from tests.vision import tiny


class Fields(HTMLParser):
    """The values of the fields of a page by name, and everything that a page could load or run."""

    def __init__(self, html):
        super().__init__()
        self.fields, self.active = {}, []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("input", "option"):
            self.fields.setdefault(given.get("name", "answer"), []).append(given.get("value"))
        if tag in ("script", "iframe", "form", "a", "img", "link") or {"src", "href"} & given.keys():
            self.active.append(tag)
        self.active += [name for name in given if name.startswith("on")]


@pytest.mark.parametrize("name", TASK_NAMES)
def test_a_task_follows_its_seed_and_can_be_done_on_its_page(name):
    one = make_task(name, 7)
    assert one == make_task(name, 7)
    drawn = [make_task(name, seed) for seed in range(40)]
    assert len({task.html for task in drawn}) > 10 or name == "type_word"  # a page with an empty field
    for task in drawn:
        page = Fields(task.html)
        assert page.active == [] and "{" + "{" not in task.html
        wanted = task.target.get("answer") or task.target["end"]
        assert all(word in task.goal for word in wanted) and len(wanted) == KINDS[name].wanted
        for field, values in task.target.items():
            assert set(values) <= set(page.fields[field]) or name == "type_word"
        assert set(page.fields) == set(task.target)  # so that the state of a page has these names
        assert task.reward(task.target) == 1.0
        assert task.reward({**task.target, "end": []}) == 0.0  # all done, but not submitted
        if "answer" in task.target:
            assert task.reward({**task.target, "answer": [*wanted, "more"]}) == 0.0


def test_choices_lie_on_different_cells_and_lists_are_scrolled():
    for seed in range(20):
        page = make_task("click_color", seed, cells=2).html
        places = re.findall(r"grid-area: (\d) / (\d); background: (#\w+)", page)
        assert len({place[:2] for place in places}) == 4
        assert len({place[2] for place in places} & set(COLORS.values())) == 4
        task = make_task("scroll_list", seed)
        assert Fields(task.html).fields["end"].index(*task.target["end"]) >= 6


def called(text):
    """Read and bind a call as an engine does."""
    (call,) = parse_calls(text)
    environment = Browser.__new__(Browser)
    return bind_call(call, {"computer_use": Tool.of(environment.computer_use)}, [])


def test_a_call_of_qwen_is_bound_to_the_action():
    tool, arguments = called(
        '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [24, 8]}}'
        "\n</tool_call>"
    )
    assert tool.name == "computer_use" and arguments == ["left_click", [24, 8], None, None, None, None]
    for wrong in (
        '"drag", "coordinate": [1, 2]',
        '"left_click", "coordinate": [1, "x"]',
        '"type", "text": 3',
    ):
        error = called(
            f'<tool_call>\n{{"name": "computer_use", "arguments": {{"action": {wrong}}}}}\n</tool_call>'
        )
        assert str(error).startswith("computer_use: ")


def test_actions_become_inputs_of_the_page():
    def of(action, reach=224, **given):
        return as_input(action, given, 224, reach)

    assert of("left_click", coordinate=[24, 8]) == ("mouse.click", 24, 8)
    assert of("left_click", coordinate=[224, 0]) == ("mouse.click", 223, 0)  # the last pixel
    assert of("double_click", 1000, coordinate=[500, 250]) == ("mouse.dblclick", 112, 56)
    assert of("type", text="Milk") == ("keyboard.insert_text", "Milk")
    assert of("key", keys=["Ctrl", "a"]) == ("keyboard.press", "Control+a")
    assert of("scroll", pixels=-100) == ("evaluate", SCROLL, 100)  # down
    assert of("terminate", status="success") is None


@pytest.mark.parametrize(
    ("action", "given", "said"),
    [
        ("left_click", {"coordinate": [225, 3]}, r"must be \[x, y\] from 0 to 224, not \[225, 3\]"),
        ("left_click", {"coordinate": [3]}, "must be"),
        ("left_click", {}, "left_click takes `coordinate`, not nothing"),
        ("type", {"coordinate": [3, 3]}, "type takes `text`, not coordinate"),
        ("type", {"text": "a" * 201}, "has 201 characters; the limit is 200"),
        ("key", {"keys": ["ctrl", "w"]}, "there is no key 'ctrl.w'; there are enter"),
        ("scroll", {"pixels": 1e9}, "must be at most 10000"),
    ],
)
def test_actions_that_cannot_be_made_are_told(action, given, said):
    with pytest.raises(ValueError, match=said):
        as_input(action, given, 224, 224)
    assert "ctrl+w" not in KEYS  # nothing that closes a page or opens another


class Chrome:
    """Stands for Chromium and its page: takes inputs, and shows the fields that they make."""

    def __init__(self, fields=()):
        self.fields, self.inputs, self.closed = [*fields], [], 0
        self.mouse = self.keyboard = self

    def run(self, work):
        return asyncio.run(work)

    async def screenshot(self):
        file = io.BytesIO()
        Image.new("RGB", (28, 28), (len(self.inputs), 0, 0)).save(file, "PNG")
        return file.getvalue()

    async def first(self, html, size):
        return await self.screenshot()

    async def open(self, html, size):
        return self

    async def click(self, *place):
        self.inputs.append(place)

    async def evaluate(self, script):
        assert script == READ_FIELDS
        return self.fields.pop(0)

    def close(self, page):
        self.closed += 1


def test_a_task_goes_on_until_a_field_ends_it(monkeypatch):
    target = make_task("click_color", 5).target
    chrome = Chrome([{"end": []}, target])
    monkeypatch.setattr(browser, "chromium", lambda executable: chrome)
    game = Browser(tasks=("click_color",), size=28)
    text, image = game.reset(seed=5)
    assert text["text"] == make_task("click_color", 5).goal and image["image"].size == (28, 28)
    (shown,) = game.computer_use("left_click", coordinate=[3, 4])
    assert shown["image"].getpixel((0, 0)) == (1, 0, 0)
    assert game.computer_use("left_click", coordinate=[5, 6]) == ["The task is over."]
    assert chrome.inputs == [(3, 4), (5, 6)]
    with pytest.raises(ValueError, match="the task is over"):
        game.computer_use("left_click", coordinate=[5, 6])
    assert game.get_reward() == 1.0 and chrome.closed == 1
    with pytest.raises(ValueError, match="there is no task 'fly'; there are click_button"):
        game.reset(task="fly")


def test_a_task_without_an_end_has_no_reward_and_a_failed_browser_none_at_all(monkeypatch):
    chrome = Chrome()
    monkeypatch.setattr(browser, "chromium", lambda executable: chrome)
    game = Browser()
    game.reset(seed=5)
    assert game.computer_use("terminate", status="success") == ["The task is over."]
    assert game.get_reward() == 0.0 and chrome.closed == 0  # no page was opened
    game = Browser()
    game.reset(seed=5)
    with pytest.raises(IndexError):  # of the empty list of fields
        game.computer_use("left_click", coordinate=[3, 4])
    with pytest.raises(RuntimeError, match="the browser failed during the task"):
        game.get_reward()
    del game
    gc.collect()
    assert chrome.closed == 1


def test_a_rollout_records_the_reward_of_the_page(monkeypatch, exact):
    click = Call("computer_use", {"action": "left_click", "coordinate": [3, 4]})

    class Scripted(WithEnvironments):
        parse = staticmethod(lambda text: [click])

        def _choose(self, talks, *rest):  # what the tiny model writes has no end
            super()._choose(talks, *rest)
            for talk in talks:
                talk.finish = ""

    target = make_task("click_color", 5).target
    monkeypatch.setattr(browser, "chromium", lambda executable: Chrome([{"end": []}, target]))
    inner = Generate(exact("qwen2_5_vl"), stream=Stream(0), max_completion_length=3)
    made = Pieces(Stream(0)).make("environment", Piece("vision.browser", {"size": 28}))
    engine = Scripted(inner, stream=Stream(0), environment=made, max_turns=3)
    columns = {"task": "click_color", "seed": 5}
    prompt = replace(tiny.ask("p", tiny.picture(), "look"), columns=columns)
    one, other = engine.rollout([prompt, prompt])
    for row in (one, other):
        assert row.outcomes[-1].recorded == {"browser": 1.0}
        assert row.outcomes[-1].environment.page.inputs == [(3, 4)] * 2
        assert "The task is over." in row.logged["conversation"]
        assert len(row.shown) == 1
    assert one.steps.prompt is other.steps.prompt


PLAN = {
    "policy": {"name": "vision.tokens", "model": "nowhere"},
    "data": {"name": "vision.conversations", "path": "nowhere.jsonl"},
    "rewards": [{"name": "precomputed", "key": "browser"}],
    "advantage": ["group_normalize"],
    "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
    "rollout": {"engine": [{"name": "vision.generate"}, {"name": "vision.with_environments"}]},
}


def test_a_missing_package_or_program_is_named_before_anything_is_loaded(monkeypatch, tmp_path):
    def plan(**environment):
        generate, play = PLAN["rollout"]["engine"]
        engines = [generate, {**play, "environment": {"name": "vision.browser", **environment}}]
        return parse({**PLAN, "rollout": {"engine": engines}, "output_dir": str(tmp_path)}, Config)

    monkeypatch.setitem(sys.modules, "playwright", None)
    with pytest.raises(ConfigError, match=r"needs the package playwright, .*pip install 'mmrl\[browser\]'"):
        build(plan())
    monkeypatch.setitem(sys.modules, "playwright", sys)  # as if it were installed
    monkeypatch.setattr(chromium, "EXECUTABLES", ("no-chromium",))
    with pytest.raises(
        ConfigError, match=r"executable of Chromium beside pip install 'mmrl\[browser\]': none of"
    ):
        build(plan())
    with pytest.raises(ConfigError, match="'/opt/none' is no program that can be run"):
        build(plan(executable="/opt/none"))
    with pytest.raises(ConfigError, match="tasks"):
        build(plan(tasks=["click_link"]))
