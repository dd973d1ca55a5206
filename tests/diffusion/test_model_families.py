"""Every family against its own pipeline of diffusers."""

from __future__ import annotations

import copy
from itertools import groupby

import numpy as np
import pytest
import torch

from mmrl.diffusion.loading import load_pipeline
from mmrl.diffusion.model_family import Request, family_of, pack, reading_words, unpack

TEXTS = ["a cat", "two dogs on a red boat"]
REQUESTS = [Request(text) for text in TEXTS]
SIZES = {"sana": (64, 96), "wan": (32, 48)}
LENGTHS = {"sd3": 16, "flux": 40, "flux_schnell": 40, "qwen_image": 512, "sana": 40, "wan": 40}
PICTURES = ("sd3", "flux", "flux_schnell", "qwen_image", "sana")
NAMES = (*PICTURES, "wan")


def family_for(pipe):
    return family_of(type(pipe).__name__)


def shape_of(name, pipe):
    height, width = SIZES.get(name, (32, 48))
    return family_for(pipe).latent_shape(pipe, height, width, 5 if name == "wan" else 1)


def noise(shape, rows=2):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def ours(name, pipe, latents, guidance, num_steps=4, told=lambda sigma: sigma, negative=""):
    """Follow the flow with Euler's steps, as a policy does, and decode; `told` changes the times that the
    network is told."""
    family = family_for(pipe)
    texts = family.stack(family.encode(pipe, REQUESTS, LENGTHS[name]))
    empty = family.stack([family.encode_negative(pipe, Request(negative), LENGTHS[name])] * len(TEXTS))
    times = family.sigmas(pipe, num_steps, latents.shape[1:])
    scale = torch.full((len(latents),), guidance)
    for i in range(num_steps):
        sigma = told(times[i]).expand(len(latents))
        velocity = family.velocity(pipe.transformer, latents, sigma, texts, scale)
        if family.passes(guidance) == 2:
            without = family.velocity(pipe.transformer, latents, sigma, empty, scale)
            velocity = family.guide(velocity, without, guidance)
        latents = latents + (times[i + 1] - times[i]) * velocity
    return family.decode(pipe, latents).clamp(0, 1)


def theirs(name, pipe, latents, guidance, num_steps=4, negative=""):
    """Call the pipeline."""
    height, width = SIZES.get(name, (32, 48))
    wanted = {
        "num_inference_steps": num_steps,
        "height": height,
        "width": width,
        "max_sequence_length": LENGTHS[name],
        "output_type": "pt",
        "return_dict": False,
    }
    match name:
        case "flux" | "flux_schnell":
            return pipe(TEXTS, latents=pack(latents), guidance_scale=guidance, **wanted)[0]
        case "qwen_image":
            away = {"negative_prompt": [negative, negative]}
            return pipe(TEXTS, latents=pack(latents), true_cfg_scale=guidance, **away, **wanted)[0]
        case "sana":
            wanted["use_resolution_binning"] = False
        case "wan":
            wanted["num_frames"] = 5
    wanted["negative_prompt"] = [negative, negative]
    return pipe(TEXTS, latents=latents, guidance_scale=guidance, **wanted)[0]


# Guidance of 0 is what cards of distilled models tell to set.
ASKED = [(0.0, ""), (0.5, "ugly"), (1.0, ""), (4.0, ""), (4.0, "an ugly BLURRED one. "), (4.0, " ")]


@pytest.mark.parametrize("name", NAMES)
def test_euler_steps_make_what_the_pipeline_makes(pipeline, name):
    pipe = pipeline(name)
    latents, seen = noise(shape_of(name, pipe)), {}
    for guidance, negative in ASKED:
        made = ours(name, pipe, latents, guidance, negative=negative)
        wanted = theirs(name, pipe, latents, guidance, negative=negative)
        assert made.shape == wanted.shape
        assert wanted.std() > 0.05
        torch.testing.assert_close(made, wanted, atol=2e-5, rtol=0, msg=f"{guidance} '{negative}'")
        seen[guidance, negative] = made
    if not family_for(pipe).embedded_guidance:
        assert torch.equal(seen[0.0, ""], seen[1.0, ""])
        assert (seen[4.0, ""] - seen[4.0, "an ugly BLURRED one. "]).abs().max() > 1e-4


