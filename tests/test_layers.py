"""The order of the wings: who may import whom, read off the source of every file."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from mmrl.config.registry import HOMES
from tests.support.rules import rule

ROOT = Path(__file__).parents[1]
SIBLINGS = ("vision", "diffusion", "compression")
FILES = sorted(
    path
    for folder in ("mmrl", *SIBLINGS)
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)

# Lowest first. A file imports from its own wing and from lower ones. `pieces` are the homes of the registry
# and what vision, diffusion and compression share among their own. What stands above `papers` must not import
# it either: everything but `papers` is the trunk.
ORDER = (
    "core", "config", "data", "runtime", "kv_cache", "pieces", "papers", "reporting", "diagnostics",
    "training", "build", "commands",
)  # fmt: skip
TOP_LEVEL = {
    "": "commands",
    "trl": "config",
    "references": "pieces",
    "optimizers": "pieces",
    "api": "commands",
    "inference": "build",
    "build": "build",
    "doctor": "commands",
    "pareto": "commands",
    "cli": "commands",
    "__main__": "commands",
}
# Homes that also hold what other pieces build on: engines run conversations with `vision/tools`.
COMMON = {"tools"}
# Homes whose pieces read what a wing above the other pieces defines.
LATE = {"checks": "diagnostics", "memory_estimates": "diagnostics", "visualizations": "reporting"}

# omegaconf reads its files with yaml, whose errors are not wrapped; torch needs jinja2 itself.
LIGHT = {"torch", "omegaconf", "yaml", "einops", "jinja2", "markupsafe"}
HEAVY = {
    "transformers", "diffusers", "open_clip", "timm", "bitsandbytes", "peft", "accelerate", "av", "PIL",
    "matplotlib", "datasets", "pyarrow", "tokenizers", "safetensors", "rich", "numpy", "torchvision",
    "tensorboard", "wandb", "trackio", "ray", "playwright",
}  # fmt: skip

LINES, FUNCTION = 400, 60


@dataclass(frozen=True)
class Import:
    """One import: the module, the line, and whether it runs when the file is loaded."""

    module: str
    line: int
    at_load: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Place:
    """Where a module stands: its wing, its sibling package ("" for mmrl itself), and its home of pieces."""

    wing: str
    scope: str = ""
    home: str = ""


def name_of(path: Path) -> str:
    """Name the module of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "mmrl" else ("mmrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def imports_of(path: Path) -> list[Import]:
    """List what a file imports, inside functions and under TYPE_CHECKING too."""
    return list(_imports(ast.parse(path.read_text()), name_of(path), True))


def _imports(node: ast.AST, here: str, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{here}:{child.lineno} imports by relative position"
            # `from mmrl.vision.models import loading` names the module loading
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            found = [name if name in MODULES else child.module for name in names]
            yield from (Import(module, child.lineno, at_load) for module in dict.fromkeys(found))
        else:
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            lazy = lazy or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from _imports(child, here, at_load and not lazy)


def place_of(module: str) -> Place:
    """Say where a module of ours stands."""
    parts = module.split(".")[1:]
    scope = parts.pop(0) if parts and parts[0] in SIBLINGS else ""
    first = parts[0] if parts else ""
    if first in HOMES.values() and first not in COMMON:
        return Place(LATE.get(first, "pieces"), scope, first)
    if scope:
        return Place("pieces", scope)
    return Place(first if first in ORDER else TOP_LEVEL.get(first, "unknown"))


def ours(path: Path) -> list[tuple[Import, Place]]:
    """List imports of ours with their places. A paper may take from every package, so those count as none."""
    found = [(found, place_of(found.module)) for found in imports_of(path) if found.top == "mmrl"]
    if place_of(name_of(path)).wing == "papers":
        return [(found, replace(place, scope="")) for found, place in found]
    return found


def where(found: Import) -> str:
    return f"line {found.line} imports {found.module}"


EACH = rule(FILES, lambda path: str(path.relative_to(ROOT)))


@EACH
def test_every_module_has_a_wing(path):
    if place_of(name_of(path)).wing not in ORDER:
        yield "stands in no wing: move it into a folder of ORDER or TOP_LEVEL"


@EACH
def test_a_wing_imports_only_from_lower_ones(path):
    mine = place_of(name_of(path)).wing
    for found, place in ours(path):
        if ORDER.index(place.wing) > ORDER.index(mine):
            yield f"{where(found)}: {mine} is below {place.wing}; move one of them, or pass it as an argument"


@EACH
def test_a_piece_imports_no_other_kind_of_piece(path):
    mine = place_of(name_of(path))
    for found, place in ours(path):
        if mine.home and place.home and place.home != mine.home:
            yield f"{where(found)}, another kind of piece; take it as an option, or move what both share"


@EACH
def test_what_a_package_shares_imports_no_piece(path):
    mine = place_of(name_of(path))
    for found, place in ours(path) if mine.scope and not mine.home else ():
        if place.home:
            yield f"{where(found)}, a piece; move what is shared out of {place.home}"


@EACH
def test_siblings_never_import_each_other(path):
    mine = place_of(name_of(path))
    for found, place in ours(path):
        if place.scope not in ("", mine.scope):
            yield f"{where(found)} of a sibling; move what both need into mmrl"


@EACH
def test_the_library_imports_neither_examples_nor_tests(path):
    for found in imports_of(path):
        if found.top in ("examples", "tests", "benchmarks"):
            yield f"{where(found)}; move it into the library"


@EACH
def test_imports_at_load_are_light(path):
    """Only torch, omegaconf, einops and the standard library, so that a look-up of names stays quick.

    Files `modeling_*.py` hold classes of models; families name them, and `load_model` imports them.
    """
    allowed = LIGHT | {"mmrl"} | sys.stdlib_module_names
    allowed |= {"transformers"} if path.name.startswith("modeling_") else set()
    for found in imports_of(path):
        if found.at_load and (
            found.top not in allowed or found.module.startswith("mmrl.vision.models.modeling_")
        ):
            yield f"{where(found)} when it is loaded; import it inside the function that uses it"


def test_heavy_packages_are_imported_somewhere():
    """The rule above would hold of anything if imports inside functions counted as imports at load."""
    lazily = {found.top for path in FILES for found in imports_of(path) if not found.at_load}
    assert {"transformers", "av", "accelerate", "pyarrow", "rich"} <= lazily & HEAVY


def circles() -> list[list[str]]:
    """Find groups of files that import each other (strongly connected components, Tarjan)."""
    edges = {
        name: {found.module for found in imports_of(path) if found.module in MODULES} - {name}
        for name, path in MODULES.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            groups.append(stack[at:])
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    return [sorted(group) for group in groups if len(group) > 1]


def test_no_circle_of_files():
    assert not circles(), f"files import each other: {circles()}; move what they share to a third one"


@EACH
def test_a_file_and_its_functions_are_of_a_size_to_read(path):
    text = path.read_text()
    if text.count("\n") > LINES:
        yield f"{text.count(chr(10))} lines; split it into files of at most {LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node, clean=False) or "").splitlines()
            lines = node.end_lineno - node.lineno + 1 - len(docstring)
            if lines > FUNCTION:
                yield f"'{node.name}' has {lines} lines; split it into functions of at most {FUNCTION}"


# ---- two storeys: the trunk, and papers on it

PAPERS = [path for path in FILES if path.parent.name == "papers" and path.stem != "__init__"]
METHOD_FILES = {path.stem for path in (ROOT / "configs" / "methods").rglob("*.yaml")}
HEAD = re.compile(
    r"[^\n]+ \(arXiv (\d{4}\.\d{5})\): [^\n]+\.\n\nTitle: .+\nFormula: .+\.\nOur reading: .+\.", re.DOTALL
)
# Lines of every wing, which may only become fewer. Goals: the trunk 42,000, config 2,800, papers 14,000.
BUDGETS = {
    "advantages": 1420,
    "api": 730,
    "builders": 160,
    "cli": 2270,
    "compression": 3640,
    "config": 3090,
    "core": 3870,
    "data": 3160,
    "datasets": 60,
    "diagnostics": 1660,
    "diffusion": 8180,
    "engines": 1420,
    "flat files": 2390,
    "inference": 1850,
    "kv_cache": 2330,
    "objectives": 1620,
    "papers": 11480,
    "reporting": 3580,
    "rewards": 2030,
    "runtime": 4070,
    "samplers": 910,
    "training": 3100,
    "trl": 1400,
    "vision": 24880,
}


def wing_of(path: Path) -> str:
    """Name the wing whose budget a file counts in: a folder of mmrl, or another package."""
    first, *rest = path.relative_to(ROOT).parts
    return first if first != "mmrl" else rest[0] if len(rest) > 1 else "flat files"


def lines_of_wings() -> dict[str, int]:
    """Count the lines of every wing."""
    lines: dict[str, int] = {}
    for path in FILES:
        lines[wing_of(path)] = lines.get(wing_of(path), 0) + path.read_text().count("\n")
    return lines


def test_the_trunk_imports_no_paper_and_no_paper_another():
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.module}; move what both need into the trunk"
        for path in FILES
        for found in imports_of(path)
        if found.module.startswith("mmrl.papers.") and found.module != name_of(path)
    ]
    assert wrong == []


def test_the_head_of_a_paper_has_title_number_formula_and_our_reading():
    heads = {path.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in PAPERS}
    heads["paper.md"] = (ROOT / "docs" / "howto" / "paper.md").read_text().split('"""')[1].strip()
    wrong = [name for name, head in heads.items() if not HEAD.fullmatch(head)]
    assert wrong == [], "write the head as mmrl/papers/remax.py has it"


def test_a_paper_is_three_files_of_one_name():
    names = {path.stem for path in PAPERS}
    assert names - METHOD_FILES == set()
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "papers").glob("test_*.py")}
    assert names - tests == set()


