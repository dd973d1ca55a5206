"""Llama 4: tiles, experts, and layers with chunked attention, which are read within their first chunk."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers

from mmrl.compression.transforms.visual_computation import drop_visual_layers
from mmrl.kv_cache.layout import media_ids
from mmrl.vision.decoding.prefill import prefill
from mmrl.vision.models.loading import EngineModel
from mmrl.vision.models.model_families import num_positions
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny
from tests.vision.families import common
from tests.vision.families.common import (  # noqa: F401
    loader,
    test_a_prompt_with_fewer_placeholders_than_features_is_refused,
    test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient,
    test_greedy_answers_are_those_of_transformers,
    test_images_in_replies_are_read_as_transformers_read_them,
    test_the_doctor_finds_no_difference_from_transformers,
    test_the_number_of_features_is_that_of_the_model_for_every_size,
    test_tokens_and_pixels_are_those_of_the_processor,
    test_values_and_gradients_are_those_of_transformers,
)
from tests.vision.tiny_llama4 import CHUNK, make


def in_float64(policy: Tokens) -> None:
    """Let norms compute in float64: those of transformers round to float32."""
    for module in policy.model.modules():
        if type(module).__name__.endswith("Norm") and hasattr(module, "_norm"):
            module.forward = partial(lambda m, x: m._norm(x) * getattr(m, "weight", 1), module)


exact = loader(make, in_float64)


@pytest.fixture
def family():
    return "llama4"


@pytest.mark.slow
def test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family):
    common.test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family)


def test_the_part_without_a_head_is_in_no_checkpoint_and_scales_change_nothing(exact, family, tmp_path):
    policy = exact(family)
    policy.save(tmp_path)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float64)
    in_float64(type("Policy", (), {"model": plain}))
    assert plain.state_dict().keys() == policy.model.state_dict().keys()
    assert plain.language_model.model.layers[1].self_attn.attn_temperature_tuning
    read = policy.prompt_encoder.encode(tiny.ask("one", tiny.picture(), "what"))
    with torch.no_grad():
        media = {name: value.double() for name, value in read.media.items()}
        said = [model(input_ids=read.ids[None], **media).logits for model in (plain, policy.model)]
    torch.testing.assert_close(*said, rtol=0, atol=0)


def test_prompts_are_read_once_and_a_copy_of_the_model_reads_with_its_own_weights(exact, family):
    policy = exact(family)
    encoded = [policy.prompt_encoder.encode(prompt) for prompt in mixed.prompts(family)]
    assert prefill(policy.core, encoded).shared
    copied = EngineModel(policy, ()).model
    assert copied.base_model is not policy.core and copied.base_model.model is copied
    assert copied.base_model.get_decoder() is copied.language_model.model
    with pytest.raises(ValueError, match="'llama4'"):
        drop_visual_layers(policy.model, after=1)


def test_what_passes_the_first_chunk_is_refused(exact, family):
    policy = exact(family)
    assert policy.prompt_encoder.limit == CHUNK and num_positions(transformers.Llama4Config()) == 8192
    with pytest.raises(ValueError, match=f"positions, and the model has {CHUNK}"):
        policy.prompt_encoder.encode(tiny.ask("long", "9" * CHUNK))
    asked = tiny.ask("almost", "9" * (CHUNK - 40))
    with pytest.raises(ValueError, match=f"'llama4' are read up to {CHUNK} tokens, within the first chunk"):
        mixed.generate(policy, [asked], max_completion_length=60)


def test_the_names_of_released_models_are_known():
    assert media_ids(transformers.Llama4Config()) == [200080, 200081, 200092]
