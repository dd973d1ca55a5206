"""Translates arguments of TRL's GRPOConfig and DPOConfig into a configuration of mmrl.

`mmrl.config.trl_table` lists every argument. What one value alone does not decide is a rule in
`mmrl.config.trl_objective` or `mmrl.config.trl_run`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from mmrl.config.loading import ConfigError, merge, nearest
from mmrl.config.plain import ABSENT, lookup, nested
from mmrl.config.trl_given import Change, Given, processes
from mmrl.config.trl_objective import OBJECTIVE_RULES
from mmrl.config.trl_run import RUN_RULES
from mmrl.config.trl_table import ARGUMENTS, DPO_ONLY, PARTS, SHARED

RULES = {**OBJECTIVE_RULES, **RUN_RULES}
log = logging.getLogger("mmrl")


def translate(arguments: Mapping[str, Any], onto: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Translate arguments of TRL into a change that `mmrl.config.loading.merge` merges over a method's file.

    Args:
        arguments: Keyword arguments of GRPOConfig or DPOConfig, and those that they inherit. What is not
            given stays as the file has it; where several belong together, TRL's defaults complete them.
        onto: The plain configuration that will be changed, where it is known: it says what kind of objective
            there is, and which pieces the change is for.

    Raises `ConfigError` for an unknown argument, and for a value that nothing here corresponds to.
    """
    given = Given({k: _plain(v) for k, v in arguments.items()}, onto or {}, processes())
    rules: dict[str, None] = {}  # an ordered set
    change: Change = {}
    for name, value in given.values.items():
        row = ARGUMENTS.get(name)
        if row is None:
            hint = nearest(name, ARGUMENTS) or "see docs/howto/trl.md"
            raise ConfigError(f"TRL has no argument '{name}'; {hint}")
        if row.how == "absent" and value is not None and value not in (row.default, *row.accepts):
            raise ConfigError(f"'{name}={value!r}' of TRL is not here. {row.note}")
        if row.rule:
            rules[row.rule] = None
        elif row.key:
            value = row.values.get(value, value) if row.values else value
            change |= {} if value is None or value is ... else {row.key: value}
    for rule in rules:
        change |= RULES[rule](given)
    if ignored := [name for name in given.values if ARGUMENTS[name].how == "ignored"]:
        log.info("arguments of TRL without effect here: %s", ", ".join(sorted(ignored)))
    return nested(change)


def applied(arguments: Any, merged: dict[str, Any], own: Mapping[Any, Any]) -> dict[str, Any]:
    """Apply the mapping `trl` of a file: its values win over those of included files.

    Args:
        arguments: The mapping, as it was read.
        merged: The file and what it includes, merged.
        own: The file alone; a key that stands in it and is changed by `arguments` is an error.
    """
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"'trl' must be a mapping of TRL's arguments, not {arguments!r}")
    change = translate(arguments, merged)
    for key in _leaves(change):
        if lookup(own, key, ABSENT) is not ABSENT:
            raise ConfigError(
                f"'{key}' is given, and the arguments in `trl` ({', '.join(arguments)}) give it too; leave "
                "one of them out"
            )
        items, digit, _ = key.partition(".0")
        if digit and lookup(merged, f"{items}.0", ABSENT) is ABSENT:
            raise ConfigError(f"`trl` changes '{key}', but '{items}' names nothing up to here; name it first")
    return merge(merged, change)


def _leaves(change: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """List the dotted keys of the values in nested mappings."""
    for key, value in change.items():
        match value:
            case Mapping():
                yield from _leaves(value, f"{place}{key}.")
            case _:
                yield f"{place}{key}"


def arguments_of(config: Any) -> dict[str, Any]:
    """List the fields of a GRPOConfig, a DPOConfig or a like dataclass that differ from its defaults.

    What such a class sets by itself (a batch size from others, a device) is listed too where it differs.
    """
    listed = {}
    for place in dataclasses.fields(config):
        made = place.default_factory
        default = place.default if made is dataclasses.MISSING else made()
        value = _plain(vars(config)[place.name])
        row = ARGUMENTS.get(place.name)
        if value != _plain(default) and not (row and row.how == "ignored"):
            listed[place.name] = value
    return listed


def with_defaults(arguments: Mapping[str, Any], *, pairs: bool = False) -> dict[str, Any]:
    """Complete arguments by TRL's defaults of what decides results: of GRPOConfig, or DPOConfig (`pairs`).

    Then `translate` gives what a script of TRL trains with, whatever a method's file has.
    """
    rows = {**PARTS["Objective"], **PARTS["Rollouts and data"], **PARTS["Training"]}
    other = (PARTS["Objective"].keys() | PARTS["Rollouts and data"].keys()) - SHARED if pairs else DPO_ONLY
    found = {name: row.dpo if pairs and row.dpo is not ... else row.default for name, row in rows.items()}
    kept = {
        name: value
        for name, value in found.items()
        if rows[name].how in ("maps", "differs")
        and value is not None
        and name not in other
        # How it is computed: the precision and memory of the model, the time that processes wait.
        and not rows[name].key.startswith(("policy", "ddp"))
    }
    return kept | {name: value for name, value in arguments.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return the value of an enumeration, and lists for tuples."""
    match value:
        case Enum(value=inner):
            return _plain(inner)
        case tuple():
            return list(value)
    return value
