"""Pages of pieces: one per family, made of the registry and the docstrings."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config import ranges, schema
from mmrl.config.registry import HOMES, Entry, pieces
from mmrl.core.types import Unit

PAPER = re.compile(r"(?<![\d.\w/])(\d{2}(?:0[1-9]|1[0-2])\.\d{5})(?![\d.]*\d)")
FILLED = ("stream", "generator")  # options that the run gives, not the configuration


@dataclass(frozen=True)
class Family:
    """A page of pieces: what it begins with, and the kinds whose pieces stand on it."""

    title: str
    kinds: tuple[str, ...]
    words: str


FAMILIES = {
    "advantages": Family(
        "Advantages",
        ("advantage",),
        "The chain: functions from reward table to reward table. Their order is the method. "
        "`advantage: [total, group_normalize]` is GRPO's.",
    ),
    "surrogates": Family(
        "Ratios and surrogates",
        ("objective", "ratio", "surrogate"),
        "An objective turns the step table into a loss. `policy_gradient` takes a ratio of new to old "
        "probability and a surrogate of ratio and advantage; `comparison` sets rows against each other "
        "([its own page](comparisons.md)).",
    ),
    "aggregates": Family(
        "Aggregates and focus",
        ("aggregation", "step_weight"),
        "How much a step counts. An aggregate divides; a focus multiplies afterwards, so that a weight of 2 "
        "counts twice.",
    ),
    "penalties": Family(
        "Penalties",
        ("penalty",),
        "Terms per step that are added to the loss: distance to a reference, entropy, imitation.",
    ),
    "comparisons": Family(
        "Comparisons and preferences",
        ("implicit_reward", "compare"),
        "A gain is what a step adds to the evidence for its row; a comparison turns the evidence of a group "
        "into a loss. A pair is a group of two rows with the advantages 1 and -1.",
    ),
    "flow": Family(
        "Flow models: likelihoods, solvers, families",
        ("likelihood", "solver", "family"),
        "A likelihood says what a step of a flow model is, a solver takes stochastic steps, and a family "
        "knows one model family of diffusers.",
    ),
    "engines": Family(
        "Policies and engines",
        ("policy", "engine"),
        "A policy gives every step a log-probability and is what learns. An engine makes rollouts: the first "
        "of `rollout.engine` takes the policy, each next one wraps the one before.",
    ),
    "rewards": Family(
        "Rewards",
        ("reward",),
        "A reward gives one number per outcome; higher is better, `None` where it does not apply. Any reward "
        "may carry `weight`, `label`, `timeout`, `retries`, `on_error` and `on_absent`.",
    ),
    "compression": Family(
        "Compression: caches and transforms",
        ("cache", "transform"),
        "A cache is an option of `vision.generate`, a transform an option of a policy. "
        "[How to make a model cheaper](../howto/cheaper.md) has the figures.",
    ),
    "sampling": Family(
        "Samplers, filters, references, schedules, optimizers",
        ("sampler", "group_filter", "reference", "schedule", "optimizer"),
        "A sampler chooses prompts, a filter drops whole groups after scoring, a reference is a policy to "
        "stay near. Any option that takes a number takes a schedule.",
    ),
    "data": Family(
        "Data and builders",
        ("data", "builder", "data_check"),
        "Data sets give prompts, builders write data sets and model folders (`mmrl build`), checks look at "
        "rows and media (`mmrl data check`).",
    ),
    "sight": Family(
        "Metrics, alarms, checkups, trackers",
        ("metric", "alarm", "checkup", "visualization", "estimate"),
        "What is measured, what a run warns of, what the doctor looks at, what a page shows, and the rest.",
    ),
}
SCOPE_WORDS = {"": "Any modality", "vision": "Vision", "diffusion": "Diffusion", "compression": "Compression"}


LAST = "sight"  # the page of kinds that no other page has


def kinds_of(name: str) -> tuple[str, ...]:
    """List the kinds on a page."""
    named = {kind for family in FAMILIES.values() for kind in family.kinds}
    rest = tuple(kind for kind in HOMES if kind not in named) if name == LAST else ()
    return FAMILIES[name].kinds + rest


def family_page(name: str, used: Mapping[tuple[str, str], list[str]]) -> str:
    """Show every piece of a family: options, docstring, what it reads, and which variants name it."""
    family, kinds = FAMILIES[name], kinds_of(name)
    parts = [f"# {family.title}\n", family.words + "\n"]
    for kind in kinds:
        entries = pieces(kind)
        if len(kinds) > 1:
            parts.append(f"## {kind.replace('_', ' ').capitalize()}\n")
        for scope, words in SCOPE_WORDS.items():
            inside = [entry for entry in entries if entry.scope == scope]
            if inside and {entry.scope for entry in entries} != {scope}:
                parts.append(f"{'###' if len(kinds) > 1 else '##'} {words} {{#{kind}-of-{scope or 'all'}}}\n")
            parts += [piece_text(entry, used.get((kind, entry.full_name), [])) for entry in inside]
    return "\n".join(parts)


def piece_text(entry: Entry, variants: Iterable[str]) -> str:
    """Show one piece."""
    lines = [f"#### `{entry.full_name}` {{#{anchor(entry)}}}\n", prose(inspect.getdoc(entry.target) or "")]
    options = {name: p for name, p in entry.options.items() if name not in FILLED}
    if options:
        lines += ["", "| option | type | default |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {code(kind_of(p))} | {default_of(p)} |" for name, p in options.items()]
    reads = read_by(entry)
    if reads:
        lines += ["", f"Reads: {reads}."]
    named = ", ".join(f"[{name}](../variants.md#{name})" for name in variants)
    if named:
        lines += ["", f"In variants: {named}."]
    return "\n".join(lines) + "\n"


def anchor(entry: Entry) -> str:
    """Name the place of a piece on its page."""
    return f"{entry.kind}-{entry.full_name.replace('.', '-')}"


def page_of(entry: Entry) -> str:
    """Find the page of a piece."""
    name = next(name for name in FAMILIES if entry.kind in kinds_of(name))
    return f"families/{name}.md#{anchor(entry)}"


def read_by(entry: Entry) -> str:
    """Say what a piece asks for: fields of the policy, other policies, notes, whole rows or groups."""
    needs, told = entry.needs, []
    if needs.extra:
        told.append("of the policy " + ", ".join(f"`{name}`" for name in sorted(needs.extra)))
    for name, fields in sorted(needs.others.items()):
        told.append(f"`{name}`" + "".join(f" (`{one}`)" for one in sorted(fields)))
    if entry.of_others:
        told.append(
            "of the policy named by `against` " + ", ".join(f"`{one}`" for one in sorted(entry.of_others))
        )
    if needs.notes:
        told.append("notes " + ", ".join(f"`{name}`" for name in sorted(needs.notes)))
    if needs.unit is not Unit.STEP:
        told.append(f"whole {needs.unit.name.lower()}s")
    return "; ".join(told)


def kind_of(parameter: inspect.Parameter) -> str:
    """Write a type as its annotation stands, with its range in words."""
    note = parameter.annotation
    note = note if isinstance(note, str) else getattr(note, "__name__", str(note))
    for name, wanted in vars(ranges).items():
        if typing.get_origin(wanted) is typing.Annotated:
            words = f"{wanted.__origin__.__name__} ({wanted.__metadata__[0]})"
            note = re.sub(rf"\b{name}\b", words, note)
    # Ranges that have no name of their own; the text is of our own source.
    spell = lambda found: f"{found[1]} ({eval(found[2], vars(ranges))})"
    return re.sub(r"Annotated\[(.*), (\w+\([^()]*\))\]", spell, note)


def default_of(parameter: inspect.Parameter) -> str:
    """Write a default as YAML would have it; required options say so."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, schema.Piece):
        return code(default.name)
    if default is None or isinstance(default, bool):
        return code({None: "none", True: "true", False: "false"}[default])
    plain = json.dumps(schema.as_plain(default)) if isinstance(default, tuple | Mapping) else str(default)
    return code(plain.replace('"', "")) if plain else "empty"


