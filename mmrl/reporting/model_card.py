"""Model cards: base model, data, method, versions and held-out metrics of a saved model."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mmrl.config.loading import read
from mmrl.config.schema import Config, as_plain

# Configuration keys that may differ between a run and its resumption.
FREE = {
    "max_steps", "save_steps", "save_total_limit", "report", "overwrite_output_dir", "output_dir",
    "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_model_id", "hub_private_repo",
    "ddp_timeout",
}  # fmt: skip
PACKAGES = ("mmrl", "torch", "transformers", "diffusers", "peft", "accelerate")


def essence(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Drop from a plain configuration the keys that may differ between a run and its resumption."""
    return {key: value for key, value in raw.items() if key not in FREE}


def config_hash(config: Config) -> str:
    """Return the first 12 digits of the SHA-256 of what a configuration trains."""
    text = json.dumps(essence(as_plain(config)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Variant:
    """A method as its file in `configs/methods` describes it."""

    name: str
    comment: str
    raw: Mapping[str, Any]


@cache
def all_variants() -> tuple[Variant, ...]:
    """Read all methods."""
    variants = []
    # `mmrl/configs` is the folder itself in an installation, and a link to it in a checkout.
    for path in sorted((Path(__file__).parents[1] / "configs" / "methods").rglob("*.yaml")):
        lines = path.read_text().splitlines()
        comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        variants.append(Variant(path.stem, comment, as_plain(read(path))))
    return tuple(variants)


def variant_of(config: Config) -> Variant | None:
    """Find the method with the advantages and objective of a run; of several the closest one."""
    raw = as_plain(config)

    def agreement(part: Any, whole: Any) -> int:
        match part, whole:
            case dict(), dict():
                return sum(agreement(value, whole.get(key)) for key, value in part.items())
        return 1 if part == whole else -1

    def same(variant: Variant, key: str) -> bool:
        return key in variant.raw and short_pieces(variant.raw[key]) == short_pieces(raw[key])

    fitting = [found for found in all_variants() if same(found, "advantage") and same(found, "objective")]
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


def write_card(config: Config, step: int, measured: Mapping[str, float], folder: Path) -> None:
    """Write the model card into a folder.

    Args:
        config: Configuration of the run.
        step: Number of steps trained.
        measured: Metrics by the journal's names; the card shows those of an evaluation (`eval_*`).
        folder: Folder of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = (*training_lines(config, step), *measured_lines(measured))
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def training_lines(config: Config, step: int) -> Iterator[str]:
    """Write what a model was trained from, and how."""
    base = str(config.policy.options.get("model") or config.policy.name)
    data = config.data.options
    shown = [config.data.name, *(f"{key} {data[key]}" for key in ("path", "split", "format") if key in data)]
    yield "---"
    if "/" in base and not Path(base).exists():
        yield f"base_model: {json.dumps(base)}"
    yield "tags: [mmrl, reinforcement-learning]"
    yield "---"
    yield f"\n# {Path(config.output_dir).name}\n"
    yield f"Trained with mmrl for {step} of {config.max_steps} steps.\n"
    yield "| | |\n| --- | --- |"
    yield f"| base model | {_cell(base)} |"
    yield f"| data | {_cell(', '.join(shown))} |"
    yield f"| method | {_cell(describe_method(config))} |"
    for reward in config.rewards:
        weight = reward.options.get("weight", 1.0)
        yield f"| reward | {_cell(reward.options.get('label') or reward.name)}, weight {weight:g} |"
    yield f"| rollouts | {config.rollout.num_prompts} prompts of {config.rollout.num_generations} a step |"
    yield f"| seed | {config.seed} |"
    yield f"| configuration | {config_hash(config)} |"
    versions = []
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # diffusers and peft may be missing
            versions.append(f"{name} {metadata.version(name)}")
    yield f"| versions | {', '.join(versions)} |"


def describe_method(config: Config) -> str:
    """Name the method of a run with its papers, or else its objective and chain."""
    if (method := variant_of(config)) is None:
        return f"{config.objective.name} over the chain {', '.join(piece.name for piece in config.advantage)}"
    ids = re.findall(r"\d{4}\.\d{5}", method.comment)
    papers = ", ".join(f"[arXiv {id}](https://arxiv.org/abs/{id})" for id in ids)
    return f"{method.name}{f' ({papers})' if papers else ''}: {method.comment}"


def measured_lines(measured: Mapping[str, float]) -> Iterator[str]:
    """Write the finite metrics of an evaluation with their intervals."""
    held_out = {name[5:]: value for name, value in measured.items() if name.startswith("eval_")}
    yield "\n## Held out\n"
    if not held_out:
        yield "Nothing was measured on held-out prompts."
        return
    yield "| metric | value | interval |\n| --- | --- | --- |"
    for name, value in held_out.items():
        if not name.endswith(("/low", "/high")) and math.isfinite(value):
            low, high = held_out.get(f"{name}/low"), held_out.get(f"{name}/high")
            interval = "" if low is None or high is None else f"{low:.4g} to {high:.4g}"
            yield f"| {_cell(name)} | {value:.4g} | {interval} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
