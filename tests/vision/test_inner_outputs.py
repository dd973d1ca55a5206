"""What a token policy tells from inside, by hand and on a small model."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.vision.decoding.inner_outputs import (
    OF_STATES,
    InnerOptions,
    effective_ranks,
    of_logits,
    of_states,
)
from tests.vision.test_tokens import loaded, recorded, shaken

FAMILY = "qwen2_5_vl"
SHARES = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)


def told(*extra, **options):
    return of_logits(SHARES.log(), torch.tensor([0]), set(extra), InnerOptions(**options))


def test_statistics_of_three_tokens_by_hand():
    found = told("entropy", "sum_p2", "sum_p3", "top_k_ids", "top_k_logp", top_k=2)
    assert found["logp"].exp().item() == pytest.approx(0.7)
    assert found["entropy"].item() == pytest.approx(-sum(p * math.log(p) for p in (0.7, 0.2, 0.1)))
    assert found["sum_p2"].item() == pytest.approx(0.54) and found["sum_p3"].item() == pytest.approx(0.352)
    assert found["top_k_ids"].tolist() == [[0, 1]]
    assert found["top_k_logp"].exp().tolist() == [pytest.approx([0.7, 0.2])]


def test_a_second_temperature_by_hand():
    # temperature 2: roots; 1/2: squares
    found = told("logp_hot", "logp_cold", hot_temperature=2.0, cold_temperature=0.5)
    roots = [math.sqrt(p) for p in (0.7, 0.2, 0.1)]
    assert found["logp_hot"].exp().item() == pytest.approx(roots[0] / sum(roots))
    assert found["logp_cold"].exp().item() == pytest.approx(0.49 / 0.54)
    assert set(told("logp_hot")) == {"logp", "logp_hot"}, "what is not asked for is not computed"


def test_effective_ranks_by_hand():
    states = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    ranks = effective_ranks(states, 2)
    assert ranks.isnan().tolist() == [True, False, True, False]
    assert ranks[[1, 3]].tolist() == pytest.approx([1.0, 2.0], abs=1e-6)
    line = torch.outer(torch.arange(50.0), torch.tensor([1.0, 2.0, 3.0])) + 7
    assert effective_ranks(line, 40)[[39, 49]].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert effective_ranks(line[:1], 40).tolist() == [0.0]
    # The last step is measured too, unless the one before it was.
    assert (~effective_ranks(line[:41], 40).isnan()).nonzero()[:, 0].tolist() == [39]
    assert (~effective_ranks(line[:42], 40).isnan()).nonzero()[:, 0].tolist() == [39, 41]
    wide = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals((wide - wide.mean(0)).double())
    share = values / values.sum()
    assert effective_ranks(wide, 99)[-1].item() == pytest.approx(
        float((-(share * share.log()).sum()).exp()), rel=1e-6
    )


def test_states_of_rows_of_different_lengths():
    hidden = torch.tensor([[[1.0, 0], [3, 4], [0, 0]], [[2.0, 0], [9, 9], [9, 9]]], requires_grad=True)
    found = of_states(hidden, torch.tensor([3, 1]), OF_STATES, InnerOptions(rank_stride=2))
    assert found["hidden"] is hidden
    assert found["hidden_sq_norm"][0].tolist() == [1, 25, 0] and not found["hidden_sq_norm"].requires_grad
    assert found["effective_rank"][0, 1].item() == pytest.approx(1.0, abs=1e-6)
    assert found["effective_rank"][1, 0] == 0 and found["effective_rank"][1, 1:].isnan().all()
    assert of_states(hidden, torch.tensor([3, 1]), {"entropy"}) == {}


# ---- on a small model


def test_a_policy_tells_what_its_model_computes(checkpoint):
    policy = shaken(loaded(checkpoint, dtype="float64", top_k=3, rank_stride=2))
    batch = recorded(policy, FAMILY)
    plain = policy(batch)
    assert plain.extra == {}
    output = policy(batch, policy.outputs - {"divergence"})
    torch.testing.assert_close(output.logp, plain.logp)
    width = output.extra["hidden"].shape[-1]
    head, inside = policy.model.get_output_embeddings(), batch.mask > 0
    logits = head(output.extra["hidden"])[inside].double()
    logits = logits.index_fill(-1, torch.tensor(policy.prompt_encoder.placeholders), -torch.inf)
    logp = logits.log_softmax(-1)
    ids = batch.steps.ids[inside]
    torch.testing.assert_close(output.logp[inside], logp.gather(-1, ids[:, None])[:, 0])
    torch.testing.assert_close(output.extra["sum_p2"][inside], logp.exp().square().sum(-1))
    torch.testing.assert_close(output.extra["top_k_logp"][inside], logp.topk(3).values)
    hot = (logits / 1.2).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(output.extra["logp_hot"][inside], hot)
    norms = output.extra["hidden"].square().sum(-1)
    torch.testing.assert_close(output.extra["hidden_sq_norm"], norms)
    assert output.extra["hidden"].shape == (*batch.mask.shape, width)
    assert output.extra["hidden"].requires_grad and not output.extra["logp_hot"].requires_grad
    ranks = output.extra["effective_rank"]
    assert (~ranks[inside].isnan()).sum() > 0 and ranks.shape == batch.mask.shape
