"""Look-up of a model's configuration, given a file, run, checkpoint, model folder or hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.loading import ConfigError, change, expanded, merge, read
from mmrl.config.plain import as_mapping
from mmrl.config.registry import find
from mmrl.config.schema import Config, EvaluateConfig, Piece, as_plain, load, parse, parse_some
from mmrl.config.sweep import setting_of
from mmrl.runtime.checkpoint import MODEL, finished, step_of
from mmrl.runtime.stages import last_finished

ADAPTERS = ("adapter_config.json", "pytorch_lora_weights.safetensors")  # adapters of peft, of diffusers
PIPELINE = "model_index.json"  # file in every pipeline folder of diffusers
# Names that `mmrl export` writes: file of transforms, folder of untransformed weights, file of the cache.
TRANSFORMS, WEIGHTS, CACHE = "transforms.json", "weights", "kv_cache.json"
STORED = ("structured_pruning",)  # transforms that saved weights already include


@dataclass(frozen=True)
class ModelSource:
    """Configuration from which a model is loaded, and the location of its weights."""

    config: Config | EvaluateConfig
    weights: Path | None = None  # folder of weights to load into the policy; None: no other weights
    run: Path | None = None  # folder of the training run, if any
    step: int = 0  # step of the checkpoint

    @property
    def place(self) -> str:
        """The configuration key under which the engines are listed."""
        return self._parts[0]

    @property
    def engines(self) -> Sequence[Piece]:
        """The configured engines; for a training run, the engines of its rollouts."""
        return self._parts[1]

    @property
    def data(self) -> Mapping[str, Any]:
        """Options of the configured data set, such as `max_frames` for videos."""
        data = self._parts[2]
        return _innermost(data.options) if data else {}

    @property
    def _parts(self) -> tuple[str, Sequence[Piece], Piece | None]:
        match self.config:
            case Config(rollout=section, data=data):
                return "rollout.engine", section.engine, data
            case EvaluateConfig(evaluation=section):
                return "evaluation.engine", section.engine, section.data


def _innermost(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the innermost data set, for data sets that wrap another one."""
    inner = options.get("data")
    return _innermost(inner) if isinstance(inner, Mapping) else options


