"""A script of TRL and its port: the same rewards, advantages, losses and gradients on the same completions.

TRL's side is written down from its published formulas, on the arguments themselves; this side goes through
`translate`, the rewards, the advantage chain, the step table and the objective of a run.
"""

from __future__ import annotations

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.step_table import spread
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.training.method import through_chain
from mmrl.training.score import score
from mmrl.trl.translation import translate
from tests.support.tables import padded, step_table
from tests.support.toys import plan

GROUP = 4
LENGTHS = [3, 5, 2, 6, 1, 4, 4, 3]  # two groups of four completions
TEXTS = ["12", "3", "", "4567", "1", "12", "123", "1234"]
CUT = [False, True, False, False, False, False, True, False]  # at the length limit
DEFAULTS = {
    "loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "scale_rewards": "group", "max_completion_length": 512, "importance_sampling_level": "token",
    "use_bias_correction_kl": True, "mask_truncated_completions": False, "reward_weights": [1.0, 1.0],
    "multi_objective_aggregation": "sum_then_normalize", "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "off_policy_mask_threshold": None,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
MASKED = {"beta": 0.04, "epsilon": 0.1, "epsilon_high": 0.28, "mask_truncated_completions": True}
CASES = [
    *({"loss_type": loss} for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")),
    *({"loss_type": loss, **MASKED} for loss in ("grpo", "dr_grpo", "dapo", "bnpo")),
    *({"loss_type": "grpo", "scale_rewards": scale} for scale in ("batch", "none", True, False)),
    {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.3, 2.0]},
    {"loss_type": "dapo", "beta": 0.5, "use_bias_correction_kl": False, "delta": 1.3},
    {"loss_type": "dr_grpo", "max_completion_length": 7, "reward_weights": [0.5, 0.0]},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "mask_truncated_completions": True},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "vespo_k_neg": 1.5, "vespo_lambda_pos": 1.0, "beta": 0.04},
    {"loss_type": "grpo", "off_policy_mask_threshold": 0.03, "beta": 0.04},
    {"loss_type": "vespo", "off_policy_mask_threshold": 0.03},
]


def characters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def first_is_one(completions, **kwargs):
    return [None if not text else float(text[0] == "1") for text in completions]


FUNCTIONS = [characters, first_is_one]


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    """Log-probabilities (8, 6) in float64, negative; zero after the end of every completion."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(-scale * torch.rand(n, generator=generator, dtype=torch.float64)).tolist() for n in LENGTHS]
    return padded(rows)


LOGP = drawn(0)
OLD, REF = LOGP + drawn(1, 0.3) + 0.15 * (LOGP < 0), LOGP + drawn(2, 0.5)
MASK = padded([[1.0] * n for n in LENGTHS])


# ---- TRL's side


def advantages_of_trl(a) -> torch.Tensor:
    """Advantages (8,) of the rewards, as GRPOTrainer computes them."""
    columns = [[torch.nan if r is None else r for r in f(TEXTS)] for f in FUNCTIONS]
    rewards = torch.tensor(columns, dtype=torch.float64).T  # (8, 2)
    weights = torch.tensor(a["reward_weights"], dtype=torch.float64)
    if a["multi_objective_aggregation"] == "normalize_then_sum":
        grouped = rewards.view(-1, GROUP, 2)
        spread_of = torch.stack([nanstd(group, 0) for group in grouped])[:, None]
        normal = ((grouped - grouped.nanmean(1, keepdim=True)) / (spread_of + 1e-4)).view(-1, 2)
        total = (normal * weights).nansum(1)
        return (total - total.mean()) / (total.std() + 1e-4)
    total = (rewards * weights).nansum(1)
    grouped = total.view(-1, GROUP)
    away = (grouped - grouped.mean(1, keepdim=True)).flatten()
    scale = {True: "group", False: "none"}.get(a["scale_rewards"], a["scale_rewards"])
    if scale == "none":
        return away
    deviation = total.std() if scale == "batch" else grouped.std(1).repeat_interleave(GROUP)
    return away / (deviation + 1e-4)


def nanstd(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Standard deviation over what is not NaN, with n - 1."""
    away = values - values.nanmean(dim, keepdim=True)
    return (away.square().nansum(dim) / ((~values.isnan()).sum(dim) - 1)).sqrt()


