"""Prompts are what transformers makes of them, with every released chat template that trl brings along."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from mmrl.config.schema import ConfigError
from mmrl.core.tool_calls import parse_calls
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.checks.prompt_agreement import prompt_agreement
from mmrl.vision.models import processor
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.tools.call_formats import parser_of
from tests.vision.template_cases import encoder_of, medium, plain, says, templates
from tests.vision.test_media_conditioning import examined

SIDE = {"type": "object", "properties": {"side": {"type": "string", "description": "Which."}}}
TOOL = {"type": "function", "function": {"name": "crop", "description": "Cut it.", "parameters": SIDE}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "crop", "arguments": {"side": "left"}}}
CALLS = json.dumps({"tool_calls": [CALL]})
REPLY = json.dumps({"tool_call_id": "call00001", "name": "crop"})
TWO = json.dumps({"tool_calls": [CALL, {**CALL, "id": "call00002"}]})
OTHER = json.dumps({"tool_call_id": "call00002", "name": "crop"})
THOUGHT = json.dumps({"reasoning_content": "so"})
THOUGHT_AND_CALL = json.dumps({"reasoning_content": "so", "tool_calls": [CALL]})
user = lambda *parts: says("user", *parts)
model = lambda *parts, **more: says("assistant", *parts, **more)
system = lambda *parts: says("system", *parts)
CASES = {
    "question": (user("one"),),
    "texts": (user("one", " two"),),
    "system": (system("one"), user("two")),
    "system of texts": (system("one", " two"), user("three")),
    "turns": (user("one"), model("two"), user("three"), model("four"), user("five")),
    "system and turns": (system("one"), user("two"), model("three"), user("four")),
    "last": (user("one"), model("two")),
    "thought": (user("one"), model("two", extra=THOUGHT), user("three")),
    "last thought": (user("one"), model("two", extra=THOUGHT)),
}
SEEN = {
    "image": (user(medium("image"), "one"),),
    "images": (user("one", medium("image"), " two", medium("image")),),
    "image and turns": (system("one"), user(medium("image"), "two"), model("three"), user("four")),
    "video": (user(medium("video"), "one"),),
    "images of turns": (user(medium("image"), "one"), model("two"), user("three", medium("image"))),
}
TOLD = {
    "tools": (user("one"),),
    "system and tools": (system("one"), user("two")),
    "calls": (user("one"), model(extra=CALLS), says("tool", "two", extra=REPLY)),
    "turns and calls": (
        *(user("one"), model("", extra=CALLS), says("tool", "two", extra=REPLY)),
        *(model("three"), user("four")),
    ),
    "two calls": (
        *(user("one"), model(extra=TWO)),
        *(says("tool", "two", extra=REPLY), says("tool", "three", extra=OTHER)),
    ),
    "thought and call": (
        *(user("one"), model(extra=THOUGHT_AND_CALL), says("tool", "two", extra=REPLY)),
        *(model("three", extra=THOUGHT), user("four")),
    ),
}
LAST = {
    "last": CASES["last"],
    "last thought": CASES["last thought"],
    "last of turns": (*CASES["turns"], model("six")),
    "last after calls": (*TOLD["calls"], model("three")),
}
# Variables that templates read, each alone.
VARIABLES = (
    {"enable_thinking": False},
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in (
            {"enable_thinking": True},
            {"preserve_thinking": True},
            {"reasoning_effort": "low"},
            {"add_vision_id": True},
        )
    ),
)
FORMS = ("blocks", "text", "merged", "blocks json", "text json")
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_6", "qwen3_8", "gemma3", "gemma4", "diffusion")
SEEING += ("llava", "smolvlm", "idefics3", "lfm2_2_5_vl", "muse")
# What these say after a turn of the model, by hand.
ENDS = {
    ("qwen", "lfm2", "nemotron"): ["<|im_end|>"],
    ("gemma4", "diffusion"): ["<turn|>"],
    ("gemma",): ["<end_of_turn>"],
    ("llama3",): ["<|eot_id|>"],
    ("phi3",): ["<|end|>"],
    ("glm4moe_training",): ["<|user|>"],
    ("glm4moe",): ["<|user|>", "<|observation|>"],  # what begins the turn after it
    ("gptoss",): ["<|return|>"],
    ("cohere2",): ["<|END_OF_TURN_TOKEN|>"],  # after <|END_RESPONSE|>
    ("cohere",): ["<|END_OF_TURN_TOKEN|>"],
    ("deepseek",): ["<｜end▁of▁sentence｜>"],
    ("llava",): ["</s>"],
    ("smolvlm", "idefics3"): ["<end_of_utterance>"],
    ("muse",): ["<|eot|>"],
}


def ends_of(name):
    return next(ends for names, ends in ENDS.items() if name.startswith(names))


def eos_of(name):
    # The tokenizers of these name the end of a turn, those of others the end of a text.
    return ends_of(name)[0] if name.startswith(("cohere", "deepseek", "llava")) else "<eos>"


@pytest.fixture(scope="module")
def encoders():
    return {
        name: encoder_of(text, sees=name.startswith(SEEING), eos=eos_of(name))
        for name, text in templates().items()
    }


def is_whole(shown, prompt):
    """Whether a text shows all of a prompt, but for words beside calls, which some templates leave out."""
    texts = [
        part.text
        for message in prompt.messages
        for part in message.parts
        if "tool_calls" not in message.extra
    ]
    texts += ["left"] * any("tool_calls" in message.extra for message in prompt.messages)
    printed = any(word in shown for word in ("'type': 'text'", '"type": "text"', '"type": "video"'))
    return not printed and all(text.strip() in shown for text in texts)


def of_transformers(encoder, prompt, tools, **options):
    """Yield the ids that transformers makes of a prompt, in every form of contents in which it shows all."""
    options |= encoder.template.variables
    blind = replace(prompt, messages=tuple(says(m.role, m.text, extra=m.extra) for m in prompt.messages))
    without = plain(encoder.processor, blind, "blocks", tools, **options) if prompt.media else None
    for form in FORMS:
        ids = plain(encoder.processor, prompt, form, tools, **options)
        if ids is None or (without is not None and torch.equal(ids, without)):  # it does not show the media
            continue
        if is_whole(encoder.tokenizer.decode(ids), prompt):
            yield ids


def compare(named, apart=1):
    """Compare all cases of all encoders, or one of each `apart` in turn; count those that both refuse."""
    wrong, refused = {}, 0
    for number, (name, encoder) in enumerate(named):
        cases = (CASES | TOLD | (SEEN if name.startswith(SEEING) else {})).items()
        for case, messages in islice(cases, number % apart, None, apart):
            prompt, tools = Prompt(case, messages), (TOOL,) if case in TOLD else ()
            tools = tools if tools and encoder.knows_tools(tools) else ()
            wanted = of_transformers(encoder, prompt, tools)
            try:
                ids = encoder.encode(prompt, tools).ids
            except ValueError as error:
                assert case in str(error) and "the chat template of the model" in str(error)
                refused += 1
                # What it does not read is a thought, which transformers leaves out.
                if "does not read" not in str(error) and any(True for _ in wanted):
                    wrong[name, case] = str(error)
                continue
            if not any(torch.equal(ids, one) for one in wanted):
                wrong[name, case] = encoder.tokenizer.decode(ids)
            assert int((ids == encoder.tokenizer.bos_token_id).sum()) <= 1
    assert not wrong
    return refused


@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_prompts_are_what_transformers_makes_of_them(encoders, apart):
    assert compare(encoders.items(), apart) < 300 / apart < len(encoders) * len(CASES) / apart


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_variables_of_a_template_are_those_of_transformers(encoders, variables):
    (variable,) = variables
    named = [
        (name, encoder_of(text, sees=name.startswith(SEEING), eos=eos_of(name), **variables))
        for name, text in templates().items()
        if variable in text and "training" not in name
    ]
    assert named
    compare(named)
    if variable == "enable_thinking":  # it changes what begins an answer
        asked = Prompt("a", CASES["question"])
        other = {name: encoders[name].encode(asked).ids for name, _ in named}
        assert any(not torch.equal(encoder.encode(asked).ids, other[name]) for name, encoder in named)


def test_a_variable_that_the_template_does_not_read_is_named():
    for name in ("enable_thinkin", "tools", "add_generation_prompt"):
        with pytest.raises(
            ConfigError, match=f"`chat_template_kwargs` has '{name}', which is no variable of the"
        ):
            encoder_of(templates()["qwen3"], sees=False, **{name: True})


def test_a_recorded_answer_is_the_last_turn_of_the_conversation(encoders):
    """Prompt and answer together are what transformers makes of the whole conversation, or refused."""
    wrong, refused = {}, set()
    for name, encoder in encoders.items():
        for case, (*asked, last) in LAST.items():
            prompt, outcome = Prompt(case, (*asked,)), Outcome(text=last.text, extra=last.extra)
            try:
                begun, (text, answer) = encoder.encode(prompt).ids, encoder.recorded(prompt, outcome)
            except ValueError as error:
                assert "the chat template of the model" in str(error)
                refused |= {(name, case)}
                continue
            words, end = encoder.tokenizer.decode, encoder.tokenizer.decode(encoder.end[0])
            found = words(torch.cat([begun, answer])).removesuffix(end)
            whole = Prompt(case, (*asked, last))
            wanted = map(words, of_transformers(encoder, whole, (), add_generation_prompt=False))
            after = (one.removeprefix(found) for one in wanted if one.startswith(found))
            # Phi writes the end of the text as well, which no answer needs.
            if not any(rest.replace(end, "", 1).removesuffix("<eos>").strip() == "" for rest in after):
                wrong[name, case] = found
            assert last.text in text and answer[-1] in encoder.end
    assert not wrong
    # These begin every answer with a thought, whatever the last turn of a conversation is.
    begin = {name for name in encoders if name.startswith(("nemotron", "deepseek"))}
    assert {name for name, case in refused if case == "last"} == begin


def test_an_answer_goes_on_in_a_thought_that_its_prompt_begins(encoders):
    encoder, prompt = encoders["deepseek_r1_distill"], Prompt("a", CASES["question"])
    text, ids = encoder.recorded(prompt, Outcome(text="so</think>two"))
    assert text == "so</think>two" and torch.equal(ids, encoder.answer(text))
    with pytest.raises(ValueError, match=r"begins an answer with '.*<think>\\n', and writes this one otherw"):
        encoder.recorded(prompt, Outcome(text="two"))
    encoder = encoders["qwen3_5_think"]  # an empty thought, or the one of the answer
    for said, wanted in (("two", "\n</think>\n\ntwo"), ("so</think>two", "so\n</think>\n\ntwo")):
        text, ids = encoder.recorded(prompt, Outcome(text=said))
        assert text == wanted and torch.equal(ids, encoder.answer(wanted))


def test_an_answer_ends_with_what_the_template_writes_after_a_turn(encoders):
    for name, encoder in encoders.items():
        words, ends = encoder.tokenizer.decode, ends_of(name)
        assert list(map(words, encoder.end))[: len(ends)] == ends, name
        assert words(encoder.answer("yes")) == "yes" + ends[0]
        assert torch.equal(encoder.answer(f"yes{ends[0]}\n"), encoder.answer("yes"))  # once


def test_a_reply_continues_as_the_template_does(encoders):
    for name, encoder in encoders.items():
        words, read = encoder.tokenizer.decode, encoder.encode(Prompt("a", CASES["question"]))
        answer = encoder.answer("two")
        found = encoder.extend(read, answer, user("three")).ids[len(read.ids) + len(answer) :]
        wanted = next(of_transformers(encoder, Prompt("b", (*CASES["last"], user("three"))), ()))
        after = words(wanted).rpartition("two")[2].lstrip(" ")
        assert words(found) == after.removeprefix(words(encoder.ends.before)), name
        cut = encoder.extend(read, answer[:-1], user("three")).ids[len(read.ids) + len(answer) - 1 :]
        assert words(cut).lstrip(" ") == after, name


def test_calls_are_read_and_answered_in_the_words_of_the_template(encoders):
    read, refused = [], []
    for name, encoder in encoders.items():
        if not encoder.knows_tools((TOOL,)):
            assert parser_of(encoder, (TOOL,), parse_calls) is parse_calls
            continue
        try:
            parser = parser_of(encoder, (TOOL,), parse_calls)
        except ConfigError as error:
            assert "the chat template of the model tells it about tools" in str(error)
            refused.append(name)
            continue
        read.append(name)
        written = encoder.written_call("crop", {"side": "left"}, (TOOL,))
        assert [(call.name, call.arguments) for call in parser(written)] == [("crop", {"side": "left"})]
        begun = encoder.encode(Prompt("a", CASES["question"]), (TOOL,))
        reply = encoder.replies([says("tool", "two", extra=json.dumps({"name": "crop"}))], (TOOL,))
        wanted = next(of_transformers(encoder, Prompt("b", TOLD["calls"]), (TOOL,)))
        wanted = encoder.tokenizer.decode(wanted).rpartition("left")[2]
        ended = encoder.answer(written)
        for answer in (ended, ended[:-1]) if encoder.ends.closes else (ended[:-1],):
            found = encoder.extend(begun, answer, *reply, tools=(TOOL,)).ids
            shown = encoder.tokenizer.decode(found).rpartition("left")[2]
            assert "".join(shown.split()) == "".join(wanted.split()), name
    of_qwen = {name for name in encoders if name.startswith("qwen") and not name.startswith("qwen2_5_vl")}
    of_nemotron = {name for name in encoders if name.startswith("nemotron")}
    assert set(read) == of_qwen | of_nemotron | {"glm4moe", "llama3_1", "llama3_2"}
    assert all(
        name.startswith(("diffusion", "gemma4", "glm4moe_training", "gptoss", "lfm2", "muse"))
        for name in refused
    )


def test_what_differs_is_an_error_that_names_the_first_token(monkeypatch):
    prompt, beside = Prompt("row 7", CASES["system and turns"]), SimpleNamespace
    first = examined(beside(prompt_encoder=encoder_of(templates()["gemma3"], sees=True)), prompt)
    assert not list(prompt_agreement(first))
    monkeypatch.setattr(processor, "WITHOUT_BOS", {})  # a template that writes BOS, and the tokenizer as well
    twice = encoder_of(templates()["gemma3"], sees=True)
    with pytest.raises(ConfigError, match="'row 7' is not what .*: token 1 is the first that differs"):
        twice.encode(prompt)
    monkeypatch.setattr(processor, "check_ids", lambda *given: None)
    (finding,) = prompt_agreement(examined(beside(prompt_encoder=twice), prompt))
    assert "token 1 is the first that differs" in finding.what and finding.grave


def test_a_template_without_what_is_needed_is_refused_by_name():
    deaf = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(
        ValueError, match=r"takes no messages of the role `assistant` \(it leaves out what they"
    ):
        encoder_of(deaf, sees=False)
    gemma = encoder_of(templates()["gemma"], sees=False)
    with pytest.raises(ValueError, match=r"prompt 'a': .* \(TemplateError: System role not supported\)"):
        gemma.encode(Prompt("a", CASES["system"]))


def test_an_empty_message_is_no_error_of_the_model(encoders):
    prompt = Prompt("a", (system(""), user("one")))
    for name in ("gemma4_v2", "qwen3", "llama3"):
        encoder = encoders[name]
        assert "[]" not in encoder.tokenizer.decode(encoder.encode(prompt).ids)


@pytest.mark.parametrize("begins", [True, False], ids=["the tokenizer adds BOS", "it adds none"])
@pytest.mark.parametrize("sees", [True, False], ids=["images", "text"])
def test_named_templates_are_read_as_transformers_reads_them(begins, sees):
    """A tokenizer may have one template for tools and one for all else, and add BOS or not."""
    named = {"default": templates()["llama3"], "tool_use": templates()["llama3_1"]}
    encoder = encoder_of(named["tool_use"], sees=sees)
    owner = encoder.processor if sees else encoder.tokenizer
    owner.chat_template = named if not sees else named["tool_use"]
    if not begins:
        encoder.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    encoder = PromptEncoder(encoder.processor, encoder.core)
    for case, tools in (("system", ()), ("calls", (TOOL,)), ("turns and calls", (TOOL,))):
        prompt = Prompt(case, CASES.get(case) or TOLD[case])
        ids = encoder.encode(prompt, tools).ids
        assert any(torch.equal(ids, one) for one in of_transformers(encoder, prompt, tools)), case
        assert int((ids == encoder.tokenizer.bos_token_id).sum()) <= 1


def test_the_mark_of_an_answer_is_a_word_that_occurs_nowhere(encoders):
    encoder = encoders["qwen3_vl"]
    read = encoder.encode(Prompt("a", CASES["question"]))
    reply = user("qz0zq qz1zq \x02 qzfirstzq qzsecondzq")
    shown = encoder.tokenizer.decode(encoder.extend(read, encoder.answer("two"), reply).ids)
    assert shown.count(reply.text) == 1 and shown.count("<|im_start|>user") == 2


def test_tools_that_a_template_leaves_out_beside_a_system_message_are_named():
    template = templates()["qwen3_vl"]
    (start,) = (line for line in template.splitlines() if line.startswith("{%- if tools"))
    unheard = template.replace(start, "{%- if tools and messages[0].role != 'system' %}", 1)
    encoder = encoder_of(unheard, sees=True)
    encoder.encode(Prompt("a", TOLD["tools"]), (TOOL,))
    with pytest.raises(ValueError, match="prompt 'b': .* leaves out the tools crop beside .* system, user"):
        encoder.encode(Prompt("b", TOLD["system and tools"]), (TOOL,))
