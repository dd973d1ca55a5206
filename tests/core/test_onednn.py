"""Linear layers through oneDNN: the same products and gradients, left as they were found."""

import pytest
import torch
from torch import nn

from mmrl.core import onednn as module
from mmrl.core.onednn import onednn

WIDE = 260  # a square weight of this width is just large enough
there = pytest.mark.skipif(not module.BUILT, reason="this torch has no oneDNN for x86")
both = pytest.mark.parametrize("pack", [False, True])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 2))


def called(model: nn.Module) -> list[bool]:
    return ["forward" in vars(layer) for layer in model.modules()]


@there
@both
@pytest.mark.parametrize("shape", [(WIDE,), (1, WIDE), (8, 1, WIDE), (3, 70, WIDE), (0, WIDE)])
def test_products_are_the_same(shape, pack) -> None:
    model, x = layers(), torch.randn(shape)
    with torch.no_grad():
        wanted = model(x)
        with onednn(model, pack=pack):
            assert called(model) == [False, True, True, False]  # the last has too few numbers
            found = model(x)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-5)


@there
@both
def test_views_and_slices_are_read_right(pack) -> None:
    model, x = nn.Linear(WIDE, WIDE), torch.randn(2 * WIDE, 6)
    strided = x.t()[:, ::2]
    assert not strided.is_contiguous()
    with torch.no_grad(), onednn(model, pack=pack):
        wanted = nn.functional.linear(strided.contiguous(), model.weight, model.bias)
        assert torch.allclose(model(strided), wanted, atol=1e-5)


def gradients(model: nn.Module, x: torch.Tensor, upstream: torch.Tensor | None) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    # A sum hands back one number, seen everywhere; a product hands back numbers of its own.
    (out.sum() if upstream is None else (out * upstream).sum()).backward()
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@there
@both
@pytest.mark.parametrize("shape", [(1, WIDE), (5, WIDE), (3, 40, WIDE)])
@pytest.mark.parametrize("summed", [True, False])
def test_gradients_are_the_same(shape, summed, pack) -> None:
    model, x = layers(), torch.randn(shape)
    upstream = None if summed else torch.randn(*shape[:-1], 2)
    wanted = gradients(model, x, upstream)
    with onednn(model, pack=pack):
        found = gradients(model, x, upstream)
    assert len(found) == len(wanted) == 6
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@there
def test_parts_of_weights_go_the_same_way_inside_and_nowhere_else(monkeypatch) -> None:
    calls = []
    times = module.times
    monkeypatch.setattr(module, "times", lambda *args: calls.append(1) or times(*args))
    weight = torch.randn(2 * WIDE, 2 * WIDE, requires_grad=True)
    part, x = weight[::2, WIDE:], torch.randn(3, 5, WIDE)
    wanted = nn.functional.linear(x, part)
    assert torch.equal(module.linear(x, part), wanted)
    assert not calls
    with onednn(nn.Module()):
        found = module.linear(x, part)
        assert calls == [1]
        assert torch.equal(
            module.linear(x[..., :2], part[:, :2]), nn.functional.linear(x[..., :2], part[:, :2])
        )
        assert calls == [1]  # too few numbers
    assert torch.allclose(found, wanted, atol=1e-4)
    upstream = torch.randn(found.shape)
    (one,), (other,) = (torch.autograd.grad((out * upstream).sum(), weight) for out in (found, wanted))
    assert torch.allclose(one, other, atol=1e-4)


