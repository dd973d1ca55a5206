"""Several rewards and whole groups: DVAO, GPG, A-GRAE, ADORA, SEED-GRPO, COPO."""

from __future__ import annotations

from mmrl.advantages.baselines import group_median
from mmrl.advantages.combine import active_scale, semantic_entropy
from mmrl.advantages.normalize import group_center
from mmrl.advantages.shape import total
from tests.support.tables import assert_rows, reward_table


def test_active_scale_counts_rewards_that_are_not_zero():
    # 12 rewards, 7 of them 1
    table = reward_table([1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0], group="aaaabbbbcccc")
    found = group_center(active_scale(total(table))).values
    a, b = 1.285714, 0.857143
    assert_rows(found, [a, *[-a / 3] * 3, *[0] * 4, -b, b, b, -b])
    assert active_scale(reward_table([0, 0])).values.eq(0).all()


def test_active_scale_by_group_is_the_one_of_mc_grpo():
    table = group_median(reward_table([0, 0.2, 0.5, 0.9, 1]))
    assert_rows(active_scale(table, by=("group",)).values / table.values.where(table.values != 0, 1.0),
                [1.25, 1.25, 0, 1.25, 1.25])  # fmt: skip


LOGP = {"logp": [[-0.5], [-0.7], [-0.6], [-1.2]]}
AABC = {"reward": [1, 1, 0, 0], "cluster": [7, 7, 8, 9]}


def test_semantic_entropy_weighs_clusters_by_probability():
    table = group_center(reward_table(AABC, weights={"cluster": 0.0}, notes=LOGP))
    found = semantic_entropy(table, of="cluster", alpha=1.0)
    assert_rows(found.values, [0.294462, 0.294462, -0.294462, -0.294462])
    assert_rows(semantic_entropy(table, of="cluster").values[:1], [0.5 * 0.971716])
    x = 0.698012
    assert_rows(semantic_entropy(table, of="cluster", alpha=1.0, form="linear").values[:1], [0.5 * (1 - x)])
    found = semantic_entropy(table, of="cluster", alpha=1.0, form="exponential")
    assert_rows(found.values[:1], [0.5 * 0.497573])
    # 2 1 1 of 4: entropy .5 log 2 + .5 log 4, three quarters of log 4
    found = semantic_entropy(table, of="cluster", alpha=1.0, mass="count")
    assert_rows(found.values[:1], [0.5 / 1.75])


def test_semantic_entropy_of_one_cluster_changes_nothing_and_unparsed_answers_are_alone():
    def factors(clusters, groups="aaaa"):
        table = reward_table(
            {"reward": [1, 1, 1, 1], "cluster": clusters},
            weights={"cluster": 0.0}, group=groups, notes={"logp": [[-1.0]] * 4},
        )  # fmt: skip
        return semantic_entropy(table, of="cluster", alpha=1.0).values

    assert_rows(factors([3, 3, 3, 3]), [1] * 4)
    assert_rows(factors([None] * 4), [0.5] * 4)
    assert_rows(factors([3, 3, 3, 3], "abcd"), [1] * 4)
    assert_rows(factors([3, 3, 3, None], "aabb"), [1, 1, 0.5, 0.5])
