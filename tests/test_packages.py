"""The packages that are installed are the folders that there are."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
LISTED, FOLDERS = set(SETUPTOOLS["packages"]), SETUPTOOLS["package-dir"]
# Folders without an `__init__.py`, which hold data and no code.
DATA = {"mmrl.configs"}


def folder_of(package: str) -> Path:
    """Find the folder of a package, from that of its nearest ancestor that has one of its own."""
    parts = package.split(".")
    for known in range(len(parts), 0, -1):
        if ".".join(parts[:known]) in FOLDERS:
            return ROOT.joinpath(FOLDERS[".".join(parts[:known])], *parts[known:])
    raise AssertionError(f"'{package}' stands in no folder of [tool.setuptools.package-dir]")


def test_every_folder_with_code_is_listed():
    found = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found - LISTED == set(), "add them to [tool.setuptools] packages"


def test_every_listed_package_is_a_folder_with_code():
    missing = {name for name in LISTED - DATA if not (folder_of(name) / "__init__.py").is_file()}
    assert missing == set(), "listed in [tool.setuptools] packages, but there is no __init__.py"


def test_every_folder_that_holds_modules_is_a_package():
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), (
                f"'{path.parent.relative_to(ROOT)}' has no __init__.py"
            )


def test_the_scopes_of_the_registry_are_installed():
    from mmrl.registry import SCOPES

    assert set(SCOPES.values()) <= LISTED


def test_configurations_travel_with_the_package():
    shipped = {
        path
        for pattern in SETUPTOOLS["package-data"]["mmrl.configs"]
        for path in folder_of("mmrl.configs").glob(pattern)
    }
    assert shipped == set(folder_of("mmrl.configs").rglob("*.yaml"))
    assert shipped