SETTINGS = {
    "sd3": [{"use_dynamic_shifting": True, "max_shift": 0.9}, {"shift": 1.5, "use_karras_sigmas": True}],
    "flux": [
        {"use_dynamic_shifting": True, "time_shift_type": "linear"},
        {"shift_terminal": 0.1, "shift": 2.0},
    ],
    "qwen_image": [{"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}],
    "sana": [{"shift": 2.0, "use_exponential_sigmas": True}],
    "wan": [{"shift": 7.0}],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_schedules_are_those_of_the_configuration(pipeline, name):
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = copy.copy(pipeline(name))
    for settings in SETTINGS[name]:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(**settings)
        latents = noise(shape_of(name, pipe))
        made, wanted = ours(name, pipe, latents, 4.0), theirs(name, pipe, latents, 4.0)
        torch.testing.assert_close(made, wanted, atol=2e-5, rtol=0, msg=str(settings))


def test_a_pipeline_without_an_autoencoder_loads_back_and_works_on_pixels(checkpoint):
    from diffusers import DiffusionPipeline

    with pytest.raises(ValueError, match="expected .*'vae'"):  # absent parts have to be named
        DiffusionPipeline.from_pretrained(checkpoint("sd3_pixel"))
    pipe = load_pipeline(str(checkpoint("sd3_pixel")), dtype="float32")
    family = family_for(pipe)
    assert pipe.vae is None
    assert family.latent_shape(pipe, 4, 6, 1) == (3, 4, 6)
    # The pipeline counts 8 pixels for one, and gives latents: pixels in [-1, 1].
    latents, settings = noise((3, 4, 6)), {"height": 32, "width": 48, "output_type": "latent"}
    wanted = pipe(
        TEXTS, latents=latents, guidance_scale=4.0, num_inference_steps=4, max_sequence_length=16, **settings
    ).images
    made = ours("sd3", pipe, latents, 4.0)
    torch.testing.assert_close(made, (wanted / 2 + 0.5).clamp(0, 1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_guidance_and_the_text_change_the_image(pipeline, name):
    pipe = pipeline(name)
    latents = noise(shape_of(name, pipe), 1).repeat(2, *[1] * len(shape_of(name, pipe)))
    plain, led = ours(name, pipe, latents, 1.0), ours(name, pipe, latents, 4.0)
    assert (plain[0] - plain[1]).abs().max() > 1e-3
    assert ((plain - led).abs().max() > 1e-3) == (name != "flux_schnell")


@pytest.mark.parametrize("num_steps", [2, 3, 10])
@pytest.mark.parametrize("name", NAMES)
def test_times_are_those_the_scheduler_stepped_through(pipeline, name, num_steps):
    pipe = pipeline(name)
    latents = noise(shape_of(name, pipe))
    theirs(name, pipe, latents, 1.0, num_steps)
    times = family_for(pipe).sigmas(pipe, num_steps, latents.shape[1:])
    assert times.dtype == torch.float32
    torch.testing.assert_close(times, pipe.scheduler.sigmas.cpu(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_texts_in_a_batch_say_what_they_say_alone(pipeline, name):
    pipe = pipeline(name)
    family, latents = family_for(pipe), noise(shape_of(name, pipe))
    conditions = family.encode(pipe, REQUESTS, LENGTHS[name])
    sigma, scale = torch.tensor([0.9, 0.3]), torch.tensor([1.0, 3.0])
    with torch.no_grad():
        both = family.velocity(pipe.transformer, latents, sigma, family.stack(conditions), scale)
        for i, condition in enumerate(conditions):
            one = slice(i, i + 1)
            alone = family.velocity(
                pipe.transformer, latents[one], sigma[one], family.stack([condition]), scale[one]
            )
            torch.testing.assert_close(both[one], alone, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_condition_does_not_depend_on_its_neighbours(pipeline, name):
    pipe = pipeline(name)
    family = family_for(pipe)
    together = family.encode(pipe, REQUESTS, LENGTHS[name])
    for text, condition in zip(TEXTS, together, strict=True):
        (alone,) = family.encode(pipe, [Request(text)], LENGTHS[name])
        assert alone.keys() == condition.keys()
        for key, value in condition.items():
            assert value.device.type == "cpu"
            torch.testing.assert_close(value, alone[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_compressed_images_have_the_shape_of_latents_and_decode_to_images(pipeline, name):
    pipe = pipeline(name)
    family, shape = family_for(pipe), shape_of(name, pipe)
    frames = (5,) if name == "wan" else ()
    pixels = torch.rand(2, *frames, 3, *SIZES.get(name, (32, 48)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        latents = family.compress(pipe, pixels)
        decoded = family.decode(pipe, latents)
    assert latents.shape == (2, *shape)
    assert decoded.shape == pixels.shape
    assert decoded.dtype == torch.float32


@torch.no_grad()
def encoded(name, pipe, pixels):
    """Encode as the training scripts of diffusers do."""
    vae, signed = pipe.vae, pixels * 2 - 1
    match name:
        case "sana":
            return vae.encode(signed).latent * vae.config.scaling_factor
        case "qwen_image" | "wan":
            signed = signed.transpose(1, 2) if name == "wan" else signed.unsqueeze(2)
            mode = vae.encode(signed).latent_dist.mode()
            for channel, (mean, std) in enumerate(
                zip(vae.config.latents_mean, vae.config.latents_std, strict=True)
            ):
                mode[:, channel] = (mode[:, channel] - mean) / std
            return mode if name == "wan" else mode.squeeze(2)
    return (vae.encode(signed).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor


@pytest.mark.parametrize("name", NAMES)
def test_latents_are_scaled_as_diffusers_trains_them(pipeline, name):
    pipe = pipeline(name)
    frames = (5,) if name == "wan" else ()
    pixels = torch.rand(1, *frames, 3, *SIZES.get(name, (32, 48)), generator=torch.Generator().manual_seed(1))
    latents = family_for(pipe).compress(pipe, pixels)
    torch.testing.assert_close(latents, encoded(name, pipe, pixels), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "height", "width", "multiple"),
    [
        ("sd3", 36, 32, 8), ("flux", 32, 40, 16), ("qwen_image", 40, 32, 16), ("sana", 80, 64, 32),
        ("wan", 32, 40, 16),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(pipeline, name, height, width, multiple):
    pipe = pipeline(name)
    with pytest.raises(ValueError, match=f"multiple of {multiple} "):
        family_for(pipe).latent_shape(pipe, height, width, 1)


@pytest.mark.parametrize("name", ["flux", "qwen_image", "sana"])
def test_models_of_images_refuse_frames(pipeline, name):
    pipe = pipeline(name)
    with pytest.raises(ValueError, match="num_frames"):
        family_for(pipe).latent_shape(pipe, 64, 64, 5)


@pytest.mark.parametrize("num_frames", [0, 2, 4, 6])
def test_a_video_of_the_wrong_length_is_refused(pipeline, num_frames):
    pipe = pipeline("wan")
    with pytest.raises(ValueError, match="one more than a multiple of 4"):
        family_for(pipe).latent_shape(pipe, 32, 32, num_frames)


def test_frames_of_a_video_are_compressed_four_by_four(pipeline):
    # 1 + 4 * 2 frames are 1 + 2 latents; sides shrink by 8.
    pipe = pipeline("wan")
    assert family_for(pipe).latent_shape(pipe, 32, 48, 9) == (4, 3, 4, 6)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_would_be_cut_is_refused(pipeline, name):
    pipe = pipeline(name)
    with pytest.raises(ValueError, match=r"tokens long, and the encoder .* takes"):
        family_for(pipe).encode(pipe, [Request("a cat"), Request("cat " * 300)], LENGTHS[name])


def letters(name, pipe, limit):
    """Count the letters of the longest word that is read, a letter being a token."""
    if name == "qwen_image":  # the frame is read as well, but for what is dropped of its beginning
        frame = len(pipe.tokenizer(pipe.prompt_template_encode.format("")).input_ids)
        return limit - (frame - pipe.prompt_template_encode_start_idx)
    if name == "sana":  # the first and the last token of the instruction are read as well
        return limit - 2
    return limit - 2  # T5 puts a space before a word, and an end behind


@torch.no_grad()
@pytest.mark.parametrize("name", ["flux", "qwen_image", "sana", "wan"])
def test_a_text_of_exactly_the_limit_is_read_and_one_token_more_is_not(pipeline, name):
    pipe = pipeline(name)
    family, limit = family_for(pipe), LENGTHS[name]
    most = letters(name, pipe, limit)
    (last_a,), (last_b,) = (
        family.encode(pipe, [Request("a" * (most - 1) + last)], limit) for last in ("a", "b")
    )
    states_a, states_b = (condition["encoder_hidden_states"] for condition in (last_a, last_b))
    assert states_a.shape[0] == limit
    assert not torch.equal(states_a, states_b)
    with pytest.raises(ValueError, match=r"tokens long, and the encoder .* takes"):
        family.encode(pipe, [Request("a" * (most + 1))], limit)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_makes_no_control_token(pipeline, name, monkeypatch):
    pipe = pipeline(name)
    tokenizers = {key: part for key, part in pipe.components.items() if hasattr(part, "added_tokens_decoder")}
    towers = [part for key, part in pipe.components.items() if key.startswith("text_encoder") and part]
    read = []  # the tokens that text encoders were given
    for tower in towers:
        forward = tower.forward

        def noted(*ids, forward=forward, **options):
            read.append((ids[0] if ids else options["input_ids"])[0].tolist())
            return forward(*ids, **options)

        monkeypatch.setattr(tower, "forward", noted)

    def control(text):
        read.clear()
        with reading_words(pipe, text) as words:
            family_for(pipe).encode(pipe, [Request(words)], LENGTHS[name])
        assert {key: pipe.components[key] for key in tokenizers} == tokenizers  # as they were
        special = {number for part in tokenizers.values() for number in part.all_special_ids}
        # Padding is one token many times.
        return [sum(token in special for token, _ in groupby(ids)) for ids in read]

    for word in sorted({word for part in tokenizers.values() for word in part.all_special_tokens}):
        for text in (f"a{word}b", f"a {word.upper()} b"):
            assert control(text) == control("a fox b"), text


def test_flux_reads_on_with_t5_where_clip_stops(pipeline):
    # 90 letters are 92 tokens of CLIP, which takes 77: its vector is that of the first 75 letters.
    pipe = pipeline("flux")
    long, longer = family_for(pipe).encode(pipe, [Request("a" * 90), Request("a" * 89 + "b")], 128)
    torch.testing.assert_close(long["pooled_projections"], longer["pooled_projections"])
    assert not torch.equal(long["encoder_hidden_states"], longer["encoder_hidden_states"])


@pytest.mark.parametrize(("name", "most"), [("flux", 512), ("qwen_image", 1024)])
def test_a_limit_beyond_what_the_pipeline_takes_is_refused(pipeline, name, most):
    pipe = pipeline(name)
    with pytest.raises(ValueError, match=f"at most {most}"):
        family_for(pipe).encode(pipe, [Request("a cat")], most + 1)


def test_packing_lays_two_by_two_latents_side_by_side():
    # One channel of 2 by 4: the left token holds 0 1 / 4 5, the right one 2 3 / 6 7.
    latents = torch.arange(8.0).view(1, 1, 2, 4)
    assert pack(latents).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    assert torch.equal(unpack(pack(latents), 2, 4), latents)
    many = noise((3, 4, 6))
    assert torch.equal(unpack(pack(many), 4, 6), many)


def test_guidance_leads_away_from_the_empty_text():
    # 1 + 3 (2 - 1) = 4 and 0 + 3 (-1 - 0) = -3; at 1 it is the velocity with the text.
    with_text, without = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 0.0]])
    guide = family_of("StableDiffusion3Pipeline").guide
    assert guide(with_text, without, 3.0).tolist() == [[4.0, -3.0]]
    assert torch.equal(guide(with_text, without, 1.0), with_text)


def test_qwen_image_keeps_the_norm_of_the_velocity_with_the_text(pipeline):
    family = family_for(pipeline("qwen_image"))
    with_text, without = noise((4, 4, 6)), noise((4, 4, 6)).flip(0)
    led = family.guide(with_text, without, 5.0)
    torch.testing.assert_close(pack(led).norm(dim=-1), pack(with_text).norm(dim=-1))
    # One token of (3, 4, 0, 0) and (3, 0, 0, 0) at guidance 2: (3, 8, 0, 0), scaled to length 5.
    one, other = torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.tensor([3.0, 0.0, 0.0, 0.0])
    (led,) = family.guide(one.view(1, 1, 2, 2), other.view(1, 1, 2, 2), 2.0).view(1, 4)
    np.testing.assert_allclose(led, [15 / 73**0.5, 40 / 73**0.5, 0, 0], rtol=1e-6)


def test_a_wan_that_is_told_a_time_for_every_token_says_the_same_of_one_time(pipeline):
    from diffusers import WanPipeline

    pipe = pipeline("wan")
    latents = noise(shape_of("wan", pipe))
    every = WanPipeline(**pipe.components, expand_timesteps=True)
    every.set_progress_bar_config(disable=True)
    wanted = theirs("wan", every, latents, 4.0)
    torch.testing.assert_close(ours("wan", every, latents, 4.0), wanted, atol=1e-4, rtol=0)


def published(pipe, name):
    """Give the pipeline the kind of scheduler that published checkpoints of the family come with, but of
    first order, where it is Euler's."""
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline, UniPCMultistepScheduler, WanPipeline

    flow = {
        "use_flow_sigmas": True,
        "prediction_type": "flow_prediction",
        "flow_shift": 3.0,
        "solver_order": 1,
    }
    if name == "sana":
        made = SanaPipeline(**{**pipe.components, "scheduler": DPMSolverMultistepScheduler(**flow)})
    else:
        scheduler = UniPCMultistepScheduler(**flow, disable_corrector=list(range(9)))
        made = WanPipeline(**{**pipe.components, "scheduler": scheduler})
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("name", ["sana", "wan"])
def test_published_schedulers_give_flow_times_but_tell_the_network_whole_numbers(pipeline, name):
    pipe = published(pipeline(name), name)
    latents = noise(shape_of(name, pipe))
    made = ours(name, pipe, latents, 1.0, told=lambda sigma: (1000 * sigma).floor() / 1000)
    torch.testing.assert_close(made, theirs(name, pipe, latents, 1.0), atol=1e-4, rtol=0)
    assert (made - ours(name, pipe, latents, 1.0)).abs().max() < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_in_the_network_and_gradients_reach_latents(pipeline, name):
    pipe = pipeline(name)
    family, latents = family_for(pipe), noise(shape_of(name, pipe)).requires_grad_()
    linear = [path for path, part in pipe.transformer.named_modules() if isinstance(part, torch.nn.Linear)]
    for target in family.targets:
        assert any(f".{path}".endswith(f".{target}") for path in linear), target
    condition = family.stack(family.encode(pipe, REQUESTS, LENGTHS[name]))
    family.velocity(
        pipe.transformer, latents, torch.tensor([0.5, 0.1]), condition, torch.ones(2)
    ).sum().backward()
    assert latents.grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "apart"), [(torch.bfloat16, 0.15), (torch.float64, 1e-4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_another_precision_says_nearly_the_same(pipeline, name, dtype, apart):
    pipe = pipeline(name)
    family, latents = family_for(pipe), noise(shape_of(name, pipe))
    condition = family.stack(family.encode(pipe, REQUESTS, LENGTHS[name]))
    sigma, scale = torch.tensor([0.75, 0.25]), torch.tensor([3.0, 3.0])
    wanted = family.velocity(pipe.transformer, latents, sigma, condition, scale)
    network = copy.deepcopy(pipe.transformer).to(dtype)
    said = family.velocity(network, latents, sigma, condition, scale)
    assert said.dtype == dtype
    assert (said - wanted).norm() / wanted.norm() < apart


def test_a_pipeline_that_no_family_serves_is_named():
    with pytest.raises(ValueError, match="FluxPipeline.*QwenImagePipeline.*SanaPipeline.*WanPipeline"):
        family_of("StableDiffusionPipeline")
