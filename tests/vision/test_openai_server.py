"""`vision.openai_server` asks stand-ins of SGLang, vLLM and llama.cpp: what is sent, taken, and refused."""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.build import check
from mmrl.cli import main
from mmrl.config.binding import Recipe
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece, load
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.engines.openai_server import OpenaiServer
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving import servers
from mmrl.vision.serving.agreement import gap
from mmrl.vision.serving.backend import Question, one_each
from mmrl.vision.serving.backends import BACKENDS, command_lines, placed
from mmrl.vision.serving.wire import Sampling, WrongAnswer, WrongWeights
from tests.support.backend_stand_in import ROUTES, BackendStandIn
from tests.vision.test_vllm import PROMPTS, shift, texts
from tests.vision.tiny import ask, picture

LORA = {"lora_rank": 4}
ASKED = Question(
    [1, 90, 90, 2],
    Sampling(4, 0.7, top_p=0.9, top_k=5, min_p=0.1),
    seed=11,
    n=2,
    end=[80, 81],
    forbidden=[90, 91],
    logprobs=True,
    version="abc",
    adapter=True,
    images=("data:image/png;base64,x",),
    image_token=90,
)


@pytest.fixture
def policy(copied):
    return copied("qwen2_5_vl")


@pytest.fixture
def start(policy):
    """Start stand-ins of a kind for a policy, and end them after the test."""
    made = []

    def started(kind, of=policy, **options):
        made.append(BackendStandIn(of, PROMPTS, kind, **options))
        return made[-1]

    yield started
    for one in made:
        if one.left is None:
            one.kill()


def engine_of(policy, folder, kind, *urls, given=None, **options):
    recipe = Recipe(Piece("vision.tokens", {"model": "m", **(given or {})}), (), 3, 0, (), Clock)
    options = {"max_completion_length": 8, "request_timeout": 300.0, "timeout": 120.0, **options}
    return OpenaiServer(
        policy,
        stream=Stream(3),
        recipe=recipe,
        servers=urls,
        weights_folder=str(folder),
        backend=kind,
        **options,
    )


def sent(server):
    """List the requests for answers that a stand-in got."""
    return [content for path, content in server.told if path == ROUTES[server.kind]]


# ---- what is sent


def test_sglang_gets_a_seed_an_answer_and_one_placeholder_an_image():
    body = BACKENDS["sglang"].request(ASKED)["body"]
    assert body["input_ids"] == [[1, 90, 2]] * 2 and body["image_data"] == [[*ASKED.images]] * 2
    assert [one["sampling_seed"] for one in body["sampling_params"]] == [11, 12]
    settings = body["sampling_params"][0]
    assert settings["stop_token_ids"] == [80, 81] and not settings["ignore_eos"]
    assert (settings["temperature"], settings["top_p"], settings["top_k"], settings["min_p"]) == (
        0.7,
        0.9,
        5,
        0.1,
    )
    assert settings["max_new_tokens"] == 4 and settings["logit_bias"] == {"90": -100.0, "91": -100.0}
    assert body["lora_path"] == ["policy-adapter-abc"] * 2
    assert body["return_logprob"] and body["return_prompt_token_ids"]


def test_completions_and_llama_cpp_get_token_ids_in_their_own_words():
    body = BACKENDS["vllm"].request(ASKED)["body"]
    assert (body["model"], body["prompt"]) == ("policy-adapter-abc", ASKED.ids)
    assert (body["n"], body["seed"], body["logprobs"], body["return_token_ids"]) == (2, 11, 0, True)
    assert body["stop_token_ids"] == [80, 81] and body["ignore_eos"] and body["cache_salt"] == "abc"
    body = BACKENDS["llama.cpp"].request(ASKED)["body"]
    assert (body["prompt"], body["n_cmpl"], body["seed"], body["n_predict"]) == (ASKED.ids, 2, 11, 4)
    assert body["samplers"] == ["temperature", "top_k", "top_p", "min_p"] and body["return_tokens"]
    assert body["n_probs"] == 1 and body["post_sampling_probs"]
    assert body["logit_bias"] == [[90, -100.0], [91, -100.0]]


