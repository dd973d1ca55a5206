"""Real servers of llama.cpp and of vLLM's /v1/completions sample from the policy.

`MMRL_LLAMA_CPP` names an environment with `xllamacpp`, `gguf` and `safetensors`; `MMRL_VLLM` one with vLLM.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.vllm_servers import free_port, kill
from mmrl.config.binding import Recipe
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream, seeded
from mmrl.core.types import Clock
from mmrl.runtime.json_client import JsonClient
from mmrl.vision.engines.openai_server import OpenaiServer
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.agreement import gap, without_adapter
from mmrl.vision.serving.backends import command_lines
from tests.vision import tiny
from tests.vision.test_text_only import TEMPLATE
from tests.vision.test_vllm import shift

SERVER = Path(__file__).parents[1] / "support" / "llama_cpp_server.py"
VLLM, LLAMA_CPP = (os.environ.get(name, "") for name in ("MMRL_VLLM", "MMRL_LLAMA_CPP"))
pytestmark = pytest.mark.slow
LORA = {"lora_rank": 8}
PROMPTS = [tiny.ask("short", "the fox"), tiny.ask("long", "0123456789 the quick brown fox " * 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Make a Qwen2 with heads of 32, which vLLM needs on a CPU, and untied weights."""
    folder = tmp_path_factory.mktemp("qwen2")
    tokenizer = tiny._tokenizer()
    tokenizer.chat_template = TEMPLATE
    sizes = tiny.TEXT | {"hidden_size": 128, "initializer_range": 0.1}
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "vocab_size": len(tokenizer)}
    with seeded(0):
        config = transformers.Qwen2Config(**sizes, **ids, tie_word_embeddings=False)
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def engine_of(model, folder, backend, url, given=None, **options):
    given = {"dtype": "float32", **(given or {})}
    recipe = Recipe(Piece("vision.tokens", {"model": str(model), **given}), (), 3, 0, (), Clock)
    return OpenaiServer(
        Tokens(model=str(model), **given),
        stream=Stream(3),
        recipe=recipe,
        backend=backend,
        servers=(url,),
        **{"max_completion_length": 16, "weights_folder": str(folder), **options},
    )


def running(command, environment, url, health, log):
    """Start a server, wait until it answers, and end it after the test."""
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=log.parent)
    try:
        client = JsonClient(f"{url}/{health}", request_timeout=20, request_retries=0, wait=0)
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                client.get()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        kill(process)


@pytest.fixture(scope="module")
def llama_cpp(model, tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("llama") / "log"
    command = [f"{LLAMA_CPP}/bin/python", str(SERVER), str(model), str(port)]
    yield from running(command, {"PATH": os.environ["PATH"]}, f"http://127.0.0.1:{port}", "health", log)


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path_factory.mktemp("vllm") / "log"
    piece = Piece("vision.tokens", {"model": str(model), "dtype": "float32", **LORA})
    (line,) = command_lines(piece, {"servers": [url], "backend": "vllm"}, cpu=True)
    small = (
        "--max-model-len 1024 --max-num-batched-tokens 4096 --enforce-eager --kv-cache-memory-bytes 67108864"
    )
    environment = {
        "PATH": f"{Path(VLLM).resolve()}/bin:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/tmp"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    yield from running([*shlex.split(line), *small.split()], environment, url, "v1/models", log)


def check_answers(model, folder, backend, url, given=None):
    """Check log-probabilities, seeds and greedy answers of a server that has the policy's weights."""
    engine = engine_of(model, folder, backend, url, given)
    rows = engine.rollout(PROMPTS * 4)
    print(f"{backend}: {gap(engine.policy, rows):.1e} nats a token")
    assert gap(engine.policy, rows) < 1e-5
    answers = [tuple(row.notes["token"].tolist()) for row in rows]
    assert len({*answers[::2]}) == 4  # every answer has a seed of its own
    again = engine_of(model, folder, backend, url, given).rollout(PROMPTS * 4)
    assert answers == [tuple(row.notes["token"].tolist()) for row in again]
    greedy = engine_of(model, folder, backend, url, given, temperature=0.0)
    rows = greedy.rollout(PROMPTS * 2)
    assert gap(greedy.policy, rows) < 1e-5
    with torch.no_grad():
        ids = torch.cat([rows[0].steps.prompt.ids, rows[0].notes["token"]])
        likely = greedy.policy.model(ids[None]).logits[0].argmax(-1)
    assert torch.equal(likely[-1 - rows[0].length : -1], rows[0].notes["token"])
    warm = engine_of(model, folder, backend, url, given, temperature=1.7)
    assert gap(warm.policy, warm.rollout(PROMPTS)) < 1e-5
    one = engine_of(model, folder, backend, url, given, top_k=1).rollout(PROMPTS)
    assert all(
        (row.notes["logp"].nan_to_num().abs() < 1e-5).all() for row in one
    )  # of the one token that is left
    ends = engine_of(model, folder, backend, url, given, max_completion_length=400, temperature=2.0)
    stopped = [row for row in ends.rollout(PROMPTS[:1] * 8) if row.outcomes[0].tags["finish"] == "stop"]
    assert stopped and all(row.notes["token"][-1] in engine.policy.prompt_encoder.end for row in stopped)
    return engine


@pytest.mark.skipif(not LLAMA_CPP, reason="MMRL_LLAMA_CPP names no environment with llama.cpp")
def test_answers_of_llama_cpp_are_the_policys(model, llama_cpp, tmp_path):
    engine = check_answers(model, tmp_path, "llama.cpp", llama_cpp)
    shift(engine.policy)
    with pytest.raises(RuntimeError, match="cannot take others"):
        engine.rollout(PROMPTS)
    with pytest.raises(RuntimeError, match="does not sample from the policy"):
        other = engine_of(model, tmp_path, "llama.cpp", llama_cpp)
        shift(other.policy)
        other.rollout(PROMPTS)


@pytest.mark.vllm
@pytest.mark.skipif(not VLLM, reason="MMRL_VLLM names no environment with vLLM")
def test_answers_of_completions_are_the_policys_before_and_after_an_adapter(model, vllm, tmp_path):
    engine = check_answers(model, tmp_path, "vllm", vllm, LORA)
    for _ in range(3):
        shift(engine.policy)
        rows = engine.rollout(PROMPTS * 2)
        print(f"vllm: {gap(engine.policy, rows):.1e} nats a token")
        assert gap(engine.policy, rows) < 1e-5
        with without_adapter(engine.policy.adapter, lambda name: True):
            assert gap(engine.policy, rows) > 1e-3  # it is the adapter that makes them equal
    models = JsonClient(f"{vllm}/v1/models", request_timeout=20, request_retries=0, wait=0).get()
    assert models.count(b"policy-adapter-") == 1
