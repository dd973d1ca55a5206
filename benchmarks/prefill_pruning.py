"""Seconds of a prefill with pruned visual computation, on a LLaVA of transformers, beside what operations
promise.

python -m benchmarks.prefill_pruning --visual 576 1152 2304 --repeats 5 --output benchmarks/results

One thread. Models take turns, medians are compared, all in one run. The decoder is 768 wide with 8 layers, 12
heads and 2048 ffn_units, weights are random; the text has 64 tokens, of which 20 stand before the images.
Images are encoded ahead (as `generate` does), so what is timed is the language model, its cache and its
head.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.machine import describe
from benchmarks.prefill_costs import Prefill, count_operations, time_calls
from mmrl.compression.fidelity import cache_bytes
from mmrl.compression.pruning.spec import pruning_of, shape_of
from mmrl.compression.transforms.drop_tokens import fastv
from mmrl.compression.transforms.visual_computation import yopo12, yopo25

TEXT, BEFORE, SIDE, IMAGE = 64, 20, 24, 999
WANTED = {"yopo25": {576: 2.7, 1152: 3.3, 2304: 4.0}, "yopo12": {576: 3.8, 1152: 5.2, 2304: 6.9}}


def make_model() -> transformers.LlavaForConditionalGeneration:
    """Make the decoder of the benchmark, over a tower that is as small as it may be."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=336,
            patch_size=14, projection_dim=32,
        ),
        text_config=transformers.LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
            num_key_value_heads=12, vocab_size=1000,
        ),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def make_inputs(model: torch.nn.Module, images: int) -> dict:
    """Make a prompt of so many images, encoded ahead."""
    visual = images * SIDE * SIDE
    ids = torch.randint(0, IMAGE, (1, TEXT + visual))
    ids[:, BEFORE : BEFORE + visual] = IMAGE
    features = model.get_image_features(torch.randn(images, 3, 336, 336), return_dict=True)
    return {
        "input_ids": ids,
        "mm_encoder_outputs": {"image": features},
        "logits_to_keep": 1,
        "use_cache": True,
    }


def window_mask(ids: torch.Tensor, radius: int = 2) -> torch.Tensor:
    """Make the mask of a window: what published code does, which computes everything and hides some of it."""
    visual = (ids[0] == IMAGE).nonzero()[:, 0]
    cell = torch.arange(len(visual))
    place = torch.stack([cell // (SIDE * SIDE) * 99, cell // SIDE % SIDE, cell % SIDE], 1)
    near = ((place[:, None] - place[None]).abs() <= radius).all(-1)
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mask[visual[:, None], visual] &= near
    return mask[None, None]


@torch.no_grad()
def run(visual: int, repeats: int) -> list[dict]:
    """Measure all models at one number of visual tokens."""
    model = make_model()
    images = visual // (SIDE * SIDE)
    inputs = make_inputs(model, images)
    models = {
        "full": model,
        "fastv": fastv(model, after=2, keep=0.5),
        "yopo25": yopo25(model),
        "yopo12": yopo12(model),
    }
    masked = {**inputs, "attention_mask": window_mask(inputs["input_ids"])}
    calls = {name: partial(one, **inputs) for name, one in models.items()}
    seconds = time_calls(
        {"full": calls["full"], "masking only": partial(model, **masked), **calls}, repeats=repeats
    )
    theory = Prefill(TEXT, BEFORE, ((SIDE, SIDE),) * images, kept=(round(visual / 2),))
    full = seconds["full"].median
    rows = [
        {
            "model": "masking only",
            "visual": visual,
            "speed": full / seconds["masking only"].median,
            "thread_speed": seconds["full"].thread / seconds["masking only"].thread,
        }
    ]
    counted = {name: count_operations(one, inputs)["language"] for name, one in models.items()}
    for name, one in models.items():
        shape, pruning = shape_of(one), pruning_of(one)
        cache = one(**inputs).past_key_values
        speed, promised = full / seconds[name].median, counted["full"] / counted[name]
        work = seconds["full"].thread / seconds[name].thread
        rows.append(
            {
                "model": name,
                "visual": visual,
                "seconds": seconds[name].median,
                "spread": seconds[name].spread,
                "thread_seconds": seconds[name].thread,
                "speed": speed,
                "thread_speed": work,
                "operations": counted[name],
                "operations_formula": theory.operations(shape, pruning),
                "speed_by_operations": promised,
                "speed_over_promise": speed / promised,
                "thread_speed_over_promise": work / promised,
                "visual_operations_share": theory.visual_operations(shape, pruning)
                / theory.visual_operations(shape, pruning_of(model)),
                "cache_bytes": cache_bytes(cache),
                "cache_bytes_formula": theory.cache_bytes(shape, pruning, 4),
                "wanted": WANTED.get(name, {}).get(visual),
            }
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Draw measured speed beside what operations promise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for number, name in enumerate(("fastv", "yopo25", "yopo12")):
        mine = [row for row in rows if row["model"] == name]
        axes.plot(
            [r["visual"] for r in mine], [r["speed"] for r in mine], "o-", color=f"C{number}", label=name
        )
        axes.plot(
            [r["visual"] for r in mine], [r["speed_by_operations"] for r in mine], "--", color=f"C{number}"
        )
    axes.set(xlabel="visual tokens", ylabel="prefill, times faster (dashed: by operations)", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure, print, and write JSON lines and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visual", type=int, nargs="+", default=[576, 1152, 2304])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for visual in options.visual:
        if visual % (SIDE * SIDE):
            parser.error(f"visual tokens come in images of {SIDE * SIDE}, so not {visual}")
        for row in run(visual, options.repeats):
            row["machine"] = describe()
            rows.append(row)
            print(
                json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}),
                flush=True,
            )
    options.output.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (options.output / "prefill_pruning.jsonl").write_text(text)
    draw(rows, options.output / "prefill_pruning.png")


if __name__ == "__main__":
    main()
