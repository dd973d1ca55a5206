"""Differences between two configurations, and the keys that may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.config.plain import as_mapping

# These keys, with all keys below them, may change when a run is resumed. All others affect what the run has
# learned so far.
MAY_CHANGE = (
    "learn.learning_rate", "learn.micro_batch_steps", "evaluation", "eval_steps", "report", "max_steps",
    "num_train_epochs", "until", "save_steps", "save_total_limit", "metric_for_best_model",
    "greater_is_better", "push_to_hub", "hub_model_id", "hub_private_repo", "ddp_timeout", "output_dir",
    "overwrite_output_dir",
)  # fmt: skip
BEST = ("evaluation", "metric_for_best_model", "greater_is_better")  # keys that decide on the best checkpoint
UNTOLD = ("output_dir", "overwrite_output_dir", "num_train_epochs")  # keys whose changes are not reported
ABSENT = "not there"
SHOWN, LENGTH = 6, 80  # maximum number of differences in a message, and of characters of a value


def inside(key: str, *above: str) -> bool:
    """Whether a dotted key equals one of the keys `above`, or lies below one of them."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in above)


def may_change(key: str) -> bool:
    """Whether a dotted key may change when a run is resumed.

    The option `bad_rows` of data may change, because the prompts themselves are compared.
    """
    return inside(key, *MAY_CHANGE) or (inside(key, "data") and key.endswith(".bad_rows"))


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Compare two plain configurations; map each dotted key that differs to its (old, new) values."""
    match old, new:
        case (str(), {"name": _}) | ({"name": _}, str()):  # a piece without options is just its name
            old, new = as_mapping(old), as_mapping(new)
    below: dict[str, tuple[Any, Any]] = {}
    match old, new:
        case ({"name": first}, {"name": second}) if first != second:
            pass  # do not compare options of different pieces
        case dict(), dict():
            names = dict.fromkeys([*old, *new])
            below = {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in names}
        case list(), list() if len(old) == len(new):
            below = {str(i): both for i, both in enumerate(zip(old, new, strict=True))}
    if below:
        changed: dict[str, tuple[Any, Any]] = {}
        for name, both in below.items():
            changed |= differences(*both, f"{key}.{name}" if key else name)
        return changed
    return {} if old == new else {key: (old, new)}


def describe(found: Mapping[str, tuple[Any, Any]], then: str, now: str) -> str:
    """Format up to `SHOWN` differences as `seed is 0 THEN and 1 NOW`, with the texts of `then` and `now`."""
    texts = [f"{key} is {_short(old)} {then} and {_short(new)} {now}" for key, (old, new) in found.items()]
    rest = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + rest


def _short(value: Any) -> str:
    text = str(value) or "''"
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."
