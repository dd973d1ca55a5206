"""Published methods, read from `configs/methods`: papers, differences from GRPO, pieces used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mmrl.config.loading import read
from mmrl.config.registry import HOMES, Entry, pieces
from mmrl.config.schema import as_plain

PAPER = re.compile(r"(?<![\d.\w/])(\d{2}(?:0[1-9]|1[0-2])\.\d{5})(?![\d.]*\d)")  # an id of arXiv since 2015
READING = re.compile(r"\bour readings?\b", re.IGNORECASE)
DIFFERS = "Differs from GRPO: "
# The best-known methods, which come first in tables, in this order; other methods are grouped by family.
ASKED_FOR = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "rloo", "reinforce_pp", "gdpo", "ppo",
    "gigpo", "on_policy_distillation", "dpo", "tempsamp_r1", "urpa", "flow_grpo", "flow_grpo_fast",
    "flow_cps", "mix_grpo", "grpo_guard", "tp_grpo", "awm", "diffusion_nft", "vgpo", "gdro",
)  # fmt: skip
PLACES = {"rewards": "reward", "references": "reference", "metrics": "metric"}  # kind of piece by key


@dataclass(frozen=True)
class Method:
    """A published method, as described by its file in `configs/methods`.

    Args:
        path: Path of the file; the name of its folder is the family.
        comment: The comment lines at the head of the file, as one text.
        raw: The configuration in the file, merged with the files that it includes.
    """

    path: Path
    comment: str
    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the method: its file name without the ending."""
        return self.path.stem

    @property
    def family(self) -> str:
        """The family of the method: the folder of its file, such as `grpo` or `flow`."""
        return self.path.parent.name

    @property
    def papers(self) -> list[str]:
        """The distinct arXiv ids in the comment of the method's file."""
        return list(dict.fromkeys(PAPER.findall(self.comment)))

    @property
    def differs(self) -> str:
        """The sentences on differences from GRPO, without those about our reading of the paper."""
        parts = sentences(self.comment.partition(DIFFERS)[2])
        return " ".join(text for text in parts if not READING.search(text))

    @property
    def readings(self) -> list[str]:
        """The sentences about our reading of the paper, from the comment of the method's file."""
        before, _, after = self.comment.partition(DIFFERS)
        return [*readings(before), *readings(after)]

    def pieces(self) -> list[Entry]:
        """List the distinct pieces that the method's configuration uses."""
        named = dict.fromkeys(named_in(self.raw, ""))
        return [entry for kind in sorted(HOMES) for entry in pieces(kind) if (kind, entry.full_name) in named]

    def pieces_read_by_us(self) -> list[Entry]:
        """List the method's pieces whose docstring mentions our reading of a paper."""
        return [entry for entry in self.pieces() if readings(inspect.getdoc(entry.target) or "")]


@cache
def all_methods() -> tuple[Method, ...]:
    """Read all methods, sorted by family and name."""
    # `mmrl/configs` is a folder in an installed package, and a link to `configs/` in a checkout.
    paths = sorted((Path(__file__).parents[1] / "configs" / "methods").rglob("*.yaml"))
    return tuple(Method(path, comment_of(path.read_text()), as_plain(read(path))) for path in paths)


def tables(family: str | None = None) -> dict[str, list[Method]]:
    """Group methods for tables: the best-known methods (`ASKED_FOR`) first, then the others by family."""
    chosen = [method for method in all_methods() if family in (None, method.family)]
    by_name = [method for method in chosen if method.name in ASKED_FOR]
    grouped = {"asked for by name": sorted(by_name, key=lambda method: ASKED_FOR.index(method.name))}
    for method in chosen:
        if method not in by_name:
            grouped.setdefault(method.family, []).append(method)
    return {title: methods for title, methods in grouped.items() if methods}


def comment_of(text: str) -> str:
    """Join all comment lines of a YAML file to one text."""
    return " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))


def readings(text: str) -> list[str]:
    """List the sentences of a text that mention our reading of a paper."""
    return [sentence for sentence in sentences(text) if READING.search(sentence)]


def sentences(text: str) -> list[str]:
    """Split a text into sentences: at a stop that is followed by a capital letter or a backtick."""
    return [part for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split())) if part]


def named_in(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) for every text in a configuration that may name a piece; `key` tells the kind."""
    kind = PLACES.get(key, key)
    match value:
        case str():
            yield kind, value
        case list():
            for inner in value:
                yield from named_in(inner, key)
        case dict():
            if "name" in value:
                yield kind, value["name"]
            for inner_key, inner in value.items():
                if inner_key != "name":
                    yield from named_in(inner, kind if key == "references" else inner_key)
