"""Tool descriptions in the prompt, and the choice of a parser for the model's format of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

from torch import Tensor

from mmrl.config.schema import ConfigError
from mmrl.core.tool_calls import (
    Call,
    CallError,
    parse_calls,
    parse_glm_calls,
    parse_llama_calls,
    parse_mistral_calls,
    parse_qwen_xml_calls,
)
from mmrl.core.types import Prompt, Transcript
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder, Tools

Parser = Callable[[str], Sequence[Call | CallError]]
FORMATS: tuple[Parser, ...] = (parse_calls, parse_llama_calls, parse_mistral_calls)
# Formats that write every argument as text, so that its type must be read from the tool's schema.
TAGGED_FORMATS = (parse_qwen_xml_calls, parse_glm_calls)


def encode_transcript(
    encoder: PromptEncoder, prompt: Prompt, transcript: Transcript
) -> list[tuple[EncodedPrompt, Tensor]]:
    """Encode a transcript: return (encoded input, token ids (t,)) of each turn in its training row."""
    tools, read, turns = transcript.tools, encoder.encode(prompt, transcript.tools), []
    for ids, replies in zip_longest(transcript.turns, transcript.replies):
        turns.append((read, ids))
        if replies is not None:
            read = encoder.extend(read, ids, *encoder.replies(replies, tools), tools=tools)
    return turns[transcript.first :]


def parser_of(encoder: PromptEncoder, tools: Tools, parse: Parser) -> Parser:
    """Find the parser for the format in which the chat template writes tool calls.

    Returns `parse` if the template supports no tools: the prompt then describes Qwen's format. Raises
    ConfigError if no parser reads the template's calls, or if the template omits replies of tools.
    """
    if not tools or not encoder.knows_tools(tools):
        return parse
    call = Call(tools[0]["function"]["name"], {"number": 1})
    try:
        written = encoder.written_call(call.name, call.arguments, tools)
        words = f"a call as {written[-200:]!r}"
    except ValueError as error:
        written, words = "", f"no call ({error})"
    parsers = (*FORMATS, *(partial(parser, tools=tools) for parser in TAGGED_FORMATS))
    for parser in parsers if parse in FORMATS else (parse,):  # a custom parser is the only candidate
        if parser(written) == [call]:
            _check_reply(encoder, tools)
            return parser
    raise ConfigError(
        f"the chat template of the model tells it about tools and writes {words}, but calls are read in the "
        'forms of Qwen, <tool_call>{"name": ..., "arguments": {...}}</tool_call> or '
        "<tool_call><function=name><parameter=key>value, of GLM, <tool_call>name<arg_key>key</arg_key>"
        '<arg_value>value, of Llama, {"name": ..., "parameters": {...}}, and of Mistral, '
        "[TOOL_CALLS] [{...}] or [TOOL_CALLS]name[ARGS]{...}, so that no call of the model would be made. "
        "Save the checkpoint with a template that writes them so, or with one that leaves tools out: the "
        "model then reads Qwen's words"
    )


def _check_reply(encoder: PromptEncoder, tools: Tools) -> None:
    """Raise ConfigError unless the chat template writes the replies of tools after tool calls."""
    read, words = encoder.template.reads("tool", tools), ""
    if not read.forms:
        words = f"no message of the role `tool` ({read.why})"
    else:
        try:
            after_call, after_words = encoder.template.after_calls(tools)
            # A sampled call is plain text for the template, so replies must render alike after plain answers.
            words = (
                "" if after_call.endswith(after_words) else "other words than after an answer without calls"
            )
        except ValueError:
            words = "nothing after an answer without a list of calls"
    if not words:
        return
    raise ConfigError(
        f"the chat template of the model tells it about tools, but of a tool's reply it writes {words}. "
        "Save the checkpoint with a template that writes such replies, or with one that leaves tools "
        "out: the model then reads Qwen's words"
    )
