"""Reading of YAML files with includes and dotted overrides into plain mappings and lists.

Later values override earlier ones: mappings are merged and lists are replaced. A piece is replaced if the
later piece has another name. YAML files contain no interpolation and no code.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

# Errors for bad YAML: ValueError (scalar against its tag, `!!int x`), RecursionError (recursive anchor),
# OmegaConf's TypeError (unhashable key).
_UNREADABLE = (OSError, ValueError, TypeError, RecursionError, OmegaConfBaseException, YAMLError)


# Shorthand keys at the top of a file, with the functions that expand them to other keys. A function gets
# the key's value, the merged configuration, the other keys of this file (without included files), overrides.
SHORTHANDS: dict[str, Callable[..., dict[str, Any]]] = {}


class ConfigError(ValueError):
    """An error in a configuration. Its text names the key, the wanted and the given value, and a remedy."""


class UnknownKey(ConfigError):
    """Error for a key or option that does not exist.

    Args:
        what: The error text without a hint.
        place: The dotted path of the key, such as `learn.lr`.
        known: The keys that exist at this level.
        hint: Hint to show if no known key is similar.
    """

    def __init__(self, what: str, place: str, known: Iterable[str], hint: str) -> None:
        self.what, self.place, self.key = what, place, place.rpartition(".")[2]
        self.near = nearest(self.key, known)
        self.hint = self.near or hint
        super().__init__(f"{what}; {self.hint}")


def nearest(name: str, known: Iterable[str], words: str = "did you mean '{}'?") -> str:
    """Return a hint with the most similar known name, `did you mean 'x'?`; empty if none is similar."""
    near = difflib.get_close_matches(name, known, 1)
    return words.format(near[0]) if near else ""


def read(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file or a mapping of the same form; apply its includes and `key=value` overrides."""
    match source:
        case str() | Path():
            own, place, above = _read_own(Path(source), ())
        case _:
            own, place, above = dict(source), "the configuration", ()
    raw = change(_with_includes(dict(own), place, above), overrides)
    for key in [key for key in SHORTHANDS if key in raw]:
        value, rest = raw.pop(key), {name: value for name, value in own.items() if name not in SHORTHANDS}
        over = change({}, [text for text in overrides if not text.startswith(f"{key}.")])
        raw = raw if value is None else SHORTHANDS[key](value, raw, rest, over)
    return raw


def change(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Merge overrides of the form `dotted.key=value` into plain mappings."""
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key:
            hint = "of several files, one can `include` the others" if Path(text).suffix == ".yaml" else ""
            hint = hint or f"such as {text.strip('=') or 'max_steps'}=VALUE (`mmrl keys` lists the keys)"
            raise ConfigError(f"an override must read key=value, not '{text}'; {hint}")
        try:
            override = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
        except _UNREADABLE as error:
            raise ConfigError(f"cannot parse the override '{text}': {error}") from error
        _check_plain(override, f"override '{text}'")
        raw = merge(raw, override)
    return raw


def _read_file(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file and the files that it includes; `above` lists the files that include it."""
    return _with_includes(*_read_own(path, above))


def _read_own(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], str, tuple[Path, ...]]:
    """Read a file without its includes; also return its name for errors, and `above` with this file added."""
    path = _locate(Path(expanded(str(path))), above)
    if path in above:
        raise ConfigError(f"'{path}' includes itself through {[str(p) for p in above]}")
    try:
        raw = copy.deepcopy(_parse(path.read_text("utf-8"), str(path)))
    except _UNREADABLE as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"'{path}' must hold a mapping at its top, not a {type(raw).__name__}")
    _check_plain(raw, str(path))
    return {str(key): value for key, value in raw.items()}, f"'{path}'", (*above, path)


@lru_cache(maxsize=512)
def _parse(text: str, name: str) -> Any:
    """Parse the text of a YAML file, once; interpolations stay, `_check_plain` raises an error for them."""
    stream = io.StringIO(text)
    stream.name = name  # for errors
    return OmegaConf.to_container(OmegaConf.load(stream), resolve=False)


def _with_includes(raw: dict[Any, Any], place: str, above: tuple[Path, ...]) -> dict[str, Any]:
    """Merge a mapping over the files that it includes, and over the file of its `method`."""
    match raw.pop("include", None) or []:
        case [*names] if all(isinstance(name, str) for name in names):
            pass
        case other:
            raise ConfigError(f"{place}: 'include' must be a list of files, not {other!r}")
    match raw.pop("method", None):
        case str(method):
            names = [*names, str(method_file(method))]
        case other if other is not None:
            raise ConfigError(f"{place}: 'method' must be a name, such as dapo, not {other!r}")
    match raw.get("stages"):
        case list() as stages:
            raw["stages"] = [_stage(stage, f"{place}: stages[{i}]", above) for i, stage in enumerate(stages)]
    # Later files override earlier ones, and the file itself overrides the files that it includes.
    return reduce(merge, [*(_read_file(Path(name), above) for name in names), raw], {})


def method_file(name: str) -> Path:
    """Return the path of the configuration file of a method such as "dapo"."""
    package = Path(__file__).parents[1]
    homes = [home / "methods" for home in (package / "configs", package.parent / "configs")]
    files = {file.stem: file for home in homes for file in home.glob("*/*.yaml")}
    if name not in files:
        hint = nearest(name, files) or f"there are {', '.join(sorted(files))}"
        raise ConfigError(f"there is no method '{name}'; {hint}")
    return files[name]


def _stage(stage: Any, place: str, above: tuple[Path, ...]) -> Any:
    """Merge a stage over the files that it includes; its shorthand keys are not expanded yet."""
    match stage:
        case dict():
            return _with_includes(dict(stage), place, above)
    raise ConfigError(f"{place}: a stage must be a mapping of changes, not {stage!r}")


