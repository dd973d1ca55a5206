"""Weights that reach vLLM servers from the learner's memory, and servers that sleep while it learns."""

from __future__ import annotations

import json
import logging
import os
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.broadcast import WeightsCopier
from mmrl.vision.serving.command import command_lines
from mmrl.vision.serving.server import LOADING
from mmrl.vision.serving.servers import Servers
from mmrl.vision.serving.weights import WeightsWriter
from mmrl.vision.serving.worker import mmrl_group
from tests.support.vllm_stand_in import PASSES, StandIn
from tests.vision.test_vllm import LORA, PROMPTS, engine_of, shift, texts


@pytest.fixture(params=["whole", "adapter"])
def given(request):
    return {"whole": {"freeze_vision_tower": False}, "adapter": LORA}[request.param]


@pytest.fixture
def policy(checkpoint, given):
    return Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **given)


def test_a_broadcast_has_the_names_and_values_of_the_folder(policy, given, tmp_path):
    server = StandIn(policy, PROMPTS)
    server.workers = 2
    engine = engine_of(policy, tmp_path, server.url, given=given, weight_transfer="broadcast")
    for update in range(2):
        engine.rollout(PROMPTS[:2])
        writer = WeightsWriter(policy, tmp_path / str(update))  # removes its folders when it is collected
        writer.folder.mkdir()
        folder = writer().folder
        files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        wanted = {name: value for file in files for name, value in file.items()}
        assert len(server.received) == 2 * (update + 1)
        for received in server.received[-2:]:
            assert received.keys() == wanted.keys()
            assert all(torch.equal(received[name], value) for name, value in wanted.items())
        assert engine.pop_metrics()["vllm/publish_bytes"] == sum(value.nbytes for value in wanted.values())
        shift(policy)
    if policy.adapter is not None:
        config = json.loads((folder / "adapter_config.json").read_text())
        sent = next(content["kwargs"]["config"] for _, content in server.told if "kwargs" in content)
        assert {name: sent[name] for name in ("r", "lora_alpha", "peft_type")} == {
            name: config[name] for name in ("r", "lora_alpha", "peft_type")
        }
        assert sorted(sent["target_modules"]) == sorted(config["target_modules"])
    engine.rollout(PROMPTS[:2])
    names = {path.name for path in engine.folder.iterdir()}
    assert names <= {".lock", ".asking"}, "no weights were written"
    server.kill()


def test_a_copy_does_not_change_with_the_policy(policy, tmp_path):
    weights = WeightsCopier(policy, tmp_path)()
    before = {name: value.clone() for name, value in weights.tensors.items()}
    shift(policy)
    assert all(torch.equal(value, before[name]) for name, value in weights.tensors.items())


def test_a_server_that_dies_while_it_receives_is_left_out(checkpoint, tmp_path, monkeypatch):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", freeze_vision_tower=False)
    dying, other = StandIn(policy, PROMPTS), StandIn(policy, PROMPTS)
    monkeypatch.setattr(dying, "receive", lambda meeting: os.close(-1))  # ends the connection
    engine = engine_of(policy, tmp_path, dying.url, other.url, weight_transfer="broadcast")
    assert len(engine.rollout(PROMPTS[:1])) == 1
    assert engine.pop_metrics()["vllm/servers"] == 1 and dying.version == LOADING
    for server in (dying, other):
        server.kill()


@pytest.mark.parametrize(
    "wrong",
    [["a", "float128", [2]], ["a", "float32", [-1]], ["a", "float32", [1.5]], [3, "float32", [1]], None],
)
def test_a_header_that_cannot_be_is_refused_before_anything_is_received(wrong):
    sound = ["a", "float32", [2]]
    meeting = {"host": "localhost", "port": 1, "size": 2, "timeout": 1.0, "tensors": [sound, wrong or sound]}
    with pytest.raises(ValueError, match="the learner announces a tensor"):
        next(mmrl_group.receive(meeting, 1))


def test_tensors_of_every_kind_arrive():
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    store = mmrl_group.listen("127.0.0.1", 60)
    meeting = {"host": "127.0.0.1", "port": store.port, "size": 2, "timeout": 60.0}
    found = {}
    receive = lambda: found.update(mmrl_group.receive({**meeting, "tensors": mmrl_group.header(tensors)}, 1))
    thread = threading.Thread(target=receive)
    thread.start()
    mmrl_group.send(mmrl_group.join(store, "127.0.0.1", 0, 2, 60), tensors.values())
    thread.join(60)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert all(found[name].dtype == value.dtype for name, value in tensors.items())


