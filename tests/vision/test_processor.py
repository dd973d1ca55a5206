"""Prompts become what the processor of a model makes of them, whole, or an error that names the prompt."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers.video_utils import VideoMetadata

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.vision.models import processor as processor_module
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

EVERY = pytest.mark.parametrize("family", sorted(tiny.MAKERS))


def processed(policy, prompt):
    """Ask the processor directly: frames one second apart, 1000 ticks a second."""
    content = [
        {"type": part.media.kind} if part.media else {"type": "text", "text": part.text}
        for part in prompt.messages[0].parts
    ]
    text = policy.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    shown = {kind: [m.load() for m in prompt.media if m.kind == kind] for kind in ("image", "video")}
    inputs = {"images": [[one.pixels[0] for one in shown["image"]]]} if shown["image"] else {}
    if shown["video"]:
        metadata = [
            VideoMetadata(
                total_num_frames=n * 1000, fps=1000, frames_indices=[i * 1000 for i in range(n)], duration=n
            )
            for n in (len(one.pixels) for one in shown["video"])
        ]
        inputs |= {
            "videos": [one.pixels for one in shown["video"]],
            "videos_kwargs": {"video_metadata": metadata, "do_sample_frames": False},
        }
    options = {"text_kwargs": {"add_special_tokens": not text.startswith("<s>")}}  # BOS once
    return policy.processor(text=[text], return_tensors="pt", **inputs, **options)


@EVERY
def test_every_sort_of_prompt_is_encoded_as_the_processor_encodes_it(exact, family):
    policy = exact(family)
    for prompt in mixed.prompts(family):
        encoded, wanted = policy.prompt_encoder.encode(prompt), processed(policy, prompt)
        assert encoded.uid == prompt.uid
        assert torch.equal(encoded.ids, wanted["input_ids"][0])
        assert bool(encoded.media) == bool(prompt.media)
        frames = family == "glm46v" and "pixel_values_videos" in wanted  # families/test_glm_videos.py
        for name, value in encoded.media.items():
            assert frames or torch.equal(value, torch.as_tensor(wanted[name])), name
        assert encoded.positions.shape[1] == len(encoded.ids)
        assert encoded.next_position == int(encoded.positions.max()) + 1


@EVERY
def test_positions_are_those_of_the_model(exact, family):
    policy = exact(family)
    for prompt in mixed.prompts(family):
        encoded, inputs = policy.prompt_encoder.encode(prompt), processed(policy, prompt)
        if family in ("qwen2_vl", "qwen2_5_vl") and "video_grid_thw" in inputs:
            continue  # transformers is wrong about what follows a video: see test_positions.py
        if family.startswith(("qwen", "glm")) and prompt.media:
            names = (
                "input_ids",
                "mm_token_type_ids",
                "image_grid_thw",
                "video_grid_thw",
            )
            given = {name: torch.as_tensor(inputs[name]) for name in names if name in inputs}
            assert torch.equal(encoded.positions, policy.core.get_rope_index(**given)[0][:, 0])
            assert len(encoded.positions) == 3
        else:
            assert (encoded.positions == torch.arange(len(encoded.ids))).all()


@EVERY
def test_a_placeholder_in_the_text_of_a_prompt_is_refused(exact, family):
    policy = exact(family)
    words = {policy.prompt_encoder.tokenizer.decode(token) for token in policy.prompt_encoder.placeholders}
    words |= {w for w in (policy.processor.image_token, getattr(policy.processor, "video_token", None)) if w}
    assert words
    for word in words:
        prompt = tiny.ask("row 7", tiny.picture(), f"what is {word} here")
        with pytest.raises(ValueError, match="text of prompt 'row 7' holds the media placeholder") as caught:
            policy.prompt_encoder.encode(prompt)
        assert repr(word) in str(caught.value)
        system = Message("system", (Part(f"never say {word}"),))
        with pytest.raises(ValueError, match="holds the media placeholder"):
            policy.prompt_encoder.encode(Prompt("row 8", (system, *tiny.ask("x", "hello").messages)))


@EVERY
def test_a_template_that_leaves_images_out_is_an_error_that_names_the_prompt(exact, family):
    policy = exact(family)
    processor = copy.copy(policy.processor)
    processor.chat_template = (
        "{% for m in messages %}{% for c in m['content'] %}"
        "{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}<|im_end|>"
    )
    blind = PromptEncoder(processor, policy.core)
    assert len(blind.encode(tiny.ask("row 6", "hello")).ids) > 0
    with pytest.raises(ValueError, match="prompt 'row 7'"):
        blind.encode(tiny.ask("row 7", tiny.picture(), "what"))


def test_a_mismatch_tells_placeholders_and_features(exact):
    policy = exact("qwen2_5_vl")
    processor = copy.deepcopy(policy.processor)
    # 56 x 56 pixels are 16 patches. The model makes a feature of four, this processor believes of one.
    processor.image_processor.merge_size = 1
    with pytest.raises(
        ValueError, match=r"'row 7' has 16 placeholder tokens \('<\|image_pad\|>'\) for 4 media"
    ):
        PromptEncoder(processor, policy.core).encode(tiny.ask("row 7", tiny.picture(), "what"))


def test_a_video_for_a_model_of_images_is_an_error_that_names_the_prompt(exact):
    with pytest.raises(ValueError, match="prompt 'row 7' shows a video, but this model takes images only"):
        exact("llava").prompt_encoder.encode(tiny.ask("row 7", tiny.clip(), "when"))


@pytest.mark.parametrize("family", ["smolvlm", "internvl", "llava_onevision"])
def test_what_a_processor_cannot_take_is_an_error_that_names_the_prompt(exact, family):
    # Two videos of different lengths in one prompt.
    with pytest.raises(ValueError, match="prompt 'row 7'"):
        exact(family).prompt_encoder.encode(tiny.ask("row 7", tiny.clip(4), tiny.clip(6, seed=1), "when"))


@EVERY
def test_nothing_is_truncated_whatever_the_tokenizer_was_saved_with(exact, family):
    policy = exact(family)
    processor = copy.deepcopy(policy.processor)
    processor.tokenizer.model_max_length = 16
    processor.tokenizer.backend_tokenizer.enable_truncation(16)
    prompt = tiny.ask("long", "the fox " * 200, tiny.picture(), "the quick brown fox " * 200)
    assert torch.equal(
        PromptEncoder(processor, policy.core).encode(prompt).ids, policy.prompt_encoder.encode(prompt).ids
    )
    assert len(policy.prompt_encoder.encode(prompt).ids) > 1000
    text = "0123456789 " * 50
    assert torch.equal(PromptEncoder(processor, policy.core).answer(text), policy.prompt_encoder.answer(text))


def test_a_conversation_is_rendered_turn_by_turn(exact):
    policy = exact("qwen2_5_vl")
    turns = (
        Message("system", (Part("be brief"),)),
        Message("user", (Part(media=tiny.picture()), Part("what"))),
        Message("assistant", (Part("a fox"),)),
        Message("user", (Part("where"),)),
    )
    text = policy.prompt_encoder.tokenizer.decode(policy.prompt_encoder.encode(Prompt("talk", turns)).ids)
    wanted = (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>what<|im_end|>\n"
        "<|im_start|>assistant\na fox<|im_end|>\n<|im_start|>user\nwhere<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == wanted


def clip(times, duration):
    pixels = torch.zeros(len(times), 3, 56, 56, dtype=torch.uint8)
    frames = Frames(pixels, torch.tensor(times, dtype=torch.float64), duration)
    return Media("video", "clip", lambda: frames)


def test_the_times_of_frames_reach_the_model(exact):
    for times, duration in (([0, 1, 2, 3], 4), ([80, 80.5, 81, 81.5], 100)):
        step = times[1] - times[0]
        prompt = tiny.ask(f"at {times[0]}", clip(times, float(duration)), "when")
        # Two frames make one step of the grid; Qwen2.5-VL counts two positions a second.
        encoded = exact("qwen2_5_vl").prompt_encoder.encode(prompt)
        assert encoded.media["second_per_grid_ts"].tolist() == [2 * step]
        seen = encoded.positions[0, encoded.ids == exact("qwen2_5_vl").model.config.video_token_id]
        assert (seen - seen[0]).tolist() == [0] * 4 + [2 * 2 * step] * 4
    # The last prompt: SmolVLM writes minutes and seconds, Qwen3-VL the middle of two frames.
    text = exact("smolvlm").prompt_encoder.tokenizer.decode(
        exact("smolvlm").prompt_encoder.encode(prompt).ids
    )
    assert "Frame from 01:20:" in text and "Frame from 01:21:" in text and "0:01:40" in text
    text = exact("qwen3_vl").prompt_encoder.tokenizer.decode(
        exact("qwen3_vl").prompt_encoder.encode(prompt).ids
    )
    assert "<80.2 seconds>" in text and "<81.2 seconds>" in text


def test_a_video_of_one_frame_is_encoded(exact):
    for family in tiny.WITH_VIDEO:
        if family not in ("qwen3_vl", "qwen3_5", "glm46v"):  # their processors want two
            assert len(exact(family).prompt_encoder.encode(tiny.ask("one", clip([0.0], 4.0), "when")).ids)


def test_encoded_prompts_are_shared_and_distinguished_by_uid_and_messages(exact, monkeypatch):
    policy = exact("qwen2_5_vl")
    chat = PromptEncoder(policy.processor, policy.core)
    looked = []
    frames = tiny.picture().load()
    picture = Media("image", "p", lambda: (looked.append(1), frames)[1])
    prompt = tiny.ask("a", picture, "what")
    assert chat.encode(prompt) is chat.encode(tiny.ask("a", picture, "what"))
    assert len(looked) == 1
    assert chat.encode(tiny.ask("b", picture, "what")) is not chat.encode(prompt)
    # The same prompt, asked again with a hint.
    assert len(chat.encode(tiny.ask("a", picture, "what, if not a fox")).ids) > len(chat.encode(prompt).ids)


def test_encoded_prompts_make_room_by_their_bytes(exact, monkeypatch):
    monkeypatch.setattr(processor_module, "CACHE_BYTES", 1)
    policy = exact("qwen2_5_vl")
    chat = PromptEncoder(policy.processor, policy.core)
    first = tiny.ask("a", tiny.picture(), "what")
    encoded = chat.encode(first)
    # 29 ids and 3 x 29 positions of 8 bytes, 16 patches of 1176 floats, one grid of three.
    assert encoded.bytes == 8 * 4 * len(encoded.ids) + 4 * 16 * 1176 + 8 * 3
    chat.encode(tiny.ask("b", "what"))
    assert chat.encode(first) is not encoded


def test_an_answer_ends_as_the_template_ends_one(exact):
    policy = exact("qwen2_5_vl")
    tokenizer = policy.prompt_encoder.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert policy.prompt_encoder.end == [end]
    ids = policy.prompt_encoder.answer("0 to 12").tolist()
    assert ids[-1] == end and tokenizer.decode(ids[:-1]) == "0 to 12"
    assert policy.prompt_encoder.text(torch.tensor(ids)) == "0 to 12"


def other_end(policy, template, eos):
    processor = copy.deepcopy(policy.processor)
    processor.chat_template = template
    processor.tokenizer.eos_token = eos
    return PromptEncoder(processor, policy.core).end


TURNS = "{% for m in messages %}{{ m['content'][0]['text'] }}"


def test_the_end_of_a_template_comes_first_and_that_of_the_tokenizer_counts_too(exact):
    policy = exact("qwen2_5_vl")
    first, second = policy.prompt_encoder.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
    # The template closes a turn with one token, the tokenizer names another one.
    assert other_end(policy, TURNS + "<|im_start|>\n{% endfor %}", "<|endoftext|>") == [first, second]
    # A line break may come before it.
    assert other_end(policy, TURNS + "\n<|im_start|>{% endfor %}", "<|endoftext|>") == [first, second]
    # A template that closes with plain text leaves the tokenizer's.
    assert other_end(policy, TURNS + " bye{% endfor %}", "<|endoftext|>") == [second]


def test_a_model_without_any_end_token_is_refused(exact):
    with pytest.raises(ValueError, match="names no token that ends an answer"):
        other_end(exact("qwen2_5_vl"), TURNS + "{% endfor %}", None)


@EVERY
def test_placeholders_are_what_stands_for_media(exact, family):
    policy = exact(family)
    prompt = next(p for p in mixed.prompts(family) if p.uid == "picture")
    ids = policy.prompt_encoder.encode(prompt).ids
    assert policy.model.config.image_token_id in policy.prompt_encoder.placeholders
    assert int(torch.isin(ids, torch.tensor(policy.prompt_encoder.placeholders)).sum()) > 0
    words = policy.prompt_encoder.encode(mixed.prompts(family)[0]).ids
    assert not torch.isin(words, torch.tensor(policy.prompt_encoder.placeholders)).any()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_processor_does_not_enlarge_the_frames_of_a_small_budget(checkpoint, family):
    policy = Tokens(model=str(checkpoint(family)), dtype="float32")
    policy.processor.video_processor.size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    grid = policy.prompt_encoder.encode(tiny.ask("clip", tiny.clip(4, side=56), "when?")).media[
        "video_grid_thw"
    ]
    # 56 pixels are four patches of 14; the lower limit of 128 squares of 28 would make 24 of them.
    assert grid.tolist() == [[2, 4, 4]]


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_and_thoughts_beside_a_recorded_answer_are_written_by_the_template(exact):
    policy = exact("qwen2_5_vl")
    processor = copy.copy(policy.processor)
    processor.tokenizer = copy.copy(processor.tokenizer)
    processor.chat_template = processor.tokenizer.chat_template = CALLING
    encoder = PromptEncoder(processor, policy.core)
    prompt = Prompt("p", (Message("user", (Part("what is it"),)),))
    call = {"type": "function", "function": {"name": "crop", "arguments": {"a": 1}}}
    extra = json.dumps({"reasoning_content": "I look <|im_end|>", "tool_calls": [call]})
    text, ids = encoder.recorded(prompt, Outcome(text="red", extra=extra))
    end = encoder.end[0]
    assert ids[-1] == end and (ids == end).sum() == 1  # the words of the row are no control token
    assert text.startswith("<think>I look") and "</think>red<call>" in text and '"crop"' in text
    plain, tokens = encoder.recorded(prompt, Outcome(text="red<|im_end|>"))
    assert plain == "red" and torch.equal(tokens, encoder.answer("red"))
    with pytest.raises(ValueError, match="does not read `name`"):
        encoder.recorded(prompt, Outcome(text="red", extra=json.dumps({"name": "Ada"})))
