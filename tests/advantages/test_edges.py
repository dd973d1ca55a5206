"""What every piece of the chain withstands."""

from __future__ import annotations

import inspect

import pytest
import torch

from mmrl.advantages.normalize import group_center
from mmrl.advantages.shape import total
from mmrl.config.registry import pieces
from mmrl.core.reward_table import name_id
from mmrl.core.rng import Stream
from tests.support.examples import required_options
from tests.support.tables import reward_table

ADVANTAGES = pieces("advantage")


def apply(entry, table, **more):
    # "value" is the default of `value_anchor`: a label that another piece records.
    options = required_options(entry, "reward")  # the only reward and label there is
    options |= {name: "reward" for name, parameter in entry.options.items() if parameter.default == "value"}
    if "stream" in entry.options:
        options["stream"] = Stream(3)
    if "advantage" in entry.options:  # a chain inside
        options |= {"advantage": (total,), **({"of": ("reward",)} if "of" in entry.options else {})}
    if "outcome" in entry.options:  # whose bonus must stay under the gaps of the outcomes
        options = {"of": "near", "outcome": "reward", "alpha": 1e-3}
        table = table.replace(scored={**table.scored, "near": torch.sigmoid(table.scored["reward"])})
    if "size" in entry.options:  # a set is smaller than the groups here
        options["size"] = 1
    if "where" in options:
        options |= {"where": {"stage": "stage"}, "advantage": (group_center,)}  # the tags hold their names
    options |= more
    if inspect.isclass(entry.target):
        return entry.target(**options)(table)
    return entry.target(table, **options)


def table_of(rewards, **columns):
    """Build a table with every note and tag that a piece reads."""
    table = reward_table(rewards, **columns)
    steps = int(table.length.max())
    numbers = torch.arange(len(table) * steps, dtype=torch.float64).view(len(table), steps)
    table = table.replace(ids={**table.ids, "greedy": 1 - table.ids["row"] % 2})
    noted = {"entropy": 1, "token": 1, "node": 1, "logp": -1, "ref/logp": -2}
    noted |= {"prm/logp": -1.5, "critic/value": 0.1, "verifier/value": 0.1}
    noted |= {f"old/{name}": -1 for name in ("logp", "logp_hot", "logp_cold")}
    noted |= {f"old/{name}": 1 for name in ("hidden_sq_norm", "sum_p2", "sum_p3", "effective_rank")}
    for name, factor in noted.items():
        table = table.note(name, factor * numbers)
    table = table.note("planner/value", 0.2 * numbers).note("terminator/value", 0.3 * numbers)
    table = table.note("think", numbers % 2)
    tags = ("state", "action", "role", "stage", "part", "node", "parent")
    ids = {name: torch.where(table.present, name_id(name), 0) for name in tags}
    return table.replace(ids={**table.ids, **ids})


@pytest.mark.parametrize("entry", ADVANTAGES, ids=lambda entry: entry.full_name)
def test_a_table_that_a_filter_emptied_stays_empty(entry):
    table = table_of([[1, 0], [0, 1]]).select(torch.tensor([False, False]))
    assert len(apply(entry, table)) == 0
    assert apply(entry, table).values.shape[0] == 0


@pytest.mark.parametrize("entry", ADVANTAGES, ids=lambda entry: entry.full_name)
@pytest.mark.parametrize(
    "rewards", [[0.3], [0.1] * 3, [None, 1.0], [[1.0, 2.0], [3.0]], [50.0, -50.0]], ids=str
)
def test_values_stay_finite_at_the_edges(entry, rewards):
    table = table_of(rewards, group=range(len(rewards)))
    if entry.full_name == "asymmetric_difficulty":  # which wants a success between 0 and 1
        table = table.replace(scored={"reward": table.scored["reward"].clamp(0, 1)})
    table = apply(entry, table)
    assert table.values.isfinite().all()
    assert not (table.valid & ~table.present[:, None]).any(), "what has no outcome has no reward"


@pytest.mark.parametrize("entry", ADVANTAGES, ids=lambda entry: entry.full_name)
def test_answers_without_a_step_have_finite_values(entry):
    table = apply(entry, table_of([0.1, 0.3], length=[0, 0], ends=[[0], [0]], group=[0, 0]))
    assert len(table) == 2 and table.values[table.valid].isfinite().all()
    assert table.values.shape[2] == table.valid.shape[2] == table.ends.shape[1]


@pytest.mark.parametrize("entry", ADVANTAGES, ids=lambda entry: entry.full_name)
def test_a_missing_tag_is_named(entry):
    table = table_of([[1, 0], [0, 1]], group=[0, 0])
    plain = {name: ids for name, ids in table.ids.items() if name in ("group", "row", "on_policy", "place")}
    try:
        apply(entry, table.replace(ids=plain))
    except ValueError as error:
        assert " tag" in str(error)  # no KeyError


@pytest.mark.parametrize(
    "entry", [entry for entry in ADVANTAGES if "by" in entry.options], ids=lambda entry: entry.full_name
)
def test_a_missing_tag_of_by_is_named(entry):
    with pytest.raises(ValueError, match="no outcome has the tag 'team', which the engine or the data set"):
        read = {"center": "length"} if entry.full_name == "capped_bonus" else {}  # where it reads `by`
        apply(entry, table_of([[1, 0], [0, 1]], group=[0, 0]), by=("team",), **read)
