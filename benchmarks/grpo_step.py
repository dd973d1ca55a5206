"""A GRPO step of a small Qwen2.5-VL over one image, part by part, beside its peers and beside what is
computed.

    python -m benchmarks.grpo_step --peers FOLDER [--repeats 5]

`--peers` is a folder with TRL. Both trainers get the same weights, image, question, reward and loss (GRPO
without a reference), and their gradients for the same answers are compared. One thread, float32; seconds are
processor time of the process, and what is compared takes turns, so that a busy machine is unfair to none.
Everybody answers to full length, because the end token is taken away. "MKL" is mmrl without its way through
oneDNN, which peers do not have. The vision tower is frozen and its operations are counted; a multiplication
with an addition counts as 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import describe, share_of_peak

RESULTS = Path(__file__).parent / "results" / "grpo_step.json"
GROUP = 8
QUESTION = "What is shown here?"
LAYERS, WIDTH, HEADS, TOWER, VOCABULARY = 6, 384, 6, 64, 512


def variety(completions, **columns):
    """Reward different letters; what both trainers are given."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [len(set(text)) / max(1, len(text)) for text in texts]


# ---- what is compared


def make_model(folder: Path) -> Path:
    from mmrl.core.rng import Stream
    from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl

    TinyQwen2_5Vl(
        stream=Stream(0), vocab_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS,
        vision_width=TOWER, max_pixels=1024 * 28 * 28,
    ).build(folder / "model")  # fmt: skip
    return folder / "model"


def make_data(folder: Path, visual: int, rows: int) -> Path:
    from PIL import Image

    side = 28 * round(visual**0.5)
    pixels = torch.randint(0, 255, (side, side, 3), generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{visual}.png")
    line = json.dumps({"question": QUESTION, "answer": "noise", "image": f"{visual}.png"})
    (folder / f"{visual}.jsonl").write_text((line + "\n") * rows)
    return folder / f"{visual}.jsonl"


def make_run(folder: Path, model: Path, data: Path, length: int, dtype: str = "float32", **changes):
    from mmrl.build import build
    from mmrl.config.schema import Config, Learn, Piece, Rollout

    config = Config(
        policy=Piece("vision.tokens", {"model": str(model), "dtype": dtype}),
        data=Piece("vision.visual_qa", {"path": str(data)}),
        rollout=Rollout(
            (Piece("vision.generate", {"max_completion_length": length}),),
            num_prompts=1,
            num_generations=GROUP,
        ),
        rewards=(Piece("benchmarks.grpo_step:variety"),),
        advantage=(Piece("total"), Piece("group_normalize")),
        objective=Piece("policy_gradient", {"surrogate": "clip", "aggregation": "sequence_mean"}),
        learn=Learn(1e-6),
        output_dir=str(folder / "run"),
        overwrite_output_dir=True,
    )  # fmt: skip
    run = build(replace(config, **changes), quiet=True)
    run.policy.prompt_encoder.end = [-1]
    return run


def step_once(run, number: int):
    from mmrl.training.collect import collect
    from mmrl.training.loop import learnable, update

    run.tick(number)
    collection = collect(run)
    _, _, batch = learnable(run, collection)
    update(run.learner, batch)
    return collection


def make_trainer(folder: Path, model: Path, data: Path, length: int, steps: int, dtype: str = "float32"):
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    policy = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, use_safetensors=True)
    policy.requires_grad_(False)
    for part in (policy.get_decoder(), policy.get_output_embeddings()):
        part.requires_grad_(True)  # all but the vision tower
    image = Image.open(data.with_suffix(".png"))
    image.load()
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    rows = [{"prompt": [{"role": "user", "content": content}], "images": [image]}] * steps
    settings = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=not torch.cuda.is_available(),
        bf16=dtype == "bfloat16", report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_steps=steps, per_device_train_batch_size=GROUP,
        num_generations=GROUP, max_completion_length=length, gradient_checkpointing=False, learning_rate=1e-6,
        loss_type="grpo", beta=0.0, generation_kwargs={"min_new_tokens": length}, shuffle_dataset=False,
    )  # fmt: skip
    return GRPOTrainer(
        model=policy, reward_funcs=variety, args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(model),
    )  # fmt: skip


