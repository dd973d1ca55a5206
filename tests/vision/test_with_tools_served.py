"""Conversations with tools whose turns a server samples: what is sent, and servers that die."""

from __future__ import annotations

import threading

import pytest
import torch

from mmrl.build import check
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, ConfigError, parse
from mmrl.core.rng import Stream
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.serving.wire import check_kinds
from tests.support.configs import CONFIGS
from tests.support.vllm_stand_in import StandIn
from tests.vision import tiny
from tests.vision.test_vllm import engine_of
from tests.vision.test_with_tools import call, look, word

SCRIPT = {  # (uid, index): the turns of a conversation
    ("p0", 0): ["the fox"],
    ("p0", 1): [call(image=0), call("word", number=3) + call(image=1), "a fox"],
    ("p1", 0): [call("word", number=1), "what is it"],
    ("p1", 1): [call(image=0), "the fox"],
}


class Scripted(StandIn):
    """Answers each turn with the words of `SCRIPT`; `held` is called before an answer is sent."""

    def __init__(self, policy, engine_turns, **options):
        super().__init__(policy, (), **options)
        self.turns, self.held = engine_turns, lambda turn: None

    def answer(self, request):
        turn, number = self.turns[tuple(request["token_ids"]), request["sampling_params"]["seed"]]
        self.held(turn)
        ids = self.policy.prompt_encoder.answer(SCRIPT[turn.prompt.uid, turn.index][number])
        choice = {"index": 0, **self._choice(turn.prompt, turn.encoded, ids[:0], ids, True)}
        return {"prompt_token_ids": request["token_ids"], "choices": [choice]}


@pytest.fixture
def policy(exact):
    return exact("qwen2_5_vl")


@pytest.fixture
def serving(policy, tmp_path, monkeypatch):
    """Make an engine of conversations over stand-ins, which know every turn that is asked."""
    turns, numbers, made = {}, {}, []

    def start(tools, count=1):
        made.extend(Scripted(policy, turns) for _ in range(count))
        served = engine_of(policy, tmp_path, *(one.url for one in made), max_completion_length=200)
        begin = served.begin_turns

        def noting(asked, version):
            for turn in asked:
                key = turn.prompt.uid, turn.index
                seed = int(turn.uniform[0] * (1 << 31))  # answers to one prompt have the same tokens
                turns[tuple(turn.encoded.ids.tolist()), seed] = turn, numbers.get(key, 0)
                numbers[key] = numbers.get(key, 0) + 1
            return begin(asked, version)

        monkeypatch.setattr(served, "begin_turns", noting)
        return WithTools(served, stream=Stream(0), tool=tools), made

    yield start
    for one in made:
        if one.left is None:
            one.kill()


def asked():
    return [tiny.ask(f"p{i}", f"which of {i}", tiny.picture(seed=i)) for i in range(2) for _ in range(2)]


def by_generate(policy, tools):
    """The rows of `vision.generate` whose turns are written as `SCRIPT` says."""
    inner, turn_of = Generate(policy, stream=Stream(0), max_completion_length=200), {}

    def answering(rows, begin=None):
        answers = []
        for row in rows:
            key = row.prompt.uid, row.index
            ids = policy.prompt_encoder.answer(SCRIPT[key][turn_of.get(key, 0)])
            turn_of[key] = turn_of.get(key, 0) + 1
            notes = {"logp": torch.zeros(len(ids)), "token": ids}
            answers.append(inner.row(row.prompt, row.encoded, notes, True))
        return tuple(answers)

    inner.answer = answering
    return WithTools(inner, stream=Stream(0), tool=tools).rollout(asked())


def check_rows(policy, rows, wanted):
    for row, other in zip(rows, wanted, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids)
        assert row.outcomes[-1].text == other.outcomes[-1].text
        assert row.outcomes[-1].tags == other.outcomes[-1].tags
        assert row.logged == other.logged and len(row.shown) == len(other.shown)
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)


def test_rows_are_those_of_generate_and_every_turn_begins_with_the_tokens_before_it(policy, serving):
    engine, (server,) = serving((look, word))
    rows = engine.rollout(asked())
    check_rows(policy, rows, by_generate(policy, (look, word)))
    assert engine.pop_metrics()["tools/turns"] == 8 / 4
    sent = [told for path, told in server.told if path == "inference/v1/generate"]
    assert len(sent) == 8 and {request["cache_salt"] for request in sent} == {server.version}
    long = [request for request in sent if request["token_ids"] in _grown(policy, sent)]
    assert len(long) == 4  # the second and later turns
    # Images go by the hash of their content: those of the turns before come first.
    hashes = [request["features"]["mm_hashes"]["image"] for request in sent]
    assert sorted(map(len, hashes)) == [1, 1, 1, 1, 1, 2, 2, 3]
    assert len({one for listed in hashes for one in listed}) == 2 + 3


def _grown(policy, sent):
    """Prompts that begin with another one and the answer to it."""
    encode = policy.prompt_encoder.answer
    answers = [encode(text).tolist() for turns in SCRIPT.values() for text in turns]
    begun = [[*request["token_ids"], *answer] for request in sent for answer in answers]
    return [
        request["token_ids"]
        for request in sent
        if any(request["token_ids"][: len(ids)] == ids for ids in begun)
    ]


def test_tools_are_called_while_other_turns_are_still_sampled(serving):
    called = threading.Event()

    def note(number: int) -> str:
        """Say a word.

        Args:
            number: Which.
        """
        called.set()
        return "noted"

    note.__name__ = "word"
    engine, (server,) = serving((look, note))
    waited = []
    server.held = lambda turn: turn.prompt.uid == "p0" and waited.append(called.wait(60))
    engine.rollout(asked())
    assert all(waited) and len(waited) == 4


def test_a_server_that_dies_between_turns_changes_nothing(policy, serving, monkeypatch):
    monkeypatch.setattr("mmrl.vision.serving.servers.PAUSE", 0.01)
    engine, servers = serving((look, word), count=2)
    servers[0].left = 3
    rows = engine.rollout(asked())
    check_rows(policy, rows, by_generate(policy, (look, word)))
    assert servers[0].dead.is_set() and engine.engine.pop_metrics()["vllm/asked_again"] >= 1


def test_replies_of_media_that_servers_do_not_take_are_refused(policy):
    config = policy.core.config
    check_kinds(config, "p", {"image", "video"})
    with pytest.raises(ConfigError, match="`vision.vllm` cannot send videos to a model of type 'llava'"):
        check_kinds(type("Config", (), {"model_type": "llava"}), "p", {"image", "video"})


def test_a_ready_run_with_tools_takes_a_server():
    raw = read(CONFIGS / "train" / "tools.yaml")
    _, tools = raw["rollout"]["engine"]
    served = {"name": "vision.vllm", "servers": ["http://localhost:8000"]}

    def on(*engine):
        return parse(merge(raw, {"rollout": {"engine": list(engine)}}), Config)

    check(on(served, tools))
    able = "'vision.generate' or 'vision.openai_server' or 'vision.vllm'"
    with pytest.raises(ConfigError, match=f"'vision.with_tools' wraps {able}, not "):
        check(on({"name": "vision.generate"}, {"name": "vision.contrastive_decoding"}, tools))
