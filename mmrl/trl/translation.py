"""Translation of TRL's arguments to a configuration of mmrl, for Python and YAML alike.

`mmrl.Trainer` and the mapping `trl` in a file both use `translated`. It adds TRL's defaults for missing
arguments, collects all errors, and lists the remaining differences from TRL.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from mmrl.config.loading import ConfigError, merge, nearest, read
from mmrl.config.plain import ABSENT, lookup, nested
from mmrl.config.schema import Config, parse
from mmrl.trl import objective, run
from mmrl.trl.given import Change, Given, default_of, kind_of_run
from mmrl.trl.names import DIFFERS, LACKS, NAMES, NEUTRAL, REFUSED

RULES = {**objective.RULES, **run.RULES}
OBJECTIVE = ("advantage", "references", "group_filter")  # what belongs to a loss besides `objective`
# Groups of alternative keys: if a file sets one key, TRL's defaults of the whole group are ignored.
TOGETHER = (("max_steps", "num_train_epochs"), ("rollout.num_prompts", "learn.minibatches"))
SET_BY_ITSELF = {"output_dir": "trainer_output", "report_to": [], "bf16": True}  # TRL computes these itself
SAME = tuple(
    words for words in dict.fromkeys(NEUTRAL.values()) if words.startswith(("How memory", "Of loops"))
)
log = logging.getLogger("mmrl")


class Translated(NamedTuple):
    """The result of a translation of TRL's arguments.

    Args:
        change: Maps dotted keys to values.
        asked: The keys in `change` that depend on a given argument; the others depend on defaults only.
        differs: Sentences about the differences from TRL.
    """

    change: Change
    asked: frozenset[str]
    differs: list[str]


def translate(arguments: Mapping[str, Any], onto: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Translate the given arguments, without TRL's defaults, to a nested change for `loading.merge`.

    Args:
        arguments: Keyword arguments of TRL's configuration classes.
        onto: The plain configuration to change, if known. Its objective decides whether GRPO, DPO or SFT
            is meant, and its pieces are the ones that are changed.

    Raises `ConfigError` for unknown arguments, and for values without a counterpart in mmrl.
    """
    return nested(translated(arguments, onto or {}).change)


def translated(
    arguments: Mapping[str, Any],
    onto: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    *,
    complete: bool = False,
) -> Translated:
    """Translate arguments of TRL to changes of a configuration.

    Args:
        arguments: The given arguments; None counts as not given.
        onto: The whole configuration to change, including `own`.
        own: Configuration keys of mmrl that were given together with the arguments.
        complete: Whether TRL's defaults apply wherever `onto` sets no value. They change the objective only
            if `onto` has mmrl's default objective for this kind of run.
    """
    kind, own = kind_of_run(arguments, onto), own or {}
    problems, values = [], {}
    for name, value in arguments.items():
        try:
            values[name] = _checked(name, _plain(value), kind)
        except ConfigError as error:
            problems.append(str(error))
    present = {name: value for name, value in values.items() if value is not None}
    whole = complete and _is_base(onto, own, kind)
    defaults = _defaults(onto, kind, whole) if complete else {}
    nulls = frozenset(values.keys() - present.keys())
    given = Given({**defaults, **present}, onto, kind, whole, nulls)
    change: Change = {}
    decided: set[str] = set()
    rules: dict[str, bool] = {}  # maps a rule to whether one of its arguments was given
    for name in [*given.values, *(nulls & {"max_completion_length"})]:
        row = NAMES.get(name)
        if row and row.rule:
            rules[row.rule] = rules.get(row.rule, False) or name in values
        elif row and (value := row.values.get(given[name], given[name])) is not ...:
            change[row.key] = value
            decided |= {row.key} if name in present else set()
    for rule in (rule for rule in RULES if rule in rules):
        try:
            part = RULES[rule](given)
        except ConfigError as error:
            problems.append(str(error))
            continue
        change |= part
        decided |= set(part) if rules[rule] else set()
    if problems := list(dict.fromkeys(problems)):
        count = f"{len(problems)} arguments of TRL cannot be taken:\n  " if len(problems) > 1 else ""
        raise ConfigError(count + ";\n  ".join(problems))
    return Translated(change, frozenset(decided), _differences(given, present, complete))


