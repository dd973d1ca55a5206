"""What is packaged: every folder once, through links, with its data files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("vision", "diffusion", "compression", "configs")


@pytest.mark.parametrize("name", LINKS)
def test_top_level_folders_are_linked_into_the_package(name):
    link = ROOT / "mmrl" / name
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


def test_every_folder_with_modules_is_a_package():
    for folder in ("mmrl", "vision", "diffusion", "compression"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"'{path.parent}' has no __init__.py"


def test_packages_are_found_through_the_links():
    from setuptools import find_namespace_packages

    found = set(find_namespace_packages(str(ROOT), include=["mmrl*"]))
    folders = {
        ".".join(("mmrl", *path.parent.relative_to(ROOT / folder).parts))
        if folder == "mmrl"
        else ".".join(("mmrl", *path.parent.relative_to(ROOT).parts))
        for folder in ("mmrl", "vision", "diffusion", "compression")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert folders <= found
    assert {"mmrl.configs", "mmrl.configs.accelerate"} <= found
