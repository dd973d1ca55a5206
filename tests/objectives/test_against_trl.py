"""Losses and metrics of comparisons against TRL's own, on the same log-probabilities. Wants TRL 1.x; without
it these tests are skipped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.objectives.test_comparison import told
from tests.support.tables import padded, step_table

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

LENGTHS = [3, 5, 4, 2, 1, 4]  # chosen and rejected of three pairs
PAIRS = [(0, 1), (2, 3), (4, 5)]
CLOSE = {"rel": 1e-9, "abs": 1e-9}


def drawn(seed: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [(-3 * torch.rand(n, generator=generator, dtype=torch.float64)).tolist() for n in LENGTHS]


LOGP, REF = drawn(0), drawn(1)


def ours(**pieces):
    """Give loss and metrics of this side."""
    new, batch = step_table(LOGP, advantage=[1, -1] * 3, group=[0, 0, 1, 1, 2, 2], ref=REF)
    return told(new, batch, **pieces)


def halves(rows) -> Tensor:
    """Lay rows out as TRL does: all chosen, then all rejected."""
    table = padded(rows)
    return table[[pair[0] for pair in PAIRS] + [pair[1] for pair in PAIRS]]


class Quiet:
    device = torch.device("cpu")

    def gather(self, value):
        return value

    gather_for_metrics = gather


def theirs(kinds, beta, weights=None, **settings):
    """Send the same numbers through TRL's own loss."""
    from collections import defaultdict

    from trl.trainer.dpo_trainer import DPOTrainer

    logp, ref = halves(LOGP), halves(REF)
    # A token of the prompt stands before every answer; it is no part of it.
    mask = torch.cat([torch.zeros(len(logp), 1), (halves([[1.0] * n for n in LENGTHS]) > 0).float()], 1)
    said = SimpleNamespace(
        log_probs=logp,
        entropy=torch.zeros_like(logp),
        mean_logits=torch.zeros_like(logp),
        is_top1=torch.zeros_like(logp).bool(),
    )
    model = lambda **inputs: said
    model.training = True
    trainer = SimpleNamespace(
        model=model, accelerator=Quiet(), aux_loss_enabled=False, precompute_ref_logps=True,
        beta=beta, loss_types=kinds, use_weighting=False,
        loss_weights=weights or [1.0] * len(kinds), _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1,
        **{"label_smoothing": 0.0, "ld_alpha": None, "f_divergence_type": "reverse_kl", **settings},
    )  # fmt: skip
    if trainer.ld_alpha is not None:  # TRL weighs the reference where it computes it, before its loss
        shared = torch.minimum(*mask.sum(1).chunk(2)).repeat(2)
        ref = torch.where(mask[:, 1:].cumsum(1) > shared[:, None], trainer.ld_alpha * ref, ref)
    chosen, rejected = ref.sum(-1).chunk(2)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask.long()}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    return float(loss), {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(
    ("name", "kind", "options", "settings"),
    [
        ("sigmoid", "sigmoid", {}, {}),
        ("sigmoid_each", "sigmoid", {}, {}),
        ("hinge", "hinge", {}, {}),
        ("ipo", "ipo", {}, {}),
        ("robust", "robust", {"label_smoothing": 0.2}, {"label_smoothing": 0.2}),
        ("bco_pair", "bco_pair", {}, {}),
        ("nca_pair", "nca_pair", {}, {}),
        ("apo_zero", "apo_zero", {}, {}),
        ("apo_down", "apo_down", {}, {}),
        ("sppo_hard", "sppo_hard", {}, {}),
        ("exo_pair", "exo_pair", {"label_smoothing": 0.01}, {"label_smoothing": 0.01}),
        ("discopop", "discopop", {"tau": 0.2}, {"args": SimpleNamespace(discopop_tau=0.2)}),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_losses_and_metrics_are_trls(name, kind, options, settings, beta):
    loss, metrics = ours(implicit_reward="log_ratio", compare=[{"name": name, "beta": beta, **options}])
    wanted, reported = theirs([kind], beta, **settings)
    close = {"rel": 1e-7} if kind == "exo_pair" else CLOSE  # its share of errors is float32 there
    assert float(loss.detach()) == pytest.approx(wanted, **close)
    for metric in ("chosen", "rejected", "margins", "accuracies"):
        name = f"rewards/{metric}"
        assert float(metrics[name]) == pytest.approx(reported[name], rel=1e-6), metric


def test_means_of_log_ratios_are_trls_normalised_dpo():
    loss, _ = ours(implicit_reward="mean_log_ratio", compare=[{"name": "sigmoid", "beta": 0.7}])
    assert float(loss.detach()) == pytest.approx(theirs(["sigmoid_norm"], 0.7)[0], **CLOSE)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize(
    ("divergence", "type_there"), [("forward_kl", "forward_kl"), ("js", "js_divergence")]
)
def test_f_divergences_are_trls(kind, divergence, type_there):
    """That of `alpha` takes no float64 there."""
    reward = {"name": "f_divergence", "divergence": divergence}
    loss, _ = ours(implicit_reward=reward, compare=[{"name": kind, "beta": 0.7}])
    wanted, _ = theirs([kind], 0.7, f_divergence_type=type_there)
    assert float(loss.detach()) == pytest.approx(wanted, **CLOSE)


@pytest.mark.parametrize("ld_alpha", [0.0, 0.3, 1.0])
def test_the_shorter_tail_is_trls(ld_alpha):
    reward = {"name": "ld_log_ratio", "ld_alpha": ld_alpha}
    loss, _ = ours(implicit_reward=reward, compare=[{"name": "sigmoid", "beta": 0.7}])
    assert float(loss.detach()) == pytest.approx(theirs(["sigmoid"], 0.7, ld_alpha=ld_alpha)[0], **CLOSE)


def test_mpo_is_trls_mixture_where_answers_are_equally_long(monkeypatch):
    """TRL imitates by a mean over all tokens, we by means over every answer; and TRL has no shift."""
    for name, values in (("LENGTHS", [3] * 6), ("LOGP", drawn(0)), ("REF", drawn(1))):
        monkeypatch.setitem(
            globals(), name, values if name == "LENGTHS" else [row[:3] for row in three(values)]
        )
    loss, _ = ours(
        implicit_reward="log_ratio",
        compare=[{"name": "sigmoid", "weight": 0.8}, {"name": "bco_pair", "weight": 0.2}],
        penalty=[{"name": "sft", "coef": 1.0}],
        aggregation="group_mean",
    )
    wanted, _ = theirs(["sigmoid", "bco_pair", "sft"], 0.1, [0.8, 0.2, 1.0])
    assert float(loss.detach()) == pytest.approx(wanted, **CLOSE)


def three(rows):
    """Make every row three tokens long."""
    return [(row * 3)[:3] for row in rows]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.7)])
