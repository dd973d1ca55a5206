"""Time and memory of reading a tiny model of every family, as ratios to plain transformers.

    python -m benchmarks.families [--rounds 5] [--families qwen3_vl,llava]

One thread, float32. "load" is the model with its processor, "encode" a prompt with an image, "learn" the
forward and backward pass of `ANSWERS` answers to it, "memory" the bytes that it saves for the backward pass.
Plain transformers reads the prompt again for every answer, since families batch their media differently.
Times are medians of the thread's processor time, and both libraries take turns. It writes
results/families.json and the last section of docs/families.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from mmrl.core.rng import seeded
from mmrl.core.types import Outcome, Prompt
from mmrl.doctor import saved_storages
from mmrl.vision.models.media_arguments import media_arguments
from mmrl.vision.models.model_families import FAMILIES
from mmrl.vision.models.plain_inputs import plain_inputs
from mmrl.vision.models.processor import OF_TOKENS, UNUSED, template_message
from mmrl.vision.policies.tokens import Tokens
from tests.vision.family_table import PAGE, TIMES, ask, maker_of, makers, row

ANSWERS = ("the quick brown fox", "0123 fox", "jumps over it 42", "9")
RESULTS = Path(__file__).parent / "results" / "families.json"
STEPS = ("load", "encode", "learn")


def load_plain(folder: Path) -> tuple[Any, Any]:
    """Load model and processor as the documentation of transformers does."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return model.eval(), AutoProcessor.from_pretrained(folder)


def rows_of(encoder: Any, inputs: Mapping[str, Any]) -> list[tuple[dict[str, Tensor], int]]:
    """Append each answer to the inputs of a prompt: model inputs, and the length of the answer."""
    rows, tensors = [], {name: torch.as_tensor(x) for name, x in inputs.items() if name not in UNUSED}
    for answer in map(encoder.answer, ANSWERS):
        row = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
        for name in {*OF_TOKENS} & {*row}:
            more = answer if name == "input_ids" else torch.full_like(answer, name == "attention_mask")
            row[name] = torch.cat([row[name], more[None]], 1)
        rows.append((row, len(answer)))
    return rows


def learn_plain(model: Any, rows: list[tuple[dict[str, Tensor], int]]) -> None:
    """Compute the log-probabilities of answers, one after the other, and their gradients."""
    total = torch.zeros(())
    for inputs, length in rows:
        logp = model(**inputs, use_cache=False).logits[0, -length - 1 : -1].log_softmax(-1)
        total = total + logp.gather(-1, inputs["input_ids"][0, -length:, None]).sum()
    total.backward()


def timed(actions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Run actions in turn, after one turn that does not count; return the median seconds of each."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, act in actions.items():
            start = time.process_time()
            act()
            if turn:
                taken[name].append(time.process_time() - start)
    return {name: median(values) for name, values in taken.items()}


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Measure a checkpoint: milliseconds here and their ratios to plain transformers, and saved bytes."""
    ours = lambda: Tokens(model=str(folder), dtype="float32")
    loaded = timed({"ours": ours, "plain": lambda: load_plain(folder)}, rounds)
    policy, (model, processor) = ours(), load_plain(folder)
    encoder, asked = policy.prompt_encoder, ask("image", 1)
    if not processor.chat_template:  # PaliGemma reads prompts without turns
        processor = encoder.processor
    messages, numbers = [template_message(message) for message in asked.messages], iter(range(1 << 30))
    media = media_arguments(processor, asked, {})
    inputs = plain_inputs(processor, messages, (), media)
    encoded = timed(
        {
            "ours": lambda: encoder.encode(Prompt(f"p{next(numbers)}", asked.messages)),  # no cached prompt
            "plain": lambda: plain_inputs(processor, messages, (), media),
        },
        4 * rounds,
    )
    trained = {name: parameter.requires_grad for name, parameter in policy.model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    rows = tuple(policy.encode(asked, Outcome(text=text)) for text in ANSWERS)
    batch, plain_rows = policy.collate(rows), rows_of(encoder, inputs)
    acts = {
        "ours": lambda: (policy(batch).logp * batch.mask).sum().backward(),
        "plain": lambda: learn_plain(model, plain_rows),
    }
    learned = timed(acts, rounds)
    saved = {}
    for name, module in (("ours", policy.model), ("plain", model)):
        with saved_storages(module) as kept:
            acts[name]()
        saved[name] = sum(kept.values())
    found = {"kilobytes": saved["ours"] / 1e3, "memory": saved["ours"] / saved["plain"]}
    for step, seconds in zip(STEPS, (loaded, encoded, learned), strict=True):
        found |= {f"{step}_ms": 1e3 * seconds["ours"], step: seconds["ours"] / seconds["plain"]}
    return found


def section(results: Mapping[str, Any]) -> str:
    """Write the section of the page: milliseconds, and ratios to plain transformers in brackets."""
    lines = [row(["`model_type`", "load, ms", "encode, ms", "learn, ms", "memory, kB"]), row(["---"] * 5)]
    for family, found in sorted(results["families"].items()):
        cells = [f"{found[f'{step}_ms']:.1f} ({found[step]:.2f})" for step in STEPS]
        lines.append(row([f"`{family}`", *cells, f"{found['kilobytes']:.0f} ({found['memory']:.2f})"]))
    lead = f"""

Tiny models of every family, one thread of {results["machine"]["processor"]}; in brackets the ratio to
plain transformers in the same run, by `python -m benchmarks.families`.
**load**: model and processor; **encode**: a prompt with an image; **learn**: forward and backward pass of
{len(ANSWERS)} answers to it, which transformers reads one after the other; **memory**: what they save for the
backward pass.

"""
    return TIMES + lead + "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", default="", help="only these, separated by commas; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    named = [name for name in given.families.split(",") if name] or sorted(map(maker_of, FAMILIES))
    results: dict[str, Any] = {"machine": describe(), "torch": torch.__version__, "families": {}}
    for family in dict.fromkeys(named):
        with tempfile.TemporaryDirectory() as folder:
            with seeded(0):
                makers()[family](Path(folder))
            results["families"][family] = found = measure(Path(folder), given.rounds)
        print(family, json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
    if not given.families:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(PAGE.read_text().partition(TIMES)[0] + section(results))


if __name__ == "__main__":
    main()