def _checked(name: str, value: Any, kind: str) -> Any:
    """Check an argument and return its value, with quoted numbers converted; ConfigError if unsupported."""
    if name in REFUSED:
        advice, taken = REFUSED[name]
        if value is not None and value not in taken:
            raise ConfigError(f"'{name}={value!r}' of TRL is not here. {advice}")
    elif name in LACKS[kind] and (value is not None or kind == "dpo"):
        others = [f"{other.upper()}Config" for other in LACKS if name not in LACKS[other]]
        raise ConfigError(
            f"'{name}' is an argument of TRL's {' and '.join(others)}, and this is a run of {kind.upper()}; "
            "leave it out"
        )
    elif name not in NAMES and name not in NEUTRAL:
        hint = nearest(name, [*NAMES, *REFUSED, *NEUTRAL]) or "see docs/howto/trl.md"
        raise ConfigError(f"TRL has no argument '{name}'; {hint}")
    elif name in NAMES and type(value) is str and type(number := NAMES[name].default) in (int, float):
        try:
            return float(value) if "." in value or "e" in value.lower() else type(number)(value)
        except ValueError:
            raise ConfigError(f"'{name}' of TRL must be a number, not {value!r}") from None
    return value


@cache
def base_of(kind: str) -> dict[str, Any]:
    """Read the configuration that is equivalent to TRL's trainer of a kind: grpo, dpo or sft."""
    method = {"grpo": "grpo/grpo", "dpo": "preference/dpo", "sft": "grpo/supervised"}[kind]
    defaults = "preference" if kind == "dpo" else "vision_language"
    return merge(read(f"defaults/{defaults}.yaml"), read(f"methods/{method}.yaml"))


