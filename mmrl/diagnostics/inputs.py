"""Checks that the files, folders and columns that a configuration names exist."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from glob import has_magic
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any

from mmrl.config import objects
from mmrl.config.binding import Pieces
from mmrl.config.engine_checks import makes
from mmrl.config.evaluation import evaluation_of
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find, is_trl
from mmrl.config.schema import Config, EvaluateConfig, Piece, as_piece, held_fields
from mmrl.core.modalities import media_columns
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import FORMS, Rows
from mmrl.data.fields import RowError
from mmrl.data.named_columns import named_columns
from mmrl.data.readable import PromptCheck, drops, engines_of, has_size, prompt_check, with_inner
from mmrl.data.row_fields import CHECK, NAMED, TOOLKIT
from mmrl.diagnostics.reward_inputs import check_reward_inputs
from mmrl.runtime.checkpoint import model_folder

FIRST = 20  # number of first rows to read
OPENED = 4  # number of images, and of videos, to decode
# Arguments that `rewards.adapters.from_trl` passes to every reward, whatever the columns.
OFFERED = ("prompts", "completions", "completion_ids", "trainer_state", "target")


def check_inputs(config: Config | EvaluateConfig) -> None:
    """Raise one `ConfigError` for all missing files, folders and columns; loads no weights."""
    if findings := list(_absent(config)):
        raise ConfigError("; ".join(findings))
    start = str(model_folder(config.init_from)) if isinstance(config, Config) and config.init_from else ""
    for place, target, options in _models(config):
        if check_folders := getattr(target, "check_folders", None):
            try:
                check_folders(options, **({"start": start} if start and place == "policy" else {}))
            except (ValueError, OSError) as error:
                raise ConfigError(f"{place}: {error}") from error
        if check_run := getattr(target, "check_run", None):
            try:
                check_run(options, config)
            except ValueError as error:
                raise ConfigError(f"{place}: {error}") from error
    checks = {place: _prompt_check(config, place) for place in dict(_data(config))}
    rewards = _rewards(config)
    for place, data in _data(config):
        if findings := list(_columns(place, data, *rewards[place])):
            raise ConfigError("; ".join(findings))
    check_first_rows(config, checks)


def _prompt_check(config: Config | EvaluateConfig, place: str) -> PromptCheck | None:
    """Create the check of a data set's prompts; it also checks output sizes set by the engine.

    Returns None for a hub model whose outputs have no size: its check would have to download files.
    """
    engines, model = engines_of(config)[place], str(config.policy.options.get("model", ""))
    local = bool(model) and Path(model).expanduser().is_dir()
    return prompt_check(config.policy, engines) if local or has_size(engines) else None


def _rewards(config: Config | EvaluateConfig) -> dict[str, tuple[str, Sequence[Piece]]]:
    """Map each data set's configuration key, such as `data`, to (key of its rewards, rewards)."""
    evaluated = evaluation_of(config).evaluation.rewards
    return {
        "data": ("rewards", _given(config).get("rewards", ())),
        "evaluation.data": ("evaluation.rewards" if config.evaluation.rewards else "rewards", evaluated),
    }


def check_first_rows(config: Config | EvaluateConfig, checks: Mapping[str, PromptCheck | None]) -> None:
    """Read the first rows of every local data set; check that the model and the rewards can use them.

    Raises `ConfigError` if they cannot. `checks` maps the key of each data set to its prompt check.
    """
    token = NAMED.set(named_columns(config))
    try:
        for outer, data in _data(config):
            for place, piece in with_inner(outer, data):
                check = checks[outer] if piece is data else None
                prompts = _first_prompts(place, piece, check)
                if not drops(data):
                    _open_media(place, prompts)
                if piece is data and prompts and place == "data":
                    _check_answers(config, prompts)
                    check_references(config, prompts, FIRST)
                if piece is data and not drops(data):
                    at, rewards = _rewards(config)[place]
                    text = makes(config.policy, engines_of(config)[place]) == "text"
                    check_reward_inputs(text, partial(checks.get, place), prompts, rewards, at)
    finally:
        NAMED.reset(token)


def check_references(config: Config | EvaluateConfig, prompts: Sequence[Prompt], sample: int) -> None:
    """Raise `ConfigError` if a reference cannot read one of the first `sample` prompts."""
    for name, piece in _given(config).get("references", {}).items():
        if check_prompts := getattr(find("reference", piece.name).target, "check_prompts", None):
            try:
                check_prompts(piece.options, islice(prompts, sample))
            except ValueError as error:
                raise ConfigError(f"references.{name}: {error}") from error


