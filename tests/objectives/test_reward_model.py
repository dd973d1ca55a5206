"""Bradley-Terry: worked numbers, TRL's own loss, ties of Rao and Kupper, labels."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.pairs import pairs_with_ties
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch, StepOutput
from mmrl.objectives.reward_model import BradleyTerry
from tests.support.tables import NAN, reward_table, step_table

SCORES = [2.0, -1.0, 0.5, 0.25, -3.0, 1.0]  # three pairs, the better answer first
CLOSE = {"rel": 1e-6, "abs": 1e-6}


def batch_of(scores=SCORES, advantage=(1, -1) * 3, notes=None, label="score"):
    rows = len(scores)
    _, batch = step_table(
        [[0.0]] * rows, advantage=list(advantage)[:rows], group=[i // 2 for i in range(rows)]
    )
    column = {name: torch.tensor(note)[:, None] for name, note in (notes or {}).items()}
    score = torch.tensor(scores, dtype=torch.float64)[:, None].requires_grad_()
    new = StepOutput(torch.zeros(rows, 1, dtype=torch.float64), {label: score})
    return new, batch.replace(notes={**batch.notes, **column})


def loss_of(new: StepOutput, batch: Batch, **options) -> float:
    objective = BradleyTerry(**options)
    return objective(new, batch.replace(weight=objective.weigh(batch)))[0].item()


def test_the_loss_is_the_mean_over_pairs():
    # log(1 + e^-3), log(1 + e^-.25), log(1 + e^4)
    wanted = (0.0485873516 + 0.5759394198 + 4.0181499279) / 3
    new, batch = batch_of()
    assert loss_of(new, batch) == pytest.approx(wanted, **CLOSE)
    metrics = BradleyTerry()(new, batch)[1]
    assert metrics["rewards/chosen"] == pytest.approx((2 + 0.5 - 3) / 3)
    assert metrics["rewards/rejected"] == pytest.approx((-1 + 0.25 + 1) / 3)
    assert metrics["rewards/margins"] == pytest.approx((3 + 0.25 - 4) / 3)
    assert metrics["rewards/accuracies"] == pytest.approx(2 / 3)


def test_the_order_of_rows_does_not_matter():
    new, batch = batch_of()
    turned, other = batch_of([-1.0, 2.0, 0.25, 0.5, 1.0, -3.0], (-1, 1) * 3)
    assert loss_of(new, batch) == pytest.approx(loss_of(turned, other))


def test_scores_are_centred():
    # .1 ((2 - 1)^2 + (.5 + .25)^2 + (-3 + 1)^2) / 3
    new, batch = batch_of()
    added = loss_of(new, batch, center_rewards_coefficient=0.1) - loss_of(new, batch)
    assert added == pytest.approx(0.1 * (1 + 0.5625 + 4) / 3, **CLOSE)


def trl_loss(margin=None, coefficient=None):
    """Send the same scores through the loss of TRL's RewardTrainer."""
    from collections import defaultdict
    from types import SimpleNamespace

    trl = pytest.importorskip("trl")
    logits = torch.tensor(SCORES[::2] + SCORES[1::2], dtype=torch.float64)[:, None]
    same = lambda value: value
    own = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=coefficient),
        accelerator=SimpleNamespace(gather=same, gather_for_metrics=same),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )

    class Model:
        training = True

        def __call__(self, **inputs):
            return SimpleNamespace(logits=logits)

    inputs = {"attention_mask": torch.ones(6, 1)}
    inputs |= {} if margin is None else {"margin": torch.tensor(margin, dtype=torch.float64)}
    return float(trl.RewardTrainer.compute_loss(own, Model(), inputs))


@pytest.mark.slow
@pytest.mark.parametrize("margin", [None, [0.5, 2.0, -1.0]])
@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_the_loss_is_that_of_trl(margin, coefficient):
    halves = [sign * m / 2 for m in margin or [] for sign in (1, -1)]
    new, batch = batch_of(notes={"reward/margin": halves} if margin else None)
    ours = loss_of(
        new, batch, margin="margin" if margin else "", center_rewards_coefficient=coefficient or 0.0
    )
    assert ours == pytest.approx(trl_loss(margin, coefficient), **CLOSE)


