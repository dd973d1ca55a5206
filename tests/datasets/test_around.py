"""Data sets around others: several as one."""

from __future__ import annotations

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Config, ConfigError, Piece, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.diagnostics.inputs import check_inputs
from tests.support.toys import plan

SHOWN = "<think>it is {}</think><answer>{}</answer>"
READS = []


def rows(*, count: int = 200, form: str = SHOWN):
    """Make rows with a demonstration each."""
    READS.append(count)
    return [Prompt(f"r{i}", (), str(i), (Outcome(form.format(i, i)),), {"n": i}) for i in range(count)]


def made(name, seed=0, **options):
    return Pieces(Stream(seed)).prompts(Piece(name, options), "data")


def inner(**options):
    return {"name": f"{__name__}:rows", **options}


def test_a_mixture_names_the_source_of_every_row():
    prompts = made("mixture", data=[inner(count=2), inner(count=1)], sources=["gui", "maths"])
    assert [(p.uid, p.columns["source"], p.columns["n"]) for p in prompts] == [
        ("gui/r0", "gui", 0),
        ("gui/r1", "gui", 1),
        ("maths/r0", "maths", 0),
    ]


@pytest.mark.parametrize("sources", [[], ["a"], ["a", "a"]])
def test_every_data_set_of_a_mixture_has_a_name_of_its_own(sources):
    with pytest.raises(ConfigError, match="in `sources` for each of 2 data sets"):
        made("mixture", data=[inner(), inner()], sources=sources)


def test_a_check_reads_no_data_and_finds_mistakes_inside():
    READS.clear()
    pieces = Pieces(Stream())
    nested = {"name": "drop_thoughts", "data": inner(), "share": 0.5}
    pieces.check("data", Piece("mixture", {"data": [nested], "sources": ["a"]}), "data")
    assert READS == []
    with pytest.raises(ConfigError, match=r"data.data\[0\].data: .* has no option 'cuont'"):
        wrong = {**nested, "data": inner(cuont=3)}
        pieces.check("data", Piece("mixture", {"data": [wrong], "sources": ["a"]}), "data")


def test_the_files_of_inner_data_sets_are_looked_for_before_a_run(tmp_path):
    (tmp_path / "there.jsonl").touch()
    there, gone = (inner_file(tmp_path / name) for name in ("there.jsonl", "gone.jsonl"))
    data = {
        "name": "mixture",
        "data": [there, {"name": "drop_thoughts", "data": gone}],
        "sources": ["a", "b"],
    }
    config = parse({**plan(tmp_path / "run"), "data": data}, Config)
    with pytest.raises(ConfigError) as wrong:
        check_inputs(config)
    assert str(wrong.value).startswith(f"data.data.1.data.path is '{tmp_path}/gone.jsonl', which does not")
    assert "there.jsonl" not in str(wrong.value)


def inner_file(path):
    return {"name": "vision.visual_qa", "path": str(path)}
