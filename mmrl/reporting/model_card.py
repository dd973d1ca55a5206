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
from mmrl.reporting.methods import Method, all_methods

# Configuration keys that do not change what a step learns.
FREE = {
    "max_steps", "num_train_epochs", "save_steps", "save_total_limit", "report", "overwrite_output_dir",
    "output_dir", "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_model_id",
    "hub_private_repo", "ddp_timeout",
}  # fmt: skip
PACKAGES = ("mmrl", "torch", "transformers", "diffusers", "peft", "accelerate")


def config_hash(config: Config) -> str:
    """Return the first 12 digits of the SHA-256 of what a configuration trains."""
    learned = {key: value for key, value in as_plain(config).items() if key not in FREE}
    text = json.dumps(learned, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def variant_of(config: Config) -> Method | None:
    """Find the method with the advantages and objective of a run; of several the closest one."""
    raw = as_plain(config)

    def agreement(part: Any, whole: Any) -> int:
        match part, whole:
            case dict(), dict():
                # Shared settings count for a method, other values against it.
                return sum(agreement(value, whole.get(key)) for key, value in part.items())
        return 1 if part == whole else -1

    def same(variant: Method, key: str) -> bool:
        return key in variant.raw and short_pieces(variant.raw[key]) == short_pieces(raw[key])

    fitting = [v for v in all_methods() if same(v, "advantage") and same(v, "objective")]
    return max(fitting, key=lambda variant: agreement(variant.raw, raw), default=None)


def short_pieces(value: Any) -> Any:
    """Replace pieces without options by their names, everywhere in a configuration."""
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
        config: Of the run.
        step: Steps that the model was trained for.
        measured: Metrics by the journal's names; the card shows those of an evaluation (`eval_*`).
        folder: Of the model.
        notes: Sentences about the files, such as how they are loaded.
    """
    data = config.data.options
    training = {
        "config": config,
        "step": step,
        "updates": measured.get("updates"),
        "data": [
            config.data.name,
            *(f"{key} {data[key]}" for key in ("path", "split", "format") if key in data),
        ],
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
    """Write a model card: base model, transforms, cache and versions, and what is known of its training."""
    base = str(policy.options.get("model") or policy.name).removeprefix(objects.PREFIX)
    cheaper = [
        ("transform", short_pieces(as_plain(piece))) for piece in policy.options.get("transform") or ()
    ]
    for engine in engines:
        for kind in ("transform", "cache"):
            for piece in as_list(engine.options.get(kind) or ()):
                cheaper.append((f"{kind} of rollouts" if training else kind, short_pieces(as_plain(piece))))
    card = card_template().render(
        name=name,
        base=base,
        hub_model=json.dumps(base) if "/" in base and not Path(base).exists() else "",
        cheaper=[(kind, _spelled(as_mapping(piece))) for kind, piece in cheaper],
        notes=notes,
        training=training,
        held_out=held_out or {},
        versions=installed_versions(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(card)


@cache
def card_template() -> Template:
    """Load the template of model cards. They are Markdown: nothing is escaped but the ends of cells."""
    here = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(here), trim_blocks=True, undefined=StrictUndefined)
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    environment.tests["finite"] = math.isfinite
    return environment.get_template("model_card.j2")


@cache
def installed_versions() -> Sequence[str]:
    """List the versions of the packages that a card names."""
    versions = []
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # diffusers and peft may be missing
            versions.append(f"{package} {metadata.version(package)}")
    return versions


def _spelled(piece: Mapping[str, Any]) -> str:
    """Write a piece with its options in one line."""
    options = ", ".join(f"{name} {value}" for name, value in piece.items() if name != "name")
    return f"{piece['name']} ({options})" if options else piece["name"]


def describe_method(config: Config) -> str:
    """Name the method of a run with its papers, or else its objective and chain."""
    if (method := variant_of(config)) is None:
        return f"{config.objective.name} over the chain {', '.join(piece.name for piece in config.advantage)}"
    papers = ", ".join(f"[arXiv {id}](https://arxiv.org/abs/{id})" for id in method.papers)
    return f"{method.name}{f' ({papers})' if papers else ''}: {method.comment}"
