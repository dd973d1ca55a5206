"""Configuration: includes, merging, overrides, strict checks, and what is written can be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

from mmrl.config.loading import merge, read
from mmrl.config.schema import (
    BuildConfig,
    Config,
    ConfigError,
    Learn,
    Piece,
    as_plain,
    as_yaml,
    convert,
    load,
    parse,
    parse_some,
)

WHOLE = {
    "policy": {"name": "some.policy", "lora_rank": 4},
    "data": "some.data",
    "rollout": {"engine": ["some.engine", {"name": "with_demos", "per_group": 2}], "num_generations": 4},
    "rewards": [{"name": "exact_match", "weight": 0.5}],
    "advantage": ["total", "group_normalize"],
    "objective": {"name": "policy_gradient", "surrogate": {"name": "clip", "epsilon": 0.2}},
}


@pytest.fixture
def file(tmp_path):
    """Write YAML files into one folder."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return make


# ---- including and merging


def test_a_file_builds_on_those_it_includes_and_later_keys_win(file):
    file("base.yaml", "a: 1\nb: {x: 1, y: 2}\n")
    file("other.yaml", "a: 2\nc: [1, 2]\n")
    path = file("run.yaml", "include: [base.yaml, other.yaml]\nb: {y: 3}\nc: [9]\n")
    assert read(path) == {"a": 2, "b": {"x": 1, "y": 3}, "c": [9]}


def test_includes_are_found_beside_the_file_that_names_them(file):
    file("variants/one.yaml", "include: [two.yaml]\nb: 1\n")
    file("variants/two.yaml", "a: 1\n")
    assert read(file("run.yaml", "include: [variants/one.yaml]\n")) == {"a": 1, "b": 1}


def test_a_file_that_includes_itself_is_an_error(file):
    file("one.yaml", "include: [two.yaml]\n")
    with pytest.raises(ConfigError, match="includes itself"):
        read(file("two.yaml", "include: [one.yaml]\n"))


