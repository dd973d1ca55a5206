"""Who imports whom: the layers of the architecture, read off the source of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from mmrl.registry import HOMES

ROOT = Path(__file__).parents[1]
SIBLINGS = ("vision", "diffusion", "compression")
PACKAGES = {"mmrl", *(f"mmrl.{sibling}" for sibling in SIBLINGS)}
FILES = sorted(path for folder in ("mmrl", *SIBLINGS) for path in (ROOT / folder).rglob("*.py"))

BASE = {
    "types", "protocols", "tensor", "table", "batch", "draws", "registry", "reward_forms", "config", "bind",
    "distributed", "kept", "modules", "onednn", "rows", "watch", "sharded", "health", "operations",
    "pictures", "settings", "zero", "files",
    "media", "fields", "ranges", "yaml_files",
    "contents",
}  # fmt: skip
LOOPS = {
    "score",
    "applied",
    "collect",
    "train",
    "evaluate",
    "pareto",
    "run",
    "report",
    "page",
    "console",
    "checkpoint",
    "build",
    "demo",
    "faults",
    "stop",
    "saving",
    "card",
    "hub",
    "doctor",
    "gap",
    "plan",
    "__main__",
}

# omegaconf reads its files with yaml, whose errors are not wrapped.
PLAIN = {"torch", "omegaconf", "yaml", "einops"}
HEAVY = {
    "transformers", "diffusers", "open_clip", "timm", "bitsandbytes", "peft", "accelerate", "av", "PIL",
    "matplotlib", "datasets", "pyarrow", "tokenizers", "safetensors", "rich", "numpy", "torchvision",
    "tensorboard", "wandb", "trackio",
}  # fmt: skip

LINES, FUNCTION = 400, 60


@dataclass(frozen=True)
class Import:
    """One import: what, where, and whether it runs when the file is loaded."""

    module: str
    line: int
    at_load: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def name_of(path: Path) -> str:
    """Name the module of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "mmrl" else ("mmrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> list[Import]:
    """List what a file imports, but not what only its annotations read (`if TYPE_CHECKING`)."""
    return list(_imports(ast.parse(path.read_text()), name_of(path), True))


def _imports(node: ast.AST, here: str, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{here}:{child.lineno} imports by relative position"
            # `from mmrl.vision import loading` names the module loading
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            found = names if child.module in PACKAGES else [child.module]
            yield from (Import(module, child.lineno, at_load) for module in found)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, here, at_load and not inside)


def layer_of(module: str) -> tuple[str, str]:
    """Say what a module of ours is: its layer (base, loop, piece, common) and its scope."""
    parts = module.split(".")[1:]
    scope = parts.pop(0) if parts and parts[0] in SIBLINGS else ""
    if not parts:
        return "package", scope
    if parts[0] in {home for home in HOMES.values()}:
        return f"piece:{parts[0]}", scope
    if scope:
        return ("loop" if parts == ["demo"] else "common"), scope
    return ("base" if parts[0] in BASE else "loop" if parts[0] in LOOPS else "unknown"), scope


def ours(path: Path) -> list[tuple[Import, str, str]]:
    """List imports of ours with their layer and scope."""
    return [(found, *layer_of(found.module)) for found in imports_of(path) if found.top == "mmrl"]


def where(path: Path, found: Import) -> str:
    return f"{path.relative_to(ROOT)}:{found.line} imports {found.module}"


EACH = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])


@EACH
def test_every_module_has_a_layer(path):
    layer, _ = layer_of(name_of(path))
    assert layer != "unknown", f"{path.relative_to(ROOT)} is neither base nor loop; enter it in BASE or LOOPS"


@EACH
def test_imports_at_load_are_light(path):
    """Only torch, omegaconf, einops and the standard library, so that a look-up of names stays quick."""
    allowed = PLAIN | {"mmrl"} | sys.stdlib_module_names
    for found in imports_of(path):
        assert not found.at_load or found.top in allowed, f"{where(path, found)} outside a function"


def test_heavy_packages_are_seen_where_they_are():
    """The rule above would hold of anything if imports inside functions were not told from those outside."""
    lazily = {found.top for path in FILES for found in imports_of(path) if not found.at_load}
    assert {"transformers", "av", "accelerate", "pyarrow", "rich"} <= lazily & HEAVY


@EACH
def test_base_imports_base(path):
    if layer_of(name_of(path))[0] == "base":
        for found, layer, _ in ours(path):
            assert layer == "base", where(path, found)


@EACH
def test_loops_import_base_and_loops(path):
    if layer_of(name_of(path))[0] == "loop":
        for found, layer, scope in ours(path):
            assert layer in ("base", "loop", "package") and not scope, where(path, found)


@EACH
def test_a_piece_imports_base_its_own_kind_and_what_its_scope_shares(path):
    mine, home = layer_of(name_of(path))
    if not mine.startswith("piece"):
        return
    for found, layer, scope in ours(path):
        assert layer in ("base", mine, "common"), where(path, found)
        assert layer == "base" or scope == home, where(path, found)


@EACH
def test_what_a_scope_shares_imports_base_and_its_like(path):
    mine, home = layer_of(name_of(path))
    if mine == "common":
        for found, layer, scope in ours(path):
            assert layer == "base" or (layer == "common" and scope == home), where(path, found)


@EACH
def test_siblings_never_import_each_other(path):
    home = layer_of(name_of(path))[1]
    for found, _, scope in ours(path):
        assert scope in ("", home), where(path, found)


@EACH
def test_a_file_and_its_functions_are_of_a_size_to_read(path):
    text = path.read_text()
    assert text.count("\n") <= LINES, f"{text.count(chr(10))} lines; at most {LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION, f"'{node.name}' has {lines} lines; at most {FUNCTION}"


# ---- the reader of imports itself


def test_imports_are_told_apart_by_where_they_stand(tmp_path):
    path = ROOT / "mmrl" / "types.py"
    tree = ast.parse(
        "import torch\n"
        "from mmrl import table\n"
        "if TYPE_CHECKING:\n    from mmrl.train import train\n"
        "def f():\n    import av\n"
        "class C:\n    import json\n    def g(self):\n        from PIL import Image\n"
    )
    found = {(one.module, one.at_load) for one in _imports(tree, name_of(path), True)}
    assert found == {("torch", True), ("mmrl.table", True), ("av", False), ("json", True), ("PIL", False)}


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("mmrl.table", ("base", "")),
        ("mmrl.train", ("loop", "")),
        ("mmrl.advantages.shape", ("piece:advantages", "")),
        ("mmrl.references", ("piece:references", "")),
        ("mmrl.vision.engines.generate", ("piece:engines", "vision")),
        ("mmrl.vision.chat", ("common", "vision")),
        ("mmrl.diffusion.demo", ("loop", "diffusion")),
        ("mmrl.something", ("unknown", "")),
    ],
)
def test_modules_are_sorted_into_layers(module, layer):
    assert layer_of(module) == layer
