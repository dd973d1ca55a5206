"""InternVL3.5: `internvl` with Qwen3, Qwen3-MoE and gpt-oss, images in tiles and videos."""

from __future__ import annotations

import pytest

from tests.vision import mixed, tiny, tiny_vlms
from tests.vision.families import common
from tests.vision.families.common import (  # noqa: F401
    test_greedy_answers_are_those_of_transformers,
    test_images_in_replies_are_read_as_transformers_read_them,
    test_the_doctor_finds_no_difference_from_transformers,
    test_tokens_and_pixels_are_those_of_the_processor,
    test_values_and_gradients_are_those_of_transformers,
)
from tests.vision.families.test_vlms import eager_experts

exact = common.loader(tiny_vlms.make, eager_experts, attention={"internvl_gpt_oss": "eager"})


@pytest.fixture(params=sorted(tiny_vlms.VARIANTS))
def family(request):
    return request.param


def test_a_large_image_is_cut_into_tiles_and_a_video_is_not(exact):
    encoder = exact("internvl_qwen3").prompt_encoder
    wide = encoder.encode(tiny.ask("wide", tiny.picture(width=112), "what"))
    assert len(wide.media["pixel_values"]) == 3  # two tiles, and the whole image
    clip = encoder.encode(tiny.ask("clip", tiny.clip(4), "when"))
    assert len(clip.media["pixel_values"]) == 4 and "Frame4" in encoder.render(mixed.prompts("internvl")[3])