def _is_base(onto: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> bool:
    """Whether the objective equals mmrl's default for a kind of run, apart from keys in `own`."""
    base = base_of(kind)
    inner = {f"objective.{key}" for raw in (onto, base) for key in raw.get("objective") or ()}
    return all(
        lookup(own, key, ABSENT) is not ABSENT or lookup(onto, key) == lookup(base, key)
        for key in (*OBJECTIVE, *sorted(inner))
    )


def _defaults(onto: Mapping[str, Any], kind: str, whole: bool) -> dict[str, Any]:
    """Return TRL's defaults for keys that `onto` does not set; `whole` includes keys of the objective."""
    base, defaults = base_of(kind), {}

    def is_set(key: str) -> bool:
        there = lookup(onto, key, ABSENT)
        return there is not ABSENT and there != lookup(base, key, ABSENT)

    for name, row in NAMES.items():
        value, other = default_of(name, kind), name in LACKS[kind]
        kept = not whole and row.key.startswith(("objective", *OBJECTIVE))
        keys = next((keys for keys in TOGETHER if row.key in keys), (row.key,))
        if value is not None and row.key and not (other or kept or any(map(is_set, keys))):
            defaults[name] = value
    return defaults


def _differences(given: Given, asked: Mapping[str, Any], complete: bool) -> list[str]:
    """List sentences on differences from TRL, in every run and due to the given arguments."""
    lines: list[str] = [*DIFFERS] if complete else []
    if complete and lookup(given.onto, "policy.freeze_vision_tower", True):
        lines.append("the vision tower is frozen; `policy.freeze_vision_tower: false` trains it too")
    if complete and given.pairs:
        lines.append("pairs are never cut, where TRL cuts them at 1,024 tokens")
    if complete and given.kind == "sft":
        lines.append("rows are never cut, where TRL cuts them at 1,024 tokens")
        if "completion_only_loss" not in asked and not given["assistant_only_loss"]:
            lines.append(
                "of `messages` the last answer is learned, and by TRL all tokens: "
                "`completion_only_loss: false`"
            )
    if complete and not given.whole:
        lines.append("the objective is that of the file, not TRL's default")
    if given["lora_target_modules"] is None and given["use_peft"]:
        lines.append("without `lora_target_modules` adapters are on all linear layers of the language model")
    if not given["use_peft"] and (unused := [name for name in asked if name.startswith("lora_")]):
        lines.append(f"{', '.join(unused)}: without effect, as `use_peft` is not given")
    if "eval_steps" in asked and given.values.get("eval_strategy") == "no":
        lines.append("eval_steps: without effect, as there, where `eval_strategy` is 'no'")
    notes: dict[str, list[str]] = {}
    for name in asked:
        words = NEUTRAL.get(name) or (NAMES[name].note if name in NAMES else "")
        notes.setdefault(words, []).append(name)
    return lines + [f"{', '.join(names)}: {words}" for words, names in notes.items() if words]


@cache
def tell(differs: tuple[str, ...]) -> None:
    """Log a warning with the differences from TRL, once per set of differences."""
    if differs:
        lines = "\n".join(f"  - {line}" for line in differs)
        log.warning("TRL's arguments are taken; what differs from TRL here:\n%s", lines)


# ---- arguments from a file or an object


def applied(
    arguments: Any,
    merged: dict[str, Any],
    own: Mapping[Any, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    complete: bool = True,
) -> dict[str, Any]:
    """Apply the mapping `trl` of a configuration file, which takes precedence over included files.

    Args:
        arguments: The content of `trl`.
        merged: The file merged with all included files and the changes from the command line.
        own: The file without included files. Setting a key here and by an argument in `trl` is an error.
        overrides: The changes from the command line, which take precedence.
        complete: Whether TRL's defaults apply wherever the file sets no value.
    """
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"'trl' must be a mapping of TRL's arguments, not {arguments!r}")
    over = dict(overrides or {})
    if complete and "objective" not in merged:
        merged = merge(base_of(kind_of_run(arguments, merged)), merged)
    try:
        result = translated(arguments, merged, merge(dict(own), over), complete=complete)
    except ConfigError as error:
        try:
            parse(merged, Config, part=True)  # raise other errors in the file first
        except ConfigError as other:
            raise ConfigError(f"{error};\n  {other}") from None
        raise
    change, problems = {}, []
    for key, value in result.change.items():
        items, digit, _ = key.partition(".0")
        unnamed = bool(digit) and lookup(merged, f"{items}.0", ABSENT) is ABSENT
        twice = next((place for place in _leaves(key, value) if lookup(own, place, ABSENT) is not ABSENT), "")
        if key not in result.asked:
            change |= {} if unnamed or twice or lookup(over, key, ABSENT) is not ABSENT else {key: value}
        elif not (unnamed or twice):
            change[key] = value
        elif twice:
            problems.append(
                f"'{twice}' is given, and the arguments in `trl` ({', '.join(arguments)}) give it too; leave "
                "one of them out"
            )
        else:
            problems.append(f"`trl` changes '{key}', but '{items}' names nothing up to here; name it first")
    if problems:
        raise ConfigError(";\n  ".join(problems))
    tell(tuple(result.differs))
    return merge(merge(merged, nested(change)), over)


def _leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of all leaves in a nested mapping, or `key` itself for another value."""
    match value:
        case Mapping():
            yield from (leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner))
        case _:
            yield key


def arguments_of(config: Any) -> dict[str, Any]:
    """Return the fields of a GRPOConfig, DPOConfig, SFTConfig or the like that differ from its defaults.

    This includes fields that the class itself computes, such as a batch size or a device. It excludes fields
    that a script adds to TRL's class, because the trainer does not read them.
    """
    listed = {}
    for place in dataclasses.fields(config):
        factory = place.default_factory
        default = place.default if factory is dataclasses.MISSING else factory()
        value = _plain(vars(config)[place.name])
        supported = (
            place.name in NAMES or place.name in REFUSED or NEUTRAL.get(place.name, SAME[0]) not in SAME
        )
        if supported and value not in (_plain(default), SET_BY_ITSELF.get(place.name, ...)):
            listed[place.name] = value
    if listed.get("activation_checkpointing") == vars(config).get("gradient_checkpointing"):
        listed.pop("activation_checkpointing", None)
    return listed


def lora_of(config: Any) -> dict[str, Any]:
    """Convert a `LoraConfig` to arguments of TRL's ModelConfig; unsupported settings are an error."""
    read = {name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")}
    read |= {name: f"lora_{name}" for name in ("r", "target_modules", "target_parameters", "modules_to_save")}
    read["task_type"] = "lora_task_type"
    plain = vars(type(config)())
    harmless = {*read, "base_model_name_or_path", "inference_mode", "peft_type", "revision", "auto_mapping"}
    other = sorted(n for n, value in vars(config).items() if value != plain.get(n) and n not in harmless)
    if other:
        raise ConfigError(
            f"of `peft_config` {', '.join(other)} cannot be taken; leave that out, or make the adapter with "
            "peft, save it, and name its folder: args={'policy.adapter': ...}"
        )
    arguments = {theirs: getattr(config, ours, None) for ours, theirs in read.items()}
    targets = arguments["lora_target_modules"]
    arguments["lora_target_modules"] = sorted(targets) if isinstance(targets, set) else targets
    task = arguments["lora_task_type"]
    return {"use_peft": True, **arguments, "lora_task_type": getattr(task, "value", task)}


def kind_of(config: Any) -> str:
    """Return "grpo", "dpo" or "sft" for a configuration of TRL; ConfigError for other classes."""
    names = [kind.__name__ for kind in type(config).__mro__]
    kind = next((kind for kind in LACKS if f"{kind.upper()}Config" in names), "")
    other = next((name for name in names if name.endswith("Config")), "")
    if other and not kind:
        raise ConfigError(
            f"`args` is a {other}; there are GRPOConfig, DPOConfig and SFTConfig, or `method=` with a "
            "dictionary"
        )
    return kind or "grpo"


def _plain(value: Any) -> Any:
    """Convert an enumeration to its value, and a tuple to a list."""
    match value:
        case Enum(value=inner):
            return _plain(inner)
        case tuple():
            return list(value)
    return value
