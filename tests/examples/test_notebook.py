"""The notebook runs from its first cell to its last, and the model learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "colours.ipynb"


def test_the_notebook_has_no_outputs_and_no_place():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_and_the_model_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["before"] < 0.2
    assert names["after"] > 0.5
    assert {prediction.target for prediction in names["predictions"]} == {"red", "green", "blue"}