def clock() -> float:
    """Read the processor time of this process, or on a GPU the time when all it was asked for is done."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(call: Callable[[], object]) -> float:
    start = clock()
    call()
    return clock() - start


def by_mkl(call: Callable, *args: object) -> None:
    """Call without the way through oneDNN."""
    from mmrl.core import onednn

    onednn.MANY, kept = sys.maxsize, onednn.MANY  # no weight has so many numbers
    call(*args)
    onednn.MANY = kept


# ---- one GRPO step


def compare_steps(
    folder: Path, model: Path, data: Path, length: int, repeats: int, dtype: str = "float32"
) -> dict:
    """Let both trainers take steps in turn; `_rollout` is the share of answers and rewards."""
    from transformers import TrainerCallback

    run = make_run(folder, model, data, length, dtype)
    trainer = make_trainer(folder, model, data, length, repeats + 1, dtype)
    taken: dict[str, list[float]] = defaultdict(list)
    last: dict[str, float] = {}

    def note(owner: Any, name: str, label: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            start = clock()
            result = call(*args, **options)
            last[label] = clock() - start
            return result

        setattr(owner, name, noted)

    note(trainer, "_generate_and_score_completions", "trl")
    note(run.method.engine, "rollout", "mmrl")

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            self.began = clock()

        def on_step_end(self, args, state, control, **others):
            taken["trl"].append(clock() - self.began)
            at = 2 * state.global_step
            taken["mmrl"].append(seconds_of(lambda: step_once(run, at)))
            for name, seconds in last.items():
                taken[f"{name}_rollout"].append(seconds)
            if not torch.cuda.is_available():
                taken["mmrl_mkl"].append(seconds_of(lambda: by_mkl(step_once, run, at + 1)))

    trainer.add_callback(Turns())
    trainer.train()
    found = {f"{name}_seconds": round(median(times[1:]), 3) for name, times in taken.items()}
    found["spread"] = {name: [round(min(t[1:]), 3), round(max(t[1:]), 3)] for name, t in taken.items()}
    return found | {"gradients_differ_by": compare_gradients(run, trainer, 2 * repeats + 4)}


def compare_gradients(run, trainer, number: int) -> float:
    """Learn from the same answers in both trainers, and give the gap of all gradients, relative to their
    norm. Ours leaves placeholders of media out of every distribution; not here."""
    from mmrl.training.collect import collect
    from mmrl.training.loop import accumulate, learnable

    run.tick(number)
    collection = collect(run)
    _, _, batch = learnable(run, collection)
    (part,) = batch.parts(1)
    part = part.replace(totals=run.processes.rank_mean(part.count()))
    part = part.replace(weight=run.learner.objective.weigh(part))
    run.learner.guard.begin(part)
    run.policy.module.forbidden = []
    accumulate(run.learner, part)
    ours = {name: p.grad for name, p in run.policy.model.named_parameters() if p.grad is not None}
    model = trainer.model
    model.load_state_dict(run.policy.model.state_dict())
    model.zero_grad(set_to_none=True)
    prompt, ids = batch.steps.prompts[0], batch.steps.ids
    inputs = {
        "prompt_ids": prompt.ids.expand(len(ids), -1), "prompt_mask": torch.ones(len(ids), len(prompt.ids)),
        "completion_ids": ids, "completion_mask": torch.ones(ids.shape, dtype=torch.int64),
        "advantages": batch.advantage[:, 0], "num_images": [1] * len(ids), **repeat_media(prompt, len(ids)),
    }  # fmt: skip
    inputs["prompt_mask"] = inputs["prompt_mask"].long()
    both = torch.cat([inputs["prompt_ids"], ids], 1)
    inputs["mm_token_type_ids"] = (both == model.config.image_token_id).long()
    inputs = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with trainer.compute_loss_context_manager():
        loss = trainer._compute_loss(model, inputs)
    loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ours.keys() != theirs.keys():
        raise ValueError(f"not the same parameters learn: {sorted(ours.keys() ^ theirs.keys())}")
    whole = torch.cat([g.flatten() for g in theirs.values()])
    gap = torch.cat([(ours[name] - g).flatten() for name, g in theirs.items()])
    return float(gap.norm() / whole.norm())


def repeat_media(prompt, times: int) -> dict[str, torch.Tensor]:
    wanted = ("pixel_values", "image_grid_thw")
    return {name: prompt.media[name].repeat(times, 1) for name in wanted}


# ---- its parts


def compare_parts(folder: Path, model: Path, data: Path, length: int, repeats: int) -> dict:
    """Time rollouts alone, and forward and backward passes alone."""
    run = make_run(folder, model, data, length)
    policy, engine = run.policy, run.method.engine
    prompts = run.method.sampler.draw(1, GROUP)
    encoded = policy.prompt_encoder.encode(prompts[0])
    policy.share_prefix = True
    batch = policy.collate(engine.rollout(prompts))
    ids = batch.steps.ids
    settings = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "pad_token_id": 0}

    def inputs(times: int, more: torch.Tensor | None = None) -> dict:
        row = encoded.ids.expand(times, -1)
        row = row if more is None else torch.cat([row, more], 1)
        kinds = (row == policy.model.config.image_token_id).long()
        named = {"input_ids": row, "attention_mask": torch.ones_like(row), "mm_token_type_ids": kinds}
        return named | repeat_media(encoded, times)

    def roll(share: bool):
        policy.share_prefix = share
        engine.rollout(prompts)

    def learn_shared(share: bool):
        policy.module.share = share
        policy(batch).logp.mean().backward()

    def learn_repeated():
        logits = policy.model(**inputs(GROUP, ids), use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
        logits.log_softmax(-1).gather(-1, ids[..., None]).mean().backward()

    calls: dict[str, Callable[[], object]] = {
        "rollout: generate on copies": lambda: policy.model.generate(**inputs(GROUP), **settings),
        "rollout: num_return_sequences": lambda: policy.model.generate(
            **inputs(1), **settings, num_return_sequences=GROUP
        ),
        "rollout: mmrl, prefix copied": lambda: roll(False),
        "rollout: mmrl, MKL": lambda: by_mkl(roll, True),
        "rollout: mmrl": lambda: roll(True),
        "learn: repeated prompts": learn_repeated,
        "learn: mmrl, prefix copied": lambda: learn_shared(False),
        "learn: mmrl, MKL": lambda: by_mkl(learn_shared, True),
        "learn: mmrl": lambda: learn_shared(True),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            taken[name].append(seconds_of(call))
            policy.module.zero_grad(set_to_none=True)
    return {name: round(median(times[1:]), 3) for name, times in taken.items()} | {"prompt": len(encoded.ids)}


# ---- what is computed


def limits(prompt: int, visual: int, length: int) -> dict[str, float]:
    """Count operations with prompts repeated and with prompts shared, and give how many times fewer."""
    size, shared_heads = WIDTH // HEADS, HEADS // 2
    layer = 2 * WIDTH * (2 * WIDTH + 2 * shared_heads * size + 9 * WIDTH)
    pair, head = 4 * WIDTH * LAYERS, 2 * WIDTH * VOCABULARY
    patches = 4 * visual
    window = min(patches, 64)  # 112 by 112 pixels
    linear = 2 * (2 * TOWER * (4 * TOWER + 6 * TOWER)) * patches
    tower = (
        linear
        + 4 * TOWER * patches * (patches + window)
        + patches * 2 * (2 * 3 * 14 * 14 * TOWER)
        + visual * 2 * (4 * TOWER) * (4 * TOWER + WIDTH)
    )
    once = prompt * layer * LAYERS + pair * prompt**2 / 2
    answers = GROUP * (length * (layer * LAYERS + head) + pair * (length * prompt + length**2 / 2))
    counted = {
        "language": ((GROUP * once + answers), (once + answers)),
        "whole": (GROUP * (once + tower) + answers, once + tower + answers),
    }
    language, whole = (many / one for many, one in counted.values())
    learn = [3 * (lang) + (full - lang) for lang, full in zip(*counted.values(), strict=True)]
    roll = counted["whole"]
    return {
        "limit_language": round(language, 2),
        "limit_rollout": round(whole, 2),
        "limit_learn": round(learn[0] / learn[1], 2),
        "limit_step": round((roll[0] + learn[0]) / (roll[1] + learn[1]), 2),
        "operations_rollout": roll[1],
        "operations_learn": learn[1],
    }


def measure(folder: Path, model: Path, visual: int, length: int, repeats: int, peers: bool) -> dict:
    data = make_data(folder, visual, 2 * repeats + 8)
    line = {"visual": visual, "length": length}
    line |= compare_parts(folder, model, data, length, repeats)
    rolled, learned = line["rollout: mmrl"], line["learn: mmrl"]
    ratios = {
        "rollout_against_copies": line["rollout: generate on copies"] / rolled,
        "rollout_against_num_return_sequences": line["rollout: num_return_sequences"] / rolled,
        "rollout_against_mkl": line["rollout: mmrl, MKL"] / rolled,
        "rollout_against_prefix_copied": line["rollout: mmrl, prefix copied"] / rolled,
        "learn_against_repeated": line["learn: repeated prompts"] / learned,
        "learn_against_mkl": line["learn: mmrl, MKL"] / learned,
        "learn_against_prefix_copied": line["learn: mmrl, prefix copied"] / learned,
    }
    if peers:
        line |= compare_steps(folder, model, data, length, repeats)
        ratios["step_against_trl"] = line["trl_seconds"] / line["mmrl_seconds"]
        ratios["step_against_trl_by_mkl"] = line["trl_seconds"] / line["mmrl_mkl_seconds"]
    line |= {name: round(value, 2) for name, value in ratios.items()}
    line |= limits(line["prompt"], visual, length)
    for part, seconds in (("rollout", rolled), ("learn", learned)):
        line[f"share_of_peak_{part}"] = round(share_of_peak(line[f"operations_{part}"], seconds), 2)
    return line | {"machine": describe()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", default="")
    parser.add_argument("--visual", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 32, 32, 256])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.peers:
        sys.path.append(options.peers)
    torch.set_num_threads(1)
    sizes = list(zip(options.visual, options.lengths, strict=False))
    if len(options.lengths) > len(options.visual):
        sizes += [(256, length) for length in options.lengths[len(options.visual) :]]
    lines = []
    with TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder)
        for visual, length in sizes:
            lines.append(measure(folder, model, visual, length, options.repeats, bool(options.peers)))
            print(json.dumps(lines[-1]), flush=True)
            options.output.parent.mkdir(exist_ok=True)
            options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
