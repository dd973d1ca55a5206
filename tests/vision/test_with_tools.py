"""Conversations with tools: a scripted policy writes calls, tools answer, faults are met as configured."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from PIL import Image

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.chat import blocks_of
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call, CallError, parse_calls, without_calls
from mmrl.core.types import Message, Part, PromptError
from mmrl.data.media_reader import MediaReader
from mmrl.training.score import score
from mmrl.vision.decoding import decoding
from mmrl.vision.engines import generate as generate_module
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.tools.functions import Tool
from mmrl.vision.tools.images import crop
from mmrl.vision.tools.replies import ToolFault
from tests.rewards import trl_style
from tests.vision import tiny

FAMILY = "qwen2_5_vl"
SLEPT = []


def call(name="look", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def look(image: Image.Image) -> Any:
    """Show the left half of an image.

    Args:
        image: The image.
    """
    return ["half", image.crop((0, 0, image.width // 2, image.height))]


def word(number: int) -> str:
    """Say a word.

    Args:
        number: Which.
    """
    return f"word {number}"


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def hang() -> str:
    """Never answer."""
    time.sleep(300)
    return "late"


def fail() -> str:
    """Raise an error."""
    SLEPT.append(1)
    raise RuntimeError("the index\nis <|im_end|> broken")


def huge() -> Image.Image:
    """Show a large image, which is not decoded."""
    image = Image.new("RGB", (1, 1))
    image._size = (40_000, 40_000)
    return image


def thin() -> Image.Image:
    """Show an image that no model reads."""
    return Image.new("RGB", (4000, 2))


def wide() -> Image.Image:
    """Show an image of few pixels that no model reads."""
    return Image.new("RGB", (40_000, 100))


def number() -> Any:
    """Return something else."""
    return b"3"


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


@pytest.fixture
def scripted(policy, monkeypatch):
    """Let the policy write what a script says: script(uid, index, turn) is the text of a turn."""

    def start(script, tool=(look, word), each=200, stop_strings=(), **options):
        encoder = policy.prompt_encoder
        inner = Generate(policy, stream=Stream(0), max_completion_length=each, stop_strings=stop_strings)
        engine = WithTools(inner, stream=Stream(0), tool=tool, **options)
        taken: dict[tuple, int] = {}
        forced: dict[int, list[int]] = {}
        answer, draw = inner._answer, decoding.draw_tokens

        def answering(rows, begin, work):
            for i, row in enumerate(rows):
                key = row.prompt.uid, row.index
                forced[i] = encoder.answer(script(*key, taken.get(key, 0))).tolist()
                taken[key] = taken.get(key, 0) + 1
            state = {"t": 0, "rows": list(range(len(rows)))}
            reader = begin(rows)
            kept = reader.keep

            def keep(indices):
                state["rows"] = [state["rows"][i] for i in indices.tolist()]
                kept(indices)

            def drawing(logits, uniform, **options):
                _, logp, entropy = draw(logits, uniform, **options)
                ids = [forced[i][min(state["t"], len(forced[i]) - 1)] for i in state["rows"]]
                state["t"] += 1
                token = torch.tensor(ids)
                return token, logits.log_softmax(-1).gather(1, token[:, None])[:, 0], entropy

            reader.keep = keep
            monkeypatch.setattr(generate_module, "draw_tokens", drawing)
            return answer(rows, lambda rows: reader, work)

        inner._answer = answering
        return engine

    return start


def asked(num=2):
    return [tiny.ask(f"p{i}", tiny.picture(seed=i), "what") for i in range(num) for _ in range(2)]


def test_a_turn_ends_with_its_call_where_a_stop_string_says_so(policy, scripted):
    engine = scripted(
        lambda uid, index, turn: "the fox" if turn else call("word", number=3) + " and so on",
        stop_strings=("</tool_call>",),
        turn_outcomes=True,
    )
    for row in engine.rollout(asked()):
        first, last = row.outcomes
        assert (first.text, last.text) == (call("word", number=3), "the fox")
        assert "</tool_call><|im_end|>" in row.logged["conversation"]
        assert finish(row) == ("stop", "1")
        assert first.end == len(policy.prompt_encoder.answer(first.text)) - 1  # without an end token


def finish(row):
    return row.outcomes[-1].tags["finish"], row.outcomes[-1].tags["turn"]


def test_a_conversation_is_one_row_whose_steps_are_the_policys_tokens(policy, scripted):
    turns = [call(image=0), call("word", number=3) + call(image=1), "the fox"]
    engine = scripted(lambda uid, index, turn: turns[turn] if uid == "p0" and index else "fox")
    rows = engine.rollout(asked())
    assert [row.outcomes[-1].text for row in rows] == ["fox", "the fox", "fox", "fox"]
    assert [finish(row) for row in rows] == [("stop", "0"), ("stop", "2"), ("stop", "0"), ("stop", "0")]
    long = rows[1]
    answer = policy.prompt_encoder.answer
    assert torch.equal(long.steps.ids, torch.cat([answer(turn) for turn in turns]))
    assert long.length == len(long.steps.ids) == long.outcomes[-1].end == len(long.notes["logp"])
    assert long.steps.suffix.media["image_grid_thw"].shape == (2, 3)  # a half, and a half of that
    sides = [image.load().pixels.shape[-2:] for image in long.shown]
    assert len(sides) == 2 and sides[0][1] == 2 * sides[1][1]  # a half, and a half of that
    shown = long.logged["conversation"]
    assert shown.count("<tool_response>") == 3 and "word 3" in shown and "tokens>" in shown
    assert rows[0].steps.suffix is None
    # The engine noted the log-probabilities that learning computes, replies included.
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-5)
    assert engine.pop_metrics() == {"tools/turns": 6 / 4, "tools/calls": 3 / 4, "tools/errors": 0.0}


def test_without_a_call_rows_are_those_of_generate(policy):
    prompts = asked()
    plain = Generate(policy, stream=Stream(0), max_completion_length=8)
    rows = WithTools(plain, stream=Stream(0), tool=(word,)).rollout(prompts)
    assert all(row.steps.suffix is None for row in rows)
    assert all("word" in policy.prompt_encoder.transcript(row.steps.prompt.ids) for row in rows)
    # The same prompts, with the tools written into them, by `vision.generate` alone.
    told = [row.steps.prompt for row in rows]
    encode = policy.prompt_encoder.encode
    policy.prompt_encoder.encode = lambda prompt: told[prompts.index(prompt)]
    try:
        same = plain.rollout(prompts)
    finally:
        policy.prompt_encoder.encode = encode
    for row, other in zip(rows, same, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids)
        assert torch.equal(row.notes["logp"], other.notes["logp"])


def test_turns_that_start_from_equal_words_and_images_have_one_state(policy, scripted):
    seen = {("p0", 0): call(image=0), ("p0", 1): call(image=0), ("p1", 0): call(image=0)}
    engine = scripted(
        lambda uid, index, turn: "fox" if turn else seen.get((uid, index), call("word", number=1)),
        turn_outcomes=True,
    )
    (first, second), (other, word) = [
        [[outcome.tags["state"] for outcome in row.outcomes] for row in rows]
        for rows in zip(*[iter(engine.rollout(asked()))] * 2, strict=True)
    ]
    assert first == second and len(set(first)) == 2
    # The same words about another image, and other words about the same image.
    assert not set(first) & set(other) and other[0] == word[0] and other[1] != word[1]


def test_two_ways_to_one_observation_meet_in_one_state(scripted):
    ways = {0: (1, 2), 1: (3, 2)}
    engine = scripted(
        lambda uid, index, turn: call("word", number=ways[index][turn]) if turn < 2 else "fox",
        turn_outcomes=True,
    )
    rows = engine.rollout(asked())
    one, two, other, _ = ([outcome.tags["state"] for outcome in row.outcomes] for row in rows)
    # Both begin at the prompt, and read "word 2" last; in between they read "word 1" and "word 3".
    assert one[0] == two[0] and one[2] == two[2] and len({*one, *two}) == 4
    assert not {*one} & {*other}  # the same replies to another prompt


def test_later_turns_draw_by_prompt_answer_and_turn_alone(policy, scripted, monkeypatch):
    seen = []
    engine = scripted(lambda uid, index, turn: "fox" if turn else call("word", number=1))
    inner = engine.engine.answer
    monkeypatch.setattr(
        engine.engine, "answer", lambda rows, *begin: (seen.append(rows), inner(rows, *begin))[1]
    )
    engine.rollout(asked())
    first, second = ([row.uniform[:50] for row in rows] for rows in seen)
    assert all(
        torch.equal(row, torch.rand(200, generator=Stream(0).generator("p0", 0))[:50]) for row in first[:1]
    )
    drawn = {tuple(row.tolist()) for row in (*first, *second)}
    assert len(drawn) == 8  # no two turns draw the same numbers
    wanted = torch.rand(200, generator=Stream(0).generator("p1", 1, "turn", 1))[:50]
    assert torch.equal(second[3], wanted)


@pytest.mark.parametrize(
    ("options", "wanted", "shown"),
    [
        ({"max_turns": 2}, ("turns", "1"), 1),
        ({"max_images": 1}, ("images", "1"), 1),
        ({"max_images": 0}, ("images", "0"), 0),
        ({"max_completion_length": 60}, ("length", "0"), 0),
    ],
)
def test_a_conversation_that_hits_a_limit_ends_with_a_tag(scripted, options, wanted, shown):
    engine = scripted(lambda uid, index, turn: call(image=0), **options)
    (row, *_) = engine.rollout(asked())
    assert finish(row) == wanted
    grids = row.steps.suffix.media["image_grid_thw"] if row.steps.suffix else ()
    assert len(grids) == shown
    assert row.length <= options.get("max_completion_length", row.length)


def test_a_conversation_ends_at_the_context_of_the_model(policy, scripted):
    script = lambda uid, index, turn: "the fox 0123" if turn else call("word", number=3)
    (row,) = scripted(script).rollout(asked()[:1])
    prompt, suffix = len(row.steps.prompt.ids), len(row.steps.suffix.ids)
    first = len(policy.prompt_encoder.answer(script("p0", 0, 0)))
    assert finish(row) == ("stop", "1")
    (whole,) = scripted(script, max_context=prompt + suffix).rollout(asked()[:1])
    assert finish(whole) == ("stop", "1")
    (short,) = scripted(script, max_context=prompt + suffix - 2).rollout(asked()[:1])
    assert finish(short) == ("length", "1") and short.length == row.length - 2
    (told,) = scripted(script, max_context=prompt + first + 3).rollout(asked()[:1])
    assert finish(told) == ("context", "0") and told.length == first and told.steps.suffix is None
    (cut,) = scripted(script, max_context=prompt + 5).rollout(asked()[:1])
    assert finish(cut) == ("length", "0") and cut.length == 5
    with pytest.raises(PromptError, match=f"prompt 'p0' has {prompt} tokens with its tools"):
        scripted(script, max_context=prompt).rollout(asked()[:1])
    assert scripted(script).context == 2048  # `max_position_embeddings` of the tiny model


def error_of(scripted, text, **options):
    engine = scripted(lambda uid, index, turn: "fox" if turn else text, **options)
    (row,) = engine.rollout(asked()[:1])
    assert finish(row) == ("stop", "1") and engine.pop_metrics()["tools/errors"] == 1
    return row.logged["conversation"].partition("<tool_response>")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>look(0)</tool_call>", "Error: the call is not JSON"),
        ('<tool_call>{"name": "look"', "Error: the call is not JSON"),
        ("<tool_call>[1]</tool_call>", "Error: a call is written"),
        ('<tool_call>{"name": "look", "arguments": [0]}</tool_call>', "Error: a call is written"),
        (call("steal"), "Error: there is no tool 'steal'; there are look, word"),
        (call("look"), "Error: look: missing a required argument"),
        (call("look", image=0, path="/etc/passwd"), "Error: look: got an unexpected keyword argument"),
        (call("look", image=1), "is the number of an image, 0 to 0, not 1"),
        (call("look", image=True), "not True"),
        (call("word", number=0.5), "Error: word: 'number' must be a whole number, not 0.5"),
        (call("look", image="0"), "not '0'"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_by_a_line(scripted, text, message):
    told = error_of(scripted, text)
    assert message in told
    assert len(told.partition("\n</tool_response>")[0].strip().splitlines()) == 1


def test_calls_are_json_between_their_marks():
    first, second, third = parse_calls(
        f"so {call('look', image=0)} and {call('word')}<tool_call>{'[' * 9999}"
    )
    assert (first, second) == (Call("look", {"image": 0}), Call("word", {}))
    assert isinstance(third, CallError)
    function = {"name": "look", "parameters": json.dumps({"image": 0})}
    for written in (function, {"function": function}):  # in the words of Llama, and of OpenAI's messages
        assert parse_calls(f"<tool_call>{json.dumps(written)}</tool_call>") == [first]
    (odd,) = parse_calls('<tool_call>{"name": "look", "args": "image=0"}</tool_call>')
    assert isinstance(odd, CallError)
    assert parse_calls("no call") == []


FAULTS = {
    "fail": "Error: RuntimeError: the index is <|im_end|> broken",
    "huge": "Error: returned an image of 40000x40000 pixels; the limit is 16777216",
    "thin": "Error: the reply of the tool cannot be shown",
    "wide": "Error: the reply of the tool cannot be shown",
    "number": "Error: returned bytes; a tool returns a text, a PIL image, or a list of both",
    "hang": "Error: no answer within 0.2 s",
}
ENDINGS = zip(FAULTS, cycle(("skip", "raise")), strict=False)


@pytest.mark.parametrize(("named", "on_error"), [*((named, "tell") for named in FAULTS), *ENDINGS])
def test_a_fault_of_a_tool_is_told_ends_the_conversation_or_stops_the_run(scripted, named, on_error):
    piece = Piece(f"{__name__}:{named}", {"timeout": 0.2 if named == "hang" else 60, "on_error": on_error})
    bound = Pieces(Stream(0)).make("tool", piece)
    began = time.monotonic()
    if on_error == "tell":
        assert FAULTS[named] in error_of(scripted, call(named), tool=(bound,))
        assert time.monotonic() - began < 240
        return
    engine = scripted(lambda uid, index, turn: "fox" if turn else call(named), tool=(bound,))
    if on_error == "raise":
        with pytest.raises(ToolFault, match=f"the tool '{named}' failed for prompt 'p0'"):
            engine.rollout(asked()[:1])
        return
    (row,) = engine.rollout(asked()[:1])
    assert finish(row) == ("tool_error", "0") and row.steps.suffix is None


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return f"you said {text}"


def strict(name):
    return Pieces(Stream(0)).make("tool", Piece(f"{__name__}:{name}", {"on_error": "raise"}))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (call("<|im_end|>"), "Error: there is no tool '<|im_end|>'; there are word, echo"),
        (call("word", number=1, **{"<|image_pad|>": 1}), "unexpected keyword argument '<|image_pad|>'"),
        (call("echo", text="a<|im_start|>b"), "you said a<|im_start|>b"),
    ],
)
def test_words_of_the_model_stop_no_run(scripted, written, shown):
    # As a JSON escape, so that the model writes no special token itself.
    text = call("word", number=3) + written.replace("<|", r"\u003c|")
    engine = scripted(
        lambda uid, index, turn: "fox" if turn else text,
        tool=(strict("word"), strict("echo")),
    )
    (row,) = engine.rollout(asked()[:1])
    read = row.logged["conversation"]
    assert finish(row) == ("stop", "1") and "word 3" in read and shown in read


def test_a_reply_that_cannot_be_shown_leaves_those_of_other_tools(scripted):
    text = call("thin") + call("word", number=3) + call("look", image=0)
    engine = scripted(
        lambda uid, index, turn: "fox" if turn else text,
        tool=(thin, strict("word"), strict("look")),
    )
    (row,) = engine.rollout(asked()[:1])
    shown = row.logged["conversation"]
    assert finish(row) == ("stop", "1") and "word 3" in shown and "half" in shown
    assert shown.count("Error: the reply of the tool cannot be shown") == 1
    assert engine.pop_metrics()["tools/errors"] == 1 and len(row.shown) == 1


def test_retries_call_a_tool_again(scripted):
    bound = Pieces(Stream(0)).make("tool", Piece(f"{__name__}:fail", {"retries": 2}))
    SLEPT.clear()
    error_of(scripted, call("fail"), tool=(bound,))
    assert len(SLEPT) == 3


def test_tools_of_a_batch_run_at_the_same_time(scripted):
    text = "".join(call("slow", seconds=4) for _ in range(5))
    engine = scripted(
        lambda uid, index, turn: "fox" if turn else text, tool=(slow,), max_completion_length=2000, each=1000
    )
    took = []
    reply = engine._reply
    engine._reply = lambda *args: (
        began := time.monotonic(),
        reply(*args),
        took.append(time.monotonic() - began),
    )
    rows = engine.rollout(asked())
    assert all(row.logged["conversation"].count("waited 4") == 5 for row in rows)
    assert took[0] < 60  # twenty calls of 4 s each


def replay(image: Image.Image) -> Any:
    """Show an image again, growing.

    Args:
        image: The image.
    """
    half = image.resize((56, 56))
    return {"type": "video", "video": [half.rotate(90 * turn) for turn in range(4)]}


def uneven() -> Any:
    """Show a video of images that differ in size."""
    return {"type": "video", "video": [Image.new("RGB", (28, 28 * n)) for n in (1, 2)]}


def long() -> Any:
    """Show a video of too many pixels."""
    return {"type": "video", "video": [Image.new("RGB", (1000, 1000))] * 17}


def test_a_tool_shows_a_video(policy, scripted):
    script = lambda uid, index, turn: call("replay", image=0) if turn == 0 else "fox"
    (row,) = scripted(script, tool=(replay,)).rollout(asked()[:1])
    assert finish(row) == ("stop", "1") and row.shown == ()
    (reply,) = (message for message in row.turns if message.role == "tool")
    (part,) = reply.parts
    frames = part.media.load()
    assert frames.pixels.shape == (4, 3, 56, 56) and frames.times.tolist() == [0, 0.5, 1, 1.5]
    assert "<video: " in row.logged["conversation"]
    assert row.steps.suffix.media["video_grid_thw"].tolist() == [[2, 4, 4]]
    batch = policy.collate((row,))
    with torch.no_grad():
        logp = policy(batch).logp
    torch.testing.assert_close(batch.notes["logp"].double(), logp, rtol=0, atol=2e-5)
    (turn,) = blocks_of(reply)
    again = MediaReader()("video", turn["video"], "a video")
    assert torch.equal(again.load().pixels, frames.pixels)


@pytest.mark.parametrize(
    ("tool", "message"),
    [(uneven, "images have 2 sizes"), (long, "17 images of 1000x1000 pixels; the limit is 16777216 in all")],
)
def test_a_video_that_cannot_be_shown_is_an_error(scripted, tool, message):
    assert message in error_of(scripted, call(tool.__name__), tool=(tool,))


def test_long_texts_are_cut(scripted):
    engine = scripted(
        lambda uid, index, turn: "fox" if turn else call("word", number=10**15), max_reply_chars=8
    )
    assert "<tool_response>\nword 100 [...]\n" in engine.rollout(asked()[:1])[0].logged["conversation"]


def test_turn_outcomes_are_scored_one_by_one(scripted):
    turns = [call("word", number=1), "fox"]
    engine = scripted(lambda uid, index, turn: turns[turn], turn_outcomes=True)
    (row, *_) = engine.rollout(asked())
    assert [outcome.text for outcome in row.outcomes] == turns
    assert [outcome.tags["turn"] for outcome in row.outcomes] == ["0", "1"]
    assert [outcome.tags["finish"] for outcome in row.outcomes] == ["call", "stop"]
    assert row.outcomes[-1].end == row.length > row.outcomes[0].end > 0


def test_rewards_in_trls_form_read_the_whole_conversation(scripted):
    crop = call("look", image=0)
    turns = [
        f"Let me see. {crop}",
        f"{call('word', number=7)}{call('word', number=8)}",
        "<tool_call>no",
        "red",
    ]
    engine = scripted(lambda uid, index, turn: turns[turn], turn_outcomes=True)
    prompt = asked()[0]
    columns = {"prompt": [{"role": "user", "content": "what"}]}
    rows = engine.rollout([replace(prompt, columns=columns), replace(prompt, uid="q")])
    score([reward("remember", at="every")], rows)
    *_, third, whole = given = trl_style.remember.given["completions"][:4]
    roles = ["assistant", "tool", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in whole] == roles
    assert [len(completion) for completion in given] == [1, 3, 6, 8] and third == whole[:6]
    look_call = {"type": "function", "function": {"name": "look", "arguments": {"image": 0}}}
    assert whole[0] == {"role": "assistant", "content": "Let me see.", "tool_calls": [look_call]}
    assert whole[1]["name"] == "look" and whole[1]["content"][0] == {"type": "text", "text": "half"}
    assert whole[1]["content"][1]["image"].size == (prompt.media[0].load().pixels.shape[-1] // 2, 56)
    assert [message["content"] for message in whole[3:5]] == ["word 7", "word 8"]
    assert [message["name"] for message in whole[3:5]] == ["word", "word"]
    assert whole[5] == {"role": "assistant", "content": "<tool_call>no"}
    assert whole[6].keys() == {"role", "content"} and whole[6]["content"].startswith("Error: ")
    assert whole[7] == {"role": "assistant", "content": "red"}
    assert trl_style.remember.given["completions"][4:] == turns, "a text where the prompt of the row is one"
    score([reward("remember")], rows)
    assert trl_style.remember.given["completions"] == [whole, "red"]


def reward(name, **options):
    return Pieces(Stream()).make("reward", Piece(f"tests.rewards.trl_style:{name}", options), place="x")


def test_the_words_beside_calls_are_what_is_outside_of_their_blocks():
    assert without_calls("a <tool_call>{}</tool_call> b <TOOL_CALL>c") == "a  b"


def with_calls(template, written):
    """Make a template that knows tools, and writes calls in these words."""
    told = "{% if tools %}TOOLS {{ tools[0]['function']['name'] }}\n{% endif %}"
    start = "{% for c in m['content'] %}"
    calls = "{% for call in m.tool_calls or [] %}" + written + "{% endfor %}"
    assert template.count(start) == 1
    return told + template.replace(start, calls + start)


@pytest.mark.parametrize(
    "written", ["", "<function={{ call.function.name }}>1</function>", "{{ raise_exception('no') }}"]
)
def test_a_template_whose_calls_cannot_be_read_is_refused(checkpoint, written):
    from mmrl.vision.policies.tokens import Tokens

    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float64")
    policy.processor.chat_template = with_calls(policy.processor.chat_template, written)
    inner = Generate(policy, stream=Stream(0), max_completion_length=4)
    with pytest.raises(ConfigError, match="so that no call of the model would be made"):
        WithTools(inner, stream=Stream(0), tool=(word,))


def test_a_template_that_knows_tools_writes_them_itself(checkpoint):
    from mmrl.vision.policies.tokens import Tokens

    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float64")
    template = policy.processor.chat_template
    policy.processor.chat_template = with_calls(
        template, "<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    )
    engine = WithTools(
        Generate(policy, stream=Stream(0), max_completion_length=4), stream=Stream(0), tool=(word,)
    )
    (row,) = engine.rollout(asked()[:1])
    text = policy.prompt_encoder.transcript(row.steps.prompt.ids)
    assert text.startswith("TOOLS word\n<|im_start|>user") and "# Tools" not in text
    encoder, prompt = policy.prompt_encoder, row.steps.prompt
    replies = encoder.replies([Message("tool", (Part("a"),))], engine.schemas)
    read = encoder.extend(prompt, encoder.answer("9"), *replies)
    assert "<|im_start|>tool\na<|im_end|>" in encoder.transcript(read.ids)


def test_the_schema_says_images_are_numbers_and_leaves_options_out():
    schema = Tool.of(crop).schema["function"]
    assert schema["name"] == "crop"
    assert schema["description"] == "Cut a box out of an image and show it."
    properties = schema["parameters"]["properties"]
    assert properties["image"]["type"] == "integer" and properties["box"]["type"] == "array"
    assert Tool.of(look).images == {"image"}
    bound = Pieces(Stream(0)).make("tool", Piece("vision.zoom", {"max_pixels": 100}))
    assert "max_pixels" not in json.dumps(Tool.of(bound).schema)


def undescribed(number: int) -> str:
    """Say a word."""
    return str(number)


def untyped(number) -> str:
    """Say a word.

    Args:
        number: Which.
    """
    return str(number)


def without_words(number: int) -> str:
    return str(number)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undescribed", "says nothing of 'number'"),
        ("untyped", "the argument 'number' of the tool .* has no type"),
        ("without_words", "has no docstring"),
        ("nothing_there", "cannot import the tool"),
    ],
)
def test_a_function_that_no_model_could_call_is_an_error_of_the_configuration(name, message):
    with pytest.raises(ConfigError, match=message):
        Pieces(Stream(0)).check("engine", Piece("vision.with_tools", {"tool": [f"{__name__}:{name}"]}))


def test_two_tools_of_one_name_are_refused(policy):
    inner = Generate(policy, stream=Stream(0))
    with pytest.raises(ConfigError, match=r"different names, not \['word', 'word'\]"):
        WithTools(inner, stream=Stream(0), tool=(word, word))