def loss_of_trl(a, logp: torch.Tensor) -> torch.Tensor:
    """The loss of one optimizer step with one micro-batch, as GRPOTrainer computes it."""
    advantage, mask = advantages_of_trl(a)[:, None], MASK.clone()
    if a["mask_truncated_completions"]:
        mask[torch.tensor(CUT)] = 0.0
    weight = logp - OLD
    if a["importance_sampling_level"] == "sequence":
        weight = ((weight * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    ratio, low = weight.exp(), a["epsilon"]
    high = low if a["epsilon_high"] is None else a["epsilon_high"]
    if a["loss_type"] == "cispo":
        loss = -ratio.clamp(max=high).detach() * advantage * logp
    elif a["loss_type"] == "sapo":
        # `where` of two Python numbers would be float32.
        heat = torch.full_like(advantage, a["sapo_temperature_neg"])
        heat[advantage > 0] = a["sapo_temperature_pos"]
        loss = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
    elif a["loss_type"] == "vespo":
        log_w = ((logp - OLD) * mask).sum(-1, keepdim=True).detach()
        good = advantage >= 0
        k, decay = (
            torch.where(good, *(torch.tensor(a[f"vespo_{part}_{side}"]).double() for side in ("pos", "neg")))
            for part in ("k", "lambda")
        )
        loss = -(decay + k * log_w - decay * log_w.exp()).exp() * advantage * logp
    else:
        free = ratio if a["delta"] is None else ratio.clamp(max=a["delta"])
        loss = -torch.min(free * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if a["off_policy_mask_threshold"] is not None:
        drift = ((OLD - logp.detach()) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        loss = loss * ((advantage >= 0) | (drift <= a["off_policy_mask_threshold"]))
    if a["beta"]:
        kl = (REF - logp).exp() - (REF - logp) - 1
        loss = loss + a["beta"] * kl * (ratio if a["use_bias_correction_kl"] else 1.0)
    rows, length = (loss * mask).sum(-1), mask.sum(-1)
    losses = {
        "grpo": (rows / length.clamp(min=1)).mean(),
        "sapo": (rows / length.clamp(min=1)).mean(),
        "dr_grpo": rows.sum() / (len(rows) * a["max_completion_length"]),
        "luspo": rows.mean(),
    }
    return losses.get(a["loss_type"], rows.sum() / length.sum())


# ---- this side


def configuration(arguments) -> Config:
    """The port: a method's file, a plan, and what the arguments translate to."""
    rewards = [f"{__name__}:{function.__name__}" for function in FUNCTIONS]
    base = merge(read("methods/grpo/grpo.yaml"), plan("x", rewards=rewards, objective={"penalty": []}))
    base["rollout"]["engine"] = ["vision.generate"]
    return parse(merge(base, translate(arguments, base)), Config)


def rollouts() -> tuple[Trajectory, ...]:
    rows = []
    for i, (text, length, cut) in enumerate(zip(TEXTS, LENGTHS, CUT, strict=True)):
        prompt = Prompt(f"p{i // GROUP}", (Message("user", (Part("?"),)),))
        outcome = Outcome(text=text, end=length, tags={"finish": "length" if cut else "stop"})
        rows.append(Trajectory(prompt, prompt.uid, (outcome,), None, length))
    return tuple(rows)


def ours(arguments):
    """Advantages (8,), the loss and its gradient (8, 6)."""
    config, pieces = configuration(arguments), Pieces(Stream())
    table = score(pieces.make_field(config, "rewards"), rollouts())
    credit = through_chain(pieces.make_field(config, "advantage"), table, 0)
    objective = pieces.make_field(config, "objective")
    kept = credit.learn.any(-1)
    rows = [[float(x) for x in row[:n]] for row, n in zip(LOGP, LENGTHS, strict=True)]
    others = {
        name: [row[:n].tolist() for row, n, keep in zip(logp, LENGTHS, kept, strict=True) if keep]
        for name, logp in (("old", OLD), ("ref", REF))
    }
    new, batch = step_table([row for row, keep in zip(rows, kept, strict=True) if keep], **others)
    batch = spread(credit.select(kept), batch).replace(drawn=float(len(table)))
    batch = batch.replace(totals=batch.count())
    loss, _ = objective(new, batch.replace(weight=objective.weigh(batch)))
    slope = torch.zeros_like(LOGP)
    found = torch.autograd.grad(loss, new.logp)[0]
    slope[kept] = torch.nn.functional.pad(found, (0, LOGP.shape[1] - found.shape[1]))
    return credit.values[:, 0, 0], loss, slope


@pytest.mark.parametrize("arguments", CASES, ids=lambda a: "-".join(map(str, a.values())))
def test_a_port_has_the_advantages_the_loss_and_the_gradient_of_its_script(arguments):
    a = {**DEFAULTS, **arguments}
    advantage, loss, slope = ours(arguments)
    assert torch.allclose(advantage, advantages_of_trl(a), rtol=1e-6, atol=1e-9)
    logp = LOGP.clone().requires_grad_()
    wanted = loss_of_trl(a, logp)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6, abs=1e-9)
    assert torch.allclose(slope, torch.autograd.grad(wanted, logp)[0], rtol=1e-5, atol=1e-7)
