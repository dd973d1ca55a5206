"""Gemma 3n and Gemma 4: layers share keys and values, or tokens of an image attend to each other."""

from __future__ import annotations

import pytest
import torch
import transformers

from mmrl.config.loading import ConfigError
from mmrl.kv_cache.layout import media_ids
from mmrl.vision.decoding import prefix_tree
from mmrl.vision.decoding.prefill import merge_media, prefill
from mmrl.vision.models.model_families import check_family, family_of, types_argument
from mmrl.vision.policies.tokens import Tokens
from tests.vision import family_table, mixed, tiny, tiny_gemma
from tests.vision.families import common
from tests.vision.families.common import (  # noqa: F401
    loader,
    log_probabilities,
    test_a_prompt_with_fewer_placeholders_than_features_is_refused,
    test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient,
    test_greedy_answers_are_those_of_transformers,
    test_images_in_replies_are_read_as_transformers_read_them,
    test_the_doctor_finds_no_difference_from_transformers,
    test_tokens_and_pixels_are_those_of_the_processor,
    test_values_and_gradients_are_those_of_transformers,
)

exact = loader(tiny_gemma.make, tiny_gemma.in_float64)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in tiny_gemma.VARIANTS]


@pytest.fixture(params=[*tiny_gemma.MAKERS, *SLOW])
def family(request):
    return request.param


def test_the_number_of_features_is_that_of_the_model_for_every_size(exact, family, monkeypatch):
    monkeypatch.setattr(exact(family).processor.image_processor, "do_resize", True)
    common.test_the_number_of_features_is_that_of_the_model_for_every_size(exact, family)


@pytest.mark.slow
def test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family):
    common.test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family)


def test_prompts_are_read_once_for_all_their_rows(exact, family):
    policy = exact(family)
    encoded = [policy.prompt_encoder.encode(prompt) for prompt in mixed.prompts(family)[:2]]
    prefix = prefill(policy.core, encoded)
    layers = policy.model.config.get_text_config().num_hidden_layers
    assert prefix.shared and len(prefix.cache.layers) == 2 <= layers


def test_common_beginnings_of_prompts_are_read_once(exact, monkeypatch):
    monkeypatch.setattr(prefix_tree, "SAVED", 1)  # share every beginning, however short
    policy = exact("gemma4")
    asked = [tiny.ask(word, tiny.picture(), "look", word) for word in ("fox", "what", "9")]
    rows = mixed.generate(policy, asked)
    batch = policy.collate(rows)
    assert batch.steps.tree is not None
    logp = policy(batch).logp
    for i, row in enumerate(rows):
        wanted = log_probabilities(policy, row.steps.prompt, row.steps.ids)[-row.length :]
        torch.testing.assert_close(logp[i, : row.length], wanted, rtol=0, atol=1e-10)


def test_tokens_of_an_image_attend_to_each_other_in_large_models_only(exact):
    for family, apart in (("gemma4", False), ("gemma4_26b", True)):
        policy = exact(family)
        read = policy.prompt_encoder.encode(tiny.ask("one", tiny.picture(), "what"))
        kinds = (read.ids == policy.model.config.image_token_id).long()[None]
        with torch.no_grad():
            said = [
                policy.model(input_ids=read.ids[None], mm_token_type_ids=types, **read.media).logits
                for types in (kinds, None)
            ]
        assert ((said[0] - said[1]).abs().max() > 1e-3) == apart
        assert types_argument(policy.model.config) == ("mm_token_type_ids" if apart else "")


def test_media_are_split_where_images_and_videos_end(exact):
    policy = exact("gemma4")
    shown = (tiny.picture(height=28), tiny.clip(2), tiny.picture(seed=1), tiny.clip(3, seed=1, side=28))
    media = policy.prompt_encoder.encode(tiny.ask("all", *shown)).media
    parts = family_of(policy.model.config).split(media)
    assert [len(part.get("pixel_values", part.get("pixel_values_videos"))) for part in parts] == [1, 1, 2, 3]
    merged = merge_media(policy.core, parts, torch.device("cpu"))
    assert merged.keys() == media.keys()
    assert all(torch.equal(merged[name], value) for name, value in media.items())


def test_the_names_of_released_models_are_known():
    small = transformers.Gemma4Config()  # E2B is the default
    large = transformers.Gemma4Config(text_config={"use_bidirectional_attention": "vision"})
    assert (types_argument(small), types_argument(large)) == ("", "mm_token_type_ids")
    # <|image>, <|image|>, <|audio|>, <image|> and <|video|>
    assert media_ids(small) == [255999, 258880, 258881, 258882, 258884]
    # <start_of_image>, <end_of_image>, <image_soft_token> and <audio_soft_token>
    assert media_ids(transformers.Gemma3nConfig()) == [255999, 262144, 262145, 262273]
    everywhere = transformers.Gemma4Config(text_config={"use_bidirectional_attention": "all"})
    with pytest.raises(ConfigError, match="'gemma4' attend to later tokens; it writes no text"):
        check_family(everywhere, transformers.Gemma4Model)


def test_a_number_of_pixels_is_refused_because_the_size_is_a_number_of_features(exact, tmp_path_factory):
    folder = tiny_gemma.make("gemma4", tmp_path_factory.mktemp("gemma4"))
    with pytest.raises(ValueError, match="`min_pixels` and `max_pixels` do not fit this model"):
        Tokens(model=str(folder), max_pixels=3136)


def test_the_tower_of_sounds_of_gemma_3n_is_never_trained(exact):
    for options in ({}, {"lora_rank": 2}):
        policy = exact("gemma3n", **options)
        (row,) = mixed.generate(policy, [tiny.ask("heard", family_table.sound(), "what")])
        policy(policy.collate((row,))).logp.sum().backward()
        found = mixed.gradients(policy)
        assert all(value.isfinite().all() for value in found.values())  # the tower's would be NaN
        assert any("embed_audio" in name for name in found) or options
        assert not any("audio_tower" in name for name in found)
