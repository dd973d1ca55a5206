"""Model cards: base model, data, method, versions and held-out metrics of a saved model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from mmrl.config import objects
from mmrl.config.plain import as_list, as_mapping
from mmrl.config.schema import Config, Piece, as_plain
from mmrl.reporting.methods import DIFFERS, Method, all_methods

# Configuration keys that do not affect a training step; the configuration hash ignores them.
FREE = {
    "max_steps", "num_train_epochs", "save_steps", "save_total_limit", "report", "overwrite_output_dir",
    "output_dir", "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_model_id",
    "hub_private_repo", "ddp_timeout",
}  # fmt: skip
PACKAGES = ("mmrl", "torch", "transformers", "diffusers", "peft", "accelerate")


def config_hash(config: Config) -> str:
    """Return a hash (12 hex digits) of the configuration keys that affect training."""
    learned = {key: value for key, value in as_plain(config).items() if key not in FREE}
    text = json.dumps(learned, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def variant_of(config: Config) -> Method | None:
    """Return the published method with the run's advantages and objective, and most equal other settings."""
    raw = as_plain(config)
    wanted = {key: short_pieces(raw[key]) for key in ("advantage", "objective")}

    def agreement(part: Any, whole: Any) -> int:
        if isinstance(part, dict) and isinstance(whole, dict):
            return sum(agreement(value, whole.get(key)) for key, value in part.items())
        return 1 if part == whole else -1

    def fits(variant: Method) -> bool:
        return all(key in variant.raw and short_pieces(variant.raw[key]) == wanted[key] for key in wanted)

    fitting = [variant for variant in all_methods() if fits(variant)]
    return max(fitting, key=lambda variant: agreement(variant.raw, raw), default=None)


def short_pieces(value: Any) -> Any:
    """Replace every piece without options in a configuration by its name."""
    match value:
        case {"name": name} if len(value) == 1:
            return name
        case dict():
            return {key: short_pieces(inner) for key, inner in value.items()}
        case list() | tuple():
            return [short_pieces(inner) for inner in value]
    return value


def write_card(
    config: Config, step: int, measured: Mapping[str, float], folder: Path, *, notes: Sequence[str] = ()
) -> None:
    """Write the model card into the folder of a model trained for `step` steps.

    Args:
        config: Configuration of the run.
        step: Number of training steps.
        measured: A record of metrics as in metrics.jsonl; the card shows its held-out metrics (`eval_*`).
        folder: Folder of the model.
        notes: Sentences about the files, such as how to load them.
    """
    data = config.data.options
    training = {
        "config": config,
        "step": step,
        "updates": measured.get("updates"),
        "data": [config.data.name, *(f"{k} {data[k]}" for k in ("path", "split", "format") if k in data)],
        "method": describe_method(config),
        "hash": config_hash(config),
    }
    held_out = {name[5:]: value for name, value in measured.items() if name.startswith("eval_")}
    name, engines = Path(config.output_dir).name, config.rollout.engine
    render_card(folder, name, config.policy, engines, notes, training=training, held_out=held_out)


def render_card(
    folder: Path,
    name: str,
    policy: Piece,
    engines: Sequence[Piece],
    notes: Sequence[str] = (),
    *,
    training: Mapping[str, Any] | None = None,
    held_out: Mapping[str, float] | None = None,
) -> None:
    """Write a model card with base model, transforms, cache, versions and, if known, the training."""
    base = str(policy.options.get("model") or policy.name).removeprefix(objects.PREFIX)
    pieces = [("transform", piece) for piece in policy.options.get("transform") or ()]
    for engine in engines:
        for kind in ("transform", "cache"):
            title = f"{kind} of rollouts" if training else kind
            pieces += [(title, piece) for piece in as_list(engine.options.get(kind) or ())]
    card = card_template().render(
        name=name,
        base=base,
        hub_model=json.dumps(base) if "/" in base and not Path(base).exists() else "",
        cheaper=[(title, one_line(as_mapping(short_pieces(as_plain(piece))))) for title, piece in pieces],
        notes=notes,
        training=training,
        held_out=held_out or {},
        versions=installed_versions(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card)


@cache
def card_template() -> Template:
    """Load the Markdown template of model cards; text is not escaped, except by the filter `cell`."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), trim_blocks=True, undefined=StrictUndefined)
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    environment.tests["finite"] = math.isfinite
    return environment.get_template("model_card.j2")


@cache
def installed_versions() -> Sequence[str]:
    """Return name and version of the installed packages that model cards list."""
    versions = []
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # diffusers and peft may be missing
            versions.append(f"{package} {metadata.version(package)}")
    return versions


def one_line(piece: Mapping[str, Any]) -> str:
    """Format the name of a piece with its options in parentheses."""
    options = ", ".join(f"{name} {value}" for name, value in piece.items() if name != "name")
    return f"{piece['name']} ({options})" if options else piece["name"]


def describe_method(config: Config) -> str:
    """Describe a run's method: its papers and differences from GRPO, or else objective and advantages.

    Differences in rewards are left out if the run uses other rewards than the method.
    """
    if (method := variant_of(config)) is None:
        return f"{config.objective.name} over the chain {', '.join(piece.name for piece in config.advantage)}"
    papers = ", ".join(f"[arXiv {id}](https://arxiv.org/abs/{id})" for id in method.papers)
    rewards = short_pieces(as_plain(config)["rewards"])
    own_rewards = rewards != short_pieces(method.raw.get("rewards", rewards))
    parts = [part for part in method.differs.rstrip(".").split("; ") if part]
    parts = [part for part in parts if not (own_rewards and part.startswith("rewards:"))]
    about = method.comment.partition(DIFFERS)[0].strip()
    text = " ".join([about, *([f"{DIFFERS}{'; '.join(parts)}."] if parts else [])])
    return f"{method.name}{f' ({papers})' if papers else ''}: {text}"
