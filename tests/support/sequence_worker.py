"""One of two processes that compute the layers of every row together.

`python -m tests.support.sequence_worker cases.json`, a list of folders, models and options of policies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmrl.core.types import Outcome, Trajectory
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.policies.tokens import Tokens
from tests.vision.tiny import ask, clip, picture


def rows(policy: Tokens, rank: int, video: bool) -> tuple[Trajectory, ...]:
    """Make rows of other lengths on every process: videos or images, and answers."""
    shown = clip(4 + 2 * rank) if video else picture(seed=rank)
    generator, made = torch.Generator().manual_seed(rank), []
    for prompt, length in (
        (ask(f"seen{rank}", shown, "When?"), 5),
        (ask(f"told{rank}", "How many?"), 3 + rank),
    ):
        ids = torch.randint(5, 60, (length,), generator=generator)
        row = TokenRow(policy.prompt_encoder.encode(prompt), ids, 0.7)
        made.append(Trajectory(prompt, prompt.uid, (Outcome(end=length),), row, length))
    return tuple(made)


def computed(policy: Tokens, batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return log-probabilities and entropies of this process's rows, and its gradients of a weighed mean."""
    policy.module.zero_grad()
    found = policy.module(batch.steps, frozenset({"entropy"}), None)
    weights = torch.linspace(-1, 2, found["logp"].numel()).view(found["logp"].shape)
    ((found["logp"] * weights).mean() + found["entropy"].mean() / 3).backward()
    learned = {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in found.items()}, learned


def main() -> None:
    """Compare every case."""
    dist.init_process_group("gloo")
    for folder, model, options in json.loads(Path(sys.argv[1]).read_text()):
        compare(Path(folder), model, options)
    dist.destroy_process_group()


def compare(folder: Path, model: str, options: dict[str, Any]) -> None:
    """Compare what two processes compute together with what each computes alone."""
    rank, video = dist.get_rank(), options.pop("video", True)
    torch.manual_seed(0)
    alone = Tokens(model=model, dtype="float32", **options)
    torch.manual_seed(0)
    together = Tokens(model=model, dtype="float32", sp_size=2, share_prefix=False, **options)
    with torch.no_grad():  # so that an adapter adds something
        for one, other in zip(alone.module.parameters(), together.module.parameters(), strict=True):
            one.add_(torch.randn(one.shape) * 0.02 if one.requires_grad else 0.0)
            other.copy_(one)
    for weight in alone.module.parameters():  # equal on both processes
        dist.broadcast(weight.data, 0)
    together.module.load_state_dict(alone.module.state_dict())
    batch = alone.collate(rows(alone, rank, video))
    seen = []
    hook = together.model.base_model.get_submodule("language_model.layers.0").register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[1])
    )
    (values, gradients), (other_values, other_gradients) = computed(alone, batch), computed(together, batch)
    hook.remove()
    length = max(len(row.steps.prompt.ids) + row.length - 1 for row in rows(alone, rank, video))
    assert (length + 1) // 2 in seen, f"a process holds half of {length} tokens, not {seen}"
    for name, value in values.items():
        torch.testing.assert_close(other_values[name], value, rtol=0, atol=1e-5)
    assert {*gradients} <= {*other_gradients}
    worst = 0.0
    for name, value in other_gradients.items():
        wanted = gradients.get(name, torch.zeros_like(value)).clone()
        for tensor in (wanted, value):
            dist.all_reduce(tensor)
        worst = max(worst, float((wanted - value).abs().max()))
    assert worst < 1e-5, worst
    assert max(float(value.abs().max()) for value in gradients.values()) > 1e-2
    print(f"largest difference of gradients {worst:.1e}")
    with torch.no_grad():  # which every process does alone
        again = together.module(batch.steps, frozenset(), None)["logp"]
    torch.testing.assert_close(again, values["logp"], rtol=0, atol=1e-5)
    (folder / f"done-{rank}").touch()


if __name__ == "__main__":
    main()
