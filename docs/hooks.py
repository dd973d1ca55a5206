"""Pages that mkdocs makes of the code itself: pieces by family, configurations, keys, papers.

mkdocs calls `on_files` and `on_page_markdown`. A piece needs no entry anywhere: its kind tells the page.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File
from site_files import CONFIGS, files_page, keys_page, papers_page
from site_pieces import FAMILIES, family_page, uses


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files of the repository into links to the pages that show them."""
    home = "../" * page.file.src_uri.count("/")
    return relink(markdown, home)


def relink(markdown: str, home: str) -> str:
    """Let a configuration point at its place on this site, and other files of the repository at none."""
    markdown = re.sub(r"\]\((?:\.\./)+configs/variants/(\w+)\.yaml\)", rf"]({home}variants.md#\1)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+configs/(\w+)\.yaml\)", rf"]({home}runs.md#\1)", markdown)
    return re.sub(
        r"\[([^\]]+)\]\((?:\.\./)+(?:mmrl|vision|diffusion|compression|benchmarks)[^)]*\)", r"\1", markdown
    )


def generated() -> dict[str, str]:
    """Write every generated page, by name."""
    variants = sorted((CONFIGS / "variants").glob("*.yaml"))
    used = uses(variants)
    made = {f"families/{name}.md": family_page(name, used) for name in FAMILIES}
    made["variants.md"] = files_page(
        "Variants", "One file per method. [The table of methods](methods.md) says what differs.", variants
    )
    made["runs.md"] = files_page(
        "Configuration files",
        "Every run, evaluation and build that comes with mmrl. `mmrl train NAME.yaml` finds them by name.",
        sorted(CONFIGS.glob("*.yaml")),
    )
    made["keys.md"] = keys_page()
    made["papers.md"] = papers_page(variants)
    return made
