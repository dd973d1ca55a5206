"""Rollouts and rewards on two nodes of a Ray cluster: those of the run's own process, whatever dies."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time

import pytest
import torch

from mmrl.config.loading import merge
from mmrl.training.loop import train
from tests.diffusion.tiny import MAKERS
from tests.support.ray_cluster import NEEDS_RAY, add_node, local_cluster, node_of
from tests.support.resuming import without_times
from tests.support.toys import toy_run

pytestmark = [NEEDS_RAY, pytest.mark.slow, pytest.mark.usefixtures("no_page")]
ENGINE = "tests.support.toys:ToyGenerate"
PIPELINE = "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3"
NOISY = "tests.support.ray_pieces:Noisy"
RUNS = int(os.environ.get("MMRL_KILLED_RUNS", "1"))  # that are killed at other instants each


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(PIPELINE, cpus=2) as cluster:
        add_node(cluster, 2)
        yield cluster


@pytest.fixture(autouse=True)
def let_go():
    """Free the actors of a test, which keep the cores that those of the next one wait for."""
    yield
    gc.collect()


def run_of(folder, address="", **changes):
    """Make a run whose two rollout actors and two reward actors fill the nodes; without an address, alone."""
    workers = {"num": 2, "address": address, "max_restarts": 50}
    elsewhere = {"name": "ray_workers", "num_workers": 2, "address": address, "max_restarts": 50}
    reward = {"name": NOISY, **({"workers": workers} if address else {})}
    engines = [ENGINE, *([elsewhere] if address else [])]
    return toy_run(folder, rewards=[reward], rollout={"engine": engines}, **{"max_steps": 6, **changes})


def processes_of(run):
    """List the processes of all actors of a run that have answered."""
    rollouts = run.method.engine.servers.actors
    return [*rollouts.processes.values(), *run.method.rewards[0].function.actors.processes.values()]


def same(found, wanted):
    """Compare the weights and the journals of two runs, but for times and what only actors have."""
    assert torch.equal(found.policy.table, wanted.policy.table)
    own = [{k: v for k, v in step.items() if not k.startswith("workers/")} for step in found.journal.read()]
    assert str(without_times(own)) == str(without_times(wanted.journal.read()))


def test_a_run_is_that_of_one_process_also_where_a_node_dies(tmp_path, cluster):
    alone = run_of(tmp_path / "alone")
    train(alone)
    shared = run_of(tmp_path / "shared", cluster.address)
    finish, found = shared.finish, []

    def losing(step, *rest):
        finish(step, *rest)
        found.append({node_of(process) for process in processes_of(shared)})
        if step == 2:
            dying = cluster.list_all_nodes()[-1]
            add_node(cluster, 2)
            cluster.remove_node(dying, allow_graceful=False)

    shared.finish = losing
    train(shared)
    assert [len(each) for each in found] == [2] * 6 and found[2] != found[3]
    same(shared, alone)


def test_images_on_two_nodes_are_those_of_one_process(tmp_path, cluster):
    from tests.diffusion.test_flow_runs import run_of as flow_of

    model = tmp_path / "model"
    MAKERS["sd3"](model)
    sizes = {"rollout": {"num_generations": 2}}
    alone = flow_of(model, tmp_path / "one", "diffusion.transition", **sizes)
    engines = [dict(piece.options, name=piece.name) for piece in alone.config.rollout.engine]
    elsewhere = {"name": "ray_workers", "num_workers": 2, "num_cpus": 2, "address": cluster.address}
    changes = merge(sizes, {"rollout": {"engine": [*engines, elsewhere]}})
    shared = flow_of(model, tmp_path / "two", "diffusion.transition", **changes)
    asked = [prompt for prompt in shared.pieces.made["data"][:2] for _ in range(2)]
    found, wanted = (run.method.engine.rollout(asked) for run in (shared, alone))
    assert len({node_of(pid) for pid in shared.method.engine.servers.actors.processes.values()}) == 2
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.outcomes[0].image, other.outcomes[0].image)
    train(alone)
    train(shared)
    for one, other in zip(alone.policy.module.parameters(), shared.policy.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_runs_whose_actors_are_killed_at_random_instants_are_those_of_one_process(tmp_path, cluster):
    alone = run_of(tmp_path / "alone")
    train(alone)
    for number in range(RUNS):
        run = run_of(tmp_path / f"killed-{number}", cluster.address)
        killed, restarted = killing(run, random.Random(number))
        assert killed and restarted, number
        same(run, alone)
        print(f"run {number}: {len(killed)} killed, {restarted} restarts seen")
        del run
        gc.collect()  # else its actors keep the cores that those of the next run wait for


def killing(run, draw):
    """Train while actors are killed; return their processes, and how often actors were started again."""
    over, killed = threading.Event(), []

    def kill():
        while not over.wait(draw.uniform(0.02, 0.5)):
            alive = [process for process in processes_of(run) if process not in killed]
            if alive and len(killed) < 3:
                killed.append(draw.choice(alive))
                os.kill(killed[-1], signal.SIGKILL)

    finish, restarted = run.finish, []

    def slower(*given):  # so that kills meet runs of milliseconds
        finish(*given)
        time.sleep(0.3)
        restarted.append(run.method.rewards[0].function.actors.restarts)

    run.finish = slower
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        train(run)
    finally:
        over.set()
        thread.join()
    told = [step["workers/restarts"] for step in run.journal.read()]
    return killed, sum(told) + max(restarted)
