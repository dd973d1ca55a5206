"""Rollouts in Ray actors: those of the run's own process, whatever dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from mmrl.build import build, make_chain
from mmrl.config.loading import merge
from mmrl.config.schema import Config, ConfigError, as_piece, parse
from mmrl.core.byte_lru import ByteLRU
from mmrl.core.types import Prompt
from mmrl.engines.ray_workers import divided
from mmrl.runtime import ray_actors
from mmrl.runtime.ray_actors import join
from mmrl.runtime.workers import Workers, object_in
from mmrl.training.loop import train
from tests.runtime.test_real_processes import SPEAKING, TALKING
from tests.support.ray_cluster import NEEDS_RAY, killed_in_flight, local_cluster
from tests.support.resuming import assert_alike
from tests.support.toys import toy_run
from tests.vision import tiny

pytestmark = [NEEDS_RAY, pytest.mark.slow, pytest.mark.usefixtures("no_page")]
TOYS, PIECES = "tests.support.toys", "tests.support.ray_pieces"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_cluster("transformers.models.qwen2_5_vl.processing_qwen2_5_vl"):
        yield


# ---- parts


def test_groups_stay_whole_and_workers_get_as_much():
    shares = divided([Prompt(uid, ()) for uid in "abcabca"], 2)
    assert [[prompt.uid for prompt in share] for share in shares] == [["a", "a", "a"], ["b", "b", "c", "c"]]
    assert divided([Prompt("a", ())] * 2, 3) == [[Prompt("a", ())] * 2, [], []]


def test_objects_of_a_program_are_found_anywhere():
    assert object_in({"a": [{"tool": ("x", "python:look")}]}) == "python:look"
    assert object_in({"a": ["vision.crop", 3, None]}) == ""


def test_a_cache_travels_empty():
    import pickle

    cache = ByteLRU(10, len)
    cache.get("a", lambda: b"12345")
    again = pickle.loads(pickle.dumps(cache))  # as Ray sends a prompt whose media hold one
    assert not again.items and again.used == 0 and again.limit == 10
    assert again.get("a", lambda: b"x") == b"x"


# ---- runs on a look-up table


def with_workers(*engines, **options):
    return {"rollout": {"engine": [*engines, {"name": "ray_workers", "num_workers": 2, **options}]}}


def test_a_run_whose_workers_are_killed_and_that_is_resumed_is_that_of_one_process(tmp_path):
    warmer = {"name": f"{PIECES}:Cold", "power": {"name": "linear", "start": 0.5, "end": 3.0, "steps": 4}}
    engines = [f"{TOYS}:ToyGenerate", warmer]
    alone = toy_run(tmp_path / "alone", max_steps=4, rollout={"engine": engines})
    train(alone)
    first = toy_run(tmp_path / "shared", max_steps=2, save_steps=2, **with_workers(*engines))
    engine, killed = first.method.engine, []
    rollout = engine.rollout

    def kill_first(prompts):
        if engine.servers.actors.processes:
            killed.append(engine.servers.actors.processes[0])
            os.kill(killed[-1], signal.SIGKILL)
        return rollout(prompts)

    engine.rollout = kill_first
    train(first)
    again = toy_run(tmp_path / "shared", max_steps=4, save_steps=2, **with_workers(*engines))
    train(again)
    assert torch.equal(alone.policy.table, again.policy.table)
    steps, wanted = again.journal.read(), alone.journal.read()
    assert len(killed) == 1 and [record["workers/restarts"] for record in steps] == [0, 1, 0, 0]
    assert len({record["cold/power"] for record in steps}) == 4  # which follows a schedule
    for name in ("cold/power", "reward", "loss"):
        assert [record[name] for record in steps] == [record[name] for record in wanted]


def test_rollouts_a_step_ahead_are_those_of_older_weights_also_where_the_learner_was_killed(tmp_path):
    changes = {"objective": {"step_weight": ["truncated_importance"]}, "max_steps": 4, "save_steps": 1}
    lagging = toy_run(
        tmp_path / "lagging", **changes, rollout={"engine": ["tests.training.test_ahead:Lagging"]}
    )
    train(lagging)
    changes = merge({**changes, "rollout": {"max_staleness": 1}}, with_workers(f"{TOYS}:ToyGenerate"))
    whole = toy_run(tmp_path / "whole", **changes)
    train(whole)
    assert torch.equal(whole.policy.table, lagging.policy.table)
    killed_in_flight(tmp_path / "killed", 2, changes)  # with the rollouts of step 3
    again = toy_run(tmp_path / "killed", **changes)
    train(again)
    assert_alike(again, whole)


def test_workers_sample_from_a_reference_that_acts_also_after_an_evaluation(tmp_path):
    """An evaluation brings the workers the live weights; a reference is swapped in without any trace."""
    changes = {
        "references": {"slow": {"name": "ema", "decay": 0.5}},
        "rollout": {"policy": "slow"},
        "evaluation": {"data": {"name": f"{TOYS}:prompts", "num": 2}},
        "eval_steps": 1,
        "max_steps": 4,
    }
    alone = toy_run(tmp_path / "alone", **changes)
    train(alone)
    elsewhere = with_workers(f"{TOYS}:ToyGenerate")
    asking = {"evaluation": {"engine": elsewhere["rollout"]["engine"]}}
    shared = toy_run(tmp_path / "shared", **merge(merge(changes, elsewhere), asking))
    train(shared)
    assert shared.evaluator.engine.servers is shared.method.engine.servers
    assert torch.equal(shared.policy.table, alone.policy.table)
    found, wanted = ([record["reward"] for record in run.journal.read()] for run in (shared, alone))
    assert found == wanted


def test_the_time_that_workers_have_nothing_to_do_is_measured(tmp_path):
    run = toy_run(tmp_path, max_steps=3, **with_workers(f"{TOYS}:ToyGenerate"))
    finish = run.finish

    def slower(*given):
        time.sleep(0.5)
        finish(*given)

    run.finish = slower
    train(run)
    for record in run.journal.read():
        assert record["workers/idle_seconds"] > 0.4
        assert 0 < record["workers/busy_seconds"] < record["step_time"]


# ---- clusters


def test_a_process_joins_one_cluster(monkeypatch):
    import ray

    context = ray.get_runtime_context()
    for address in ("", "auto", context.gcs_address):  # that of the program
        join(Workers(address=address), "workers")
    with pytest.raises(
        ConfigError, match=r"workers have the `address: '10.0.0.9:6379'`.*give all pieces the"
    ):
        join(Workers(address="10.0.0.9:6379"), "workers")
    monkeypatch.setitem(ray_actors._joined, context.get_session_name(), "10.0.0.9:6379")  # as if a run had
    join(Workers(address="10.0.0.9:6379"), "workers")
    with pytest.raises(ConfigError, match=r"in the cluster at '10.0.0.9:6379' already"):
        join(Workers(), "workers")


# ---- faults


@pytest.mark.parametrize(
    "how, options, wanted",
    [
        ("raise", {"num_workers": 1}, "the answers are not there"),
        ("die", {"max_restarts": 1, "num_workers": 1}, r"died more often than `max_restarts: 1` allows"),
        (
            "hang",
            {"timeout": 3.0, "num_workers": 1},
            r"did not answer within 3 seconds; each asks for 1 CPU",
        ),
    ],
)
def test_a_fault_of_a_worker_ends_the_run_and_is_named(tmp_path, how, options, wanted):
    engines = [f"{TOYS}:ToyGenerate", {"name": f"{PIECES}:Broken", "how": how}]
    run = toy_run(tmp_path, **with_workers(*engines, **options))
    with pytest.raises(Exception, match=wanted):
        train(run)


def test_an_evaluation_asks_the_workers_of_the_training(tmp_path):
    colder = {"name": f"{PIECES}:Cold", "power": 2.0}
    workers = {"name": "ray_workers", "num_workers": 2}
    evaluation = {"data": f"{TOYS}:prompts", "engine": [f"{TOYS}:ToyGenerate", colder, workers]}
    run = toy_run(tmp_path / "a", **with_workers(f"{TOYS}:ToyGenerate"), evaluation=evaluation)
    assert run.evaluator.engine.servers is run.method.engine.servers
    evaluation = {**evaluation, "engine": [f"{TOYS}:ToyGenerate", {**workers, "num_workers": 1}]}
    other = toy_run(tmp_path / "b", **with_workers(f"{TOYS}:ToyGenerate"), evaluation=evaluation)
    assert other.evaluator.engine.servers is not other.method.engine.servers
    assert other.method.engine.servers is not run.method.engine.servers  # whose weights are others


def test_what_cannot_be_made_again_elsewhere_is_refused(tmp_path):
    recalling = {"policy": f"{TOYS}:ToyRecalling"}
    with pytest.raises(ConfigError, match=r"'with_replay' remembers earlier rollouts.*list it after"):
        toy_run(tmp_path, **merge(recalling, with_workers(f"{TOYS}:ToyNoting", "with_replay")))
    with pytest.raises(ConfigError, match="wraps another engine; name that one before it"):
        toy_run(tmp_path, rollout={"engine": ["ray_workers"]})


# ---- real models


def same_rows(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.prompt.uid == other.prompt.uid and one.prompt is other.prompt
        assert [outcome.text for outcome in one.outcomes] == [outcome.text for outcome in other.outcomes]
        assert one.notes.keys() == other.notes.keys()
        for name, note in other.notes.items():
            torch.testing.assert_close(one.notes[name], note, rtol=0, atol=0)


LOSSY = {"cache": {"name": "compression.visual_quant", "nbits": 1}}
ENGINES = {
    "exact": ({}, ()),
    "pruned": ({"transform": [{"name": "compression.fastv", "keep": 0.5}]}, ()),
    "low-bit cache": (LOSSY, ()),
    "low-bit weights": ({"transform": ["compression.bnb_quantize"]}, ()),
    "with a gate": (LOSSY, ({"name": "compression.fidelity_gate", "allow": True, "num_tokens": 2},)),
    "with a probe": (LOSSY, ({"name": "compression.speedup_probe", "at": 0},)),
}


ELSEWHERE = {"name": "ray_workers", "num_workers": 2}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Make a model, and name it."""
    model = str(tiny.make("qwen2_5_vl", tmp_path_factory.mktemp("model")))
    return {"name": "vision.tokens", "model": model, "dtype": "float32"}


