"""Stochastic steps as a step table, without a network: what they say of given velocities."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.core.types import Unit
from mmrl.diffusion.steps import FlowRow
from tests.diffusion.flows import SOLVERS, make, sd3_times, solver

TIMES = sd3_times(5)
SHAPE = (2, 3, 4)
EVERYTHING = frozenset({"mean", "std", "dt", "velocity", "time"})


@pytest.fixture
def likelihood():
    return make("likelihood", "diffusion.transition")


def row(generator, *, at=(0, 1, 2), name="flow_sde", shape=SHAPE, guidance=1.0, passes=1, num_steps=5):
    path = torch.randn(num_steps + 1, *shape, generator=generator, dtype=torch.float64)
    chosen = None if name is None else solver(name)
    return FlowRow(
        {}, path, torch.tensor(at, dtype=torch.int64), sd3_times(num_steps), guidance, passes, chosen
    )


def collated(likelihood, rows):
    return likelihood.collate(rows, [f"p{i}" for i in range(len(rows))])


def test_states_are_where_the_recorded_steps_start(likelihood, generator):
    rows = [row(generator, at=(0, 2)), row(generator, at=(1, 3))]
    steps = collated(likelihood, rows)
    latents, times = steps.states()
    assert torch.equal(times, TIMES[torch.tensor([[0, 2], [1, 3]])])
    for i, at in enumerate([(0, 2), (1, 3)]):
        assert torch.equal(latents[i], rows[i].path[list(at)])
    assert likelihood.length(rows[0]) == 2
    assert steps.unit == Unit.STEP


@pytest.mark.parametrize("name", SOLVERS)
def test_what_is_said_is_what_the_solver_says_step_by_step(likelihood, generator, name):
    rows = [row(generator, at=at, name=name) for at in ((0, 2, 3), (1, 2, 3))]
    velocity = torch.randn(2, 3, *SHAPE, generator=generator, dtype=torch.float64)
    said = collated(likelihood, rows).read(velocity, EVERYTHING)
    assert said.extra.keys() == EVERYTHING
    for i, made in enumerate(rows):
        for j, at in enumerate(made.at.tolist()):
            here, there = TIMES[at : at + 1], TIMES[at + 1 : at + 2]
            step = made.solver(made.path[at][None], velocity[i, j][None], here, there, TIMES[1])
            assert_close(said.logp[i, j], step.logp(made.path[at + 1][None])[0])
            assert_close(said.extra["mean"][i, j], step.mean[0])
            assert_close(said.extra["std"][i, j], step.std[0])
            assert_close(said.extra["dt"][i, j], (there - here)[0])
            assert_close(said.extra["time"][i, j], here[0])
    assert torch.equal(said.extra["velocity"], velocity)
    assert (said.extra["dt"] < 0).all()


def test_nothing_is_said_that_was_not_asked_for(likelihood, generator):
    steps = collated(likelihood, [row(generator)])
    velocity = torch.randn(1, 3, *SHAPE, generator=generator, dtype=torch.float64)
    assert steps.read(velocity, frozenset()).extra == {}
    assert set(steps.read(velocity, {"std"}).extra) == {"std"}


def test_a_density_by_hand(likelihood):
    # One dimension, time .9 to .6, x = 1, v = 0, noise .7: s_t^2 = .49 * 9 = 4.41. The mean is
    # 1 - 4.41 / 1.8 * .3 = .265 and the variance 4.41 * .3 = 1.323. The next latent .265 + 1.323 is away by
    # the variance: -1.323 / 2 - ln(1.323) / 2 - .918939.
    path = torch.tensor([1.0, 0.265 + 1.323], dtype=torch.float64).view(2, 1)
    times = torch.tensor([0.9, 0.6, 0.0], dtype=torch.float64)
    made = FlowRow({}, torch.cat([path, path[:1]]), torch.tensor([0]), times, solver=solver("flow_sde"))
    said = collated(likelihood, [made]).read(torch.zeros(1, 1, 1, dtype=torch.float64), {"mean", "std"})
    assert_close(said.extra["mean"].view(()), torch.tensor(0.265, dtype=torch.float64))
    assert_close(said.extra["std"].square().view(()), torch.tensor(1.323, dtype=torch.float64))
    assert float(said.logp) == pytest.approx(-0.6615 - 0.1399509 - 0.9189385, abs=1e-6)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_density_and_its_extras_have_the_gradient_of_finite_differences(likelihood, generator, name):
    steps = collated(likelihood, [row(generator, at=(0, 2), name=name, shape=(1, 2, 2)) for _ in range(2)])
    velocity = torch.randn(2, 2, 1, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: steps.read(v, frozenset()).logp, velocity)
    assert torch.autograd.gradcheck(lambda v: steps.read(v, {"mean"}).extra["mean"], velocity)


@pytest.mark.parametrize("columns", [slice(None), slice(0, 1), slice(1, 3)])
@pytest.mark.parametrize("kept", [[0], [2, 0], [0, 1, 2]])
def test_cuts_say_what_the_whole_says(likelihood, generator, kept, columns):
    steps = collated(likelihood, [row(generator, at=at) for at in ((0, 1, 2), (1, 2, 3), (0, 2, 3))])
    velocity = torch.randn(3, 3, *SHAPE, generator=generator, dtype=torch.float64)
    whole = steps.read(velocity, EVERYTHING)
    chosen = torch.tensor(kept)
    part = steps[chosen, columns]
    said = part.read(velocity[chosen][:, columns], EVERYTHING)
    assert torch.equal(said.logp, whole.logp[chosen][:, columns])
    for name in EVERYTHING:
        assert torch.equal(said.extra[name], whole.extra[name][chosen][:, columns])
    assert part.states()[0].shape == (len(kept), len(range(3)[columns]), *SHAPE)


def test_the_cost_is_the_number_of_network_calls(likelihood, generator):
    steps = collated(likelihood, [row(generator, guidance=4.5, passes=2) for _ in range(3)])
    assert steps.cost(torch.arange(3)) == 3 * 3 * 2
    assert steps[torch.tensor([1]), slice(0, 2)].cost(torch.arange(1)) == 2 * 2


def test_rows_without_stochastic_steps_are_refused(likelihood, generator):
    recorded = FlowRow({}, torch.zeros(1, *SHAPE), torch.zeros(0).long(), torch.zeros(0))
    for odd in (recorded, row(generator, name=None), row(generator, at=())):
        with pytest.raises(ValueError, match="a row of prompt 'p1' holds no stochastic steps"):
            collated(likelihood, [row(generator), odd])


@pytest.mark.parametrize("odd", [{"guidance": 4.5}, {"passes": 2}])
def test_rows_of_other_settings_are_refused(likelihood, generator, odd):
    with pytest.raises(ValueError, match="diffusion.transition wants rows of one guidance scale, but"):
        collated(likelihood, [row(generator), row(generator, **odd)])


@pytest.mark.parametrize("odd", [{"at": (0, 1)}, {"num_steps": 7}, {"at": (0, 1), "shape": (2, 3, 3)}])
def test_rows_of_other_schedules_are_refused(likelihood, generator, odd):
    with pytest.raises(ValueError, match="wants rows of one schedule and number of recorded steps, but got"):
        collated(likelihood, [row(generator), row(generator, **odd)])
