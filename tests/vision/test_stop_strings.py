"""Strings that end answers: found at the token that completes them, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from mmrl.vision.decoding.branching import Branch, grow_with
from mmrl.vision.decoding.stop_strings import StopStrings
from mmrl.vision.engines.generate import Generate
from tests.vision import mixed

FAMILY = "qwen2_5_vl"


@pytest.fixture
def policy(exact):
    return exact(FAMILY)


def shortest(encoder, ids, strings):
    """Find by decoding everything how many tokens an answer has up to the first string."""
    for length in range(1, len(ids) + 1):
        if any(string in encoder.text(ids[:length]) for string in strings):
            return length
    return len(ids)


@pytest.mark.parametrize("size", [0, 2])
def test_answers_are_cut_after_the_token_that_completes_a_string(policy, size):
    asked, encoder = mixed.prompts(FAMILY)[:3] * 3, policy.prompt_encoder
    options = {"max_completion_length": 20, "batch_size": size}
    plain = mixed.generate(policy, asked, **options)
    texts = [row.outcomes[0].text for row in plain]
    strings = (texts[0][5:9], texts[4][8:10], texts[7][3:4], "never written")
    rows = mixed.generate(policy, asked, stop_strings=strings, **options)
    lengths = [shortest(encoder, row.steps.ids, strings) for row in plain]
    assert len(set(lengths)) > 3
    for row, other, length in zip(rows, plain, lengths, strict=True):
        assert row.steps.ids.tolist() == other.steps.ids[:length].tolist()
        torch.testing.assert_close(row.notes["logp"], other.notes["logp"][:length], rtol=0, atol=1e-6)
        (outcome,) = row.outcomes
        cut = any(string in outcome.text for string in strings)
        assert outcome.tags["finish"] == ("stop" if cut else other.outcomes[0].tags["finish"])


def test_branches_end_with_them_too(policy):
    encoder, (prompt, *_) = policy.prompt_encoder, mixed.prompts(FAMILY)
    encoded, numbers = encoder.encode(prompt), torch.rand(3, 20, generator=torch.Generator().manual_seed(0))

    def grow(*strings):
        engine = Generate(policy, stream=Stream(0), stop_strings=strings)
        branches = [Branch(encoded, numbers[0])]
        branches += [Branch(encoded, numbers[i], parent=0, start=3 * i) for i in (1, 2)]
        return grow_with(engine, branches)

    plain = grow()
    strings = [encoder.text(plain[1].ids[5:8])[:-1], encoder.text(plain[2].ids[4:9])]
    found = grow(*strings)
    for one, other in zip(found, plain, strict=True):
        length = shortest(encoder, other.ids, strings)
        assert one.ids.tolist() == other.ids[:length].tolist()
        assert one.stopped or length == len(other.ids)
    assert len(found[2].ids) < 20


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "smolvlm"])
def test_they_are_found_in_any_tokens_as_by_decoding_everything(exact, family):
    encoder, gen = exact(family).prompt_encoder, torch.Generator().manual_seed(0)
    count = len(encoder.tokenizer)
    spoken = encoder.answer("a fox 日本 jumps 😀 é 0123 </tool_call> the")[:-1]
    found = 0
    for strings in (("</tool_call>",), ("日本 j", "é"), ("fo", " th"), ("😀",), ("x 0",)):
        stops = StopStrings(strings, encoder)
        for _ in range(6):
            noise = torch.randint(count, (30,), generator=gen)  # special tokens and parts of characters
            at = int(torch.randint(30, (1,), generator=gen))
            ids = torch.cat([noise[:at], spoken, noise[at:]])
            rows = stops.rows(2)
            steps = (t + 1 for t, x in enumerate(ids) if rows.append(torch.tensor([1]), x[None]).any())
            length = next(steps, len(ids))
            assert length == shortest(encoder, ids, strings)
            found += length < len(ids)
    assert found > 10


@pytest.mark.parametrize("string", ["", "<|im_end|>"])
def test_strings_that_no_answer_contains_are_refused(policy, string):
    with pytest.raises(ConfigError, match="which the text of no answer contains"):
        Generate(policy, stream=Stream(0), stop_strings=(string,))


def test_a_round_of_a_step_draws_numbers_of_its_own(policy):
    engine = Generate(policy, stream=Stream(0), max_completion_length=8)
    asked = mixed.prompts(FAMILY)[:2]

    def answers(number):
        engine.stream.round = number
        return [row.steps.ids.tolist() for row in engine.rollout(asked)]

    first, second = answers(0), answers(1)
    assert first != second
    assert answers(0) == first  # a draw depends on the stream alone, not on the calls before
