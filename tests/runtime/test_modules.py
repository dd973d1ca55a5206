"""Models that transforms make of another one, on its own weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrl.runtime.modules import Derived, twin


class Net(nn.Module):
    """Two layers, a buffer, and settings."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.register_buffer("shift", torch.zeros(1))
        self.config = {"kind": "plain"}

    def forward(self, x):
        return self.second(self.first(x)) + self.shift


class Counted:
    """A transform that counts how often it is called."""

    def __init__(self, change):
        self.change, self.calls = change, 0

    def __call__(self, model):
        self.calls += 1
        return self.change(model) or model


def copying():
    """Hold twice the second layer's weights as they are when it is called."""

    def change(model):
        held = nn.Linear(2, 1, bias=False)
        held.weight = nn.Parameter(2 * model.second.weight.detach())
        model.second = held

    return Counted(change)


def test_a_twin_holds_the_same_tensors_in_other_modules_with_settings_of_its_own():
    net = Net()
    other = twin(net)
    assert all(a is b for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert other.shift is net.shift and other.first is not net.first
    other.config["kind"] = "changed"
    other.first.register_forward_hook(lambda *given: pytest.fail("the hook of the twin ran in the model"))
    net(torch.ones(1, 2))
    assert net.config == {"kind": "plain"}


def test_weights_that_both_hold_follow_and_the_model_is_made_once():
    net = Net()
    transform = Counted(lambda model: model.register_forward_hook(lambda m, x, y: 3 * y) and None)
    derived = Derived(net, [transform])
    x = torch.ones(1, 2)
    for change in (
        lambda: None,
        lambda: net.first.weight.data.mul_(2),  # past autograd's version counter
        lambda: setattr(net.first.weight, "data", torch.ones(2, 2)),  # lent by a reference
    ):
        change()
        with torch.no_grad():
            assert torch.equal(derived()(x), 3 * net(x))
    assert transform.calls == 1


@pytest.mark.parametrize("how", ["in place", "lent", "replaced"])
def test_weights_that_a_transform_copied_are_copied_anew_once_they_moved(how):
    net = Net()
    transform = copying()
    derived = Derived(net, [transform])
    x = torch.ones(1, 2)

    def check():
        with torch.no_grad():
            assert torch.equal(derived()(x), 2 * net(x))

    check(), check()
    assert transform.calls == 1
    with torch.no_grad():
        if how == "in place":
            net.second.weight.add_(1.0)
        elif how == "lent":
            net.second.weight.data = torch.full((1, 2), 5.0)
        else:
            net.second.weight = nn.Parameter(torch.full((1, 2), 7.0))
    check(), check()
    assert transform.calls == 2


def test_only_weights_that_were_copied_count():
    net = Net()
    transform = copying()
    derived = Derived(net, [transform])
    derived()
    with torch.no_grad():
        net.first.weight.add_(1.0)  # as an adapter moves over weights of few bits
        assert torch.equal(derived()(torch.ones(1, 2)), 2 * net(torch.ones(1, 2)))
    assert transform.calls == 1


def test_where_something_was_added_every_weight_counts():
    net = Net()

    def fuse(model):
        model.fused = nn.Parameter((model.second.weight @ model.first.weight).detach())

    transform = Counted(fuse)
    derived = Derived(net, [transform])
    derived()
    with torch.no_grad():
        net.first.weight.add_(1.0)
        assert torch.equal(derived().fused, net.second.weight @ net.first.weight)
    assert transform.calls == 2


def test_sharded_weights_are_refused(monkeypatch):
    monkeypatch.setattr("mmrl.runtime.modules.sharded_parts", lambda model: [model])
    with pytest.raises(ValueError, match="need whole weights on every process, but these are sharded; give"):
        Derived(Net(), [copying()])()


def test_optimizers_move_what_was_copied():
    net = Net()
    transform = copying()
    derived = Derived(net, [transform])
    for make in (torch.optim.SGD, torch.optim.AdamW):
        derived()
        optimizer = make(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert torch.equal(derived().second.weight, 2 * net.second.weight)
    assert transform.calls == 3
