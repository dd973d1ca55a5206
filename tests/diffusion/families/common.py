"""Checks of a model family against its own pipeline of diffusers, from a small description of the family."""

from __future__ import annotations

import copy
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmrl.core.types import Frames, Media, Message, Part, Prompt, PromptError
from mmrl.diffusion import adapters
from mmrl.diffusion.flow_network import FlowNetwork
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request, family_of, reading_words
from mmrl.diffusion.policies.flow import Flow
from mmrl.diffusion.staged_network import network_of
from mmrl.diffusion.steps import Conditioning
from mmrl.runtime.json_client import png
from tests.diffusion import tiny
from tests.diffusion.flows import denoise, flow

TEXTS = ("make it red", "two dogs on a blue boat, seen from far away")
MATCHING = {"name": "diffusion.matching", "draws": 2, "time_type": "uniform"}
NUM_STEPS = 3


@dataclass(frozen=True)
class Family:
    """How to call one pipeline.

    `call(pipe, request, latents, guidance, num_steps, negative)` calls the pipeline for one request, from the
    noise `latents` (1, *L), and returns pixels in [0, 1]: (1, 3, height, width) or (1, F, 3, height, width).
    `images` holds the (height, width) of the images of each request: () is a request without images.
    `asked` holds guidance scales with a negative prompt, `sizes` (frames, height, width).
    """

    maker: str  # in `tiny.MAKERS`
    call: Callable[..., Tensor]
    limit: int  # `max_sequence_length`
    images: tuple[tuple[tuple[int, int], ...], ...] = ((),)
    sizes: tuple[tuple[int, int, int], ...] = ((1, 32, 32), (1, 32, 48))
    asked: tuple[tuple[float, str], ...] = ((1.0, ""), (4.0, "an ugly one"))
    tolerance: float = 2e-5
    rounding: float = 1e-8  # of log-probabilities in float64; more where the network computes in float32
    too_long: str = "cat " * 300

    def requests(self, size: tuple[int, int, int]) -> list[Request]:
        """One request for every entry of `images`, each with a text of its own."""
        return [
            Request(TEXTS[i % len(TEXTS)], pictures(sides, seed=10 * i), size)
            for i, sides in enumerate(self.images)
        ]