@there
def test_parts_of_wider_rows_are_laid_out_anew_because_they_have_no_kernel(monkeypatch) -> None:
    given = []
    multiply = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda *args: given.append(args[1]) or multiply(*args))
    weight, x = torch.randn(WIDE, 2 * WIDE, requires_grad=True), torch.randn(7, 2 * WIDE, requires_grad=True)
    with onednn(nn.Module()):
        module.linear(x[:, WIDE:], weight[:, WIDE:]).square().sum().backward()
    assert len(given) == 3  # the product, and two gradients
    assert all(one.is_contiguous() or one.t().is_contiguous() for one in given)
    found = x.grad, weight.grad
    x.grad = weight.grad = None
    nn.functional.linear(x[:, WIDE:], weight[:, WIDE:]).square().sum().backward()
    for one, other in zip(found, (x.grad, weight.grad), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@there
def test_frozen_weights_get_no_gradient() -> None:
    model = nn.Linear(WIDE, WIDE).requires_grad_(False)
    x = torch.randn(4, WIDE, requires_grad=True)
    with onednn(model):
        model(x).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is None
    assert torch.allclose(x.grad, model.weight.sum(0).expand(4, -1), atol=1e-4)


@there
def test_layers_are_as_before_afterwards_even_behind_an_error() -> None:
    model = layers()
    with pytest.raises(KeyError), onednn(model, pack=True):
        raise KeyError
    assert not any(called(model))
    with torch.no_grad():
        before = model(torch.ones(1, WIDE))
        model[0].weight.mul_(2)
        assert not torch.equal(model(torch.ones(1, WIDE)), before)  # weights are those of the model again


@there
@both
def test_weights_that_moved_are_seen_the_next_time(pack) -> None:
    model, x = nn.Linear(WIDE, WIDE, bias=False), torch.randn(4, WIDE)
    with torch.no_grad():
        with onednn(model, pack=pack):
            before = model(x)
        model.weight.mul_(2)
        with onednn(model, pack=pack):
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
    with onednn(model):
        assert called(model) == [False, False, False, False, True]
        assert replaced.forward(3) == 3
    assert replaced.forward(3) == 3


@there
def test_one_inside_another_ends_where_it_began() -> None:
    model = layers()
    with onednn(model, pack=True):
        with onednn(model):
            assert any(called(model))
        assert any(called(model))
    assert not any(called(model))


def test_autocast_is_left_alone() -> None:
    model = layers()
    with torch.autocast("cpu", torch.bfloat16), onednn(model):
        assert not any(called(model))


@there
def test_nothing_is_packed_beyond_the_memory_it_may_take(monkeypatch) -> None:
    made = []
    packed = module.Packed
    monkeypatch.setattr(module, "Packed", lambda layers: made.append(layers) or packed(layers))
    whole = 4 * (2 * WIDE**2)  # bytes of the two layers that are large enough
    for most, number in ((whole, 2), (whole - 1, 0)):
        monkeypatch.setattr(module, "MOST", most)
        made.clear()
        model = layers()
        with onednn(model, pack=True):
            assert len(made) == number
            assert called(model) == [False, True, True, False]


class Attention(nn.Module):
    """Layers that read the same input under the names of transformers; one has no bias, one a few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDE, 8), nn.Linear(WIDE, WIDE)


@there
def test_layers_that_read_the_same_input_are_one_product(monkeypatch) -> None:
    calls = []
    multiply = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda *args: calls.append(args[1]) or multiply(*args))
    model, x = Attention(), torch.randn(4, 1, WIDE)
    read = [model.v_proj, model.q_proj, model.k_proj]  # in any order
    with torch.no_grad():
        wanted = [layer(x) for layer in read]
        with onednn(model, pack=True):
            found = [layer(x) for layer in read]
            assert len(calls) == 1
            other, again = model.k_proj(x + 1), model.q_proj(x)  # another input is not mixed up with this one
            assert len(calls) == 3
            x.mul_(2)
            moved = model.v_proj(x)  # nor what is written into it before the next layer reads it
        assert torch.allclose(other, model.k_proj(x / 2 + 1), atol=1e-5)
        assert torch.allclose(moved, model.v_proj(x), atol=1e-5)
    assert torch.allclose(again, wanted[1], atol=1e-5)
    for one, right in zip(found, wanted, strict=True):
        assert one.shape == right.shape
        assert torch.allclose(one, right, atol=1e-5)


@there
def test_layers_of_other_inputs_or_kinds_are_packed_alone() -> None:
    model = Attention()
    model.k_proj = nn.Linear(WIDE + 1, 8)
    with onednn(model, pack=True):
        # The module itself, then q, k, v and o: two of them are too small when they are alone.
        assert called(model) == [False, True, False, False, True]
    model.k_proj = Doubled(WIDE, 8)
    with onednn(model, pack=True):
        assert called(model) == [False, True, False, False, True]


@there
def test_a_processor_on_which_it_is_slower_uses_it_for_few_rows_of_packed_weights(monkeypatch) -> None:
    calls = []
    multiply = module._multiply
    monkeypatch.setattr(module, "_multiply", lambda *args: calls.append(len(args[0])) or multiply(*args))
    monkeypatch.setattr(module, "FASTER", False)
    assert not module.there()
    model = nn.Linear(WIDE, WIDE)
    with onednn(model):
        assert not any(called(model))
    with torch.no_grad(), onednn(model, pack=True):
        for rows in (1, 2, 48, 49):
            x = torch.randn(rows, WIDE)
            wanted = nn.functional.linear(x, model.weight, model.bias)
            assert torch.allclose(model(x), wanted, atol=1e-5)
    assert calls == [2, 48]
