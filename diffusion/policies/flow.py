"""The flow policy: a flow-matching image or video model of diffusers, trained step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
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
from mmrl.diffusion import adapters, loading
from mmrl.diffusion.encoded_prompts import EncodedPrompts, check_usable, digest
from mmrl.diffusion.flow_network import FlowNetwork
from mmrl.diffusion.frozen_parts import FrozenParts, Group, check_bits, group_of, set_vae_options
from mmrl.diffusion.model_family import Condition, PipelineFamily, Request, family_of, reading_words
from mmrl.diffusion.prompt_check import FlowPromptCheck, check_recorded
from mmrl.diffusion.sizes import places_by
from mmrl.diffusion.staged_network import chosen_networks, meets, most_calls, network_of
from mmrl.diffusion.steps import Conditioning, FlowRow, FlowSteps, Likelihood, SizedSteps
from mmrl.runtime.modules import DTYPES, apply_transforms, keep_training_precision, placement

BITS = "text_encoder_bits"
PACKAGES = {"diffusers": "diffusion"} | {f"{BITS}={bits}:bitsandbytes": "lowbit" for bits in (4, 8)}
CONDITION_BYTES = 2 << 30  # size of the CPU cache of encoded prompts


def check_negative(model: str, family: PipelineFamily, negative_prompt: str) -> None:
    """Raise `ConfigError` if a negative prompt is set for a model family that does not use one."""
    if negative_prompt and family.embedded_guidance:
        raise ConfigError(
            f"`negative_prompt` is '{negative_prompt}', but '{model}' takes guidance as an input of its "
            "network and reads no negative prompt; leave it out"
        )


@policy(packages=PACKAGES)
class Flow:
    """Policy that wraps a flow-matching pipeline of diffusers.

    Text encoders and autoencoder stay frozen; encoded texts are cached. Trained weights are float32; the
    network computes in `dtype`, and denoising steps are computed in float32. `evaluations` counts the rows
    that ran through the network; guided rows count twice.

    Args:
        model: Hub id or folder of the pipeline.
        likelihood: What a training step is, and its log-likelihood: `diffusion.matching` (a random time and
            noise) or `diffusion.transition` (a denoising step).
        dtype: Precision of the network's computation.
        networks: Networks to train in a pipeline with one for `high` and one for `low` noise. Steps at times
            that the other network handles have no gradient.
        lora_rank: Rank of a LoRA adapter on the frozen network; 0 trains the whole network.
        lora_alpha: The adapter is scaled by `lora_alpha` / rank. Default: twice the rank, or as in `adapter`.
        adapter: Folder of a saved adapter to train further. Its rank must be `lora_rank`; its other settings
            come from the folder.
        targets: Names of the modules that get LoRA; by default the names that the model family lists.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        negative_prompt: Text that classifier-free guidance (scale above 1) leads away from.
        max_sequence_length: Maximum tokens of a prompt; 0: the pipeline's default.
        transform: Transforms applied to the frozen network before LoRA is added, such as quantisation.
        text_encoder_bits: Bits per weight of the linear layers in the blocks of text encoders (image encoders
            too), by bitsandbytes; null keeps `dtype`. Needs LoRA; encoders in 8 bits cannot be offloaded.
        offload: Components on the CPU while the network runs: `text_encoders` (image encoders too), `vae`.
        encoded_prompts: Folder that caches encoded prompts for all runs of a pipeline. Text encoders are only
            loaded if a prompt is missing, and are then moved to the CPU as with `offload`.
        vae_tiling: Encode and decode images in overlapping tiles. Saves memory, and changes pixels a little.
        vae_slicing: Encode and decode one image at a time.
    """

    outputs = frozenset({"mean", "std", "dt", "velocity", "time", "target", "error"})
    makes = "images"  # kind of outcomes, for commands that write them to files

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
        transform: tuple[Callable, ...] = (),
        text_encoder_bits: Literal[4, 8] | None = None,
        encoded_prompts: str = "",
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
        if transform and not lora_rank and placement().learns:
            raise ConfigError("`transform` changes weights that cannot be trained; set `lora_rank`")
        self.bits, moved = text_encoder_bits, encoded_prompts or "text_encoders" in offload
        check_bits(model, self.bits, adapted=lora_rank or not placement().learns, moved=moved)
        encoders = f"{dtype}, {self.bits} bits" if self.bits else dtype
        self.encoded = EncodedPrompts.at(encoded_prompts, model, config, self.stages, encoders)
        self._load_parts(model, dtype, transform, offload)
        self.likelihood, self.outputs = likelihood, likelihood.outputs
        self.network: nn.Module = network_of(self.pipe, self.stages)
        self.trained: dict[str, Any] = {name: getattr(self.pipe, name) for name in chosen}
        self.negative_prompt = negative_prompt
        self.max_sequence_length = max_sequence_length or self.family.default_length(self.pipe)
        self.adapted, self.transformed = bool(lora_rank), bool(transform or self.bits)
        for name, network in self.trained.items():
            if adapter:
                adapters.continue_lora(network, adapters.place_of(Path(adapter), name), lora_rank, lora_alpha)
            elif lora_rank:
                modules = adapters.check_targets(network, targets) or self.family.targets
                adapters.add_lora(network, lora_rank, lora_alpha or 2.0 * lora_rank, modules)
            elif not transform:
                network.requires_grad_(True)
            if gradient_checkpointing:
                network.enable_gradient_checkpointing()
        keep_training_precision(self.network)  # float32: small updates would be lost in 16 bits
        self.vae_options = [vae_tiling, vae_slicing]
        set_vae_options(self.pipe.vae, *self.vae_options)
        self.module: nn.Module = FlowNetwork(self.network, self.family, DTYPES[dtype])
        nbytes = lambda condition: sum(value.nbytes for value in condition.values())
        self.conditions: ByteLRU[Condition] = ByteLRU(CONDITION_BYTES, nbytes)
        self.evaluations = 0  # rows that ran through the network

    def _load_parts(
        self, model: str, dtype: str, transform: Sequence[Callable], offload: Sequence[Group]
    ) -> None:
        """Load the pipeline: each component onto the device, or into CPU memory until it is needed."""
        offloaded: set[Group] = {*offload, *(["text_encoders"] if self.encoded else [])}
        waiting = {*offloaded, *(["text_encoders"] if self.bits else [])}
        place: Callable[[str], Group | None] = lambda part: group_of(part, self.stages)
        self.pipe = loading.load_pipeline(
            model,
            dtype=dtype,
            on_cpu=lambda part: place(part) in waiting or bool(transform and not place(part)),
            later=lambda part: self.encoded is not None and place(part) == "text_encoders",
            bits=self.bits,
        )
        for name in self.stages if transform else ():
            self.pipe.register_modules(**{name: apply_transforms(getattr(self.pipe, name), transform)})
        if dtype == "float16" and self.pipe.vae is not None:
            self.pipe.vae.to(torch.float32)  # decoders overflow in float16
        loads = self.encoded is not None and not placement().empty
        read = partial(loading.load_part, model, dtype=dtype, bits=self.bits)
        self.frozen = FrozenParts(self.pipe, self.stages, offloaded, read if loads else None)

    # ---- before a weight is loaded

    @staticmethod
    def check_folders(options: Mapping[str, Any], start: str = "") -> None:
        """Raise `ValueError` for unusable files of the pipeline, the adapter, or the weights in `start`."""
        model, adapter = str(options.get("model", "")), str(options.get("adapter") or "")
        encoded = str(options.get("encoded_prompts") or "")
        check_usable(encoded, model)
        moved, bits = encoded or "text_encoders" in (options.get("offload") or ()), options.get(BITS)
        check_bits(model, bits, adapted=options.get("lora_rank"), moved=moved)
        chosen: tuple[str, ...] = ()  # networks to train; unknown before the download
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

    check_answers = staticmethod(check_recorded)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    @property
    def precision(self) -> torch.dtype:
        """The dtype in which denoising steps are computed: float32, or float64 if the network is float64."""
        return torch.promote_types(next(self.network.parameters()).dtype, torch.float32)

    # ---- for engines

    def condition(self, request: Request, *, negative: bool = False) -> Condition:
        """Encode a request, or with `negative` the negative prompt in its place; results are cached."""
        text = self.negative_prompt if negative else request.text

        @torch.no_grad()
        def encode() -> Condition:
            # Source images go through the autoencoder.
            used: list[Group] = ["text_encoders", "vae"] if request.images else ["text_encoders"]
            self.frozen.on(self.device, *used)
            try:
                self.family.check_count(len(request.images))
                with reading_words(self.pipe, text) as words:
                    worded = replace(request, text=words)
                    if negative:
                        return self.family.encode_negative(self.pipe, worded, self.max_sequence_length)
                    return self.family.encode(self.pipe, [worded], self.max_sequence_length)[0]
            except ValueError as error:
                raise ValueError(f"cannot read the prompt '{text}': {error}") from error

        key = self._key(request, negative)
        make = encode if self.encoded is None else partial(self.encoded.get, key, encode)
        return self.conditions.get(str(key), make)

    def _key(self, request: Request, negative: bool) -> list[Any]:
        """Return the cache key of a condition: all inputs that affect the encoding, as a JSON value."""
        text = self.negative_prompt if negative else request.text
        # Without images, the condition does not depend on the result size, so all sizes share it.
        seen = [request.size, *map(digest, request.images), *self.vae_options] if request.images else []
        return [text, negative, self.max_sequence_length, seen]

    def stored(self, requests: Sequence[Request]) -> bool:
        """Whether the disk cache has the encodings of all requests; False without requests."""
        encoded = self.encoded
        if encoded is None or not requests:
            return False
        return all(encoded.file(self._key(request, False)).is_file() for request in requests)

    @staticmethod
    def prompt_check(options: Mapping[str, Any]) -> FlowPromptCheck:
        """Create the prompt check for a policy with these options; see `FlowPromptCheck`."""
        return FlowPromptCheck(str(options["model"]), options.get("max_sequence_length") or 0)

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> ReadMedia:
        """Return a reader of a prompt's images; for a model without image input, it raises `RowError`."""
        return MediaReader.of_data(options, root) if self.family.images[1] else no_media

    def passes(self, guidance: float) -> int:
        """Return the number of network calls per velocity: 2 with classifier-free guidance, otherwise 1."""
        return 1 if self.family.single_pass(self.pipe) else self.family.passes(guidance)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict velocities (B, *L) of latents at times `sigma` (B,), in float32 or float64."""
        keys = [self.family.batch_key(condition) for condition in conditioning.conditions]
        groups = places_by(keys[which] for which in conditioning.which.tolist())
        # Calls of a sharded network are collective, so all processes must make the same number.
        counts = type(self.family).batch_key is not PipelineFamily.batch_key and meets(self.module)
        idle = most_calls(len(groups), self.device) - len(groups) if counts else 0
        if len(groups) <= 1 and not idle:
            return self._velocity(latents, sigma, conditioning)
        order = torch.tensor([row for rows in groups for row in rows])
        parts = order.split([len(rows) for rows in groups])
        velocities = [self._velocity(latents[rows], sigma[rows], conditioning[rows]) for rows in parts]
        first = torch.zeros(1, dtype=torch.int64)
        spare = [self._velocity(latents[:1], sigma[:1], conditioning[first]) for _ in range(idle)]
        return torch.cat(velocities)[order.argsort().to(self.device)] + sum(
            one.flatten()[:0].sum() for one in spare
        )

    def _velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict velocities of rows whose conditions can be batched together."""
        device = self.device
        # Stack prompts and negative prompts together, to pad all of them to one length.
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
        self.frozen.make_room()
        inputs = latents.to(device), sigma.to(device), rows_of(conditions), without
        return self.module(*inputs, conditioning.guidance)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to uint8 images (B, 3, height, width) or videos (B, F, 3, height, width), on CPU."""
        self.frozen.on(self.device, "vae")
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
        self.frozen.on(self.device, "vae")
        latents = self.family.compress(self.pipe, pixels)[0].to(self.precision).cpu()
        nothing = torch.zeros(0)  # no schedule and no recorded steps
        frames = self.family.frames_per_latent(self.pipe, tuple(latents.shape))
        row = FlowRow(condition, latents[None], nothing.long(), nothing, self.family.unguided, frames=frames)
        return Trajectory(prompt, prompt.uid, (outcome,), row, self.likelihood.length(row), on_policy=False)

    def collate(self, rollouts: Rollouts) -> Batch:
        """Batch rollouts into training steps; all rows have the same number of steps."""
        steps = self.likelihood.collate([row.steps for row in rollouts], [row.prompt.uid for row in rollouts])
        num_steps = max(row.length for row in rollouts)
        missing = torch.full((num_steps,), float("nan"))
        names = sorted({name for row in rollouts for name in row.notes})
        notes = {name: cat_padded([row.notes.get(name, missing)[None] for row in rollouts]) for name in names}
        return Batch.of(steps, torch.ones(len(rollouts), num_steps), notes)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        sized: Any = batch.steps
        parts: Sequence[FlowSteps] = sized.parts if isinstance(sized, SizedSteps) else (sized,)
        idle = most_calls(len(parts), self.device) - len(parts) if meets(self.module) else 0
        outputs = [self._read(part, extra) for part in parts]
        nothing = [self._read(parts[0], frozenset()).logp.flatten()[:0].sum() for _ in range(idle)]
        whole = outputs[0] if len(parts) == 1 else sized.join(outputs)
        return replace(whole, logp=whole.logp + sum(nothing)) if nothing else whole

    def _read(self, steps: FlowSteps, extra: Set[str]) -> StepOutput:
        """Run the network on steps with latents of one size; returns log-probabilities and other outputs."""
        latents, times = steps.states()  # (N, T, *L), (N, T)
        rows = torch.arange(len(times)).repeat_interleave(times.shape[1])
        velocity = self.velocity(latents.flatten(0, 1), times.flatten(), steps.conditioning[rows])
        return steps.read(velocity.unflatten(0, times.shape), extra)

    def merge(self) -> None:
        """Merge the adapter into the weights, so that `save` writes the whole pipeline."""
        if self.transformed:
            raise ConfigError(
                "an adapter is merged into a pipeline in full precision; set `policy.transform=[]` and "
                "`policy.text_encoder_bits=null`"
            )
        for network in self.trained.values() if self.adapted else ():
            network.fuse_lora()
            network.unload_lora()
        self.adapted = False

    def save(self, folder: Path) -> None:
        """Save the adapter in the format of diffusers' `load_lora_weights`, or else the whole pipeline."""
        if self.adapted:
            for name, network in self.trained.items():
                adapters.save_lora(network, adapters.place_of(folder, name))
        else:
            self.frozen.read_all()
            self.pipe.save_pretrained(str(folder), safe_serialization=True)

    def load(self, folder: Path) -> None:
        """Load weights written by `save`, bit for bit."""
        if self.adapted:
            for name, network in self.trained.items():
                adapters.load_lora(network, adapters.place_of(folder, name))
            return
        for name in self.stages:
            loading.load_network(getattr(self.pipe, name), folder, name)
