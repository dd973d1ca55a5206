"""Change one operator, comparison or constant of a file at a time, and print what no test notices.

    python -m tests.mutate mmrl/objectives/penalties.py
    python -m tests.mutate diffusion/motion.py --tests tests/diffusion/test_solvers.py

Without `--tests` a file is tried with the tests of its name, the slow ones left out. Files on disk are never
changed: tests are imported and collected once, and every mutant is a forked process in which functions of the
file get other code, other defaults, or its constants other values. What is computed once at import (arguments
of decorators, fields of classes) is not tried, and counted.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OTHER = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.USub: ast.UAdd},
}
PAIRS = ("min max", "amin amax", "any all", "minimum maximum", "argmin argmax", "floor ceil")
NAMES = {a: b for pair in map(str.split, PAIRS) for a, b in (pair, pair[::-1])}
UNTRIED = (ast.Raise, ast.JoinedStr)  # texts of errors
PASSED, UNTRIED_HERE, DIED = 10**6, 10**6 + 1, 10**6 + 2


@dataclass
class Mutant:
    """Another value for a field of a node."""

    node: Any
    field: str
    value: Any
    line: int

    def describe(self) -> str:
        """Show what the node was and what it becomes."""
        before = _shown(self.node)
        kept = self.swap()
        after = _shown(self.node)
        self.node.__dict__[self.field] = kept
        return f"{before}  ->  {after}"

    def swap(self) -> Any:
        """Set the other value, and give the one that was there."""
        kept = getattr(self.node, self.field)
        setattr(self.node, self.field, self.value)
        return kept


def _shown(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def mutants(node: ast.AST, line: int = 0) -> Iterator[Mutant]:
    """Find all changes below a node, but not in annotations and in the texts of errors."""
    line = getattr(node, "lineno", line)
    yield from (Mutant(node, field, value, line) for field, value in changes(node))
    for field, below in ast.iter_fields(node):
        for child in below if isinstance(below, list) else [below]:
            wanted = isinstance(child, ast.AST) and not isinstance(child, UNTRIED)
            if wanted and field not in ("annotation", "returns"):
                yield from mutants(child, line)


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Name other values of a node's fields."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            yield "op", OTHER[type(op)]()
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            pass  # the last dimension
        case ast.UnaryOp(op=ast.USub()):
            yield "op", ast.UAdd()
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "operand", ast.UnaryOp(node.op, operand)
        case ast.Compare(ops=ops):
            yield from (("ops", [*ops[:i], OTHER[type(op)](), *ops[i + 1 :]]) for i, op in enumerate(ops))
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value)):
            yield from (("value", value + 1), ("value", value - 1))
        case ast.Constant(value=float(value)):
            yield from (("value", value + 1), ("value", value * 2 if value else -1.0))
        case ast.Attribute(attr=name) if name in NAMES:
            yield "attr", NAMES[name]
        case ast.Name(id=name) if name in NAMES:
            yield "id", NAMES[name]
        case ast.keyword(arg="min" | "max" as name):
            yield "arg", NAMES[name]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "test", ast.UnaryOp(ast.Not(), test)


def codes(code: CodeType) -> Iterator[CodeType]:
    """List the code of all functions, in the order of the text."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def functions(path: Path) -> list[FunctionType]:
    """Find the functions of an imported file."""
    found = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
    return [function for function in found if function.__code__.co_filename == str(path)]


def install(path: Path, made: list[FunctionType], first: ast.Module, tree: ast.Module) -> bool:
    """Give the functions and constants of an imported file what the tree makes of them; False where nothing
    differs in them."""
    before, after = (compile(part, str(path), "exec", dont_inherit=True) for part in (first, tree))
    other = {old: new for old, new in zip(codes(before), codes(after), strict=True) if old != new}
    (module,) = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(path))
    for cached in [thing for thing in vars(module).values() if hasattr(thing, "cache_clear")]:
        cached.cache_clear()
    changed = any(function.__code__ in other for function in made)
    for function in made:
        function.__code__ = other.get(function.__code__, function.__code__)
    for old, new in zip(ast.walk(first), ast.walk(tree), strict=False):
        if isinstance(old, ast.FunctionDef) and ast.dump(old.args) != ast.dump(new.args):
            names = [argument.arg for argument in new.args.kwonlyargs]
            for function in made:
                if (function.__name__, function.__code__.co_firstlineno) == (old.name, _first(old)):
                    values = zip(names, new.args.kw_defaults, strict=True)
                    given = {name: _value(value, path, module) for name, value in values if value is not None}
                    function.__kwdefaults__ = given or None
                    plain = tuple(_value(value, path, module) for value in new.args.defaults)
                    function.__defaults__ = plain or None
                    changed = True
    for old, new in zip(first.body, tree.body, strict=True):
        constant = isinstance(old, ast.Assign | ast.AnnAssign) and not other
        if constant and ast.dump(old) != ast.dump(new):
            name = _shown(old.targets[0] if isinstance(old, ast.Assign) else old.target)
            value, kept = _value(new.value, path, module), vars(module)[name]
            for holder in [m for m in sys.modules.values() if getattr(m, name, None) is kept]:
                setattr(holder, name, value)
                changed = True
    return changed


