"""FLUX.2 and FLUX.2 klein against their pipelines, with texts and images."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from mmrl.cli import main
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_family import Request, reading_words
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours, pictures
from tests.diffusion.flows import denoise, flow
from tests.diffusion.test_flow_runs import plan

LIMITS = {"flux2": 280, "flux2_klein": 120}  # tokens, with the template
# Images of other sizes than the result; 90 x 70 loses pixels at its edges.
IMAGES = ((), ((64, 80),), ((64, 80), (90, 70)))


def shared(request, latents, num_steps, limit):
    """Options of both pipelines."""
    _, height, width = request.size
    return {
        "prompt": [request.text],
        "image": [to_pil(image) for image in request.images] or None,
        "latents": latents,
        "height": height,
        "width": width,
        "num_inference_steps": num_steps,
        "max_sequence_length": limit,
        "output_type": "pt",
        "return_dict": False,
    }


def call_klein(pipe, request, latents, guidance, num_steps, negative):
    limit = LIMITS["flux2_klein"]
    away, _ = pipe.encode_prompt(negative, max_sequence_length=limit)
    given = shared(request, latents, num_steps, limit)
    return pipe(**given, guidance_scale=guidance, negative_prompt_embeds=away)[0]


def call_flux2(pipe, request, latents, guidance, num_steps, negative):
    return pipe(**shared(request, latents, num_steps, LIMITS["flux2"]), guidance_scale=guidance)[0]


class TestFlux2Klein(FamilyTests):
    case = Family("flux2_klein", call_klein, LIMITS["flux2_klein"], IMAGES)

    def test_a_distilled_model_ignores_guidance(self, pipeline, checkpoint):
        pipe, size = pipeline("flux2_klein_distilled"), (1, 32, 32)
        request = self.case.requests(size)[1]
        latents = noise(pipe, size)
        wanted = call_klein(pipe, request, latents, 4.0, 3, "")
        assert_close(ours(self.case, pipe, request, latents, 1.0), wanted, atol=2e-5, rtol=0)
        assert family_for(pipe).single_pass(pipe)
        policy = flow(checkpoint("flux2_klein_distilled"), max_sequence_length=120)
        assert policy.passes(4.0) == 1
        with pytest.warns(UserWarning, match="has no effect"):
            policy.negative_prompt = "ugly"
            denoise(policy, guidance_scale=4.0, solver="diffusion.flow_sde")


class TestFlux2(FamilyTests):
    case = Family("flux2", call_flux2, LIMITS["flux2"], IMAGES, asked=((1.0, ""), (4.0, "")))

    def test_a_control_word_is_read_as_plain_text(self, pipe):
        control = pipe.tokenizer.tokenizer.all_special_ids
        read, forward = [], pipe.text_encoder.forward
        pipe.text_encoder.forward = lambda **given: read.append(given["input_ids"][0]) or forward(**given)
        try:
            for text in ("a fox b", "a[IMG]b", "a [INST] b", "a</s>b"):
                with torch.no_grad(), reading_words(pipe, text) as words:
                    family_for(pipe).encode(pipe, [Request(words)], self.case.limit)
                    assert pipe.tokenizer.tokenizer.decode(read[-1]).endswith(f"[INST]{text}[/INST]")
        finally:
            del pipe.text_encoder.forward
        counts = [sum(token in control and token != 3 for token in ids.tolist()) for ids in read]
        assert counts == [counts[0]] * 4


NAMES = ("flux2", "flux2_klein")


@pytest.mark.parametrize("name", NAMES)
def test_compressed_pixels_are_standardised_as_images_of_a_prompt(pipeline, name):
    pipe = pipeline(name)
    signed = 2 * torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(1)) - 1
    with torch.no_grad():
        wanted = pipe._encode_vae_image(signed, None)
        made = family_for(pipe).compress(pipe, signed / 2 + 0.5)
    assert_close(made, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_of_exactly_the_limit_is_read_and_one_token_more_is_not(pipeline, name):
    pipe, family, limit = pipeline(name), family_for(pipeline(name)), LIMITS[name]
    read = getattr(pipe.tokenizer, "tokenizer", pipe.tokenizer)
    seen, forward = [], pipe.text_encoder.forward
    pipe.text_encoder.forward = lambda **given: seen.append(given["attention_mask"].sum()) or forward(**given)
    try:
        with torch.no_grad():
            family.encode(pipe, [Request("a")], limit)
            most = limit - int(seen[0]) + 1  # letters
            family.encode(pipe, [Request("a" * most)], limit)
    finally:
        del pipe.text_encoder.forward
    assert seen[-1] == limit and most > 10
    with pytest.raises(ValueError, match=f"{limit + 1} tokens long, and the encoder '{type(read).__name__}'"):
        family.check_text(pipe, "a" * (most + 1), limit)


def test_equal_texts_for_several_images_are_encoded_once(pipeline, monkeypatch):
    pipe, limit = pipeline("flux2_klein"), LIMITS["flux2_klein"]
    family, texts, encode = family_for(pipe), [], pipe.encode_prompt
    counted = lambda text, **given: texts.append(text) or encode(text, **given)
    monkeypatch.setattr(pipe, "encode_prompt", counted)
    images = [pictures(((64, 64),), seed=seed) for seed in range(2)]
    with torch.no_grad():
        first, second = family.encode(pipe, [Request("a cat", some) for some in images], limit)
        (other,) = family.encode(pipe, [Request("a dog", images[0])], limit)
    assert texts == ["a cat", "a dog"]
    assert torch.equal(first["encoder_hidden_states"], second["encoder_hidden_states"])
    assert not torch.equal(first["encoder_hidden_states"], other["encoder_hidden_states"])
    assert not torch.equal(first["image_tokens"], second["image_tokens"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sides", "said"), [((48, 64), "too small"), ((64, 640), "Aspect ratio")])
def test_images_that_the_pipeline_refuses_are_refused(pipeline, name, sides, said):
    pipe = pipeline(name)
    with pytest.raises(ValueError, match=said):
        family_for(pipe).encode(pipe, [Request("a cat", pictures((sides,)))], LIMITS[name])


def test_images_of_more_than_a_megapixel_are_shrunk(pipeline):
    pipe, family = pipeline("flux2_klein"), family_for(pipeline("flux2_klein"))
    prepared = family._prepared(pipe, pictures(((1056, 1312),))[0])
    assert prepared.shape == (1, 3, 912, 1136)  # 919 x 1142, cut to multiples of 16


def test_rows_whose_image_tokens_have_other_positions_are_not_stacked(pipeline):
    pipe = pipeline("flux2_klein")
    sides = ((), ((64, 96),), ((96, 64),), ((64, 96),))
    requests = [Request("a cat", pictures(one, seed=i)) for i, one in enumerate(sides)]
    with torch.no_grad():
        conditions = family_for(pipe).encode(pipe, requests, LIMITS["flux2_klein"])
    keys = [family_for(pipe).batch_key(one) for one in conditions]
    assert keys[1] == keys[3]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_do_not_divide_are_refused(pipeline, name):
    pipe = pipeline(name)
    assert family_for(pipe).latent_shape(pipe, 32, 48, 1) == (16, 2, 3)
    with pytest.raises(ValueError, match="multiple of 16"):
        family_for(pipe).latent_shape(pipe, 32, 40, 1)
    with pytest.raises(ValueError, match="num_frames"):
        family_for(pipe).latent_shape(pipe, 32, 32, 5)


@pytest.mark.parametrize(
    ("sides", "said"), [((48, 64), "too small"), ((64, 640), "Aspect ratio"), ((64, 64), "")]
)
def test_images_are_measured_before_weights_are_loaded(checkpoint, tmp_path, capsys, sides, said):
    Image.new("RGB", sides[::-1]).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "a.png", "prompt": "red"}))
    data = {"name": "diffusion.edits", "path": str(tmp_path / "rows.jsonl")}
    changes = {"policy": {"max_sequence_length": LIMITS["flux2_klein"]}, "data": data}
    raw = plan(checkpoint("flux2_klein"), tmp_path / "run", "diffusion.transition", **changes)
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    assert main(["check", str(tmp_path / "run.yaml")]) == (2 if said else 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line and ("rows.jsonl:1" in line) == bool(said)
