"""Fenced blocks of README and docs, and how each kind of them is run.

A block whose first line is `# name.py` or `# name.yaml` is a file in the reader's folder; the other blocks of
the page see it. Nothing is skipped: a language without an entry in `KINDS`, and a command without one, are
errors.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
import textwrap
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from mmrl import cli as command_line
from mmrl.build import check
from mmrl.cli.check import check_file
from mmrl.cli.command import split_overrides
from mmrl.cli.evaluate import toolkit_options
from mmrl.config import registry
from mmrl.config.binding import Pieces
from mmrl.config.consistency import check_some
from mmrl.config.keys import keys_of
from mmrl.config.loading import read
from mmrl.config.schema import Config as Training
from mmrl.config.schema import as_piece, is_part, parse_some
from mmrl.config.stages import load_stages
from mmrl.core.rng import Stream

command_line.parser()  # imports every command now, not while a test has replaced what they import
ROOT = Path(__file__).parents[2]
command_line.parser()  # imports the commands now, not where a test has replaced what they import
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^ *```\s*$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")


class Untrue(AssertionError):
    """A page says something that does not work."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def file(self) -> str:
        """Name the file that the block is, if it is one."""
        named = FILE.match(self.text)
        return named[1] if named else ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    """Cut the fenced blocks out of a page."""
    if text.count("```") % 2:
        raise Untrue(f"{page}: a block is never closed")
    return [
        Block(
            page,
            text.count("\n", 0, one.start()) + 1,
            one["kind"].strip(),
            textwrap.dedent(one["text"]),
        )
        for one in FENCE.finditer(text)
    ]


def inline_commands(text: str) -> Iterator[str]:
    """Find the commands inside sentences and tables."""
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text)):
        if re.match(r"(mmrl|make|pip|python|accelerate) ", code):
            yield code


# ---- the reader's folder


@contextmanager
def folder_of(blocks: Sequence[Block], folder: Path) -> Iterator[None]:
    """Put the files of a page where Python finds them, and forget everything that they registered."""
    for block in blocks:
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    from mmrl.core.modalities import MODALITIES
    from mmrl.vision.models.model_families import FAMILIES

    modules = set(sys.modules)
    tables = [(table, dict(table)) for table in (FAMILIES, MODALITIES, registry.HOMES)]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        for block in blocks:
            if block.kind == "python" and "/" in block.file:  # a piece in its home is found by its name
                with suppress(Exception):  # which the test of that block itself reports
                    run_python(block, folder)
        yield
    finally:
        sys.path.remove(str(folder))
        for table, before in tables:
            table.clear()
            table.update(before)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
                for key, entry in list(registry.PIECES.items()):
                    if entry.target.__module__ == name:
                        del registry.PIECES[key]


# ---- kinds of blocks


def run(block: Block, folder: Path) -> None:
    """Run one block in the reader's folder."""
    if block.kind not in KINDS:
        raise Untrue(
            f"{block.name}: nobody knows how to run a block of kind '{block.kind}'; use {', '.join(KINDS)}"
        )
    try:
        KINDS[block.kind](block, folder)
    except (Exception, SystemExit) as error:
        raise Untrue(f"{block.name}: {type(error).__name__}: {error}") from error