def test_a_file_that_is_not_there_is_named_with_the_places_looked_at(file, tmp_path):
    path = file("run.yaml", "include: [missing.yaml]\n")
    with pytest.raises(
        ConfigError, match="no file 'missing.yaml', included by '.*run.yaml'; looked at .*missing"
    ):
        read(path)
    with pytest.raises(ConfigError, match="no file '.*nothing.yaml'; looked at"):
        read(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("text", ["a: [1\n", "a: 1\n  b: 2\n", "\x00"])
def test_a_file_that_is_no_yaml_is_named(file, text):
    with pytest.raises(ConfigError, match="cannot read '.*broken.yaml'"):
        read(file("broken.yaml", text))


def test_a_file_must_hold_a_mapping(file):
    with pytest.raises(ConfigError, match="must hold a mapping at its top, not a list"):
        read(file("list.yaml", "[1, 2]\n"))


def test_lists_replace_and_mappings_merge():
    assert merge({"a": [1, 2], "b": {"x": 1}}, {"a": [3], "b": {"y": 2}}) == {"a": [3], "b": {"x": 1, "y": 2}}


def test_options_merge_into_a_piece_of_the_same_name_and_another_name_replaces_it():
    clip = {"name": "clip", "epsilon": 0.2}
    assert merge(clip, {"epsilon_high": 0.28}) == {**clip, "epsilon_high": 0.28}
    assert merge(clip, {"name": "clip", "epsilon": 0.3}) == {"name": "clip", "epsilon": 0.3}
    assert merge(clip, {"name": "sapo"}) == {"name": "sapo"}
    assert merge(clip, "sapo") == "sapo"
    assert merge("clip", {"epsilon": 0.3}) == {"name": "clip", "epsilon": 0.3}


def test_merging_changes_neither_side():
    below, above = {"a": {"x": 1}}, {"a": {"y": 2}}
    merge(below, above)
    assert (below, above) == ({"a": {"x": 1}}, {"a": {"y": 2}})


# ---- overrides


def test_an_override_reaches_into_mappings_lists_and_names(file):
    path = file("run.yaml", "learn: {rate: 1}\nrewards: [a, {name: b, weight: 1}]\nsampler: vade\n")
    changed = read(path, ["learn.rate=1e-6", "rewards[1].weight=2", "rewards.0.weight=0.5", "sampler.bins=3"])
    assert changed == {
        "learn": {"rate": 1e-6},
        "rewards": [{"name": "a", "weight": 0.5}, {"name": "b", "weight": 2}],
        "sampler": {"name": "vade", "bins": 3},
    }


def test_an_override_may_hold_a_list_or_a_mapping_or_add_a_key(file):
    path = file("run.yaml", "advantage: [total]\n")
    changed = read(
        path, ["advantage=[total, {name: clip_advantage, max_advantage: 2}]", "learn={a: {b: 1}}", "x="]
    )
    assert changed["advantage"] == ["total", {"name": "clip_advantage", "max_advantage": 2}]
    assert changed["learn"] == {"a": {"b": 1}}


def test_later_overrides_win(file):
    assert read(file("run.yaml", "a: 1\n"), ["a=2", "a=3"]) == {"a": 3}


def test_an_item_that_the_list_does_not_have_is_an_error(file):
    with pytest.raises(ConfigError, match="no item 2 in a list of 1"):
        read(file("run.yaml", "rewards: [a]\n"), ["rewards[2].weight=1"])


@pytest.mark.parametrize("text", ["learn.rate", "=1", "a=[1"])
def test_an_override_that_cannot_be_read_is_quoted(file, text):
    with pytest.raises(ConfigError, match="override"):
        read(file("run.yaml", "a: 1\n"), [text])


# ---- no magic in values


@pytest.mark.parametrize("value", ["${a}", "${oc.env:HOME}", "x-${a}-y"])
def test_interpolation_is_refused_wherever_it_stands(file, value):
    for text in (f"a: 1\nb: '{value}'\n", f"a: 1\nb: [{{c: '{value}'}}]\n"):
        with pytest.raises(ConfigError, match="looks like an interpolation; write the value itself"):
            read(file("run.yaml", text))
    with pytest.raises(ConfigError, match="looks like an interpolation"):
        read(file("plain.yaml", "a: 1\n"), [f"a={value}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!int x", "cannot read '.*run.yaml'"),
        ("a: &x [*x]", "cannot read '.*run.yaml'"),
        ("include: [1, 2]", "'include' must be a list of files, not \\[1, 2\\]"),
        (f"include: ['{'x' * 300}']", "File name too long"),
        ("a: {true: 1}", "a: the key True must be a text; put it into quotes"),
        ("a: {1: a, '1': b}", "cannot read '.*run.yaml'"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_the_configuration(file, text, message):
    with pytest.raises(ConfigError, match=message):
        read(file("run.yaml", text))


def test_numbers_in_short_scientific_form_are_numbers(file):
    assert read(file("run.yaml", "a: 1e-6\nb: 1E5\nc: '1e-6'\n")) == {"a": 1e-6, "b": 1e5, "c": "1e-6"}


# ---- checking


def test_a_whole_configuration_is_read_with_its_defaults():
    config = parse(WHOLE, Config)
    assert config.policy == Piece("some.policy", {"lora_rank": 4})
    assert config.rollout.engine == (Piece("some.engine"), Piece("with_demos", {"per_group": 2}))
    assert (config.rollout.num_generations, config.rollout.num_prompts) == (4, 32)
    assert config.sampler == (Piece("uniform"),)
    assert config.learn == Learn()


@pytest.mark.parametrize("given", ["uniform", {"name": "uniform", "shuffle": False}, {"shuffle": False}])
def test_one_piece_is_a_list_of_one(given):
    options = {"shuffle": False} if isinstance(given, dict) else {}
    assert parse({**WHOLE, "sampler": given}, Config).sampler == (Piece("uniform", options),)
    assert parse({**WHOLE, "rewards": "exact_match"}, Config).rewards == (Piece("exact_match"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewardz": []}, "there is no key 'rewardz'; did you mean 'rewards'?"),
        ({"learn": {"learnin_rate": 1}}, "there is no key 'learn.learnin_rate'; did you mean 'learn.*rate'?"),
        ({"zzz": 1}, "there is no key 'zzz'; there are policy, data,"),
        ({"max_steps": "many"}, "'max_steps' must be a whole number, not 'many'"),
        ({"max_steps": 1.5}, "'max_steps' must be a whole number, not 1.5"),
        ({"max_steps": True}, "'max_steps' must be a whole number, not True"),
        ({"output_dir": 3}, "'output_dir' must be a text, not 3"),
        ({"overwrite_output_dir": 1}, "'overwrite_output_dir' must be true or false, not 1"),
        ({"learn": {"max_grad_norm": "1"}}, "'learn.max_grad_norm' must be a number, not '1'"),
        ({"learn": 3}, "'learn' must be a mapping, not 3"),
        ({"rewards": {"weight": 2.0}}, r"'rewards\[0\]' must be a name, or a mapping with a name"),
        (
            {"rewards": {"0": {"weight": 2.0}}},
            r"'rewards' is empty, so 'rewards\[0\]' cannot be changed; give the list",
        ),
        ({"rewards": 3}, r"'rewards\[0\]' must be a name, or a mapping with a name; not 3"),
        ({"advantage": ["total", 3]}, r"'advantage\[1\]' must be a name, or a mapping with a name; not 3"),
        ({"objective": {"surrogate": "clip"}}, "'objective' must be a name, or a mapping with a name"),
        ({"references": ["frozen"]}, "'references' must be a mapping, not"),
        ({"references": {"ref": 1}}, "'references.ref' must be a name"),
        ({"rollout": {"engine": [{"per_group": 1}]}}, r"'rollout.engine\[0\]' must be a name"),
        ({"max_steps": 0}, "'max_steps' must be at least 1, not 0"),
        ({"max_steps": 2**63}, "'max_steps' must be a number of at most 63 bits, not one of 64"),
        ({"learn": {"max_grad_norm": float("nan")}}, "max_grad_norm' must be a finite number, not nan"),
        ({"learn": {"max_grad_norm": -1}}, "'learn.max_grad_norm' must be at least 0, not -1.0"),
        ({"evaluation": {"confidence": 1}}, "must be more than 0 and less than 1, not 1.0"),
    ],
)
def test_mistakes_are_named_with_their_place(change, message):
    with pytest.raises(ConfigError, match=message):
        parse({**WHOLE, **change}, Config)


def test_null_stands_for_the_default_of_a_number():
    config = parse({**WHOLE, "max_steps": None, "learn": {"learning_rate": None}}, Config)
    assert (config.max_steps, config.learn) == (Config.max_steps, Learn())


def test_required_keys_that_are_missing_are_all_named():
    rest = {key: value for key, value in WHOLE.items() if key not in ("policy", "objective")}
    with pytest.raises(ConfigError, match="'policy', 'objective': the required keys are missing"):
        parse(rest, Config)
    with pytest.raises(ConfigError, match="'rollout.engine': the required key is missing"):
        parse({**WHOLE, "rollout": {"num_prompts": 2}}, Config)


def test_a_file_with_a_mistake_is_named(file):
    with pytest.raises(ConfigError, match="run.yaml: .*'build', 'output': the required keys are missing"):
        load(file("run.yaml", "seed: 1\n"), kind=BuildConfig)


def test_part_of_a_configuration_is_checked_too():
    parsed = parse_some({"advantage": ["total"], "rollout": {"num_prompts": 3}}, Config)
    assert parsed.advantage == (Piece("total"),)
    assert (parsed.policy, parsed.rollout.num_prompts, parsed.rollout.engine) == (None, 3, None)
    with pytest.raises(ConfigError, match="there is no key 'advantag'; did you mean 'advantage'?"):
        parse_some({"advantag": []}, Config)


@pytest.mark.parametrize(
    ("value", "wanted", "converted"),
    [
        (3, float, 3.0),
        (None, float | None, None),
        (2, float | None, 2.0),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ("clip", Piece | None, Piece("clip")),
    ],
)
def test_plain_values_take_the_form_that_is_wanted(value, wanted, converted):
    assert convert(value, wanted, "place") == converted


def test_a_choice_among_words_names_the_words():

    assert convert("zero", Literal["zero", "raw"], "place") == "zero"
    with pytest.raises(ConfigError, match="'place' must be one of 'zero', 'raw', not 'none'"):
        convert("none", Literal["zero", "raw"], "place")
    with pytest.raises(ConfigError, match="'place' must be one of 0, 1, not True"):
        convert(True, Literal[0, 1], "place")


def test_a_list_of_a_length_wants_each_of_its_members():
    assert convert([1, 2], tuple[int, float], "place") == (1, 2.0)
    with pytest.raises(ConfigError, match=r"'place' must be a list of 2, not \[1, 2, 3\]"):
        convert([1, 2, 3], tuple[int, float], "place")
    with pytest.raises(ConfigError, match=r"'place\[0\]' must be a whole number, not 1.5"):
        convert([1.5, 2], tuple[int, float], "place")


def test_a_value_of_any_type_is_finite():
    assert convert({"x": [1, "a"]}, Any, "place") == {"x": [1, "a"]}
    with pytest.raises(ConfigError, match=r"'place.x\[1\]' must be a finite number, not inf"):
        convert({"x": [1, float("inf")]}, Any, "place")


# ---- writing


def test_what_is_written_reads_back_as_the_same_configuration(tmp_path):
    raw = {
        **WHOLE,
        "seed": 7,
        "learn": {"learning_rate": {"name": "linear", "start": 1e-6, "end": 0.0, "steps": 10}},
        "references": {"ref": "frozen", "ema": {"name": "ema", "decay": 0.9}},
        "evaluation": {"data": "other.data", "metrics": [{"name": "recall_at", "at": [0.3, 0.5]}]},
        "output_dir": "runs/with space: and colon",
    }
    config = parse(raw, Config)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("text", ["1e-6", "yes", "null", "01", "1:30", "~", "", "a: b", "# no"])
def test_texts_that_look_like_something_else_stay_texts(tmp_path, text):
    config = parse({"build": {"name": "some.builder", "title": text}, "output": "data"}, BuildConfig)
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert load(tmp_path / "config.yaml", kind=BuildConfig) == config


def test_a_piece_without_options_is_written_as_its_name():
    assert as_plain(parse(WHOLE, Config))["advantage"] == ["total", "group_normalize"]


def test_configurations_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse(WHOLE, Config).seed = 3