def test_wins_losses_and_ties_of_rao_and_kupper_have_probability_1():
    gap, width = 0.7, 0.4
    win, lose, tie = (
        math.exp(-loss_of(*batch_of([gap, 0.0], advantage), tie_threshold=width))
        for advantage in ((1, -1), (-1, 1), (0, 0))
    )
    assert win + lose + tie == pytest.approx(1.0, **CLOSE)
    # pi_1 / (pi_1 + theta pi_2)
    assert win == pytest.approx(math.exp(gap) / (math.exp(gap) + math.exp(width)), **CLOSE)


def test_a_tie_teaches_equal_scores_or_without_a_threshold_nothing():
    new, batch = batch_of([0.7, 0.0], (0, 0))
    assert loss_of(new, batch) == 0
    loss = BradleyTerry(tie_threshold=0.4)(new, batch)[0]
    slope = torch.autograd.grad(loss, new.extra["score"])[0][:, 0]
    assert slope[0] > 0 and slope[0] == -slope[1]


def test_a_label_has_its_own_better_answer_and_may_be_missing():
    notes = {"reward/safe": [0.0, 1.0, 2.0, 2.0, NAN, NAN]}
    new, batch = batch_of(notes=notes, label="score/safe")
    # The first pair is turned, the second is a tie, the third has no label: log(1 + e^3) / 3
    assert loss_of(new, batch) == pytest.approx(math.log1p(math.exp(3)) / 3, **CLOSE)
    metrics = BradleyTerry()(new, batch)[1]
    assert metrics["rewards/accuracies/safe"] == pytest.approx((0 + 0.5 + 0.5) / 3)


def test_labels_are_averaged():
    new, batch = batch_of(notes={"reward/safe": [1.0, 0.0] * 3}, label="score/safe")
    both = StepOutput(new.logp, {**new.extra, "score/good": 2 * new.extra["score/safe"]})
    noted = batch.replace(notes={**batch.notes, "reward/good": batch.notes["reward/safe"]})
    doubled = StepOutput(new.logp, {"score": both.extra["score/good"]})
    wanted = (loss_of(new, batch) + loss_of(doubled, batch)) / 2
    assert loss_of(both, noted) == pytest.approx(wanted, **CLOSE)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="a reward called 'safe', which the run does not have; it has good"):
        loss_of(*batch_of(notes={"reward/good": [1.0, 0.0] * 3}, label="score/safe"))
    with pytest.raises(ValueError, match="'margin' is missing for some pairs"):
        loss_of(*batch_of(notes={"reward/margin": [NAN] * 6}), margin="margin")
    new, batch = batch_of()
    with pytest.raises(ValueError, match="learns from pairs, but a group has 6 rows"):
        loss_of(new, batch.replace(group=torch.zeros(6, dtype=torch.int64)))


def test_a_blank_row_of_a_process_without_pairs_gives_a_gradient_of_0():
    new, batch = batch_of([0.7, 0.0])
    loss, _ = BradleyTerry()(StepOutput(new.logp[:1], {"score": new.extra["score"][:1]}), batch.blank())
    assert loss == 0
    assert not torch.autograd.grad(loss, new.extra["score"])[0].any()


def two_groups(*rewards: float) -> RewardTable:
    return reward_table(list(rewards), group=[0, 0, 1, 1], length=[1] * 4)


def test_ties_are_kept_and_rewards_are_noted():
    table = pairs_with_ties(two_groups(1.0, 3.0, 2.0, 2.0))
    assert table.values[:, 0, 0].tolist() == [-1, 1, 0, 0]
    assert table.learn.all()
    (note,) = (table.notes[name] for name in table.notes if name.startswith("reward/"))
    assert note[:, 0].tolist() == [1, 3, 2, 2]


def test_of_a_larger_group_the_best_and_the_worst_are_a_pair():
    table = pairs_with_ties(reward_table([1.0, 5.0, 3.0], group=[0] * 3, length=[1] * 3))
    assert table.values[:, 0, 0].tolist() == [-1, 1, 0]
    assert table.learn[:, 0].tolist() == [True, True, False]