# ---- sleep


@pytest.fixture
def whole(checkpoint):
    return Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", freeze_vision_tower=False)


def is_waiting(servers):
    with servers.counting:
        return servers.outstanding > 0


def test_answers_are_seen_once_servers_may_sleep(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Servers, "_answers", lambda *request: gate.wait(300))
    servers = Servers(["http://127.0.0.1:1"], tmp_path, request_timeout=1.0, timeout=1.0, parallel=1)
    answer = servers.ask("p0", {})
    with servers.counting:  # as while the lock of the requests is released
        gate.set()
        with pytest.raises(TimeoutError):
            answer.result(0.5)
    assert answer.result() and not is_waiting(servers)


@pytest.mark.parametrize("level", [1, 2])
def test_servers_sleep_after_a_rollout_and_wake_before_the_next(whole, tmp_path, caplog, level):
    server = StandIn(whole, PROMPTS)
    engine = engine_of(whole, tmp_path, server.url, sleep_level=level)
    rows = engine.rollout(PROMPTS[:2])
    awake, gate = engine_of(whole, tmp_path, server.url), threading.Event()
    awake.rollout(PROMPTS[:1])
    server.fault = lambda reply: gate.wait(300) and reply
    awake.ask(PROMPTS[:1])
    engine.rest()
    assert "sleep" not in server.paths(), "another learner waits for an answer"
    gate.set()
    awake.rollout(PROMPTS[:1])
    while is_waiting(awake.asking):
        time.sleep(0.01)
    with caplog.at_level(logging.WARNING, "mmrl"):
        engine.rest()
    assert "runs on a CPU, where vLLM releases no memory" in caplog.text
    assert server.paths()[-2:] == ["sleep", "collective_rpc"]
    server.told.clear()
    assert texts(engine.rollout(PROMPTS[:2])) == texts(rows)
    # Level 2 has dropped the weights, so the same weights are loaded again.
    assert server.paths()[0] == "wake_up" and ("pause" in server.paths()) == (level == 2)
    assert server.version == engine.asking.weights.version
    server.kill()


def test_a_server_that_died_after_its_answers_need_not_sleep(whole, tmp_path):
    servers = [StandIn(whole, PROMPTS) for _ in range(2)]
    engine = engine_of(whole, tmp_path, *(server.url for server in servers), sleep_level=1)
    rows = engine.rollout(PROMPTS[:2])
    servers[0].kill()
    engine.rest()
    assert servers[1].paths()[-2:] == ["sleep", "collective_rpc"]
    assert texts(engine.rollout(PROMPTS[:2])) == texts(rows) and engine.pop_metrics()["vllm/servers"] == 1.0
    servers[1].kill()


def test_a_server_that_cannot_sleep_is_told_how_to_be_started(whole, tmp_path, monkeypatch):
    server = StandIn(whole, PROMPTS)
    engine = engine_of(whole, tmp_path, server.url, sleep_level=1)
    engine.rollout(PROMPTS[:1])
    monkeypatch.setattr("tests.support.vllm_stand_in.PASSES", PASSES - {"sleep"})
    with pytest.raises(RuntimeError, match=r"cannot sleep .*404.*; start it with the line that"):
        engine.rest()
    server.kill()


def test_a_sleep_that_would_drop_the_base_of_an_adapter_is_refused(checkpoint, tmp_path):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **LORA)
    with pytest.raises(ConfigError, match="`sleep_level: 2` drops the base weights"):
        engine_of(policy, tmp_path, "http://localhost:1", given=LORA, sleep_level=2)


def test_a_server_listens_where_an_address_without_a_port_is_asked():
    servers = {"servers": ["http://a", "https://b", "http://c:8001"]}
    lines = command_lines(Piece("vision.tokens", {"model": "m"}), servers, "policy")
    assert ["--port 80 " in lines[0], "--port 443 " in lines[1], "--port 8001 " in lines[2]] == [True] * 3


def test_command_lines_name_what_servers_need():
    options = {"servers": ["http://a:1"], "weight_transfer": "broadcast", "sleep_level": 1}
    policy = Piece("vision.tokens", {"model": "m"})
    (line,) = command_lines(policy, options, "policy")
    assert """--weight-transfer-config '{"backend": "mmrl"}'""" in line and "--enable-sleep-mode" in line
    (line,) = command_lines(policy, options, "policy", cpu=True)
    assert "--enable-sleep-mode" not in line
