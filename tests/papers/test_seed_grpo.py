"""SEED-GRPO: semantic entropy of a group."""

from __future__ import annotations

from mmrl.advantages.normalize import group_center
from mmrl.papers.seed_grpo import semantic_entropy
from tests.support.tables import assert_rows, reward_table

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
