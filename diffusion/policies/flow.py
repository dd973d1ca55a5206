"""The flow policy: a flow-matching image or video model of diffusers, trained step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveFloat
from mmrl.config.registry import policy
from mmrl.config.schema import Piece
from mmrl.core.byte_lru import ByteLRU
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory, reading
from mmrl.data.media_reader import MediaReader
from mmrl.data.messages import ReadMedia, no_media
from mmrl.data.text_files import RecordedAnswers
from mmrl.diffusion import adapters, loading
from mmrl.diffusion.frozen_parts import FrozenParts, Group, set_vae_options
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request, family_of, reading_words, size_of
from mmrl.diffusion.staged_network import StagedNetwork, chosen_networks, meets, most_calls, network_of
from mmrl.diffusion.steps import Conditioning, FlowRow, FlowSteps, Likelihood
from mmrl.runtime.modules import DTYPES, LOW, keep_training_precision, loading_onto

CONDITION_BYTES = 2 << 30  # of encoded texts, cached on the CPU


class FlowNetwork(nn.Module):
    """A network with its family's forward pass and guidance, as one trainable module."""

    def __init__(self, network: nn.Module, family: PipelineFamily, compute: torch.dtype) -> None:
        super().__init__()
        self.network, self.family, self.compute = network, family, compute

    def forward(
        self, latents: Tensor, sigma: Tensor, condition: Condition, empty: Condition | None, guidance: float
    ) -> Tensor:
        """Compute guided velocities (B, *L) in float32 or better.

        With `empty`, the condition of the negative prompt, both velocities are computed in one batch.
        """
        scale = torch.full_like(sigma, guidance)
        if empty is not None:
            condition = {name: torch.cat([value, condition[name]]) for name, value in empty.items()}
            latents, sigma, scale = (torch.cat([part, part]) for part in (latents, sigma, scale))

        def run(network: nn.Module, rows: Tensor | slice) -> Tensor:
            texts = {name: value[rows] for name, value in condition.items()}
            return self.family.velocity(network, latents[rows], sigma[rows], texts, scale[rows])

        with torch.autocast(latents.device.type, self.compute, enabled=self.compute in LOW):
            staged = isinstance(self.network, StagedNetwork)
            velocity = self.network(run, sigma) if staged else run(self.network, slice(None))
            velocity = velocity if velocity.dtype == torch.float64 else velocity.float()
        if empty is None:
            return velocity
        without, with_text = velocity.chunk(2)  # in the order of the concatenation above
        return self.family.guide(with_text, without, guidance)


def digest(image: Tensor) -> bytes:
    """Hash the shape and pixels of an image."""
    return blake2b(image.contiguous().numpy(), person=repr(tuple(image.shape)).encode()[:16]).digest()


def check_negative(model: str, family: PipelineFamily, negative_prompt: str) -> None:
    """Raise `ConfigError` for a negative prompt of a family that does not use one."""
    if negative_prompt and family.embedded_guidance:
        raise ConfigError(
            f"`negative_prompt` is '{negative_prompt}', but '{model}' takes guidance as an input of its "
            "network and reads no negative prompt; leave it out"
        )


def sizes_of(answers: Sequence[Outcome]) -> list[tuple[int, ...]]:
    """Frames, height and width of recorded images and videos."""
    if isinstance(answers, RecordedAnswers):
        return answers.sizes()
    return [size_of(answer) for answer in answers if answer.image is not None or answer.video is not None]


