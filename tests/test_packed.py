"""Packed linear layers: the same products, left as they were found."""

import pytest
import torch
from torch import nn

from mmrl import packed as module
from mmrl.packed import LEAST, packed

WIDE = 256  # a square weight of this width is just large enough
needs_onednn = pytest.mark.skipif(not module._useful(), reason="this torch has no oneDNN for x86")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 2))


def called(model: nn.Module) -> list[bool]:
    return ["forward" in vars(layer) for layer in model.modules()]


@needs_onednn
@pytest.mark.parametrize("shape", [(1, WIDE), (8, 1, WIDE), (3, 70, WIDE), (0, WIDE)])
def test_packed_layers_give_the_same_products(shape) -> None:
    model, x = layers(), torch.randn(shape)
    with torch.no_grad():
        wanted = model(x)
        with packed(model):
            assert called(model) == [False, True, True, False]  # the last has too few numbers
            found = model(x)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-5)


@needs_onednn
def test_views_and_slices_are_read_right() -> None:
    model, x = nn.Linear(WIDE, WIDE), torch.randn(2 * WIDE, 6)
    with torch.no_grad(), packed(model):
        strided = x.t()[:, ::2]
        assert not strided.is_contiguous()
        wanted = nn.functional.linear(strided.contiguous(), model.weight, model.bias)
        assert torch.allclose(model(strided), wanted, atol=1e-5)


@needs_onednn
def test_gradients_go_through_the_weights_themselves() -> None:
    model = layers()
    with packed(model):
        model(torch.randn(4, WIDE)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@needs_onednn
def test_layers_are_unpacked_afterwards_even_behind_an_error() -> None:
    model = layers()
    with pytest.raises(KeyError), packed(model):
        raise KeyError
    assert not any(called(model))
    with torch.no_grad():
        before = model(torch.ones(1, WIDE))
        model[0].weight.mul_(2)
        assert not torch.equal(model(torch.ones(1, WIDE)), before)  # weights are those of the model again


@needs_onednn
def test_weights_are_packed_anew_every_time() -> None:
    model, x = nn.Linear(WIDE, WIDE, bias=False), torch.randn(4, WIDE)
    with torch.no_grad():
        with packed(model):
            before = model(x)
        model.weight.mul_(2)
        with packed(model):
            assert torch.allclose(model(x), 2 * before, atol=1e-5)


class Doubled(nn.Linear):
    """A layer that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_no_plain_float32_layer_is_left_alone() -> None:
    half, double = nn.Linear(WIDE, WIDE).bfloat16(), nn.Linear(WIDE, WIDE).double()
    replaced = nn.Linear(WIDE, WIDE)
    replaced.forward = lambda x: x
    model = nn.ModuleList([half, double, Doubled(WIDE, WIDE), replaced])
    with packed(model):
        assert called(model) == [False, False, False, False, True]
        assert replaced.forward(3) == 3
    assert replaced.forward(3) == 3


@needs_onednn
def test_nested_packing_ends_where_it_began() -> None:
    model = layers()
    with packed(model):
        with packed(model):
            assert any(called(model))
        assert any(called(model))
    assert not any(called(model))


def test_nothing_is_packed_under_autocast_nor_beyond_the_memory_it_may_take(monkeypatch) -> None:
    model = layers()
    with torch.autocast("cpu", torch.bfloat16), packed(model):
        assert not any(called(model))
    monkeypatch.setattr(module, "MOST", 4 * LEAST)  # one of the two layers, and not both
    with packed(model):
        assert not any(called(model))
