"""Papers: their pieces are found without a list, and a run imports only the papers that it names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mmrl.papers
from mmrl.config import papers, registry
from mmrl.config.registry import HOMES, engine, pieces
from tests.support.doc_blocks import ROOT, blocks_of

PAGE = (ROOT / "docs" / "howto" / "paper.md").read_text()

SOURCE = """@advantage
def halved(table): ...


@engine(
    scope="vision",
    sets_tags={"a"},
)
@dataclass(eq=False)
class WithHalves: ...


def helper(): ...
"""


def test_definitions_are_read_under_decorators_of_several_lines():
    found = {("advantage", "halved"), ("engine", "with_halves"), ("dataclass", "with_halves")}
    assert set(papers.definitions(SOURCE)) == found


def test_every_piece_of_a_paper_is_found_in_its_source():
    """A name that the source does not show under its decorator could not be looked up."""
    listed = [(entry.target.__module__, entry.kind, entry.name) for kind in HOMES for entry in pieces(kind)]
    ours = [(module, kind, name) for module, kind, name in listed if module.startswith("mmrl.papers.")]
    for module, kind, name in ours:
        assert (kind, name) in papers.defined()[module]


def test_a_scope_is_one_of_the_packages():
    with pytest.raises(ValueError, match="a engine declares `scope`, one of vision, .*, not 'sound'"):
        engine(scope="sound")


def imported_after(*statements: str) -> str:
    """List the papers that a new process has imported after some statements."""
    lines = ("from mmrl.config.registry import find, pieces", *statements, "import sys")
    lines = (*lines, "print(*sorted(n for n in sys.modules if n.startswith('mmrl.papers.')))")
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_a_run_that_names_no_paper_imports_none():
    found = ("find('advantage', 'group_normalize')", "find('engine', 'vision.generate')")
    assert not imported_after(*found, "pieces('check')", "pieces('memory_estimate')", "pieces('family')")


def test_a_run_that_names_a_paper_imports_it_alone():
    found = imported_after("find('advantage', 'barrier')", "find('engine', 'vision.with_greedy')")
    assert found == "mmrl.papers.c_morl mmrl.papers.remax"


def test_a_new_paper_is_found_without_a_list(tmp_path, monkeypatch):
    (block,) = [one for one in blocks_of(PAGE, "paper.md") if one.file == "papers/median_grpo.py"]
    (tmp_path / "median_grpo.py").write_text(block.text)
    monkeypatch.setattr(papers, "FOLDER", tmp_path)
    monkeypatch.setattr(mmrl.papers, "__path__", [*mmrl.papers.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "PIECES", dict(registry.PIECES))
    papers.defined.cache_clear()
    try:
        assert registry.find("advantage", "median_center").full_name == "median_center"
    finally:
        papers.defined.cache_clear()
        sys.modules.pop("mmrl.papers.median_grpo", None)
