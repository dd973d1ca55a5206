"""PaliGemma: all tokens of a prompt attend to each other, and those of an answer to earlier ones."""

from __future__ import annotations

import pytest
import torch
import transformers

from mmrl.kv_cache.layout import media_ids
from mmrl.vision.decoding.prefill import prefill
from tests.vision import mixed, tiny, tiny_gemma
from tests.vision.families.common import (  # noqa: F401
    loader,
    log_probabilities,
    test_a_prompt_with_fewer_placeholders_than_features_is_refused,
    test_greedy_answers_are_those_of_transformers,
    test_the_doctor_finds_no_difference_from_transformers,
    test_the_number_of_features_is_that_of_the_model_for_every_size,
    test_tokens_and_pixels_are_those_of_the_processor,
    test_values_and_gradients_are_those_of_transformers,
)
from tests.vision.test_turns import says

exact = loader(tiny_gemma.make, tiny_gemma.in_float64, {"paligemma2": "eager"})


@pytest.fixture(autouse=True)
def softmax(monkeypatch):
    """Let eager attention compute in float64: the lowest number of its masks is infinite in float32."""
    plain = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: plain(scores, dim))


@pytest.fixture(params=["paligemma", pytest.param("paligemma2", marks=pytest.mark.slow)])
def family(request):
    return request.param


def test_a_prompt_is_written_as_the_model_was_trained_on_it(exact):
    encoder = exact("paligemma").prompt_encoder
    asked = tiny.ask("one", "answer en", tiny.picture(), " what", tiny.picture(seed=1))
    assert encoder.render(asked) == "<image: 8 tokens><s>answer en what\n"
    assert encoder.encode(asked).positions.tolist() == [[*range(1, len(encoder.encode(asked).ids) + 1)]]
    assert encoder.answer("9").tolist()[-1] == encoder.tokenizer.eos_token_id


def test_the_last_token_of_a_prompt_is_seen_by_all_others(exact, family):
    policy = exact(family)
    encoded = [policy.prompt_encoder.encode(prompt) for prompt in mixed.prompts(family)]
    prefix = prefill(policy.core, encoded)
    assert prefix.shared == (family == "paligemma")  # attention of Gemma 2 caps its scores
    assert prefix.state.shape == (2, 32)
    read, answer = encoded[0], policy.prompt_encoder.answer("fox")
    changed = read.ids.clone()
    changed[-2] = answer[0]
    with torch.no_grad():
        states = [policy.core(input_ids=ids[None], token_type_ids=torch.zeros_like(ids)[None], **read.media)
                  .last_hidden_state[0, 0] for ids in (read.ids, changed)]  # fmt: skip
    assert (states[0] - states[1]).abs().max() > 1e-3


def test_a_question_without_an_image_and_a_second_turn_are_refused(exact):
    encoder = exact("paligemma").prompt_encoder
    with pytest.raises(ValueError, match="cannot encode prompt 'a': `images` are expected"):
        encoder.encode(tiny.ask("a", "what"))
    read = encoder.encode(tiny.ask("b", tiny.picture(), "what"))
    with pytest.raises(ValueError, match="`images` are expected"):
        encoder.extend(read, encoder.answer("9"), says("why"))


def test_the_names_of_released_models_are_known():
    assert media_ids(transformers.PaliGemmaConfig()) == [256000]  # its default; 257152 in releases
