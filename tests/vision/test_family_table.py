"""The page docs/families.md says what tiny models of all families show."""

from __future__ import annotations

import json
from math import isfinite

import pytest

from benchmarks.families import ANSWERS, RESULTS, measure, section
from mmrl.core.modalities import MODALITIES
from mmrl.vision.decoding import step_model
from mmrl.vision.models.model_families import FAMILIES
from mmrl.vision.serving.agreement import LIMITS
from mmrl.vision.serving.wire import SERVED
from tests.vision import family_table
from tests.vision.family_table import (
    PAGE,
    SAMPLES,
    TIMES,
    TRIED,
    Tiny,
    head,
    line,
    maker_of,
    makers,
    tried,
)

WRITE = "run `python -m tests.vision.family_table`"


def test_the_page_has_a_row_for_every_family_and_a_column_for_every_kind_of_media():
    text = PAGE.read_text()
    assert head() in text, WRITE
    table = text.partition("\n## ")[0]
    rows = [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")]
    assert rows == ["model_type", *sorted(FAMILIES)], WRITE
    assert MODALITIES.keys() <= SAMPLES.keys()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_page_says_what_a_tiny_model_shows(family, tmp_path):
    measured = line(family, tmp_path)
    assert measured in PAGE.read_text(), f"{WRITE}; measured is {measured}"


def test_the_page_says_how_far_servers_were_from_the_policy():
    assert tried() in PAGE.read_text(), WRITE
    for name, found in json.loads(TRIED.read_text())["families"].items():
        assert found["gaps"].keys() >= {"text", "image"} and SERVED[name].kinds
        close = max(found["gaps"].values()) < LIMITS[found["dtype"] != "float32"]
        assert close or SERVED[name].cause  # which the error of a run names


def test_types_with_the_same_rules_are_measured_with_one_model():
    assert maker_of("qwen3_vl_moe") == "qwen3_vl" and maker_of("glm4v_moe") == "glm46v"
    assert all(maker_of(name) == name for name in makers() if name in FAMILIES)


def test_a_family_without_a_tiny_model_is_an_error(monkeypatch):
    monkeypatch.setitem(FAMILIES, "never_heard_of", None)
    with pytest.raises(LookupError, match="makes a tiny model of type 'never_heard_of'"):
        maker_of("never_heard_of")


def test_a_model_that_does_not_look_is_found_out(tmp_path, monkeypatch):
    model = Tiny.load("llava", tmp_path)
    monkeypatch.setitem(SAMPLES, "image", lambda **shape: family_table.tiny.picture())  # one and the same
    with pytest.raises(AssertionError, match="answers do not depend on the last image of 3"):
        family_table.sees("image", 3, model)
    assert family_table.shares(False, model) == "yes"
    monkeypatch.setattr(step_model, "shares_prompts", lambda *given, **options: False)
    assert family_table.shares(False, model) == "no"


def test_a_family_is_timed_beside_transformers(tmp_path):
    makers()["llava"](tmp_path)
    found = measure(tmp_path, 1)
    assert all(isfinite(value) and value > 0 for value in found.values())
    # Transformers keeps the prompt once for each of four answers.
    assert len(ANSWERS) == 4 and 0.2 < found["memory"] < 1
    text = section({"machine": {"processor": "x"}, "families": {"llava": found}})
    assert text.startswith(TIMES) and f"| `llava` | {found['load_ms']:.1f} ({found['load']:.2f}) |" in text


def test_the_page_has_the_times_of_the_last_benchmark():
    begin, times = PAGE.read_text().partition(TIMES)[1:]
    assert not RESULTS.exists() or section(json.loads(RESULTS.read_text())) == begin + times