def resolve(
    source: str | Path | Config | EvaluateConfig,
    overrides: Sequence[str] = (),
    *,
    setting: str = "",
    options: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Find the configuration of a model without loading it.

    Args:
        source: A configuration or its file, the folder of a run (its last checkpoint is used) or of a
            checkpoint, or a model folder or hub id, for which a preset in `configs/defaults` is used.
        overrides: Changes in the syntax of the command line, such as "policy.dtype=float32".
        setting: Name of an entry in the `settings` of an evaluation.
        options: Options of the engine, such as `temperature`, and `seed`; None keeps the configured value.
    """
    resolved = _resolve(source, overrides)
    match resolved.config:
        case Config() if setting:
            raise ConfigError(f"'{setting}' is to be a setting of an evaluation, but this is a training run")
        case EvaluateConfig() as evaluation if setting:
            resolved = replace(resolved, config=setting_of(evaluation, setting))
    if not resolved.engines:
        raise ConfigError(f"'{resolved.place}' is empty; name the engine that answers")
    return with_options(resolved, options or {})


def with_options(source: ModelSource, options: Mapping[str, Any]) -> ModelSource:
    """Return a source with changed options of its engine or a changed `seed`; None keeps the value.

    Raises ConfigError for an option that no engine of the source has.
    """
    wanted = {name: value for name, value in options.items() if value is not None}
    if not wanted:
        return source
    changes: dict[str, Any] = {}
    for name, value in wanted.items():
        changes = merge(changes, {"seed": value} if name == "seed" else _option(source, name, value))
    return replace(source, config=_parsed(merge(as_plain(source.config), changes)))


def _resolve(source: Any, overrides: Sequence[str]) -> ModelSource:
    if is_dataclass(source):
        return ModelSource(parse(change(as_plain(source), overrides), type(source)))
    path = Path(expanded(str(source)))
    if path.is_dir():
        run = _run_of(path)
        if run is None:
            _check_model(path)
        return _checkpoint(*run, overrides) if run else _model(str(path), overrides)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        kind = Config if "rollout" in read(path, overrides) else EvaluateConfig
        return ModelSource(load(path, overrides, kind))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ConfigError(
            f"there is no file or folder '{source}'; name a configuration (.yaml), the output_dir of a run, "
            "a model folder, or a model of the hub as owner/name"
        )
    return _model(str(source), overrides)


def _parsed(raw: dict[str, Any]) -> Config | EvaluateConfig:
    """Parse a configuration; a preset may lack the keys that only training needs."""
    if "evaluation" in raw and "rollout" not in raw:
        return parse(raw, EvaluateConfig)
    given = {key: value for key, value in raw.items() if value is not None}
    return parse_some(given, Config)


def _option(source: ModelSource, name: str, value: Any) -> dict[str, Any]:
    """Return changes of the configuration that set an option in the first engine that has it."""
    taken = {i: find("engine", piece.name).options for i, piece in enumerate(source.engines)}
    at = next((i for i, options in taken.items() if name in options), None)
    if at is None:
        names = ", ".join(f"'{piece.name}'" for piece in source.engines)
        raise ConfigError(
            f"no engine of '{source.place}' takes `{name}`: {names} takes "
            f"{', '.join(dict.fromkeys(name for options in taken.values() for name in options))}"
        )
    section, field = source.place.split(".")
    return {section: {field: {str(at): {name: value}}}}


# ---- runs and their checkpoints


def _run_of(folder: Path) -> tuple[Path, Path] | None:
    """Return the run folder and the model folder of the given or last checkpoint; None for other folders.

    For a run with stages, both folders belong to the last finished stage.
    """
    if stage := last_finished(folder):
        return stage.parent, stage / MODEL
    if (folder / "config.yaml").is_file():
        saved = [checkpoint / MODEL for checkpoint in finished(folder)]
        if not saved:
            raise ConfigError(f"the run '{folder}' has no checkpoint yet; train on, or name its config.yaml")
        return folder, saved[0]
    step = folder.parent if folder.name == MODEL else folder
    model = step / MODEL
    if (
        re.fullmatch(r"checkpoint-\d+", step.name)
        and model.is_dir()
        and (step.parent / "config.yaml").is_file()
    ):
        return step.parent, model
    return None


def _checkpoint(run: Path, model: Path, overrides: Sequence[str]) -> ModelSource:
    """Return the configuration of a run, with a policy that loads the weights of a checkpoint."""
    raw = read(run / "config.yaml")
    options = as_mapping(raw["policy"])
    # Adapters of several roles are in separate subfolders.
    adapted = any(next(model.glob(f"{inside}{name}"), None) for name in ADAPTERS for inside in ("", "*/"))
    # A checkpoint with all weights replaces the base model, which need not exist any more.
    replaces = "model" in options and not adapted and not options.get("transform")
    if replaces:
        raw = merge(raw, {"policy": {"model": str(model)}})
    config = parse(change(raw, overrides), Config)
    return ModelSource(config, None if replaces else model, run, step_of(model.parent))


# ---- models without a configuration


def _check_model(folder: Path) -> None:
    """Raise `ConfigError` for a folder that holds neither a model nor an adapter."""
    names = ("config.json", PIPELINE, TRANSFORMS, *ADAPTERS, f"*/{ADAPTERS[1]}")
    if not any(next(folder.glob(name), None) for name in names):
        raise ConfigError(
            f"'{folder}' holds neither a run (config.yaml and a checkpoint) nor a model (config.json, "
            f"{PIPELINE} or {ADAPTERS[0]}); name another folder"
        )


def _model(name: str, overrides: Sequence[str]) -> ModelSource:
    """Return the preset configuration for a model folder or hub id, plus exported transforms and cache."""
    folder, policy, engine = _folder(name), {"model": name}, {}
    if folder is not None:
        # If only a pipeline's second network has an adapter, its file is in a subfolder.
        adapted = next((file for at in ("", "*/") for file in folder.glob(at + ADAPTERS[1])), None)
        if adapted and not (folder / PIPELINE).is_file():
            raise ConfigError(
                f"'{name}' holds an adapter of diffusers, which does not name its base model; name the run "
                "it comes from, or a configuration whose policy has `model`, `lora_rank` and `adapter`"
            )
        policy |= _adapter(folder) | _transforms(folder)
        engine = _cache(folder)
    preset = read(f"defaults/{'flow' if names_pipeline(name) else 'vision_language'}.yaml")
    preset = merge(preset, {"policy": policy, "rollout": {"engine": {"0": engine}} if engine else {}})
    return ModelSource(_parsed(change(preset, overrides)))


def _folder(name: str) -> Path | None:
    """Return a model's local folder, or None; download a hub model only if it has files of mmrl or peft."""
    if Path(name).is_dir():
        return Path(name)
    if not any(_on_hub(name, file) for file in (ADAPTERS[0], TRANSFORMS, CACHE)):
        return None
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name))


