"""Home folders and environment variables in paths, as a shell writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config.loading import ConfigError

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
