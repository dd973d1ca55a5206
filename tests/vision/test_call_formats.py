"""Calls of tools in the forms of several families: recorded answers, and the template that tells the form."""

from __future__ import annotations

import pytest
import transformers as t

from mmrl.config.schema import ConfigError
from mmrl.core.chat import completion_of
from mmrl.core.rng import Stream, seeded
from mmrl.core.tool_calls import (
    Call,
    CallError,
    parse_calls,
    parse_glm_calls,
    parse_llama_calls,
    parse_mistral_calls,
    parse_qwen_xml_calls,
    without_calls,
)
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.rewards.tool_calls import tool_calls
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.tools.call_formats import parser_of
from mmrl.vision.tools.functions import Tool
from tests.vision import tiny

WEATHER = Call("get_current_weather", {"location": "Paris, France", "format": "celsius"})
TIME = Call("get_time", {"zone": "CET"})
PARIS, CET = '{"location": "Paris, France", "format": "celsius"}', '{"zone": "CET"}'
# Answers in the forms of the models' documentation, with and without the marks that are special tokens.
OBJECT = '{"name": "get_current_weather", "parameters": ' + PARIS + "}"
CLOCK = '{"name": "get_time", "parameters": ' + CET + "}"
LLAMA = [
    (OBJECT, [WEATHER]),
    ("<|python_tag|>" + OBJECT, [WEATHER]),
    (OBJECT.replace("{", '{"type": "function", ', 1), [WEATHER]),
    (OBJECT + "; " + CLOCK, [WEATHER, TIME]),
    ("\n" + CLOCK + " I hope this helps.", [TIME]),
    ("The weather is fine.", []),
    ('{"temperature": 22}', []),  # an answer in JSON
]
FIRST = '{"name": "get_current_weather", "arguments": ' + PARIS + ', "id": "VvvODy9mT"}'
SECOND = '{"name": "get_time", "arguments": ' + CET + ', "id": "a12345678"}'
MISTRAL = [
    (f"[TOOL_CALLS] [{FIRST}]", [WEATHER]),
    (f"[TOOL_CALLS][{FIRST}, {SECOND}]", [WEATHER, TIME]),
    (f" [{FIRST}]", [WEATHER]),
    (f"[TOOL_CALLS]get_current_weather[ARGS]{PARIS}", [WEATHER]),
    (f"[TOOL_CALLS]get_current_weather{PARIS}", [WEATHER]),
    (f"[TOOL_CALLS]get_current_weather[CALL_ID]VvvODy9mT[ARGS]{PARIS}", [WEATHER]),
    (f"[TOOL_CALLS]get_current_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[ARGS]{CET}", [WEATHER, TIME]),
    (f"get_current_weather{PARIS}get_time{CET}", [WEATHER, TIME]),
    (f"Let me see.[TOOL_CALLS]get_time[ARGS]{CET}", [TIME]),
    ("The weather is fine.", []),
    ("[1, 2]", []),  # an answer in JSON
]


