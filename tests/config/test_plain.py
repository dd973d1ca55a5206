"""Plain values: pieces as mappings, one value or several, dotted keys."""

from __future__ import annotations

import io
import random
from enum import StrEnum
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from mmrl.config.loading import ConfigError, merge
from mmrl.config.plain import ABSENT, as_list, as_mapping, check_finite, lookup, nested, to_yaml

RAW = {
    "sampler": "uniform",
    "rewards": ["a", {"name": "b", "weight": None}],
    "learn": {"learning_rate": 0.1},
    "changed": {0: "by number", "1": "by text"},
}


def test_a_name_and_a_mapping_are_the_same_piece():
    given = {"name": "clip"}
    assert as_mapping("clip") == as_mapping(given) == given
    as_mapping(given)["epsilon"] = 0.2
    assert given == {"name": "clip"}, "it is a copy"


@pytest.mark.parametrize(
    ("value", "listed"), [(None, []), ([], []), ("ab", ["ab"]), ((1, 2), [1, 2]), ([None], [None]), (0, [0])]
)
def test_one_value_and_several_are_listed(value, listed):
    assert as_list(value) == listed


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("learn.learning_rate", 0.1),
        ("sampler.name", "uniform"),
        ("sampler.shuffle", ABSENT),
        ("rewards.0.name", "a"),
        ("rewards.1.name", "b"),
        ("rewards.1.weight", None),
        ("rewards.2", ABSENT),
        ("rewards.2.name", ABSENT),
        ("learn.learning_rate.start", ABSENT),
        ("changed.0", "by number"),
        ("changed.1", "by text"),
    ],
)
def test_a_dotted_key_is_looked_up(key, found):
    assert lookup(RAW, key, ABSENT) is found


def test_dotted_keys_are_nested_and_later_ones_win():
    changes = nested({"learn.minibatches": 2, "rewards.0.weight": 3, "learn.learning_rate": 1})
    assert changes == {"learn": {"minibatches": 2, "learning_rate": 1}, "rewards": {"0": {"weight": 3}}}
    assert merge(RAW, changes)["rewards"] == [{"name": "a", "weight": 3}, RAW["rewards"][1]]
    assert nested({"a": 1, "a.b": 2}) == {"a": {"b": 2}}


@pytest.mark.parametrize(("value", "words"), [({"b": [0.0, float("nan")]}, r"a\.b\[1\]"), (1 << 63, "64")])
def test_a_number_that_no_computation_survives_is_an_error_with_its_place(value, words):
    with pytest.raises(ConfigError, match=words):
        check_finite(value, "a")


def reads(text):
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def test_written_values_are_what_omegaconf_writes_and_reads():
    random.seed(0)
    words = [
        "1e5",
        "1_000",
        "nan",
        ".inf",
        "~",
        "on",
        "0x1F",
        "1:30",
        "2020-01-01",
        "",
        "\n",
        "a: b",
        "\x85",
        "é",
    ]
    words += [
        "".join(random.choices("0123456789eE+-._:anx~'\" #\n", k=random.randint(1, 6))) for _ in range(500)
    ]
    for value in (*words, 1e-5, 1e22, -3.5e-12, 10**18, True, None, [], {}, {4: "a"}, [[1.0, "1.0"]]):
        assert reads(to_yaml({"key": value})) == {"key": value}
    for value in (RAW, {"text": "a 'quoted' one", "rates": [1e-6, 0.5], "none": None, "long": "word " * 40}):
        assert to_yaml(value) == OmegaConf.to_yaml(OmegaConf.create(value))


def test_paths_and_enums_of_a_program_are_written_as_plain_values():
    kind = StrEnum("Kind", {"FIRST": "one"})
    assert reads(to_yaml({"path": Path("a/b"), "kind": kind.FIRST})) == {"path": "a/b", "kind": "one"}
    for other in ({1, 2}, object()):
        with pytest.raises(yaml.YAMLError):
            to_yaml({"other": other})
