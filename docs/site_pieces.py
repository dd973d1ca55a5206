"""Pages of pieces: one per kind, made of the registry and the docstrings."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from mmrl.cli.describe import split_docstring
from mmrl.config import ranges, schema
from mmrl.config.registry import HOMES, Entry, pieces
from mmrl.core.types import Unit
from mmrl.reporting.methods import PAPER, named_in

FILLED = ("stream", "generator", "train_prompts")  # options that the run gives, not the configuration


# A sentence at the head of a kind's page; a kind without one has its name.
WORDS = {
    "advantage": "The chain: functions from reward table to reward table. Their order is the method; "
    "`advantage: [total, group_normalize]` is GRPO's.",
    "objective": "From the step table to a loss. `policy_gradient` takes a ratio and a surrogate, "
    "`comparison` compares the rows of a group.",
    "ratio": "Log-ratio of new to old probability, per step or per answer: `(new, batch) -> (N, T)`.",
    "surrogate": "Per-step loss from ratio and advantage: `(log_ratio, new, batch) -> (N, T)`.",
    "aggregation": "How steps add up: weights that divide, `(batch) -> (N, T)`.",
    "step_weight": "Multipliers applied after the aggregation has divided: `(batch) -> (N, T)`.",
    "penalty": "Terms per step that are added to the loss: divergence from a reference, entropy, imitation.",
    "implicit_reward": "What a step adds to the evidence for its row; DPO's implicit reward, per step.",
    "compare": "From the implicit rewards of a group to a loss. A pair is a group of two rows.",
    "likelihood": "What a step of a flow model is, and its log-density.",
    "solver": "Stochastic steps that keep the marginals of the flow.",
    "family": "Adapters to the pipelines of diffusers.",
    "policy": "Gives every step a log-probability, and is what learns.",
    "engine": "Makes rollouts. The first of `rollout.engine` takes the policy, each next one wraps the "
    "one before.",
    "reward": "One number per outcome, higher is better, `None` where it does not apply. Any reward may "
    "carry `weight`, `label`, `timeout`, `retries`, `on_error`, `on_absent`, `where`, the columns of the "
    "prompts that it is asked about: `where: {source: gui}`, and `at`, the turns of a conversation: `last` "
    "(the usual), `every`, or a tag of them, as `role` or `role=spy`.",
    "cache": "An option of `vision.generate`. [How to make a model cheaper](../howto/cheaper.md) has the"
    " figures.",
    "transform": "An option of a policy, or of an engine alone: model to model, for instance pruning.",
    "sampler": "Chooses prompts, and how often each is answered.",
    "experience_update": "An option of the sampler `with_experience`: from experiences and compared "
    "answers to changes of the list, `(experiences, groups) -> [{add: text}, ...]`.",
    "group_filter": "Drops whole groups after scoring (dynamic sampling).",
    "stop_rule": "Ends a run, or a stage of one, before `max_steps` (`until`).",
    "reference": "A policy to stay near.",
    "schedule": "In place of any option that takes a number.",
    "optimizer": "From named trained parameters to a torch optimizer.",
    "data": "Data sets of prompts.",
    "builder": "Writes data sets and model folders (`mmrl build`).",
    "check": "Checks of data (`mmrl data check`), of the first step (`report.startup_checks`, `mmrl "
    "doctor`) and of a running training (`report.checks`).",
    "metric": "Numbers of a reward table, for reports and evaluations.",
    "visualization": "Images and tables for the report.",
    "cost": "What an evaluation's setting spends (`cost_metrics`).",
    "memory_estimate": "What a run takes of memory (`mmrl estimate-memory`).",
    "tool": "An option of `vision.with_tools`: functions that a model may call. Any tool may carry "
    "`timeout`, `retries` and `on_error`. [How to give a model tools](../howto/tools.md).",
    "environment": "An option of `vision.with_environments`: classes whose objects a model acts in. Any may "
    "carry `label`, `timeout`, `retries` and `on_error`. [How to bring one](../howto/environment.md).",
    "game": "An option of the engine `play`: the rules of a game between roles. [How to bring a "
    "game](../howto/game.md).",
    "tracker": "Dashboards (`report.trackers`).",
}
SCOPE_WORDS = {"": "Any modality", "vision": "Vision", "diffusion": "Diffusion", "compression": "Compression"}


def title_of(kind: str) -> str:
    """Name a kind in words."""
    return kind.replace("_", " ").capitalize()


def kind_page(kind: str, used: Mapping[tuple[str, str], list[str]]) -> str:
    """Show every piece of a kind: options, docstring, what it reads, and which method files name it."""
    parts = [f"# {title_of(kind)}\n", WORDS.get(kind, f"Pieces of the kind `{kind}`.") + "\n"]
    entries = pieces(kind)
    for scope, words in SCOPE_WORDS.items():
        inside = [entry for entry in entries if entry.scope == scope]
        if inside and {entry.scope for entry in entries} != {scope}:
            parts.append(f"## {words} {{#{kind}-of-{scope or 'all'}}}\n")
        parts += [piece_text(entry, used.get((kind, entry.full_name), [])) for entry in inside]
    return "\n".join(parts)


def piece_text(entry: Entry, variants: Iterable[str]) -> str:
    """Show one piece."""
    words, meanings = split_docstring(inspect.getdoc(entry.target) or "")
    lines = [f"### `{entry.full_name}` {{#{anchor(entry)}}}\n", prose(words)]
    options = {name: p for name, p in entry.options.items() if name not in FILLED}
    if options:
        lines += ["", "| option | type | default | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | {code(kind_of(p))} | {default_of(p)} | {prose(meanings.get(name, ''))} |"
            for name, p in options.items()
        ]
    reads = read_by(entry)
    if reads:
        lines += ["", f"Reads: {reads}."]
    named = ", ".join(f"[{name}](../variants.md#{name})" for name in variants)
    if named:
        lines += ["", f"In method files: {named}."]
    return "\n".join(lines) + "\n"


def anchor(entry: Entry) -> str:
    """Name the place of a piece on its page."""
    return f"{entry.kind}-{entry.full_name.replace('.', '-')}"


def page_of(entry: Entry) -> str:
    """Find the page of a piece."""
    return f"pieces/{entry.kind}.md#{anchor(entry)}"


def read_by(entry: Entry) -> str:
    """Say what a piece asks for: fields of the policy, other policies, notes, whole rows or groups."""
    needs, told = entry.needs, []
    if needs.outputs:
        told.append("of the policy " + ", ".join(f"`{name}`" for name in sorted(needs.outputs)))
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
            of = wanted.__origin__
            spelled = str(of).replace("collections.abc.", "") if typing.get_args(of) else of.__name__
            words = f"{spelled} ({wanted.__metadata__[0]})"
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
