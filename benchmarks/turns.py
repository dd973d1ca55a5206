"""Rollouts of conversations: keys and values kept from turn to turn, beside reading all anew in every turn.

    python -m benchmarks.turns [--visual 256 1024] [--turns 8 8] [--repeats 1] [--recent 0]

Eight answers to one prompt of a small Qwen2.5-VL; after every turn of 16 tokens a tool shows an image of so
many visual tokens. "Own": every answer sees other images; "equal": all see the same, up to 4 turns. With
`--recent` only so many of the latest images stay in the prompt. One thread, float32; seconds are processor
time from the beginning to the end of a turn, with tools and the encoding of replies, which both ways have
alike. What is compared takes turns, so that a busy machine is unfair to none. The limit is the ratio of the
floating-point operations of both, counted as they run (mmrl/core/flop_counter.py). Tokens must be the same in
both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from zlib import crc32

import torch

from benchmarks.machine import describe
from mmrl.core.flop_counter import CountOperations
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.policies.tokens import Tokens

RESULTS = Path(__file__).parent / "results" / "turns.json"
GROUP, LENGTH = 8, 16
LAYERS, WIDTH, HEADS, TOWER, VOCABULARY = 4, 256, 4, 64, 512
SHOWN = (2, 4, 8)  # turns of the table


class FullLength(Generate):
    """Answers of full length that count as ended, so that the conversation goes on."""

    def row(self, prompt, encoded, notes, stopped, **others):
        return super().row(prompt, encoded, notes, True, **others)


class Showing(WithTools):
    """Every turn calls the tool, and notes when it ends."""

    parse = staticmethod(lambda text: [Call("show", {"number": crc32(text.encode())})])
    where: list[str]
    ended: list[float]

    def _choose(self, talks, turn, begin):
        self.where.append(str(turn))
        super()._choose(talks, turn, begin)
        self.ended.append(time.process_time())


def make_engine(
    policy: Tokens, visual: int, turns: int, *, kept: bool, equal: bool, recent: int = 0
) -> Showing:
    """Make the engine of a batch; its tool shows `visual` tokens of noise."""
    from PIL import Image

    side = 28 * round(visual**0.5)

    def show(number: int):
        """Show an image.

        Args:
            number: Which.
        """
        draw = torch.Generator().manual_seed(0 if equal else number)
        pixels = torch.randint(0, 255, (side, side, 3), generator=draw, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())

    inner = FullLength(policy, stream=Stream(0), max_completion_length=LENGTH)
    if not kept:
        inner.turns = lambda: SimpleNamespace(begin=lambda rows: inner.reader([row.encoded for row in rows]))
    engine = Showing(
        inner,
        stream=Stream(0),
        tool=(show,),
        max_turns=turns,
        max_images=10**6,
        max_completion_length=10**6,
        only_n_most_recent_images=recent,
    )
    engine.where, engine.ended = ["start"], []
    return engine


def timed(engine: Showing, prompts: list[Prompt]) -> tuple[list[float], list]:
    """Hold conversations: the seconds from the beginning to the end of every turn, and the tokens."""
    began = time.process_time()
    rows = engine.rollout(prompts)
    return [end - began for end in engine.ended], [row.steps.ids.tolist() for row in rows]


def counted(make: Callable[[], Showing], prompts: list[Prompt]) -> list[float]:
    """Count the operations from the beginning to the end of every turn.

    Rows are alike, so that one row and two tell what all take.
    """
    found = []
    for rows in (1, 2):
        engine = make()
        with CountOperations(engine.where) as counter:
            engine.rollout(prompts[:rows])
        found.append(torch.tensor([counter.total[str(turn)] for turn in range(engine.max_turns)]).double())
    one, two = found
    return (one + (len(prompts) - 1) * (two - one)).cumsum(0).tolist()


def measure(
    policy: Tokens, visual: int, turns: int, repeats: int, *, equal: bool, recent: int = 0
) -> list[dict]:
    """Compare both ways: a line for every number of turns."""
    prompts = [Prompt("question", (Message("user", (Part("What is shown here?"),)),))] * GROUP
    makes = {
        name: partial(make_engine, policy, visual, turns, kept=name == "kept", equal=equal, recent=recent)
        for name in ("kept", "anew")
    }
    runs = [(name, *timed(make(), prompts)) for _ in range(repeats) for name, make in makes.items()]
    if len({json.dumps(ids) for _, _, ids in runs}) > 1:
        raise ValueError("the two ways gave different tokens")
    operations = {name: counted(make, prompts) for name, make in makes.items()}
    lines = []
    for turn in (t for t in SHOWN if t <= turns):
        line = {"visual": visual, "turns": turn, "images": "equal" if equal else "own"}
        line |= {"recent": recent} if recent else {}
        for name in makes:
            seconds = median(seconds[turn - 1] for way, seconds, _ in runs if way == name)
            line[f"{name}_seconds"] = round(seconds, 2)
            line[f"{name}_gflop"] = round(operations[name][turn - 1] / 1e9, 1)
        line["times_faster"] = round(line["anew_seconds"] / line["kept_seconds"], 2)
        line["limit"] = round(line["anew_gflop"] / line["kept_gflop"], 2)
        lines.append(line)
    return lines


def main() -> None:
    """Measure and write lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visual", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--turns", type=int, nargs="*", default=[max(SHOWN)] * 2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--recent", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict] = [describe()]
    with TemporaryDirectory() as place:
        folder = Path(place) / "model"
        TinyQwen2_5Vl(
            stream=Stream(0), vocab_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS,
            vision_width=TOWER, max_pixels=1024 * 28 * 28,
        ).build(folder)  # fmt: skip
        policy = Tokens(model=str(folder), dtype="float32")
        policy.prompt_encoder.end = [-1]
        measure(policy, 16, 2, 1, equal=False)  # first calls allocate
        sizes = list(zip(options.visual, options.turns, strict=True))
        for equal in (False, True):
            for visual, most in sizes:
                most = min(most, 4) if equal else most
                lines += measure(policy, visual, most, options.repeats, equal=equal, recent=options.recent)
                print(json.dumps(lines[-1]), flush=True)
                options.output.parent.mkdir(exist_ok=True)
                options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
