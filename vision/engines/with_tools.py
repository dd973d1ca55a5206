"""Conversations with tools: the policy writes a call, a tool answers with text or images, it goes on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call, CallError, parse_calls
from mmrl.core.types import Media, Message, Outcome, Part, Prompt, Rollouts, Trajectory
from mmrl.engines.replay import CHANGED
from mmrl.vision.decoding.decoding import BeginReading, GenerationRequest
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder, Tools
from mmrl.vision.tool_calls import (
    MAX_CALLS,
    Answer,
    Limits,
    Tool,
    ToolFault,
    begin_calls,
    one_line,
    shrunk,
)

# The words in which Qwen's chat templates tell a model about tools; those of Qwen2.5-VL leave them out.
QWEN_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
Replies = list[tuple[Tool | None, Answer]]  # to the calls of a turn, with the tools that were found
UNREADABLE = "Error: the reply of the tool cannot be shown"


@dataclass(eq=False)
class Conversation:
    """A conversation that grows: what the policy reads next, and its turns so far."""

    prompt: Prompt
    index: int  # of this answer to the prompt
    read: EncodedPrompt
    images: list[Media]
    tools: Mapping[str, Tool]
    turns: list[tuple[EncodedPrompt, Tensor]] = field(default_factory=list)
    notes: list[Mapping[str, Tensor]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)  # of the turns
    messages: list[Message] = field(default_factory=list)  # turns and replies
    temperature: float = 1.0
    shown: int = 0  # images and videos that tools showed
    finish: str = ""  # why it ended
    collect: Callable[[], Replies] | None = None  # gets the replies to the calls that were begun

    @property
    def schemas(self) -> Tools:
        """What the chat template tells the model about tools."""
        return tuple(tool.schema for tool in self.tools.values())

    @property
    def length(self) -> int:
        """Tokens that the policy chose."""
        return sum(len(ids) for _, ids in self.turns)

    def add(self, answer: Trajectory) -> None:
        """Append a turn of the policy."""
        self.turns.append((self.read, answer.steps.ids))
        self.notes.append(answer.notes)
        self.outcomes.append(answer.outcomes[-1])
        self.messages.append(Message("assistant", (Part(answer.outcomes[-1].text or ""),)))
        self.temperature = answer.steps.temperature


@engine
@dataclass(eq=False)
class WithTools:
    """Let the policy call tools, whose texts and images it reads before it goes on.

    It wraps `vision.generate`, whose `max_completion_length` limits one turn. A rollout is one row whose
    steps are the tokens that the policy chose; what tools say stands between them and is not learned. Its
    answer is the last turn; the tag `turn` is the number of that turn, from 0, and `finish` is `stop`,
    `length`, `turns`, `images` or `tool_error`. The columns `conversation` and `finish` of completions show
    all turns, and why they ended. A call that cannot be made as it is written is always answered by an error
    in one line. The calls of a turn begin when its end is drawn, while other conversations of the batch still
    generate; their replies are read together, in the next turn. `replay` keeps none of these rows.

    Args:
        tool: Functions that the model may call; each may have `timeout` (seconds), `retries`, and `on_error`:
            `tell` the model in one line (the default), `skip` the rest of the conversation, or `raise`.
        max_turns: The most turns of the policy; a call in the last one is not made.
        max_completion_length: The most tokens that the policy chooses in a conversation.
        max_images: The most images and videos that tools show in a conversation.
        max_reply_chars: The most characters of a text that a tool returns; the rest is cut off.
        max_image_pixels: The most pixels of an image, or of all of a video, that a tool returns; more are an
            error of the tool.
        turn_outcomes: Make an outcome of every turn, all of which rewards score, instead of the last alone.
            Their tag `state` names what the policy had read, for `gigpo` and its relatives.
    """

    engine: Generate
    _: KW_ONLY
    stream: Stream
    tool: tuple[Callable, ...]
    max_turns: PositiveInt = 4
    max_completion_length: PositiveInt = 1024
    max_images: NonNegativeInt = 8
    max_reply_chars: PositiveInt = 4000
    max_image_pixels: PositiveInt = 1 << 24
    turn_outcomes: bool = False
    notes: ClassVar[frozenset[str]] = frozenset()
    has_others: ClassVar[bool] = False  # whether conversations have tools of their own
    parse: ClassVar[Callable[[str], list[Call | CallError]]] = staticmethod(parse_calls)  # a form of calls

    def __post_init__(self) -> None:
        self.policy = self.engine.policy
        tools = [Tool.of(function) for function in self.tool]
        self.tools = {tool.name: tool for tool in tools}
        if not (tools or self.has_others) or len(self.tools) < len(tools):
            raise ConfigError(
                f"`tool` of vision.with_tools must name tools of different names, not "
                f"{[tool.name for tool in tools]}"
            )
        self.schemas: Tools = tuple(tool.schema for tool in tools)
        self.counts: Counter[str] = Counter()

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Hold a conversation about every entry, in the batches of the engine."""
        counters: dict[str, count[int]] = defaultdict(count)
        talks = self.begin([(prompt, next(counters[prompt.uid])) for prompt in prompts])
        size = self.engine.batch_size or len(talks) or 1
        for at in range(0, len(talks), size):
            self._converse(talks[at : at + size])
        self.counts.update(conversations=len(talks), turns=sum(len(talk.turns) for talk in talks))
        return self.end(talks)

    def begin(self, asked: Sequence[tuple[Prompt, int]]) -> list[Conversation]:
        """Begin a conversation about every prompt, for the answer of this index."""
        encoder, talks = self.policy.prompt_encoder, []
        for prompt, index in asked:
            read = encode_with_tools(encoder, prompt, self.schemas)
            talks.append(Conversation(prompt, index, read, images_of(prompt), self.tools))
        return talks

    def end(self, talks: Sequence[Conversation]) -> Rollouts:
        """Make the rows of conversations that have ended."""
        return tuple(map(self._row, talks))

    def tell(self) -> Mapping[str, float]:
        """Return turns, calls and errors of calls per conversation since the last call."""
        number, counts = max(1, self.counts["conversations"]), self.counts
        self.counts = Counter()
        return {
            "tools/turns": counts["turns"] / number,
            "tools/calls": counts["calls"] / number,
            "tools/errors": counts["errors"] / number,
        }

    def _converse(self, live: Sequence[Conversation]) -> None:
        """Hold conversations to their ends; in every turn, all that go on are continued together."""
        begin = self.engine.turns().begin  # keeps what was computed in the turns before
        for turn in range(self.max_turns):
            self._choose(live, turn, begin)
            self._reply([talk for talk in live if not talk.finish], turn + 1 == self.max_turns)
            live = [talk for talk in live if not talk.finish]
            if not live:
                break

    def _choose(self, talks: Sequence[Conversation], turn: int, begin: BeginReading) -> None:
        """Let the policy take a turn in every conversation; end those without a call."""
        requests = []
        for talk in talks:
            # The first turn draws as `vision.generate` does; no order of completion changes a draw.
            key = ("turn", turn) if turn else ()
            generator = self.stream.generator(talk.prompt.uid, talk.index, *key)
            most = min(self.engine.max_completion_length, self.max_completion_length - talk.length)
            uniform = torch.rand(most, generator=generator)
            on_stop = None if turn + 1 == self.max_turns else partial(self._begin_early, talk)
            requests.append(GenerationRequest(talk.prompt, talk.index, talk.read, uniform, on_stop))
        for talk, answer in zip(talks, self.engine.answer(requests, begin), strict=True):
            talk.add(answer)
            finish = answer.outcomes[-1].tags["finish"]
            calls = self.parse(talk.outcomes[-1].text or "")
            if finish == "length" or not calls:
                talk.finish = finish
            elif talk.length >= self.max_completion_length:
                talk.finish = "length"

    def _begin_early(self, talk: Conversation, ids: Tensor) -> None:
        """Begin the calls of a turn (t,) whose end was drawn, where the conversation goes on after it."""
        if talk.length + len(ids) < self.max_completion_length:
            talk.collect = self._begin_calls(talk, self.policy.prompt_encoder.text(ids))

    def _reply(self, talks: Sequence[Conversation], last: bool) -> None:
        """Answer the calls of all conversations at the same time; `last` ends them instead."""
        if last:
            for talk in talks:
                talk.finish = "turns"
            return
        # Some have not begun: an engine may leave `on_stop` alone.
        begun = [talk.collect or self._begin_calls(talk, talk.outcomes[-1].text or "") for talk in talks]
        answered = [collect() for collect in begun]
        for talk, replies in zip(talks, answered, strict=True):
            talk.collect = None
            self.counts["calls"] += len(replies)
            self._continue(talk, replies)

    def _begin_calls(self, talk: Conversation, text: str) -> Callable[[], Replies]:
        """Begin the calls of a turn at the same time; returns a function that gets their replies."""
        found = self.parse(text)
        if len(found) > MAX_CALLS:
            found = [*found[:MAX_CALLS], CallError(f"only {MAX_CALLS} calls of a turn are answered")]
        calls: list[tuple[Tool, list[Any]]] = []
        places: list[CallError | int] = []  # for every call an error, or its place in `calls`
        for call in found:
            try:
                calls.append(self._bound(call, talk))
            except CallError as error:
                places.append(error)
                continue
            places.append(len(calls) - 1)
        begun = begin_calls(calls, Limits(self.max_reply_chars, self.max_image_pixels))

        def collect() -> Replies:
            answers = begun()
            return [
                (None, Answer(fault=str(place)))
                if isinstance(place, CallError)
                else (calls[place][0], answers[place])
                for place in places
            ]

        return collect

    def _bound(self, call: Call | CallError, talk: Conversation) -> tuple[Tool, list[Any]]:
        """Find the tool of a call and its arguments; raises CallError."""
        if isinstance(call, CallError):
            raise call
        if call.name not in talk.tools:
            raise CallError(f"there is no tool {call.name!r:.40}; there are {', '.join(talk.tools)}")
        tool = talk.tools[call.name]
        return tool, tool.bind(call.arguments, talk.images)

    def _continue(self, talk: Conversation, replies: Sequence[tuple[Tool | None, Answer]]) -> None:
        """Append the replies of a turn's calls to a conversation, or end it."""
        parts: list[tuple[Part, ...]] = []
        for tool, answer in replies:
            if answer.fault and tool and not self._told(talk, tool, answer):
                return
            parts.append((Part(one_line(answer.fault)),) if answer.fault else answer.parts)
        told = [Message("tool", reply) for reply in parts]
        media = [part.media for reply in parts for part in reply if part.media]
        if talk.shown + len(media) > self.max_images:
            talk.finish = "images"
            return
        encoder, ids = self.policy.prompt_encoder, talk.turns[-1][1]
        errors = sum(bool(answer.fault) for _, answer in replies)
        try:
            read = encoder.extend(talk.read, ids, *encoder.replies(told, talk.schemas))
        except ValueError as error:  # a special token in a text, or an image that the model cannot read
            fault = Answer(fault=str(error), cause=error)
            if not all(self._told(talk, tool, fault) for tool, _ in replies if tool):
                return
            errors, media, told = max(1, errors), [], [Message("tool", (Part(UNREADABLE),))]
            read = encoder.extend(talk.read, ids, *encoder.replies(told, talk.schemas))
        talk.read = read
        talk.images = [*talk.images, *(medium for medium in media if medium.kind == "image")]
        talk.messages += told
        talk.shown += len(media)
        self.counts["errors"] += errors

    def _told(self, talk: Conversation, tool: Tool, answer: Answer) -> bool:
        """Return whether the model reads of a tool's fault; otherwise end the conversation, or raise."""
        if tool.on_error == "raise":
            raise ToolFault(
                f"the tool '{tool.name}' failed for prompt '{talk.prompt.uid}': {answer.fault}. Mend it, or "
                "set `on_error: tell` on the tool, so that the model reads the error"
            ) from answer.cause
        if tool.on_error == "skip":
            self.counts["errors"] += 1
            talk.finish = "tool_error"
        return tool.on_error == "tell"

    def _row(self, talk: Conversation) -> Trajectory:
        """Make the row of a conversation; its steps are the tokens of all turns of the policy."""
        steps = TokenRow.of_turns(talk.turns, talk.temperature)
        ends = torch.tensor([len(ids) for _, ids in talk.turns]).cumsum(0).tolist()
        outcomes = [
            replace(outcome, end=end, tags={"turn": str(turn), "finish": "call", CHANGED: "yes"})
            for turn, (outcome, end) in enumerate(zip(talk.outcomes, ends, strict=True))
        ]
        outcomes[-1] = replace(outcomes[-1], tags={**outcomes[-1].tags, "finish": talk.finish})
        if self.turn_outcomes:
            outcomes = [
                replace(outcome, tags={**outcome.tags, "state": state_of(read)})
                for outcome, (read, _) in zip(outcomes, talk.turns, strict=True)
            ]
        shown = talk.turns[0][1] if steps.suffix is None else steps.suffix.ids
        return Trajectory(
            talk.prompt,
            talk.prompt.uid,
            tuple(outcomes if self.turn_outcomes else outcomes[-1:]),
            steps,
            len(steps.ids),
            {name: torch.cat([notes[name] for notes in talk.notes]) for name in talk.notes[0]},
            logged={
                "conversation": self.policy.prompt_encoder.transcript(shown),
                "finish": talk.finish,
            },
            turns=tuple(talk.messages),
            shown=tuple(map(shrunk, talk.images[len(images_of(talk.prompt)) :])),
        )


def images_of(prompt: Prompt) -> list[Media]:
    """List the images of a prompt, which tools know by their numbers."""
    return [media for media in prompt.media if media.kind == "image"]


def state_of(read: EncodedPrompt) -> str:
    """Name what a policy read before a turn, tokens and media, so that equal states have equal names."""
    digest = hashlib.blake2b(read.ids.numpy().tobytes(), digest_size=16)
    for name, tensor in sorted(read.media.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def encode_with_tools(encoder: PromptEncoder, prompt: Prompt, tools: Tools) -> EncodedPrompt:
    """Encode a prompt with tools: in the words of the chat template, or in Qwen's where it has none."""
    if not tools or encoder.knows_tools(tools):
        return encoder.encode(prompt, tools)
    instructions = Part(QWEN_TOOLS.format(schemas="\n".join(map(json.dumps, tools))))
    match prompt.messages:
        case [Message(role="system", parts=parts), *others]:
            system = Message("system", (*parts, Part("\n\n"), instructions))
        case others:
            system = Message("system", (instructions,))
    return encoder.encode(replace(prompt, messages=(system, *others)))
