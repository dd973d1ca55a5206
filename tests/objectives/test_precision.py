"""In float64 every piece of an objective and of a chain computes in float64, its constants included."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_contracts import CHAIN, PARTS, each, table_of, weighed


class Precise(TorchDispatchMode):
    """Fail where an operation gives float32 numbers that are not whole."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                seen = tensor.nan_to_num()
                assert seen.equal(seen.round()), f"{function} gives {tensor}"
        return made


def test_a_constant_in_float32_is_noticed():
    with pytest.raises(AssertionError, match="gives 1.0"), Precise():
        torch.where(torch.ones(2, dtype=torch.float64) > 0, 1.0, 1.05)


@each(PARTS)
def test_parts_of_objectives_compute_in_the_precision_of_the_policy(case):
    objective, batch, new = weighed(case)
    with Precise():
        loss, metrics = objective(new, batch)
        objective.weigh(batch)
    assert {value.dtype for value in (loss, *metrics.values())} == {torch.float64}


@each(CHAIN)
def test_chains_compute_in_float64(case):
    table, piece = table_of(), case.make()
    with Precise():
        assert piece(table).values.dtype == torch.float64
