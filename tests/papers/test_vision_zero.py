"""Running baselines of roles, and stages that learn in turn, by the worked numbers of Vision-Zero."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import group_center
from mmrl.advantages.shape import total
from mmrl.config.binding import Pieces
from mmrl.config.loading import read
from mmrl.config.schema import as_piece
from mmrl.core.rng import Stream
from mmrl.papers.vision_zero import Alternate, RoleBaseline, for_turns
from tests.support.configs import method_file
from tests.support.tables import assert_rows, reward_table


def play_round(rewards, **tags):
    return reward_table(rewards, tags=tags)


def test_the_baseline_of_a_role_is_updated_first_and_then_subtracted():
    stream = Stream()
    piece = RoleBaseline(stream=stream)
    roles = [["spy", "c", "c", "c", "c"]]
    clues = [[-0.275, -0.00625, 0.09375, 0.09375, 0.09375]]
    table = reward_table(clues, tags={"role": roles})
    piece.observe((), table)
    found = piece(table).values[0, 0]
    assert found[0].item() == pytest.approx(-0.26125)
    assert found[1].item() == pytest.approx(-0.00625 - 0.0034375)
    stream.step += 1
    assert torch.equal(piece(table).values[0, 0], found), "nothing was observed since"
    piece.observe((), table)
    assert piece(table).values[0, 0, 0].item() == pytest.approx(-0.275 + 0.01375 * 1.95)


def test_a_baseline_corrected_for_its_start_is_the_mean_of_what_was_seen():
    stream = Stream()
    piece = RoleBaseline(bias_correction=True, stream=stream)
    first, silent, second = (
        reward_table([[reward, 1.0]], tags={"role": [["spy", role]]})
        for reward, role in ((-0.275, "c"), (None, "c"), (0.1, "c"))
    )
    piece.observe((), first)
    assert piece(first).values[0, 0].tolist() == pytest.approx([0.0, 0.0])
    for table in (silent, second):
        stream.step += 1
        piece.observe((), table)
    # Two updates of the spy: (.95 x .05 x -.275 + .05 x .1) / (1 - .95^2) = -.0080625 / .0975
    assert piece(second).values[0, 0].tolist() == pytest.approx([0.1 + 0.0826923, 0.0], abs=1e-6)
    again = RoleBaseline(bias_correction=True, stream=stream)
    again.load_state_dict(piece.state_dict())
    assert torch.equal(again(second).values, piece(second).values)


def stages_of(piece, stream, table, steps):
    """List the steps after which the stage changed."""
    changes, before = [], False
    for step in range(1, steps + 1):
        piece.observe((), table)
        stream.step += 1
        if piece.current().clue != before:
            changes.append(step)
            before = piece.current().clue
    return changes


def decisions(right):
    return reward_table([right, 0], tags={"stage": ["decide", "clue"]})


def test_stages_change_after_the_worked_number_of_collections():
    stream = Stream()
    piece = Alternate(of="reward", patience=0, stream=stream)
    assert stages_of(piece, stream, decisions(1.0), 45) == [45]
    assert piece.current().accuracy == pytest.approx(0.900560, abs=1e-6)
    # and back again, from .900560 with .4
    other = [step for step in range(1, 20) if not after(piece, stream, decisions(0.4))]
    assert other[0] == 18 and piece.at >= 0


def test_running_means_corrected_for_their_start_change_stages_as_soon_as_they_may():
    stream = Stream()
    piece = Alternate(of="reward", bias_correction=True, patience=0, stream=stream)
    assert stages_of(piece, stream, decisions(1.0), 5) == [5]
    # From 1 after five collections: after k of 0 it is .95^k (1 - .95^5) / (1 - .95^(5 + k)), which is .6 or
    # less first at k = 3 (.857375 x .226219 / .336580 = .576250; k = 2 has .676776). A stage lasts five.
    assert [after(piece, stream, decisions(0.0)) for _ in range(5)] == [True, True, True, True, False]
    piece = Alternate(of="reward", bias_correction=True, patience=0, min_stay=1, stream=(stream := Stream()))
    assert stages_of(piece, stream, decisions(1.0), 5) == [1]
    assert [after(piece, stream, decisions(0.0)) for _ in range(3)] == [True, True, False]
    again = Alternate(of="reward", bias_correction=True, patience=0, min_stay=1, stream=stream)
    again.load_state_dict(piece.state_dict())
    assert again.stage == piece.stage and again.stage.updates == 7
    assert Alternate(of="reward", bias_correction=True, stream=stream).current().accuracy == 0


def test_stages_of_a_fixed_length_alternate():
    for length, wanted in ((1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])):
        stream = Stream()
        piece = Alternate(of="reward", min_stay=length, patience=length, stream=stream)
        # step % (2 length): decisions in the first half, clues in the second
        assert stages_of(piece, stream, decisions(1.0), 6) == wanted


def after(piece, stream, table):
    piece.observe((), table)
    stream.step += 1
    return piece.current().clue


def test_patience_forces_a_change():
    stream = Stream()
    assert stages_of(Alternate(of="reward", stream=stream), stream, decisions(1.0), 20) == [20]


def test_only_the_rows_of_the_stage_are_learned_from():
    stream = Stream()
    piece = Alternate(of="reward", min_stay=1, high=0.05, patience=0, stream=stream)
    table = decisions(1.0)
    assert piece(table).learn[:, 0].tolist() == [True, False]
    piece.observe((), table)
    assert piece(table).learn[:, 0].tolist() == [True, False], "a collection changes the next one"
    stream.step += 1
    assert piece(table).learn[:, 0].tolist() == [False, True]


def test_the_stages_of_vision_zero_count_a_game_once_by_its_most_votes():
    # Of four votes two name the spy and the others one civilian each; in the other game nobody is right.
    table = reward_table(
        {"right_vote": [[1, 1, 0, 0], [0] * 4], "spy_caught": [[1] * 4, [0] * 4], "open_vote": [[0] * 4] * 2},
        tags={"stage": [["decide"] * 4] * 2},
    )
    listed = read(method_file("vision_zero"))["advantage"][-1]
    piece = Pieces(Stream()).make("advantage", as_piece(listed, "advantage")).function
    piece.observe((), table)
    piece.stream.step += 1
    # Half of the games are right, though a quarter of the votes: (1 - .95) / 2
    assert piece.current().accuracy == pytest.approx(0.025)


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


def test_turns_with_a_tag_have_a_chain_of_their_own():
    table = played([[1, 5, 3], [2, 7, 4]], stage=[["clue", "decide", "clue"]] * 2)
    found = for_turns(table, advantage=(group_center,), where={"stage": "clue"}).values[:, 0]
    assert_rows(found, [[-0.5, 5, -0.5], [0.5, 7, 0.5]])
    with pytest.raises(ValueError, match="must keep the rewards and places"):
        for_turns(table, advantage=(total,), where={"stage": "clue"})