def run_python(block: Block, folder: Path) -> None:
    """Import a block that is a file, as the module it would be, and call its tests; run any other."""
    if not block.file:
        exec(compile(block.text, block.name, "exec"), {"__name__": "block"})
        return
    path = Path(block.file)
    scope = f"mmrl.{'.'.join(path.parts[:-1])}." if len(path.parts) > 1 else ""
    spec = importlib.util.spec_from_file_location(scope + path.stem, folder / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, value in vars(module).items():
        if name.startswith("test_"):
            value()


def check_yaml(block: Block, folder: Path) -> None:
    """Resolve every name and option: of a whole configuration, or of a part of one."""
    path = folder / (block.file or "block.yaml")
    path.write_text(block.text)
    check_raw(read(path), folder)


def check_raw(raw: dict, folder: Path) -> None:
    """Check plain mappings as `mmrl check` would check their file."""
    if not is_part(raw) and not {"rollout", "evaluation", "build"} & set(raw):
        Pieces(Stream()).check("policy", as_piece(raw.pop("policy"), "policy"))
        check_some(raw, parse_some(raw, Training))
        return
    path = folder / "resolved.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(raw)))
    check_file(path)


def check_sh(block: Block, folder: Path) -> None:
    """Check every line of a shell block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            check_words(words, folder)


def check_rows(block: Block, folder: Path) -> None:
    """Read every line as the JSON object that a row is."""
    for line in block.text.splitlines():
        dict(json.loads(line))


KINDS: dict[str, Callable[[Block, Path], None]] = {
    "python": run_python,
    "yaml": check_yaml,
    "sh": check_sh,
    "jsonl": check_rows,
}


# ---- commands


def check_words(words: list[str], folder: Path) -> None:
    """Check a command without running it: its options by the real parser, its configuration resolved."""
    match words:
        case [set_before, *rest] if re.match(r"[A-Za-z]\w*=", set_before) and rest:
            check_words(rest, folder)
        case [python, *rest] if re.fullmatch(r"\.venv\S*/bin/python", python):
            check_words(["python", *rest], folder)
        case ["make", *targets]:
            check_make(targets)
        case ["pip", "install", *wanted]:
            check_install(wanted)
        case ["mmrl", *rest] | ["python", "-m", "mmrl", *rest]:
            check_mmrl(rest, folder)
        case ["python", "-m", module, *flags]:
            check_module(module, flags)
        case ["accelerate", "launch", *rest]:
            check_launch(rest, folder)
        case _:
            raise Untrue(f"nobody knows how to check `{' '.join(words)}`")


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def make_targets() -> set[str]:
    """Name what the Makefile makes for people."""
    return set(re.search(r"^\.PHONY: (.*)$", makefile(), re.MULTILINE)[1].split())


def check_make(words: Sequence[str]) -> None:
    """See that targets exist, and that their programs take the flags of ARGS."""
    (target,) = [word for word in words if "=" not in word]
    if target not in make_targets():
        raise Untrue(f"the Makefile makes {sorted(make_targets())}, not '{target}'")
    recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", makefile(), re.MULTILINE)[1]
    given = [word.partition("=") for word in words if "=" in word]
    for name, _, value in given:
        if f"$({name})" not in recipe:
            raise Untrue(f"`make {target}` does not read {name}")
        check_module(re.search(r"-m ([\w.]+)", recipe)[1], shlex.split(value))


def check_module(module: str, flags: Sequence[str]) -> None:
    """See that a module is there, and that its source names every flag."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise Untrue(f"there is no module '{module}'")
    source = "" if module in ("http.server", "pytest") else Path(spec.origin).read_text()
    for flag in flags:
        if flag.startswith("--") and source and f'"{flag}"' not in source:
            raise Untrue(f"'{module}' takes no {flag}")


def check_install(words: Sequence[str]) -> None:
    """See that extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if word.startswith("-"):
            continue
        package = re.fullmatch(r"(?:\.|mmrl)(?:\[([\w,]+)\])?", word)
        if not package:
            raise Untrue(f"'{word}' is not this package")
        unknown = set((package[1] or "").split(",")) - {"", *extras}
        if unknown:
            raise Untrue(f"there is no extra {sorted(unknown)}; there are {sorted(extras)}")


def check_launch(words: Sequence[str], folder: Path) -> None:
    """Read a launch with accelerate's own parser, and the command behind it with ours."""
    from accelerate.commands.launch import launch_command_parser

    given = launch_command_parser().parse_args(list(words))
    if given.config_file and not (ROOT / given.config_file).is_file():
        raise Untrue(f"there is no file '{given.config_file}'")
    if not given.module or given.training_script != "mmrl":
        raise Untrue("launch the module: -m mmrl")
    check_mmrl(given.training_script_args, folder)


def check_mmrl(words: Sequence[str], folder: Path) -> None:
    """Parse a command of ours, and check what it would do first."""
    given, late = command_line.parser().parse_known_args(list(words))
    if late and (not hasattr(given, "overrides") or any(word.startswith("-") for word in late)):
        raise Untrue(f"`mmrl {' '.join(words)}`: unrecognized {late}")
    if late:  # overrides after a flag, as `mmrl.cli.main` reads them
        given.overrides = [*given.overrides, *late]
    name = given.command.__name__
    if name not in COMMANDS:
        raise Untrue(f"nobody knows how to check `mmrl {words[0]}`; enter '{name}' in COMMANDS")
    COMMANDS[name](given, folder)


def found(name: str, folder: Path) -> str | Path:
    """Find a file in the reader's folder or in the repository; else the name, which may be one of ours."""
    return next((path for path in (folder / name, ROOT / name) if path.is_file()), name)


def check_config(given: Namespace, folder: Path) -> None:
    """Resolve the configuration with its overrides."""
    if read(found(given.config, folder)).get("stages"):
        return check_run(given, folder)
    check_raw(read(found(given.config, folder), given.overrides), folder)


def check_evaluate(given: Namespace, folder: Path) -> None:
    """Resolve an evaluation's configuration, or read the options of another toolkit."""
    if not given.toolkit:
        return check_config(given, folder)
    toolkit_options(given.toolkit, given.overrides)


def check_run(given: Namespace, folder: Path) -> None:
    """Resolve the configuration of a whole run, or of its stages."""
    for stage in load_stages(found(given.config, folder), given.overrides):
        check(stage.config)


def check_several(paths: Sequence[str], overrides: Sequence[str], folder: Path) -> None:
    """Resolve every configuration with the same overrides."""
    for path in paths:
        check_config(Namespace(config=path, overrides=overrides), folder)


def check_list(given: Namespace, folder: Path) -> None:
    if given.kind == "methods":  # which are files, by family
        if given.family and not (Path(__file__).parents[2] / "configs/methods" / given.family).is_dir():
            raise Untrue(f"there is no family '{given.family}'")
        return
    if given.kind is not None and given.kind not in registry.HOMES:
        raise Untrue(f"there is no kind '{given.kind}'")
    if given.piece and not any(given.piece in (e.name, e.full_name) for e in registry.pieces(given.kind)):
        raise Untrue(f"there is no {given.kind} '{given.piece}'")


def check_prefix(given: Namespace, folder: Path) -> None:
    """See that keys begin with what is listed."""
    if not any(f"{key.place}.".startswith(f"{given.prefix}.") for key in keys_of(Training)):
        raise Untrue(f"no key begins with '{given.prefix}'")


def nothing_more(given: Namespace, folder: Path) -> None:
    """Parsing was all: the rest is the reader's data."""


def check_named(given: Namespace, folder: Path) -> None:
    """Resolve the configurations among what a command names; runs and models are the reader's."""
    names = [vars(given).get(name, "") for name in ("model", "source", "first", "second")]
    for name in names:
        if name.endswith(".yaml"):
            check_config(Namespace(config=name, overrides=given.overrides), folder)


COMMANDS: dict[str, Callable[[Namespace, Path], None]] = {
    **dict.fromkeys(("train", "doctor", "estimate_memory", "serve_command"), check_run),
    "build": check_config,
    "evaluate": check_evaluate,
    "check": lambda given, folder: check_several(*split_overrides(given.configs), folder),
    "show": check_list,
    "check_data": nothing_more,
    "keys": check_prefix,
    "report": nothing_more,
    "compare": nothing_more,
    "watch": nothing_more,
    "pareto_front": nothing_more,
    "push": nothing_more,
    **dict.fromkeys(("generate", "chat", "export", "compare_answers"), check_named),
    "env": nothing_more,
}


def check_inline(code: str) -> None:
    """See that a command in a sentence has a name that there is."""
    words = [word for word in shlex.split(code) if word != "..."]
    match words:
        case ["make", target, *_] if target not in make_targets():
            raise Untrue(f"there is no `make {target}`")
        case ["mmrl", *rest]:
            # Sentences leave out what is clear: a configuration, a path.
            for missing in ([], ["x"]):
                try:
                    command_line.parser().parse_args([*rest, *missing])
                    return
                except SystemExit:
                    continue
            raise Untrue(f"there is no command `{code}`")
        case ["pip", "install", *wanted]:
            check_install(wanted)
