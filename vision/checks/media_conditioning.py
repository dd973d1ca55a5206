"""Check at the start: images and videos reach the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.core.types import Frames, Media, Message, Prompt, Trajectory
from mmrl.diagnostics.context import Examined, Finding


@check(on="start")
def media_conditioning(examined: Examined, *, rows: PositiveInt = 4) -> Iterator[Finding]:
    """Check that answers become more or less likely when every pixel is inverted.

    `rows` rollouts with media are compared.
    """
    shown = [row for row in examined.rollouts if row.prompt.media][:rows]
    if not shown:
        return
    policy = examined.policy
    seen = examined.log_probabilities(tuple(policy.encode(row.prompt, row.outcomes[-1]) for row in shown))
    turned = examined.log_probabilities(
        tuple(policy.encode(negative(row.prompt), row.outcomes[-1]) for row in shown)
    )
    blind = [row for row, logp, other in zip(shown, seen, turned, strict=True) if bool((logp == other).all())]
    if blind:
        yield Finding(
            f"the media of {_named(blind)} do not reach the model: its answers are exactly as likely when "
            "every pixel changes",
            "see that the chat template has a place for them, that the processor is the model's own, and "
            "that pixel values are passed to the forward call",
        )


def negative(prompt: Prompt) -> Prompt:
    """Give the same prompt with inverted images and videos."""

    def turn(media: Media) -> Media:
        def load() -> Frames:
            frames = media.load()
            return replace(frames, pixels=255 - frames.pixels)

        return replace(media, name=f"the negative of {media.name}", load=load)

    messages = tuple(
        Message(
            message.role,
            tuple(
                part if part.media is None else replace(part, media=turn(part.media))
                for part in message.parts
            ),
        )
        for message in prompt.messages
    )
    return replace(prompt, messages=messages)


def _named(rows: list[Trajectory]) -> str:
    uids = list(dict.fromkeys(row.prompt.uid for row in rows))
    return f"prompt '{uids[0]}'" + (f" and {len(uids) - 1} more" if len(uids) > 1 else "")
