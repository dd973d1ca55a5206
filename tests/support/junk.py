"""Seeded junk: configuration files with values of wrong types, broken YAML and broken overrides."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import yaml

VALUES = (
    None, True, False, -1, 0, 1, 2, 7, 10**400, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    -float("inf"), "", " ", "0", "-1", "1e-3", "nan", "null", "${policy}", "${oc.env:HOME}", "a.b", "..",
    ":",
    "os:", ":path", "os:path", "os:nothing", "..os:path", "builtins:dict", "math:inf", "clip", "total", "é",
    "x" * 500, b"\xff\x00", [], {}, [[]], [{}], [None], [1, "a", None], [[[[1]]]], {"name": None},
    {"name": 3}, {"name": "clip"}, {"name": ["clip"]}, {"name": "linear", "start": 1, "end": 0, "steps": 4},
    {"name": "linear", "start": "a", "end": None, "steps": -4},
    {"name": "sliding_window", "start": 3, "stop": 1},
    {"name": "constant", "value": float("nan")}, {"name": "tests.support.junk:VALUES"},
    {"x": {"y": {"z": 1}}},
    {"0": 1}, {"99": {}}, {0: 1}, {None: 1}, {1.5: 2}, {True: 1}, {1: "a", "1": "b"}, {"": 1},
    {"name": "clip", "": 1}, {"weight": "a"}, {"name": "exact_match", "weight": [1]},
)  # fmt: skip
TEXTS = (
    b"", b"\x00\x01\x02", b"\xff\xfe\x00a", b"a: \xe9", b"\xef\xbb\xbf{}", b"- 1\n- 2\n", b"3", b"null",
    b"text", b"a: [1",
    b"a: 1\na: 2\n", b"{", b"\t", b"a: &x [*x]\n", b"a: &x {b: *x}\n", b"a: *missing\n",
    b"a: !!python/object:os.path {}\n",
    b"a: !!python/object/apply:os.getcwd []\n", b"a: !custom 3\n", b"!!binary aGVq\n",
    b"a: !!binary '###'\n",
    b"a: 2020-13-45\n", b"max_steps: 2020-01-01\n", b"a: !!set {x, y}\n", b"? [a, b]\n: 1\n",
    b"? {a: 1}\n: 1\n",
    b"--- \na: 1\n---\nb: 2\n", b"a: !!int x\n", b"a: !!float x\n", b"a: 1_0:6x\n", b"<<: 3\n",
    b"<<: [1, 2]\n",
    b"policy: &p {name: vision.tokens}\nreferences: {ref: *p}\n", b"a: " + b"[" * 3000,
    b"a: " + b"[" * 90 + b"]" * 90,
    b"include: 3\n", b"include: [1, 2]\n", b"include: [[a]]\n", b"include: {a: b}\n",
    b"include: [missing.yaml]\n",
    b"include: [junk.yaml]\n", b"include: ['']\n", b"include: [.]\n", b"include: ['a\\0b']\n",
    b"include: [null]\n",
    b"include: ['" + b"x" * 5000 + b"']\n", b"include: [/]\n", b"include: [~]\n",
    b"settings: {}\nevaluation: {}\npolicy: a\n", b"settings: {a: {b: 1}}\nevaluation: {}\npolicy: a\n",
    b"build: {}\noutput: 3\n", b"build: a\noutput: null\n", b"build: [a]\noutput: a\n",
    b"rollout: null\n", b"rollout: {}\n",
)  # fmt: skip
OVERRIDES = (
    "", "=", "=1", "a", "a=", "a=[1", "a={", "a=${b}", ".=1", "..=1", "a..b=1", "[0]=1", "a[=1", "a]=1",
    "a[x]=1",
    "a[0=1", "rewards[0]=1", "rewards[-1]=1", "rewards[99]=1", "rewards.0=null", "rewards.x=1",
    "policy=", "policy=[]",
    "policy.name=", "policy.name=3", "policy.name={}", "max_steps=1e400", "max_steps=.nan",
    "max_steps={a: 1}",
    "learn=3", "learn.learning_rate=.inf", "learn.learning_rate=[1]", "learn..learning_rate=1",
    "learn.=1", "\x00=1",
    "a=\x00", "a=&x [*x]", "a=!!python/name:os.path", "a=*b", "a=b=c", "max_steps=1=2", " =1", "é=1",
    "seed=99999999999999999999",
    "include=[a]", "include=3", "rollout.engine=3", "rollout.engine=null", "rollout.engine=[[]]",
    "objective=null", "x" * 300 + "=1",
)  # fmt: skip


def places(value: Any, here: tuple = ()) -> list[tuple]:
    """List the path of every value inside nested mappings and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, one in inner for path in places(one, (*here, key)))]


def mutate(raw: Any, draw: random.Random) -> Any:
    """Replace, remove, rename, double or add a value somewhere in a configuration."""
    raw = copy.deepcopy(raw)
    *path, last = draw.choice([path for path in places(raw) if path] or [("a",)])
    home = raw
    for key in path:
        home = home[key]
    junk = copy.deepcopy(draw.choice(VALUES))
    match draw.randrange(6):
        case 0 | 1 | 2:
            home[last] = junk
        case 3:
            home.pop(last, None) if isinstance(home, dict) else home.pop(last)
        case 4 if isinstance(home, dict):
            key = draw.choice(("name", "", "zzz", "weight", "include", "policy", "build", 0, None, 1.5, True))
            home[key] = home.pop(last, junk)
        case _ if isinstance(home, dict):
            key = draw.choice(("name", "stream", "generator", "weight", "on_error", "retries", f"{last}x"))
            home[key] = junk
        case _:
            home.insert(last, junk)
    return raw


def write(path: Path, configs: list[Any], draw: random.Random) -> tuple[Path, list[str]]:
    """Write a junk file at `path`, and draw overrides for it; sometimes the file is a folder or missing."""
    overrides = [draw.choice(OVERRIDES) for _ in range(draw.choice((0, 0, 0, 1, 2)))]
    match draw.random():
        case share if share < 0.02:
            return path.parent, overrides
        case share if share < 0.03:
            return path / "inside", overrides
        case share if share < 0.15:
            path.write_bytes(draw.choice(TEXTS))
            return path, overrides
    raw = draw.choice(configs)
    for _ in range(draw.choice((1, 1, 2, 4))):
        raw = mutate(raw, draw)
    path.write_bytes(yaml.safe_dump(raw, allow_unicode=True, sort_keys=False).encode())
    if draw.random() < 0.05:  # broken text: a piece is cut out of the file
        data = path.read_bytes()
        start = draw.randrange(len(data))
        broken = draw.choice((b"", b"\xff", b"\t", b"]"))
        path.write_bytes(data[:start] + broken + data[start + draw.randrange(9) :])
    return path, overrides
