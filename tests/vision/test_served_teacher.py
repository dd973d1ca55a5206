"""Teachers on servers, as a stand-in answers them, and several teachers by the source of a row."""

from __future__ import annotations

import copy
import json
import re
import shlex
from dataclasses import replace

import pytest
import torch

from mmrl.build import build
from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.config.registry import Needs
from mmrl.config.schema import load
from mmrl.core.types import Message, Outcome, Part, Trajectory
from mmrl.runtime import json_client
from mmrl.training.loop import evaluate_references, train
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.references.served_teacher import ServedTeacher
from mmrl.vision.references.teacher import Teacher
from mmrl.vision.references.teachers import Teachers
from mmrl.vision.serving import scoring
from mmrl.vision.serving.wire import WrongAnswer
from tests.support.vllm_stand_in import StandIn
from tests.vision.test_tokens import loaded, shaken
from tests.vision.tiny import ask, picture

HIDDEN = frozenset({"hidden"})
PROMPTS = [
    replace(ask("image", picture(seed=1), "What is this?"), columns={"subject": "art"}),
    replace(ask("text", "How many?"), columns={"subject": "math"}),
    replace(ask("images", picture(seed=1), "and", picture(seed=2, height=84)), columns={"subject": "art"}),
]
SPOKEN = ["0 to 12", "the", "quick"]
ONE = {"loss_top_k": 3, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    shaken(loaded(checkpoint)).save(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """Let a stand-in serve the teacher."""
    stand_in = StandIn(loaded(lambda family: folder), PROMPTS)
    yield stand_in
    stand_in.kill()


@pytest.fixture
def learner(checkpoint):
    return loaded(checkpoint)


def served(learner, folder, *urls, **options):
    options = {"loss_top_k": 3, "timeout": 5.0, **options}
    return ServedTeacher(learner, model=str(folder), servers=urls, **options)


def rows(policy):
    pairs = zip(PROMPTS, SPOKEN, strict=True)
    return policy.collate([policy.encode(prompt, Outcome(text=text)) for prompt, text in pairs])


def test_a_server_tells_what_the_teacher_in_this_process_says(learner, folder, server):
    batch = rows(learner)
    teachers = served(learner, folder, server.url), Teacher(learner, model=str(folder), **ONE)
    found, wanted = (teacher(batch, HIDDEN) for teacher in teachers)
    inside = batch.mask > 0
    torch.testing.assert_close(found.logp[inside], wanted.logp[inside], rtol=0, atol=1e-5)
    assert found.extra["top_k_ids"][inside].equal(wanted.extra["top_k_ids"][inside])
    torch.testing.assert_close(found.extra["top_k_logp"][inside], wanted.extra["top_k_logp"][inside])
    losses = []
    for output in (found, wanted):
        said = learner(batch.replace(others={"teacher": output}), frozenset({"divergence"}))
        losses.append(said.extra["divergence"][inside])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
    path, request = server.told[-1]
    assert path == "inference/v1/generate" and request["sampling_params"]["prompt_logprobs"] == 3
    images = next(
        r for p, r in server.told if "features" in r and len(r["features"]["mm_hashes"]["image"]) == 2
    )
    assert images["sampling_params"]["max_tokens"] == 1
    assert not any("load" in path or path == "collective_rpc" for path, _ in server.told), (
        "no weights are sent"
    )


def test_spans_of_a_server_are_those_of_the_teacher_in_this_process(learner, folder, server):
    batch = rows(learner)
    teachers = (
        served(learner, folder, server.url, align=True),
        Teacher(learner, model=str(folder), dtype="float32", align=True),
    )
    found, wanted = (teacher(batch, HIDDEN) for teacher in teachers)
    assert found.extra["span"].equal(wanted.extra["span"]) and "top_k_ids" not in found.extra
    torch.testing.assert_close(found.extra["span_logp"], wanted.extra["span_logp"], rtol=1e-4, atol=1e-4)


def test_steps_that_are_not_learned_from_are_not_asked_for(learner, folder, server):
    batch, teacher = rows(learner), served(learner, folder, server.url)
    batch.mask[1] = 0
    before = len(server.told)
    found = teacher(batch, HIDDEN)
    assert len(server.told) == before + 2 and not found.logp[1].any()
    assert not teacher(batch.blank(), HIDDEN).logp.any() and len(server.told) == before + 2
    hot = replace(batch.steps, temperature=torch.full((3,), 0.7))
    with pytest.raises(ValueError, match="sampled at another temperature than 1"):
        teacher(batch.replace(steps=hot), HIDDEN)
    with pytest.raises(ValueError, match=r"tells log-probabilities, not \['entropy'\]"):
        teacher(batch, frozenset({"entropy"}))


def test_a_server_of_another_family_is_asked_in_its_own_template(learner, checkpoint):
    stand_in, model = StandIn(loaded(checkpoint, "llava"), PROMPTS), checkpoint("llava")
    teachers = (
        served(learner, model, stand_in.url, align=True),
        Teacher(learner, model=str(model), dtype="float32", align=True),
    )
    batch = rows(learner)
    found, wanted = (teacher(batch, HIDDEN) for teacher in teachers)
    stand_in.kill()
    torch.testing.assert_close(found.extra["span_logp"], wanted.extra["span_logp"], rtol=1e-4, atol=1e-4)
    own = [prompt.ids.tolist() for prompt in batch.steps.prompts]
    asked = [request["token_ids"] for path, request in stand_in.told if "cache_salt" in request]
    assert len(asked) == 3 and all(ids[: len(one)] != one for ids, one in zip(asked, own, strict=True))


def test_a_conversation_is_asked_for_with_the_images_of_replies(learner, folder, server):
    encoder, prompt = learner.prompt_encoder, PROMPTS[0]
    first, last = (encoder.answer(text) for text in ("the", "0 to 12"))
    reply = Message("user", (Part(media=picture(seed=3, height=84)), Part("and this?")))
    read = encoder.extend(encoder.encode(prompt), first, reply)
    row = TokenRow.of_turns([(encoder.encode(prompt), first), (read, last)])
    steps = learner.collate((Trajectory(prompt, "q", (Outcome(end=len(row.ids)),), row, len(row.ids)),)).steps
    whole, ids, places = served(learner, folder, server.url)._whole(steps, 0)
    tokens = torch.cat([whole.ids, ids])
    assert tokens.equal(torch.cat([read.ids, last])) and tokens[places].equal(steps.ids[0])
    assert whole.media.keys() == read.media.keys() and len(whole.media["image_grid_thw"]) == 2
    assert all(whole.media[name].equal(value) for name, value in read.media.items())
    aligned = served(learner, folder, server.url, align=True)
    with pytest.raises(ValueError, match="reads single answers, not conversations"):
        aligned(learner.collate((Trajectory(prompt, "q", (Outcome(),), row, len(row.ids)),)), HIDDEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {**r, "prompt_token_ids": r["prompt_token_ids"][1:]}, "is about other tokens"),
        (lambda r: {**r, "prompt_logprobs": None}, "has no `prompt_logprobs`"),
        (lambda r: {**r, "prompt_logprobs": r["prompt_logprobs"][:-1]}, "is not as vLLM 0.32 writes it"),
        (lambda r: {"status": 400, "error": "too long"}, "the teacher refuses prompt .*too long"),
        (lambda r: {"status": 503, "error": "busy"}, "the teacher refuses prompt .*busy"),
        (lambda r: replaced(r, -float("inf")), "has the log-probability -inf"),
        (lambda r: replaced(r, None), "has 1 likely tokens instead of 3"),
    ],
)  # fmt: skip
def test_a_wrong_answer_of_a_server_ends_the_run(learner, folder, server, monkeypatch, change, message):
    monkeypatch.setattr(scoring, "PAUSE", 0.01)
    teacher = served(learner, folder, server.url)
    monkeypatch.setattr(server, "fault", change)
    with pytest.raises(WrongAnswer, match=message):
        teacher(rows(learner), HIDDEN)


