"""The page about models lists every family of pipelines with the images that its prompts take."""

from __future__ import annotations

from pathlib import Path

from mmrl.config.registry import pieces

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "model.md"


def rows() -> list[str]:
    """Write a line of the table for every pipeline: its class, the images of a prompt, the guidance."""
    lines = []
    for entry in pieces("family"):
        family = entry.target
        fewest, most = family.images
        images = "none" if not most else str(most) if fewest == most else f"{fewest} to {most}"
        two = f"two passes above {0 if family().passes(0.5) == 2 else 1}"
        guidance = "an input of the network" if family.embedded_guidance else two
        lines += [f"| {name} | {images} | {guidance} |" for name in sorted(family.pipelines)]
    return sorted(lines)


def test_the_page_lists_every_family():
    text = PAGE.read_text()
    head = "| pipeline of diffusers | images of a prompt | guidance |\n| --- | --- | --- |\n"
    assert head + "\n".join(rows()) + "\n" in text, "the table should be:\n" + "\n".join(rows())
