"""Real vLLM servers sample from the policy: `MMRL_VLLM` names an environment that `make vllm` made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.vllm_servers import kill
from benchmarks.vllm_servers import serving as servers
from examples.video_grounding import demo
from examples.video_grounding.spliced_videos import SHOTS, write_video
from mmrl.build import build
from mmrl.config.binding import Recipe
from mmrl.config.loading import merge
from mmrl.config.schema import Config, Piece, load, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.training.loop import train
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.vllm import Vllm
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.agreement import LIMITS, gap, without_adapter
from tests.runtime.test_real_processes import SPEAKING
from tests.vision import tiny
from tests.vision.tiny import ask, clip, picture

HOME = os.environ.get("MMRL_VLLM", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not HOME, reason="MMRL_VLLM names no environment with vLLM"),
]
LORA = {"lora_rank": 8, "freeze_vision_tower": False}
PROMPTS = {
    "text": ask("text", "Say a number between 1 and 9."),
    "image": ask("image", picture(seed=1, height=84, width=112), "What is this?"),
    "two images": ask("images", picture(seed=1), "and", picture(seed=2, height=84), "differ?"),
    "video": ask("video", clip(6), "When?"),
}


def serving(model: Path, options: dict, number: int, log: Path):
    """Start servers of a policy in float32, or in the `dtype` of its options."""
    return servers(
        HOME, Piece("vision.tokens", {"model": str(model), "dtype": "float32", **options}), number, log
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    # Heads of 32, which vLLM needs on a CPU, and images of several windows.
    builder = TinyQwen2_5Vl(stream=Stream(3), init=0.08, vision_width=128, max_pixels=140 * 140)
    builder.build(folder)
    return folder


@pytest.fixture(scope="module")
def two_with_adapter(model, tmp_path_factory):
    with serving(model, LORA, 2, tmp_path_factory.mktemp("logs")) as running:
        yield running


def engine_of(model, folder, urls, given, **options):
    policy = Tokens(model=str(model), **{"dtype": "float32", **given})
    recipe = Recipe(Piece("vision.tokens", {"model": str(model), **given}), (), 3, 0, (), Clock)
    options = {"max_completion_length": 16, "weights_folder": str(folder), **options}
    return Vllm(policy, stream=Stream(3), recipe=recipe, servers=tuple(urls), **options)


def shift(policy, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.module.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * size)


def gaps(engine, prompts) -> dict[str, float]:
    """Measure mean |dlogp| of three answers to each prompt."""
    rows = engine.rollout([prompt for prompt in prompts.values() for _ in range(3)])
    return {
        kind: gap(engine.policy, tuple(row for row in rows if row.prompt is prompt))
        for kind, prompt in prompts.items()
    }


def test_answers_with_an_adapter_of_the_tower_are_the_policys_before_and_after_a_swap(
    model, two_with_adapter, tmp_path
):
    urls, _ = two_with_adapter
    engine = engine_of(model, tmp_path, urls, LORA)
    stills = {kind: prompt for kind, prompt in PROMPTS.items() if kind != "video"}
    for swap in range(3):
        for prompts in (stills, {"video": PROMPTS["video"]}):
            found = gaps(engine, prompts)
            print(f"adapter {swap}:", {kind: f"{value:.1e}" for kind, value in found.items()})
            assert max(found.values()) < 1e-5
        shift(engine.policy, swap, 0.05)
    rows = engine.rollout([PROMPTS["image"]] * 3)
    with without_adapter(engine.policy.adapter, lambda name: "visual" in name):
        assert gap(engine.policy, rows) > 1e-3  # it is the adapter of the tower that makes them equal


def test_draws_are_those_of_the_options(model, two_with_adapter, tmp_path):
    urls, _ = two_with_adapter
    asked = [PROMPTS["image"]] * 3
    greedy = engine_of(model, tmp_path, urls, LORA, temperature=0.0)
    rows = greedy.rollout(asked)
    assert gap(greedy.policy, rows) < 1e-5
    assert len({tuple(row.notes["token"].tolist()) for row in rows}) == 1
    warm = engine_of(model, tmp_path, urls, LORA, temperature=1.7)
    assert gap(warm.policy, warm.rollout(asked)) < 1e-5
    rows = engine_of(model, tmp_path, urls, LORA, top_k=1).rollout(asked)
    assert all((row.notes["logp"].abs() < 1e-5).all() for row in rows)  # of the one token that is left


def plan(model, urls, folder, **changes):
    policy = {"name": "vision.tokens", "model": str(model), "dtype": "float32", **LORA}
    engine = {"name": "vision.vllm", "servers": list(urls), "max_completion_length": 8}
    engine["weights_folder"] = str(folder / "weights")
    return merge(
        SPEAKING,
        {
            "policy": policy,
            "rollout": {"engine": [engine], "policy": ""},
            "references": {},
            "objective": {"penalty": []},
            "learn": {"learning_rate": 1.0},
            "output_dir": str(folder),
            **changes,
        },
    )


def tokens_of(run) -> list[list[int]]:
    """Record the tokens of every rollout of a run, in place."""
    rollout, seen = run.method.engine.rollout, []

    def recorded(prompts):
        rows = rollout(prompts)
        seen.extend(row.notes["token"].tolist() for row in rows)
        return rows

    run.method.engine.rollout = recorded
    return seen


def test_a_run_whose_server_is_killed_goes_on_with_the_same_tokens(model, two_with_adapter, tmp_path):
    urls, processes = two_with_adapter
    make = lambda folder: parse(plan(model, urls, folder), Config)
    check_killed(make, processes[1], tmp_path, rows=3 * 6)


def check_killed(make, process, folder, rows: int) -> None:
    """Compare the tokens of three steps with those of a run of which a server is killed in the second."""
    seen = []
    for name in ("whole", "killed"):
        run = build(make(folder / name), quiet=True)
        seen.append(tokens_of(run))
        if name == "killed":
            kill_in_the_middle(run, process)
        train(run)
    assert seen[0] == seen[1] and len(seen[0]) == rows
    steps = run.journal.read()
    assert [record["vllm/servers"] for record in steps] == [2, 1, 1]
    assert steps[1]["vllm/asked_again"] >= 1
    print("asked again:", [record["vllm/asked_again"] for record in steps])


def test_grpo_of_the_demo_goes_on_where_one_of_its_two_servers_is_killed(tmp_path):
    folder = demo_files(tmp_path)
    policy = {"model": str(folder / "model"), "dtype": "float32", "freeze_vision_tower": False}
    with servers(HOME, Piece("vision.tokens", policy), 2, tmp_path) as (urls, processes):

        def make(output: Path) -> Config:
            engine = f"name: vision.vllm, servers: [{', '.join(urls)}], max_completion_length: 24"
            changes = (
                f"policy.model={folder / 'model'}",
                *(f"{part}.root={folder / 'videos'}" for part in ("data", "evaluation.data")),
                f"data.path={folder / 'videos' / 'train.jsonl'}",
                f"evaluation.data.path={folder / 'videos' / 'test.jsonl'}",
                f"rollout.engine=[{{{engine}, weights_folder: {output / 'weights'}}}]",
                "rollout.num_prompts=2",
                "rewards=[tests.support.real_worker:longer]",  # which answers of random weights differ in
                "evaluation.rewards=[tests.support.real_worker:longer]",
                "evaluation.metrics=[{name: mean, of: longer}]",
                "report.visualizations=[]",
                "max_steps=3",
                f"output_dir={output}",
            )
            return load("examples/video_grounding/grpo.yaml", changes, Config)

        check_killed(make, processes[1], tmp_path, rows=3 * 2 * 4)


def demo_files(folder: Path) -> Path:
    """Build the model of `make demo`, with its first weights, and videos of plain shots for it."""
    generator = torch.Generator().manual_seed(0)
    (folder / "sources").mkdir()
    for file in {shot.file for shot in SHOTS}:
        frames = 1 + max(shot.last for shot in SHOTS if shot.file == file)
        shades = torch.randint(0, 255, (frames, 3, 1, 1), generator=generator, dtype=torch.uint8)
        write_video(folder / "sources" / file, shades.expand(-1, -1, 32, 32), 25)
    few = [f"build.sources={folder / 'sources'}", "build.num_train=4", "build.num_test=1", "build.side=56"]
    demo.build("examples/video_grounding/videos.yaml", folder / "videos", 3, few)
    demo.build("examples/video_grounding/model.yaml", folder / "model", 3)
    return folder


def kill_in_the_middle(run, process) -> None:
    """Kill a server when it is asked in the second step."""
    server = run.method.engine.asking.servers[1]
    generate = server.generate

    def dying(request):
        if run.stream.step == 1 and process.poll() is None:
            kill(process)
        return generate(request)

    server.generate = dying


def test_answers_of_a_model_that_was_loaded_anew_are_the_policys(model, tmp_path):
    with serving(model, {}, 1, tmp_path) as (urls, _):
        engine = engine_of(model, tmp_path, urls, {"freeze_vision_tower": False})
        for change in range(3):
            found = gaps(engine, PROMPTS)
            print(f"weights {change}:", {kind: f"{value:.1e}" for kind, value in found.items()})
            assert max(found.values()) < 1e-5
            shift(engine.policy, change, 0.02)


def widened(family, folder, monkeypatch):
    """Make the tiny checkpoint of a family with heads of 32, which vLLM needs on a CPU."""
    for sizes in (tiny.TEXT, tiny.QWEN_VISION, tiny.TOWER):
        monkeypatch.setitem(sizes, "hidden_size", 128)
    monkeypatch.setitem(tiny.QWEN_VISION, "out_hidden_size", 128)
    monkeypatch.setitem(tiny.MROPE, "mrope_section", [8, 4, 4])
    tiny.make(family, folder)
    if family == "llava":  # vLLM 0.32 reads the names that checkpoints of the Hub have, which saving keeps
        file = folder / "model.safetensors"
        names = {
            name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in load_file(file)
        }
        save_file({names[name]: weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
def test_answers_of_other_families_are_the_policys(family, tmp_path, monkeypatch):
    model = widened(family, tmp_path / "model", monkeypatch)
    prompts = {kind: prompt for kind, prompt in PROMPTS.items() if kind != "video" or family == "qwen2_vl"}
    with serving(model, {}, 1, tmp_path) as (urls, _):
        engine = engine_of(model, tmp_path, urls, {"freeze_vision_tower": False})
        for change in range(2):
            found = gaps(engine, prompts)
            print(f"{family} {change}:", {kind: f"{value:.1e}" for kind, value in found.items()})
            assert max(found.values()) < 1e-4  # these weights are eight times as large
            shift(engine.policy, change, 0.02)


def test_answers_in_bfloat16_are_the_policys_but_for_rounding(model, tmp_path):
    half = {"dtype": "bfloat16", "freeze_vision_tower": False}
    with serving(model, half, 1, tmp_path) as (urls, _):
        engine = engine_of(model, tmp_path, urls, half)
        for change in range(2):
            found = gaps(engine, PROMPTS)
            print(f"bfloat16 {change}:", {kind: f"{value:.1e}" for kind, value in found.items()})
            assert max(found.values()) < LIMITS[True]
            shift(engine.policy, change, 0.02)
