"""Pairs per second with CLIP for a scorer, against the same pairs judged by a vision-language model of the
size of the one that answers.

    python -m benchmarks.pairs_per_second [--repeats 5]

A LLaVA with random weights answers images twice with the hallucination dial. Then the two answers are
scored by a small CLIP, or read with the image by a judge of the LLaVA's own class and size, which writes a
verdict: of one token (it only reads), or of sixteen. The judge is given every advantage that the answers
have: it runs in the same engine, in batches, with a cache, and is asked once, in one order. One thread,
float32; what is compared takes turns on images that nobody has seen, and seconds are processor time of the
process. A multiplication with an addition counts as 2. What random weights say is of no interest, and all
answers have full length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

RESULTS = Path(__file__).parent / "results" / "pairs_per_second.json"
ANSWER, VERDICTS = 32, {"word": 1, "sentence": 16}  # tokens
SCORER = {"side": 64, "text_length": 77, "steps": 1, "batch_size": 2}  # the CLIP of `make demo-pairs`
SIZES = {
    "small": {"pairs": 32, "side": 48, "model": {}},  # the LLaVA of `make demo-pairs`
    "larger": {
        "pairs": 8,
        "side": 96,
        "model": {"width": 384, "layers": 6, "heads": 6, "vision_width": 192, "vision_layers": 6},
    },
}
ASKED = "Describe this image."
JUDGED = "Two answers describe this image.\nA: {}\nB: {}\nWhich names less that is not there, A or B?"
TEXTS = ("user Describe this image. assistant an apple, a pear and a tangerine on grass", JUDGED)
LLAVA = {
    "LLaVA-1.5-7B": {"width": 4096, "layers": 32, "inner": 11008},
    "LLaVA-1.5-13B": {"width": 5120, "layers": 40, "inner": 13824},
}


class Judge:
    """Asks a model which of two answers fits a image better; a reward of answers that come in pairs."""

    def __init__(self, policy, verdict: int) -> None:
        from mmrl.core.rng import Stream
        from mmrl.vision.engines.generate import Generate

        self.engine = Generate(policy, stream=Stream(0), max_completion_length=verdict, temperature=0.0)

    def __call__(self, prompts: Sequence, outcomes: Sequence) -> list[float]:
        from mmrl.vision.media.prompts import ask

        asked = [
            ask(
                f"{prompt.uid} judged",
                prompt.media,
                JUDGED.format(outcomes[2 * i].text, outcomes[2 * i + 1].text),
                None,
                {},
            )
            for i, prompt in enumerate(prompts[::2])
        ]
        verdicts = [row.outcomes[-1].text for row in self.engine.rollout(asked)]
        return [float(("B" in text) == second) for text in verdicts for second in (False, True)]


def make_parts(folder: Path, size: dict):
    """Build the model that answers, the engine that answers twice, and what scores."""
    from mmrl.config.binding import Pieces
    from mmrl.config.schema import Piece
    from mmrl.core.rng import Stream
    from mmrl.rewards.clip_score import ClipScore
    from mmrl.vision.builders.tiny_models import TinyLlava

    TinyLlava(stream=Stream(0), texts=TEXTS, side=size["side"], **size["model"]).build(folder / "model")
    pieces = Pieces(Stream(0))
    policy = pieces.make(
        "policy", Piece("vision.tokens", {"model": str(folder / "model"), "dtype": "float32"})
    )
    policy.prompt_encoder.end = [-1]  # nothing ends an answer but its length
    engine = pieces.make("engine", Piece("vision.generate", {"max_completion_length": ANSWER}), policy)
    dial = {"contrast_alpha": [0.0, 0.4], "contrast_alpha_std": [0.0, 0.15], "gap": 0.1}
    engine = pieces.make("engine", Piece("vision.contrastive_decoding", dial), engine)
    scorers = {"clip": ClipScore(model=str(folder / "clip"), device="cpu")}
    scorers |= {f"judge, a {name}": Judge(policy, length) for name, length in VERDICTS.items()}
    return policy, engine, scorers


def make_scorer(folder: Path) -> None:
    """Write the CLIP of the demo; what it has learned does not change what it costs."""
    from examples.tiny_clip import TinyClip
    from mmrl.core.rng import Stream

    images(folder, "train", 2, 64)
    rows = [{"image": f"train_{i}.png", "prompt": f"a pear {i}"} for i in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {name: str(folder / "rows.jsonl") for name in ("train", "test")}
    TinyClip(stream=Stream(0), **where, root=str(folder), **SCORER).build(folder / "clip")


def images(folder: Path, name: str, count: int, side: int) -> list[Path]:
    """Write images of noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    paths = [folder / f"{name}_{i}.png" for i in range(count)]
    for path in paths:
        pixels = torch.randint(0, 255, (side, side, 3), generator=generator).to(torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return paths


def asked_about(folder: Path, name: str, size: dict) -> list:
    """Ask twice about images that nobody has seen."""
    from mmrl.data.media_root import MediaRoot
    from mmrl.vision.media.prompts import ask

    root = MediaRoot(folder)
    paths = images(folder, name, size["pairs"], size["side"])
    return [ask(path.name, [root.image(path.name)], ASKED, None, {}) for path in paths for _ in range(2)]


# ---- measuring


def seconds_of(call: Callable[[], object]) -> tuple[float, object]:
    """Time a call by the processor time of the process."""
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def measure(folder: Path, size: dict, repeats: int) -> dict[str, dict[str, float]]:
    """Answer and score new images `repeats` times; seconds are medians, counts those of the last time."""
    policy, engine, scorers = make_parts(folder, size)
    taken: dict[str, list[float]] = {name: [] for name in ("answers", *scorers)}
    for turn in range(repeats + 1):  # the first only warms up
        prompts = asked_about(folder, f"turn{turn}", size)
        spent, rows = seconds_of(lambda: engine.rollout(prompts))  # noqa: B023
        taken["answers"].append(spent)
        answers = [row.outcomes[-1] for row in rows]
        for name, scorer in scorers.items():
            taken[name].append(seconds_of(lambda: scorer(prompts, answers))[0])  # noqa: B023
    prompts = asked_about(folder, "counted", size)
    watched = policy, scorers["clip"].towers
    rows, counts = counted(lambda: engine.rollout(prompts), *watched)
    answers, found = [row.outcomes[-1] for row in rows], {"answers": counts}
    for name, scorer in scorers.items():
        found[name] = counted(lambda: scorer(prompts, answers), *watched)[1]  # noqa: B023
    return {
        name: {
            "ms_per_pair": 1e3 * median(taken[name][1:]) / size["pairs"],
            "spread": (max(taken[name][1:]) - min(taken[name][1:])) / median(taken[name][1:]),
            **{key: value / size["pairs"] for key, value in found[name].items()},
        }
        for name in taken
    }


def counted(call: Callable[[], object], policy, towers) -> tuple[object, dict[str, float]]:
    """Count the operations of a call, and the sequences that the language model and CLIP are called with; a
    token more of an answer is a call."""
    from mmrl.core.flop_counter import CountOperations

    seen = {"model_evaluations": 0, "clip_evaluations": 0}

    def note(key: str):
        def hook(module, args, out):
            first = out[0] if not torch.is_tensor(out) else out
            seen[key] += len(first)

        return hook

    clip = towers.model
    watched = {policy.core.language_model.norm: "model_evaluations"}
    watched |= {clip.visual: "clip_evaluations", clip.ln_final: "clip_evaluations"}
    handles = [module.register_forward_hook(note(key)) for module, key in watched.items()]
    with CountOperations() as count:
        out = call()
    for handle in handles:
        handle.remove()
    return out, {"operations": sum(count.total.values()), **seen}


def compare(parts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Say how many times more pairs a second, and how many times fewer operations, CLIP gives."""
    answers, clip = parts["answers"], parts["clip"]
    rate = lambda one: 1e3 / (answers["ms_per_pair"] + one["ms_per_pair"])
    found = {}
    for name, one in parts.items():
        if name == "answers":
            continue
        found[name] = {"pairs_per_second": rate(one)}
        if one is not clip:
            found[name] |= {
                "scoring, times slower": one["ms_per_pair"] / clip["ms_per_pair"],
                "scoring, by operations": one["operations"] / clip["operations"],
                "pairs, times fewer a second": rate(clip) / rate(one),
                "pairs, by operations": (answers["operations"] + one["operations"])
                / (answers["operations"] + clip["operations"]),
            }
    return found


def published(tokens: int = 100, verdict: int = 16) -> dict[str, dict[str, float]]:
    """Count what LLaVA-1.5 and CLIP ViT-L/14 would need, by 2 operations a weight and token, attention left
    out.

    Two answers of `tokens`, of which one is mixed with what the model says blind, against one reading of
    image, question and both answers and a `verdict`.
    """
    tower = 2 * 24 * 12 * 1024**2  # a token through ViT-L/14
    image, question = 576, 60
    clip = 257 * tower + 2 * 77 * 2 * 12 * 12 * 768**2
    found = {}
    for name, shape in LLAVA.items():
        token = 2 * shape["layers"] * (4 * shape["width"] ** 2 + 3 * shape["width"] * shape["inner"])
        look = (image + 1) * tower
        answers = look + (image + 2 * question + 3 * tokens) * token
        judge = look + (image + question + 2 * tokens + verdict) * token
        found[name] = {
            "operations of the answers": answers,
            "of CLIP": clip,
            "of the judge": judge,
            "scoring, by operations": judge / clip,
            "pairs, by operations": (answers + judge) / (answers + clip),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write and print what it finds."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    given = parser.parse_args(arguments)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    found: dict = {"torch": torch.__version__, "answer": ANSWER, "verdicts": VERDICTS, "sizes": {}}
    for name in given.sizes:
        with TemporaryDirectory() as folder:
            make_scorer(Path(folder))
            parts = measure(Path(folder), SIZES[name], given.repeats)
        found["sizes"][name] = {"parts": parts, "compared": compare(parts)}
        print(json.dumps({name: found["sizes"][name]}), flush=True)
    found["published sizes, counted"] = published()
    print(json.dumps(found["published sizes, counted"]))
    RESULTS.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