def test_an_answer_that_is_too_long_to_read_says_so(learner, folder, server, monkeypatch):
    teacher = served(learner, folder, server.url)
    monkeypatch.setattr(json_client, "LARGEST", 500)
    with pytest.raises(WrongAnswer, match="answered with more than 500 bytes; lower `loss_top_k`"):
        teacher(rows(learner), HIDDEN)


def test_a_server_that_is_busy_at_the_start_is_no_server_of_another_kind(
    learner, folder, server, monkeypatch
):
    monkeypatch.setattr(server, "fault", lambda reply: {"status": 503, "error": "busy"})
    with pytest.raises(ConfigError, match="does not tell what it serves: .*503.*busy"):
        served(learner, folder, server.url)


def replaced(reply, value):
    """Change the log-probability of the last token, or leave out all others."""
    reply = copy.deepcopy(reply)
    token, last = str(reply["prompt_token_ids"][-1]), reply["prompt_logprobs"][-1]
    reply["prompt_logprobs"][-1] = {token: last[token]}
    if value is not None:
        reply["prompt_logprobs"][-1] = {**last, token: {"logprob": value}}
    return reply


def test_another_model_or_other_weights_are_refused(learner, folder, server, monkeypatch):
    with pytest.raises(ConfigError, match=r"serves \['teacher'\], not the teacher 'big'"):
        served(learner, folder, server.url, served_model_name="big")
    with pytest.raises(ConfigError, match="weights of the checksum .*, not 'abc'"):
        served(learner, folder, server.url, checksum="abc")
    with pytest.raises(ConfigError, match="does not tell what it serves"):
        served(learner, folder, "http://127.0.0.1:9")
    for wrong, message in (({"status": 404}, "404"), ({"prompt_logprobs": None}, "no `prompt_logprobs`")):
        with monkeypatch.context() as patch:
            patch.setattr(server, "fault", lambda reply, wrong=wrong: {**reply, **wrong})
            with pytest.raises(ConfigError, match=f"tells no log-probabilities of given tokens .*{message}"):
                served(learner, folder, server.url)
    teacher = served(learner, folder, server.url)
    teacher.load_state_dict(teacher.state_dict())
    with pytest.raises(ConfigError, match="and the run began with 'abc'"):
        teacher.load_state_dict({"checksum": "abc"})
    other = StandIn(loaded(lambda family: folder), PROMPTS, name="others")
    with pytest.raises(ConfigError, match=f"the teacher on '{other.url}' has weights of the checksum"):
        served(learner, folder, server.url, other.url)
    other.kill()


