"""Engine for conversations with tools: policy turns, tool calls, and replies of text or images."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import count
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveInt
from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.episodes import EPISODE, TURN
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call, CallError, parse_calls
from mmrl.core.types import Message, Part, Prompt, PromptError, Rollouts, Trajectory
from mmrl.vision.decoding.branching import Branch, right_answer, target_scores, tokenized
from mmrl.vision.decoding.continuing import ConversationEngine, TurnSampler
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.models.processor import EncodedPrompt, Tools
from mmrl.vision.tools.call_formats import parser_of
from mmrl.vision.tools.conversation import CALL, Conversation, images_of
from mmrl.vision.tools.functions import MAX_CALLS, Tool, bind_call
from mmrl.vision.tools.pool import Replies, begin_calls
from mmrl.vision.tools.replies import Answer, Limits, ToolFault, one_line, shrunk

UNREADABLE = (Part("Error: the reply of the tool cannot be shown"),)


@engine(sets_tags={EPISODE, TURN, "state", "action", "tool", "finish"})
@dataclass(eq=False)
class WithTools:
    """Let the policy call tools in a conversation, and read their replies before its next turn.

    The engine wraps `vision.generate` or `vision.vllm`, whose `max_completion_length` limits one turn. A
    rollout is one row. Its steps are the sampled tokens; the tool replies between them are not trained on.
    Its answer is the last turn, with the tags `turn` (index of the turn) and `finish`: `stop`, `length`,
    `turns`, `images`, `context` or `tool_error`. In the table of completions, the columns `conversation` and
    `finish` show the whole conversation and why it ended. The reply to a malformed call is an error in one
    line. The calls of a turn start as soon as the turn ends, while other conversations still generate. Replay
    engines store whole conversations, with the media that tools returned.

    With `only_n_most_recent_images`, a conversation begins a new row whenever older images leave its prompt.
    Its rows have the tag `episode` and count as one answer in rewards and statistics. The last rows of all
    conversations come first, in the order of prompts, then all earlier rows. No token is trained on twice.

    Args:
        tool: Functions that the model may call; each may have `label` (its name), `timeout` (seconds),
            `retries`, and `on_error`: `tell` the model in one line (the default), `skip` the rest of the
            conversation, or `raise`.
        max_turns: Maximal number of policy turns; calls in the last turn are not run.
        max_completion_length: Maximal number of tokens that the policy samples in a conversation.
        max_images: Maximal number of images and videos from tools in a conversation.
        only_n_most_recent_images: How many of the latest images and videos from tools stay in the prompt, for
            long conversations about screenshots; 0: all. A text replaces older images, but tools can still be
            called with them. Media of the prompt itself always stay.
        max_context: Maximal tokens of a conversation, read and sampled; 0: the model's number of positions.
        max_reply_chars: Maximal characters of the texts that a tool returns at once; the rest is cut off.
        max_image_pixels: Maximal pixels of an image, or of all frames of a video, that a tool returns; a
            larger one counts as an error of the tool.
        turn_outcomes: Make an outcome of every turn, so that rewards score all turns instead of the last. The
            tag `state` names the prompt and the latest replies, for `gigpo` and similar advantages. The tag
            `action` names the calls of the turn with their arguments, the tag `tool` their tools.
        score_target: Record with every turn the probability of the right answer before that turn, in
            training: the geometric mean over its tokens (`answer_likelihood`, IGPO, arXiv 2510.14967) and the
            arithmetic mean (`answer_probability`). The right answer is the (first) target if it is a text,
            else the first recorded answer. It needs `turn_outcomes: true`.
        opener: Text between the prompt of a turn and the right answer, such as "The answer is".
    """

    engine: ConversationEngine
    _: KW_ONLY
    stream: Stream
    tool: tuple[Callable, ...]
    max_turns: PositiveInt = 4
    max_completion_length: PositiveInt = 1024
    max_images: NonNegativeInt = 8
    only_n_most_recent_images: Annotated[NonNegativeInt, AtMost("max_images")] = 0
    max_context: NonNegativeInt = 0
    max_reply_chars: PositiveInt = 4000
    max_image_pixels: PositiveInt = 1 << 24
    turn_outcomes: bool = False
    score_target: bool = False
    opener: str = ""
    notes: ClassVar[frozenset[str]] = frozenset()
    needs_tool: ClassVar[bool] = True  # False if environments bring the tools
    parse: ClassVar[Callable[[str], list[Call | CallError]]] = staticmethod(parse_calls)  # parser of calls

    def __post_init__(self) -> None:
        self.policy = self.engine.policy
        whole = hasattr(self.engine, "grow") and not hasattr(self, "instead")
        if self.score_target and not (whole and self.turn_outcomes):
            raise ConfigError(
                "`score_target` records a number with every turn of whole conversations: set `turn_outcomes: "
                "true`, with `vision.generate` or `vision.vllm`, and no engine whose conversations part"
            )
        tools = [Tool.of(function) for function in self.tool]
        self.tools = {tool.name: tool for tool in tools}
        if (self.needs_tool and not tools) or len(self.tools) < len(tools):
            raise ConfigError(
                f"`tool` of vision.with_tools must name tools of different names, not "
                f"{[tool.name for tool in tools]}"
            )
        self.schemas: Tools = tuple(tool.schema for tool in tools)
        self.read_calls = parser_of(self.policy.prompt_encoder, self.schemas, self.parse)
        config: Any = self.policy.core.config
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.context: int = self.max_context or positions or sys.maxsize
        self.counts: Counter[str] = Counter()

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run a conversation for every entry of `prompts`, in batches of the wrapped engine's size."""
        counters: dict[str, count[int]] = defaultdict(count)
        talks = self.begin([(prompt, next(counters[prompt.uid])) for prompt in prompts])
        size = self.engine.batch_size or len(talks) or 1
        for at in range(0, len(talks), size):
            self._converse(talks[at : at + size])
        self.counts.update(conversations=len(talks), turns=sum(len(talk.turns) for talk in talks))
        return self.end(talks)

    def begin(self, entries: Sequence[tuple[Prompt, int]]) -> list[Conversation]:
        """Begin a conversation for every entry, a pair of a prompt and an answer index."""
        return [
            Conversation(prompt, index, self._encode(prompt, self.schemas), images_of(prompt), self.tools)
            for prompt, index in entries
        ]

    def end(self, talks: Sequence[Conversation]) -> Rollouts:
        """Create the rows of finished conversations: the last row of each, in order, then earlier rows."""
        if self.score_target and self.stream.purpose == "train":
            self._score_targets(talks)
        rows = [[self._row(part) for part in talk.rows(self.only_n_most_recent_images)] for talk in talks]
        return (*(parts[-1] for parts in rows), *(row for parts in rows for row in parts[:-1]))

    def pop_metrics(self) -> Mapping[str, float]:
        """Return mean turns, tool calls and failed tool calls per conversation, and reset the counts."""
        number, counts = max(1, self.counts["conversations"]), self.counts
        self.counts = Counter()
        return {
            "tools/turns": counts["turns"] / number,
            "tools/calls": counts["calls"] / number,
            "tools/errors": counts["errors"] / number,
        }

    def _encode(self, prompt: Prompt, schemas: Tools) -> EncodedPrompt:
        """Encode a prompt with its tools; raise PromptError if it fills the context."""
        read = self.policy.prompt_encoder.encode(prompt, schemas)
        if len(read.ids) >= self.context:
            raise PromptError(
                prompt.uid,
                f"prompt '{prompt.uid}' has {len(read.ids)} tokens with its tools, and a conversation holds "
                f"{self.context} (`max_context`); leave the prompt out, or show smaller images",
            )
        return read

    def _converse(self, live: Sequence[Conversation]) -> None:
        """Run conversations to the end; each turn samples all unfinished conversations in one batch."""
        turns = self.engine.converse()
        for turn in range(self.max_turns):
            self._choose(live, turn, turns)
            self._reply([talk for talk in live if not talk.finish], turn + 1 == self.max_turns)
            live = [talk for talk in live if not talk.finish]
            if not live:
                break

    def _choose(self, talks: Sequence[Conversation], turn: int, turns: TurnSampler) -> None:
        """Sample one turn of every conversation; end conversations whose turn has no tool call."""
        requests = []
        for talk in talks:
            # Key random numbers by the turn; the first turn has the same numbers as `vision.generate`.
            key = ("turn", turn) if turn else ()
            generator = self.stream.generator(talk.prompt.uid, talk.index, *key)
            left = self.max_completion_length - talk.length, self.context - len(talk.read.ids)
            uniform = torch.rand(min(self.engine.max_completion_length, *left), generator=generator)
            on_stop = None if turn + 1 == self.max_turns else partial(self._begin_early, talk)
            requests.append(GenerationRequest(talk.prompt, talk.index, talk.read, uniform, on_stop))
        for talk, answer in zip(talks, turns.sample(requests), strict=True):
            finish = answer.outcomes[-1].tags["finish"]
            calls = self.read_calls(answer.outcomes[-1].text or "")
            talk.add(answer, calls)
            if finish == "length" or not calls:
                talk.finish = finish
            elif talk.length >= self.max_completion_length:
                talk.finish = "length"

    def _begin_early(self, talk: Conversation, ids: Tensor) -> None:
        """Start the tool calls of a turn (ids (t,)) that just ended, unless the token limit is reached."""
        if talk.length + len(ids) < self.max_completion_length:
            talk.collect = self._begin_calls(talk, self.policy.prompt_encoder.text(ids))

    def _reply(self, talks: Sequence[Conversation], last: bool) -> None:
        """Run all tool calls concurrently and append the replies; end the conversations if `last` is true."""
        if last:
            for talk in talks:
                talk.finish = "turns"
            return
        # Start the calls that are not running yet, because an engine may ignore `on_stop`.
        begun = [talk.collect or self._begin_calls(talk, talk.outcomes[-1].text or "") for talk in talks]
        answered = [collect() for collect in begun]
        for talk, replies in zip(talks, answered, strict=True):
            talk.collect = None
            self.counts["calls"] += len(replies)
            self._continue(talk, replies)

    def _begin_calls(self, talk: Conversation, text: str) -> Callable[[], Replies]:
        """Start the tool calls in the `text` of a turn; return a function that waits for the replies."""
        calls = self.read_calls(text)
        if len(calls) > MAX_CALLS:
            calls = [*calls[:MAX_CALLS], CallError(f"only {MAX_CALLS} calls of a turn are answered")]
        limits = Limits(self.max_reply_chars, self.max_image_pixels, self.max_images - talk.shown)
        return begin_calls([bind_call(call, talk.tools, talk.images) for call in calls], limits)

    def _continue(self, talk: Conversation, replies: Replies) -> None:
        """Append the replies to a turn's tool calls, or end the conversation at an error or a limit."""
        for tool, answer in replies:
            if answer.fault and tool and not self._shows_fault(talk, tool, answer):
                return
        if talk.shown + sum(answer.shown for _, answer in replies) > self.max_images:
            talk.finish = "images"
            return
        errors = [answer.fault for _, answer in replies]
        observed = [reply_message(*reply) for reply in replies]
        encoder, most = self.policy.prompt_encoder, self.only_n_most_recent_images
        try:
            reads = talk.extended(encoder, observed, most)
        except ValueError:  # an unreadable image: try each reply alone
            for place, (tool, _) in enumerate(replies):
                try:
                    talk.extended(encoder, [observed[place]], most)
                except ValueError as error:
                    fault = Answer(fault=str(error), cause=error)
                    if tool and not self._shows_fault(talk, tool, fault):
                        return
                    errors[place], observed[place] = fault.fault, replace(observed[place], parts=UNREADABLE)
            reads = talk.extended(encoder, observed, most)
        self.counts["errors"] += sum(map(bool, errors))
        if len(reads[-1].ids) >= self.context:
            talk.finish = "context"
        else:
            talk.go_on(reads, observed)

    def _shows_fault(self, talk: Conversation, tool: Tool, answer: Answer) -> bool:
        """Whether to show a tool's error to the model; otherwise end the conversation, or raise."""
        if tool.on_error == "raise":
            raise ToolFault(
                f"the tool '{tool.name}' failed for prompt '{talk.prompt.uid}': {answer.fault}. Mend it, or "
                "set `on_error: tell` on the tool, so that the model reads the error"
            ) from answer.cause
        if tool.on_error == "skip":
            self.counts["errors"] += 1
            talk.finish = "tool_error"
        return tool.on_error == "tell"

    @torch.no_grad()
    def _score_targets(self, talks: Sequence[Conversation]) -> None:
        """Record with every turn the probability of the right answer after the turn's prompt."""
        encoder, nothing = self.policy.prompt_encoder, torch.zeros(0)
        engine: Any = self.engine  # an engine with the method `grow`
        opener = tokenized(encoder, self.opener)
        places, branches = [], []
        for talk in talks:
            target = tokenized(encoder, right_answer(talk.prompt, "vision.with_tools"))
            places += talk.recorded
            branches += [Branch(read, nothing, torch.cat([opener, target])) for read, _ in talk.turns]
        for recorded, grown in zip(places, engine.grow(branches), strict=True):
            assert grown is not None  # `grow` returns None only for a branch with a parent
            recorded |= target_scores(grown.logp[len(opener) :])

    def _row(self, talk: Conversation) -> Trajectory:
        """Create the training row of a conversation or of a part of it; the steps are the sampled tokens."""
        steps = TokenRow.of_turns(talk.turns, talk.temperature)
        ends = torch.tensor([len(ids) for _, ids in talk.turns]).cumsum(0).tolist()
        tags = {"finish": CALL}
        if len(talk.begins) > 1:  # several rows: tag them with a name that is unique in a training step
            tags[EPISODE] = f"{talk.prompt.uid}/{self.stream.round}/{talk.index}"
        outcomes = [
            replace(outcome, end=end, tags={TURN: str(turn), **tags})
            for turn, (outcome, end) in enumerate(zip(talk.outcomes, ends, strict=True), talk.first)
        ]
        outcomes[-1] = replace(outcomes[-1], tags={**outcomes[-1].tags, "finish": talk.finish})
        if self.turn_outcomes:
            outcomes = [
                replace(
                    outcome,
                    tags={**outcome.tags, "state": state, **action},
                    recorded={**outcome.recorded, **recorded},
                )
                for outcome, state, action, recorded in zip(
                    outcomes, talk.states(), talk.actions(), talk.recorded, strict=True
                )
            ]
        read, last = talk.turns[-1]
        return Trajectory(
            talk.prompt,
            talk.prompt.uid,
            tuple(outcomes if self.turn_outcomes else outcomes[-1:]),
            steps,
            len(steps.ids),
            {name: torch.cat([notes[name] for notes in talk.notes]) for name in talk.notes[0]},
            logged={
                "conversation": self.policy.prompt_encoder.transcript(
                    torch.cat([read.ids[len(talk.reads[0].ids) :], last])
                ),
                "finish": talk.finish,
            },
            turns=tuple(talk.messages),
            shown=tuple(map(shrunk, talk.images[len(images_of(talk.prompt)) :])),
            transcript=talk.transcript,
        )


def reply_message(tool: Tool | None, answer: Answer) -> Message:
    """Convert a reply to a message with the name of its tool, because some chat templates show it."""
    extra = json.dumps({"name": tool.name}) if tool else ""
    return Message("tool", (Part(one_line(answer.fault)),) if answer.fault else answer.parts, extra)
