"""Columns with values of several shapes: gathered from micro-batches, and selected by rows and steps."""

from __future__ import annotations

import torch

from mmrl.core.ragged import Gathered, Ragged


def gathered():
    """Gather two columns of 3 rows and 2 steps: row 1 has values of 2 numbers, the others have 3."""
    columns = Gathered((3, 2))
    wide, narrow = torch.arange(12.0).view(2, 2, 3), torch.arange(4.0).view(1, 2, 2)
    columns.put(torch.tensor([2, 0]), slice(0, 1), {"field": wide[:, :1], "logp": torch.ones(2, 1)})
    columns.put(torch.tensor([1]), slice(None), {"field": narrow, "logp": torch.full((1, 2), 5.0)})
    columns.put(torch.tensor([2, 0]), slice(1, 2), {"field": wide[:, 1:], "logp": torch.full((2, 1), 2.0)})
    return columns.columns(), wide, narrow


def test_columns_of_one_shape_are_tensors():
    columns, _, _ = gathered()
    assert columns["logp"].tolist() == [[1, 2], [5, 5], [1, 2]]


def test_rows_of_one_shape_are_a_tensor_and_of_several_are_not():
    columns, wide, narrow = gathered()
    field = columns["field"]
    assert isinstance(field, Ragged)
    assert torch.equal(field[torch.tensor([0, 2])], wide[[1, 0]])
    assert torch.equal(field[torch.tensor([1])], narrow)
    some = field[torch.tensor([2, 1])][:, slice(1, 2)].to(torch.device("cpu"))
    assert isinstance(some, Ragged)
    assert torch.equal(some[torch.tensor([0])], wide[:1, 1:]) and torch.equal(
        some[torch.tensor([1])], narrow[:, 1:]
    )