def names_pipeline(name: str) -> bool:
    """Whether a name is the folder or hub id of a pipeline of diffusers."""
    folder = Path(expanded(name))
    return (folder / PIPELINE).is_file() if folder.is_dir() else _on_hub(name, PIPELINE)


def _on_hub(name: str, file: str) -> bool:
    """Whether a hub repository has a file; if so, the file is downloaded into the local cache."""
    from transformers.utils import cached_file

    # Do not raise for a missing file or model here: loading the model later gives a better error message.
    quiet = ("missing_entries", "connection_errors", "gated_repo")
    return cached_file(name, file, **{f"_raise_exceptions_for_{what}": False for what in quiet}) is not None


def _adapter(folder: Path) -> dict[str, Any]:
    """Return the policy options for a folder with an adapter of peft; empty without an adapter."""
    if not (folder / ADAPTERS[0]).is_file():
        return {}
    match _json(folder / ADAPTERS[0]):
        case {"base_model_name_or_path": str(base)} if base:
            return {"model": base, "adapter": str(folder)}
    raise ConfigError(f"'{folder / ADAPTERS[0]}' names no base_model_name_or_path, the model it belongs to")


def _transforms(folder: Path) -> dict[str, Any]:
    """Return the policy options for a folder with transforms from `mmrl export`; empty without transforms."""
    if not (folder / TRANSFORMS).is_file():
        return {}
    listed = _json(folder / TRANSFORMS).get("transforms")
    wanted = [piece for piece in listed or () if piece.get("name") not in STORED]
    pieces = [
        _registered("transform", {**piece, "name": f"compression.{piece.get('name')}"}) for piece in wanted
    ]
    return {"model": str(folder / WEIGHTS), "transform": pieces}


def _cache(folder: Path) -> dict[str, Any]:
    """Return the engine options for a folder with a cache from `mmrl export`; empty without a cache."""
    if not (folder / CACHE).is_file():
        return {}
    piece = _registered("cache", _json(folder / CACHE))
    if codebook := piece.get("codebook"):
        if Path(codebook).name != codebook or not (folder / codebook).is_file():
            raise ConfigError(f"'{folder / CACHE}' must name a codebook inside its folder, not '{codebook}'")
        piece["codebook"] = str(folder / codebook)
    return {"cache": piece}


def _registered(kind: str, piece: Mapping[str, Any]) -> dict[str, Any]:
    """Look up a piece named in a model folder; refuse foreign code, which a folder must not import."""
    match piece:
        case {"name": str(name)} if re.fullmatch(r"\w+\.\w+", name):
            find(kind, name)
            return dict(piece)
    name = piece.get("name")
    raise ConfigError(f"a model folder may only name a {kind} of mmrl, such as compression.x, not {name!r}")


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise `ConfigError` if the file does not contain one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"'{path}' must hold a JSON object, not a {type(value).__name__}")
    return value
