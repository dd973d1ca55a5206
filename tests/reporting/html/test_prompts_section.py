"""The part of a run's page about its prompts: histograms, the hardest prompts, beliefs of samplers."""

from __future__ import annotations

import math

import pyarrow
import pytest
from pyarrow import parquet

from mmrl.config.schema import ConfigError
from mmrl.core.types import Message, Part, Prompt
from mmrl.reporting.html.prompts import Bar, counts_of, histogram, prompts_section
from mmrl.reporting.prompts import write_prompts


def written(folder, beliefs=None, *, words="what is <b>this</b>?", num=3, data=5):
    prompts = [Prompt(f"p{i}", (Message("user", (Part(f"{words} {i}"),)),)) for i in range(data)]
    columns = {
        "uid": [f"p{i}" for i in range(num)],
        "asked": [1 + i for i in range(num)],
        "rollouts": [4 * (1 + i) for i in range(num)],
        "mean": [0.1 * (num - i) for i in range(num)],
        "first": [0.0] * num,
        "last": [0.25 * i for i in range(num)],
        "step": list(range(num)),
    }
    write_prompts(folder, prompts, columns, beliefs or {})
    return folder


def test_how_often_is_counted_in_ranges_of_one_width():
    assert counts_of([1, 1, 2], never=4) == [Bar("never", [4]), Bar("once", [2]), Bar("twice", [1])]
    bars = counts_of([1, 3, 4, 30], never=0)  # ten ranges of three
    assert [bar.label for bar in bars][:2] == ["1 to 3 times", "4 to 6 times"] and len(bars) == 10
    assert [bar.counts[0] for bar in bars] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_a_histogram_counts_every_series_on_one_scale():
    bars = histogram([[0.0, 0.05, 1.0], [0.95, math.nan]])
    assert [bar.counts for bar in bars] == [[2, 0], *[[0, 0]] * 8, [1, 1]]
    assert bars[0].label == "0.00 to 0.10" and bars[-1].label == "0.90 to 1.00"
    assert histogram([[2.0, 2.0], [2.0]]) == [Bar("2.00", [2, 1])]
    assert histogram([[math.nan], []]) == []


def test_the_hardest_prompts_come_first_and_texts_are_escaped_and_cut(tmp_path):
    html = prompts_section(written(tmp_path, words="is <script>alert(1)</script> " + "long " * 40))
    assert "3 of 5 prompts were asked" in html
    assert "<script>" not in html and "&lt;script&gt;" in html and "…" in html
    hardest = html[html.index("<h3>Hardest") : html.index("<h3>Asked most")]
    means = [hardest.index(value) for value in ("0.100", "0.200", "0.300")]
    assert means == sorted(means)


def test_prompts_that_the_data_do_not_have_are_counted_apart(tmp_path):
    html = prompts_section(written(tmp_path, num=3, data=2))
    assert "2 of 2 prompts were asked, and 1 that the data do not have" in html
    assert "<th>p2</th>" in html, "its id instead of its text"
    assert "never" not in html


def test_beliefs_about_sources_are_listed_and_those_about_prompts_summed_up(tmp_path):
    beliefs = {
        "sampler[0]": {"maths <i>": {"weight": 0.75}, "images": {"weight": 0.25, "trials": 3.0}},
        "sampler[1]": {"p0": {"success": 0.5}, "p1": {"success": 0.125}, "p9": {"success": 1.0}},
    }
    html = prompts_section(written(tmp_path, beliefs))
    assert "maths &lt;i&gt;" in html and ">0.750<" in html and ">3.00<" in html
    summed = html[html.index("What sampler[1] believes") :]
    assert [summed.index(value) for value in (">0.125<", ">0.500<", ">1.00<")] == sorted(
        summed.index(value) for value in (">0.125<", ">0.500<", ">1.00<")
    )
    assert "success 0.125" in html, "beside the prompt itself"


def test_a_run_that_wrote_nothing_has_no_such_part(tmp_path):
    assert prompts_section(tmp_path) == ""


def test_a_damaged_file_is_left_out(tmp_path, caplog):
    (written(tmp_path) / "prompts.parquet").write_bytes(b"PAR1 cut")
    assert prompts_section(tmp_path) == ""
    assert "prompts.parquet' cannot be read and is left out" in caplog.text


def test_another_type_than_a_run_writes_is_an_error(tmp_path):
    columns = parquet.read_table(written(tmp_path) / "prompts.parquet")
    place = columns.schema.get_field_index("asked")
    words = pyarrow.array(["one", "two", "three"])
    parquet.write_table(columns.set_column(place, "asked", words), tmp_path / "prompts.parquet")
    with pytest.raises(ConfigError, match="the column 'asked' must hold int64, not string"):
        prompts_section(tmp_path)