def _first(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _value(node: ast.expr, path: Path, module: Any) -> Any:
    return eval(compile(ast.Expression(node), str(path), "eval"), vars(module))


class Trials:
    """A plugin of pytest: where tests would run, they run once per mutant, each time in a new process."""

    def __init__(self, path: Path) -> None:
        self.path, self.first = path, ast.parse(path.read_text())
        self.made: list[FunctionType] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant, and print those that no test notices."""
        items, name = list(session.items), self.path.relative_to(ROOT)
        began = time.monotonic()
        if self.outcome(items, None) != PASSED:  # in this process, which imports what tests import late
            sys.exit(f"the tests of {name} fail as it stands: {', '.join(map(str, session.config.args))}")
        print()
        patience = 10 + 5 * (time.monotonic() - began)
        self.made = functions(self.path)
        if not self.made:
            sys.exit(f"none of the tests imports {name}; name others by --tests")
        gc.freeze()  # so that a fork copies no page for the collector's sake
        tree = ast.parse(self.path.read_text())
        tried, survived, untried = list(mutants(tree)), 0, 0
        for mutant in tried:
            said = mutant.describe()
            kept = mutant.swap()
            result = self.trial(items, ast.fix_missing_locations(tree), patience)
            setattr(mutant.node, mutant.field, kept)
            survived, untried = survived + (result == PASSED), untried + (result == UNTRIED_HERE)
            if result == PASSED:
                print(f"{name}:{mutant.line}: {said}", flush=True)
            elif result < len(items):  # the test that noticed goes first
                items.insert(0, items.pop(result))
        print(f"{name}: {survived} of {len(tried)} survive, {untried} not tried", flush=True)
        return True

    def trial(self, items: list[pytest.Item], tree: ast.Module, seconds: float) -> int:
        """Run tests until one fails: its place, or PASSED, UNTRIED_HERE or DIED."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.setsid()
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            os.write(write, str(self.outcome(items, tree)).encode())
            os._exit(0)
        os.close(write)
        end = time.monotonic() + seconds
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)
        with os.fdopen(read) as said:
            return int(said.read() or DIED)

    def outcome(self, items: list[pytest.Item], tree: ast.Module | None) -> int:
        """Change the file and run the tests, in this process."""
        try:
            if tree is not None and not install(self.path, self.made, self.first, tree):
                return UNTRIED_HERE
        except (SyntaxError, ValueError):  # a keyword that stands twice, functions that do not match
            return UNTRIED_HERE
        for place, item in enumerate(items):
            following = items[place + 1] if place + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if item.session.testsfailed:
                return place
        return PASSED


def tests_of(path: Path) -> list[str]:
    """Find the tests that have the name of a file: in the folder of its name, its scope's, or anywhere."""
    found = sorted((ROOT / "tests").rglob(f"test_{path.stem}.py"))
    near = [test for test in found if test.parent.name in path.parts] or found
    if not near:
        sys.exit(f"no tests/**/test_{path.stem}.py; name the tests of {path} by --tests")
    return [str(test) for test in near]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tests.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--tests", nargs="+", default=[], help="test files or folders")
    given = parser.parse_args()
    path = given.path.resolve()
    linked = ROOT / "mmrl" / path.relative_to(ROOT)  # `diffusion/x.py` is loaded through a link in mmrl/
    path = linked if linked.exists() else path
    options = ["-q", "-s", "-p", "no:cacheprovider", "-m", "not slow", "--no-header", "--tb=no"]
    sys.exit(pytest.main([*options, *(given.tests or tests_of(path))], plugins=[Trials(path)]))


if __name__ == "__main__":
    main()
