"""Optimizers, whose learning rate is the run's."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

from mmrl.optimizers import BatchedMuon, adamw, adamw_8bit, muon, orthogonalize, sgd
from tests.support import distributed_worker


def named(**values):
    """Make parameters by name."""
    return [(name, nn.Parameter(torch.tensor(value))) for name, value in values.items()]


def step(optimizer, parameters, slopes, rate=0.1):
    """Take one step with these slopes."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for (_, parameter), slope in zip(parameters, slopes, strict=True):
        parameter.grad = torch.tensor(slope)
    optimizer.step()


def stepped(make, *, start=1.0, slope=2.0, times=1, **options):
    """Move one number with a constant slope."""
    parameters = named(weight=[start])
    optimizer = make(parameters, **options)
    for _ in range(times):
        step(optimizer, parameters, [[slope]])
    return parameters[0][1].item()


def test_the_first_step_of_adamw_is_the_learning_rate():
    # corrected moments are g and g^2, so the step is lr * g / |g|
    assert stepped(adamw) == pytest.approx(0.9)
    assert stepped(adamw, slope=-7.0) == pytest.approx(1.1)


def test_weight_decay_of_adamw_is_decoupled():
    # 1 * (1 - .1 * .5), then the step of .1
    assert stepped(adamw, weight_decay=0.5) == pytest.approx(0.85)


def test_adamw_takes_its_betas_and_eps():
    (group,) = adamw(named(weight=[0.0]), beta1=0.8, beta2=0.9, eps=1e-5).param_groups
    assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-5)


@pytest.mark.parametrize("device, fused", [("cuda", True), ("cpu", None)])
def test_adamw_is_one_kernel_on_a_gpu(device, fused):
    with FakeTensorMode():  # needs no GPU
        weight = nn.Parameter(torch.zeros(2, device=device))
    assert adamw([("weight", weight)]).defaults["fused"] is fused


def test_sgd_steps_along_the_slope_with_momentum():
    assert stepped(sgd) == pytest.approx(0.8)
    # velocities 2 and .5 * 2 + 2
    assert stepped(sgd, times=2, momentum=0.5) == pytest.approx(1 - 0.1 * (2 + 3))


def test_weight_decay_of_sgd_adds_to_the_slope():
    assert stepped(sgd, slope=0.0, weight_decay=0.5) == pytest.approx(0.95)


def test_adamw_8bit_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(
        ImportError, match=r"optimizer 'adamw_8bit' needs bitsandbytes; install mmrl\[lowbit\]"
    ):
        adamw_8bit(named(weight=[0.0]))


# ---- muon

SQUARE = [[1.0, 2.0], [3.0, 4.0]]
TURN = [[0.0, -1.0], [1.0, 0.0]]  # orthogonal: its own orthogonalisation, up to the error of the iteration


def scaled(matrix, factor):
    return [[factor * entry for entry in row] for row in matrix]


def moved(parameters, slopes, **options):
    """Give how far one step moves every parameter."""
    before = [parameter.detach().clone() for _, parameter in parameters]
    step(muon(parameters, **options), parameters, slopes)
    return [parameter.detach() - start for (_, parameter), start in zip(parameters, before, strict=True)]


def test_muon_moves_a_matrix_along_the_orthogonalised_slope_whatever_its_size():
    small, large = (moved(named(w=SQUARE), [scaled(TURN, size)])[0] for size in (0.01, 100.0))
    torch.testing.assert_close(small, large, rtol=1e-2, atol=1e-4)
    assert small[0, 0].abs() < 1e-4
    torch.testing.assert_close(small[0, 1], -small[1, 0])
    # .2 sqrt(2) times the learning rate; the iteration ends with singular values between .7 and 1.2
    assert 0.7 < float(small[0, 1]) / (0.1 * 0.2 * 2**0.5) < 1.2


def test_muon_makes_all_directions_equally_long():
    (change,) = moved(named(w=SQUARE), [[[5.0, 0.0], [0.0, 0.5]]])
    lengths = torch.linalg.svdvals(change)
    assert lengths[0] / lengths[1] < 1.8, "the slope itself is ten times as long in one direction"


