"""Tokens per second of supervised fine-tuning, packed and padded, beside TRL's SFTTrainer.

    python -m benchmarks.sft_step [--repeats 5]

A small language model of the Qwen2 shape, because TRL refuses packing with images. Both get the same weights
and rows (prompt and completion, uneven lengths), AdamW in float32, and about 2,048 tokens per optimizer step
in passes of at most 1,024. They take turns on one thread; seconds are processor time. Steps of mmrl include
the encoding of their rows, which TRL does before training. "MKL" is mmrl without oneDNN, which TRL does not
use. The gradients of one packed sequence of TRL are compared with those of mmrl for the same tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.grpo_step import by_mkl, clock, seconds_of, step_once
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "sft_step.json"
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 512
ROWS, BLOCK, PASSES = 14, 1024, 2  # rows of a step, tokens of a pass, passes of a step
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from mmrl.vision.builders.tiny_models import tiny_tokenizer

    tokenizer = tiny_tokenizer(["the quick brown fox jumps over 0123456789 lazy dogs"] * 4, VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def make_rows(folder: Path, count: int) -> tuple[Path, list[dict[str, Any]]]:
    """Write prompts and completions of uneven length: most are short, a few are long."""
    draw, words = random.Random(0), ("the", "quick", "brown", "fox", "jumps", "over", "0", "1", "2")

    def turn(role: str, most: int) -> list[dict[str, str]]:
        text = " ".join(draw.choices(words, k=int(4 * (most / 4) ** draw.random())))
        return [{"role": role, "content": text}]

    rows = [{"prompt": turn("user", 160), "completion": turn("assistant", 160)} for _ in range(count)]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path, rows


def make_run(folder: Path, model: Path, rows: Path, packing: bool) -> Any:
    from mmrl.build import build
    from mmrl.config.schema import Config, Learn, Piece, Rollout

    return build(
        Config(
            policy=Piece("vision.tokens", {"model": str(model), "dtype": "float32", "packing": packing}),
            data=Piece("vision.conversations", {"path": str(rows)}),
            rollout=Rollout((Piece("offline"),), num_prompts=ROWS, num_generations=1),
            advantage=(Piece("constant"),),
            objective=Piece("policy_gradient", {"surrogate": "log_likelihood", "aggregation": "step_mean"}),
            learn=Learn(1e-6, micro_batch_steps=BLOCK),
            output_dir=str(folder / "run"),
            overwrite_output_dir=True,
        ),
        quiet=True,
    )


def make_trainer(folder: Path, model: Path, rows: list[dict[str, Any]], packing: bool, steps: int) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_steps=steps, gradient_checkpointing=False,
        learning_rate=1e-6, packing=packing, max_length=BLOCK, gradient_accumulation_steps=PASSES,
        per_device_train_batch_size=1 if packing else ROWS // PASSES,
    )  # fmt: skip
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True),
        args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip


def compare_steps(folder: Path, model: Path, rows: tuple[Path, list], packing: bool, repeats: int) -> dict:
    """Let both trainers take steps in turn; return medians of tokens per second of processor time."""
    from transformers import TrainerCallback

    run = make_run(folder, model, rows[0], packing)
    trainer = make_trainer(folder, model, rows[1], packing, repeats + 1)
    rates: dict[str, list[float]] = defaultdict(list)
    tokens = [0]
    loss = trainer.compute_loss

    def counted(model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        tokens[0] += int(inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).sum())
        return loss(model, inputs, *args, **options)

    trainer.compute_loss = counted

    def ours(name: str, number: int, *how: Any) -> None:
        made: list[Any] = []

        def once() -> None:
            call = how[0] if how else lambda step: step()
            call(lambda: made.append(step_once(run, number)))

        seconds = seconds_of(once)
        steps = [row.steps for row in made[0].rollouts]
        rates[name].append(sum(len(row.prompt.ids) + len(row.ids) for row in steps) / seconds)

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            tokens[0], self.began = 0, clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            rates["trl"].append(tokens[0] / (clock() - self.began))
            ours("mmrl", 2 * state.global_step)
            ours("mmrl_mkl", 2 * state.global_step + 1, by_mkl)

    trainer.add_callback(Turns())
    trainer.train()
    spread = {name: [round(min(rate[1:])), round(max(rate[1:]))] for name, rate in rates.items()}
    speed = {name: round(median(rate[1:])) for name, rate in rates.items()}
    times = {f"{name}_times_trl": round(speed[name] / speed["trl"], 2) for name in ("mmrl", "mmrl_mkl")}
    found = {"tokens_per_second": speed, "spread": spread, **times}
    return found | ({"gradients_differ_by": compare_gradients(run, trainer)} if packing else {})


def compare_gradients(run: Any, trainer: Any) -> float:
    """Learn one packed sequence of TRL in both, and give the gap of all gradients, relative to their norm."""
    from mmrl.vision.decoding.token_steps import TokenRow
    from mmrl.vision.models.processor import EncodedPrompt

    trainer.model.load_state_dict(run.policy.model.state_dict())
    trainer.model.zero_grad(set_to_none=True)
    run.policy.model.zero_grad(set_to_none=True)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    begins = [*(inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist(), inputs["input_ids"].shape[1]]
    trainer.model(**inputs).loss.backward()
    rows = []
    for begin, end in zip(begins, begins[1:], strict=False):
        ids, labels = inputs["input_ids"][0, begin:end], inputs["labels"][0, begin:end]
        first = int((labels != -100).nonzero()[0, 0])
        prompt = EncodedPrompt(str(begin), ids[:first], torch.arange(first)[None], {})
        rows.append(TokenRow(prompt, ids[first:]))
    template = run.method.engine.rollout(run.method.sampler.draw(1, 1))[0]
    made = tuple(replace(template, steps=row, length=len(row.ids), notes={}) for row in rows)
    batch = run.policy.collate(made)
    logp = run.policy(batch).logp
    (-(logp * batch.mask).sum() / batch.mask.sum()).backward()
    theirs = dict(trainer.model.named_parameters())
    pairs = [(p.grad, theirs[name].grad) for name, p in run.policy.model.named_parameters()]
    gap = sum(float((one - other).square().sum()) for one, other in pairs)
    return float(f"{(gap / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        folder = Path(place)
        model, rows = make_model(folder), make_rows(folder, 200)
        found = {}
        for name, packing in (("packed", True), ("padded", False)):
            found[name] = compare_steps(folder, model, rows, packing, repeats)
            print(name, json.dumps(found[name]), flush=True)
    packed, padded = (found[name]["tokens_per_second"]["mmrl"] for name in ("packed", "padded"))
    result: dict[str, Any] = {"repeats": repeats, **found, "machine": describe()}
    result["packing_gain_of_mmrl"] = round(packed / padded, 2)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