@pytest.fixture(scope="module")
def alike(policy, tmp_path_factory):
    """Build two runs of one model, which is other than what is on disk; the second has workers."""
    folder = tmp_path_factory.mktemp("alike")
    runs = []
    for name, more in (("one", []), ("two", [ELSEWHERE])):
        engines = {"rollout": {"engine": [*SPEAKING["rollout"]["engine"], *more]}}
        plan = merge(SPEAKING, {"policy": policy, "output_dir": str(folder / name), **engines})
        runs.append(build(parse(plan, Config), quiet=True))
        with torch.no_grad():
            runs[-1].policy.model.get_output_embeddings().weight.mul_(1.5)
    return runs


def engine_of(run, name, *more):
    """Make an engine on the policy of a run, whose workers are asked with it."""
    options, wrappers = ENGINES[name]
    # As many rows at a time as a worker gets of a group.
    generate = {"name": "vision.generate", "max_completion_length": 6, "batch_size": 2, **options}
    listed = [as_piece(piece, name) for piece in (generate, *wrappers, *more)]
    return make_chain(run.pieces, "engine", listed, run.policy, name)


@pytest.mark.parametrize("name", ENGINES)
def test_answers_of_a_model_are_those_of_one_process(name, alike):
    run, shared = alike
    asked = [prompt for prompt in shared.pieces.made["data"][:3] for _ in range(2)]
    engine = engine_of(shared, name, ELSEWHERE)
    assert engine.servers is shared.method.engine.servers
    rows = engine.rollout(asked)
    same_rows(rows, engine_of(run, name).rollout(asked))
    assert rows[0].steps.prompt is rows[1].steps.prompt  # what a group shares is computed once in learning
    assert rows[0].steps.prompt is shared.policy.prompt_encoder.encode(asked[0])


def test_conversations_with_tools_travel_with_their_images(policy, tmp_path):
    plan = {**SPEAKING, **TALKING, "policy": policy, "output_dir": str(tmp_path / "one"), "max_steps": 2}
    alone = build(parse(plan, Config), quiet=True)
    train(alone)
    more = [*TALKING["rollout"]["engine"], {"name": "ray_workers", "num_workers": 2}]
    plan = {**plan, "rollout": {**plan["rollout"], "engine": more}, "output_dir": str(tmp_path / "two")}
    shared = build(parse(plan, Config), quiet=True)
    train(shared)
    for one, other in zip(alone.policy.module.parameters(), shared.policy.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    told = [[record["tools/calls"] for record in run.journal.read()] for run in (alone, shared)]
    assert told[0] == pytest.approx(told[1]) and min(told[0]) > 0
