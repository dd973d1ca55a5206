"""Real vLLM servers sample from the policy: `MMRL_VLLM` names an environment that `make vllm` made."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks import served_families
from benchmarks.served_families import gaps, shift
from benchmarks.vllm_servers import SMALL, demo_files, kill
from benchmarks.vllm_servers import serving as servers
from mmrl.build import build
from mmrl.config.binding import Recipe
from mmrl.config.loading import merge
from mmrl.config.schema import Config, Piece, load, parse
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.core.types import Clock
from mmrl.papers.spo_tree import WithBranches
from mmrl.runtime.json_client import JsonClient
from mmrl.training.loop import train
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.vllm import Vllm
from mmrl.vision.engines.with_prefix_rollouts import WithPrefixRollouts
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.agreement import LIMITS, gap, without_adapter
from tests.runtime.test_real_processes import SPEAKING
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


def serving(model: Path, options: dict, number: int, log: Path, more: str = ""):
    """Start servers of a policy in float32, or in the `dtype` of its options, with `more` flags."""
    policy = Piece("vision.tokens", {"model": str(model), "dtype": "float32", **options})
    return servers(HOME, policy, number, log, flags=SMALL + more)


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


def look(image: Image.Image) -> Any:
    """Show the left half of an image.

    Args:
        image: The image.
    """
    return ["half", image.crop((0, 0, image.width // 2, image.height))]


def talks(inner, most: int):
    """Hold conversations of three turns; in the first two, the policy calls `look`, whatever it writes."""
    tools = WithTools(inner, stream=Stream(3), tool=(look,), max_turns=3, only_n_most_recent_images=most)
    tools.read_calls = lambda text: [Call("look", {"image": 0})]
    asked = [ask("a", picture(seed=4), "What?"), ask("b", picture(seed=5, height=84), "and", "How many?")]
    return tools.rollout([prompt for prompt in asked for _ in range(2)])


def cached_tokens(url: str) -> float:
    """Read how many tokens the prefix cache of a server has given."""
    lines = JsonClient(f"{url}/metrics", request_timeout=60, request_retries=0, wait=0).get().decode()
    found = [line for line in lines.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return float(found[0].split()[-1])


@pytest.mark.parametrize("most", [0, 1])
def test_conversations_are_those_of_generate_at_temperature_0(model, two_with_adapter, tmp_path, most):
    urls, _ = two_with_adapter
    served = engine_of(model, tmp_path, urls[:1], LORA, temperature=0.0)
    shift(served.policy, 7, 0.05)
    before = cached_tokens(urls[0])
    rows = talks(served, most)
    local = Generate(served.policy, stream=Stream(3), max_completion_length=16, temperature=0.0)
    for row, other in zip(rows, talks(local, most), strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids) and row.logged == other.logged
        torch.testing.assert_close(row.notes["logp"], other.notes["logp"], rtol=0, atol=1e-4)
    assert gap(served.policy, rows) < 1e-5
    hits = cached_tokens(urls[0]) - before
    print(f"{hits:.0f} tokens of {sum(len(row.steps.prompt.ids) for row in rows)} from the prefix cache")
    assert hits > 0


def test_what_continues_answers_on_a_server_is_that_of_generate(model, tmp_path):
    with serving(model, LORA, 1, tmp_path) as (urls, _):
        served = engine_of(model, tmp_path, urls, LORA, temperature=0.0, max_completion_length=12)
        shift(served.policy, 7, 0.05)
        local = Generate(served.policy, stream=Stream(3), max_completion_length=12, temperature=0.0)
        asked = [PROMPTS["image"], PROMPTS["text"]] * 4
        trees = [
            WithBranches(engine, stream=Stream(3), branching=(2, 2), segment_length=4).rollout(asked)
            for engine in (served, local)
        ]
        for row, other in zip(*trees, strict=True):
            assert torch.equal(row.steps.ids, other.steps.ids) and row.outcomes == other.outcomes
            torch.testing.assert_close(row.notes["logp"], other.notes["logp"], rtol=0, atol=1e-4)
        check_scores(served, local)
        letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
        words = served.first_words(asked[:2], [letters[:3], letters[3:]])
        apart = torch.tensor(words) - torch.tensor(local.first_words(asked[:2], [letters[:3], letters[3:]]))
        print(f"first words differ by {float(apart.abs().max()):.1e}")
        assert apart.abs().max() < 1e-4
        check_media(served, local, urls[0])


def check_scores(served, local) -> None:
    """Compare the likelihoods of right answers after prefixes, at another temperature."""
    scored = [replace(PROMPTS["image"], target="ab 12")]
    options = {"cut": "token", "interval": 4, "num_probes": 1, "score_target": True}
    options |= {"stream": Stream(3), "probe_temperature": 1.5}
    (row,), (other,) = (
        WithPrefixRollouts(engine, **options).rollout(scored)
        for engine in (served, replace(local, temperature=0.0))
    )
    names = ("answer_likelihood", "answer_probability")
    found, wanted = ([o.recorded[n] for o in each.outcomes[:-1] for n in names] for each in (row, other))
    assert len(found) >= 4
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-6)


def check_media(served, local, url) -> None:
    """Hold conversations whose images go by hash, also after the server has dropped them."""
    media, wanted = served.asking.servers[0].media, talks(local, 0)
    assert media.kept, "the server does not say that it keeps media"
    served.pop_metrics()
    talks(served, 0)  # the server gets all images
    first, short = served.pop_metrics()["vllm/request_bytes"], []
    without_kept = media.without_kept

    def noted(request):
        short.append(without_kept(request) is not request)
        return without_kept(request)

    media.without_kept = noted
    assert [row.logged for row in talks(served, 0)] == [row.logged for row in wanted]
    metrics = served.pop_metrics()
    print(f"bytes a request: {first:.0f}, then {metrics['vllm/request_bytes']:.0f}")
    assert all(short) and metrics["vllm/asked_again"] == 0 and metrics["vllm/request_bytes"] < first / 2
    for cache in ("mm", "encoder", "prefix"):
        JsonClient(f"{url}/reset_{cache}_cache", request_timeout=60, request_retries=0, wait=0).post({})
    assert [row.logged for row in talks(served, 0)] == [row.logged for row in wanted]
    assert served.pop_metrics()["vllm/asked_again"] == 0 and not all(short)


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


# Others are measured by `python -m benchmarks.served_families`.
OTHERS = ("qwen3_vl", "qwen3_5", "internvl", "glm46v")


@pytest.mark.parametrize("family", OTHERS)
def test_answers_of_other_families_are_the_policys(family, tmp_path):
    model = served_families.build(family, tmp_path / "model")
    given = {"freeze_vision_tower": False, "dtype": served_families.HALF.get(family, "float32")}
    limit = LIMITS[True] if family in served_families.HALF else 1e-4  # weights are eight times as large
    with serving(model, given, 1, tmp_path, served_families.FLAGS.get(family, "")) as (urls, _):
        engine = served_families.engine_of(model, tmp_path, urls, given)
        for change in range(2):
            found = gaps(engine, served_families.prompts_of(family))
            print(f"{family} {change}:", {kind: f"{value:.1e}" for kind, value in found.items()})
            assert max(found.values()) < limit
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
