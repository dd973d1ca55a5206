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


def test_pipelines_of_one_file_have_families_of_their_own():
    names = {pipeline: entry.full_name for entry in pieces("family") for pipeline in entry.target.pipelines}
    assert names["HunyuanVideo15ImageToVideoPipeline"] == "diffusion.hunyuan_video15_image_to_video"
    assert names["LTX2ImageToVideoPipeline"] == "diffusion.ltx2_image_to_video"
    assert names["ZImagePipeline"] == "diffusion.zimage"
