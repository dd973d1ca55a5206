"""Joining the rows of a multi-turn episode into one row, and splitting such a row again.

A conversation is one row with an outcome per turn (tag `turn`), or, if prompts are rewritten between turns,
several rows with the tags `episode` and `turn`. Code that compares or counts conversations works on the first
form. `join_episodes` converts the second form to the first, so that both forms give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.reward_table import ABSENT, RewardTable, place_of_steps
from mmrl.core.tensor import group_index, group_sum, pad_to

EPISODE, TURN = "episode", "turn"  # tags of outcomes
BARE = "bare"  # tag of an outcome that is a prefix of an answer; only rewards with `at: every` score it
ORDER = "turn_number"  # name of the id column that holds the number from the tag `turn`


def turn_number(tags: Mapping[str, str]) -> int:
    """Parse the number in the tag `turn`; 0 without the tag.

    Raises `ValueError` if the turn of an episode is not a number, because turns are sorted by number.
    """
    turn = tags.get(TURN, "0")
    if turn.isdecimal():
        return int(turn)
    if EPISODE in tags:
        raise ValueError(
            f"turns of an episode are put in order by the number in their tag `turn`, but episode "
            f"'{tags[EPISODE]}' has the turn '{turn}'"
        )
    return 0


def members(table: RewardTable) -> list[list[int]]:
    """List the row indices of each episode in turn order; a row without the tag is an episode itself.

    Rows of an episode belong to the same group. Episodes are in the order of their first rows.
    """
    if EPISODE not in table.ids:
        return [[row] for row in range(len(table))]
    last = table.last.clamp(min=0)[:, None]
    names = table.ids[EPISODE].gather(1, last)[:, 0].tolist()
    turns = table.ids[ORDER][:, 0].tolist() if ORDER in table.ids else [0] * len(table)
    episodes: dict[tuple[int, int, int], list[int]] = {}
    for row, (group, name) in enumerate(zip(table.group.tolist(), names, strict=True)):
        episodes.setdefault((group, name, 0 if name else row), []).append(row)
    return [sorted(rows, key=lambda row: turns[row]) for rows in episodes.values()]


def episode_index(table: RewardTable) -> Tensor:
    """Number the episodes in the order of `members`; return the number of each row's episode (N,)."""
    index = torch.arange(len(table))
    for number, rows in enumerate(members(table) if EPISODE in table.ids else ()):
        index[rows] = number
    return index


def join_episodes(table: RewardTable) -> RewardTable:
    """Join the rows of every episode into one row that has the outcomes and steps of all these rows.

    A table without the tag `episode` is returned unchanged. Row-level ids are those of the first row.
    """
    return _joined(table, members(table)) if EPISODE in table.ids and len(table) else table


def _joined(table: RewardTable, rows_of: Sequence[Sequence[int]]) -> RewardTable:
    width, steps = table.ends.shape[1], table.length.tolist()
    counts, first = table.present.sum(-1).tolist(), torch.tensor([rows[0] for rows in rows_of])
    entries = [torch.cat([row * width + torch.arange(counts[row]) for row in rows]) for rows in rows_of]
    shifts, shift = [], torch.zeros(len(table), dtype=torch.int64)
    for rows in rows_of:
        before = 0
        for row in rows:
            shift[row] = before
            before += steps[row]
        shifts.append(before)
    at = pad_sequence(entries, batch_first=True, padding_value=-1)  # (E, S) indices in flattened (N, K)
    filled, at = at >= 0, at.clamp(min=0)

    def gathered(column: Tensor, fill: float) -> Tensor:
        return torch.where(filled, column.flatten()[at], fill)

    # `table.values` and `table.valid` have the dimensions (rows, rewards, outcomes).
    values, valid = (t.transpose(1, 2).flatten(0, 1)[at] for t in (table.values, table.valid))
    ids = {name: gathered(column, 0) for name, column in table.ids.items()}
    ids["place"] = torch.arange(at.shape[1]).expand(at.shape)
    for name in ("group", "row", "on_policy"):
        ids[name] = table.ids[name][first, :1].expand(at.shape)
    return table.replace(
        values=values.transpose(1, 2),
        valid=(valid & filled[..., None]).transpose(1, 2),
        scored={name: gathered(column, torch.nan) for name, column in table.scored.items()},
        ends=gathered(table.ends + shift[:, None], ABSENT),
        ids=ids,
        notes={name: _of_steps(note, rows_of, steps) for name, note in table.notes.items()},
        length=torch.tensor(shifts),
        learn=gathered(table.learn, False),
        uids=tuple(table.uids[rows[0]] for rows in rows_of),
        process=table.process[first],
    )


def _of_steps(note: Tensor, rows_of: Sequence[Sequence[int]], steps: Sequence[int]) -> Tensor:
    """Concatenate per-step values (rows, steps) within each episode: (episodes, longest), NaN-padded."""
    parts = [torch.cat([note[row, : steps[row]] for row in rows]) for rows in rows_of]
    return pad_sequence(parts, batch_first=True, padding_value=torch.nan)


