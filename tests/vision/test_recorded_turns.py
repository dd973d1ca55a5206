"""Recorded conversations with tools as rows: the template's own words, the assistant's tokens as steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.engines.dataset_answers import Offline, WithMismatched
from mmrl.vision.models.prompt_check import PromptCheck
from mmrl.vision.models.recorded_turns import encode_recorded
from mmrl.vision.policies.recorded_rows import recorded_row
from mmrl.vision.tools.call_formats import encode_transcript
from tests.vision import tiny
from tests.vision.template_cases import encoder_of, plain, says, templates
from tests.vision.test_chat_template import CALLS, REPLY, THOUGHT_AND_CALL, TOOL, eos_of, user

TURNS = (says("assistant", extra=CALLS), says("tool", "two", extra=REPLY))
ASKED = Prompt("row", (user("one"),), tools=(TOOL,))
THREE = Outcome(text="three", turns=TURNS)
FAMILY = "qwen2_5_vl"


def encoder(name):
    return encoder_of(templates()[name], sees=name == FAMILY, eos=eos_of(name))


def joined(read, ids):
    return torch.cat([read.ids, ids])


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "qwen3"])
def test_a_conversation_has_the_tokens_of_the_template_and_steps_of_the_assistant(name):
    made, outcome = encoder(name), THREE
    if name == "qwen3":  # as the last turn, an answer without a thought gets an empty one
        thought = says("assistant", extra=THOUGHT_AND_CALL)
        outcome = replace(THREE, turns=(thought, TURNS[1]), extra=json.dumps({"reasoning_content": "so"}))
    texts, turns, replies = encode_recorded(made, ASKED, outcome)
    last = says("assistant", "three", extra=outcome.extra)
    whole = replace(ASKED, messages=(*ASKED.messages, *outcome.turns, last))
    wanted = plain(made.processor, whole, "text", (TOOL,), add_generation_prompt=False)
    words = made.tokenizer.decode
    assert words(wanted).rstrip("\n") == words(joined(*turns[-1]))
    assert texts[-1].endswith("three") and [len(reply) for reply in replies] == [1]
    steps = [words(ids) for _, ids in turns]
    assert '"name": "crop"' in steps[0] and '"left"' in steps[0] and "three" in steps[1]
    assert all(ids[-1] in made.end for _, ids in turns)  # each turn learns to end
    assert not any("two" in step or "one" in step for step in steps)  # replies and questions are only read


def test_without_tools_in_the_template_calls_are_qwens_words():
    made = encoder(FAMILY)
    assert not made.knows_tools((TOOL,))
    _, turns, _ = encode_recorded(made, ASKED, THREE)
    words = made.tokenizer.decode
    assert "<tools>" in words(turns[0][0].ids) and '"crop"' in words(turns[0][0].ids)
    call = json.dumps({"name": "crop", "arguments": {"side": "left"}})
    assert words(turns[0][1]).startswith(f"<tool_call>\n{call}\n</tool_call>")
    assert "<tool_response>\ntwo\n</tool_response>" in words(turns[1][0].ids)
    history = replace(ASKED, messages=(*ASKED.messages, *TURNS))  # calls of the common beginning, too
    assert torch.equal(made.encode(history).ids, turns[1][0].ids)
    with pytest.raises(ValueError, match="leaves out the calls"):
        encode_recorded(made, replace(ASKED, tools=()), THREE)


def test_tools_of_a_row_and_of_the_engine_must_agree():
    made, other = encoder("qwen2_5"), {**TOOL, "function": {**TOOL["function"], "name": "ocr"}}
    assert torch.equal(made.encode(ASKED).ids, made.encode(replace(ASKED, tools=()), (TOOL,)).ids)
    with pytest.raises(ValueError, match="`tools` of its own"):
        made.encode(ASKED, (other,))


def test_the_check_reads_turns_and_other_media():
    made = encoder("qwen2_5")
    check, broken = PromptCheck(made), says("assistant", extra=json.dumps({"thinking": "so"}))
    check(replace(ASKED, answers=(THREE, Outcome(text="four"))))
    with pytest.raises(ValueError, match="does not read `thinking`"):
        check(replace(ASKED, answers=(replace(THREE, turns=(broken, TURNS[1])),)))
    check.limit = made.limit = len(joined(*encode_recorded(made, ASKED, THREE)[1][-1])) - 1
    check(replace(ASKED, answers=(Outcome(text="four"),)))
    with pytest.raises(ValueError, match=r"row"):
        check(replace(ASKED, answers=(THREE,)))


def test_a_row_is_the_models_own_probability_of_the_turns_of_the_assistant(exact):
    policy = exact(FAMILY)
    image, prompt = tiny.picture(seed=1), tiny.ask("p", tiny.clip(), "what")
    reply = Message("tool", (Part(media=image), Part("half")))
    answer = Outcome(text="three", turns=(says("assistant", "look"), reply))
    row = recorded_row(policy.prompt_encoder, prompt, answer)
    assert [turn.role for turn in row.turns] == ["assistant", "tool", "assistant"]
    read, last = encode_recorded(policy.prompt_encoder, prompt, answer)[1][-1]
    ids, steps = joined(read, last), row.steps
    chosen = len(steps.prompt.ids) + steps.suffix.chosen
    assert torch.equal(ids[chosen], steps.ids)
    media = {name: value for name, value in read.media.items()}
    with torch.no_grad():
        logits = policy.model(
            input_ids=ids[None], **media, position_ids=_positions(policy, read, last)
        ).logits[0]
        logits[:, policy.prompt_encoder.placeholders] = -1e30  # no step may be one of these
        wanted = logits.log_softmax(-1)[chosen - 1].gather(-1, steps.ids[:, None])[:, 0]
        found = policy(policy.collate((row,))).logp[0]
    assert torch.allclose(found, wanted, atol=1e-9)
    again = encode_transcript(policy.prompt_encoder, prompt, row.transcript)
    assert torch.equal(joined(*again[-1]), ids) and len(again) == 2


def _positions(policy, read, last):
    after = read.next_position + torch.arange(len(last))
    return torch.cat([read.positions, after.expand(len(read.positions), -1)], 1)[:, None]


def test_the_rejected_answer_is_read_after_its_own_video(exact):
    policy, prompt = exact(FAMILY), tiny.ask("p", tiny.clip(seed=1), "what")
    other = tiny.ask("p", tiny.clip(seed=2), "what")
    sides = Outcome(text="yes"), Outcome(text="yes", asked=other.messages)
    pair = replace(prompt, answers=sides)
    rows = Offline(policy, stream=Stream(0)).rollout([pair, pair])
    assert {row.group for row in rows} == {"p"}  # one pair
    with torch.no_grad():
        both = policy(policy.collate(rows)).logp.sum(1)
        alone = policy(policy.collate((recorded_row(policy.prompt_encoder, other, sides[0]),))).logp.sum(1)
    assert both[1] == pytest.approx(float(alone[0]), abs=1e-9) and abs(both[0] - both[1]) > 1e-6


def test_an_unrelated_conversation_is_repeated_whole(exact):
    policy = exact(FAMILY)
    asked = [
        replace(tiny.ask("a", "a"), answers=(THREE,), tools=(TOOL,)),
        replace(tiny.ask("b", "b"), answers=(Outcome(text="four"),)),  # lists no tools
    ]
    rows = WithMismatched(Offline(policy, stream=Stream(0))).rollout([one for one in asked for _ in range(2)])
    assert [row.length for row in rows[:2]] == [row.length for row in rows[:1:-1]]
    assert torch.equal(rows[3].steps.ids, rows[0].steps.ids) and rows[3].steps.suffix is not None
    assert [bool(row.outcomes[-1].tags.get("unrelated")) for row in rows] == [False, False, True, True]
