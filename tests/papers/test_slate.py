"""Candidates of one turn: what they read, how one is chosen, whose calls are made, what is learned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.shape import total
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.objectives.aggregations import sequence_mean
from mmrl.papers.slate import WithStepCandidates, continuation, early_answer
from mmrl.rewards.adapters import log_metric, per_outcome
from mmrl.runtime.reward_calls import RewardFault
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from mmrl.vision.tools.images import crop
from tests.vision import tiny
from tests.vision.parting import CALLED, Alone, CallsCounted, CallsFailing, counted
from tests.vision.talking import calls_of, ruled

FAMILY = "qwen2_5_vl"
ENDED = 60  # tokens of a turn, which ends at every third token


class Stepwise(WithStepCandidates):
    """Tools that are called by rule."""

    parse = staticmethod(calls_of)


class Counting(CallsCounted, WithStepCandidates):
    """A tool is called in every turn."""


class Failing(CallsFailing, WithStepCandidates):
    """A tool that fails is called in every turn."""


@per_outcome
def length(prompt, outcome):
    """Prefer long texts."""
    log_metric("length/seen", 1.0)
    return float(len(outcome.text))


@per_outcome
def same(prompt, outcome):
    """Prefer none."""
    return 1.0


@per_outcome
def breaks(prompt, outcome):
    """Fail where a conversation goes on."""
    if len(prompt.messages) > 1:
        raise RuntimeError("no judgement")
    return float(len(outcome.text))


@pytest.fixture
def policy(exact, monkeypatch):
    made = exact(FAMILY)
    encoder = made.prompt_encoder
    monkeypatch.setattr(encoder, "end", [encoder.end[0], *range(0, 256, 3)])
    return made


def asked(num=2, each=4):
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num) for _ in range(each)]


def reward(name, **options):
    return lambda: Pieces(Stream()).make("reward", Piece(f"{__name__}:{name}", options), place="x")


def engine(policy, kind=Stepwise, *, stream=None, kept=True, size=0, rewards=None, **options):
    stream = stream or Stream(0)
    inner = Generate(policy, stream=stream, max_completion_length=ENDED, batch_size=size)
    if not kept:
        inner.turns = lambda: SimpleNamespace(
            begin=lambda rows: inner.reader([row.encoded for row in rows]), part=lambda parents: None
        )
    return kind(
        inner, stream=stream, **{"tool": (crop, ruled), "reward": rewards or (reward("length"),), **options}
    )


def said(rows):
    return [(row.group, row.steps.ids.tolist(), dict(row.outcomes[-1].tags)) for row in rows]


def test_a_conversation_goes_on_from_a_candidate_by_its_advantage():
    # [2, 1, -1, 0, 1] has the mean 0.6 and the squared deviations 1.96 + .16 + 2.56 + .36 + .16 = 5.2, so the
    # deviation sqrt(5.2 / 4) = 1.140175: A = [1.227880, .350823, -1.403292, -.526234, .350823].
    wanted = torch.tensor([0.596572, 0.170419, 0.013907, 0.048683, 0.170419], dtype=torch.float64)
    found = continuation(torch.tensor([2.0, 1.0, -1.0, 0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(continuation(torch.tensor([0.1, 0.1, 0.1])), torch.full((3,), 1 / 3))
    assert continuation(torch.tensor([3.0])).tolist() == [1.0]


def test_candidates_of_a_turn_read_the_one_conversation_so_far(policy):
    rows = engine(policy).rollout(asked())
    groups = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
        assert row.group == f"{row.prompt.uid}/0/{row.outcomes[-1].tags['turn']}"
    assert all(len(members) == 4 for members in groups.values()) and len(groups) > 3
    for group, members in groups.items():
        uid, _, turn = group.rsplit("/", 2)
        assert len({id(row.steps.prompt) for row in members}) == 1
        assert len({row.prompt.messages for row in members}) == 1
        before = groups.get(f"{uid}/0/{int(turn) - 1}")
        if before is None:
            assert turn == "0" and len(members[0].prompt.messages) == 1
            continue
        # One of the candidates of the turn before, with its reply, is the end of what is read.
        going = [row for row in before if row.prompt.messages + row.turns == members[0].prompt.messages[:-1]]
        read = torch.cat([before[0].steps.prompt.ids, going[0].steps.ids])
        assert torch.equal(members[0].steps.prompt.ids[: len(read)], read)
        assert (
            going[0].outcomes[-1].tags["finish"] == "call" and members[0].prompt.messages[-1].role == "tool"
        )
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)


def test_the_first_turn_is_that_of_as_many_conversations(policy):
    rows = [row for row in engine(policy).rollout(asked()) if row.outcomes[-1].tags["turn"] == "0"]
    inner = Generate(policy, stream=Stream(0), max_completion_length=ENDED)
    plain = Alone(inner, stream=Stream(0), tool=(crop, ruled), max_turns=1).rollout(asked())
    assert [row.steps.ids.tolist() for row in rows] == [row.steps.ids.tolist() for row in plain]


def test_candidates_are_drawn_alike_in_any_batch_with_keys_and_values_kept_or_not(policy):
    rows = engine(policy).rollout(asked())
    assert said(engine(policy).rollout(asked(1))) == [one for one in said(rows) if one[0].startswith("p0")]
    assert said(engine(policy, kept=False, size=4).rollout(asked())) == said(rows)
    assert said(engine(policy, size=3).rollout(asked())) == said(rows)
    later = Stream(0)
    later.step = 1
    assert said(engine(policy, stream=later).rollout(asked())) != said(rows)


def test_only_the_calls_of_the_candidate_that_goes_on_are_made(policy):
    CALLED.clear()
    made = engine(policy, Counting, tool=(counted,), max_turns=3)
    rows = made.rollout(asked(1))
    assert len(rows) == 3 * 4 and len(CALLED) == 2
    assert [row.outcomes[-1].tags["finish"] for row in rows] == ["call"] * 8 + ["turns"] * 4
    assert made.pop_metrics() == {"tools/turns": 3, "tools/calls": 2, "tools/errors": 0, "length/seen": 1}
    assert made.pop_metrics()["tools/calls"] == 0


@pytest.mark.parametrize(("on_error", "turns"), [("tell", 3), ("skip", 1)])
def test_a_tool_that_fails_is_read_or_ends_the_conversation(policy, on_error, turns):
    tool = Pieces(Stream()).make("tool", Piece("tests.vision.parting:failing", {"on_error": on_error}))
    rows = engine(policy, Failing, tool=(tool,), max_turns=3).rollout(asked(1))
    assert len(rows) == 4 * turns
    assert turns == 1 or "Error: RuntimeError: no index" in rows[-1].prompt.messages[-1].text


def test_scores_are_recorded_with_their_weighted_sum(policy):
    calls = reward("same", at="finish=call", weight=0.5, label="asks")
    rows = engine(policy, rewards=(reward("length"), calls)).rollout(asked())
    for row in rows:
        recorded, text = row.outcomes[-1].recorded, row.outcomes[-1].text
        asks = row.outcomes[-1].tags["finish"] == "call"
        assert recorded == {
            "length": len(text),
            **({"asks": 1.0} if asks else {}),
            "step_reward": len(text) + 0.5 * asks,
        }
    assert {row.outcomes[-1].tags["finish"] for row in rows} >= {"call", "stop"}


def test_a_turn_without_scores_goes_on_and_is_not_learned_from(policy):
    with pytest.raises(RewardFault, match="reward 'breaks' raised RuntimeError: no judgement"):
        engine(policy, Counting, tool=(counted,), rewards=(reward("breaks"),)).rollout(asked(1))
    skipping = (reward("breaks", on_error="skip"),)
    rows = engine(policy, Counting, tool=(counted,), max_turns=3, rewards=skipping).rollout(asked(1))
    assert [bool(row.outcomes[-1].recorded) for row in rows] == [True] * 4 + [False] * 8
    read = Pieces(Stream()).make("reward", Piece("precomputed", {"key": "step_reward"}), place="x")
    table = group_normalize(total(score([read], rows)), eps=1e-6)
    assert not table.values[4:].any() and table.values[:4].any()


def test_what_cannot_be_compared_is_named(policy):
    only = (reward("length", at="finish=stop"),)
    with pytest.raises(
        ConfigError, match="applies to a candidate of prompt 'p0' whose tag `finish` is 'call'"
    ):
        engine(policy, Counting, tool=(counted,), rewards=only).rollout(asked(1))
    with pytest.raises(ConfigError, match="must name a reward with a weight"):
        engine(policy, rewards=(reward("length", weight=0),))
    with pytest.raises(ConfigError, match="different names"):
        engine(policy, rewards=(reward("length"), reward("length")))


def test_evaluations_are_whole_conversations_without_scores(policy):
    stream = Stream(0, purpose="evaluate")
    rows = engine(policy, stream=stream, rewards=(lambda: pytest.fail("made"),)).rollout(asked(1))
    inner = Generate(policy, stream=stream, max_completion_length=ENDED)
    plain = Alone(inner, stream=stream, tool=(crop, ruled)).rollout(asked(1))
    assert [row.logged for row in rows] == [row.logged for row in plain]


def test_the_loss_is_the_mean_over_turns_of_the_mean_over_candidates(policy):
    rows = engine(policy).rollout(asked(1))
    batch = policy.collate(rows)
    turns = len({row.group for row in rows})
    weight = sequence_mean(batch.replace(totals=batch.totals.__class__(rows=len(rows))))
    for row, given in zip(rows, weight, strict=True):
        # (1 / T) times 1 / k times the mean over the tokens of a candidate
        wanted = torch.full((row.length,), 1 / turns / 4 / row.length)
        torch.testing.assert_close(given[: row.length].float(), wanted)


def turn(text, calls=None):
    return Message("assistant", (Part(text),), calls)


def one(piece, text, columns=None, tags=None, **options):
    prompt = Prompt("a", (), columns=columns or {})
    return piece([prompt], [Outcome(text, tags=tags or {})], **options)[0]


def test_an_early_answer_earns_more():
    found = [one(early_answer, "", tags={"turn": str(turn)}) for turn in range(5)]
    assert found == pytest.approx([0.075, 0.05, 0.025, 0, 0])


def test_a_turn_that_does_not_answer_is_not_early():
    for finish in ("call", "turns", "length", "images", "tool_error"):
        assert one(early_answer, "", tags={"turn": "0", "finish": finish}) == 0
    assert one(early_answer, "", tags={"turn": "0", "finish": "stop"}) == pytest.approx(0.075)
