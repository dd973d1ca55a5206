"""Rollouts of vLLM servers, as a stand-in answers them: what is sent, what is refused, servers that die."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.build import check
from mmrl.cli import main
from mmrl.config.binding import Recipe
from mmrl.config.loading import ConfigError, merge, read
from mmrl.config.schema import Config, Piece, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.runtime.json_client import JsonClient
from mmrl.vision.engines.vllm import Vllm
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving import servers
from mmrl.vision.serving.agreement import gap
from mmrl.vision.serving.command import command_lines
from mmrl.vision.serving.served_family import ServedFamily, as_bytes
from mmrl.vision.serving.wire import (
    SERVED,
    Sampling,
    WrongAnswer,
    answers_of,
    media_of,
    packed,
    request_of,
)
from tests.support.vllm_stand_in import StandIn
from tests.vision.tiny import ask, clip, picture

GOLDEN = Path(__file__).with_name("vllm_0_32.json")
PROMPTS = [
    ask("text", "How many?"),
    ask("image", picture(seed=1), "What is this?"),
    ask("images", picture(seed=1), "and", picture(seed=2, height=84), "differ?"),
    ask("video", clip(4), "When?"),
]
LORA = {"lora_rank": 4, "freeze_vision_tower": False}


@pytest.fixture
def policy(copied):
    return copied("qwen2_5_vl")


@pytest.fixture
def stand_in(policy):
    made = StandIn(policy, PROMPTS)
    yield made
    if made.left is None:
        made.kill()


def engine_of(policy, folder, *urls, given=None, stream=None, recipe=None, **options):
    recipe = recipe or Recipe(Piece("vision.tokens", {"model": "m", **(given or {})}), (), 3, 0, (), Clock)
    options = {"max_completion_length": 8, "request_timeout": 300.0, "timeout": 120.0, **options}
    return Vllm(
        policy, stream=stream or Stream(3), recipe=recipe, servers=urls, weights_folder=str(folder), **options
    )


def shift(policy):
    with torch.no_grad():
        for weight in policy.module.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape) * 0.05)


def texts(rows):
    return [row.notes["token"].tolist() for row in rows]


# ---- what is sent


def small_encoder(kind="qwen2_5_vl"):
    vision = SimpleNamespace(spatial_merge_size=2)
    config = SimpleNamespace(
        model_type=kind, vision_config=vision, image_token_id=90, video_token_id=91, get_text_config=None
    )
    images = SimpleNamespace(
        do_rescale=True, rescale_factor=1 / 255, image_mean=[0.5, 0.25, 0.0], image_std=[0.5, 0.25, 1.0]
    )
    return SimpleNamespace(
        core=SimpleNamespace(config=config),
        processor=SimpleNamespace(image_processor=images),
        placeholders=[90, 91],
        end=[80, 81],
    )


def normalised(levels):
    """Normalise patches (S, 3 * 2) of levels as `small_encoder` does, by hand."""
    mean, std = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([0.5, 0.25, 1.0])
    return ((levels.view(-1, 3, 2) / 255 - mean[:, None]) / std[:, None]).reshape(levels.shape)


def seen_prompt():
    """Make a prompt with an image of 2 x 2 patches and a video of 2 x 2 x 2, each patch of two pixels."""
    ids = torch.tensor([1, 90, 2, 91, 91, 3])
    media = {
        "pixel_values": normalised(torch.arange(24.0).view(4, 6)),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values_videos": normalised(torch.arange(48.0).view(8, 6)),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
        "second_per_grid_ts": torch.tensor([0.5]),
    }
    return EncodedPrompt("seen", ids, torch.zeros(3, 6), media)


def test_the_format_of_requests_is_that_of_the_golden_file():
    sampling = Sampling(4, 0.7, top_p=0.9, top_k=5, min_p=0.1)
    sent = request_of(
        small_encoder(), seen_prompt(), sampling, model="policy", seed=11, n=2, salt="0123456789abcdef"
    )
    assert sent == json.loads(GOLDEN.read_text())["request"]


def test_an_answer_that_a_server_gave_is_read():
    golden = json.loads(GOLDEN.read_text())
    first, second = answers_of(json.dumps(golden["answer"]).encode(), golden["asked"], "p", "default")
    assert first.ids.tolist() == golden["answer"]["choices"][0]["token_ids"]
    assert first.logp[0].item() == pytest.approx(
        golden["answer"]["choices"][0]["logprobs"]["content"][0]["logprob"]
    )
    assert [first.stopped, second.stopped] == [
        choice["finish_reason"] == "stop" for choice in golden["answer"]["choices"]
    ]


def test_tensors_travel_as_other_readers_of_msgpack_have_them():
    msgpack = pytest.importorskip("msgpack")
    value = {
        "a": [None, True, 7, "ü"],
        "b": torch.tensor([[1.5, -2.0]]),
        "c": torch.tensor(3, dtype=torch.int64),
    }
    read = msgpack.unpackb(packed(value), ext_hook=lambda code, data: (code, data))
    assert read["a"] == [None, True, 7, "ü"]
    kind, shape, (code, data) = read["b"]
    assert (kind, shape, code) == ("float32", [1, 2], 3)
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [1.5, -2.0]
    assert read["c"][:2] == ["int64", []]
    with pytest.raises(TypeError, match="complex"):
        packed(1j)


def test_pixels_become_the_bytes_that_they_were_and_others_are_refused():
    levels = torch.randint(0, 256, (5, 6)).float()
    processor = small_encoder().processor.image_processor
    assert torch.equal(as_bytes(processor, normalised(levels), "p"), levels.to(torch.uint8))
    with pytest.raises(ValueError, match="the pixels of prompt 'p' are no bytes"):
        as_bytes(processor, normalised(levels + 0.4), "p")


def test_kinds_of_media_are_told_apart(policy):
    kinds = [media_of(policy.prompt_encoder.encode(prompt)) for prompt in PROMPTS]
    assert kinds == ["text", "image", "several images", "video"]


@pytest.mark.parametrize(
    ("family", "kind", "why"),
    [
        ("molmo2", "images", " (it can to gemma3, gemma4, glm46v,"),
        ("kimi_k25", "images", " (it can to gemma3, gemma4, glm46v,"),
        ("llava", "videos", " (it can to gemma4, glm46v, glm4v,"),
    ],
)
def test_media_that_cannot_be_sent_are_refused_before_a_server_is_asked(
    policy, stand_in, tmp_path, monkeypatch, family, kind, why
):
    engine = engine_of(policy, tmp_path, stand_in.url)
    monkeypatch.setattr(policy.prompt_encoder.core.config, "model_type", family)
    prompt = PROMPTS[1 if kind == "images" else 3]
    message = f"cannot send {kind} to a model of type '{family}', as prompt '{prompt.uid}' has them"
    with pytest.raises(ConfigError, match=re.escape(message + why)):
        engine.rollout([PROMPTS[0], prompt])
    assert not stand_in.told and not engine.folder.exists()


# ---- rollouts


def test_rows_are_those_of_the_servers_answers_with_weights_and_caches_renewed(policy, stand_in, tmp_path):
    engine = engine_of(policy, tmp_path, stand_in.url)
    asked = [PROMPTS[i] for i in (0, 1, 0, 1, 0)]
    rows = engine.rollout(asked)
    assert [row.prompt.uid for row in rows] == ["text", "image", "text", "image", "text"]
    assert rows[0].steps.prompt is policy.prompt_encoder.encode(PROMPTS[0])
    assert gap(policy, rows) < 1e-5
    seed = next(sent["sampling_params"]["seed"] for path, sent in stand_in.told if "token_ids" in sent)
    assert texts(engine.rollout(asked)) == texts(rows)  # of the same step
    told = ["pause", "update_weight_version", "collective_rpc", "reset_prefix_cache", "reset_mm_cache"]
    told += ["reset_encoder_cache", "update_weight_version", "resume"]
    assert stand_in.paths() == told  # once: weights had not changed
    shift(policy)
    engine.stream.step = 1
    other = engine.rollout(asked)
    assert stand_in.paths() == told * 2 and texts(other) != texts(rows)
    assert {kind for kind, *_ in engine.compared} == {"text", "image"}
    assert seed != stand_in.told[-1][1]["sampling_params"]["seed"]
    assert engine.pop_metrics()["vllm/servers"] == 1.0


def test_an_adapter_is_loaded_in_place_of_the_one_before(checkpoint, tmp_path):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **LORA)
    server = StandIn(policy, PROMPTS)
    engine = engine_of(policy, tmp_path, server.url, given=LORA)
    for _ in range(4):
        engine.rollout(PROMPTS[:3])
        shift(policy)
    loaded = [content["lora_path"] for path, content in server.told if path == "v1/load_lora_adapter"]
    assert len({*loaded}) == 4 and {sent["model"] for path, sent in server.told if "token_ids" in sent} == {
        "policy-adapter"
    }
    assert [Path(path).exists() for path in loaded] == [False, False, True, True]
    with pytest.raises(ValueError, match="images .prompt 'image.*videos .prompt 'video'. at the same time"):
        engine.rollout(PROMPTS)
    server.kill()


def test_greedy_answers_are_asked_once_for_a_group(policy, stand_in, tmp_path):
    rows = engine_of(policy, tmp_path, stand_in.url, temperature=0.0).rollout(PROMPTS[:1] * 3)
    sent = [content["sampling_params"] for path, content in stand_in.told if "token_ids" in content]
    assert [settings["n"] for settings in sent] == [1] and texts(rows) == texts(rows[:1]) * 3


def test_the_size_of_prompts_as_they_are_sent_is_a_metric(policy, stand_in, tmp_path):
    engine = engine_of(policy, tmp_path, stand_in.url)
    engine.rollout(PROMPTS[:2] * 2)
    sent = [len(json.dumps(content)) for path, content in stand_in.told if "token_ids" in content]
    assert len(sent) == 2 and engine.pop_metrics()["vllm/request_bytes"] == sum(sent) / 2
    assert engine.pop_metrics()["vllm/request_bytes"] == 0.0  # nothing was asked since


def test_answers_that_were_asked_ahead_are_of_the_weights_of_that_time(policy, stand_in, tmp_path):
    engine = engine_of(policy, tmp_path, stand_in.url)
    engine.ask(PROMPTS[:1] * 2)
    version, compared = engine.asking.weights.version, {*engine.compared}
    assert {kind for kind, *_ in compared} == {"text"}  # at once, while the policy has these weights
    shift(policy)
    rows = engine.rollout(PROMPTS[:1] * 2)  # those that were asked; the policy is not compared with them
    assert len(rows) == 2 and engine.compared == compared and stand_in.version == version


def test_weights_stay_until_answers_that_were_asked_ahead_are_there(policy, stand_in, tmp_path):
    """As where an evaluation brings newer weights to servers that work on the next step."""
    ahead, other = (engine_of(policy, tmp_path, stand_in.url, parallel=1) for _ in range(2))
    gate = threading.Event()
    ahead.rollout(PROMPTS)  # which compares answers, as asking ahead does not any more
    stand_in.told.clear()
    stand_in.fault = lambda reply: gate.wait(300) and reply
    ahead.ask(PROMPTS)  # four prompts, one after another
    shift(policy)
    threading.Timer(0.3, gate.set).start()
    other.rollout(PROMPTS[:1])
    assert [row.prompt.uid for row in ahead.rollout(PROMPTS)] == [prompt.uid for prompt in PROMPTS]
    assert stand_in.paths().count("collective_rpc") == 1 and ahead.pop_metrics()["vllm/asked_again"] == 0
    assert [path for path, _ in stand_in.told][:5] == ["inference/v1/generate"] * 4 + ["pause"]


def test_draws_from_fewer_tokens_are_compared_by_a_request_of_their_own(policy, stand_in, tmp_path):
    engine_of(policy, tmp_path, stand_in.url, top_p=0.5).rollout(PROMPTS[:1] * 2)
    sent = [content["sampling_params"] for path, content in stand_in.told if "token_ids" in content]
    assert [(settings["top_p"], settings["n"]) for settings in sent] == [(0.5, 2), (1.0, 1)]


# ---- faults


def faulty(name, value):
    def change(reply):
        reply = copy.deepcopy(reply)
        choice = reply["choices"][0]
        match name:
            case "echo":
                reply["prompt_token_ids"] = value
            case "fewer":
                reply["choices"] = reply["choices"][:value]
            case "token":
                choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = value
            case "logp":
                choice["logprobs"]["content"][0]["logprob"] = value
            case "version":
                choice["weight_versions"] = value
            case "cut":
                choice["token_ids"], choice["logprobs"]["content"] = [5], choice["logprobs"]["content"][:1]
                choice["logprobs"]["content"][0]["token_id"] = 5
            case "other":
                choice["token_ids"] = choice["token_ids"][::-1]
            case "nothing":
                return {"choices": None}
            case "status":
                return {"status": value, "error": "no"}
        return reply

    return change


@pytest.mark.parametrize(
    "name, value, wanted",
    [
        ("echo", [1, 2], "prompt 'text' is about other tokens: 2 instead of"),
        ("fewer", 1, "prompt 'text' holds 1 answers instead of 2"),
        ("token", "placeholder", "answer 0 of the server to prompt 'text' holds the placeholder of a medium"),
        ("logp", float("nan"), "prompt 'text' has the log-probability nan"),
        ("logp", -9999.0, "prompt 'text' has the log-probability -9999"),
        ("version", [{"version": "old", "start": 0, "end": 8}], "prompt 'text'.*weights .'old'. instead of"),
        ("version", None, "prompt 'text' does not say which weights"),
        ("cut", None, "prompt 'text' ends after 1 tokens without an end token"),
        ("other", None, "prompt 'text' is not as vLLM writes it.*of other tokens"),
        ("nothing", None, "prompt 'text' is not as vLLM writes it"),
        ("status", 400, "refuses prompt 'text'.*answered with 400"),
        ("status", 500, "no server answers prompt 'text'.*answered with 500"),
    ],
)
def test_what_was_not_asked_is_refused_with_the_name_of_the_prompt(
    policy, stand_in, tmp_path, monkeypatch, name, value, wanted
):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    value = policy.prompt_encoder.placeholders[0] if value == "placeholder" else value
    stand_in.fault = faulty(name, value)
    with pytest.raises((WrongAnswer, ConnectionError), match=wanted):
        engine_of(policy, tmp_path, stand_in.url).rollout(PROMPTS[:1] * 2)


def test_a_server_that_does_not_sample_from_the_policy_is_named(policy, stand_in, tmp_path):
    stand_in.off = 0.01
    with pytest.raises(RuntimeError, match=r"prompt 'image' \(image\) differ by 0.01 nats.*normalize"):
        engine_of(policy, tmp_path, stand_in.url).rollout(PROMPTS[1:2])


def test_a_known_cause_of_the_family_is_named(policy, stand_in, tmp_path, monkeypatch):
    stand_in.off = 0.01
    known = ServedFamily(SERVED["qwen2_5_vl"].kinds, SERVED["qwen2_5_vl"].items, cause="serve on a GPU")
    monkeypatch.setitem(SERVED, "qwen2_5_vl", known)
    with pytest.raises(RuntimeError, match=r"differ by 0.01 nats.*; serve on a GPU"):
        engine_of(policy, tmp_path, stand_in.url).rollout(PROMPTS[1:2])
    with pytest.raises(RuntimeError, match="differ by 0.01 nats.*processed_logprobs"):  # of texts
        engine_of(policy, tmp_path / "other", stand_in.url).rollout(PROMPTS[:1])


@pytest.mark.parametrize("part", ["the adapter", "the adapter of the vision tower"])
def test_an_adapter_that_a_server_leaves_out_is_named_as_the_cause(checkpoint, tmp_path, part):
    torch.manual_seed(0)
    policy, left = (Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **LORA) for _ in range(2))
    shift(policy)
    with torch.no_grad():
        pairs = zip(left.model.named_parameters(), policy.model.parameters(), strict=True)
        for (name, own), weight in pairs:
            skipped = part == "the adapter" or "visual" in name
            own.copy_(torch.zeros_like(weight) if "lora_" in name and skipped else weight)
    server = StandIn(left, PROMPTS)
    with pytest.raises(RuntimeError, match=f"answers prompt 'image' without {part}; start"):
        engine_of(policy, tmp_path, server.url, given=LORA).rollout(PROMPTS[1:2])
    server.kill()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_adapter_that_is_left_out_is_noticed_once_it_adds_something(checkpoint, tmp_path, ahead):
    """A fresh one adds nothing, so that the first comparison passes without it."""
    policy, left = (Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **LORA) for _ in range(2))
    server = StandIn(left, PROMPTS)
    engine = engine_of(policy, tmp_path, server.url, given=LORA)
    engine.rollout(PROMPTS[1:2])
    shift(policy)
    with pytest.raises(RuntimeError, match="answers prompt 'image' without the adapter; start"):
        (engine.ask if ahead else engine.rollout)(PROMPTS[1:2])
    server.kill()


def test_answers_are_compared_at_the_start_and_after_1_2_4_updates(policy, stand_in, tmp_path, monkeypatch):
    engine, compared, at = engine_of(policy, tmp_path, stand_in.url), [], []
    monkeypatch.setattr(
        "mmrl.vision.serving.served_engine.check_agreement", lambda *_: compared.append(at[-1])
    )
    for update in range(9):
        at.append(update)
        engine.rollout(PROMPTS[:1])
        engine.rollout(PROMPTS[:1])  # of the same weights
        shift(policy)
    assert compared == [0, 1, 2, 4, 8]


def test_a_server_that_has_joined_is_compared_again(policy, stand_in, tmp_path):
    engine = engine_of(policy, tmp_path, stand_in.url)
    engine.rollout(PROMPTS[1:2])
    stand_in.off = 0.01
    engine.rollout(PROMPTS[1:2])  # one that stays is not
    stand_in.kill()
    stand_in.start()
    with pytest.raises(RuntimeError, match=r"prompt 'image' \(image\) differ by 0.01 nats"):
        engine.rollout(PROMPTS[1:2])


def test_servers_with_other_models_are_noticed(policy, stand_in, tmp_path):
    other = StandIn(policy, PROMPTS, name="another model")
    with pytest.raises(RuntimeError, match="hold different weights; do all serve the policy's model"):
        engine_of(policy, tmp_path, stand_in.url, other.url).rollout(PROMPTS[:1])
    other.kill()


def test_a_server_that_is_no_server_for_rollouts_is_told_how_to_be_started(
    policy, stand_in, tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.support.vllm_stand_in.PASSES", {"pause", "resume"})
    with pytest.raises(RuntimeError, match="took no weights .*404.*; start it with the line that"):
        engine_of(policy, tmp_path, stand_in.url).rollout(PROMPTS[:1])


# ---- servers that die and come back


def test_what_a_dying_server_was_asked_is_answered_by_another_with_the_same_tokens(
    policy, stand_in, tmp_path
):
    alone = texts(engine_of(policy, tmp_path, stand_in.url, parallel=1).rollout(PROMPTS * 2))
    dying = StandIn(policy, PROMPTS)
    dying.left = 1
    # The other one answers only when this one is dead, so at least two of the four requests come here.
    stand_in.fault = lambda reply: dying.dead.wait(300) and reply
    engine = engine_of(policy, tmp_path, dying.url, stand_in.url)
    assert texts(engine.rollout(PROMPTS * 2)) == alone
    told = engine.pop_metrics()
    assert told["vllm/asked_again"] >= 1 and told["vllm/servers"] == 1
    stand_in.fault = lambda reply: reply
    dying.start()  # with the weights on its disk
    engine.stream.step = 0
    assert texts(engine.rollout(PROMPTS * 2)) == alone
    assert dying.version == stand_in.version != "default" and engine.pop_metrics()["vllm/servers"] == 2
    dying.kill()


def test_a_server_that_was_started_again_in_between_gets_the_weights_first(policy, stand_in, tmp_path):
    engine = engine_of(policy, tmp_path, stand_in.url)
    wanted = texts(engine.rollout(PROMPTS[:1] * 2))

    def forget(reply):
        stand_in.version, stand_in.fault = "default", lambda reply: reply
        return {"status": 404, "error": "there is no such adapter"}

    stand_in.fault = forget
    assert texts(engine.rollout(PROMPTS[:1] * 2)) == wanted
    assert stand_in.paths().count("collective_rpc") == 2


def test_a_run_waits_for_servers_and_ends_where_none_comes(policy, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.05)
    engine = engine_of(policy, tmp_path, stand_in.url, timeout=0.3)
    wanted = texts(engine.rollout(PROMPTS[:2]))
    stand_in.kill()
    with pytest.raises(ConnectionError, match=r"no server was alive for `timeout: 0.3` seconds.*refused"):
        engine.rollout(PROMPTS[:2])
    engine.asking.timeout = 300.0
    threading.Timer(0.5, stand_in.start).start()
    assert texts(engine.rollout(PROMPTS[:2])) == wanted


def busy(status, times, pause=0.0):
    """Answer the first requests with a status, and the others as they should be, after a pause."""
    left = iter(range(times))

    def change(reply):
        if next(left, None) is not None:
            return {"status": status, "error": "busy"}
        time.sleep(pause)
        return reply

    return change


@pytest.mark.parametrize("status", [503, 429])
def test_a_server_that_fails_once_is_asked_again(policy, stand_in, tmp_path, monkeypatch, status):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    engine = engine_of(policy, tmp_path, stand_in.url)
    wanted = texts(engine.rollout(PROMPTS[:1] * 2))
    engine.pop_metrics()
    stand_in.fault = busy(status, servers.TRIES - 1)
    assert texts(engine.rollout(PROMPTS[:1] * 2)) == wanted
    assert engine.pop_metrics()["vllm/asked_again"] == servers.TRIES - 1
    stand_in.fault = busy(status, servers.TRIES)
    with pytest.raises(ConnectionError, match=f"asked 3 times each: .* answered with {status}.*busy"):
        engine.rollout(PROMPTS[:1] * 2)


def test_a_dead_server_is_waited_for_where_the_others_fail(policy, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.05)
    dead = StandIn(policy, PROMPTS)
    engine = engine_of(policy, tmp_path, stand_in.url, dead.url, timeout=300.0)
    wanted = texts(engine.rollout(PROMPTS[:1] * 2))
    dead.kill()
    stand_in.fault = busy(503, 1000)
    threading.Timer(1.0, dead.start).start()
    assert texts(engine.rollout(PROMPTS[:1] * 2)) == wanted
    dead.kill()
    engine.asking.timeout = 0.2
    with pytest.raises(ConnectionError, match=r"no other server was alive .*503.*busy.*refused"):
        engine.rollout(PROMPTS[:1] * 2)


def test_servers_that_come_back_with_another_model_are_noticed(policy, stand_in, tmp_path):
    other = StandIn(policy, PROMPTS)
    asking = engine_of(policy, tmp_path, stand_in.url, other.url).asking
    asking.folder.mkdir(parents=True)
    (asking.folder / "1").mkdir()
    (asking.folder / "1" / "model.safetensors").touch()
    asking.bring(servers.Weights(asking.folder / "1", "1", False), threading.Event())
    for server, stood in zip(asking.servers, (stand_in, other), strict=True):
        server.alive, stood.version = False, "default"
    other.name = "another model"
    with pytest.raises(RuntimeError, match="hold different weights"):
        asking._wait(asking.servers, threading.Event())
    other.kill()


def test_weights_that_another_learner_loads_before_the_requests_are_replaced(policy, stand_in, tmp_path):
    engine, others = engine_of(policy, tmp_path, stand_in.url), ["other"]
    bring = engine.asking.bring

    def bring_and_lose(weights, given_up):
        bring(weights, given_up)
        stand_in.version = others.pop() if others else stand_in.version

    engine.asking.bring = bring_and_lose
    assert len(engine.rollout(PROMPTS[:1] * 2)) == 2 and not others
    assert engine.pop_metrics()["vllm/asked_again"] == 0
    assert stand_in.version == engine.asking.weights.version


def test_after_an_error_nothing_more_is_asked_and_weights_may_change(policy, stand_in, tmp_path):
    engine = engine_of(policy, tmp_path, stand_in.url, parallel=1)
    engine.rollout(PROMPTS)
    stand_in.told.clear()
    stand_in.fault = busy(400, 1, pause=0.3)
    with pytest.raises(WrongAnswer, match="refuses prompt 'text'"):
        engine.rollout(PROMPTS)
    with servers.locked(engine.folder / servers.ASKING):  # as for new weights
        sent = [path for path, _ in stand_in.told]
    assert sent.count("inference/v1/generate") <= 2, "the second was perhaps under way, the others waited"
    engine.rollout(PROMPTS)


HANGING = """
import sys
from pathlib import Path
from mmrl.vision.serving.server import Weights
from mmrl.vision.serving.servers import Servers

