"""Advantage functions that leave rows or steps out of training, or value every step or outcome by itself."""

from __future__ import annotations

import torch

from mmrl.advantages.notes import hole_places, holes, noted
from mmrl.config.ranges import NonNegativeFloat, Probability, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import ABSENT, NAN, RewardTable, name_id, place_of_steps


@advantage(notes={"entropy"})
def high_entropy(table: RewardTable, *, top: Probability = 0.2) -> RewardTable:
    """Keep the advantages of the fraction `top` of steps with the highest entropy (arXiv 2506.01939).

    The quantile is over all sampled steps of the batch. Other steps get advantage 0, but the loss still
    averages over them. Our reading: steps without a recorded entropy (demonstrations) keep their advantage.
    """
    table = per_step(table)
    entropy = noted(table, "entropy")
    ranked = table.present & ~entropy.isnan()
    if not ranked.any():
        return table
    cutoff = entropy[ranked].quantile(1 - top)
    kept = ~ranked | (entropy >= cutoff)  # the comparison is False for NaN
    return table.put(torch.where(kept[:, None], table.values, 0.0))


@advantage
def drop_truncated(table: RewardTable, *, finish: tuple[str, ...] = ("length",)) -> RewardTable:
    """Drop answers that were cut at the length limit (DAPO's overlong filter).

    Their rewards still count in the mean and standard deviation of the group. This is TRL's
    `mask_truncated_completions`.

    Args:
        finish: Values of the tag `finish` that count as cut; conversations with tools can also end with
            `turns`, `images` or `tool_error`.
    """
    if "finish" not in table.ids:
        return table
    ends = torch.tensor([name_id(word) for word in finish], dtype=torch.int64)
    cut = torch.isin(table.ids["finish"], ends).any(-1, keepdim=True)  # (N, 1): whether the row was cut
    return table.replace(learn=table.learn & ~cut)


@advantage
def drop_zero(table: RewardTable, *, atol: NonNegativeFloat = 0.0) -> RewardTable:
    """Drop rows whose advantage is 0 at every step (Flow-GRPO, arXiv 2505.05470).

    Penalties do not apply to dropped rows. An advantage of at most `atol` counts as 0 (LOOP, arXiv
    2502.01600: 0.01).
    """
    moved = (table.valid & (table.values.abs() > atol)).any((1, 2))
    return table.replace(learn=table.learn & moved[:, None])


@advantage
def per_step(table: RewardTable) -> RewardTable:
    """Expand the table to one entry per step (N, R, T): later functions average over steps, not answers.

    A step gets the values of the first outcome that ends after it, or of the last outcome. Steps that the
    policy did not choose have no reward and no label.
    """
    steps = table.longest
    places = place_of_steps(table.ends, steps)
    ends = torch.arange(1, steps + 1).expand(len(table), -1)
    ends = torch.where(ends <= table.length[:, None], ends, ABSENT)  # (N, T): 1, 2, ..., then ABSENT
    values = table.values.gather(2, places[:, None].expand(-1, len(table.names), -1))
    by_step, hole = table.take(places, values, ends), holes(table, steps)
    return by_step.replace(
        valid=by_step.valid & ~hole[:, None],
        scored={name: column.masked_fill(hole, NAN) for name, column in by_step.scored.items()},
    )


@advantage(turns=True)
def returns(table: RewardTable, *, gamma: Probability = 1.0, by: Tags = ()) -> RewardTable:
    """Replace rewards by returns: the discounted sum from every outcome to the end of its row.

    Rows without any reward, and steps that the policy did not choose, have no return.

    Args:
        gamma: Discount of the next outcome.
        by: Tags that later outcomes must share, such as `role` for returns per player.
    """
    rewards = torch.where(table.valid, table.values, 0.0)
    nothing = torch.zeros_like(rewards[..., 0]) if rewards.shape[2] else rewards.sum(-1)  # 0: no later return
    alike = table.index(("row", *by)) if by else table.ids["row"]
    summed = []
    for place in reversed(range(rewards.shape[2])):
        carried = nothing
        if by and summed:
            later = torch.stack(summed[::-1], -1)  # returns of all outcomes after this one
            same = (alike[:, place + 1 :] == alike[:, place, None]) & table.present[:, place + 1 :]
            following = same.long().argmax(-1)[:, None, None].expand(-1, len(table.names), 1)
            carried = torch.where(same.any(-1, keepdim=True), later.gather(2, following)[..., 0], 0.0)
        elif summed:
            carried = summed[-1]
        summed.append(rewards[..., place] + gamma * carried)  # G_k = r_k + gamma G_(k+1)
    values = torch.stack(summed[::-1], -1) if summed else rewards
    credited = table.present & ~hole_places(table)
    return table.replace(values=values, valid=credited[:, None] & table.valid.any(-1, keepdim=True))


@advantage(turns=True)
def increments(table: RewardTable, *, of: tuple[str, ...] = ()) -> RewardTable:
    """Replace a row's rewards after K prefixes of the answer by the K - 1 differences between neighbours.

    Each prefix is an outcome. A difference exists only if the reward applies to both outcomes. `of` names the
    rewards to replace by their changes (empty: all). All other rewards then apply only to the last outcome of
    a row.
    """
    unknown = [name for name in of if name not in table.names]
    if unknown:
        raise ValueError(
            f"the chain has no reward called '{unknown[0]}' here; it has {', '.join(table.names)}"
        )
    credit = table.after_first(table.values.diff(dim=-1))  # valid if the later outcome is valid
    changed = torch.tensor([not of or name in of for name in table.names], dtype=torch.bool)[:, None]
    both = table.valid[..., 1:] & table.valid[..., :-1]
    answer = table.valid[..., 1:] & (torch.arange(1, table.ends.shape[1]) == table.last[:, None])[:, None]
    if not both.shape[-1]:
        return credit
    return credit.replace(
        values=torch.where(changed, credit.values, table.values[..., 1:]),
        valid=torch.where(changed, both, answer),
    )