# Arguments of every type: in the schema, and as the templates of both families write them.
SCHEMA = {
    "name": "zoom",
    "parameters": {
        "properties": {
            "label": {"type": "string"},
            "box": {"type": "array", "items": {"type": "integer"}},
            "share": {"type": "number"},
            "count": {"type": ["integer", "null"]},
            "wide": {"type": "boolean"},
            "where": {"type": "object"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "side": {"enum": ["left", "right"]},
        }
    },
}
TOOLS = ({"type": "function", "function": SCHEMA}, {"type": "function", "function": {"name": "get_time"}})
VALUES = [
    ("label", "12", "12"),
    ("label", " a\nb < c", " a\nb < c"),
    ("label", "", ""),
    ("box", "[1, 2]", [1, 2]),
    ("share", "0.5", 0.5),
    ("count", "7", 7),
    ("count", "None", None),
    ("wide", "True", True),
    ("wide", "false", False),
    ("where", '{"x": 1}', {"x": 1}),
    ("either", "3", 3),
    ("either", "left", "left"),
    ("side", "1", "1"),
    ("unknown", "3", 3),
    ("unknown", "three", "three"),
]


def qwen_xml(name, **arguments):
    """Write a call as the template of Qwen3-Coder does."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name, **arguments):
    """Write a call as the template of GLM-4.5 does."""
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


TAGGED = pytest.mark.parametrize(
    ("parse", "write"), [(parse_qwen_xml_calls, qwen_xml), (parse_glm_calls, glm)], ids=["qwen_xml", "glm"]
)


@TAGGED
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_the_schema_tells_the_types_of_arguments_that_are_text(parse, write, key, text, value):
    (call,) = parse("Let me see.\n" + write("zoom", **{key: text}), TOOLS)
    assert call == Call("zoom", {key: value}) and type(call.arguments[key]) is type(value)


@TAGGED
def test_several_tagged_calls_and_what_stands_beside_them(parse, write):
    both = write("zoom", label="a", share="1") + "\n" + write("get_time")
    assert parse("I look. " + both, TOOLS) == [Call("zoom", {"label": "a", "share": 1}), Call("get_time", {})]
    assert without_calls("I look. " + both) == "I look." and parse("The sky is blue.", TOOLS) == []
    assert parse(write("get_time", zone="3"), TOOLS) == [Call("get_time", {"zone": 3})]  # it takes nothing
    cut = write("zoom", label="a").partition("</tool_call>")[0]  # an answer that ended at its limit
    assert parse(cut, TOOLS) == [Call("zoom", {"label": "a"})]


@pytest.mark.parametrize(
    ("parse", "answer", "message"),
    [
        (parse_qwen_xml_calls, qwen_xml("zoom", box="[1, 2"), r"zoom: `box` is array in JSON, not '\[1, 2'"),
        (parse_qwen_xml_calls, qwen_xml("zoom", share="NaN"), "zoom: `share` is number in JSON, not 'NaN'"),
        (
            parse_qwen_xml_calls,
            '<tool_call>{"name": "zoom"}</tool_call>',
            "a call is written <tool_call><func",
        ),
        (parse_qwen_xml_calls, "<tool_call><function=zoom>box 3</function></tool_call>", "a call is written"),
        (parse_glm_calls, glm("zoom", count="two"), "zoom: `count` is integer or null in JSON, not 'two'"),
        (parse_glm_calls, "<tool_call>zoom 3</tool_call>", "a call is written <tool_call>name<arg_key>"),
        (
            parse_glm_calls,
            '<tool_call>{"name": "zoom"}</tool_call>',
            "a call is written <tool_call>name<arg_k",
        ),
    ],
)
def test_tagged_calls_that_cannot_be_read_are_errors_in_their_place(parse, answer, message):
    (error,) = parse(answer, TOOLS)
    with pytest.raises(CallError, match=message):
        raise error


@pytest.mark.parametrize(("answer", "calls"), LLAMA)
def test_calls_of_llama_are_objects_with_parameters(answer, calls):
    assert parse_llama_calls(answer) == calls
    assert parse_calls(answer) == []


@pytest.mark.parametrize(("answer", "calls"), MISTRAL)
def test_calls_of_mistral_are_a_list_or_names_with_arguments(answer, calls):
    assert parse_mistral_calls(answer) == calls
    assert parse_calls(answer) == []


@pytest.mark.parametrize(
    ("parse", "answer"),
    [
        (parse_llama_calls, '<|python_tag|>brave_search.call(query="x")'),
        (parse_llama_calls, '{"name": "get_time", "parameters": {"zone": '),
        (parse_llama_calls, '{"name": "get_time", "parameters": 3}'),
        (parse_llama_calls, '{"name": "get_time", "parameters": {"x": NaN}}'),
        (parse_mistral_calls, "[TOOL_CALLS]"),
        (parse_mistral_calls, "[TOOL_CALLS] [{"),
        (parse_mistral_calls, "[TOOL_CALLS] [{]"),
        (parse_mistral_calls, '[TOOL_CALLS] [{"name": "get_time", "arguments": [1]}]'),
        (parse_mistral_calls, '[TOOL_CALLS]get_time[ARGS]{"zone"'),
        (parse_mistral_calls, '[TOOL_CALLS] ["get_time"]'),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_in_its_place(parse, answer):
    (error,) = parse(answer)
    assert isinstance(error, CallError)


def test_calls_before_a_broken_one_are_made():
    call, error = parse_llama_calls(CLOCK + '; {"name": ')
    assert call == TIME and isinstance(error, CallError)


def test_the_words_beside_calls_of_any_form():
    assert without_calls("Let me see. [TOOL_CALLS]get_time[ARGS]" + CET) == "Let me see."
    assert [without_calls(answer) for answer, calls in (*LLAMA, *MISTRAL[:8]) if calls] == [""] * 13
    assert without_calls("The weather is fine.") == "The weather is fine."


# ---- the chat template tells the form; these are ours, in the words of the families

TOLD = "{% if tools %}{{ tools[0] | tojson }}{% endif %}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"


def turns(written="", content="m.content"):
    """Make a template that writes the calls of a turn after its words."""
    words = "<|im_start|>{{ m.role + ' ' + " + content + " }}" + written + "<|im_end|>"
    return "{% for m in messages %}" + words + "{% endfor %}" + BEGIN


OF_LLAMA = (
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}{% endif %}"
)
LIST = (
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% set out = c.function | tojson %}"
    "{{ out[:-1] + ', \"id\": \"' + c.id + '\"}' }}{% endfor %}]{% endif %}"
)
OF_QWEN_XML = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
OF_GLM = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
NAMED = (
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)


def double(number: int) -> str:
    """Double a number.

    Args:
        number: Which.
    """
    return str(2 * number)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("llama"), tiny._tokenizer()
    tokenizer.chat_template = turns()
    with seeded(0):
        t.LlamaForCausalLM(t.LlamaConfig(**tiny.TEXT, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def policy_with(model, template):
    policy = Tokens(model=model, dtype="float64")
    policy.processor.tokenizer.chat_template = template
    return policy


@pytest.mark.parametrize(
    ("written", "parse"),
    [(OF_LLAMA, parse_llama_calls), (LIST, parse_mistral_calls), (NAMED, parse_mistral_calls)],
)
def test_the_form_of_calls_is_that_of_the_chat_template(model, written, parse):
    policy = policy_with(model, TOLD + turns(written))
    engine = WithTools(
        Generate(policy, stream=Stream(0), max_completion_length=4), stream=Stream(0), tool=(double,)
    )
    assert engine.read_calls is parse
    untold = policy_with(model, turns(written))
    assert parser_of(untold.prompt_encoder, engine.schemas, parse_calls) is parse_calls


@pytest.mark.parametrize(
    ("written", "parse"), [(OF_QWEN_XML, parse_qwen_xml_calls), (OF_GLM, parse_glm_calls)]
)
def test_tagged_forms_are_read_with_the_schemas_of_the_tools(model, written, parse):
    policy = policy_with(model, TOLD + turns(written))
    inner = Generate(policy, stream=Stream(0), max_completion_length=4)
    engine = WithTools(inner, stream=Stream(0), tool=(double,))
    answer = policy.prompt_encoder.written_call("double", {"number": 4}, engine.schemas)
    assert engine.read_calls.func is parse and engine.read_calls(answer) == [Call("double", {"number": 4})]


def test_a_form_of_an_engine_of_its_own_is_used_or_refused(model):
    schemas, encoder = (Tool.of(double).schema,), policy_with(model, TOLD + turns(OF_LLAMA)).prompt_encoder
    own = lambda text: parse_llama_calls(text.strip())
    assert parser_of(encoder, schemas, own) is own
    with pytest.raises(ConfigError, match="so that no call of the model would be made"):
        parser_of(encoder, schemas, lambda text: [])


def test_a_template_without_the_replies_of_tools_is_refused(model):
    schemas = (Tool.of(double).schema,)
    silent = TOLD + turns(OF_LLAMA, "(m.content if m.role != 'tool' else '')")
    with pytest.raises(ConfigError, match=r"no message of the role `tool` \(it leaves out what they say\)"):
        parser_of(policy_with(model, silent).prompt_encoder, schemas, parse_calls)
    raising = TOLD + turns(OF_LLAMA + "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}")
    with pytest.raises(ConfigError, match=r"no message of the role `tool` \(TemplateError: no\)"):
        parser_of(policy_with(model, raising).prompt_encoder, schemas, parse_calls)


def test_rewards_and_conversations_see_the_calls_that_the_engine_read():
    turn = Message("assistant", (Part(CLOCK),), calls=tuple(parse_llama_calls(CLOCK)))
    (told,) = completion_of([turn])
    function = {"name": "get_time", "arguments": {"zone": "CET"}}
    assert told["content"] == "" and told["tool_calls"] == [{"type": "function", "function": function}]
    assert completion_of([Message("assistant", (Part(CLOCK),), calls=())]) == [
        {"role": "assistant", "content": CLOCK}
    ]
    assert tool_calls([Prompt("a", ())], [Outcome(text=CLOCK)]) == [0.0]  # no engine read it
