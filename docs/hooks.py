"""Pages that mkdocs makes of the code itself: pieces by kind, methods, configurations, keys, papers.

mkdocs calls `on_config`, `on_files` and `on_page_markdown`. A piece needs no entry anywhere.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File
from site_files import CONFIGS, METHODS, files_page, keys_page, methods_table, papers_page, trl_table
from site_pieces import kind_page, title_of, uses

from mmrl.config.registry import HOMES


def on_config(config: Any) -> Any:
    """Put a page of every kind of piece into the navigation, before the reference."""
    pages = [{title_of(kind): f"pieces/{kind}.md"} for kind in sorted(HOMES)]
    config.nav = [*config.nav[:-1], {"Pieces": pages}, config.nav[-1]]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into links to the pages that show them."""
    home = "../" * page.file.src_uri.count("/")
    for name, table in {"methods": methods_table, "trl": trl_table}.items():
        mark = f"<!-- generated: {name} -->"
        markdown = markdown.replace(mark, table()) if mark in markdown else markdown
    return relink(markdown, home)


def relink(markdown: str, home: str) -> str:
    """Let a configuration point at its place on this site, and other files of the repository at none."""
    up = r"\]\((?:\.\./)+"
    markdown = re.sub(up + r"configs/methods/\w+/(\w+)\.yaml\)", rf"]({home}variants.md#\1)", markdown)
    markdown = re.sub(up + r"configs/\w+/(\w+)\.yaml\)", rf"]({home}runs.md#\1)", markdown)
    folders = "mmrl|vision|diffusion|compression|benchmarks|examples"
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./)+(?:{folders})[^)]*\)", r"\1", markdown)


def generated() -> dict[str, str]:
    """Write every generated page, by name."""
    used = uses(METHODS)
    made = {f"pieces/{kind}.md": kind_page(kind, used) for kind in HOMES}
    made["variants.md"] = files_page(
        "Method files", "One file per method. [The table of methods](methods.md) says what differs.", METHODS
    )
    made["runs.md"] = files_page(
        "Configuration files",
        "Every run, evaluation and build that comes with mmrl. `mmrl train train/NAME.yaml` finds them.",
        [path for part in ("train", "evaluate", "build") for path in sorted(CONFIGS.glob(f"{part}/*.yaml"))],
    )
    made["keys.md"] = keys_page()
    made["papers.md"] = papers_page(METHODS)
    return made