def _first_prompts(place: str, piece: Piece, check: PromptCheck | None) -> Sequence[Prompt]:
    """Return the first prompts of a local data set that has the option `limit`; () for other data sets."""
    path, limit = piece.options.get("path"), piece.options.get("limit") or FIRST
    exists = isinstance(path, str) and (objects.is_object(path) or Path(path).exists())
    if not exists or "limit" not in find("data", piece.name).options:
        return ()
    try:
        first = Piece(piece.name, {**piece.options, "limit": min(limit, FIRST)})
        token = CHECK.set(check)
        try:
            prompts = Pieces(Stream()).make("data", first, place=place)
        finally:
            CHECK.reset(token)
        return check.rest(prompts, drops(piece), place) if check else prompts
    except (RowError, OSError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _open_media(place: str, prompts: Sequence[Prompt]) -> None:
    """Decode the first recorded answers, images and videos; raise `ConfigError` if one is broken."""
    for row in prompts[:OPENED]:
        try:
            _ = next(iter(row.answers), None)
        except (RowError, OSError) as error:
            raise ConfigError(f"{place}: row '{row.uid}': {error}") from error
    opened: Counter[str] = Counter()
    for row, medium in ((prompt, medium) for prompt in prompts for medium in prompt.media):
        opened[medium.kind] += 1
        if opened[medium.kind] <= OPENED:
            try:
                medium.load()
            except (RowError, OSError) as error:
                raise ConfigError(f"{place}: row '{row.uid}': {error}") from error


def _check_answers(config: Config | EvaluateConfig, prompts: Sequence[Prompt]) -> None:
    """Raise `ConfigError` if the engine needs recorded answers and the first rows have none."""
    for piece in config.rollout.engine if isinstance(config, Config) else ():
        needs = getattr(find("engine", piece.name).target, "needs_answers", False)
        if needs and not any(prompt.answers for prompt in prompts):
            raise ConfigError(
                f"data: the engine '{piece.name}' takes recorded answers, and the first {len(prompts)} rows "
                "have none; name rows with demonstrations, or set the option `demo` of `vision.visual_qa`"
            )


def _given(config: Config | EvaluateConfig) -> dict[str, Any]:
    """Map configuration keys that hold pieces to their values."""
    return {place: value for _, value, place in held_fields(config)}


def _data(config: Config | EvaluateConfig) -> list[tuple[str, Piece]]:
    given = _given(config)
    return [(place, given[place]) for place in ("data", "evaluation.data") if place in given]


def _models(config: Config | EvaluateConfig) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield (key, class, options) of the policy, the references, and policies nested in them."""

    def within(kind: str, piece: Piece, place: str) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        yield place, find(kind, piece.name).target, piece.options
        if (inner := piece.options.get("policy")) is not None:
            yield from within("policy", as_piece(inner, f"{place}.policy"), f"{place}.policy")

    yield from within("policy", config.policy, "policy")
    for name, piece in _given(config).get("references", {}).items():
        yield from within("reference", piece, f"references.{name}")


def _absent(config: Config | EvaluateConfig) -> Iterator[str]:
    """Yield sentences about files and folders that do not exist."""
    for place, _, options in _models(config):
        for option in ("model", "adapter"):
            match options.get(option):
                case str(name) if name and _is_local(name) and not Path(name).exists():
                    missing = f"{place}.{option} is '{name}', which does not exist here"
                    yield f"{missing}; name a folder, or OWNER/NAME"
    for place, data in (inner for outer in _data(config) for inner in with_inner(*outer)):
        for option in ("path", "root"):
            match data.options.get(option):
                case str(name) if name and not objects.is_object(name) and not Path(name).exists():
                    if option == "path" and has_magic(name):  # a glob pattern
                        continue
                    yield f"{place}.{option} is '{name}', which does not exist here; set {place}.{option}=..."


def _is_local(name: str) -> bool:
    """Whether a model name can only mean a local folder, not `owner/name` on the hub."""
    path = Path(name)
    if objects.is_object(name):
        return False
    # `a/b` is also local if `a` is an existing folder.
    return (
        path.is_absolute()
        or name[0] in ".~"
        or len(path.parts) > 2
        or path.parts[0] != name
        and path.parent.is_dir()
    )


def _columns(place: str, data: Piece, at: str, rewards: Sequence[Piece]) -> Iterator[str]:
    """Yield sentences about columns that TRL rewards or the prompt template read, but the data lack."""
    options, takes = data.options, find("data", data.name).options
    for i, piece in enumerate(rewards):
        named, read = find("reward", piece.name).options.get("column"), piece.options.get("column")
        if named is None or named.default is not named.empty or read in (options.get("columns") or ()):
            continue
        first = _first_columns(options)
        if first and read not in first and read not in _first_columns(options, None):
            has = ", ".join(sorted(first))
            yield f"{at}[{i}].column: no row of {place} has '{read}'; the first have {has}"
    if "columns" not in takes:  # this data set passes no columns to rewards
        return
    columns = _first_columns(options)
    if not columns:
        return
    names, media = columns | set(options.get("columns") or ()), set(media_columns())
    lacks = f"that the first rows of {place} do not have; they have {', '.join(sorted(names))}"
    for i, piece in enumerate(rewards):
        for name in _required(piece):
            # A reward gets a row's media under every media name (`image`, `images`); one column is enough.
            if name not in names and not (name in media and names & media):
                yield f"{at}[{i}]: '{piece.name}' takes the column '{name}' {lacks}"
    match options.get("prompt", takes["prompt"].default if "prompt" in takes else ""):
        case str(template):
            for _, field, _, _ in Formatter().parse(template):
                name = (field or "").partition(".")[0].partition("[")[0]
                if name and name not in names:
                    hint = TOOLKIT if names & {"conversations", "instruction"} else "map names by `columns`"
                    hint = "`vision.conversations` reads messages" if "messages" in names else hint
                    yield f"{place}.prompt reads the column '{name}' {lacks}; {hint}"


def _first_columns(options: Mapping[str, Any], count: int | None = FIRST) -> set[str]:
    """Return the column names of the first `count` rows (None: all); empty if rows cannot be read."""
    path = Path(str(options.get("path", "")))
    if not path.is_dir() and path.suffix not in FORMS:
        return set()
    try:
        rows = islice(Rows(path, Path(options.get("root") or path.parent)).valid(), count)
        return {name for row in rows for name in row.columns}
    except (RowError, OSError):  # `mmrl data check` reports faulty rows in full
        return set()


def _required(piece: Piece) -> list[str]:
    """List the data columns that a TRL reward requires as arguments."""
    target = inspect.unwrap(find("reward", piece.name).target)
    if not is_trl(target):
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(target).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name not in OFFERED
    ]
