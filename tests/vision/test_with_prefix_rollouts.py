"""Completed prefixes of texts: where answers are cut, what is drawn, what is computed, what rewards see."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.reporting import html
from mmrl.training.score import score
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_prefix_rollouts import WithPrefixRollouts
from mmrl.vision.policies.tokens import Tokens
from tests.support.resuming import EVERYTHING, assert_alike, killed, resumed
from tests.vision.test_contrastive_decoding import pictures, plainly
from tests.vision.test_tokens import shaken


@pytest.fixture
def policy(exact):
    return exact("llava")


@pytest.fixture
def endless(policy, monkeypatch):
    """Let no token end an answer, so that all are as long as they may be."""
    monkeypatch.setattr(policy.prompt_encoder, "end", [-2])
    return policy


def probing(policy, prompts, generate=(), prover=None, **options):
    """Answer prompts of six tokens each, and complete their prefixes."""
    options |= {"policy": lambda: prover} if prover else {}
    stream = Stream(0)
    inner = Generate(policy, stream=stream, **{"max_completion_length": 6, **dict(generate)})
    options = {"cut": "token", "interval": 2, "num_probes": 2, **options}
    return WithPrefixRollouts(inner, stream=stream, **options).rollout(prompts)


def test_completions_start_as_the_answer_and_go_on_as_the_policy_draws(policy):
    asked = [*pictures(), pictures()[0]]
    rows = probing(policy, asked, at_start=True, generate={"temperature": 0.8})
    plain = probing(policy, asked, at_start=True, generate={"temperature": 0.8}, batch_size=1)
    counters = {}
    for row, alone in zip(rows, plain, strict=True):
        index = counters[row.prompt.uid] = counters.get(row.prompt.uid, -1) + 1
        ids = row.steps.ids
        ends = [end for end in (0, 0, 2, 2, 4, 4) if end < row.length]
        assert [outcome.end for outcome in row.outcomes] == [*ends, row.length]
        assert row.outcomes == alone.outcomes  # whatever is in the batch
        for number, outcome in enumerate(row.outcomes[:-1]):
            made = torch.tensor(outcome.tokens)
            assert made[: outcome.end].tolist() == ids[: outcome.end].tolist()
            assert len(made) == 6 or int(made[-1]) in policy.prompt_encoder.end
            assert outcome.text == policy.prompt_encoder.text(made) and "finish" not in outcome.tags
            probability = (plainly(policy, row.prompt, made) / 0.8).softmax(-1)
            generator = Stream(0).generator("prefix", row.prompt.uid, index, outcome.end, number % 2)
            drawn = torch.rand(6 - outcome.end, generator=generator)
            chosen = zip(drawn, made[outcome.end :], probability[outcome.end :], strict=False)
            for u, token, share in chosen:
                edges = share.double().cumsum(0)
                assert edges[token] - share[token] - 1e-5 <= u <= edges[token] + 1e-5


def test_prefixes_of_some_answers_are_left_for_a_verifier(endless):
    asked = [prompt for prompt in pictures() for _ in range(4)]
    whole, some = probing(endless, asked, at_start=True), probing(endless, asked, at_start=True, share=0.5)
    bare = [any("bare" in outcome.tags for outcome in row.outcomes) for row in some]
    assert 0 < sum(bare) < len(bare)
    for row, full, cut in zip(some, whole, bare, strict=True):
        if not cut:
            assert row.outcomes == full.outcomes
            continue
        assert [outcome.end for outcome in row.outcomes] == [0, 2, 4, 6]
        for outcome in row.outcomes[:-1]:
            assert outcome.tokens == tuple(row.steps.ids[: outcome.end].tolist())
            assert outcome.text == endless.prompt_encoder.text(torch.tensor(outcome.tokens).long())
        assert row.outcomes[-1] == full.outcomes[-1]
    length = Pieces(Stream()).make("reward", Piece("tests.support.toys:brevity"), place="rewards[0]")
    # Of the answer alone, where prefixes are cut off; else of two completions at each of three cuts too.
    table = score([length], some)
    assert table.valid.sum((1, 2)).tolist() == [1 if cut else 7 for cut in bare]


def test_prompt_and_prefixes_are_computed_once(endless):
    policy = endless
    seen = []
    hook = policy.core.register_forward_pre_hook(
        lambda module, inputs, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    prompt = pictures()[0]
    try:
        (row,) = probing(policy, [prompt], num_probes=3)
    finally:
        hook.remove()
    encoded = len(row.steps.prompt.ids) - 1
    # The prompt for the answer, 6 tokens of it, the prompt for the completions, its last token and 4 of the
    # answer; completions of the cut at 2 read 3 tokens, those of the cut at 4 one.
    assert sum(seen) == encoded + 6 + encoded + 5 + 3 * (3 + 1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_other_families_and_caches_complete_prefixes_too(exact, family):
    policy = exact(family)
    (row,) = probing(policy, [pictures()[0]], generate={"temperature": 0.0})
    # Greedy completions of a greedy answer are that answer.
    assert all(list(outcome.tokens) == row.steps.ids.tolist() for outcome in row.outcomes[:-1])


def test_cuts(endless):
    policy = endless
    inner = Generate(policy, stream=Stream(0))
    (row,) = Generate(policy, stream=Stream(0), max_completion_length=8).rollout(pictures()[:1])

    def cuts(**options):
        return WithPrefixRollouts(inner, stream=Stream(0), **options).cuts(row)

    # The worked example of SPO: the positions 0 and 4 are the last tokens of their prefixes.
    for noted, wanted in (
        ([0.99, 0.5, 0.95, 0.6, 0.97, 0.7, 0.99, 0.3], [1, 5]),
        ([0.4, 0.99, 0.6, 0.97, 0.7, 0.99, 0.3, 0.95], [0, 4]),
        ([0.99] * 8, []),
    ):
        row = replace(row, notes={**row.notes, "logp": torch.tensor(noted).log()})
        assert cuts(interval=2) == wanted
    assert cuts(cut="token", interval=3) == [3, 6] and cuts(cut="token", interval=4) == [4]
    assert cuts(cut="token", interval=3, at_start=True) == [0, 3, 6]
    ids = policy.prompt_encoder.answer("fox. the. quick fox.")[:-1]
    row = replace(row, steps=replace(row.steps, ids=ids))
    texts = [
        policy.prompt_encoder.text(ids[:end]) for end in cuts(cut="separator", separator=".", interval=1)
    ]
    assert texts == ["fox.", "fox. the."]  # not where nothing is left
    ends = cuts(cut="separator", separator=".", interval=2)
    assert [policy.prompt_encoder.text(ids[:end]) for end in ends] == ["fox. the."]


def test_the_right_answer_is_scored_after_every_prefix(endless):
    policy = endless
    prompt = replace(pictures()[0], target="the fox")
    (row,) = probing(policy, [prompt], num_probes=0, score_target=True, opener="0", at_start=True)
    encode = policy.prompt_encoder.answer
    opener, target = encode("0")[:-1], encode("the fox")[:-1]
    assert [outcome.end for outcome in row.outcomes] == [0, 2, 4, 6]
    for outcome in row.outcomes[:-1]:
        ids = torch.cat([row.steps.ids[: outcome.end], opener, target])
        logp = plainly(policy, prompt, ids).log_softmax(-1).gather(1, ids[:, None])[-len(target) :, 0]
        assert outcome.recorded["answer_likelihood"] == pytest.approx(float(logp.mean().exp()), rel=1e-4)
        assert outcome.recorded["answer_probability"] == pytest.approx(float(logp.exp().mean()), rel=1e-4)
        assert outcome.text == policy.prompt_encoder.text(row.steps.ids[: outcome.end])
    assert row.outcomes[-1].recorded == {}


def test_completions_after_an_opener_are_short_and_record_their_confidence(endless):
    policy = endless
    prompt = replace(pictures()[0], answers=(Outcome(text="fox"),))
    (row,) = probing(policy, [prompt], score_target=True, opener="0 1", max_probe_length=3)
    opener = policy.prompt_encoder.answer("0 1")[:-1].tolist()
    assert [outcome.end for outcome in row.outcomes] == [2, 2, 4, 4, 6]
    for outcome in row.outcomes[:-1]:
        start = outcome.end + len(opener)
        assert list(outcome.tokens[outcome.end : start]) == opener and len(outcome.tokens) == start + 3
        logp = plainly(policy, prompt, torch.tensor(outcome.tokens))[start:].log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1).mean()
        assert outcome.recorded["confidence"] == pytest.approx(math.exp(-entropy), rel=1e-4)
    assert row.outcomes[0].recorded["answer_likelihood"] == row.outcomes[1].recorded["answer_likelihood"]


def test_a_right_answer_that_is_no_text_is_named(policy):
    with pytest.raises(ValueError, match="prompt 'p0' is None and it has 0 recorded answers"):
        probing(policy, pictures(), score_target=True)


def test_evaluations_get_no_completions(policy):
    stream = Stream(0, purpose="evaluate")
    inner = Generate(policy, stream=stream, max_completion_length=4)
    (row,) = WithPrefixRollouts(inner, stream=stream).rollout(pictures()[:1])
    assert len(row.outcomes) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_probes": 0}, "nothing to do"), ({"cut": "separator", "separator": ""}, "which is empty")],
)
def test_options_without_a_meaning_are_errors(policy, options, words):
    with pytest.raises(ValueError, match=words):
        WithPrefixRollouts(Generate(policy, stream=Stream(0)), stream=Stream(0), **options)


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    engine = [
        "tests.support.toys:ToyNoting",
        {"name": "vision.with_prefix_rollouts", "cut": "token", "interval": 1, "num_probes": 2},
    ]
    short = {
        "rollout": {**EVERYTHING["rollout"], "engine": engine},
        "advantage": ["total", "mean_by_end", "increments"],
        "max_steps": 5,
    }
    whole = resumed(tmp_path / "whole", **short)
    killed(tmp_path / "cut", at=4, **short)
    assert_alike(resumed(tmp_path / "cut", **short), whole)


def test_another_model_completes_the_prefixes(policy, checkpoint):
    prover = shaken(Tokens(model=str(checkpoint("llava")), dtype="float64"), seed=3)
    asked, greedy = list(pictures()), {"temperature": 0.0}
    rows = probing(policy, asked, generate=greedy, num_probes=1, prover=prover)
    plain = probing(policy, asked, generate=greedy, num_probes=1)
    assert not any(weight.requires_grad for weight in prover.module.parameters())
    differ = 0
    for row, own in zip(rows, plain, strict=True):
        assert torch.equal(row.steps.ids, own.steps.ids), "answers are the policy's"
        for outcome, other in zip(row.outcomes[:-1], own.outcomes[:-1], strict=True):
            made = torch.tensor(outcome.tokens)
            best = plainly(prover, row.prompt, made).argmax(-1)
            assert torch.equal(made[outcome.end :], best[outcome.end :])
            differ += outcome.tokens != other.tokens
    assert differ


def test_a_prover_of_other_tokens_is_refused(policy, checkpoint):
    with pytest.raises(ValueError, match="is of type|has another vocabulary"):
        probing(policy, pictures(), prover=Tokens(model=str(checkpoint("qwen2_5_vl"))))
