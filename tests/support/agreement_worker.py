"""One of two processes, each in a folder of its own: `python -m tests.support.agreement_worker plans.json
folder`.

Relative paths of a configuration then name other files on every process, as on two machines that share no
disk. What becomes of every run goes to `folder/{name}-{rank}.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.reporting import html
from mmrl.runtime.distributed import Processes
from mmrl.training.loop import train
from tests.support.toys import Lookup, ToyGenerate, ToyText, plan

HERE = "tests.support.agreement_worker"


def rows(*, path: str) -> list[Prompt]:
    """Read prompts, one JSON object a line, each about the file that it names."""

    def media(name: str) -> Media:
        pixels = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
        return Media("image", name, lambda: Frames(pixels, torch.zeros(1)), Path(path).parent / name)

    def prompt(one: dict[str, Any]) -> Prompt:
        parts = (Part(one["text"]), Part(media=media(one["image"])))
        return Prompt(one["id"], (Message("user", parts),), one["right"])

    return [prompt(json.loads(line)) for line in Path(path).read_text().splitlines()]


class OnBase(Lookup):
    """Logits over frozen ones."""

    def __init__(self, table: Tensor, base: Tensor) -> None:
        super().__init__(table)
        self.base = torch.nn.Parameter(base, requires_grad=False)

    def forward(self) -> Tensor:
        return self.table + self.base


class Based(ToyText):
    """An adapter over frozen weights, which its checkpoints do not hold."""

    def __init__(self, *, base: str) -> None:
        super().__init__()
        self.module = OnBase(self.table.detach(), load_file(base)["base"])


class Hangs(ToyGenerate):
    """An engine that stops on the second process, alive, in the second step."""

    def rollout(self, prompts):
        if int(os.environ["RANK"]) == 1 and self.stream.step == 1:
            time.sleep(300)
        return super().rollout(prompts)


class HangsInLearning(ToyText):
    """A policy that stops on the second process while the first exchanges gradients."""

    def __call__(self, batch, extra=frozenset()):
        if int(os.environ["RANK"]) == 1 and torch.is_grad_enabled():
            time.sleep(300)
        return super().__call__(batch, extra)


def write(folder: Path, *, right: int = 1, picture: bytes = b"picture", base: float = 0.0) -> None:
    """Write what a run reads."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [{"id": f"p{i}", "text": f"say {right}", "image": "a.png", "right": right} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in listed))
    (folder / "a.png").write_bytes(picture)
    save_file({"base": torch.full((8, 4, 6), base)}, folder / "base.safetensors")


def plan_of(folder: str | Path, **changes: Any) -> dict[str, Any]:
    """Plan a run that reads what `write` wrote."""
    usual = {
        "policy": {"name": f"{HERE}:Based", "base": f"{folder}/base.safetensors"},
        "data": {"name": f"{HERE}:rows", "path": f"{folder}/rows.jsonl"},
        "rewards": ["tests.support.toys:share_right"],
        "save_steps": 1,
        "save_total_limit": 0,
        "max_steps": 2,
    }
    return plan(f"{folder}/run", **merge(usual, changes))


def main() -> None:
    html.write_page = lambda folder: folder  # which takes longer than everything else
    plans, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    processes = Processes()
    rank = processes.rank
    holds = [(False, False), (True, False), (False, True), (True, True)]
    (folder / f"any-{rank}.json").write_text(json.dumps([processes.any(one[rank]) for one in holds]))
    os.chdir(folder / f"node-{rank}")
    for name, one in plans.items():
        try:
            run = build(parse(one, Config), quiet=True)
            train(run)
            told = {"weights": run.policy.table.sum().item(), "steps": run.progress.step}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
