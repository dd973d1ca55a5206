"""What differs between two configurations of a run, and which keys may change when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.config.plain import as_mapping

# These and the keys below them may change between a run and its resumption. Everything else decides what was
# learned so far.
MAY_CHANGE = (
    "learn.learning_rate", "learn.micro_batch_steps", "evaluation", "eval_steps", "report", "max_steps",
    "num_train_epochs", "until", "save_steps", "save_total_limit", "metric_for_best_model",
    "greater_is_better", "push_to_hub", "hub_model_id", "hub_private_repo", "ddp_timeout", "output_dir",
    "overwrite_output_dir",
)  # fmt: skip
BEST = ("evaluation", "metric_for_best_model", "greater_is_better")  # what the best checkpoint is chosen by
UNTOLD = ("output_dir", "overwrite_output_dir", "num_train_epochs")  # changes that nobody needs to read
ABSENT = "not there"
SHOWN, LENGTH = 6, 80  # differences in a message, and characters of a value


def inside(key: str, *above: str) -> bool:
    """Return whether a dotted key or place is one of those above, or below one of them."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in above)


def may_change(key: str) -> bool:
    """Return whether a dotted key may change between a run and its resumption.

    What becomes of bad rows may, since the prompts themselves are compared.
    """
    return inside(key, *MAY_CHANGE) or (inside(key, "data") and key.endswith(".bad_rows"))


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """List the dotted keys at which two plain configurations differ, each with both values."""
    match old, new:
        case (str(), {"name": _}) | ({"name": _}, str()):  # a piece without options is just its name
            old, new = as_mapping(old), as_mapping(new)
    below: dict[str, tuple[Any, Any]] = {}
    match old, new:
        case ({"name": first}, {"name": second}) if first != second:
            pass  # options of different pieces do not compare
        case dict(), dict():
            names = dict.fromkeys([*old, *new])
            below = {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in names}
        case list(), list() if len(old) == len(new):
            below = {str(i): both for i, both in enumerate(zip(old, new, strict=True))}
    if below:
        found: dict[str, tuple[Any, Any]] = {}
        for name, both in below.items():
            found |= differences(*both, f"{key}.{name}" if key else name)
        return found
    return {} if old == new else {key: (old, new)}


def describe(found: Mapping[str, tuple[Any, Any]], then: str, now: str) -> str:
    """Write differences as `seed is 0 there and 1 here`, the first of them where there are many."""
    texts = [f"{key} is {_short(old)} {then} and {_short(new)} {now}" for key, (old, new) in found.items()]
    rest = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + rest


def _short(value: Any) -> str:
    text = str(value) or "''"
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."