def test_a_dead_server_is_replaced_and_a_restarted_one_is_checked(learner, folder, server, monkeypatch):
    monkeypatch.setattr(scoring, "PAUSE", 0.01)
    second = StandIn(loaded(lambda family: folder), PROMPTS)
    teacher, batch = served(learner, folder, server.url, second.url), rows(learner)
    wanted = teacher(batch, HIDDEN)
    second.kill()
    assert teacher(batch, HIDDEN).logp.equal(wanted.logp)
    second.name = "others"
    second.start()
    with pytest.raises(ConfigError, match="has weights of the checksum"):
        for _ in range(3):
            teacher(batch, HIDDEN)
    second.kill()
    alone = served(learner, folder, server.url, timeout=0.1)
    monkeypatch.setattr(alone.servers, "urls", [second.url])
    with pytest.raises(ConnectionError, match="no teacher answers prompt"):
        alone(batch, HIDDEN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": ()}, "`servers` must name one address or more"),
        ({"beta": 0.0, "loss_top_k": 0}, "the forward KL .* compares likely tokens"),
        ({"loss_top_k": 0, "loss_add_tail": False}, "one token alone has the probability 1"),
    ],
)
def test_what_leaves_nothing_to_compare_is_refused(learner, folder, options, message):
    options = {"servers": ("http://127.0.0.1:9",), **options}
    with pytest.raises(ConfigError, match=message):
        ServedTeacher(learner, model=str(folder), **options)


# ---- several teachers


def piece(folder, **options):
    return {"name": "vision.teacher", "model": str(folder), "dtype": "float32", **options}


def test_every_row_has_the_teacher_of_its_source(learner, folder, checkpoint, server):
    far = {"name": "vision.served_teacher", "model": str(folder), "servers": [server.url], "loss_top_k": 3}
    both = {"near": piece(checkpoint("qwen2_5_vl"), beta=0.5), "far": far}
    teacher = Teachers(learner, by="subject", teachers=both, sources={"art": "far", "math": "near"})
    needs, batch = Needs(others={"teacher": HIDDEN}), rows(learner)
    found = evaluate_references({"teacher": teacher}, batch, needs, 10**6).others["teacher"]
    alone = served(learner, folder, server.url), Teacher(learner, **{
        name: value for name, value in both["near"].items() if name != "name"
    })  # fmt: skip
    wanted = [one(batch, HIDDEN) for one in alone]
    divergence = {}
    for name, output in {"all": found, "far": wanted[0], "near": wanted[1]}.items():
        said = learner(batch.replace(others={"teacher": output}), frozenset({"divergence"}))
        divergence[name] = said.extra["divergence"] * batch.mask
    for row, name in enumerate(["far", "near", "far"]):
        torch.testing.assert_close(divergence["all"][row], divergence[name][row])
    assert divergence["far"].sum() > 0
    teacher.load_state_dict(json.loads(json.dumps(teacher.state_dict())))


