"""Serial groups: exits of one answer, where they are, and what of them is learned."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.normalize import group_center
from mmrl.core.rng import Stream
from mmrl.engines.replay import RECALLED, WithReplay
from mmrl.papers.s_grpo import WithExits, serial_decay
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from tests.support.tables import assert_rows, reward_table
from tests.vision.test_contrastive_decoding import pictures, plainly, said


@pytest.fixture
def policy(exact):
    return exact("llava")


def leaving(policy, prompts, stream=None, **options):
    """Answer with up to eight tokens, and up to three after an exit."""
    stream = stream or Stream(0)
    inner = Generate(policy, stream=stream, max_completion_length=8, temperature=0.7)
    options = {"exit_text": "0 1", "max_exit_length": 3, **options}
    return WithExits(inner, stream=stream, **options).rollout(prompts)


def test_exits_start_as_the_answer_and_come_before_it(policy, monkeypatch):
    exit_text = policy.prompt_encoder.answer("0 1")[:-1]
    monkeypatch.setattr(policy.prompt_encoder, "end", [-2])
    first, second = pictures()
    rows = leaving(policy, [first, second] * 4)
    chains = Generate(policy, stream=Stream(0), max_completion_length=8, temperature=0.7).rollout(
        [first, second]
    )
    assert [row.group for row in rows] == [first.uid] * 4 + [second.uid] * 4
    assert said([rows[3], rows[7]]) == said(chains)
    for chain, exits in ((rows[3], rows[:3]), (rows[7], rows[4:7])):
        places = [row.length - 3 - len(exit_text) for row in exits]
        assert places == sorted(set(places)) and places[0] >= 1 and places[-1] < 8
        for row, place in zip(exits, places, strict=True):
            answer = place + len(exit_text)
            assert row.steps.ids[:place].tolist() == chain.steps.ids[:place].tolist()
            assert row.steps.ids[place:answer].tolist() == exit_text.tolist()
            assert row.outcomes[0].text == policy.prompt_encoder.text(row.steps.ids)
            logp = (plainly(policy, row.prompt, row.steps.ids) / 0.7).log_softmax(-1)
            chosen = logp.gather(1, row.steps.ids[:, None])[:, 0]
            chosen[place:answer] = torch.nan  # what the policy did not choose has no notes
            torch.testing.assert_close(row.notes["logp"], chosen, rtol=0, atol=2e-5, equal_nan=True)
            assert row.notes["entropy"].isnan().equal(chosen.isnan())
            wanted = [0.0 if place <= t < answer else 1.0 for t in range(row.length)]
            assert policy.collate((row,)).mask.tolist() == [wanted]
    assert policy.collate((rows[3],)).mask.all()


def test_places_are_drawn_anew_every_step_and_alike_in_every_batch(policy):
    rows = leaving(policy, pictures() * 4)
    assert said(leaving(policy, pictures()[::-1] * 4, batch_size=1)) == said(
        [row for prompt in pictures()[::-1] for row in rows if row.prompt.uid == prompt.uid]
    )
    stream = Stream(0)
    stream.step = 1
    assert said(leaving(policy, pictures() * 4, stream)) != said(rows)


def test_a_short_answer_has_fewer_exits(policy, monkeypatch):
    monkeypatch.setattr(policy.prompt_encoder, "end", list(range(320)))  # any token ends an answer
    rows = leaving(policy, pictures()[:1] * 4)
    assert [row.length for row in rows] == [1]


def test_exits_are_not_replayed_since_their_exit_text_would_be_learned(policy):
    stream = Stream(0)
    prompts = pictures()[:2]
    inner = Generate(policy, stream=stream, max_completion_length=8, temperature=0.7)
    engine = WithExits(inner, stream=stream, exit_text="0 1", max_exit_length=3)
    memory = WithReplay(engine, stream=stream, train_prompts=prompts)
    rows = memory.rollout(prompts * 4)
    table = score([], rows, notes=RECALLED)
    memory.remember(torch.ones(len(rows), dtype=torch.bool), table, table)
    back = memory.restore_rows(memory.stored)
    whole = [row for row in rows if row.steps.chosen is None]
    assert len(rows) > len(whole) == len(back) == 2
    assert [row.steps.ids.tolist() for row in back] == [row.steps.ids.tolist() for row in whole]


def test_evaluations_have_no_exits(policy):
    rows = leaving(policy, pictures() * 2, Stream(0, purpose="evaluate"))
    assert [row.prompt.uid for row in rows] == [prompt.uid for prompt in pictures() * 2]


@pytest.mark.parametrize(
    ("right", "reward", "centred"),
    [
        ([0, 1, 1, 0, 1], [0, 1, 0.5, 0, 0.25], [-0.35, 0.65, 0.15, -0.35, -0.1]),
        ([1, 1, 1, 1], [1, 0.5, 0.25, 0.125], [0.53125, 0.03125, -0.21875, -0.34375]),
        ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_serial_decay_halves_every_later_right_exit(right, reward, centred):
    table = serial_decay(reward_table(right))
    assert_rows(table.values, reward)
    assert_rows(group_center(table).values, centred)


def test_serial_decay_counts_in_each_group_or_along_a_row():
    assert_rows(serial_decay(reward_table([1, 1, 1, 1], group="abba")).values, [1, 1, 0.5, 0.5])
    assert_rows(serial_decay(reward_table([[1, 0, 1], [1]]), by=("row",)).values[:, 0], [[1, 0, 0.5], [1]])
