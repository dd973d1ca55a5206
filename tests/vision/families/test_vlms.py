"""Ernie 4.5-VL, Kimi-K2.5, MiniCPM-V 4.6 and 4.7, and Molmo2, each compared with plain transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Message, Part, Prompt
from mmrl.vision.checks.prompt_agreement import as_transformers
from mmrl.vision.models.model_families import check_family, family_of
from tests.vision import mixed, tiny, tiny_vlms
from tests.vision.families import common
from tests.vision.families.common import (  # noqa: F401
    test_a_prompt_with_fewer_placeholders_than_features_is_refused,
    test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient,
    test_greedy_answers_are_those_of_transformers,
    test_the_doctor_finds_no_difference_from_transformers,
    test_the_number_of_features_is_that_of_the_model_for_every_size,
    test_tokens_and_pixels_are_those_of_the_processor,
    test_values_and_gradients_are_those_of_transformers,
)
from tests.vision.test_turns import says


def eager_experts(policy) -> None:
    """Let experts compute in float64, which only the eager implementation can."""
    policy.model.config.get_text_config()._experts_implementation = "eager"


exact = common.loader(tiny_vlms.make, eager_experts)


@pytest.fixture(params=sorted(tiny_vlms.MAKERS))
def family(request):
    return request.param


REPLIES = pytest.mark.parametrize("family", sorted(tiny_vlms.MAKERS.keys() - {"molmo2"}))  # refuses them


@REPLIES
def test_images_in_replies_are_read_as_transformers_read_them(exact, family):
    common.test_images_in_replies_are_read_as_transformers_read_them(exact, family)


@pytest.mark.slow
def test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family):
    common.test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family, told=True)


@REPLIES
def test_replies_go_on_with_the_tokens_of_the_whole_conversation(exact, family):
    encoder, image = exact(family).prompt_encoder, tiny.picture(seed=3)
    first = tiny.ask("p", tiny.picture(), "what", tiny.picture(seed=1))
    answer = Message("assistant", (Part("the quick"),))
    replies = [says("jumps", image, "over"), says(tiny.picture(seed=4), image)]
    if family in ("ernie4_5_vl_moe", "minicpmv4_6", "minicpmv4_7"):
        replies.append(says(tiny.clip(4), "or", tiny.picture(seed=5)))
    read, messages = encoder.encode(first), first.messages
    for reply in replies:
        read, messages = encoder.extend(read, encoder.answer("the quick"), reply), (*messages, answer, reply)
    whole = encoder.encode(Prompt("whole", messages))
    assert torch.equal(read.ids, whole.ids) and torch.equal(read.positions, whole.positions)
    assert read.media.keys() == whole.media.keys()
    assert all(torch.equal(read.media[name], whole.media[name]) for name in whole.media)


def test_ernie_counts_on_after_the_last_frame_of_a_video():
    # 8 frames of 1 x 2 features are merged to 4, at 2 to 5; the image of 2 x 1 features begins at 7.
    kinds = torch.tensor([[0, 0, *[2] * 8, 0, 1, 1, 0]])
    config = SimpleNamespace(
        model_type="ernie4_5_vl_moe",
        vision_config=SimpleNamespace(spatial_merge_size=2, temporal_merge_size=2),
    )
    inputs = {
        "mm_token_type_ids": kinds,
        "video_grid_thw": torch.tensor([[8, 2, 4]]),
        "image_grid_thw": torch.tensor([[1, 4, 2]]),
    }
    found = family_of(config).positions(SimpleNamespace(config=config), inputs)
    frames = [[time, 2, column] for time in (2, 3, 4, 5) for column in (2, 3)]
    assert found.T.tolist() == [[0] * 3, [1] * 3, *frames, [6] * 3, [7, 7, 7], [7, 8, 7], [9] * 3]


def test_the_experts_of_ernie_are_those_that_its_processor_chooses(exact):
    encoder = exact("ernie4_5_vl_moe").prompt_encoder
    for prompt in mixed.prompts("ernie4_5_vl_moe"):
        plain = as_transformers(encoder, prompt)
        (types,) = encoder.family.experts(encoder.core.config, plain["input_ids"]).values()
        assert torch.equal(types, plain["moe_mm_token_type_ids"])
    assert {encoder.tokenizer.convert_tokens_to_ids("<|VIDEO_END_|>")} <= {*encoder.placeholders}


def test_a_processor_that_draws_on_frames_leaves_the_video_as_it_is(exact):
    clip = tiny.clip(2).load()
    given = MODALITIES["video"].arguments(exact("ernie4_5_vl_moe").processor, [clip], {})["videos"][0]
    assert torch.equal(given, clip.pixels) and given.data_ptr() != clip.pixels.data_ptr()


def test_videos_of_kimi_are_refused_as_long_as_transformers_cannot_read_them(exact):
    policy, prompt = exact("kimi_k25"), tiny.ask("a", tiny.clip(4), "when")
    plain = as_transformers(policy.prompt_encoder, prompt)
    with pytest.raises(ValueError, match="videos cannot be read with models of type 'kimi_k25'.* as images"):
        policy.prompt_encoder.encode(prompt)
    with pytest.raises(RuntimeError, match="split_with_sizes expects split_sizes to sum exactly to 4"):
        policy.model(**family_of(policy.model.config).assemble(policy.core, plain))


def test_molmo2_names_what_it_cannot_read(exact, monkeypatch):
    encoder = exact("molmo2").prompt_encoder
    assert encoder.placeholders == [] and "<im_patch>" in encoder._words  # beyond the head's vocabulary
    with pytest.raises(ValueError, match="takes images or a video, not both"):
        encoder.encode(tiny.ask("both", tiny.clip(4), tiny.picture(), "which"))
    read = encoder.encode(tiny.ask("one", tiny.picture(), "what"))
    encoder.extend(read, encoder.answer("fox"), says("jumps"))
    with pytest.raises(ValueError, match="'molmo2' cannot read media after an answer"):
        encoder.extend(read, encoder.answer("fox"), says("jumps", tiny.picture(seed=3)))
    monkeypatch.delattr(encoder.core.config, "image_col_id")
    with pytest.raises(
        ValueError, match="counts the tokens .* set image_col_id and image_low_res_id in the m"
    ):
        encoder.encode(tiny.ask("columns", tiny.picture(), "what"))


def test_tokens_of_all_images_of_molmo2_attend_to_each_other(exact):
    policy = exact("molmo2")
    asked = [tiny.ask(f"p{seed}", tiny.picture(), "or", tiny.picture(seed=seed), "?") for seed in (1, 2)]
    hidden = []
    for prompt in asked:
        encoded = policy.prompt_encoder.encode(prompt)
        inputs = {**encoded.media, "input_ids": encoded.ids[None]} | mixed.placed(policy, encoded)
        hidden.append(policy.core(**inputs).last_hidden_state[0])
    first = encoded.ids.tolist().index(policy.core.config.low_res_image_start_token_id)
    same = [bool(torch.equal(one, other)) for one, other in zip(*hidden, strict=True)]
    assert all(same[:first]) and not any(same[first:])  # the second image changes the first


@pytest.mark.parametrize("version", ["minicpmv4_6", "minicpmv4_7"])
def test_slices_of_a_large_image_are_counted(exact, version):
    encoder = exact(version).prompt_encoder
    encoded = encoder.encode(tiny.ask("large", tiny.picture(height=112, width=112), "what"))
    assert encoded.media["target_sizes"].tolist() == [[4, 4]] * 5  # an image and four slices of 56 pixels
    assert len(encoded.media["pixel_values"]) == 5 * 4 * 4 * 14  # rows of 14 pixels
    assert int((encoded.ids == encoder.core.config.image_token_id).sum()) == 5


def test_default_configurations_are_read(family):
    config = transformers.AutoConfig.for_model(family)
    check_family(config, transformers.MODEL_MAPPING[type(config)])
    assert family_of(config).features is family_of(SimpleNamespace(model_type=family)).features
    ids = {"ernie4_5_vl_moe": (100295, 103367), "kimi_k25": (163605, 163840), "molmo2": (151938, 151938)}
    assert (config.image_token_id, config.video_token_id) == ids.get(family, (None, None))