def without_stages(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the configuration of a single run; raise `ConfigError` if the file lists several stages."""
    if stages := raw.get("stages"):
        raise ConfigError(
            f"the file has {len(stages)} stages, each a run of its own: `mmrl train`, `mmrl check` and `mmrl "
            "doctor` take such a file; else name the folder of a stage inside output_dir, or in Python "
            "mmrl.config.stages.load_stages(file)[0].config"
        )
    return {key: value for key, value in raw.items() if key != "stages"}


def _locate(path: Path, above: tuple[Path, ...]) -> Path:
    """Find a file next to the file that includes it, or among the configurations of mmrl."""
    package = Path(__file__).parents[1]
    homes = (above[-1].parent if above else Path(), package / "configs", package.parent / "configs")
    places = list(dict.fromkeys(home / path for home in homes))
    for place in places:
        try:
            if place.is_file():
                return place.resolve()
        except OSError as error:  # such as a name that is too long
            raise ConfigError(f"cannot look for the file '{place}': {error.strerror}") from error
    by = f", included by '{above[-1]}'" if above else ""
    looked = f"looked at {', '.join(str(p) for p in places)}"
    beside = {file.stem: path.parent / file.name for place in places for file in place.parent.glob("*.yaml")}
    near = difflib.get_close_matches(path.stem, beside, 1)
    hint = f"did you mean '{beside[near[0]]}'? " if near else ""
    raise ConfigError(f"there is no file '{path}'{by}; {hint}{looked}")


def _check_plain(value: Any, place: str) -> None:
    """Raise `ConfigError` for interpolations, and for keys that are neither texts nor integers."""
    match value:
        case dict():
            for key, inner in value.items():
                if type(key) not in (str, int):  # not `isinstance`: True is an int
                    raise ConfigError(f"{place}: the key {key!r} must be a text; put it into quotes")
                _check_plain(inner, f"{place}: {key}")
        case list():
            for inner in value:
                _check_plain(inner, place)
        case str() if "${" in value:
            raise ConfigError(
                f"{place}: '{value}' looks like an interpolation; write the value itself, or $HOME"
            )


def import_modules(names: Iterable[str]) -> None:
    """Import modules of the key `imports`; raise `ConfigError` for one that cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # an import can raise any error
            raise ConfigError(
                f"imports: cannot import '{name}': {type(error).__name__}: {error}; name a module of the "
                "current folder, without `.py`, or of an installed package"
            ) from error


def merge(below: Any, above: Any) -> Any:
    """Merge the plain value `above` over `below`; the mapping `{"0": x}` changes item 0 of a list."""
    match below, above:
        case list(), dict() if above and all(str(key).isdigit() for key in above):
            changed = {int(key): value for key, value in above.items()}
            if max(changed) >= len(below):
                raise ConfigError(f"there is no item {max(changed)} in a list of {len(below)}: {below}")
            return [merge(item, changed[i]) if i in changed else item for i, item in enumerate(below)]
        case str(), dict() if "name" not in above:
            return {"name": below, **above}  # `below` is only a name: add options to it
        case {"name": lower}, {"name": upper} if lower != upper:
            return above  # another piece: replace it
        case dict(), dict():
            return below | {k: merge(below[k], value) if k in below else value for k, value in above.items()}
    return above


# ---- home folders and environment variables in paths

VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
PART = re.compile(r"(?:^|/)\$[A-Za-z_]\w*(?=/|$)")  # a variable that is a whole component of a path
USER = re.compile(r"~(?:[a-z_][\w.-]*(?=/))?(?=/|$)")
PLACES = ("output_dir", "output", "init_from", "path", "root", "model", "adapter")  # keys with paths


def expanded(text: str, place: str = "") -> str:
    """Replace `~` or `~user` at the start of a path and `$NAME` anywhere in it, as a shell does.

    Variables are replaced only if every `$` starts a name, and if the text has no spaces or each variable is
    a whole component between slashes. Any other text is returned unchanged.

    Args:
        text: A value of a configuration, or an argument of a command.
        place: The dotted key of the value, for errors.

    Raises:
        ConfigError: There is no such user, or the variable is not set or empty.
    """
    at = f"'{place}': " if place else ""
    if home := USER.match(text):
        folder = os.path.expanduser(home[0])
        if folder.startswith("~"):
            raise ConfigError(f"{at}there is no user '{folder[1:]}' for '{text}'; write the whole path")
        text = folder + text[home.end() :]
    names = VARIABLE.findall(text)
    spaced = re.search(r"\s", text) and len(PART.findall(text)) != len(names)
    if not names or text.count("$") != len(names) or "\\" in text or spaced:
        return text
    missing = [name for name in names if not os.environ.get(name)]
    if not missing:
        return VARIABLE.sub(lambda variable: os.environ[variable[1]], text)
    if Path(text).exists() or not ("/" in text or place.rpartition(".")[2] in PLACES):
        return text  # a `$` may be part of a file name
    raise ConfigError(
        f"{at}the environment variable {missing[0]} of '{text}' is not set; write the whole path"
    )


def expand_all(value: Any, place: str = "") -> Any:
    """Replace `~` and `$NAME` (see `expanded`) in every text of a plain value, at any depth."""
    match value:
        case str():
            return expanded(value, place)
        case dict() | Mapping():
            return {k: expand_all(inner, f"{place}.{k}" if place else str(k)) for k, inner in value.items()}
        case list() | tuple():
            return [expand_all(inner, f"{place}[{i}]") for i, inner in enumerate(value)]
    return value