def test_a_wing_keeps_to_its_budget():
    lines = lines_of_wings()
    assert lines.keys() == BUDGETS.keys()
    over = {wing: f"{lines[wing]} of {most} lines" for wing, most in BUDGETS.items() if lines[wing] > most}
    assert over == {}, "make it shorter, or move what serves one paper to mmrl/papers"


# ---- the reader of imports itself


def test_imports_are_sorted_by_where_they_stand():
    tree = ast.parse(
        "import torch\n"
        "from mmrl.core import reward_table\n"
        "if TYPE_CHECKING:\n    from mmrl.training.loop import train\n"
        "def f():\n    import av\n"
        "class C:\n    import json\n    def g(self):\n        from PIL import Image\n"
    )
    found = {(one.module, one.at_load) for one in _imports(tree, "mmrl.core.types", True)}
    assert found == {
        ("torch", True),
        ("mmrl.core.reward_table", True),
        ("mmrl.training.loop", False),
        ("av", False),
        ("json", True),
        ("PIL", False),
    }


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("mmrl.core.reward_table", Place("core")),
        ("mmrl.training.loop", Place("training")),
        ("mmrl.advantages.shape", Place("pieces", "", "advantages")),
        ("mmrl.references", Place("pieces", "", "references")),
        ("mmrl.vision.engines.generate", Place("pieces", "vision", "engines")),
        ("mmrl.vision.checks.media_files", Place("diagnostics", "vision", "checks")),
        ("mmrl.vision.models.processor", Place("pieces", "vision")),
        ("mmrl.papers.remax", Place("papers")),
        ("mmrl.cli", Place("commands")),
        ("mmrl.something", Place("unknown")),
    ],
)
def test_modules_are_sorted_into_wings(module, place):
    assert place_of(module) == place
