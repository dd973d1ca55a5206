"""Answers of vLLM servers that were asked several steps ahead, also those that newer weights continue."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.build import build, check
from mmrl.config.binding import Recipe
from mmrl.config.loading import ConfigError, merge
from mmrl.config.schema import Config, Piece, parse
from mmrl.core.types import VERSION, Clock, PromptError
from mmrl.runtime import checkpoint
from mmrl.training.loop import train
from mmrl.vision.policies.tokens import Tokens
from tests.support.resuming import Killed, without_times
from tests.support.vllm_stand_in import FORWARD, StandIn
from tests.vision.test_vllm import PROMPTS, engine_of, shift, texts

STILLS = PROMPTS[:3]
LONG = {"max_completion_length": 8}
WHOLE = {"dtype": "float32", "freeze_vision_tower": False}


class Loading(StandIn):
    """Has a policy of its own, into which it loads the weights that it is brought."""

    def load(self, weights):
        with FORWARD:
            self.policy.load(weights.parent)


@pytest.fixture
def model(checkpoint):
    return checkpoint("qwen2_5_vl")


def tokens(model):
    return Tokens(model=str(model), **WHOLE)


@pytest.fixture
def server(model):
    made = Loading(tokens(model), PROMPTS)
    yield made
    made.kill()


class Steps:
    """An engine that is asked ahead as by the training loop: for a later step, with the weights of now."""

    def __init__(self, model, folder, url, lag, **options):
        self.policy, self.now, self.weights = tokens(model), 0, {}
        recipe = Recipe(Piece("p", {"model": "m"}), (), 3, 0, (), lambda: Clock(self.now), lag)
        self.engine = engine_of(self.policy, folder, url, recipe=recipe, **LONG, **options)

    def ask(self, step, now, prompts):
        if now not in self.weights:
            shift(self.policy)
        self.weights[now] = copy.deepcopy(self.policy.module.state_dict())
        self.engine.stream.step, self.now = step, now
        self.engine.ask(prompts)

    def collect(self, step, prompts):
        self.engine.stream.step = self.now = step
        return self.engine.rollout(prompts)

    def logp(self, row, version):
        """Compute the log-probabilities of a row with the weights of a version."""
        now = copy.deepcopy(self.policy.module.state_dict())
        self.policy.module.load_state_dict(self.weights[version])
        with torch.no_grad():
            logp = self.policy(self.policy.collate((row,))).logp[0]
        self.policy.module.load_state_dict(now)
        return logp


def sent_of(server):
    """List the requests of a server as (prompt tokens, tokens so far, most tokens, version)."""
    known = sorted(server.known, key=len, reverse=True)
    listed = []
    for path, content in server.told:
        if path == "inference/v1/generate":
            ids = tuple(content["token_ids"])
            size = next(len(begin) for begin in known if ids[: len(begin)] == begin)
            listed.append((len(ids) - size, content["sampling_params"]["max_tokens"], content["cache_salt"]))
    return listed


def test_the_weights_of_each_step_write_their_part_of_an_answer(model, server, tmp_path):
    steps = Steps(model, tmp_path, server.url, 4, partial_rollouts=True)
    listed = [STILLS[:2] * 2, list(STILLS[1:3]), list(STILLS[:1])]
    for step, now, prompts in ((4, 0, listed[0]), (5, 1, listed[1]), (6, 2, listed[2]), (7, 3, listed[2])):
        steps.ask(step, now, prompts)
    rows = steps.collect(4, listed[0])
    # 8 tokens over 4 steps are 2 tokens a step.
    assert [row.notes[VERSION].tolist() for row in rows] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 4
    assert len({tuple(row) for row in texts(rows)}) == 4
    for row in rows:
        by = [steps.logp(row, version) for version in range(4)]
        wanted = torch.stack([by[i // 2][i] for i in range(8)])
        torch.testing.assert_close(row.notes["logp"], wanted, rtol=0, atol=1e-5)
        assert (by[0] - by[3])[2:].abs().min() > 1e-4  # so the weights matter
    versions = list(dict.fromkeys(salt for *_, salt in sent_of(server)))
    # The weights of step 3, the last before step 4, have no limit but that of the answer.
    assert sorted(set(sent_of(server)), key=lambda one: (versions.index(one[2]), one[0])) == [
        (0, 2, versions[0]),
        *((done, 2, versions[1]) for done in (0, 2)),
        *((done, 2, versions[2]) for done in (0, 2, 4)),
        *((done, 2, versions[3]) for done in (0, 2, 4, 6)),
    ]
    # Near the end of a run later steps ask nothing, and the latest weights complete the answers.
    last = steps.collect(5, listed[1])
    assert [row.notes[VERSION].tolist() for row in last] == [[1, 1, 2, 2, 3, 3, 3, 3]] * 2
    assert server.version == versions[3]
    assert all(5 - row.notes[VERSION].min() <= 4 for row in last)


def test_answers_that_end_early_are_not_continued(model, server, tmp_path):
    steps = Steps(model, tmp_path, server.url, 2, partial_rollouts=3)
    steps.engine.compare_groups = lambda *_: None  # with the policy, which would not have ended so
    end = steps.policy.prompt_encoder.end[0]

    def ends(reply):
        choice = reply["choices"][0]  # of the first answer alone
        choice["token_ids"] = [*choice["token_ids"][:1], end]
        content = choice["logprobs"]["content"][:2]
        choice["logprobs"]["content"] = [content[0], {**content[1], "token_id": end}]
        return reply

    server.fault = lambda reply: ends(reply) if len(reply["choices"]) == 2 else reply
    steps.ask(2, 0, STILLS[:1] * 2)
    steps.engine.ahead.begun[0].groups[0].answers.result()
    steps.ask(3, 1, STILLS[1:2])
    first, second = steps.collect(2, STILLS[:1] * 2)
    assert first.notes[VERSION].tolist() == [0, 0] and first.outcomes[0].tags["finish"] == "stop"
    assert second.notes[VERSION].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    steps.collect(3, STILLS[1:2])  # so that all requests have arrived, in any order
    assert sorted((done, most) for done, most, _ in sent_of(server)) == [(0, 3), (0, 3), (3, 5), (3, 5)]


def test_later_requests_wait_for_earlier_answers_and_then_for_their_weights(model, server, tmp_path):
    steps, gate = Steps(model, tmp_path, server.url, 3), threading.Event()
    steps.engine.compare_groups = lambda *_: None  # which waits for answers
    server.fault = lambda reply: gate.wait(300) and reply
    asked = [[STILLS[0]], [STILLS[1]], [STILLS[0]]]
    for step, prompts in enumerate(asked):
        steps.ask(step + 3, step, prompts)
    assert [path for path in server.paths() if path == "pause"] == ["pause"]  # the first weights alone
    assert len(list(steps.engine.folder.glob("*/model.safetensors"))) == 3
    gate.set()
    rows = [steps.collect(step + 3, prompts)[0] for step, prompts in enumerate(asked)]
    for version, row in enumerate(rows):
        torch.testing.assert_close(row.notes["logp"], steps.logp(row, version), rtol=0, atol=1e-5)
    assert texts(rows[:1]) != texts(rows[2:]) and server.paths().count("pause") == 3


def test_an_error_in_the_queue_ends_all_that_was_asked(model, server, tmp_path):
    steps = Steps(model, tmp_path, server.url, 3)
    steps.engine.compare_groups = lambda *_: None
    gate = threading.Event()

    def fails(reply):
        gate.wait(300)
        return {"status": 400, "error": "no"}

    server.fault = fails
    for step in range(3):
        steps.ask(step + 3, step, [STILLS[step]])
    gate.set()
    for step in range(3):
        with pytest.raises(ValueError, match="refuses prompt 'text'"):
            steps.collect(step + 3, [STILLS[step]])
    assert server.paths().count("pause") == 1


def test_a_prompt_that_cannot_be_read_leaves_the_queue_alone(model, server, tmp_path, monkeypatch):
    steps, gate = Steps(model, tmp_path, server.url, 3), threading.Event()
    steps.engine.compare_groups = lambda *_: None
    server.fault = lambda reply: gate.wait(300) and reply
    for step in range(2):
        steps.ask(step + 3, step, [STILLS[step]])

    def unreadable(prompt):
        raise PromptError(prompt.uid, "cut short")

    with monkeypatch.context() as patched:
        patched.setattr(steps.policy.prompt_encoder, "encode", unreadable)
        with pytest.raises(PromptError):
            steps.ask(5, 2, [STILLS[0]])
    gate.set()
    assert all(len(steps.collect(step + 3, [STILLS[step]])) == 1 for step in range(2))


def test_a_step_that_is_asked_again_is_collected_once(model, server, tmp_path):
    steps = Steps(model, tmp_path, server.url, 2)
    for prompts in ([STILLS[0]], [STILLS[1]]):  # a prompt of another process was left out
        steps.ask(2, 0, prompts)
    steps.ask(3, 1, [STILLS[0]])
    for step, prompt in ((2, STILLS[1]), (3, STILLS[0])):
        (row,) = steps.collect(step, [prompt])
        torch.testing.assert_close(row.notes["logp"], steps.logp(row, step - 2), rtol=0, atol=1e-5)
    assert not steps.engine.ahead.begun


# ---- runs


def plan(model, url, folder, lag, **engine):
    served = {"name": "vision.vllm", "servers": [url], "weights_folder": str(folder / "weights"), **LONG}
    return {
        "policy": {"name": "vision.tokens", "model": str(model), **WHOLE},
        "data": f"{__name__}:stills",
        "rollout": {
            "engine": [{**served, **engine}],
            "num_prompts": 2,
            "num_generations": 2,
            "max_staleness": lag,
        },
        "rewards": ["tests.vision.mixed:letters"],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        "learn": {"learning_rate": 1e-2, "optimizer": "sgd"},
        "report": {"trackers": [], "log_completions": False},
        "max_steps": lag + 3,
        "save_steps": 2,
        "output_dir": str(folder / "run"),
    }


def stills():
    """Ask about no image, one and two."""
    return list(STILLS)


def killed(raw, at):
    run = build(parse(raw, Config), quiet=True)
    finish = run.finish

    def dying(step, *given):
        if step == at:
            raise Killed
        finish(step, *given)

    run.finish = dying
    with pytest.raises(Killed):
        train(run)
    return run


def finished(raw):
    run = build(parse(raw, Config), quiet=True)
    train(run)
    return run


@pytest.mark.parametrize(
    ("lag", "at", "options"),
    [
        (2, 4, {}),
        pytest.param(4, 3, {"partial_rollouts": 3}, marks=pytest.mark.slow),
        pytest.param(4, 5, {"partial_rollouts": True}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(model, server, tmp_path, lag, at, options):
    whole = finished(plan(model, server.url, tmp_path / "whole", lag, **options))
    killed(plan(model, server.url, tmp_path / "killed", lag, **options), at)
    again = finished(plan(model, server.url, tmp_path / "killed", lag, **options))
    models = [
        load_file(run.folder / f"checkpoint-{lag + 3}" / checkpoint.MODEL / "model.safetensors")
        for run in (whole, again)
    ]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())
    records = [
        [
            {name: value for name, value in record.items() if not name.startswith("vllm/")}
            for record in without_times(run.journal.read())
        ]
        for run in (whole, again)
    ]
    assert records[0] == records[1]
    oldest = [record["sampling/age/max"] for record in records[0]]
    assert oldest == [min(step, lag) for step in range(lag + 3)]
    means = [record["sampling/age/mean"] for record in records[0]]
    assert (means < oldest) if options else means == oldest
    assert records[0][-1]["sampling/age/older_share"] == 1.0


def test_partial_rollouts_need_a_lag_of_two_steps(model, tmp_path):
    raw = plan(model, "http://a", tmp_path, 1, partial_rollouts=True)
    with pytest.raises(ConfigError, match="'partial_rollouts' let newer weights continue.* is 1"):
        check(parse(raw, Config))
    for options in ({"partial_rollouts": 0}, {"partial_rollouts": "yes"}):
        with pytest.raises(ConfigError, match="partial_rollouts"):
            check(parse(plan(model, "http://a", tmp_path, 2, **options), Config))
    check(parse(merge(raw, {"rollout": {"max_staleness": 2}}), Config))


def test_folders_of_weights_in_flight_stay_and_older_ones_go(model, server, tmp_path):
    steps = Steps(model, tmp_path, server.url, 3)
    for step in range(6):
        steps.ask(step + 3, step, [STILLS[0]])
        if step > 2:
            steps.collect(step, [STILLS[0]])
            kept = [path for path in Path(steps.engine.folder).iterdir() if path.is_dir()]
            assert len(kept) <= 5
