"""Conversations on servers: what a server saw is what is learned, also where servers or the learner die."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.training.loop import train
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.wire import features
from mmrl.vision.tools.images import crop
from tests.runtime.test_real_processes import SPEAKING, TALKING
from tests.support.resuming import Killed, without_times
from tests.support.sampling_stand_in import Sampling, watch
from tests.vision import tiny
from tests.vision.talking import Talkative, ruled
from tests.vision.test_vllm import engine_of


@contextmanager
def starting():
    """Start stand-ins that sample from a policy."""
    with pytest.MonkeyPatch.context() as patch:
        seen, made = watch(patch), []
        patch.setattr("mmrl.vision.serving.servers.PAUSE", 0.01)

        def go(policy, count=1):
            new = [Sampling(policy, seen) for _ in range(count)]
            made.extend(new)
            return new

        yield go
        for one in made:
            if not one.dead.is_set():
                one.kill()


@pytest.fixture
def start(exact):
    with starting() as go:
        yield go


@pytest.fixture
def policy(exact, monkeypatch):
    policy = exact("qwen2_5_vl")
    monkeypatch.setattr(policy.prompt_encoder, "end", policy.prompt_encoder.end)  # `Talkative` sets it
    return policy


def asked():
    several = [tiny.picture(seed=2), "and", tiny.picture(seed=3, height=84), "differ?"]
    return [tiny.ask("one", tiny.picture(seed=1), "what"), tiny.ask("two", *several)] * 2


def talking(policy, folder, servers, tools=(crop, ruled), most=0):
    urls = [one.url for one in servers]
    served = engine_of(policy, folder, *urls, stream=Stream(4), max_completion_length=6)
    options = {"max_turns": 4, "only_n_most_recent_images": most}
    return Talkative(served, stream=Stream(4), tool=tools, **options)


def texts(rows):
    return [(row.steps.ids.tolist(), row.logged, row.outcomes[-1].tags) for row in rows]


@pytest.mark.parametrize(("most", "keeps"), [(0, True), (1, False)])
def test_a_row_is_token_by_token_what_the_server_saw(policy, start, tmp_path, most, keeps):
    (server,) = start(policy)
    server.media = set() if keeps else None
    rows = talking(policy, tmp_path, [server], most=most).rollout(asked())
    assert len(rows) > 4 if most else len(rows) == 4
    requests = list(server.answered)
    assert max(len(request["features"]["mm_hashes"]["image"]) for request, _ in requests) > 2
    used = []
    for row in rows:
        ids, whole = told_of(policy, row, requests[0][0]["cache_salt"])
        places, logp, first = [], [], len(row.steps.prompt.ids)
        for number, (request, (choice,)) in enumerate(requests):
            begun, answer = request["token_ids"], choice["token_ids"]
            media = {name: request["features"][name]["image"] for name in ("mm_hashes", "mm_placeholders")}
            alike = all(whole[name]["image"][: len(listed)] == listed for name, listed in media.items())
            here = len(begun) >= first and ids[: len(begun + answer)] == begun + answer
            if number not in used and alike and here:
                used.append(number)
                places += range(len(begun), len(begun + answer))
                logp += [token["logprob"] for token in choice["logprobs"]["content"]]
        suffix = row.steps.suffix
        chosen = torch.arange(len(row.steps.ids)) if suffix is None else suffix.chosen
        assert [place - first for place in places] == chosen.tolist()
        torch.testing.assert_close(row.notes["logp"], torch.tensor(logp), rtol=0, atol=0)
    assert sorted(used) == list(range(len(requests)))  # every turn is in one row


def told_of(policy, row, salt):
    """Return the tokens of a row, and its media as a request tells of them."""
    prompt, suffix = row.steps.prompt, row.steps.suffix
    if suffix is None:
        return [*prompt.ids.tolist(), *row.steps.ids.tolist()], features(policy.prompt_encoder, prompt, salt)
    later = suffix.media
    media = {name: torch.cat([value, later.get(name, value[:0])]) for name, value in prompt.media.items()}
    ids = torch.cat([prompt.ids, suffix.ids])
    encoded = EncodedPrompt(prompt.uid, ids, prompt.positions, media)
    return ids.tolist(), features(policy.prompt_encoder, encoded, salt)


def test_media_that_a_server_keeps_go_by_their_hash_until_it_drops_them(policy, start, tmp_path):
    (server,) = start(policy)
    whole = talking(policy, tmp_path, [server])
    rows = whole.rollout(asked())
    all_bytes = whole.engine.pop_metrics()["vllm/request_bytes"]
    server.media = set()
    short = talking(policy, tmp_path / "short", [server])
    assert texts(short.rollout(asked())) == texts(rows)
    items = [item for request, _ in server.answered for item in request["features"]["kwargs_data"]["image"]]
    assert items.count(None) > 5
    metrics = short.engine.pop_metrics()
    print(f"bytes a request: {all_bytes:.0f} with all media, {metrics['vllm/request_bytes']:.0f} by hash")
    assert metrics["vllm/request_bytes"] < all_bytes / 2 and metrics["vllm/asked_again"] == 0
    answer = server.answer

    def forgetful(request):
        server.media.clear()
        return answer(request)

    server.answer = forgetful
    assert texts(talking(policy, tmp_path / "again", [server]).rollout(asked())) == texts(rows)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["within a turn", "between turns"])
def test_a_server_that_dies_in_a_conversation_changes_nothing(policy, start, tmp_path, moment):
    whole = talking(policy, tmp_path, start(policy)).rollout(asked())
    servers = start(policy, 2)
    if moment == "within a turn":
        servers[0].left = 5

    def deadly(number: int) -> str:
        """Say a number again.

        Args:
            number: Which.
        """
        if moment == "between turns" and not servers[0].dead.is_set():
            servers[0].kill()
        return ruled(number)

    deadly.__name__ = "ruled"
    engine = talking(policy, tmp_path / "two", servers, tools=(crop, deadly))
    assert texts(engine.rollout(asked())) == texts(whole)
    assert servers[0].dead.is_set() and len(engine.engine.asking.alive) == 1


# ---- runs


def made(name, folder, model, servers):
    """Make a run of conversations whose servers sample from its policy."""
    engine = {"name": "vision.vllm", "servers": [one.url for one in servers], "timeout": 0.5}
    engine |= {"max_completion_length": 6, "weights_folder": str(folder / "weights")}
    policy = {"name": "vision.tokens", "model": str(model), "dtype": "float32", "freeze_vision_tower": False}
    rollout = {**TALKING["rollout"], "engine": [engine, TALKING["rollout"]["engine"][1]], "policy": ""}
    plan = {**SPEAKING, "rollout": rollout, "references": {}, "policy": policy, "max_steps": 2}
    plan = merge(plan, {"objective": {"penalty": []}, "output_dir": str(folder / name)})
    run = build(parse(plan, Config), quiet=True)
    for server in servers:
        server.follow(run.policy)
    return run


@pytest.fixture(scope="module")
def whole(checkpoint, exact, tmp_path_factory):
    """Train such a run to its end."""
    with starting() as start, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.reporting.html.write_page", lambda folder: folder)
        servers = start(exact("qwen2_5_vl"), 2)
        run = made("whole", tmp_path_factory.mktemp("whole"), checkpoint("qwen2_5_vl"), servers)
        train(run)
        return run


def records(run):
    listed = without_times(run.journal.read())
    return [{name: value for name, value in one.items() if not name.startswith("vllm/")} for one in listed]


def assert_same_run(run, whole):
    assert str(records(run)) == str(records(whole)) and len(records(whole)) >= 2
    for one, other in zip(run.policy.module.parameters(), whole.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)


DEATHS = {"the learner": (Killed, None), "all servers": (ConnectionError, "no server was alive for `timeout")}


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("dies", ["a server", *DEATHS])
def test_a_run_whose_processes_die_in_a_conversation_learns_every_row_once(
    whole, checkpoint, exact, start, tmp_path, dies
):
    servers = start(exact("qwen2_5_vl"), 2)
    make = lambda: made("killed", tmp_path, checkpoint("qwen2_5_vl"), servers)
    run, turns = make(), []
    inner = run.method.engine.engine
    begin = inner.begin_turns

    def dying(*given):
        turns.append(run.stream.step)
        if turns[-2:] == [1, 1] and turns.count(1) == 2:  # the second turn of the second step
            if dies == "the learner":
                raise Killed
            for server in servers[: 1 if dies == "a server" else 2]:
                server.left = 0  # each dies when it is asked
        return begin(*given)

    inner.begin_turns = dying
    if dies == "a server":
        train(run)
    else:
        error, words = DEATHS[dies]
        with pytest.raises(error, match=words):
            train(run)
        assert [one["step"] for one in run.journal.read() if "step" in one] == [0]  # nothing of the second
        for server in servers:
            if server.dead.is_set():
                server.start()
        run = make()
        train(run)
    assert_same_run(run, whole)