asking = Servers([sys.argv[1]], Path(sys.argv[2]), request_timeout=600.0, timeout=300.0, parallel=1)
asking.weights = Weights(Path(sys.argv[2]), "default", False)
for number in range(3):
    asking.ask(f"p{number}", {})
raise KeyError("the run has failed")
"""


@pytest.mark.slow
def test_a_program_ends_at_once_while_servers_are_asked(stand_in, tmp_path):
    gate = threading.Event()
    stand_in.answer = lambda request: gate.wait(600) and {}
    command = [sys.executable, "-c", HANGING, stand_in.url, str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    finally:
        gate.set()
    assert "the run has failed" in done.stderr


# ---- options and the command


def test_what_servers_cannot_have_is_refused(checkpoint, policy, tmp_path):
    for urls in ((), ("http://a", "http://a")):
        with pytest.raises(ConfigError, match="`servers` must name one address"):
            engine_of(policy, tmp_path, *urls)
    with pytest.raises(ConfigError, match=r"without `policy.transform`"):
        engine_of(policy, tmp_path, "http://a", given={"transform": ["vision.steering"]})
    roles = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", lora_rank=2, roles=("a", "b"))
    with pytest.raises(ConfigError, match="cannot bring adapters of several roles"):
        engine_of(roles, tmp_path, "http://a")


RUN = """
include: [train/charades_sta_grpo.yaml]
policy: {lora_rank: 20, freeze_vision_tower: false, dtype: float32}
rollout: {engine: [{name: vision.vllm, servers: [http://one:8001, http://two:8002]}]}
"""


def test_the_command_prints_a_line_for_each_server(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["serve-command", str(tmp_path / "run.yaml"), "--cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    words = shlex.split(lines[1])
    switches = {"VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora"}
    assert {*switches, "--enable-scale-out", "--enable-tower-connector-lora"} <= {*words}
    pairs = dict(zip(words, words[1:], strict=False))
    assert (pairs["--port"], pairs["--host"], pairs["--max-lora-rank"]) == ("8002", "two", "32")
    assert (pairs["--dtype"], pairs["--logprobs-mode"]) == ("float32", "processed_logprobs")
    folder = next(word.partition("=")[2] for word in words if word.startswith("PYTHONPATH="))
    assert (Path(folder) / "mmrl_vllm_worker.py").exists()


def test_the_command_without_servers_or_with_too_large_an_adapter_is_an_error(tmp_path, capsys):
    assert main(["serve-command", "train/charades_sta_grpo.yaml"]) == 2
    assert "asks no servers; list `vision.vllm`" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has room for at most 512"):
        command_lines(
            Piece("vision.tokens", {"model": "m", "lora_rank": 600}), {"servers": ["http://a"]}, "p"
        )


FAKE_VLLM = {
    "model_executor/layers/utils.py": "def dispatch_cpu_unquantized_gemm(layer, remove_weight): assert False",
    "model_executor/model_loader/reload.py": "def initialize_layerwise_reload(model): pass",
    "platforms.py": "class current_platform: is_cpu = staticmethod(lambda: True)",
    "v1/worker/cpu_model_runner.py": """
class CPUModelRunner:
    def load_model(self): self.model = 7
""",
    "distributed/weight_transfer/base.py": "class WeightTransferEngine: pass",
    "distributed/weight_transfer/factory.py": """
MADE = {}
class WeightTransferEngineFactory:
    register_engine = MADE.__setitem__
""",
}


@pytest.mark.slow
def test_the_extension_of_workers_makes_linear_layers_read_their_weights(tmp_path):
    """In a process of its own, since it changes vLLM where it is imported."""
    for name, text in FAKE_VLLM.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    folder = command_lines(Piece("p", {"model": "m"}), {"servers": ["http://a"]}, "p")[0]
    folder = next(word.partition("=")[2] for word in shlex.split(folder) if word.startswith("PYTHONPATH="))
    program = (
        "import mmrl_vllm_worker, torch\n"
        "from vllm.model_executor.layers import utils\n"
        "layer = torch.nn.Linear(2, 1)\n"
        "utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)\n"
        "layer.weight.data.fill_(3.0)\n"
        "print(layer.cpu_linear(torch.ones(1, 2), layer.weight, None).item())\n"
        "class Model(torch.nn.Linear):\n"
        "    def load_weights(self, weights): return {name for name, _ in weights}\n"
        "from vllm.distributed.weight_transfer.factory import MADE\n"
        "engine = MADE['mmrl']()\n"
        "engine.model = Model(1, 1)\n"
        "engine.parallel_config = mmrl_vllm_worker.Nothing()\n"
        "vars(engine.parallel_config).update(data_parallel_index=2, world_size=4, rank=3)\n"
        "ranks = []\n"
        "receive = lambda told, rank: ranks.append(rank) or {'weight': 0}.items()\n"
        "mmrl_vllm_worker.mmrl_group.receive = receive\n"
        "engine.start_weight_update()\n"
        "from types import SimpleNamespace\n"
        "runner = mmrl_vllm_worker.runner()\n"
        "config = SimpleNamespace(is_multimodal_pruning_enabled=lambda: True)\n"
        "runner.model_config = SimpleNamespace(multimodal_config=config)\n"
        "runner.load_model()\n"
        "assert runner.model == 7 and runner.is_multimodal_pruning_enabled\n"
        "try: engine.receive_weights(mmrl_vllm_worker.Meeting('h', 1, 2, 3.0, []))\n"
        "except RuntimeError as error: print(error, ranks)\n"
    )
    paths = {"PYTHONPATH": f"{folder}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=paths, capture_output=True, text=True, check=False
    )
    wanted = "6.0\n1 weights were not sent, the first is 'bias' [12]\n"  # 1 + 2 * 4 + 3
    assert done.stdout == wanted, done.stderr


def test_a_client_of_json_asks_by_get_and_tells_the_status(stand_in):
    def client(path):
        return JsonClient(f"{stand_in.url}/{path}", request_timeout=300, request_retries=0, wait=0)

    assert json.loads(client("weight_info").get())["weight_version"] == "default"
    with pytest.raises(ConnectionError, match="404") as error:
        client("nothing").post({})
    assert error.value.status == 404


def read_with(tmp_path, wrapper=None, **changes):
    """Check a run on a server, with an engine around it."""
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": "red"}\n')
    raw = {
        "include": ["methods/grpo/grpo.yaml"],
        "policy": {"name": "vision.tokens", "model": "somewhere"},
        "data": {"name": "vision.visual_qa", "path": str(tmp_path / "rows.jsonl")},
        "rewards": ["exact_match"],
        "rollout": {
            "engine": [
                {"name": "vision.vllm", "servers": ["http://localhost:8000"]},
                *filter(None, [wrapper]),
            ]
        },
    }
    check(parse(merge(read(raw), changes), Config))


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("vision.contrastive_decoding", "mixes two distributions at every token, and 'vision.vllm' answers"),
        ("vision.with_hint_reliance", "scores whole answers at the engine's temperature, and 'vision.vllm'"),
        (
            {"name": "vision.with_prefix_rollouts", "policy": {"name": "vision.tokens", "model": "m"}},
            "answers with another `policy` too, and the servers of 'vision.vllm' hold one",
        ),
    ],
)
def test_what_servers_cannot_do_is_refused_when_the_configuration_is_read(wrapper, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_with(tmp_path, wrapper)
    read_with(tmp_path, {"name": "vision.with_branches", "branching": [2, 2], "segment_length": 8})
    read_with(tmp_path, "vision.with_greedy")


def test_policies_and_judges_that_servers_cannot_serve_are_refused_when_the_configuration_is_read(tmp_path):
    read_with(tmp_path)
    policy = {"transform": ["compression.local_visual_attention"]}
    with pytest.raises(
        ConfigError, match=r"rollout.engine\[0\]: .*serves the model without `policy.transform`"
    ):
        read_with(tmp_path, policy=policy)
    other = {"name": "vision.tokens", "model": "judge", "frozen": True}

    def judged(url, **options):
        engine = {"name": "vision.vllm", "servers": [url]}
        return {"rewards": [{"name": "judge", "engine": engine, "policy": {**other, **options}}]}

    read_with(tmp_path, **judged("http://localhost:8001"))
    with pytest.raises(
        ConfigError, match="ask the server http://localhost:8000, but with different policies"
    ):
        read_with(tmp_path, **judged("http://localhost:8000"))
    with pytest.raises(ConfigError, match=r"rewards\[0\].engine: .* without `policy.transform`"):
        read_with(tmp_path, **judged("http://localhost:8001", **policy))
    asleep = {"name": "vision.vllm", "servers": ["http://localhost:8000"], "sleep_level": 1}
    data = {"name": "vision.visual_qa", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match="the server http://localhost:8000.*values of `sleep_level`"):
        read_with(tmp_path, evaluation={"data": data, "engine": [asleep]})


def test_media_that_servers_do_not_take_are_found_before_weights_are_loaded(checkpoint):
    check = Tokens.prompt_check({"model": str(checkpoint("llava"))})
    check.check_engine(Piece("vision.vllm", {}))
    check(PROMPTS[1])
    with pytest.raises(ConfigError, match="cannot send videos to a model of type 'llava', as prompt 'video'"):
        check(PROMPTS[3])