@policy(packages={"diffusers": "diffusion"})
class Flow:
    """A flow-matching pipeline of diffusers; the likelihood decides what a training step is.

    Text encoders and decoder stay frozen; encoded texts are cached. Trained weights are float32 and computed
    with in `dtype`; the arithmetic of steps is float32. `evaluations` counts the rows that went through the
    network, guided rows twice.

    Args:
        model: Hub id or folder of the pipeline.
        likelihood: What a step is: `diffusion.matching` or `diffusion.transition`.
        dtype: Precision of the network's computation.
        networks: Of a pipeline with networks for high and low noise, those that are trained. Steps at times
            of the other one have no gradient.
        lora_rank: Rank of a trained adapter over the frozen network; 0 trains the whole network.
        lora_alpha: Scale of the adapter, times 1 / rank; by default twice the rank, or that of `adapter`.
        adapter: Folder of a saved adapter of that rank to continue from, with its own settings.
        targets: Names of the modules that get LoRA; by default those of the model's family.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        negative_prompt: The text that guidance above 1 leads away from.
        max_sequence_length: Tokens of a prompt; 0 is the pipeline's default.
        offload: Parts that are on the CPU except during use: `text_encoders` (image encoders too), `vae`.
        vae_tiling: Encode and decode images in overlapping tiles. Saves memory, and changes pixels a little.
        vae_slicing: Encode and decode one image at a time.
    """

    outputs = frozenset({"mean", "std", "dt", "velocity", "time", "target", "error"})
    makes = "images"  # what outcomes hold, for commands that write them

    def __init__(
        self,
        *,
        model: str,
        likelihood: Likelihood = Piece("diffusion.matching"),
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        networks: Literal["both", "high", "low"] = "both",
        lora_rank: NonNegativeInt = 0,
        lora_alpha: PositiveFloat | None = None,
        adapter: str = "",
        targets: Sequence[str] = (),
        gradient_checkpointing: bool = False,
        negative_prompt: str = "",
        max_sequence_length: NonNegativeInt = 0,
        offload: Sequence[Literal["text_encoders", "vae"]] = (),
        vae_tiling: bool = False,
        vae_slicing: bool = False,
    ) -> None:
        config = loading.config_of(model)
        self.family = family_of(config["_class_name"])
        self.stages = self.family.stages(config)
        chosen = chosen_networks(self.stages, networks)
        check_negative(model, self.family, negative_prompt)
        if adapter and not lora_rank:
            raise ValueError(f"to go on with the adapter '{adapter}', `lora_rank` must name its rank")
        if adapter:
            adapters.check_unused(Path(adapter), self.stages.keys() - chosen)
        self.pipe = loading.load_pipeline(model, dtype=dtype)
        self.likelihood, self.outputs = likelihood, likelihood.outputs
        self.network: nn.Module = network_of(self.pipe, self.stages)
        self.trained: dict[str, Any] = {name: getattr(self.pipe, name) for name in chosen}
        self.negative_prompt = negative_prompt
        self.max_sequence_length = max_sequence_length or self.family.default_length(self.pipe)
        self.adapted = bool(lora_rank)
        for name, network in self.trained.items():
            if adapter:
                adapters.continue_lora(network, adapters.place_of(Path(adapter), name), lora_rank, lora_alpha)
            elif lora_rank:
                modules = adapters.check_targets(network, targets) or self.family.targets
                adapters.add_lora(network, lora_rank, lora_alpha or 2.0 * lora_rank, modules)
            else:
                network.requires_grad_(True)
            if gradient_checkpointing:
                network.enable_gradient_checkpointing()
        keep_training_precision(self.network)  # updates vanish in 16 bits
        if dtype == "float16" and self.pipe.vae is not None:
            self.pipe.vae.to(torch.float32)  # decoders overflow in float16
        set_vae_options(self.pipe.vae, vae_tiling, vae_slicing)
        self.frozen = FrozenParts(self.pipe, self.stages, offload)
        self.module: nn.Module = FlowNetwork(self.network, self.family, DTYPES[dtype])
        nbytes = lambda condition: sum(value.nbytes for value in condition.values())
        self.conditions: ByteLRU[Condition] = ByteLRU(CONDITION_BYTES, nbytes)
        self.evaluations = 0  # rows through the network

    # ---- before a weight is loaded

    @staticmethod
    def check_folders(options: Mapping[str, Any], start: str = "") -> None:
        """Raise `ValueError` for unusable files of the pipeline, the adapter or weights in `start`."""
        model, adapter = str(options.get("model", "")), str(options.get("adapter") or "")
        chosen: tuple[str, ...] = ()  # unknown for a model of the hub
        if Path(model).expanduser().is_dir():
            config = loading.config_of(model)
            family = family_of(config["_class_name"])
            chosen = chosen_networks(family.stages(config), str(options.get("networks") or "both"))
            check_negative(model, family, str(options.get("negative_prompt") or ""))
            loading.check_weights(model)
        for folder in filter(None, (adapter, start)):
            if Path(folder).is_dir() and (adapter or options.get("lora_rank")):
                for place in adapters.places_in(Path(folder), chosen):
                    adapters.read_lora(place)
            elif Path(folder).is_dir():
                loading.check_weights(folder)

    @staticmethod
    def check_answers(options: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[int, str]:
        """Reasons, by index of the prompt, against learning from a recorded image or video.

        Sizes are read from file headers, without decoding.
        """
        with loading_onto(None, empty=True):
            pipe = loading.load_pipeline(str(options["model"]), dtype="float32")
        family, faults, wrong = family_of(type(pipe).__name__), dict[tuple[int, ...], str](), {}
        if family.refuses_recorded:
            return {i: family.refuses_recorded for i, prompt in enumerate(prompts) if prompt.answers}
        for index, prompt in enumerate(prompts):
            for frames, height, width in sizes_of(prompt.answers):
                if (size := (frames, height, width)) not in faults:
                    try:
                        family.latent_shape(pipe, height, width, frames)
                        faults[size] = ""
                    except ValueError as error:
                        faults[size] = str(error)
                if faults[size]:
                    wrong[index] = faults[size]
        return wrong

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    @property
    def precision(self) -> torch.dtype:
        """The dtype of the steps' arithmetic: float32, or float64 if the network is."""
        return torch.promote_types(next(self.network.parameters()).dtype, torch.float32)

    # ---- for engines

    def condition(self, request: Request, *, negative: bool = False) -> Condition:
        """Encode a prompt, or with `negative` the negative prompt in its place; the result is cached."""
        text = self.negative_prompt if negative else request.text

        @torch.no_grad()
        def encode() -> Condition:
            # Source images go through the autoencoder.
            used: list[Group] = ["text_encoders", "vae"] if request.images else ["text_encoders"]
            try:
                self.family.check_count(len(request.images))
                with self.frozen.on(self.device, *used), reading_words(self.pipe, text) as words:
                    worded = replace(request, text=words)
                    if negative:
                        return self.family.encode_negative(self.pipe, worded, self.max_sequence_length)
                    return self.family.encode(self.pipe, [worded], self.max_sequence_length)[0]
            except ValueError as error:
                raise ValueError(f"cannot read the prompt '{text}': {error}") from error

        # Conditions of texts alone do not depend on the size, so that sizes share them.
        seen = (request.size, *map(digest, request.images)) if request.images else ()
        return self.conditions.get((text, negative, seen), encode)

    @staticmethod
    def prompt_check(options: Mapping[str, Any]) -> Callable[[Prompt], None]:
        """Make a function that raises `PromptError` for prompts too long for a policy of these options."""
        with loading_onto(None, empty=True):
            pipe = loading.load_pipeline(str(options["model"]), dtype="bfloat16")
        family = family_of(type(pipe).__name__)
        longest = options.get("max_sequence_length") or family.default_length(pipe)

        def check(prompt: Prompt) -> None:
            with reading(prompt), reading_words(pipe, prompt.text) as words:
                family.check_images(prompt)
                family.check_text(pipe, words, longest)

        return check

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> ReadMedia:
        """Make the reader of a prompt's images; that of a model of texts alone raises `RowError`."""
        return MediaReader.of_data(options, root) if self.family.images[1] else no_media

    def passes(self, guidance: float) -> int:
        """Count the network calls of one guided velocity."""
        return 1 if self.family.single_pass(self.pipe) else self.family.passes(guidance)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Compute velocities (B, *L) of latents at times (B,), in the precision of steps."""
        keys = [self.family.batch_key(condition) for condition in conditioning.conditions]
        groups: dict[Hashable, list[int]] = {}  # rows by the key of their condition
        for row, which in enumerate(conditioning.which.tolist()):
            groups.setdefault(keys[which], []).append(row)
        # Processes of a sharded network take part in each other's calls, so all make equally many.
        counts = type(self.family).batch_key is not PipelineFamily.batch_key and meets(self.module)
        idle = most_calls(len(groups), self.device) - len(groups) if counts else 0
        if len(groups) <= 1 and not idle:
            return self._velocity(latents, sigma, conditioning)
        order = torch.tensor([row for rows in groups.values() for row in rows])
        parts = order.split([len(rows) for rows in groups.values()])
        velocities = [self._velocity(latents[rows], sigma[rows], conditioning[rows]) for rows in parts]
        first = torch.zeros(1, dtype=torch.int64)
        spare = [self._velocity(latents[:1], sigma[:1], conditioning[first]) for _ in range(idle)]
        return torch.cat(velocities)[order.argsort().to(self.device)] + sum(
            one.flatten()[:0].sum() for one in spare
        )

    def _velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Compute velocities of rows whose conditions can be stacked."""
        device = self.device
        # Conditions and negative prompts are stacked together, so that all are padded to one length.
        conditions, negatives = conditioning.conditions, conditioning.negatives
        distinct = {id(one): one for one in (*conditions, *negatives)}
        stacked = self.family.stack([*distinct.values()])
        stacked = {name: value.to(device) for name, value in stacked.items()}
        index = {key: i for i, key in enumerate(distinct)}

        def rows_of(several: Sequence[Condition]) -> Condition:
            rows = torch.tensor([index[id(one)] for one in several])[conditioning.which].to(device)
            return {name: value[rows] for name, value in stacked.items()}  # (B, ...)

        without = rows_of(negatives) if conditioning.passes > 1 else None
        self.evaluations += len(latents) * conditioning.passes
        inputs = latents.to(device), sigma.to(device), rows_of(conditions), without
        return self.module(*inputs, conditioning.guidance)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode images (B, 3, height, width) or videos (B, F, 3, height, width), uint8, on the CPU."""
        with self.frozen.on(self.device, "vae"):
            pixels = self.family.decode(self.pipe, latents.to(self.device))
        broken = ~pixels.flatten(1).isfinite().all(1)
        if broken.any():
            raise FloatingPointError(
                f"the decoder made {int(broken.sum())} of {len(pixels)} images that hold NaN or infinity "
                f"out of finite latents (largest {latents.abs().max():.3g}); its precision overflows: set "
                "`policy.dtype` to bfloat16 or float32"
            )
        return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu()

    # ---- for the training loop

    @torch.no_grad()
    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Encode a recorded image or video into a row without a denoising path."""
        recorded = outcome.image if outcome.video is None else outcome.video
        if recorded is None:
            raise ValueError(
                f"a recorded answer of prompt '{prompt.uid}' holds neither an image nor a video, which "
                "`diffusion.flow` learns from"
            )
        frames = 1 if outcome.video is None else len(outcome.video)
        try:
            self.family.latent_shape(self.pipe, *recorded.shape[-2:], frames)
        except ValueError as error:
            raise ValueError(
                f"a recorded answer of prompt '{prompt.uid}' cannot be learned from: {error}; set `height` "
                "and `width` of the data, which crop and resize, or resize its file"
            ) from error
        with reading(prompt):
            condition = self.condition(Request.of(prompt, (frames, *recorded.shape[-2:])))
        pixels = recorded[None].to(self.device) / 255  # (1, 3, height, width) or (1, F, 3, height, width)
        with self.frozen.on(self.device, "vae"):
            latents = self.family.compress(self.pipe, pixels)[0].to(self.precision).cpu()
        nothing = torch.zeros(0)  # no schedule and no recorded steps
        frames = self.family.frames_per_latent(self.pipe, tuple(latents.shape))
        row = FlowRow(condition, latents[None], nothing.long(), nothing, self.family.unguided, frames=frames)
        return Trajectory(prompt, prompt.uid, (outcome,), row, self.likelihood.length(row), on_policy=False)

    def collate(self, rollouts: Rollouts) -> Batch:
        """Batch rows; all have the same number of steps."""
        steps = self.likelihood.collate([row.steps for row in rollouts], [row.prompt.uid for row in rollouts])
        num_steps = max(row.length for row in rollouts)
        missing = torch.full((num_steps,), float("nan"))
        names = sorted({name for row in rollouts for name in row.notes})
        notes = {name: cat_padded([row.notes.get(name, missing)[None] for row in rollouts]) for name in names}
        return Batch.of(steps, torch.ones(len(rollouts), num_steps), notes)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        steps: FlowSteps = batch.steps
        latents, times = steps.states()  # (N, T, *L), (N, T)
        rows = torch.arange(len(times)).repeat_interleave(times.shape[1])
        velocity = self.velocity(latents.flatten(0, 1), times.flatten(), steps.conditioning[rows])
        return steps.read(velocity.unflatten(0, times.shape), extra)

    def merge(self) -> None:
        """Merge the adapter into the weights, so that `save` writes the whole pipeline."""
        for network in self.trained.values() if self.adapted else ():
            network.fuse_lora()
            network.unload_lora()
        self.adapted = False

    def save(self, folder: Path) -> None:
        """Write the adapter in the format of the pipeline's `load_lora_weights`, or the whole pipeline."""
        if self.adapted:
            for name, network in self.trained.items():
                adapters.save_lora(network, adapters.place_of(folder, name))
        else:
            self.pipe.save_pretrained(str(folder), safe_serialization=True)

    def load(self, folder: Path) -> None:
        """Load weights written by `save`, bit for bit."""
        if self.adapted:
            for name, network in self.trained.items():
                adapters.load_lora(network, adapters.place_of(folder, name))
            return
        for name in self.stages:
            loading.load_network(getattr(self.pipe, name), folder, name)
