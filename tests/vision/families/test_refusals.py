"""Every image-text-to-text model of transformers is listed, refused with a reason, or read in a line."""

from __future__ import annotations

import re

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mmrl.vision.models.loading import check_class, reads_text_only
from mmrl.vision.models.model_families import FAMILIES

# Read in a line, without a test: their forward passes put features at placeholders, and read nothing else.
IN_LINE = """
aria deepseek_ocr2 deepseek_vl_hybrid exaone4_5 fast_vlm fuyu got_ocr2 granite4_vision granite_docling
hyperclovax_vision_v2 idefics2 janus lighton_ocr llava_next_video minimax_m3_vl muse_glimmer muse_spark ovis2
perception_lm qianfan_ocr step3p7 video_llama_3 video_llava vipllava
"""
REFUSED = {
    "by an encoder or by cross-attention": """
        blip-2 diffusion_gemma florence2 idefics instructblip instructblipvideo mllama t5gemma2 udop""",
    "positions of its own": "cohere_compass cosmos3_edge cosmos3_omni glm_ocr glmga hunyuan_vl paddleocr_vl",
    r"reads `\w+_ids`": "gemma4_unified inkling_mm_model",
    "names no token that stands for an image": """
        blip chameleon emu3 git kosmos-2 kosmos-2.5 mistral4 pi0""",
    "has layers of the type": """
        dots3_note inkling2 lfm3_vl minicpm_ocr mistral_large4 unlimited_ocr""",
    "keep a state": "glm5_next qwen4_exp",
    "writes no text": "evolla",
    "no class .* without its head": """
        nemotron_h_omni pix2struct pp_chart2table pp_formulanet shieldgemma2 vision-encoder-decoder""",
}
SLOW = pytest.mark.slow  # imports every model of transformers


def reason(name: str) -> str:
    """Return why a model of this type is refused; empty if it is not."""
    config = transformers.AutoConfig.for_model(name)
    try:
        reads_text_only(config)
        check_class(config)
    except ValueError as error:  # and ConfigError
        assert f"'{config.model_type}'" in str(error) and "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["mllama", "florence2", "git", "blip-2", "pix2struct"])
def test_models_that_read_images_otherwise_are_refused(name):
    (pattern,) = (pattern for pattern, names in REFUSED.items() if name in names.split())
    assert re.search(pattern, reason(name))


@SLOW
def test_every_model_of_transformers_is_listed_refused_or_read_in_a_line():
    names = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - FAMILIES.keys()
    reasons = {name: reason(name) for name in names}
    known = {name: pattern for pattern, found in REFUSED.items() for name in found.split()}
    known |= dict.fromkeys(IN_LINE.split(), "^$")
    assert names <= known.keys(), "read their forward passes and list them"
    assert all(re.search(known[name], why) for name, why in reasons.items()), reasons