def pictures(sides: tuple[tuple[int, int], ...], seed: int = 0) -> tuple[Tensor, ...]:
    """Draw images of blocks of 8 pixels, so that resizing leaves their variance: (3, height, width) uint8."""
    drawn = []
    for i, (height, width) in enumerate(sides):
        generator = torch.Generator().manual_seed(seed + i)
        blocks = torch.randint(0, 256, (3, -(-height // 8), -(-width // 8)), generator=generator)
        whole = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
        drawn.append(whole[:, :height, :width].to(torch.uint8).contiguous())
    return tuple(drawn)


def prompt_of(request: Request) -> Prompt:
    """Make a prompt of a request, its images before its text."""
    frames = [Frames(image[None], torch.zeros(1)) for image in request.images]
    media = [
        Media("image", f"image {i}", lambda shown=shown: shown, source=b64decode(png(shown.pixels[0])))
        for i, shown in enumerate(frames)
    ]
    parts = (*(Part(media=medium) for medium in media), Part(request.text))
    name = f"{request.text} {[tuple(image.shape) for image in request.images]}"
    return Prompt(uid=name, messages=(Message("user", parts),))


def family_for(pipe: Any) -> PipelineFamily:
    """Find the family of a loaded pipeline."""
    return family_of(type(pipe).__name__)


def noise(pipe: Any, size: tuple[int, int, int], rows: int = 1, seed: int = 3) -> Tensor:
    """Draw noise (rows, *L) for a result of a size."""
    frames, height, width = size
    shape = family_for(pipe).latent_shape(pipe, height, width, frames)
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))


def velocity(
    pipe: Any, latents: Tensor, sigma: Tensor, conditions: Sequence[Condition], guidance: float,
    negatives: Sequence[Condition] | None = None,
) -> Tensor:  # fmt: skip
    """Compute guided velocities (B, *L) as the policy does: by groups of one `batch_key`, stacked."""
    family, passes = family_for(pipe), 2 if negatives else 1
    self = _Networks(family, FlowNetwork(network_of(pipe, family.stages(pipe.config)), family, torch.float32))
    conditioning = Conditioning.of(conditions, guidance, passes, negatives or [])
    return Flow.velocity(self, latents, sigma, conditioning)  # type: ignore[arg-type]


@dataclass
class _Networks:
    """What `Flow.velocity` reads of a policy."""

    family: PipelineFamily
    module: FlowNetwork
    device: torch.device = torch.device("cpu")
    evaluations: int = 0
    frozen: ClassVar[Any] = SimpleNamespace(make_room=lambda: None)

    def _velocity(self, *given: Any) -> Tensor:
        return Flow._velocity(self, *given)  # type: ignore[arg-type]


@torch.no_grad()
def ours(
    case: Family, pipe: Any, request: Request, latents: Tensor, guidance: float, num_steps: int = NUM_STEPS,
    negative: str = "",
) -> Tensor:  # fmt: skip
    """Follow the flow by Euler steps, and decode."""
    family = family_for(pipe)
    conditions, negatives = family.encode(pipe, [request], case.limit), []
    if family.passes(guidance) > 1:
        away = Request(negative, request.images, request.size)
        negatives = [family.encode_negative(pipe, away, case.limit)]
    times = family.sigmas(pipe, num_steps, tuple(latents.shape[1:]))
    for now, following in zip(times, times[1:], strict=False):
        led = velocity(pipe, latents, now.expand(len(latents)), conditions, guidance, negatives)
        latents = latents + (following - now) * led
    return family.decode(pipe, latents).clamp(0, 1)


class FamilyTests:
    """Tests of one family: subclass it as `TestName` with the class attribute `case`."""

    case: Family

    @pytest.fixture
    def pipe(self, pipeline: Any) -> Any:
        """The tiny pipeline, whose weights nobody changes."""
        return pipeline(self.case.maker)

    def load_adapter(self, plain: Any, folder: Path) -> None:
        """Load a saved adapter as plain diffusers does; override it for pipelines without LoRA loading."""
        plain.load_lora_weights(str(folder))

    def test_euler_steps_make_the_image_of_the_pipeline(self, pipe):
        case = self.case
        for i in range(max(len(case.sizes), len(case.images))):  # every size, and every list of images
            size = case.sizes[i % len(case.sizes)]
            request, latents, made = case.requests(size)[i % len(case.images)], noise(pipe, size), []
            for guidance, negative in case.asked:
                wanted = case.call(pipe, request, latents, guidance, NUM_STEPS, negative)
                made.append(ours(case, pipe, request, latents, guidance, negative=negative))
                where = f"{size} {[image.shape for image in request.images]} {guidance} '{negative}'"
                assert made[-1].shape == wanted.shape, where
                assert wanted.std() > 0.02, where
                say = lambda message, where=where: f"{where}: {message}"
                assert_close(made[-1], wanted, atol=case.tolerance, rtol=0, msg=say)
            if len({guidance for guidance, _ in case.asked}) > 1:
                assert (made[0] - made[-1]).abs().max() > 1e-3

    def test_text_and_images_change_the_velocity(self, pipe):
        case, family = self.case, family_for(pipe)
        size = case.sizes[0]
        request = case.requests(size)[-1]
        others = [Request("another text", request.images, size)]
        for i, image in enumerate(request.images):
            changed = (*request.images[:i], 255 - image, *request.images[i + 1 :])
            others.append(Request(request.text, changed, size))
        conditions = [family.encode(pipe, [one], case.limit)[0] for one in (request, *others)]
        with torch.no_grad():
            latents = noise(pipe, size).expand(len(conditions), *[-1] * (noise(pipe, size).ndim - 1))
            led = velocity(pipe, latents, torch.full((len(conditions),), 0.7), conditions, 1.0)
        for other in led[1:]:
            assert (other - led[0]).abs().max() > 1e-4

    @pytest.mark.parametrize("num_steps", [2, 5])
    def test_times_are_those_of_the_pipeline(self, pipe, num_steps):
        case = self.case
        for size in case.sizes:
            latents = noise(pipe, size)
            case.call(pipe, case.requests(size)[0], latents, 1.0, num_steps, "")
            times = family_for(pipe).sigmas(pipe, num_steps, tuple(latents.shape[1:]))
            assert_close(times, pipe.scheduler.sigmas.cpu(), atol=1e-6, rtol=0)

    def test_a_batch_gives_the_velocities_of_its_rows_alone(self, pipe):
        case, family = self.case, family_for(pipe)
        size = case.sizes[-1]
        requests = case.requests(size)
        requests += [Request(TEXTS[1] + " again", requests[0].images, size)]  # one key, another length
        away = [Request("ugly", request.images, size) for request in requests]
        conditions = [family.encode(pipe, [one], case.limit)[0] for one in requests]
        negatives = [family.encode_negative(pipe, one, case.limit) for one in away]
        latents, sigma = noise(pipe, size, len(requests)), torch.linspace(0.9, 0.3, len(requests))
        for guidance in (1.0, 3.0):
            without = negatives if family.passes(guidance) > 1 else None
            with torch.no_grad():
                together = velocity(pipe, latents, sigma, conditions, guidance, without)
                for i, condition in enumerate(conditions):
                    one, empty = slice(i, i + 1), without and [without[i]]
                    alone = velocity(pipe, latents[one], sigma[one], [condition], guidance, empty)
                    assert_close(together[one], alone, atol=1e-5, rtol=1e-5)

    def test_conditions_are_on_the_cpu_and_do_not_depend_on_their_neighbours(self, pipe):
        case, family = self.case, family_for(pipe)
        requests = case.requests(case.sizes[0])
        with torch.no_grad():
            for request, together in zip(requests, family.encode(pipe, requests, case.limit), strict=True):
                (alone,) = family.encode(pipe, [request], case.limit)
                assert alone.keys() == together.keys()
                for name, value in together.items():
                    assert value.device.type == "cpu"
                    assert_close(value, alone[name], atol=1e-5, rtol=0)

    def test_compressed_pixels_have_the_shape_of_latents(self, pipe):
        family = family_for(pipe)
        for frames, height, width in self.case.sizes:
            shape = family.latent_shape(pipe, height, width, frames)
            video = (frames,) if len(shape) == 4 else ()
            pixels = torch.rand(2, *video, 3, height, width, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                latents = family.compress(pipe, pixels)
                decoded = family.decode(pipe, latents)
            assert latents.shape == (2, *shape)
            assert decoded.shape == pixels.shape and decoded.dtype == torch.float32

    def test_a_saved_adapter_makes_the_same_image_in_a_plain_pipeline(self, pipe, checkpoint, tmp_path):
        case, family = self.case, family_for(pipe)
        size, (guidance, negative) = case.sizes[-1], case.asked[-1]
        request, latents = case.requests(size)[-1], noise(pipe, size)
        network = copy.deepcopy(pipe.transformer)
        adapters.add_lora(network, 2, 6.0, family.targets)
        linear = [key.removesuffix(".base_layer") for key, _ in network.named_modules() if "base_l" in key]
        for target in family.targets:
            assert any(path.endswith(target) for path in linear), target
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=generator) / 8
        own = copy.copy(pipe)
        own.transformer = network
        made = ours(case, own, request, latents, guidance, negative=negative)
        assert (made - ours(case, pipe, request, latents, guidance, negative=negative)).abs().max() > 1e-3
        adapters.save_lora(network, tmp_path)
        plain = tiny.load(checkpoint(case.maker))
        self.load_adapter(plain, tmp_path)
        wanted = case.call(plain, request, latents, guidance, NUM_STEPS, negative)
        assert_close(made, wanted, atol=5 * case.tolerance, rtol=0)

    def test_bad_prompts_are_refused_before_weights_are_loaded(self, pipe, checkpoint):
        case, family = self.case, family_for(pipe)
        options = {"model": str(checkpoint(case.maker)), "max_sequence_length": case.limit}
        check = Flow.prompt_check(options)
        requests, (fewest, most) = case.requests(case.sizes[0]), family.images
        for request in requests:
            check(prompt_of(request))
        request = requests[-1]
        with pytest.raises(PromptError, match="tokens long, and the encoder"):
            check(prompt_of(Request(case.too_long, request.images)))
        with pytest.raises(ValueError, match="tokens long, and the encoder"):
            family.encode(pipe, [Request(case.too_long, request.images, case.sizes[0])], case.limit)
        wrong = [most + 1, *([fewest - 1] if fewest else [])]
        for count in wrong:
            with pytest.raises(PromptError, match=f"the prompt has {count} images"):
                check(prompt_of(Request("a cat", pictures(((16, 16),) * count))))

    def test_a_text_makes_no_control_token(self, pipe, monkeypatch):
        case = self.case
        request = case.requests(case.sizes[0])[-1]
        sources = [getattr(part, "tokenizer", part) for part in pipe.components.values()]
        special = {number for one in sources for number in getattr(one, "all_special_ids", ())}
        words = {word for one in sources for word in getattr(one, "all_special_tokens", ())}
        towers = [part for name, part in pipe.components.items() if name.startswith("text_enc") and part]
        read: list[list[int]] = []  # the tokens that each text encoder got
        for tower in towers:
            forward = tower.forward

            def noted(*ids, forward=forward, **options):
                read.append((ids[0] if ids else options["input_ids"])[0].tolist())
                return forward(*ids, **options)

            monkeypatch.setattr(tower, "forward", noted)

        def control(text):
            read.clear()
            with torch.no_grad(), reading_words(pipe, text) as worded:
                # A new family, since one may keep texts that it has encoded.
                family_for(pipe).encode(pipe, [replace(request, text=worded)], case.limit)
            # Padding is one token many times.
            return [sum(token in special for token, _ in groupby(ids)) for ids in read]

        for word in sorted(words):
            plain = "x" * len(word)  # as long, so that both are padded or none
            assert control(f"a {word} b") == control(f"a {plain} b"), word

    def test_a_policy_in_bfloat16_samples_and_reads_recorded_results(self, checkpoint):
        case = self.case
        options = {"dtype": "bfloat16", "max_sequence_length": case.limit}
        policy = flow(checkpoint(case.maker), {**MATCHING}, **options)
        frames, height, width = size = case.sizes[0]
        sides = {"height": height, "width": width, "num_frames": frames}
        prompts = [prompt_of(one) for one in case.requests(size)]
        alone = policy.family.unguided
        rows = denoise(policy, **sides, num_inference_steps=2, guidance_scale=alone).rollout(prompts)
        recorded = [policy.encode(row.prompt, row.outcomes[0]) for row in rows]
        with torch.no_grad():
            assert policy(policy.collate((*rows, *recorded))).logp.isfinite().all()

    @pytest.mark.parametrize("likelihood", ["diffusion.transition", MATCHING])
    def test_a_policy_rolls_out_and_learns(self, checkpoint, likelihood):
        case = self.case
        policy = flow(checkpoint(case.maker), likelihood, max_sequence_length=case.limit, lora_rank=2)
        frames, height, width = size = case.sizes[-1]
        sides = {"height": height, "width": width, "num_frames": frames}
        steps = {"num_inference_steps": NUM_STEPS, "guidance_scale": case.asked[-1][0]}
        solver = {} if likelihood is MATCHING else {"solver": "diffusion.flow_sde"}
        engine = denoise(policy, **sides, **steps, **solver)
        batch = policy.collate(engine.rollout([prompt_of(one) for one in case.requests(size)]))
        output = policy(batch)
        if solver:  # notes are float32
            assert_close(output.logp.detach().float(), batch.notes["logp"], atol=1e-5, rtol=1e-6)
        with torch.no_grad():  # float64, cut otherwise
            for rows, columns in batch.cuts(1, batch.steps.unit):
                cut = policy(batch.select(rows, columns)).logp
                assert_close(cut, output.logp.detach()[rows][:, columns], atol=case.rounding, rtol=0)
        optimizer = torch.optim.SGD([p for p in policy.network.parameters() if p.requires_grad], lr=1e-3)
        output.logp.sum().backward()
        learning = {name: p for name, p in policy.network.named_parameters() if p.requires_grad}
        assert all("lora" in name for name in learning)
        for target in policy.family.targets:  # LoRA starts with B = 0, so that A has no gradient yet
            grads = [p.grad for name, p in learning.items() if f"{target}.lora_B" in name]
            assert any(grad is not None and grad.abs().max() > 0 for grad in grads), target
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(policy(batch).logp, output.logp.detach())