@pytest.mark.parametrize("level", [0.4, -0.4])
def test_kto_is_trls(weights, level):
    from collections import defaultdict

    from trl.trainer.kto_trainer import KTOTrainer

    logp, ref = padded(LOGP), padded(REF)
    mask = torch.cat([torch.zeros(6, 1), (padded([[1.0] * n for n in LENGTHS]) > 0).float()], 1).long()
    said = SimpleNamespace(log_probs=logp, entropy=torch.zeros_like(logp), mean_logits=torch.zeros_like(logp))
    said.is_top1 = torch.zeros_like(logp).bool()
    model = lambda **inputs: said
    model.training = True
    # Of unrelated answers: their mean log-ratio is the level.
    unrelated, known = torch.full((6,), -2.0 + level), torch.full((6,), -2.0)
    trainer = SimpleNamespace(
        model=model, accelerator=Quiet(), aux_loss_enabled=False, precompute_ref_logps=True,
        calculate_KL=True, beta=0.5, loss_type="kto",
        desirable_weight=weights[0], undesirable_weight=weights[1],
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        _compute_kl_logps=lambda model, batch: unrelated,
    )  # fmt: skip
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask,
        "label": torch.tensor([True, False] * 3), "ref_logps": ref.sum(-1), "ref_KL_logps": known,
    }  # fmt: skip
    wanted = float(KTOTrainer._compute_loss(trainer, model, inputs, False))
    options = {"desirable_weight": weights[0], "undesirable_weight": weights[1], "delta": 0.5 * level}
    loss, _ = ours(implicit_reward="log_ratio", compare=[{"name": "kto", "beta": 0.5, **options}])
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-6)  # the level is float32 there


def test_simpo_is_trls():
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.5, beta=2.0, label_smoothing=0.0, accelerator=Quiet()
    )
    means = torch.tensor([sum(row) / len(row) for row in LOGP], dtype=torch.float64)
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, means[::2], means[1::2])
    loss, metrics = ours(
        implicit_reward="mean_logp", compare=[{"name": "sigmoid", "beta": 2.0, "gamma": 0.5}]
    )
    assert float(loss.detach()) == pytest.approx(float(losses.mean()), **CLOSE)
    assert float(metrics["rewards/chosen"]) == pytest.approx(float(chosen.mean()), rel=1e-6)
    assert float(metrics["rewards/rejected"]) == pytest.approx(float(rejected.mean()), rel=1e-6)


@pytest.mark.parametrize(("kind", "beta"), [("sigmoid", 0.3), ("hinge", 0.3)])
def test_comparisons_without_a_reference_are_trls_cpo(kind, beta):
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(alpha=0.0, loss_type=kind, beta=beta, label_smoothing=0.0, accelerator=Quiet())
    sums = torch.tensor([sum(row) for row in LOGP], dtype=torch.float64)
    losses, _, _ = CPOTrainer.cpo_loss(trainer, sums[::2], sums[1::2])
    loss, _ = ours(implicit_reward="logp", compare=[{"name": kind, "beta": beta}])
    assert float(loss.detach()) == pytest.approx(float(losses.mean()), **CLOSE)
