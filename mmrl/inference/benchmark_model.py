"""Adapter for other evaluation toolkits: answers their questions with mmrl's engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from mmrl.build import check_source, open_source
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find
from mmrl.core.modalities import MODALITIES
from mmrl.core.protocols import Engine
from mmrl.core.types import Message, Part, Prompt, Rollouts, Trajectory
from mmrl.data.fields import short
from mmrl.data.messages import ReadMedia
from mmrl.inference.session import Session
from mmrl.inference.sources import ModelSource, with_options

log = logging.getLogger("mmrl")
LENGTHS = ("max_new_tokens", "max_gen_toks", "max_tokens")  # names for the option max_completion_length
OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # neutral values of sampling filters
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "skip_special_tokens": True, "n": 1}
OF_OTHERS = ("image_aspect_ratio",)  # lmms-eval sends it to all models, for LLaVA's processor; ignored
PARAGRAPH = "\n\n"


@dataclass
class BenchmarkModel:
    """A model loaded at its first question, with one engine per set of sampling options.

    Raises ConfigError for a source with invalid pieces or missing packages, without loading anything.
    """

    source: ModelSource
    _sessions: dict[str, Session] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_source(self.source)

    def session(self, options: Mapping[str, Any]) -> Session:
        """Return the session whose engine has these options; all sessions share one policy.

        Raises ConfigError for an option that no engine of the source has.
        """
        key = repr(sorted(options.items()))
        if key not in self._sessions:
            loaded = next(iter(self._sessions.values()), None)
            source = with_options(self.source, options)
            self._sessions[key] = open_source(source, loaded.policy if loaded else None)
        return self._sessions[key]

    @property
    def engine(self) -> Engine:
        """The engine of the first session."""
        return next(iter(self._sessions.values())).engine

    def has_option(self, name: str) -> bool:
        """Whether an engine of the source has this option."""
        return any(name in find("engine", piece.name).options for piece in self.source.engines)

    def answer(
        self, options: Mapping[str, Any], until: Sequence[str], make: Sequence[Callable[[ReadMedia], Prompt]]
    ) -> Rollouts:
        """Answer prompts, and cut each answer before the first of the texts `until`.

        Args:
            options: Options of the engine.
            until: Texts that end an answer.
            make: One function per prompt, which builds it with the given media reader.

        Returns: One rollout per prompt, without the inputs of the forward pass.
        """
        if until and self.has_option("stop_strings"):
            options = {**options, "stop_strings": tuple(until)}
        session = self.session(options)
        read = session.media_reader()
        return tuple(_cut(row, until) for row in session.one_each([prompt(read) for prompt in make]))


def _cut(row: Trajectory, until: Sequence[str]) -> Trajectory:
    """Cut an answer's text before the first stop text, and drop model inputs that only training reads."""
    last = row.outcomes[-1]
    text = last.text
    if text is None:
        raise ConfigError("this model makes images; an evaluation toolkit asks for text")
    for stop in until:
        text = text.partition(stop)[0]
    return replace(row, outcomes=(replace(last, text=text),), steps=None, notes={})


def sampling_of(kwargs: Mapping[str, Any], place: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert generation kwargs of transformers to options of an engine, and to texts that end an answer.

    Decoding is greedy without `do_sample` and `temperature`, as in lmms-eval's own models, and with
    `do_sample: false`. Like these models, this ignores the stop text "\\n\\n", which lmms-eval sets if a task
    names none. A kwarg for which engines have no option raises ConfigError unless its value has no effect.

    Args:
        kwargs: The kwargs, such as `max_new_tokens`.
        place: Name of the task, for errors.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    until = given.pop("until", ())
    stops = [until] if isinstance(until, str) else list(until)
    sample = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if sample else 0.0))
    options: dict[str, Any] = {"temperature": 0.0 if sample is False else temperature}
    for name in LENGTHS:
        if name in given:
            options["max_completion_length"] = int(given.pop(name))
    for name, off in OFF.items():
        value = given.pop(name, off)
        if options["temperature"] and value != off:
            options[name] = value
    for name in OF_OTHERS:
        if name in given:
            _name_once(name, place)
            del given[name]
    for name, value in given.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            remedy = f", for example by gen_kwargs={name}={NEUTRAL[name]}" if name in NEUTRAL else ""
            raise ConfigError(
                f"{place}: no engine of mmrl has the generation kwarg `{name}: {short(value)}`; change the "
                f"task{remedy}"
            )
    return options, tuple(stop for stop in stops if stop and stop != PARAGRAPH)


@cache
def _name_once(name: str, place: str) -> None:
    log.warning("%s: `%s` is read by LLaVA only; the processor of the model decides here", place, name)


def prompt_from(uid: str, messages: Sequence[Mapping[str, Any]], read: ReadMedia) -> Prompt:
    """Create a prompt from messages whose parts are {"type": ..., "value" or "url" or "text": ...}.

    Texts are not changed: a word such as <image> is no placeholder. Raises ConfigError for a part of
    another type, and for unsupported keys, such as the start time of a video clip.
    """
    made = []
    for message in messages:
        content, parts = message["content"], []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            given = {name: value for name, value in part.items() if value is not None}
            kind = given.pop("type", "text")
            name = next((name for name in ("value", "url", kind) if name in given), None)
            value = given.pop(name) if name else None
            if name is None or given or kind not in ("text", *MODALITIES) or _is_clip(value):
                raise ConfigError(f"'{uid}': mmrl cannot read this part of a question: {short(part)}")
            place = f"{kind} {len(parts) + 1} of '{uid}'"
            parts.append(Part(str(value)) if kind == "text" else Part(media=read(kind, value, place)))
        made.append(Message(message.get("role", "user"), tuple(parts)))
    return Prompt(uid, tuple(made))


def _is_clip(value: Any) -> bool:
    """Whether a value selects an interval of a video, which is not supported."""
    return isinstance(value, Mapping) and bool({"video_start", "video_end"} & value.keys())
