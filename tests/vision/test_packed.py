"""Rows packed into one sequence, against every row alone in plain transformers."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch

from mmrl.config.loading import ConfigError
from mmrl.core.types import Unit
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed
from tests.vision.test_prefix_tree import TIGHT, alone, check, forest, precise, weights
from tests.vision.test_sliding_windows import sliding

FAMILIES = ("qwen2_5_vl", "llava", "smolvlm")
MORE = ("qwen2_vl", "qwen3_vl", "llava_onevision", "internvl", "glm46v")
OPTIONS = {
    "kept": {"packing": True, "freeze_vision_tower": False},
    "recomputed": {"packing": True, "freeze_vision_tower": False, "gradient_checkpointing": True},
    "copied": {"packing": True, "share_prefix": False},
}
# Three families in every form, and each of the others in one.
USUAL = list(product(FAMILIES, OPTIONS))
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in zip(MORE, cycle(OPTIONS), strict=False)]


@pytest.mark.parametrize(("family", "form"), [*USUAL, *SLOW])
def test_packed_rows_learn_what_they_do_alone(checkpoint, family, form):
    """Texts, images, videos and conversations with images in replies; gradients of all weights in float64."""
    policy = precise(checkpoint(family), **OPTIONS[form])
    lengths: list[tuple[int, ...]] = []
    policy.core.get_decoder().register_forward_hook(
        lambda module, args, options, out: lengths.append(out.last_hidden_state.shape[:2]), with_kwargs=True
    )
    rows = forest(policy, family, 0)
    batch = policy.collate(tuple(rows))
    policy(batch)
    # One sequence without padding: the cost of the batch, with the tokens that rows share counted once. The
    # last token of a row is no input, except in the cost of rows without a tree.
    assert lengths[0][0] == 1 and 0 <= batch.steps.cost(torch.arange(len(batch))) - lengths[0][1] <= len(rows)
    check(policy, rows, tree=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_eager_attention_gets_additive_masks(checkpoint, family):
    policy = precise(checkpoint(family), packing=True, attn_implementation="eager")
    rows = forest(policy, family, 0)
    batch = policy.collate(tuple(rows))
    wanted, _ = alone(policy, rows, weights(batch))
    # Its softmax is in float32.
    torch.testing.assert_close((policy(batch).logp * batch.mask).detach(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "window"), [("last", 4), ("both", 20)])
def test_windows_reach_back_in_the_own_row(checkpoint, tmp_path, kind, window):
    family, folder = sliding(checkpoint, kind, window, tmp_path / "model")
    policy = precise(folder, packing=True, share_prefix=False)
    check(policy, forest(policy, family, seed=window), tree=False)


def test_every_cut_into_sequences_gives_the_same_gradient(checkpoint):
    policy = precise(checkpoint("qwen2_5_vl"), packing=True)
    batch = policy.collate(tuple(forest(policy, "qwen2_5_vl", 2)))
    batch = batch.replace(weight=weights(batch), group=torch.arange(len(batch)))

    def gradient(budget):
        parts = batch.split(budget, Unit.ROW)
        for part in parts:
            (policy(part).logp * part.weight).sum().backward()
        return len(parts), mixed.gradients(policy)

    (_, whole), sizes = gradient(1 << 20), set()
    for budget in (1, 150, 400):
        number, found = gradient(budget)
        sizes.add(number)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, **TIGHT, msg=lambda m, n=name: n + m)
    assert len(sizes) == 3 and max(sizes) == len(batch)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("qwen3_5", {}, "layers that only attend, and a model of type 'qwen3_5.*' has linear_attention"),
        ("gemma3", {}, "attention without token types, and .* each other in a model of type 'gemma3'"),
        ("llava", {"attn_implementation": "flash_attention_2"}, "`attn_implementation: sdpa or eager`, not"),
        ("llava", {"transform": ({"name": "x"},)}, "no `transform`"),
    ],
)
def test_models_that_cannot_be_packed_are_refused_by_name(checkpoint, family, options, reason):
    given = {"model": str(checkpoint(family)), "packing": True, **options}
    with pytest.raises(ConfigError, match=f"`policy.packing` needs {reason}"):
        Tokens.check_folders(given)
    if "transform" not in options:
        with pytest.raises(ConfigError, match=f"`policy.packing` needs {reason}"):
            Tokens(**given)
