"""Every key, piece and name that README and docs put in backticks exists."""

from __future__ import annotations

import importlib
import re
from functools import cache
from itertools import chain

from mmrl.config.keys import keys_of
from mmrl.config.registry import HOMES, pieces
from mmrl.config.schema import BuildConfig, Config, EvaluateConfig
from tests.support.doc_blocks import PAGES, ROOT

FOLDERS = ("mmrl", "vision", "diffusion", "compression", "configs", "examples", "benchmarks", "tests")
# Names of the reader's own, in examples that sentences speak of, and of other projects.
OTHERS = {"activate", "few_cups", "my_game", "Maze", "node7", "my_stages", "my_pairs", "demo1", "working_dir"}
OTHERS |= {
    "Unpublished",
    "answers_images",
    "video_pruning_rate",
    "a0b2bc5",
    "slic",
    "robust_dpo",
    "history_n",
    "answerer",
}


@cache
def words() -> frozenset[str]:
    """Words of code and configurations, and the names of files and of columns that code writes."""
    files = chain.from_iterable((ROOT / folder).rglob("*.*") for folder in FOLDERS)
    known = {word for name in ("pyproject.toml", "Makefile") for word in re.findall(r"\w+", text(name))}
    for path in files:
        known |= {path.stem}
        if path.suffix in {".py", ".pyi", ".yaml", ".sh"}:
            known |= set(re.findall(r"\w+", path.read_text()))
    return frozenset(known)


def text(name: str) -> str:
    return (ROOT / name).read_text()


def code_in_sentences() -> list[tuple[str, str]]:
    """Page and text of everything in backticks, blocks left out."""
    return [
        (page.relative_to(ROOT).as_posix(), code)
        for page in PAGES
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    ]


def test_names_in_backticks_are_words_of_the_code():
    unknown = [
        f"{page}: `{code}`: no code, configuration or file has the name '{word}'"
        for page, code in code_in_sentences()
        if not re.search(r"[{*]|^eval_|/step_", code)  # patterns, and names that are put together
        for word in re.findall(r"[A-Za-z_]\w+", code)
        if word not in words() | OTHERS
    ]
    assert not unknown, "\n".join(unknown)


def test_keys_in_backticks_exist():
    keys = [key for kind in (Config, EvaluateConfig, BuildConfig) for key in keys_of(kind)]
    places = {key.place for key in keys}
    places |= {f"{key.place}.{option}" for key in keys if key.kind for option in options_of(key.kind.name)}
    sections = {place.partition(".")[0] for place in places if "." in place}
    unknown = [
        f"{page}: `{code}`: there is no key '{name}'; `mmrl keys` lists all"
        for page, code in code_in_sentences()
        for name in re.findall(r"(?<![\w./-])[a-z_]+\.[a-z_]*[a-z](?![\w/.(])", code)
        if name.partition(".")[0] in sections
        and not name.endswith((".html", ".json", ".jsonl", ".py", ".yaml"))
        if name not in places
    ]
    assert not unknown, "\n".join(unknown)


def options_of(kind: str) -> set[str]:
    """Options that some piece of a kind has, and those that every piece of it may have beside its own."""
    return {"name", "where", "weight", "label"} | {
        option for entry in pieces(kind) for option in entry.options
    }


def test_pieces_in_backticks_exist():
    named = {entry.full_name for kind in HOMES for entry in pieces(kind)}
    unknown = [
        f"{page}: `{code}`: there is no piece and no module '{name}'; `mmrl list` prints the pieces"
        for page, code in code_in_sentences()
        for name in re.findall(r"(?<![\w./:])((?:vision|diffusion|compression)\.[a-z]\w+)(?![\w/(])", code)
        if name not in named and not is_module(name)
    ]
    assert not unknown, "\n".join(unknown)


def is_module(name: str) -> bool:
    """Whether the library has a module, or a doctor's check group, of this name."""
    try:
        importlib.import_module(f"mmrl.{name}")
    except ModuleNotFoundError:
        return False
    return True