def test_one_step_of_the_iteration_on_a_number():
    # It is divided by its norm, which leaves 1: 3.4445 - 4.7750 + 2.0315.
    assert orthogonalize(torch.tensor([[7.0]]), steps=1).item() == pytest.approx(0.701)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_orthogonalised_matrices_are_those_of_each_alone_with_their_singular_vectors(shape):
    matrices = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = orthogonalize(matrices)
    for matrix, found in zip(matrices, together, strict=True):
        torch.testing.assert_close(found, orthogonalize(matrix))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        aligned = left.mT @ found @ right.mT
        assert (aligned - aligned.diagonal().diag()).abs().max() < 1e-9
        assert aligned.diagonal().min() > 0.3 and aligned.diagonal().max() < 1.3


@pytest.mark.parametrize("together", [1, 2**24])
def test_muon_is_that_of_torch_up_to_the_rounding_of_bfloat16(monkeypatch, together):
    monkeypatch.setattr("mmrl.optimizers._TOGETHER", together)
    generator, shapes = torch.Generator().manual_seed(1), [(4, 6), (6, 4), (4, 6), (8, 8)]
    draw = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in draw] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    pair = BatchedMuon(ours, **options), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        slopes = [torch.randn(shape, generator=generator) for shape in shapes]
        for optimizer, parameters in zip(pair, (ours, theirs), strict=True):
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.grad = slope.clone()
            optimizer.step()
    for start, a, b in zip(draw, ours, theirs, strict=True):
        assert (a - b).norm() < 0.05 * (b - start).norm()


def main():
    """Update matrices that are shards of two processes, of which this is one, and the same ones whole."""
    mesh_of = torch.distributed.device_mesh.init_device_mesh
    torch.distributed.init_process_group("gloo")
    mesh, generator = mesh_of("cpu", (2,)), torch.Generator().manual_seed(2)
    drawn = [[torch.randn(shape, generator=generator) for shape in ((4, 6), (6, 4), (5, 7))] for _ in "wg"]
    cut = lambda matrix: distribute_tensor(matrix.clone(), mesh, [Shard(0)])
    found = []
    for made in (torch.clone, cut):
        parameters = [nn.Parameter(made(matrix)) for matrix in drawn[0]]
        for parameter, slope in zip(parameters, drawn[1], strict=True):
            parameter.grad = made(slope)
        BatchedMuon(parameters, lr=0.1, weight_decay=0.1).step()
        found.append([parameter.detach() for parameter in parameters])
    for whole, shards in zip(*found, strict=True):
        torch.testing.assert_close(shards.full_tensor(), whole, rtol=1e-5, atol=1e-6)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_muon_moves_shards_of_two_processes_as_whole_matrices():
    for process in distributed_worker.start(__name__, [], 2):
        printed, _ = process.communicate(timeout=600)
        assert not process.returncode, printed


def test_everything_else_is_moved_by_adamw():
    parameters = named(**{"embed_tokens.weight": SQUARE, "lm_head.weight": SQUARE, "q.bias": [1.0, 1.0]})
    for change in moved(parameters, [SQUARE, SQUARE, [3.0, -3.0]]):
        torch.testing.assert_close(change.abs(), torch.full_like(change, 0.1))


def test_matrices_and_the_rest_may_stand_alone():
    assert len(muon(named(w=SQUARE)).param_groups) == 1
    assert len(muon(named(b=[1.0])).param_groups) == 1
    assert len(muon(named(w=SQUARE, b=[1.0])).param_groups) == 2


def test_slopes_of_all_parts_are_forgotten():
    parameters = named(w=SQUARE, b=[1.0])
    optimizer = muon(parameters)
    step(optimizer, parameters, [SQUARE, [1.0]])
    optimizer.zero_grad()
    assert all(parameter.grad is None for _, parameter in parameters)


def test_a_saved_muon_goes_on_exactly():
    first, second = (named(w=SQUARE, b=[1.0]) for _ in range(2))
    one, two = muon(first), muon(second)
    step(one, first, [SQUARE, [1.0]])
    for (_, source), (_, target) in zip(first, second, strict=True):
        target.data.copy_(source.data)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    # the learning rate is set on the groups as they stand after loading
    for optimizer, parameters in ((one, first), (two, second)):
        step(optimizer, parameters, [TURN, [-2.0]], rate=0.3)
    for (_, a), (_, b) in zip(first, second, strict=True):
        assert a.equal(b)