def test_every_run_of_placeholders_becomes_one():
    assert one_each([9, 9, 1, 9, 2, 2], 9) == [9, 1, 9, 2, 2] and one_each([1, 1], -1) == [1, 1]


# ---- rows


def test_only_a_comparison_waits_for_answers(policy, start, tmp_path):
    server = start("vllm")
    engine = engine_of(policy, tmp_path, "vllm", server.url)
    engine.rollout(PROMPTS[:1])  # and compares
    silent = engine_of(policy, tmp_path, "vllm", server.url, logprobs=False)
    for one in (engine, silent):
        version = one.writer.version()
        pending = one._first(PROMPTS[0], [0], version)
        one.compare_groups([pending], version)
        assert not pending.answers.done()


@pytest.mark.parametrize("kind", BACKENDS)
def test_rows_are_the_servers_answers_and_those_of_the_policy(policy, start, tmp_path, kind):
    server = start(kind)
    engine = engine_of(policy, tmp_path, kind, server.url)
    rows = engine.rollout(PROMPTS[:1] * 3)
    assert gap(policy, rows) < 1e-5 and {*rows[0].notes} == {"logp", "token", "temperature"}
    assert {kind for kind, *_ in engine.compared} == {"text"} and len({*map(tuple, texts(rows))}) == 3
    assert texts(engine.rollout(PROMPTS[:1] * 3)) == texts(rows)  # of the same step
    assert engine.pop_metrics()["vllm/servers"] == 1.0
    greedy = engine_of(policy, tmp_path, kind, server.url, temperature=0.0)
    assert texts(greedy.rollout(PROMPTS[:1] * 2)) == texts(greedy.rollout(PROMPTS[:1])) * 2
    server.off = 0.5
    with pytest.raises(RuntimeError, match=r"does not sample from the policy.*differ by 0.5 nats"):
        engine_of(policy, tmp_path, kind, server.url).rollout(PROMPTS[:1])


@pytest.mark.parametrize("kind", BACKENDS)
def test_without_log_probabilities_rows_have_none_and_are_not_compared(policy, start, tmp_path, kind):
    server = start(kind)
    server.off = 0.5
    engine = engine_of(policy, tmp_path, kind, server.url, logprobs=False)
    (row,) = engine.rollout(PROMPTS[:1])
    assert {*row.notes} == {"token", "temperature"} and not engine.compared
    with pytest.raises(ConfigError, match="cannot send the images of prompt 'image'"):
        engine.rollout(PROMPTS[1:2])


def test_draws_from_fewer_tokens_are_compared_by_a_request_of_their_own(policy, start, tmp_path):
    server = start("vllm")
    engine_of(policy, tmp_path, "vllm", server.url, top_p=0.5).rollout(PROMPTS[:1] * 2)
    assert [(body["top_p"], body["n"]) for body in sent(server)] == [(0.5, 2), (1.0, 1)]


