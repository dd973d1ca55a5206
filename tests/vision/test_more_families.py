"""Families of images in one sequence with positions in a line, each compared with plain transformers."""

from __future__ import annotations

import pytest

from tests.vision import mixed, tiny, tiny_more
from tests.vision.families import common
from tests.vision.families.common import (  # noqa: F401
    test_a_prompt_with_fewer_placeholders_than_features_is_refused,
    test_a_question_in_words_leaves_no_parameter_of_the_tower_without_a_gradient,
    test_greedy_answers_are_those_of_transformers,
    test_images_in_replies_are_read_as_transformers_read_them,
    test_the_doctor_finds_no_difference_from_transformers,
    test_the_number_of_features_is_that_of_the_model_for_every_size,
    test_tokens_and_pixels_are_those_of_the_processor,
    test_values_and_gradients_are_those_of_transformers,
)

NAMES = sorted({**tiny_more.MAKERS, **tiny_more.VARIANTS})
FEW = ("lfm2_vl", "mistral3")
exact = common.loader(tiny_more.make)


@pytest.fixture(params=NAMES)
def family(request):
    return request.param


@pytest.mark.parametrize(
    "family", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in NAMES]
)
def test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family):
    common.test_conversations_of_the_engine_are_those_of_reading_all_anew(exact, family)


def test_an_image_of_one_feature_is_refused_by_mistral3_when_it_is_alone(exact):
    policy = exact("mistral3")
    small = tiny.picture(height=28, width=28)
    with pytest.raises(ValueError, match="at most 28 x 28 pixels cannot be read alone .* enlarge it"):
        policy.prompt_encoder.encode(tiny.ask("one", small, "what"))
    (row,) = mixed.generate(policy, [tiny.ask("two", small, tiny.picture(seed=1), "what")])
    assert row.length
