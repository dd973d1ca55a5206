"""Conversations as one row and as rows per turn: laid out, taken apart, merged, and equal through a chain."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import as_piece
from mmrl.core.episodes import join_episodes, merge_turns, of_episodes, part_episodes
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.filters import varied
from mmrl.papers.prime import mean_between
from mmrl.training.method import through_chain
from tests.support.tables import assert_rows, reward_table

# Three conversations of one prompt, of 3, 2 and 2 turns: rewards, steps of a turn, states and entropies.
GAMES = ("a", "b", "c")
REWARDS = ([0.0, 0.5, 1.0], [0.0, 0.0], [0.25, 2.0])
STEPS = ([2, 3, 1], [1, 4], [2, 2])
STATES = (["s0", "s1", "s2"], ["s0", "s1"], ["s0", "s2"])
ACTIONS = (["x", "y", "z"], ["x", "y"], ["x", "w"])
ROLES = (["A", "B", "A"], ["A", "B"], ["A", "B"])
PROBABLE = [[0.1 * (k + i) ** 2 for k in range(len(row))] for i, row in enumerate(REWARDS)]
NOISE = torch.rand(3, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def entropies(game: int) -> list[float]:
    return NOISE[game, : sum(STEPS[game])].tolist()


def one_row_each() -> RewardTable:
    """Lay the conversations out with one row each, and an outcome per turn."""
    turns = [list(map(str, range(len(row)))) for row in REWARDS]
    return reward_table(
        {"reward": REWARDS, "p": PROBABLE},
        weights={"p": 0.0},
        ends=[torch.tensor(row).cumsum(0).tolist() for row in STEPS],
        tags={"turn": turns, "state": STATES, "action": ACTIONS, "role": ROLES},
        notes={"entropy": [entropies(game) for game in range(3)]},
    )  # fmt: skip


def a_row_per_turn() -> RewardTable:
    """Lay the same conversations out with a row per turn, and the last turns first."""
    rows = [(game, turn) for game in range(3) for turn in reversed(range(len(REWARDS[game])))]
    rows = [rows[i] for i in (3, 0, 5, 1, 2, 4, 6)]

    def column(of) -> list:
        return [of[game][turn] for game, turn in rows]

    cut = [torch.tensor([0, *row]).cumsum(0).tolist() for row in STEPS]
    return reward_table(
        {"reward": column(REWARDS), "p": [PROBABLE[game][turn] for game, turn in rows]},
        weights={"p": 0.0},
        length=column(STEPS),
        tags={
            "episode": [GAMES[game] for game, _ in rows],
            "turn": [str(turn) for _, turn in rows],
            "state": column(STATES),
            "action": column(ACTIONS),
            "role": column(ROLES),
        },
        notes={"entropy": [entropies(game)[cut[game][turn] : cut[game][turn + 1]] for game, turn in rows]},
    )


def of_steps(table: RewardTable) -> dict[tuple[int, int], list[float]]:
    """List the advantages of the steps of every turn, by the number of its game and its first step."""
    found = {}
    for row in range(len(table)):
        begin = 0
        for place, end in enumerate(table.ends[row].tolist()):
            for step in range(begin, max(end, begin)):
                found[row, step] = table.values[row, 0, place].item() if table.valid[row, 0, place] else 0.0
            begin = max(end, begin)
    return found


BY_ROLE = {"name": "group_center", "by": ["group", "role"]}
CHAINS = [
    ["total", "group_normalize"],
    ["total", {"name": "leave_one_out", "by": ["group"]}, "per_step", "high_entropy"],
    ["total", {"name": "returns", "gamma": 0.9}, "group_center"],
    ["total", {"name": "returns", "by": ["role"]}, {"name": "group_center", "by": ["group", "role"]}],
    ["total", "gigpo"],
    ["total", "history_groups"],
    [{"name": "per_episode", "advantage": ["total", "group_normalize"]}, "shared_steps"],
    ["total", {"name": "information_gain", "of": "p"}, "returns", "group_center"],
    ["total", {"name": "per_episode", "by": ["role"], "advantage": [BY_ROLE]}],
    ["total", {"name": "per_episode", "advantage": ["group_normalize"]}, "episode_mean"],
    [{"name": "increments"}, "total"],
]  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_both_forms_give_every_step_the_same_advantage(chain):
    bound = [Pieces(Stream()).make("advantage", as_piece(piece, "")) for piece in chain]
    whole, parts = (through_chain(bound, table, 0) for table in (one_row_each(), a_row_per_turn()))
    expected = of_steps(whole)
    assert len(set(expected.values())) > 1, "equal zeros would show nothing"
    table = a_row_per_turn()
    order = [GAMES.index(name) for name in _names(table)]
    row_of = list(zip(order, table.ids["turn_number"][:, 0].tolist(), strict=True))
    found = {}
    for (row, step), value in of_steps(parts).items():
        game, turn = row_of[row]
        found[game, sum(STEPS[game][:turn]) + step] = value
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-12), key


def _names(table: RewardTable) -> list[str]:
    from mmrl.core.reward_table import name_id

    words = {name_id(name): name for name in GAMES}
    return [words[word] for word in table.ids["episode"][:, 0].tolist()]


def test_joined_rows_are_those_of_one_row_per_conversation():
    joined, whole = join_episodes(a_row_per_turn()), one_row_each()
    order = [_names(joined).index(name) for name in GAMES]
    joined = joined.select(torch.tensor(order))
    for name in ("values", "valid", "ends", "length", "learn"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    for name in ("turn", "turn_number", "state", "role", "place", "group"):
        assert torch.equal(joined.ids[name], whole.ids[name]), name
    assert_rows(joined.notes["entropy"], [entropies(game) for game in range(3)])
    assert torch.equal(joined.scored["p"].nan_to_num(-1), whole.scored["p"].nan_to_num(-1))


def test_what_is_joined_and_taken_apart_is_as_it_was():
    table = a_row_per_turn()
    again = part_episodes(join_episodes(table), table)
    for name in ("values", "valid", "ends", "length", "learn"):
        assert torch.equal(getattr(again, name), getattr(table, name)), name
    assert torch.equal(again.notes["entropy"].nan_to_num(-1), table.notes["entropy"].nan_to_num(-1))
    assert again.uids == table.uids


def test_tables_without_tags_are_returned_as_they_are():
    table = reward_table([[0.0, 1.0], [1.0, 0.0]])
    assert join_episodes(table) is table and part_episodes(table, table) is table
    assert table.at_end("reward").tolist() == [1.0, 0.0]  # the last place, no sum


def test_a_conversation_has_the_sum_of_its_rewards():
    merged, index = merge_turns(one_row_each())
    assert merged.values[:, 0].tolist() == [[1.5], [0.0], [2.25]]
    assert merged.ends.tolist() == [[6], [5], [4]] and index.tolist()[0] == [0, 0, 0]
    assert one_row_each().at_end("reward").tolist() == [1.5, 0.0, 2.25]


def test_turns_are_ordered_by_number_and_not_by_word():
    tags = {"episode": ["a"] * 12, "turn": [str(turn) for turn in range(12)]}
    joined = join_episodes(reward_table([float(turn) for turn in range(12)], tags=tags))
    assert joined.values[0, 0].tolist() == list(range(12))


def test_an_episode_counts_once_in_filters():
    # By rows group a has the mean 2/3, by episodes 1/2; b has a single episode, which nothing varies from.
    table = reward_table(
        [1, 1, 0, 1, 1],
        group="aaabb",
        tags={"episode": ["x", "x", "y", "z", "z"], "turn": ["0", "1", "0", "0", "1"]},
    )
    one = reward_table(
        [None, 1, 0, None, 1], group="aaabb", tags={"episode": list("xxyzz"), "turn": list("01001")}
    )
    assert of_episodes(varied, one).tolist() == [True] * 5
    assert not varied(one)[3], (
        "a row alone in its group is kept, two rows of one episode are not known to be one"
    )
    assert of_episodes(lambda t: mean_between(t, low=0.4, high=0.6), one).tolist() == [True] * 3 + [False] * 2
    assert len(join_episodes(table)) == 3
