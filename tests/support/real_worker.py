"""One of two processes that train real classes: `python -m tests.support.real_worker plans.json
ddp|fsdp2`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from mmrl.build import build
from mmrl.config.binding import Pieces, Recipe
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.engines.ray_workers import trained
from mmrl.reporting import html
from mmrl.runtime.fsdp import in_shards, sharded_parts
from mmrl.training.loop import train
from mmrl.vision.serving.agreement import gap
from tests.vision import mixed

CPU = torch.device("cpu")


def seen() -> list[Prompt]:
    """Ask one question with a image and one in words, which lands on the other process."""
    return mixed.prompts("qwen2_5_vl")[1::-1]


def longer(prompts, completions, **columns) -> list[float]:
    """Reward letters."""
    return [len(completion) / 10 for completion in completions]


class Beginning:
    """An engine that answers when it is asked, and raises once where a file does not exist yet."""

    notes = frozenset({"logp"})

    def __init__(self, engine, *, stream: Stream, once: str = "") -> None:
        self.engine, self.policy, self.stream, self.once = engine, engine.policy, stream, once
        self.begun = None

    def ask(self, prompts) -> None:
        """Answer with the weights of now."""
        self.begun = self.engine.rollout(prompts)

    def rollout(self, prompts):
        """Hand over what was asked for."""
        if self.once and self.stream.step == 2 and not Path(f"{self.once}-{os.environ.get('RANK')}").exists():
            Path(f"{self.once}-{os.environ.get('RANK')}").touch()
            raise LookupError("with rollouts in flight")
        if self.begun is None:
            self.ask(prompts)
        rows, self.begun = self.begun, None
        return rows


class Elsewhere:
    """An engine that samples with a model of its own, to which it copies the weights that it sends.

    Where the policy is sharded, it has to be so while answers are sampled.
    """

    notes = frozenset({"logp"})

    def __init__(self, engine, *, stream: Stream, recipe: Recipe) -> None:
        self.policy, pieces = engine.policy, Pieces(stream)
        with torch.random.fork_rng():
            self.engine = self.own = pieces.make("policy", recipe.policy)
        for i, piece in enumerate(recipe.engines):
            self.engine = pieces.make("engine", piece, self.engine, place=f"engine[{i}]")
        self.kinds: set[bool] = set()
        self.rows = ()

    def to_send(self):
        """List the trained parameters."""
        return trained(self.policy.module).values()

    def send(self) -> None:
        """Copy the trained weights."""
        for name, weight in trained(self.own.module).items():
            weight.data.copy_(trained(self.policy.module)[name])

    def rest(self) -> None:
        """Do nothing."""

    def ask(self, prompts) -> None:
        """Begin with nothing."""

    def rollout(self, prompts):
        """Answer with the weights that were sent."""
        if sharded_parts(self.policy.module):
            assert in_shards(self.policy.module)
        self.rows = self.engine.rollout(prompts)
        return self.rows

    def compare(self, even) -> None:
        """Compare answers with the policy, of the first process alone."""
        mine = [self.rows] if os.environ.get("RANK") == "0" else []
        passes = [gap(self.policy, rows) for rows, _, _ in even(mine, self.rows)]
        assert len(passes) <= 1 and all(value < 1e-4 for value in passes), passes


def sharding():
    """Shard weights as `configs/accelerate/fsdp2.yaml` says; accelerate itself refuses to on a CPU."""
    plain = AcceleratorState.__init__

    def init(self, *given, **options):
        plain(self, *given, **options)
        AcceleratorState._shared_state |= {
            "distributed_type": DistributedType.FSDP,
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                reshard_after_forward=True,
                state_dict_type="FULL_STATE_DICT",
                cpu_ram_efficient_loading=False,
            ),
        }

    return mock.patch.object(AcceleratorState, "__init__", init)


def main() -> None:
    """Train every plan."""
    with {"ddp": nullcontext, "fsdp2": sharding}[sys.argv[2]]():
        html.write_page = lambda folder: folder  # which takes longer than everything else
        for plan in json.loads(Path(sys.argv[1]).read_text()):
            train(build(parse(plan, Config), quiet=True))


if __name__ == "__main__":
    main()
