"""E-GRPO (arXiv 2510.24694): wrong answers earn a reward for the known entities that they mention.

Title: Repurposing Synthetic Data for Fine-grained Search Agent Supervision
Formula: reward of a wrong answer = alpha g / max g of the group, with g its share of the known entities.
Our reading: matches ignore case, articles and punctuation; alpha is unverified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.advantages.shape import column_of
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage, reward
from mmrl.core.answer_text import tagged
from mmrl.core.answers import words_of
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable, name_id
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import policy_turns


@advantage
def partial_credit(
    table: RewardTable,
    *,
    of: str,
    found: str,
    alpha: NonNegativeFloat = 0.3,
    threshold: float = 0.5,
    unless: str = "",
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Reward wrong answers for the entities that they mention (E-GRPO, arXiv 2510.24694).

    A wrong answer earns alpha g / (largest g of the group), 0 where nobody found anything. One that was cut
    at the length limit earns 0. Put it before `total`.

    Args:
        of: Name of the reward that right answers keep.
        found: Label g between 0 and 1, such as `entity_match` of weight 0.
        alpha: Reward of a wrong answer that found as much as any (0.3 is unverified).
        threshold: An answer is right above this reward.
        unless: Label that is 0 for answers of a bad format, which earn 0; empty: none.
        by: Keys that define a group.
    """
    column = column_of(table, of)
    share, value = label(table, found), table.values[:, column]
    groups = GroupStatistics(share, ~share.isnan(), table.index(by))
    most = groups.largest()
    partial = torch.where(
        groups.valid & (most > EQUAL), alpha * share.nan_to_num() / most.clamp(min=EQUAL), 0.0
    )
    earned = torch.where(value > threshold, value, partial[:, 0])
    if unless:
        earned = torch.where(label(table, unless)[:, 0] == 0, 0.0, earned)
    if "finish" in table.ids:
        earned = torch.where(table.ids["finish"] == name_id("length"), 0.0, earned)
    values = table.values.clone()
    values[:, column] = torch.where(table.valid[:, column], earned, value)
    return table.put(values)


@reward
def entity_match(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, column: str = "entities", tag: str = ""
) -> list[float | None]:
    """Return the share of the known entities that a policy names (E-GRPO, arXiv 2510.24694).

    For the label that `partial_credit` reads. All turns of a conversation count, and an entity once; with
    `at: every` a turn has what it names first. Case, articles and punctuation do not matter: our reading
    of an exact match of strings. None where the data list no entities.

    Args:
        column: Column with the list of entities.
        tag: Blocks that are searched, such as `think`; empty: the whole text.
    """

    def words(text: str) -> str:
        return f" {' '.join(words_of(text))} "

    def named(entity: str, texts: Sequence[str]) -> bool:
        return any(entity in words(" ".join(tagged(text, tag)) if tag else text) for text in texts)

    values: list[float | None] = []
    for prompt, (before, new) in zip(prompts, policy_turns(outcomes), strict=True):
        entities = [words(str(name)) for name in prompt.columns.get(column) or ()]
        found = sum(named(entity, new) and not named(entity, before) for entity in entities)
        values.append(found / len(entities) if entities else None)
    return values
