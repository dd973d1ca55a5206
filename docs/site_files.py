"""Pages of files, keys and papers: what stands in `configs/`, in the dataclasses of a configuration, and
which paper is used where."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from site_pieces import code, page_of, prose

from mmrl.cli.describe import describe_type
from mmrl.config import schema
from mmrl.config.keys import comments_of
from mmrl.config.registry import HOMES, SCOPES, pieces
from mmrl.reporting.methods import PAPER, Method, tables
from mmrl.trl.names import BOTH, DPO, GRPO, MODEL, NEUTRAL, REFUSED, SFT, SHARED

HERE = Path(__file__).parent
ROOT = HERE.parent
CONFIGS = ROOT / "configs"
METHODS = sorted((CONFIGS / "methods").rglob("*.yaml"))


def files_page(title: str, words: str, paths: Iterable[Path]) -> str:
    """Show YAML files as they stand."""
    parts = [f"# {title}\n", words + "\n"]
    for path in paths:
        parts.append(f"## {path.stem} {{#{path.stem}}}\n\n```yaml\n{path.read_text().strip()}\n```\n")
    return "\n".join(parts)


FAMILIES = {"grpo": "GRPO"}  # titles that are more than the name of the folder


def methods_table() -> str:
    """Make tables of methods from the heads of their files: the ones asked for by name, then the papers."""
    parts = []
    for name, methods in tables().items():
        title = FAMILIES.get(name, name.capitalize())
        parts += [f"### {title}\n", "| method | paper | what differs from GRPO | our reading |"]
        parts.append("| --- | --- | --- | --- |")
        for method in methods:
            papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in method.papers)
            link = f"[{method.name}](../configs/methods/{method.family}/{method.path.name})"
            parts.append(f"| {link} | {papers} | {method.differs} | {readings_of(method)} |")
        parts.append("")
    return "\n".join(parts)


def readings_of(method: Method) -> str:
    """Tell what of a method is our reading of its paper: by its file, and by which pieces' docstrings."""
    told = " ".join(method.readings)
    links = ", ".join(f"[`{entry.full_name}`]({page_of(entry)})" for entry in method.pieces_read_by_us())
    return f"{told} Of pieces: {links}".strip() if links else told


def trl_table() -> str:
    """Make the tables of TRL's arguments: the key of each here, what differs, and what is not here."""
    parts = []
    for title, rows in {
        "GRPOConfig": GRPO,
        "DPOConfig": DPO,
        "SFTConfig": SFT,
        "DPOConfig and SFTConfig": SHARED,
        "All three": BOTH,
        "Model, data, rewards": MODEL,
    }.items():
        parts += [f"### {title}\n", "| TRL | default | here | |", "| --- | --- | --- | --- |"]
        for name, row in rows.items():
            default = code(repr(row.default)) + ("" if row.dpo is ... else f", of DPO {code(repr(row.dpo))}")
            default += "" if row.sft in (..., None) else f", of SFT {code(repr(row.sft))}"
            here = code(row.key) if row.key else ""
            parts.append(f"| {code(name)} | {default} | {here} | {row.note} |")
        parts.append("")
    parts += ["### Refused\n", "At its default each of them may stay.\n"]
    parts += [f"- {code(name)}: {advice}" for name, (advice, _) in REFUSED.items()]
    parts += ["", "### No effect\n"]
    for words in dict.fromkeys(NEUTRAL.values()):
        parts.append(f"- {words} {', '.join(code(name) for name, why in NEUTRAL.items() if why == words)}")
    return "\n".join([*parts, ""])


KEYS = (
    "`include` lists files to start from; later keys win, mappings merge, lists replace. `method: dapo` "
    "includes, after them, the file of that name in configs/methods. A key that is named after a kind of "
    "piece holds a piece: a name, or a mapping with `name` and options. On the command line keys are dotted, "
    "and items of a list have numbers: `rollout.engine.0.max_completion_length=64`."
)
PARTS = {
    "Config": "A training run",
    "Rollout": "rollout",
    "Learn": "learn",
    "Evaluation": "evaluation",
    "Report": "report",
    "EvaluateConfig": "An evaluation (mmrl evaluate)",
    "BuildConfig": "Something to build (mmrl build)",
}


