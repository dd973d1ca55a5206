"""Tools of a conversation: functions that a model may call, and how calls are run."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Number
from typing import Annotated, Any

import torch

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.config.tool_functions import check_tool, parameters_of
from mmrl.core import chat
from mmrl.core.tool_calls import CallError
from mmrl.core.types import Frames, Media, Part
from mmrl.vision.media.media_reader import film
from mmrl.vision.tool_rights import DECLARED, Rights

SHOWN = "image of the conversation"
ShownImage = Annotated[Any, SHOWN]  # argument of a tool: a PIL image, which the model names by its number
TIMEOUT = 60.0  # seconds that a tool may take
MAX_CALLS = 16  # calls of one turn
MAX_ERROR = 200  # characters of an error that a model reads


class ToolFault(RuntimeError):
    """A tool raised an exception, timed out, or returned something else than texts and images."""


@dataclass(frozen=True)
class Answer:
    """What a tool returned, or the fault and its cause; `value` is a result that is a number."""

    parts: tuple[Part, ...] = ()
    fault: str = ""
    cause: BaseException | None = None
    value: float | None = None


@dataclass(frozen=True)
class Limits:
    """The largest reply: characters of a text, and pixels of an image before it is decoded."""

    chars: int
    pixels: int


@dataclass(eq=False)
class Owner:
    """Something whose tools are called one after another; `lost` once a call has not come back in time."""

    lost: bool = False


def as_answer(result: Any, name: str, limits: Limits) -> Answer:
    """Make the answer of a tool from what it returned; raises ToolFault as `as_parts` does."""
    return Answer(as_parts(result, name, limits))


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a model may call, and how its faults are met.

    Args:
        name: What the model calls it.
        function: Takes the arguments in the order of `signature`.
        signature: The arguments that the model gives.
        images: Which of them are images.
        schema: What the chat template tells the model.
        timeout: Seconds until an answer counts as missing.
        retries: Further tries after an exception.
        on_error: `tell` the model in one line, `skip` the rest of the conversation, or `raise`.
        rights: What it may do besides computing; None: everything that the process may.
        owner: Calls of tools with the same owner are made in order, one after another.
        convert: Makes the answer from what the function returned.
    """

    name: str
    function: Callable
    signature: inspect.Signature
    images: frozenset[str]
    schema: Mapping[str, Any]
    timeout: float = TIMEOUT
    retries: int = 0
    on_error: str = "tell"
    rights: Rights | None = None
    owner: Owner | None = None
    convert: Callable[[Any, str, Limits], Answer] = as_answer

    @staticmethod
    def of(function: Callable) -> Tool:
        """Make a tool of a function, or of one that a configuration named with its options."""
        target, name, call = function, getattr(function, "__name__", "tool"), {}
        match function:
            case Bound(entry=entry, options=options, call=given):
                target, name = entry.target, function.name
                call = {key: value for key, value in given.items() if key not in DECLARED}
                shipped = target.__module__.startswith("mmrl.")
                call["rights"] = Rights.declared(given, options, shipped=shipped)
        check_tool(target, name)
        hints, signature = _hints(target), inspect.signature(target)
        parameters = parameters_of(target)
        images = frozenset(argument for argument in parameters if _is_image(hints[argument]))
        return Tool(
            name,
            function,
            signature.replace(parameters=list(parameters.values())),
            images,
            _schema(target, name, {k: int if k in images else hints[k] for k in parameters}),
            **call,
        )

    def bind(self, given: Mapping[str, Any], images: Sequence[Media]) -> list[Any]:
        """Put a call's arguments in order; images stay undecoded. Raises CallError for what does not fit."""
        try:
            bound = self.signature.bind(**given)
        except TypeError as error:
            raise CallError(f"{self.name}: {error}") from error
        for name in self.images & bound.arguments.keys():
            number = bound.arguments[name]
            if type(number) is not int or not 0 <= number < len(images):
                known = f"0 to {len(images) - 1}" if images else "of which there is none"
                raise CallError(
                    f"{self.name}: `{name}` is the number of an image, {known}, not {number!r:.40}"
                )
            bound.arguments[name] = images[number]
        bound.apply_defaults()  # `args` would end at the first argument that is left out
        return list(bound.args)


