"""Functions that read the declarations on engine and policy classes, for checks of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.config.registry import Entry, find
from mmrl.config.schema import Piece


def declared(entry: Entry, name: str) -> frozenset[str]:
    """Return a set that a class declares: the `outputs` of a policy or the `notes` of an engine."""
    found = getattr(entry.target, name, None)  # class attribute: objects are not built yet
    if found is None:
        raise ConfigError(f"'{entry.full_name}' is no {entry.kind}: it does not declare `{name}`")
    return found


def makes(policy: Piece, engines: Sequence[Piece]) -> str:
    """Return the kind of outcomes, "text" or "images", that engine or policy declares; "" if unknown."""
    kinds = (getattr(find("engine", piece.name).target, "makes", None) for piece in reversed(engines))
    own = getattr(find("policy", policy.name).target, "makes", "")
    return next((kind for kind in kinds if kind is not None), own)


def notes_of(engine: Bound) -> frozenset[str]:
    """Return the names of the per-step values that an engine records (`notes`) with its options."""
    derived = getattr(engine.entry.target, "notes_of", None)
    return derived(engine.options) if derived else declared(engine.entry, "notes")


def check_learning(policy: Piece, engines: Iterable[Bound]) -> None:
    """Raise `ConfigError` if an engine cannot follow the policy's weight updates."""
    for engine in engines:
        if check := getattr(engine.entry.target, "check_learning", None):
            check(policy, engine.options)
