"""Every flow family on two devices: a guided rollout and a learning step of its tiny pipeline, compared.

    python -m tests.diffusion.on_devices cpu cuda

Prints for each family the difference of log-probabilities between rollout and learning on each device, and
the difference of pixels and latents between the devices. Exits with 1 if a family fails, or pixels differ by
more than 2 of 255.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from tests.diffusion import tiny
from tests.diffusion.flows import flow, make, picture

FOLDER = Path(__file__).parent
TEXTS = ("a cat", "two dogs")
LENGTHS = {"z_image": 64}  # most tokens of a text, where the default is too long for the tiny network
OFFLOAD = {"flux": ["text_encoders", "vae"], "qwen_image_edit": ["text_encoders", "vae"]}
MOST = 2  # of 255 levels


def makers() -> list[tuple[str, Callable[[Path], Any]]]:
    """List the makers of tiny pipelines by name; files `tiny_*.py` register theirs in `tiny.MAKERS`."""
    for file in sorted(FOLDER.glob("tiny_*.py")):
        importlib.import_module(f"tests.diffusion.{file.stem}")
    return sorted(tiny.MAKERS.items())


def prompts(images: tuple[int, int]) -> list[Prompt]:
    """Make prompts with one image if the family takes any."""
    frames = Frames(picture(1, 64)[None], torch.zeros(1))
    shown = [Part(media=Media("image", "a.png", lambda: frames, source=b"a"))] if images[1] else []
    return [Prompt(text, (Message("user", (*shown, Part(text))),)) for text in TEXTS]


def step(folder: Path, name: str, device: str) -> tuple[Outcome, torch.Tensor, float]:
    """Roll out and learn once: the first result, its latents (*L), and the gap of log-probabilities."""
    length = LENGTHS.get(name, 0)
    options = {"dtype": "float32", "lora_rank": 2, "offload": OFFLOAD.get(name, [])}
    policy = flow(folder, max_sequence_length=length, **options)
    policy.module.to(device)
    usual = {"height": 32, "width": 32, "num_inference_steps": 3, "guidance_scale": 4.0}
    engine = make("engine", "diffusion.denoise", policy, solver="diffusion.flow_sde", **usual)
    rows = engine.rollout(prompts(policy.family.images))
    output = policy(policy.collate(rows))
    output.logp.sum().backward()
    sampled = torch.stack([row.notes["logp"] for row in rows])
    gap = float((output.logp.detach().cpu() - sampled).abs().max())
    return rows[0].outcomes[-1], rows[0].steps.path[-1], gap


def compare(name: str, maker: Callable[[Path], Any], devices: list[str]) -> bool:
    """Print the line of one family; whether it holds."""
    with tempfile.TemporaryDirectory() as folder:
        maker(Path(folder))
        results = [step(Path(folder), name, device) for device in devices]
    pixels = [x.image if x.image is not None else x.video for x, _, _ in results]
    levels = float((pixels[0].float() - pixels[-1].float()).abs().max())
    latents = float((results[0][1] - results[-1][1]).abs().max())
    gaps = ", ".join(f"{gap:.1e}" for _, _, gap in results)
    print(f"{name:24s} gaps {gaps}; pixels differ by {levels:.0f}, latents by {latents:.1e}", flush=True)
    return levels <= MOST


def main(devices: list[str]) -> int:
    """Compare every family; the exit code."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    failed = []
    for name, maker in makers():
        try:
            failed += [] if compare(name, maker, devices) else [name]
        except Exception:  # the other families go on
            traceback.print_exc()
            failed.append(name)
    print("failed:", ", ".join(failed) or "none")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["cpu"]))