def code(text: str) -> str:
    """Set a text as code inside a table."""
    return f"`{text}`" if text else ""


def prose(docstring: str) -> str:
    """Make Markdown of a docstring: code as it is, everything else without meaning to Markdown, papers as
    links."""
    parts = re.split(r"(`[^`]*`)", docstring)
    escaped = [part if part.startswith("`") else re.sub(r"([<>*_\[\]])", r"\\\1", part) for part in parts]
    return linked("".join(escaped).replace("\\>", "&gt;").replace("\\<", "&lt;"))


def linked(text: str) -> str:
    """Link numbers of papers to arXiv."""
    return PAPER.sub(r"[\1](https://arxiv.org/abs/\1)", text)


def uses(variants: Iterable[Path]) -> dict[tuple[str, str], list[str]]:
    """List the variants that name a piece, by kind and name; what they include counts."""
    used: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = {entry.full_name: [] for kind in HOMES for entry in pieces(kind)}
    for kind in HOMES:
        for entry in pieces(kind):
            known[entry.full_name].append(kind)
    for path in variants:
        for kind, name in dict.fromkeys(named_in(schema.read(path), "")):
            if kind in known.get(name, ()):
                used[kind, name].append(path.stem)
    return used


PLACES = {"rewards": "reward", "references": "reference", "metrics": "metric"}


def named_in(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Walk through a configuration, and name every text with the kind that its key stands for."""
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