def part_episodes(joined: RewardTable, table: RewardTable) -> RewardTable:
    """Split a table of joined episodes, such as their advantages, back into the rows of `table`.

    An outcome belongs to the row whose steps contain its end. Steps of a row after the row's last outcome
    belong to the next outcome of the episode, as in the joined row.
    """
    if EPISODE not in table.ids or not len(table):
        return joined
    rows_of = members(table)
    steps, episode = table.length.tolist(), torch.zeros(len(table), dtype=torch.int64)
    start = torch.zeros(len(table), dtype=torch.int64)
    for number, rows in enumerate(rows_of):
        before = 0
        for row in rows:
            episode[row], start[row] = number, before
            before += steps[row]
    whole = joined.select(episode)
    following = place_of_steps(whole.ends, int(joined.length.max()) if len(joined) else 0)
    places, ends = [], []
    for row, length in enumerate(steps):
        end = whole.ends[row] - start[row]
        inside = ((end > 0) & (end <= length) & (whole.ends[row] != ABSENT)).nonzero()[:, 0]
        listed, closing = inside.tolist(), end[inside].tolist()
        if not closing or closing[-1] < length:
            step = min(int(start[row]) + length - 1, following.shape[1] - 1)
            listed.append(int(following[row, step]) if length and step >= 0 else 0)
            closing.append(length)
        places.append(torch.tensor(listed, dtype=torch.int64))
        ends.append(torch.tensor(closing, dtype=torch.int64))
    at = pad_sequence(places, batch_first=True)
    stands = pad_sequence(ends, batch_first=True, padding_value=ABSENT)
    values = whole.values.gather(2, at[:, None].expand(-1, len(whole.names), -1))
    parted = whole.take(at, values, stands)
    ids = {name: parted.ids[name] for name in parted.ids}
    for name in ("group", "row", "on_policy"):
        ids[name] = table.ids[name][:, :1].expand(at.shape)
    return parted.replace(
        ids=ids,
        learn=parted.learn & (stands != ABSENT),
        notes={name: _cut(note, start, table.length) for name, note in whole.notes.items()},
        length=table.length,
        uids=table.uids,
        process=table.process,
    )


def _cut(note: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """Cut `length` (N,) steps, beginning at step `start` (N,), out of values (N, T); pad with NaN."""
    width = int(length.max()) if len(length) else 0
    steps = torch.arange(width)
    at = start[:, None] + steps
    note = pad_to(note, int(at.max()) + 1 if at.numel() else 0, 1, torch.nan)
    return torch.where(steps < length[:, None], note.gather(1, at), torch.nan)


def has_turns(table: RewardTable) -> bool:
    """Whether the outcomes of a table are turns of conversations."""
    return TURN in table.ids and table.ends.shape[1] > 1


def merge_turns(table: RewardTable, by: Sequence[str] = ()) -> tuple[RewardTable, Tensor]:
    """Merge the turns of a conversation that have equal ids in `by` into one row with one outcome.

    Rewards are summed over the turns, so a reward that only the last turn has is kept. Ids are those of the
    last turn. All steps of the conversation belong to the merged outcome.

    Returns:
        The merged table (V rows, R rewards, 1), and each outcome's merged row: (N, K), 0 for absent outcomes.
    """
    present, width = table.present, max(table.ends.shape[1], 1)
    entries = present.flatten().nonzero()[:, 0]
    # Row numbers, not the ids "row", which are hashes: merged rows must keep the order of the table.
    columns = [entries.div(width, rounding_mode="floor"), *(table.tag(n).flatten()[entries] for n in by)]
    number = group_index(columns)
    index = torch.zeros(present.numel(), dtype=torch.int64).index_copy(0, entries, number)
    count = int(number.max()) + 1 if len(number) else 0
    last = torch.zeros(count, dtype=torch.int64).scatter_reduce(0, number, entries, "amax")
    row, column = last.div(width, rounding_mode="floor"), last % width

    def merged(values: Tensor, known: Tensor) -> Tensor:
        """Sum the `known` values (N, K) of each of the V merged rows: (V, 1); NaN for a row without any."""
        total = group_sum(torch.where(known, values, 0.0).flatten()[entries], number, count)
        some = group_sum(known.flatten()[entries].double(), number, count) > 0
        return torch.where(some, total, torch.nan)[:, None]

    whole = table.select(row).take(
        column[:, None], table.values[row][..., :1], table.ends[row, column][:, None]
    )
    values = [merged(v, k) for v, k in zip(table.values.unbind(1), table.valid.unbind(1), strict=True)]
    summed = torch.stack(values, 1) if values else whole.values
    learned = group_sum(table.learn.flatten()[entries].double(), number, count) > 0
    whole = whole.replace(
        values=summed.nan_to_num(),
        valid=~summed.isnan(),
        scored={name: merged(column, ~column.isnan()) for name, column in table.scored.items()},
        learn=learned[:, None],
    )
    return whole, index.view(present.shape)


def share_turns(merged: RewardTable, index: Tensor, table: RewardTable) -> RewardTable:
    """Copy the values of merged rows (`merge_turns`) back to every outcome of `table`.

    Raises `ValueError` if the merged table has several outcomes per row.
    """
    if merged.ends.shape[1] != 1:
        raise ValueError(
            f"turns share the advantage of their conversation, which now has {merged.ends.shape[1]} places; "
            "put pieces that work on single steps after `per_episode`"
        )
    if not len(merged):
        return table.replace(weights=merged.weights, values=table.values[:, : len(merged.names)])
    values, valid = (t[:, :, 0][index].transpose(1, 2) for t in (merged.values, merged.valid))
    return table.replace(
        values=values,
        valid=valid & table.present[:, None],
        weights=merged.weights,
        learn=table.learn & merged.learn[:, 0][index],
    )


def of_episodes(function: Callable[[RewardTable], Tensor], table: RewardTable) -> Tensor:
    """Apply `function` to a table with one row per episode, and copy each result to the episode's rows."""
    if EPISODE not in table.ids or not len(table):
        return function(table)
    judged = function(join_episodes(table))
    result = torch.zeros(len(table), dtype=judged.dtype)
    for number, rows in enumerate(members(table)):
        result[rows] = judged[number]
    return result
