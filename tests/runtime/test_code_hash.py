"""The hash of a function changes with what it computes, and with nothing else."""

from __future__ import annotations

import functools
import importlib
import sys

import pytest

from mmrl.config.registry import find
from mmrl.runtime.code_hash import of_code

SOURCE = """
import re
WORDS = {"a": 1}
LIMIT = 3
SEEN, COUNT, CACHE = [], 0, {}
PATTERN = re.compile("x")

def helper(text, scale=2):
    return scale * len(text)

def outer(bonus):
    def inner(prompts, completions):
        return [bonus for _ in completions]
    return inner

def plain(prompts, completions):
    global COUNT
    COUNT += 1
    SEEN.append(len(completions))
    scores = []
    for text in completions:
        scores.append(WORDS.get(text, 0) + helper(text) + LIMIT + bool(PATTERN.search(text)))
    return scores

class Judge:
    scale = 1
    def __init__(self, bonus):
        self.bonus, self.calls, self.known = bonus, 0, {}
    def __call__(self, prompts, completions):
        self.calls += 1
        self.known[self.calls] = len(completions)
        return [self.bonus * self.scale for _ in completions]

judge, closed = Judge(1), outer(0.5)
"""


def made(name, old="", new=""):
    assert old in SOURCE
    space = {"__name__": "a_notebook"}
    exec(SOURCE.replace(old, new), space)
    return space[name]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plain", "scores = []", "scores = [9]"),
        ("plain", '"a": 1', '"a": 2'),
        ("plain", "LIMIT = 3", "LIMIT = 4"),
        ("plain", 'compile("x")', 'compile("y")'),
        ("plain", "scale * len", "scale + len"),
        ("plain", "scale=2", "scale=3"),
        ("closed", "outer(0.5)", "outer(0.6)"),
        ("closed", "[bonus for", "[-bonus for"),
        ("judge", "Judge(1)", "Judge(2)"),
        ("judge", "scale = 1", "scale = 2"),
        ("judge", "self.bonus * self", "self.bonus + self"),
    ],
)
def test_what_changes_the_numbers_changes_the_hash(name, old, new):
    assert of_code(made(name)) == of_code(made(name))
    assert of_code(made(name)) != of_code(made(name, old, new))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plain", "    global", '    "What it does."\n    # why\n\n    global'),
        ("judge", "    scale = 1", "    # a remark\n    scale = 1"),
        ("plain", "SEEN, COUNT, CACHE = [], 0, {}", "SEEN, COUNT, CACHE = [1], 7, {}"),
        ("plain", "judge, closed = Judge(1)", "judge, closed = Judge(9)"),
    ],
)
def test_remarks_and_what_is_not_read_change_nothing(name, old, new):
    assert of_code(made(name)) == of_code(made(name, old, new))


@pytest.mark.parametrize("name", ["plain", "judge", "closed"])
def test_running_changes_nothing(name):
    function = made(name)
    before = of_code(function)
    function(["q"], ["a", "bc"])
    assert of_code(function) == before


def test_arguments_that_were_bound_count():
    one, other = (functools.partial(made("plain"), scale=scale) for scale in (1, 2))
    assert of_code(one) != of_code(other)
    assert of_code(functools.cache(made("closed"))) != of_code(functools.cache(made("closed", "0.5", "0.7")))


def test_pieces_of_the_library_have_hashes_of_their_own():
    names = [("advantage", "group_normalize"), ("advantage", "total"), ("objective", "policy_gradient")]
    assert len({of_code(find(*name).target) for name in names}) == 3


@pytest.mark.parametrize("how", ["import rules", "from rules import right", "import rules.right as rules"])
def test_what_a_function_imports_when_it_runs_counts(how, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    called = "right" if how.startswith("from") else "rules.right"
    space = {"__name__": "asking", "__package__": ""}
    exec(f"def plain(prompts, completions):\n    {how}\n    return {called}(completions)", space)
    hashes = []
    for value in (1, 1, 2):
        file = tmp_path / ("rules/right.py" if "." in how else "rules.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"def right(texts):\n    return [{value}]  # {len(hashes)}\n")
        for name in ("rules", "rules.right"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        hashes.append(of_code(space["plain"]))
    assert hashes[0] == hashes[1] != hashes[2]