def test_a_source_without_a_teacher_is_refused(learner, folder):
    given = {"by": "subject", "teachers": {"art": piece(folder)}}
    with pytest.raises(ConfigError, match="prompt 'text' has the source 'math' in the column 'subject'"):
        Teachers.check_prompts(given, PROMPTS)
    with pytest.raises(ConfigError, match="prompt 'image' has no column 'topic'"):
        Teachers.check_prompts({**given, "by": "topic"}, PROMPTS)
    with pytest.raises(ConfigError, match="'math' the teacher 'sums'; there are art"):
        Teachers.check_prompts({**given, "sources": {"math": "sums"}}, PROMPTS)
    with pytest.raises(ConfigError, match="`teachers` must name one"):
        Teachers(learner, by="subject", teachers={})
    with pytest.raises(ConfigError, match="'frozen' is no teacher"):
        Teachers.check_run({**given, "teachers": {"a": "frozen"}}, None)


# ---- runs


@pytest.fixture
def run(checkpoint, folder, server, tmp_path):
    """Write a run, whose references a test chooses; the stand-in knows its prompts."""
    lines = [{"question": "How many?", "answer": "2", "subject": subject} for subject in ("math", "art")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def write(teacher, temperature=1.0):
        engine = {"name": "vision.generate", "max_completion_length": 4, "temperature": temperature}
        raw = {
            "include": ["methods/grpo/reverse_kl_distillation.yaml"],
            "policy": {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"},
            "data": {"name": "vision.visual_qa", "path": str(tmp_path / "rows.jsonl")},
            "rewards": ["vision.short_answer"],
            "references": {"teacher": teacher},
            "rollout": {"num_prompts": 2, "num_generations": 2, "engine": [engine]},
            "learn": {"learning_rate": 1e-2},
            "max_steps": 4,
            "output_dir": str(tmp_path / "run"),
        }
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(raw))
        return path

    return write


def test_a_run_learns_from_a_teacher_on_a_server(run, folder, server, capsys):
    far = {"name": "vision.served_teacher", "model": str(folder), "servers": [server.url], "loss_top_k": 20}
    path = run(far)
    assert main(["check", str(path)]) == 0
    config = load(str(path))
    made = build(config, quiet=True)
    encoder = server.policy.prompt_encoder
    for prompt in made.pieces.made["data"]:
        server.known[tuple(encoder.encode(prompt).ids.tolist())] = prompt
    train(made)
    losses = [record["loss"] for record in made.journal.read()]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert main(["serve-command", str(path)]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--served-model-name") + 1] == "teacher" and str(folder) in words


def test_what_a_teacher_cannot_do_is_refused_before_weights_are_loaded(run, folder, other_tokens, capsys):
    far = {"name": "vision.served_teacher", "model": str(folder), "servers": ["http://127.0.0.1:9"]}
    for teacher in (piece(other_tokens), {**far, "model": str(other_tokens)}):
        assert main(["check", str(run(teacher))]) == 2
        check_error(capsys, "references.teacher: the model .* has another vocabulary .*; set `align: true`")
    assert main(["check", str(run({**far, "beta": 0.0, "loss_top_k": 0}))]) == 2
    check_error(capsys, "the forward KL")
    assert main(["check", str(run(far, temperature=0.7))]) == 2
    check_error(capsys, "samples at the temperature 0.7, and servers tell")
    both = {"name": "vision.teachers", "by": "subject", "teachers": {"art": piece(folder)}}
    assert main(["check", str(run(both))]) == 2
    check_error(capsys, "references.teacher: prompt .* has the source 'math' in the column 'subject'")
    with pytest.raises(ConfigError, match="has the source 'math'"):
        build(load(str(run(both))), quiet=True)
    both["teachers"] = {"art": piece(folder), "math": piece(other_tokens, align=True)}
    assert main(["check", str(run(both))]) == 0


def check_error(capsys, message):
    said = "".join(capsys.readouterr())
    assert re.search(message, said), said


@pytest.fixture(scope="module")
def other_tokens(checkpoint, tmp_path_factory):
    """Save a model whose tokenizer has one more token."""
    other, folder = loaded(checkpoint), tmp_path_factory.mktemp("other") / "model"
    other.processor.tokenizer.add_tokens(["o 1"])
    other.model.resize_token_embeddings(
        max(len(other.processor.tokenizer), other.model.get_input_embeddings().num_embeddings)
    )
    other.save(folder)
    return folder