def _hints(target: Callable) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        name = getattr(target, "__name__", target)
        raise ConfigError(
            f"cannot read the types of the tool '{name}': {error}; import it where the module is imported, "
            "or take images as `mmrl.vision.tool_calls.ShownImage`"
        ) from error


def _is_image(hint: Any) -> bool:
    from PIL.Image import Image

    return hint is Image or SHOWN in getattr(hint, "__metadata__", ())


def _schema(target: Callable, name: str, hints: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make the JSON schema of a tool by transformers, of the arguments that the model gives."""
    from transformers.utils import get_json_schema

    def described() -> None: ...

    described.__name__, described.__doc__ = name, inspect.getdoc(target)
    described.__annotations__ = dict(hints)
    given = [p.replace(annotation=hints[key]) for key, p in parameters_of(target).items()]
    described.__signature__ = inspect.Signature(given)  # pyright: ignore
    try:
        return get_json_schema(described)
    # Both exceptions of transformers for types and docstrings that it cannot read are plain ones.
    except Exception as error:
        raise ConfigError(f"cannot describe the tool '{name}' to a model: {error}") from error


# ---- running


def run_calls(calls: Sequence[tuple[Tool, list[Any]]], limits: Limits) -> list[Answer]:
    """Run calls as `begin_calls` does, and wait for their answers."""
    return begin_calls(calls, limits)()


def begin_calls(calls: Sequence[tuple[Tool, list[Any]]], limits: Limits) -> Callable[[], list[Answer]]:
    """Begin calls at the same time, those of one owner in order; returns a function that gets the answers.

    It waits until every call has its answer or is out of time, which is counted from the beginning of the
    call, however late answers are asked for. One that hangs delays no other.
    """
    answers = [Answer(fault=f"no answer within {tool.timeout:g} s") for tool, _ in calls]
    chains: dict[int, list[int]] = {}  # the calls of every owner
    for place, (tool, _) in enumerate(calls):
        chains.setdefault(id(tool.owner) if tool.owner else -place - 1, []).append(place)
    deadlines, done = [math.inf] * len(calls), [threading.Event() for _ in calls]

    def begin(place: int) -> None:
        deadlines[place] = time.monotonic() + calls[place][0].timeout

    def work(chain: Sequence[int]) -> None:
        for place, following in zip(chain, [*chain[1:], None], strict=True):
            tool, arguments = calls[place]
            answer = _with_retries(tool, arguments, deadlines[place], limits)
            if time.monotonic() >= deadlines[place]:
                return
            answers[place] = answer
            if following is not None:
                begin(following)
            done[place].set()

    for chain in chains.values():
        begin(chain[0])
        # Daemon threads: a tool that hangs must not keep the process alive after its time-out.
        threading.Thread(target=work, args=(chain,), daemon=True).start()

    def collect() -> list[Answer]:
        for chain in chains.values():
            for place in chain:
                if not done[place].wait(max(0.0, deadlines[place] - time.monotonic())):
                    if owner := calls[place][0].owner:
                        owner.lost = True
                    break
        return list(answers)  # a late thread still writes into the other list

    return collect


def _with_retries(tool: Tool, arguments: list[Any], deadline: float, limits: Limits) -> Answer:
    async def awaited(result: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(result, deadline - time.monotonic())

    for left in reversed(range(1 + tool.retries)):
        try:
            given = [to_pil(argument) for argument in arguments]  # images may be read from any file
            with tool.rights.held() if tool.rights else nullcontext():
                result = tool.function(*given)
                if inspect.isawaitable(result):
                    result = asyncio.run(awaited(result))
            return tool.convert(result, tool.name, limits)
        except ToolFault as fault:
            return Answer(fault=str(fault), cause=fault)
        # Whatever it raises ends this call alone, SystemExit and CancelledError included.
        except BaseException as error:
            if not left or time.monotonic() >= deadline:
                return Answer(fault=f"{type(error).__name__}: {error}", cause=error)
    raise AssertionError("the last try returns")


def to_pil(argument: Any) -> Any:
    """Decode an image of the conversation for PIL; other arguments stay."""
    match argument:
        case Media():
            return chat.to_pil(argument.load().pixels[0])
    return argument


def as_parts(result: Any, name: str, limits: Limits) -> tuple[Part, ...]:
    """Convert what a tool returned to parts of a message; raises ToolFault for what is none.

    That is a text, an image of PIL, a content block of either or of a video (a list of images of PIL of one
    size, two a second), or a list of these; None, a number and a dictionary become a text.
    """
    from PIL import Image

    parts = []
    for item in result if isinstance(result, list | tuple) else [_words(result)]:
        match item:
            case str(text) | {"type": "text", "text": str(text)}:
                cut = len(text) > limits.chars
                parts.append(Part(text[: limits.chars] + " [...]" if cut else text))
            case (Image.Image() as image) | {"type": "image", "image": Image.Image() as image}:
                parts.append(Part(media=_as_media(image, name, limits.pixels)))
            case {"type": "video", "video": [*images]} if images and all(_is_pil(image) for image in images):
                parts.append(Part(media=_as_video(images, name, limits.pixels)))
            case _:
                raise ToolFault(
                    f"returned {type(item).__name__}; a tool returns a text, a PIL image, or a list of both"
                )
    return tuple(parts)


def _words(result: Any) -> Any:
    """Write plain data as TRL does; everything else stays."""
    match result:
        case {"type": "text" | "image" | "video"}:
            return result
        case None | Number() | Mapping():
            return str(result)
    return result


def _is_pil(value: Any) -> bool:
    from PIL.Image import Image

    return isinstance(value, Image)


def _as_video(images: Sequence[Any], name: str, max_pixels: int) -> Media:
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise ToolFault(f"returned a video whose images have {len(sizes)} sizes; make them equal")
    (size,) = sizes
    if not 0 < size[0] * size[1] * len(images) <= max_pixels:  # before any pixel is made
        raise ToolFault(
            f"returned a video of {len(images)} images of {size[0]}x{size[1]} pixels; the limit is "
            f"{max_pixels} in all"
        )
    frames = film(images)
    return Media("video", f"a video from {name}", lambda: frames)


def _as_media(image: Any, name: str, max_pixels: int) -> Media:
    import numpy

    if not 0 < image.width * image.height <= max_pixels:  # before any pixel is made
        raise ToolFault(
            f"returned an image of {image.width}x{image.height} pixels; the limit is {max_pixels}"
        )
    pixels = torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1)[None].contiguous()
    frames = Frames(pixels, torch.zeros(1, dtype=torch.float64))
    return Media("image", f"an image from {name}", lambda: frames)


def shrunk(image: Media, most: int = 240) -> Media:
    """Copy an image with at most `most` pixels on a side: small enough to be kept with its row for a page."""
    frames = image.load()
    share = most / max(frames.pixels.shape[-2:])
    if share < 1:
        size = [max(1, round(side * share)) for side in frames.pixels.shape[-2:]]
        small = torch.nn.functional.interpolate(frames.pixels.float(), size, mode="bilinear", antialias=True)
        frames = Frames(small.round().clamp(0, 255).byte(), frames.times)
    return Media(image.kind, image.name, lambda: frames)


def one_line(error: object) -> str:
    """Write an error in one short line for the model to read."""
    return "Error: " + " ".join(str(error).split())[:MAX_ERROR]
