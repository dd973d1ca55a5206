"""Link the installed packages that a wheel needs without extras into another environment.

`python -m tests.support.link_packages WHEEL SITE_PACKAGES` looks in the environment that runs it. Hard links
share files, so gigabytes of CUDA libraries are neither unpacked nor compiled again. What the other
environment has stays, and packages that are not installed here in a fitting version are left to pip.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement


def needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions, by name, that requirements ask for, and what these ask for."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    done = set()
    while waiting:
        one, extra = waiting.pop()
        if one.marker and not one.marker.evaluate({"extra": extra}):
            continue
        try:
            installed = distribution(one.name)
        except PackageNotFoundError:
            continue
        if not one.specifier.contains(installed.version, prereleases=True):
            continue
        found[installed.name] = installed
        for asked in {"", *one.extras} - {extra for name, extra in done if name == installed.name}:
            done.add((installed.name, asked))
            waiting += [(Requirement(text), asked) for text in installed.requires or ()]
    return found


def link(installed: Distribution, site: Path) -> None:
    """Link the files of a distribution, but for commands, which name the environment that they are in."""
    home = Path(str(installed.locate_file(""))).resolve()
    for file in installed.files or ():
        if file.parts[0] == ".." or file.is_absolute() or not (home / file).exists():
            continue
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        if (site / file).exists():  # two packages have one, such as `nvidia/__init__.py`
            continue
        try:
            os.link(home / file, site / file)
        except OSError:  # another file system
            shutil.copy2(home / file, site / file)


def main() -> None:
    """Link what the wheel needs."""
    with ZipFile(sys.argv[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        requires = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
    present = {one.name for one in distributions(path=[sys.argv[2]])}
    for name, installed in needed(requires).items():
        if name not in present:
            link(installed, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