def test_a_server_that_dies_is_replaced_with_the_same_tokens(policy, start, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    alone = engine_of(policy, tmp_path, "sglang", start("sglang").url).rollout(PROMPTS[:3] * 2)
    one, two = start("sglang"), start("sglang")
    one.left = 1
    two.fault = lambda reply: one.dead.wait(300) and reply  # so the first one gets two requests or more
    engine = engine_of(policy, tmp_path, "sglang", one.url, two.url)
    assert texts(engine.rollout(PROMPTS[:3] * 2)) == texts(alone)
    assert engine.pop_metrics()["vllm/asked_again"] >= 1
    one, other = start("sglang"), start("sglang", name="other weights")
    with pytest.raises(RuntimeError, match="hold different weights"):
        engine_of(policy, tmp_path, "sglang", one.url, other.url).rollout(PROMPTS[:1])


def test_turns_of_a_conversation_are_asked_with_their_token_ids(policy, start, tmp_path):
    server = start("sglang")
    encoded = policy.prompt_encoder.encode(PROMPTS[0])
    turn = SimpleNamespace(
        prompt=PROMPTS[0], encoded=encoded, uniform=torch.full((5,), 0.25, dtype=torch.float64), on_stop=None
    )
    (row,) = engine_of(policy, tmp_path, "sglang", server.url).converse().sample([turn])
    assert sent(server)[0]["input_ids"] == [encoded.ids.tolist()] and row.length <= 5
    assert sent(server)[0]["sampling_params"][0]["sampling_seed"] == 1 << 29
    assert GenerationRequest.__dataclass_fields__.keys() >= {"prompt", "encoded", "uniform", "on_stop"}


# ---- images


def test_images_go_as_files_and_come_back_as_the_policys_placeholders(policy, start, tmp_path):
    server = start("sglang")
    engine = engine_of(policy, tmp_path, "sglang", server.url)
    rows = engine.rollout(PROMPTS[1:3])
    assert gap(policy, rows) < 1e-5
    token = policy.prompt_encoder.core.config.image_token_id
    bodies = sorted(sent(server), key=lambda body: len(body["image_data"][0]))
    for prompt, body in zip(PROMPTS[1:3], bodies, strict=True):
        (images,), (ids,) = body["image_data"], body["input_ids"]
        assert ids.count(token) == len(images) == len(prompt.media)
        for medium, url in zip(prompt.media, images, strict=True):
            assert url.startswith("data:image/png;base64,")
            shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
            assert np.array_equal(shown, medium.load().pixels[0].permute(1, 2, 0).numpy())


def test_an_image_that_the_server_expands_otherwise_is_refused(policy, start, tmp_path):
    server = start("sglang")

    def longer(items):
        ids = items[0]["prompt_token_ids"]
        token = policy.prompt_encoder.core.config.image_token_id
        ids.insert(ids.index(token), token)
        return items

    server.fault = longer
    with pytest.raises(WrongAnswer, match="prompt 'image' is about other tokens.*does its processor expand"):
        engine_of(policy, tmp_path, "sglang", server.url).rollout(PROMPTS[1:2])


@pytest.mark.parametrize(
    ("kind", "number", "wanted"),
    [
        ("sglang", 3, "the videos of prompt 'video' to `backend: sglang`"),
        ("vllm", 1, "the images of prompt 'image' to `backend: vllm`.*read images there: none"),
        ("llama.cpp", 1, "the images of prompt 'image' to `backend: llama.cpp`"),
    ],
)
def test_media_that_cannot_be_sent_are_refused_before_a_server_is_asked(
    policy, start, tmp_path, kind, number, wanted
):
    server = start(kind)
    with pytest.raises(ConfigError, match=wanted):
        engine_of(policy, tmp_path, kind, server.url).rollout([PROMPTS[0], PROMPTS[number]])
    assert not server.told


def test_images_of_replies_cannot_be_sent(policy, start, tmp_path):
    engine = engine_of(policy, tmp_path, "sglang", start("sglang").url)
    shown = policy.prompt_encoder.encode(ask("shown", picture(seed=1), "What?"))
    turn = SimpleNamespace(prompt=PROMPTS[0], encoded=shown, uniform=torch.rand(4), on_stop=None)
    with pytest.raises(ValueError, match="prompt 'shown' has 0, its conversation 1, in 1 places"):
        engine.converse().sample([turn])


# ---- weights


def test_sglang_loads_a_whole_model_and_proves_it_in_every_answer(policy, start, tmp_path):
    server = start("sglang")
    engine = engine_of(policy, tmp_path, "sglang", server.url)
    engine.rollout(PROMPTS[:1])
    shift(policy)
    engine.rollout(PROMPTS[:1])
    assert server.paths() == ["update_weights_from_disk"] * 2
    server.fault = lambda items: [
        {**item, "meta_info": {**item["meta_info"], "weight_version": "old"}} for item in items
    ]
    with pytest.raises((WrongWeights, ConnectionError), match=r"comes from the weights \['old'\]"):
        engine.rollout(PROMPTS[:1])


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_adapter_has_the_name_of_its_version(checkpoint, start, tmp_path, kind):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32", **LORA)
    server = start(kind, policy)
    engine = engine_of(policy, tmp_path, kind, server.url, given=LORA)
    names = []
    for _ in range(3):
        engine.rollout(PROMPTS[:1])
        names += server.adapters
        assert len(server.adapters) == 1  # the one before was unloaded
        shift(policy)
    asked = [body.get("model") or body["lora_path"][0] for body in sent(server)]
    assert len({*names}) == 3 and list(dict.fromkeys(asked)) == names
    loads = [path.removeprefix("v1/") for path in server.paths() if "adapter" in path]
    assert loads == ["load_lora_adapter"] + ["load_lora_adapter", "unload_lora_adapter"] * 2


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_servers_that_take_no_weights_answer_for_those_they_have_alone(policy, start, tmp_path, kind):
    server = start(kind)
    engine = engine_of(policy, tmp_path, kind, server.url)
    assert len(engine.rollout(PROMPTS[:1] * 2)) == 2 == len(engine.rollout(PROMPTS[:1] * 2))
    assert not server.paths() and not [*tmp_path.glob("*/*/*.safetensors")]
    server.kill()
    server.start()
    server.fault = lambda reply: [setattr(server, "off", 0.5), reply][1]  # from the second answer on
    assert len(engine.rollout(PROMPTS[:1])) == 1  # nobody saw that it was away
    server.kill()
    assert engine.asking.servers[0].version() is None
    server.start()
    with pytest.raises(RuntimeError, match="does not sample from the policy"):  # as one that is new
        engine.rollout(PROMPTS[:1])
    server.off, server.fault = 0.0, lambda reply: reply
    shift(policy)
    with pytest.raises(RuntimeError, match="weights of the policy changed, and the server .* cannot take"):
        engine.rollout(PROMPTS[:1] * 2)


# ---- faults


def changed(kind, name):
    """Change a reply as a faulty server would."""

    def change(reply):
        reply = copy.deepcopy(reply)
        first = {"sglang": lambda: reply[0], "vllm": lambda: reply["choices"][0], "llama.cpp": lambda: reply}
        one = first[kind]()
        ids = {"sglang": "output_ids", "vllm": "token_ids", "llama.cpp": "tokens"}[kind]
        told = one["meta_info"] if kind == "sglang" else one
        logp = {
            "sglang": "output_token_logprobs",
            "vllm": "logprobs",
            "llama.cpp": "completion_probabilities",
        }[kind]
        match name:
            case "no ids":
                del one[ids]
            case "no logprobs":
                told[logp] = None
            case "fewer" if kind == "vllm":
                reply["choices"] = reply["choices"][:1]
            case "fewer":
                return reply[:1]
            case "other prompt" if kind == "llama.cpp":
                one["tokens_evaluated"] = 2
            case "other prompt":
                one["prompt_token_ids"] = [1, 2]
            case "other tokens":
                one[ids] = one[ids][::-1]
            case "nothing":
                return {"error": "none"}
        return reply

    return change


WANTED = {
    "no ids": "to prompt 'text' holds no token ids, which `.*` asks for.*takes no text",
    "no logprobs": "to prompt 'text' holds no log-probabilities, which `.*` asks for; set `logprobs: false`",
    "fewer": "to prompt 'text' holds 1 answers instead of 2",
    "other prompt": "to prompt 'text' is about other tokens|it read 2 tokens of",
    "other tokens": "its log-probabilities are of other tokens",
    "nothing": "to prompt 'text' is not that of a",
}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", WANTED)
def test_what_was_not_asked_is_refused_with_the_name_of_the_prompt(policy, start, tmp_path, kind, name):
    if (kind, name) in {("vllm", "other tokens"), ("llama.cpp", "fewer")}:
        pytest.skip("its log-probabilities come without token ids, or one answer at a time")
    server = start(kind)
    server.fault = changed(kind, name)
    with pytest.raises(WrongAnswer, match=WANTED[name]):
        engine_of(policy, tmp_path, kind, server.url).rollout(PROMPTS[:1] * 2)


def test_a_server_of_another_kind_is_named(policy, start, tmp_path):
    with pytest.raises(RuntimeError, match="serve-command"):
        engine_of(policy, tmp_path, "sglang", start("llama.cpp").url).rollout(PROMPTS[:1])


def test_a_log_probability_after_sampling_is_that_of_its_probability():
    item = {
        "tokens": [5],
        "tokens_evaluated": 4,
        "truncated": False,
        "stop_type": "limit",
        "content": "\ufffd",
    }
    assert BACKENDS["llama.cpp"].read([item], ASKED)[0].logp == [None]
    assert BACKENDS["llama.cpp"].read([item | {"content": "a"}], ASKED)[0].logp is None
    drawn = [{"id": 5, "prob": 0.25}]
    (choice,) = BACKENDS["llama.cpp"].read([{**item, "completion_probabilities": drawn}], ASKED)
    assert choice.logp == pytest.approx([math.log(0.25)])
    (choice,) = BACKENDS["llama.cpp"].read(
        [{**item, "completion_probabilities": [{"id": 5, "logprob": -1.5}]}], ASKED
    )
    assert choice.logp == [-1.5]


@pytest.mark.parametrize(
    ("ids", "entries", "wanted"),
    [
        ([1, 2, 3], [1, 3], [1.0, None, 3.0]),
        ([1, 2, 2, 3], [1, 2, 3], [1.0, None, None, 3.0]),  # which of both it was is not known
        ([1, 2, 1], [2], [None, 2.0, None]),
        ([1, 2], [], [None, None]),
    ],
)
def test_log_probabilities_that_llama_cpp_leaves_out_are_not_guessed(ids, entries, wanted):
    assert placed(ids, [{"id": token, "logprob": token} for token in entries]) == wanted
    with pytest.raises(ValueError, match="of other tokens"):
        placed(ids, [{"id": 9, "logprob": -1.0}])


@pytest.mark.parametrize("kind", BACKENDS)
def test_an_answer_that_ends_with_another_token_is_cut(policy, start, tmp_path, kind):
    """SGLang and llama.cpp end answers at the end tokens of the model's files, the policy at its own."""
    server = start(kind)

    def shorter(reply, ended):
        one = {"sglang": lambda: reply[0], "vllm": lambda: reply["choices"][0], "llama.cpp": lambda: reply}
        one = one[kind]()
        told = one["meta_info"] if kind == "sglang" else one
        names = {
            "sglang": ("output_ids", "output_token_logprobs", "finish_reason", {"type": "stop"}),
            "vllm": ("token_ids", "logprobs", "finish_reason", "stop"),
            "llama.cpp": ("tokens", "completion_probabilities", "stop_type", "eos"),
        }
        ids, logp, finish, stop = names[kind]
        one[ids] = one[ids][:3]
        logp = (told, logp) if kind != "vllm" else (told["logprobs"], "token_logprobs")
        logp[0][logp[1]] = logp[0][logp[1]][:3]
        if ended:
            told[finish] = stop
        return reply

    server.fault = lambda reply: shorter(reply, True)
    (row,) = engine_of(policy, tmp_path, kind, server.url).rollout(PROMPTS[:1])
    assert row.length == 3 and row.outcomes[0].tags["finish"] == "length"
    server.fault = lambda reply: shorter(reply, False)
    with pytest.raises(WrongAnswer, match="ends after 3 tokens without an end token"):
        engine_of(policy, tmp_path, kind, server.url).rollout(PROMPTS[:1])


# ---- configurations


def configured(folder, policy=None, options=None, **changes):
    (folder / "rows.jsonl").write_text('{"question": "What?", "answer": "red"}\n')
    engine = {"name": "vision.openai_server", "servers": ["http://one:30000"], **(options or {})}
    return {
        "include": ["methods/grpo/grpo.yaml"],
        "policy": {"name": "vision.tokens", "model": "somewhere/small", **(policy or {})},
        "data": {"name": "vision.visual_qa", "path": str(folder / "rows.jsonl")},
        "rewards": ["exact_match"],
        "rollout": {"engine": [engine]},
        **changes,
    }


@pytest.mark.parametrize(
    ("policy", "options", "wanted"),
    [
        ({}, {"backend": "llama.cpp"}, "cannot take the weights of a whole model.*evaluate.*use 'sglang'"),
        (LORA, {"backend": "llama.cpp"}, "cannot take the weights of an adapter.*use 'sglang', 'vllm'"),
        ({}, {"backend": "vllm"}, "a whole model .* use 'sglang', or an adapter"),
        (
            LORA | {"freeze_vision_tower": False},
            {"backend": "sglang"},
            "ignores an adapter of the vision tower",
        ),
        ({}, {"backend": "tgi"}, "backend"),
        ({}, {}, "backend"),
    ],
)
def test_training_on_servers_that_take_no_weights_is_refused(policy, options, wanted, tmp_path):
    with pytest.raises(ConfigError, match=wanted):
        check(load(configured(tmp_path, policy, options)))


def test_objectives_that_read_the_engines_log_probabilities_need_them(tmp_path):
    objective = {"step_weight": ["truncated_importance"]}
    check(load(configured(tmp_path, {}, {"backend": "sglang"}, objective=objective)))
    check(load(configured(tmp_path, {}, {"backend": "sglang", "logprobs": False})))
    with pytest.raises(ConfigError, match=r"reads the notes \['logp'\], which the engines do not take"):
        options = {"backend": "sglang", "logprobs": False}
        check(load(configured(tmp_path, {}, options, objective=objective)))
    frozen = configured(tmp_path, {}, {"backend": "sglang"})
    data = {"data": frozen["data"], "engine": [{**frozen["rollout"]["engine"][0], "backend": "llama.cpp"}]}
    with pytest.raises(ConfigError, match="cannot take the weights of a whole model"):
        check(load(frozen | {"evaluation": data}))  # the policy of an evaluation while training learns too


def lines_of(backend, **policy):
    piece = Piece("vision.tokens", {"model": "org/small", "dtype": "float32", **policy})
    options = {"servers": ["http://one:30000", "https://two"], "backend": backend}
    return [shlex.split(line) for line in command_lines(piece, options)]


def test_the_command_prints_a_line_for_each_server(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps(configured(tmp_path, LORA, {"backend": "sglang"})))
    assert main(["serve-command", str(tmp_path / "run.yaml")]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("python -m sglang.launch_server --model-path somewhere/small")
    assert "--enable-deterministic-inference" in line and line.endswith("--host one --port 30000")
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules all" in line
    exact = ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    assert lines_of("llama.cpp") == [
        ["llama-server", "--model", "small.gguf", *exact, "--host", "one", "--port", "30000"],
        ["llama-server", "--model", "small.gguf", *exact, "--host", "two", "--port", "443"],
    ]
    words = lines_of("vllm", lora_rank=20)[0]
    assert words[:5] == ["env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "vllm", "serve", "org/small"]
    assert words[words.index("--max-lora-rank") + 1] == "32"


def test_media_that_servers_do_not_take_are_found_before_weights_are_loaded(checkpoint):
    checked = Tokens.prompt_check({"model": str(checkpoint("qwen2_5_vl"))})
    for kind, refused in (("sglang", PROMPTS[3]), ("llama.cpp", PROMPTS[1])):
        checked.check_engine(Piece("vision.openai_server", {"backend": kind}))
        checked(PROMPTS[0])
        with pytest.raises(ConfigError, match=f"of prompt '{refused.uid}' to `backend: {kind}`"):
            checked(refused)
