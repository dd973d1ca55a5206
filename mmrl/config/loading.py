"""Read YAML files with includes and dotted overrides into plain mappings and lists.

Later keys win, mappings merge, lists replace. Two mappings that name different pieces do not merge: the later
one replaces the earlier. There is no interpolation and no code in YAML.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

# yaml raises ValueError for a scalar that is not of its tag (`!!int x`), RecursionError for an anchor inside
# itself; OmegaConf raises TypeError for a key that cannot be hashed.
_UNREADABLE = (OSError, ValueError, TypeError, RecursionError, OmegaConfBaseException, YAMLError)


# Keys at the top of a file that stand for others, with what writes them out: a function of the key's value,
# of the merged configuration, of what the file itself has besides, and of the overrides.
SHORTHANDS: dict[str, Callable[..., dict[str, Any]]] = {}


class ConfigError(ValueError):
    """An error in a configuration: the place, what is wanted, what is given and what to do."""


class UnknownKey(ConfigError):
    """A key or option that does not exist at its place.

    Args:
        what: The error without a hint.
        place: The dotted place of the key, itself included.
        known: The keys that exist there.
        hint: What to say where none of them is close.
    """

    def __init__(self, what: str, place: str, known: Iterable[str], hint: str) -> None:
        self.what, self.place, self.key = what, place, place.rpartition(".")[2]
        self.near = nearest(self.key, known)
        self.hint = self.near or hint
        super().__init__(f"{what}; {self.hint}")


def nearest(name: str, known: Iterable[str], words: str = "did you mean '{}'?") -> str:
    """The end of an error about an unknown name: `did you mean 'x'?`, or nothing where none is close."""
    near = difflib.get_close_matches(name, known, 1)
    return words.format(near[0]) if near else ""


def read(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file, or a mapping of the same form, with its includes and `key=value` overrides."""
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
    """Merge `key=value` overrides into plain mappings."""
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
    """Read a file and what it includes; `above` are the files that include it."""
    return _with_includes(*_read_own(path, above))


def _read_own(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], str, tuple[Path, ...]]:
    """Read a file alone; its name in errors, and the files above those that it includes."""
    path = _locate(Path(expanded(str(path))), above)
    if path in above:
        raise ConfigError(f"'{path}' includes itself through {[str(p) for p in above]}")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path), resolve=False)  # `_check_plain` raises at `${`
    except _UNREADABLE as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"'{path}' must hold a mapping at its top, not a {type(raw).__name__}")
    _check_plain(raw, str(path))
    return {str(key): value for key, value in raw.items()}, f"'{path}'", (*above, path)


def _with_includes(raw: dict[Any, Any], place: str, above: tuple[Path, ...]) -> dict[str, Any]:
    """Merge a mapping over the files that it includes."""
    match raw.pop("include", None) or []:
        case [*names] if all(isinstance(name, str) for name in names):
            pass
        case other:
            raise ConfigError(f"{place}: 'include' must be a list of files, not {other!r}")
    match raw.get("stages"):
        case list() as stages:
            raw["stages"] = [_stage(stage, f"{place}: stages[{i}]", above) for i, stage in enumerate(stages)]
    # Later files win over earlier ones, and the file itself over those that it includes.
    return reduce(merge, [*(_read_file(Path(name), above) for name in names), raw], {})


def _stage(stage: Any, place: str, above: tuple[Path, ...]) -> Any:
    """Merge a stage over the files that it includes; its shorthands wait for the rest of the file."""
    match stage:
        case dict():
            return _with_includes(dict(stage), place, above)
    raise ConfigError(f"{place}: a stage must be a mapping of changes, not {stage!r}")


def without_stages(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of one run; raises `ConfigError` where it lists stages."""
    if stages := raw.get("stages"):
        raise ConfigError(
            f"the file has {len(stages)} stages, each a run of its own: `mmrl train`, `mmrl check` and `mmrl "
            "doctor` take such a file; else name the folder of a stage inside output_dir, or in Python "
            "mmrl.config.stages.load_stages(file)[0].config"
        )
    return {key: value for key, value in raw.items() if key != "stages"}


def _locate(path: Path, above: tuple[Path, ...]) -> Path:
    """Find a file next to the one that includes it, or among the configurations of mmrl."""
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
    """Raise at interpolations, and at keys that are neither a text nor the number of an item."""
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


def merge(below: Any, above: Any) -> Any:
    """Merge plain values: `{"0": x}` changes the first item of a list, options extend a name."""
    match below, above:
        case list(), dict() if above and all(str(key).isdigit() for key in above):
            changed = {int(key): value for key, value in above.items()}
            if max(changed) >= len(below):
                raise ConfigError(f"there is no item {max(changed)} in a list of {len(below)}: {below}")
            return [merge(item, changed[i]) if i in changed else item for i, item in enumerate(below)]
        case str(), dict() if "name" not in above:
            return {"name": below, **above}  # options for a piece that was named alone
        case {"name": lower}, {"name": upper} if lower != upper:
            return above  # the options of one piece are not those of another
        case dict(), dict():
            return below | {k: merge(below[k], value) if k in below else value for k, value in above.items()}
    return above


# ---- home folders and environment variables in paths

VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
PART = re.compile(r"(?:^|/)\$[A-Za-z_]\w*(?=/|$)")  # a variable that is a whole part of a path
USER = re.compile(r"~(?:[a-z_][\w.-]*(?=/))?(?=/|$)")
PLACES = ("output_dir", "output", "init_from", "path", "root", "model", "adapter")  # never anything but paths


def expanded(text: str, place: str = "") -> str:
    """Replace `~`, `~user` at the beginning of a path and `$NAME` anywhere in it, as a shell does.

    A text counts as a path with variables where every `$` begins a name, and where it has no spaces or each
    variable is a whole part between slashes; any other text is returned as it is.

    Args:
        text: A value of a configuration, or an argument of a command.
        place: The dotted key that it stands at, for errors.

    Raises:
        ConfigError: There is no such user, or the variable is not set or empty.
    """
    at = f"'{place}': " if place else ""
    if home := USER.match(text):
        found = os.path.expanduser(home[0])
        if found.startswith("~"):
            raise ConfigError(f"{at}there is no user '{found[1:]}' for '{text}'; write the whole path")
        text = found + text[home.end() :]
    names = VARIABLE.findall(text)
    spaced = re.search(r"\s", text) and len(PART.findall(text)) != len(names)
    if not names or text.count("$") != len(names) or "\\" in text or spaced:
        return text
    missing = [name for name in names if not os.environ.get(name)]
    if not missing:
        return VARIABLE.sub(lambda found: os.environ[found[1]], text)
    if Path(text).exists() or not ("/" in text or place.rpartition(".")[2] in PLACES):
        return text  # a file may have such a name
    raise ConfigError(
        f"{at}the environment variable {missing[0]} of '{text}' is not set; write the whole path"
    )


def expand_all(value: Any, place: str = "") -> Any:
    """Expand every text in plain values, at any depth."""
    match value:
        case str():
            return expanded(value, place)
        case dict() | Mapping():
            return {k: expand_all(inner, f"{place}.{k}" if place else str(k)) for k, inner in value.items()}
        case list() | tuple():
            return [expand_all(inner, f"{place}[{i}]") for i, inner in enumerate(value)]
    return value
