"""Model inputs made by `processor.apply_chat_template`, without the prompt encoder; inputs of dummy media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Media, Message, Part, Prompt, Sound

AROUND = 8  # tokens shown on each side of a difference


def plain_inputs(
    processor: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    media: Mapping[str, Any],
    variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the model inputs of a conversation from `processor.apply_chat_template`.

    Args:
        processor: A processor of transformers.
        messages: Messages whose contents are texts or lists of blocks.
        tools: JSON schemas of functions.
        media: The images, videos and sounds of the blocks, in order, as arguments of the processor.
        variables: Variables of the chat template.
    """
    begun = {"add_generation_prompt": True, **({"tools": list(tools)} if tools else {}), **(variables or {})}
    if "load_audio_from_video" in media:  # it would decode the sound by itself
        text = processor.apply_chat_template(list(messages), tokenize=False, **begun)
        return dict(processor(text=[text], return_tensors="pt", **media))
    given = {}  # maps a kind of media to its media, in order
    for kind, modality in MODALITIES.items():
        values = media.get(modality.argument) or [[]] * modality.nested
        given[kind] = [*(values[0] if modality.nested else values)]
    filled = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {**block, block["type"]: given[block["type"]].pop(0)} if block["type"] in given else block
                for block in content
            ]
        filled.append({**message, "content": content})
    options: dict[str, Any] = dict(begun)
    if media:
        # Video options are passed at the top level, where the processor of SmolVLM adds its own.
        videos = dict(media.get("videos_kwargs", {}))
        size = {"videos_kwargs": {"size": videos.pop("size")}} if "size" in videos else {}
        values = {"images_kwargs", "videos_kwargs", *(modality.argument for modality in MODALITIES.values())}
        others = {name: value for name, value in media.items() if name not in values}
        images = {"images_kwargs": media.get("images_kwargs", {})}
        options["processor_kwargs"] = {**images, **videos, **size, **others}
    options |= {"tokenize": True, "return_dict": True}
    return dict(processor.apply_chat_template(filled, return_tensors="pt", **options))


class OtherTokens(ConfigError):
    """Raised if the tokens of a prompt differ from those of `processor.apply_chat_template`."""

    ends_run = True  # an error of the model, not of a row that could be dropped


def check_ids(prompt: Prompt, ids: Tensor, plain: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise `OtherTokens` with the first difference unless `ids` (1, S) equal the `input_ids` of `plain`."""
    if difference := first_difference(ids[0], torch.as_tensor(plain["input_ids"])[0], tokenizer):
        raise OtherTokens(
            f"prompt '{prompt.uid}' is not what `processor.apply_chat_template` of transformers makes of it: "
            f"{difference}; the template and the tokenizer disagree, so save the model with a template that "
            "its tokenizer reads, or report the model's type"
        )


def first_difference(ids: Tensor, plain: Tensor, tokenizer: Any) -> str:
    """Describe the first token in which two sequences (S,) differ; empty if they are equal."""
    if torch.equal(ids, plain):
        return ""
    at = next(
        (n for n, (a, b) in enumerate(zip(ids, plain, strict=False)) if a != b), min(map(len, (ids, plain)))
    )
    mine, theirs = (tokenizer.decode(one[max(0, at - AROUND) : at + AROUND]) for one in (ids, plain))
    return f"token {at} is the first that differs, in {mine!r} here and {theirs!r} there"


def blank_media(encoder: Any) -> dict[str, dict[str, Tensor]]:
    """Create dummy media inputs: a black image for the vision tower, and a prompt with a silent sound.

    `encoder` is the `PromptEncoder` of the model. Returns inputs by kind; {} for a model of text.
    """
    images = encoder.processor.image_processor
    if images is None:
        return {}
    black = torch.zeros(3, 56, 56, dtype=torch.uint8)  # gives 2 x 2 features in Qwen2-VL
    inputs = images(images=[black], return_tensors="pt")
    # Drop inputs that the model does not read, such as the numbers of tiles.
    names = filter(inputs.__contains__, images.model_input_names)
    blank = {"image": encoder.family.prepare({name: torch.as_tensor(inputs[name]) for name in names})}
    if encoder.family.sounds(encoder.core.config):
        silence = Media("audio", "silence", lambda: Sound(torch.zeros(16000), 16000))
        message = Message("user", (Part(media=silence), Part("x")))
        silent = encoder.encode(Prompt("silence", (message,)))
        blank["audio"] = {"input_ids": silent.ids[None], **silent.media}
    return blank
