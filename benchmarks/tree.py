"""Forward and backward passes over rows that share beginnings, with the tree of these and without it.

    python -m benchmarks.tree [--repeats 3]

The small Qwen2.5-VL of `grpo_step.py` with a frozen tower; one thread, float32, processor time, both ways in
turn. "Branches" are answers that part from each other as `vision.with_branches` samples them; "turns" are
a conversation written as a row per turn, whose replies are images. "Apart" shares prompts only, as without a
tree. Operations are counted as they run, a backward pass as two forward passes; the tower has none.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.grpo_step import make_model, seconds_of
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "tree.json"
VISUAL = 256  # tokens of an image
ANSWER = 32  # tokens of a turn, or of a part of an answer
BUDGET = 6144  # tokens of a micro-batch


class Tokens:
    """Draws what the policy would have said."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, length: int = ANSWER) -> torch.Tensor:
        return torch.randint(20, 250, (length,), generator=self.generator)


def picture(seed: int):
    from mmrl.core.types import Frames, Media

    side = 28 * round(VISUAL**0.5)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 255, (1, 3, side, side), dtype=torch.uint8, generator=generator)
    return Media("image", f"picture{seed}", lambda: Frames(pixels, torch.zeros(1)))


def ask(uid: str, seed: int = 0):
    from mmrl.core.types import Message, Part, Prompt

    return Prompt(uid, (Message("user", (Part(media=picture(seed)), Part("What is shown here?"))),))


def row_of(prompt, read, ids: torch.Tensor):
    from mmrl.core.types import Outcome, Trajectory
    from mmrl.vision.decoding.token_steps import TokenRow

    return Trajectory(prompt, prompt.uid, (Outcome(end=len(ids)),), TokenRow(read, ids), len(ids))


def branches(policy, branching: tuple[int, ...]) -> tuple:
    """Make the answers to a prompt: parts of equal length, each with several continuations."""
    prompt, tokens = ask("branches"), Tokens()
    read, parts = policy.prompt_encoder.encode(prompt), {}
    for depth in range(len(branching)):
        for path in product(*map(range, branching[: depth + 1])):
            parts[path] = tokens.draw()
    leaves = [path for path in parts if len(path) == len(branching)]
    return tuple(
        row_of(prompt, read, torch.cat([parts[path[: depth + 1]] for depth in range(len(branching))]))
        for path in leaves
    )


def turns(policy, number: int) -> tuple:
    """Make a conversation with a row per turn."""
    from mmrl.core.types import Message, Part

    prompt, tokens, encoder, rows = ask("turns"), Tokens(), policy.prompt_encoder, []
    read = encoder.encode(prompt)
    for turn in range(number):
        ids = tokens.draw()
        rows.append(row_of(prompt, read, ids))
        shown = Part(media=picture(1 + turn))
        read = encoder.extend(read, ids, Message("user", (shown, Part("Look again."))))
    return tuple(rows)


def usual(policy, prompts: int) -> tuple:
    """Make answers that differ from the first token on, to several prompts with an image each."""
    tokens, rows = Tokens(), []
    for number in range(prompts):
        prompt = ask(f"usual{number}", number)
        read = policy.prompt_encoder.encode(prompt)
        rows += [row_of(prompt, read, tokens.draw()) for _ in range(8)]
    return tuple(rows)


def micro_batches(batch) -> list:
    from mmrl.core.types import Unit

    return batch.split(BUDGET, Unit.ROW)


def learn(policy, batch) -> None:
    policy.module.zero_grad(set_to_none=True)
    for part in micro_batches(batch):
        (policy(part).logp * part.mask).sum().backward()


def operations(policy, batch) -> dict[str, int]:
    """Count those of a forward pass, by part of the model."""
    from mmrl.core.flop_counter import CountOperations

    counter = CountOperations(["language"])
    tower = policy.core.visual
    hooks = (
        tower.register_forward_pre_hook(lambda *_: counter.where.append("tower")),
        tower.register_forward_hook(lambda *_: counter.where.pop() and None),
    )
    with counter, torch.no_grad():
        for part in micro_batches(batch):
            policy(part)
    for hook in hooks:
        hook.remove()
    return dict(counter.total)


def compare(policy, name: str, rows: tuple, repeats: int) -> dict:
    start = time.process_time()
    batch = policy.collate(rows)
    collating = time.process_time() - start
    apart = batch.replace(steps=replace(batch.steps, tree=None))
    start = time.process_time()
    batch.steps.with_tree(policy.core)
    line = {"rows": name, "number": len(rows), "tree": batch.steps.tree is not None}
    line |= {"collate_seconds": round(collating, 4), "find_seconds": round(time.process_time() - start, 4)}
    with torch.no_grad():
        gap = (policy(batch).logp - policy(apart).logp) * batch.mask
    line["logp_differ_by"] = float(gap.abs().max())
    taken: dict[str, list[float]] = {"apart": [], "together": []}
    for _ in range(repeats + 1):
        taken["apart"].append(seconds_of(lambda: learn(policy, apart)))
        taken["together"].append(seconds_of(lambda: learn(policy, batch)))
    counted = {way: operations(policy, one) for way, one in (("apart", apart), ("together", batch))}
    for way, times in taken.items():
        line[f"{way}_seconds"] = round(median(times[1:]), 3)
        line[f"{way}_spread"] = [round(min(times[1:]), 3), round(max(times[1:]), 3)]
        line[f"{way}_operations"] = 3 * counted[way]["language"] + counted[way].get("tower", 0)
        parts = micro_batches(batch if way == "together" else apart)
        line[f"{way}_tokens"] = sum(part.steps.cost(torch.arange(len(part))) for part in parts)
    line["times_faster"] = round(line["apart_seconds"] / line["together_seconds"], 2)
    line["limit"] = round(line["apart_operations"] / line["together_operations"], 2)
    return line | {"machine": describe()}


def main() -> None:
    from mmrl.vision.policies.tokens import Tokens as Policy

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--only", default="", help="those whose names begin so")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        policy = Policy(model=str(make_model(Path(place))), dtype="float32")
    made = {
        "branches 4, 4": lambda: branches(policy, (4, 4)),
        "branches 6, 6": lambda: branches(policy, (6, 6)),
        "branches 3, 3, 3": lambda: branches(policy, (3, 3, 3)),
        **{f"turns {number}": lambda number=number: turns(policy, number) for number in options.turns},
        "usual": lambda: usual(policy, 4),
    }
    # What was measured before and is not asked for stays in the file.
    known = options.output.read_text().splitlines() if options.only and options.output.exists() else []
    lines = {line["rows"]: line for line in map(json.loads, known)}
    for name, make in made.items():
        if name.startswith(options.only):
            lines[name] = compare(policy, name, make(), options.repeats)
            print(json.dumps(lines[name]), flush=True)
            options.output.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))


if __name__ == "__main__":
    main()
