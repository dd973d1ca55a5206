"""Engines that continue answers, and judges, over servers: the rows are those of `vision.generate`."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Bound, Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.nesting import check_nesting
from mmrl.config.registry import pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Trajectory
from mmrl.data.hints import with_hint
from mmrl.engines.play import Play
from mmrl.papers.pdr import WithDrafts
from mmrl.papers.remax import WithGreedy
from mmrl.papers.s_grpo import WithExits
from mmrl.papers.scaf_grpo import WithoutHints
from mmrl.papers.spo_tree import WithBranches
from mmrl.papers.t_ppo import BEGUN, WithWindow
from mmrl.training.score import score
from mmrl.vision.engines.derived_answers import DropoutNtp
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_prefix_rollouts import WithPrefixRollouts
from tests.support.playing import Telephone
from tests.support.sampling_stand_in import Sampling, watch
from tests.vision.test_contrastive_decoding import pictures
from tests.vision.test_vllm import engine_of


@pytest.fixture
def policy(exact):
    return exact("qwen2_5_vl")


@pytest.fixture
def start(policy, monkeypatch):
    """Start stand-ins that sample from the policy."""
    seen, made = watch(monkeypatch), []
    monkeypatch.setattr("mmrl.vision.serving.servers.PAUSE", 0.01)

    def go(count=1, **options):
        made.extend(Sampling(policy, seen, **options) for _ in range(count))
        return made

    yield go
    for one in made:
        if not one.dead.is_set():
            one.kill()


@pytest.fixture
def serve(policy, start, tmp_path):
    """Make engines over stand-ins."""

    def go(count=1, temperature=0.0, stream=None, **options):
        urls = [one.url for one in start(count)]
        options = {"max_completion_length": 6, "temperature": temperature, **options}
        return engine_of(policy, tmp_path, *urls, stream=stream or Stream(0), **options)

    return go


def local(policy, temperature=0.0, stream=None):
    return Generate(policy, stream=stream or Stream(0), max_completion_length=6, temperature=temperature)


def assert_alike(rows, wanted):
    assert len(rows) == len(wanted) > 0
    for row, other in zip(rows, wanted, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids)
        assert (row.prompt.uid, row.group, row.on_policy) == (other.prompt.uid, other.group, other.on_policy)
        assert row.notes.keys() == other.notes.keys() - {"entropy"}
        for name, note in row.notes.items():
            torch.testing.assert_close(note, other.notes[name], rtol=0, atol=1e-5, equal_nan=True)
        chosen = [one.steps.chosen for one in (row, other)]
        assert (chosen[0] is None) == (chosen[1] is None)
        assert chosen[0] is None or torch.equal(chosen[0], chosen[1])
        for outcome, same in zip(row.outcomes, other.outcomes, strict=True):
            assert (outcome.text, outcome.end, outcome.tags) == (same.text, same.end, same.tags)
            recorded = {name: value for name, value in same.recorded.items() if name != "confidence"}
            assert outcome.recorded == pytest.approx(recorded, abs=1e-5)


def begun(prompt):
    """A prompt with two tokens of its answer from an earlier step."""
    return replace(prompt, columns={BEGUN: {"token": torch.tensor([5.0, 7.0])}})


HINTED = [pictures()[0], with_hint(pictures()[1], "the brown fox", tag="1")]
MANY = pictures() * 4
WRAPPERS = {
    "branches": (WithBranches, {"branching": (2, 2), "segment_length": 2, "stream": Stream(0)}, MANY),
    "exits": (WithExits, {"exit_text": "0 1", "max_exit_length": 3, "stream": Stream(0)}, MANY),
    "window": (
        WithWindow,
        {"window": 3, "stream": Stream(0)},
        [pictures()[0], begun(pictures()[1])],
    ),
    "drafts": (WithDrafts, {"rounds": (2,), "stream": Stream(0)}, MANY),
    "greedy": (WithGreedy, {}, MANY),
    "hints": (WithoutHints, {}, HINTED),
    "dropout": (DropoutNtp, {"share": 0.5}, MANY),
    "prefixes": (
        WithPrefixRollouts,
        {"cut": "token", "interval": 2, "num_probes": 2, "stream": Stream(0), "opener": "0"},
        MANY[:2],
    ),
    "likelihoods": (
        WithPrefixRollouts,
        {"cut": "token", "interval": 2, "num_probes": 0, "stream": Stream(0), "score_target": True},
        [replace(prompt, target="the fox") for prompt in MANY[:2]],
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_rows_are_those_of_generate_at_temperature_0(policy, serve, name):
    wrapper, options, asked = WRAPPERS[name]
    rows = wrapper(serve(), **options).rollout(asked)
    assert_alike(rows, wrapper(local(policy), **options).rollout(asked))


def test_forced_tokens_are_scored_at_the_temperature_of_the_completions(policy, serve):
    wrapper, options, asked = WRAPPERS["likelihoods"]
    options = {**options, "probe_temperature": 1.7}
    rows = wrapper(serve(), **options).rollout(asked)
    assert_alike(rows, wrapper(local(policy), **options).rollout(asked))


def branching(engine):
    return WithBranches(engine, branching=(2, 2), segment_length=2, stream=Stream(0)).rollout(MANY * 2)


@pytest.mark.slow
def test_a_tree_of_samples_shares_the_tokens_of_its_nodes_and_survives_a_server(policy, serve, start):
    whole = branching(serve(temperature=0.7))
    assert len({tuple(row.steps.ids.tolist()) for row in whole}) > 8
    shared = {}
    for row in whole:
        for t, (node, token) in enumerate(zip(row.notes["node"].tolist(), row.steps.ids, strict=True)):
            assert shared.setdefault((row.prompt.uid, node, t), int(token)) == int(token)
    batch = policy.collate(whole)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=1e-5)
    engine = serve(temperature=0.7, count=2)
    start(0)[-1].left = 3  # dies while it samples
    assert_alike(branching(engine), whole)
    assert start(0)[-1].dead.is_set() and engine.pop_metrics()["vllm/asked_again"] >= 1


def test_a_part_that_ends_the_answer_has_no_continuations(policy, serve, monkeypatch):
    ends = [policy.prompt_encoder.end[0], *range(0, 256, 3)]
    monkeypatch.setattr(policy.prompt_encoder, "end", ends)
    rows = branching(serve(temperature=1.0))
    assert len(rows) < 16 and len({row.length for row in rows}) > 2
    for row in rows:
        stopped = int(row.steps.ids[-1]) in ends
        assert row.outcomes[0].tags["finish"] == ("stop" if stopped else "length")
        assert stopped or row.length == 6
        assert not torch.isin(row.steps.ids[:-1], torch.tensor(ends)).any()


# ---- the first words of an answer


def test_the_first_words_of_servers_are_those_of_generate(policy, serve, start):
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [letters[:3], letters[3:24], ["0"]]  # 25 tokens: more than one request lists
    asked = pictures()
    found, wanted = serve().first_words(asked, words), local(policy).first_words(asked, words)
    assert torch.tensor(found).sub(torch.tensor(wanted)).abs().max() < 1e-6
    assert serve().first_words((), words) == []
    with pytest.raises(ConfigError, match="token of an answer tells them apart"):
        serve().first_words(asked, [("a", "b"), ("b",)])
    (server, *_) = start(0)
    server.fault = lambda reply: {
        **reply,
        "choices": [
            {**choice, "logprobs": {"content": [{**choice["logprobs"]["content"][0], "top_logprobs": []}]}}
            for choice in reply["choices"]
        ],
    }
    with pytest.raises(ValueError, match="is not as vLLM writes it"):
        serve(count=0).first_words(asked, words)


def judge(checkpoint, folder, server, **options):
    policy = {
        "name": "vision.tokens",
        "model": str(checkpoint("qwen2_5_vl")),
        "dtype": "float32",
        "frozen": True,
    }
    engine = {"name": "vision.vllm", "servers": [server.url], "weights_folder": str(folder)}
    engine |= {"temperature": 0.0, "max_completion_length": 4}
    made = Pieces(Stream()).make("reward", Piece("judge", {"policy": policy, "engine": engine, **options}))
    server.follow(made.function.asker.engine.policy)
    return made


def answered(*texts):
    return tuple(
        Trajectory(prompt, prompt.uid, (Outcome(text=text),), None, 1)
        for prompt in pictures()
        for text in texts
    )


def test_a_judge_on_a_server_weighs_and_writes_as_one_in_this_process(
    checkpoint, start, tmp_path, monkeypatch
):
    monkeypatch.setattr("mmrl.rewards.judge.YES", ("y", "Y"))
    monkeypatch.setattr("mmrl.rewards.judge.NO", ("n",))
    (server,) = start()
    made = judge(checkpoint, tmp_path, server, form="p_yes")
    served = made.function.asker.engine
    rows = answered("a cat", "a dog")
    found = score([made], rows).scored["judge"]
    made.function.asker.engine = Generate(
        served.policy, stream=Stream(), temperature=0.0, max_completion_length=4
    )
    wanted = score([made], rows).scored["judge"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert served.pop_metrics().keys() >= {"judge/vllm/servers"}
    assert [row.steps.ids.tolist() for row in served.rollout(pictures())] == [
        row.steps.ids.tolist() for row in made.function.asker.engine.rollout(pictures())
    ]


# ---- games


def test_games_against_itself_are_played_on_servers(policy, serve):
    def games(engine):
        return Play(engine, game=Telephone(), stream=Stream(0)).rollout(MANY[:2])

    assert_alike(games(serve()), games(local(policy)))


def test_a_frozen_policy_does_not_play_on_servers_of_another(serve):
    with pytest.raises(ConfigError, match="`frozen` of play needs `vision.generate`"):
        Play(serve(), game=Telephone(), stream=Stream(0), frozen=("speaker",), policy=lambda: None)


# ---- what is refused before weights are loaded

REFUSED = {
    "vision.contrastive_decoding": "mixes two distributions at every token",
    "vision.with_entropy_temperature": "sets the temperature of every token by its entropy",
    "vision.with_hint_reliance": "scores whole answers at the engine's temperature",
}
OF_ANOTHER = {"compression.speedup_probe", "compression.fidelity_gate"}  # which change the model itself
COPYING = {
    "play": {"frozen": ("speaker",)},
    "vision.with_prefix_rollouts": {"policy": Piece("vision.tokens", {"model": "m"})},
}


def test_every_engine_around_servers_is_taken_or_refused_with_its_reason():
    entries = {entry.full_name: entry for entry in pieces("engine")}
    server = Bound(entries["vision.vllm"], entries["vision.vllm"].target, {}, Stream())
    refused = {}
    for name, entry in entries.items():
        if not wraps(entry) or entry.scope == "diffusion":
            continue
        for options in ({}, *([COPYING[name]] if name in COPYING else [])):
            try:
                check_nesting(
                    [server, Bound(entry, entry.target, options, Stream())], "engine", "policy", "engine"
                )
            except ConfigError as error:
                refused[name, bool(options)] = str(error)
    plain = {*REFUSED, *OF_ANOTHER}
    assert refused.keys() == {(name, False) for name in plain} | {(name, True) for name in COPYING}
    assert all("wraps 'vision.generate', not 'vision.vllm'" in refused[name, False] for name in OF_ANOTHER)
    for name, why in REFUSED.items():
        assert f"'{name}' {why}, and 'vision.vllm' answers elsewhere" in refused[name, False]
    for name in COPYING:
        assert (
            "answers with another `policy` too, and the servers of 'vision.vllm' hold one"
            in refused[name, True]
        )


def wraps(entry):
    return next(iter(inspect.signature(entry.target).parameters), "") == "engine"
