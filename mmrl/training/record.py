"""The record of a run: its configuration with defaults, the code of its pieces, and package versions.

The record is stored in the run's folder and checkpoints, and compared when the run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any

from mmrl.config.changes import ABSENT, MAY_CHANGE, UNTOLD, differences, inside
from mmrl.config.schema import Config, EvaluateConfig
from mmrl.reporting.model_card import installed_versions
from mmrl.runtime.code_hash import of_code
from mmrl.training.resolved import resolve_defaults

Changes = Mapping[str, Any]  # maps a dotted key to its old and new values

_of_library = cache(of_code)  # code of mmrl does not change while a process runs


def record_of(config: Config | EvaluateConfig) -> dict[str, Any]:
    """Describe a run or evaluation as JSON: `config` with defaults, `code` hashes, package `versions`."""
    plain, entries = resolve_defaults(config)
    code = {}
    for place, (name, entry) in entries.items():
        library = entry.target.__module__.partition(".")[0] == "mmrl"
        code[place] = [name, (_of_library if library else of_code)(entry.target), library]
    versions = [*installed_versions(), f"python {'.'.join(platform.python_version_tuple()[:2])}"]
    kept = {key: value for key, value in plain.items() if key not in UNTOLD}
    return {"config": kept, "code": code, "versions": versions}


def name_of(record: Mapping[str, Any]) -> str:
    """Return a run's name, a hash of its record; equal records mean bit-identical results."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def changed_defaults(old: Mapping[str, Any], new: Mapping[str, Any], given: Changes) -> Changes:
    """List configuration changes between two records; `given` are the changes of the configuration file.

    Writing out a default is no change. A new option is a change only if the file sets it.
    """
    changed = differences(old["config"], {k: v for k, v in new["config"].items() if k in old["config"]})
    later = {
        key: both for key, both in given.items() if key.partition(".")[0] not in (*old["config"], *UNTOLD)
    }
    return later | {
        key: both
        for key, both in changed.items()
        if both[0] != ABSENT or any(inside(key, name) or inside(name, key) for name in given)
    }


def changed_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Changes, list[str], list[str]]:
    """Compare the code hashes of two records.

    Returns:
        Allowed changes keyed by the configuration key of the piece, descriptions of forbidden changes, and
            descriptions of changes that a new version explains.
    """
    versions = [dict(text.rsplit(" ", 1) for text in record["versions"]) for record in (old, new)]
    same = {name: versions[0].get(name) == versions[1].get(name) for name in ("mmrl", "python")}
    free: dict[str, Any] = {}
    fixed, explained = [], []
    for place, (name, then, _) in old["code"].items():
        now_name, now, library = new["code"].get(place, (None, None, None))
        if now_name != name or then == now:
            continue
        if inside(place, *MAY_CHANGE):
            free[place] = (f"{name} with the code {then}", f"the code {now}")
        elif same["python"] and (same["mmrl"] or not library):
            fixed.append(f"{place} '{name}'")
        else:
            explained.append(f"{place} '{name}'")
    return free, fixed, explained


def changed_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    """Format the package versions that differ, old and new; empty strings if none differ."""
    then, now = ({*record["versions"]} for record in (old, new))
    return ", ".join(sorted(then - now)), ", ".join(sorted(now - then))