def keys_page() -> str:
    """Show the keys of every part of a configuration, with the comments that stand beside them."""
    lines = inspect.getsource(schema).splitlines()
    nodes = {node.name: node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)}
    parts = ["# Keys of a configuration\n", KEYS + "\n"]
    for name, title in PARTS.items():
        told = ast.get_docstring(nodes[name])
        told = "" if told == f"{title}." else prose(told)
        parts.append(f"## {title} {{#{name.lower()}}}\n\n{told}\n")
        parts.append("| key | default | | type |\n| --- | --- | --- | --- |")
        parts += keys_of(nodes[name], getattr(schema, name))
        parts.append("")
    return "\n".join(parts)


def keys_of(node: ast.ClassDef, owner: type) -> Iterator[str]:
    """Write a line for every field of a dataclass, with the comment behind it."""
    ends = {item.target.id: item for item in node.body if isinstance(item, ast.AnnAssign)}
    hints = typing.get_type_hints(owner, include_extras=True)
    for one in dataclasses.fields(owner):
        comment = comments_of(owner).get(one.name, "")
        note = ast.unparse(ends[one.name].annotation).removesuffix(" | None")
        kind = f"[{note.lower()}](#{note.lower()})" if note in PARTS else describe_type(hints[one.name])
        words = prose(comment) or ("keys of its own, below" if note in PARTS else "")
        yield f"| `{one.name}` | {value_of(one)} | {words} | {kind} |"


def value_of(one: dataclasses.Field) -> str:
    """Write a default as YAML has it."""
    if one.default_factory is not dataclasses.MISSING or type(one.default).__name__ in PARTS:
        return ""
    if one.default is dataclasses.MISSING:
        return "required"
    plain = schema.as_plain(one.default)
    return "" if plain in ("", [], None) else code(json.dumps(plain).replace('"', ""))


# ---- papers


def papers_page(variants: Iterable[Path]) -> str:
    """List every paper that a docstring, a variant or a page names, and where."""
    found: dict[str, list[str]] = defaultdict(list)
    called: dict[str, str] = {}

    def note(text: str, where: str) -> None:
        for paper in dict.fromkeys(PAPER.findall(text)):
            found[paper].append(where)
        for paper, name in {**methods_in(text), **titles(text)}.items():
            called.setdefault(paper, name)

    for path in variants:
        head = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        note(head, f"variant [{path.stem}](variants.md#{path.stem})")
    for path in sorted(HERE.rglob("*.md")):
        name = path.relative_to(HERE).as_posix()
        note(path.read_text(), f"[{path.stem}]({name})")
    for kind in HOMES:
        for entry in pieces(kind):
            note(inspect.getdoc(entry.target) or "", f"{kind} [`{entry.full_name}`]({page_of(entry)})")
    for path in code_files():
        told = ast.get_docstring(ast.parse(path.read_text())) or ""
        note(told, f"`{path.relative_to(ROOT).as_posix()}`")
    rows = [
        f"| [{paper}](https://arxiv.org/abs/{paper}) {called.get(paper, '')} | {', '.join(where)} |"
        for paper, where in sorted(found.items())
    ]
    head = ["# Papers\n", f"{len(rows)} papers by number, and where each is used.\n"]
    return "\n".join([*head, "| paper | where |", "| --- | --- |", *rows]) + "\n"


def titles(text: str) -> dict[str, str]:
    """Read what a docstring calls a paper: `(GRPO, arXiv 2402.03300)`."""
    found = re.findall(r"\(([A-Z][\w .+^-]{1,30}?),? arXiv\s+(\d{4}\.\d{5})", " ".join(text.split()))
    return {paper: name for name, paper in found}


def methods_in(text: str) -> dict[str, str]:
    """Read what the head of a method file calls its paper: `# DAPO (arXiv 2503.14476): ...`."""
    found = re.match(r"#? ?([A-Z][\w .+/^-]{1,40}?) \(arXiv\s+(\d{4}\.\d{5})", text)
    return {found[2]: found[1]} if found else {}


def code_files() -> list[Path]:
    """List the modules of the library."""
    return sorted(path for package in {*SCOPES.values()} for path in folder_of(package).rglob("*.py"))


def folder_of(package: str) -> Path:
    """Find the folder of a package."""
    return ROOT / package.rpartition(".")[2]
