"""Which columns count as read: those that a run's rewards, templates and options name."""

from __future__ import annotations

import logging

import pytest

from mmrl.build import check_data
from mmrl.config.schema import load
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.data.named_columns import named_columns
from tests.support.toys import plan

ROWS = [{"prompt": "What?", "label": 0, "system": "Be brief.", "level": 3}, {"prompt": "And?", "level": 4}]


def by_parameter(completions, label):
    """A reward in TRL's form that names a column."""
    return [float(value or 0) for value in label]


def by_key(completions, **columns):
    """A reward in TRL's form that takes all columns."""
    return [float(value or 0) for value in columns["label"]]


def _helped(prompt):
    return prompt.columns["label"]


def by_helper(prompts, outcomes):
    """A reward of ours that reads a column in another function."""
    return [float(_helped(prompt)) for prompt in prompts]


def nothing(prompts, outcomes):
    """A reward that reads no column."""
    return [0.0 for _ in prompts]


def run(tmp_path, reward, rows=ROWS, **options):
    write_rows(tmp_path / "rows.jsonl", rows)
    data = {"name": "vision.conversations", "path": str(tmp_path / "rows.jsonl"), **options}
    return load(plan(tmp_path / "out", data=data, rewards=[reward]))


@pytest.mark.parametrize("reward", ["by_parameter", "by_key", "by_helper"])
def test_a_column_that_a_reward_reads_is_read(tmp_path, caplog, reward):
    caplog.set_level(logging.WARNING, "mmrl")
    config = run(tmp_path, f"{__name__}:{reward}")
    check_data(config)
    named = named_columns(config)
    assert "label" in named and named.every == (reward == "by_key")
    # What a model is asked is no matter of rewards; what nothing names is named once.
    assert "system" not in named
    assert ("level (2)" in caplog.text) == (reward != "by_key")


def test_options_of_pieces_name_columns(tmp_path):
    reward = {"name": "column_value", "column": "label"}
    assert "label" in named_columns(run(tmp_path, reward))
    where = {"name": f"{__name__}:nothing", "where": {"label": 1}}
    assert "label" in named_columns(run(tmp_path, where))
    assert named_columns(run(tmp_path, {"name": "http", "url": "http://localhost:1"})).every


def test_a_column_with_a_meaning_that_nothing_reads_ends_the_run(tmp_path, caplog):
    config = run(tmp_path, f"{__name__}:nothing")
    with pytest.raises(
        RowError, match="nothing reads the column `label`: `vision.unpaired_preferences` reads"
    ):
        check_data(config)
    check_data(run(tmp_path, f"{__name__}:nothing", bad_rows="drop"))
    assert "dropped" in caplog.text and "`label`" in caplog.text
    check_data(run(tmp_path, f"{__name__}:nothing", columns={"label": ""}))


def test_tools_of_a_row_stay_an_error_whatever_a_reward_takes(tmp_path):
    config = run(tmp_path, f"{__name__}:by_key", rows=[{"prompt": "What?", "tools": "[{}]"}])
    with pytest.raises(RowError, match="nothing reads the column `tools`: give tools to the run's engine"):
        check_data(config)
