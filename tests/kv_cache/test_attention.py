"""Attention to two parts is attention to both at once, forwards and backwards."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.kv_cache import attention
from mmrl.kv_cache.attention import additive_mask, attend_merged, attend_padded, causal_mask
from mmrl.kv_cache.layout import PromptLayout
from mmrl.kv_cache.row_groups import RowGroups

OWNERS = {
    "alike": [0, 0, 1, 1],
    "alone": [0, 1],
    "ragged, out of order": [1, 0, 1, 2, 1],
    "one row": [0],
}
TIGHT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(params=[True, False], ids=["kernel", "no kernel"])
def kernel(request, monkeypatch):
    """Compute with the kernel of torch, and without it in pieces of a few scores."""
    if not request.param:
        monkeypatch.setattr(attention, "_is_fused", lambda *tensors: False)
        monkeypatch.setattr(attention, "MAX_SCORES", 40)


def tensors(owner: list[int], num: int, length: int):
    """Make queries of 6 heads, 9 shared and `length` own keys and values of 2."""
    gen = torch.Generator().manual_seed(0)
    shapes = [
        (len(owner), 6, num, 8),
        *[(max(owner) + 1, 2, 9, 8)] * 2,
        *[(len(owner), 2, length, 8)] * 2,
    ]
    return [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]


def at_once(query, keys, values, own_keys, own_values, groups, scaling, prefix, own=None):
    """Repeat the shared part for every row, and attend in one softmax."""
    owner, num = groups.owner, query.shape[2]
    both = [
        torch.cat([shared[owner], own], 2).repeat_interleave(3, 1)
        for shared, own in ((keys, own_keys), (values, own_values))
    ]
    own = causal_mask(num, own_keys.shape[2], query) if own is None else own
    shared = prefix[owner].expand(-1, -1, num, -1)
    mask = torch.cat([shared, own[None, None].expand(len(owner), -1, -1, -1)], -1)
    return (query @ both[0].transpose(-1, -2) * scaling + mask).softmax(-1) @ both[1]


def test_both_parts_share_one_normaliser(kernel):
    # Scores 0 and ln 2 in front, ln 3 behind: weights 1, 2 and 3 of 6, values 6, 12 and 2; (6 + 24 + 6) / 6.
    column = lambda *numbers: torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1, 1)
    out = attend_merged(
        column(1.0),
        (column(0.0, math.log(2)), column(6.0, 12.0)),
        (column(math.log(3)), column(2.0)),
        RowGroups(torch.tensor([0]), 1),
        1.0,
    )
    assert out.item() == pytest.approx(6.0, abs=1e-12)


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize(("num", "length"), [(1, 1), (1, 5), (4, 4), (3, 7)])
def test_values_and_gradients_are_those_of_one_attention_to_repeated_keys(kernel, owner, num, length):
    inputs = tensors(owner, num, length)
    hidden = torch.zeros(max(owner) + 1, 1, 1, 9, dtype=torch.bool)
    hidden[0, ..., :3] = True
    hidden[1:2] = True  # a prompt of which nothing is seen
    how = (RowGroups(torch.tensor(owner), max(owner) + 1), 0.3, additive_mask(hidden, inputs[0]))
    results = []
    for out in (attend_merged(inputs[0], inputs[1:3], inputs[3:], *how), at_once(*inputs, *how)):
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)
    with torch.no_grad():
        alone = attend_merged(inputs[0], inputs[1:3], inputs[3:], *how)
    torch.testing.assert_close(alone, results[0][0].detach(), **TIGHT)


def test_masks_of_every_query_hold_in_both_parts(kernel):
    owner = [1, 0, 1]
    inputs = tensors(owner, 3, 5)
    hidden = torch.rand(2, 1, 3, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    how = (
        RowGroups(torch.tensor(owner), 2),
        0.3,
        additive_mask(hidden, inputs[0]),
        causal_mask(3, 5, inputs[0], 2),
    )
    results = []
    for out in (attend_merged(inputs[0], inputs[1:3], inputs[3:], *how), at_once(*inputs, *how)):
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("sign", [50.0, -50.0])
def test_a_part_that_outweighs_the_other_by_far_gives_its_own_value(kernel, sign):
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    inputs = [one.clone().requires_grad_() for _ in range(5)]
    with torch.no_grad():
        inputs[1].fill_(sign)
        inputs[2].fill_(7.0)
        inputs[3].fill_(-sign)
    out = attend_merged(inputs[0], inputs[1:3], inputs[3:], RowGroups(torch.tensor([0]), 1), 1.0)
    # exp(-100) of the other part is left.
    assert out.item() == pytest.approx(7.0 if sign > 0 else 1.0, abs=1e-12)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_near_float64(kernel, dtype):
    wide = tensors([0, 0, 1], 4, 4)
    low = [x.detach().to(dtype).requires_grad_() for x in wide]
    how = (RowGroups(torch.tensor([0, 0, 1]), 2), 0.3)
    results = []
    for query, *pairs in (wide, low):
        out = attend_merged(query, pairs[:2], pairs[2:], *how)
        assert out.dtype == query.dtype
        results.append((out, *torch.autograd.grad(out.square().sum(), [query, *pairs])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(
            other.double(), one, rtol=0, atol=0.15 if dtype == torch.bfloat16 else 1e-5
        )


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_unfolding_undoes_folding(owner):
    groups = RowGroups(torch.tensor(owner), max(owner) + 1)
    x = torch.arange(len(owner) * 2 * 3.0).view(len(owner), 2, 3)
    folded = groups.fold(x)
    assert folded.shape == (max(owner) + 1, 2, 3 * max(owner.count(i) for i in owner))
    assert torch.equal(groups.unfold(folded), x)
    # Every query of a row stands in the line of its prompt.
    for row, prompt in enumerate(owner):
        assert set(x[row, 0].tolist()) <= set(folded[prompt, 0].tolist())


def test_selecting_rows_forgets_prompts_that_nobody_reads():
    groups, used = RowGroups(torch.tensor([2, 0, 1, 2]), 3).select(torch.tensor([3, 1]))
    assert used.tolist() == [0, 2]
    assert (groups.owner.tolist(), groups.count) == ([1, 0], 2)


def test_a_window_counts_the_token_itself():
    seen = causal_mask(2, 4, torch.zeros(()), window=2) == 0
    # The two newest of four tokens each see themselves and the one before.
    assert seen.tolist() == [[False, True, True, False], [False, False, True, True]]


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("window", [0, 4, 9])
@pytest.mark.parametrize(("num", "length"), [(1, 1), (1, 6), (3, 3), (3, 7)])
def test_rows_with_empty_places_see_what_they_see_without_them(kernel, owner, num, length, window):
    inputs = [x.detach() for x in tensors(owner, num, length)]
    query, keys, values, own_keys, own_values = inputs
    layout = PromptLayout(None, torch.arange(9) >= torch.arange(max(owner) + 1)[:, None])
    layout.begin(max(owner) + 1, 9, query.device)
    layout.select(torch.tensor(owner))
    pad = layout.pad = torch.arange(len(owner)) % (length - num + 1)
    masks = layout.padded_masks(num, length, 9, window, 3, query)
    for x in (own_keys, own_values):  # nothing of an empty place may be seen
        for row, empty in enumerate(pad.tolist()):
            x[row, :, :empty] = 1e3
    out = attend_padded(
        query, (keys, values), (own_keys, own_values), layout.groups, 0.3, *masks, window=window
    )
    for row, (prompt, empty) in enumerate(zip(owner, pad.tolist(), strict=True)):
        own = causal_mask(num, length, query, window)[:, empty:]
        before = length - num - empty + torch.arange(num)[:, None] + 9 - torch.arange(9)
        hidden = ~layout.real[prompt] | (before >= window if window else before < 0)
        wanted = at_once(
            query[[row]], keys[[prompt]], values[[prompt]], own_keys[[row], :, empty:],
            own_values[[row], :, empty:], RowGroups(torch.tensor([0]), 1), 0.3,
            additive_mask(hidden, query)[None, None], own,
        )  # fmt: skip
        torch.testing.assert_close(out[row : row + 1], wanted, **TIGHT)
    low = [x.bfloat16() for x in inputs]
    masks = [x if x is None else additive_mask(x < 0, low[0]) for x in masks]
    rough = attend_padded(low[0], low[1:3], low[3:], layout.groups, 0.3, *masks, window=window)
    torch.testing.assert_close(rough.double(), out, rtol=0, atol=0.1)
