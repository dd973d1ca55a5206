"""The token policy: a vision-language model whose steps are the tokens of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import AtMost, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import policy
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded, pad_to
from mmrl.core.types import (
    Outcome,
    Prompt,
    Rollouts,
    Trajectory,
    Transcript,
    reading,
)
from mmrl.data.media_reader import MediaReader
from mmrl.runtime.modules import (
    DTYPES,
    apply_transforms,
    checkpoint_layers,
    copy_weights,
    keep_training_precision,
    widest_dtype,
)
from mmrl.runtime.weights import load_whole
from mmrl.vision.decoding.divergence import Taught, Teaching
from mmrl.vision.decoding.guidance import ImageTokens, Unconditional, check_guidance
from mmrl.vision.decoding.inner_outputs import OF_LOGITS, OF_STATES, InnerOptions
from mmrl.vision.decoding.packed import check_packing
from mmrl.vision.decoding.role_adapters import RoleAdapters, check_roles
from mmrl.vision.decoding.sequence_parallel import SequenceParallel, check_sequence_parallel
from mmrl.vision.decoding.step_model import StepModel
from mmrl.vision.decoding.token_steps import TokenRow, TokenSteps, distinct_prompts
from mmrl.vision.decoding.tree_reading import reads_trees
from mmrl.vision.models import loading
from mmrl.vision.models.chat_template import ChatTemplate
from mmrl.vision.models.image_writer import ImageWriter
from mmrl.vision.models.model_families import check_length, check_same_tokens
from mmrl.vision.models.plain_inputs import blank_media
from mmrl.vision.models.processor import PromptEncoder, pixel_limits
from mmrl.vision.models.prompt_check import PromptCheck, input_hash
from mmrl.vision.models.trained_part import TrainedPart, holds_part, part_of
from mmrl.vision.policies.recorded_rows import recorded_row
from mmrl.vision.tools.call_formats import encode_transcript


@policy
class Tokens:
    """A vision-language or language model of transformers; a step is one token of an answer.

    Trained weights are stored in float32; the computation is in `dtype`. Dropout is off. Media placeholders
    have probability 0.

    Args:
        model: Hub id or folder.
        dtype: Precision of frozen weights and of the computation.
        attn_implementation: Attention of transformers, such as "sdpa", "eager" or "flash_attention_2".
        lora_rank: Rank of a LoRA adapter that is trained instead of the model; 0: no new adapter.
        lora_alpha: LoRA alpha of the adapter; None: twice the rank.
        lora_target_modules: Names of the linear layers that get an adapter, such as "q_proj"; empty: all,
            including the vision tower unless it is frozen.
        adapter: Folder or hub id of a saved adapter, to train it further.
        roles: Names of roles; each gets a LoRA adapter over one base. The tag `role` of a row selects its
            adapter, in training and in the engine `vision.by_role`.
        freeze_vision_tower: Train only the language model. If false, the towers of images and sounds are
            trained, too (in Gemma 3n only the image tower).
        frozen: Train nothing and keep all weights in `dtype`, for a model that only answers, such as a judge.
        gradient_checkpointing: Recompute layers in the backward pass: less memory, more time.
        share_prefix: Whether rows share the keys and values of their prompt, and of longer common prefixes if
            this saves at least 1/20 of all tokens. If false, every row has its own copy.
        packing: Compute the rows of a micro-batch as one sequence without padding. A row attends to itself
            only and has its own positions, so losses and gradients are those of separate rows.
        sp_size: Number of processes that divide the tokens of each row in training, for long rows (sequence
            parallelism, Ulysses, arXiv 2309.14509). Needs `share_prefix: false`. 1: each has its own rows.
        min_pixels: Minimal pixels of an image after the image processor; None: the processor's default.
        max_pixels: Maximal pixels of an image after the image processor; None: the processor's default.
        chat_template_kwargs: Variables of the chat template, for all prompts: `{enable_thinking: false}`.
        guidance_scale: Scale s of classifier-free guidance, for a model that writes images. Logits of image
            tokens are u + s (c - u), where c are computed after the prompt and u after the negative prompt,
            in sampling and in training, with gradients through both. 1: no guidance, half the time.
        negative_prompt: Text that guidance leads away from.
        hot_temperature: Temperature of the output `logp_hot`, as a multiple of the sampling temperature.
        cold_temperature: Temperature of the output `logp_cold`, as a multiple of the sampling temperature.
        top_k: Number of tokens in the outputs `top_k_ids` and `top_k_logp`.
        rank_stride: Number of tokens between the prefixes of an answer whose `effective_rank` is measured.
        transform: Transforms of the model, such as pruning or quantisation. A trained part that a transform
            adds, such as the vector of `vision.steering`, is trained instead of the model.
    """

    outputs: frozenset[str] = OF_LOGITS | OF_STATES | {"reversed_logp"}  # computed on demand
    makes = "text"  # kind of outcomes, for commands that write them
    load_model = staticmethod(loading.load_model)

    def __init__(
        self,
        *,
        model: str,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        attn_implementation: str = "sdpa",
        lora_rank: NonNegativeInt = 0,
        lora_alpha: PositiveFloat | None = None,
        lora_target_modules: tuple[str, ...] = (),
        adapter: str = "",
        roles: tuple[str, ...] = (),
        freeze_vision_tower: bool = True,
        frozen: bool = False,
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
        packing: bool = False,
        sp_size: PositiveInt = 1,
        min_pixels: Annotated[PositiveInt, AtMost("max_pixels")] | None = None,
        max_pixels: PositiveInt | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        guidance_scale: NonNegativeFloat = 1.0,
        negative_prompt: str = "",
        hot_temperature: PositiveFloat = 1.2,
        cold_temperature: PositiveFloat = 0.8,
        top_k: PositiveInt = 20,
        rank_stride: PositiveInt = 40,
        transform: tuple[Callable, ...] = (),
    ) -> None:
        check_sequence_parallel(model, sp_size, share_prefix, attn_implementation, transform, roles)
        check_guidance(model, guidance_scale, negative_prompt)
        self.processor = loading.load_processor(model)
        check_packing(model, packing, attn_implementation, transform, sp_size)
        ChatTemplate(self.processor, chat_template_kwargs).ends()  # raises errors before loading weights
        self.model = self.load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        self.model = apply_transforms(self.model, transform)
        pixels = pixel_limits({"min_pixels": min_pixels, "max_pixels": max_pixels})
        self.prompt_encoder = PromptEncoder(
            self.processor, self.model.base_model, pixels=pixels, variables=chat_template_kwargs
        )
        self.images = ImageWriter.of(self.prompt_encoder)
        self.guidance_scale, self.negative_prompt = guidance_scale, negative_prompt
        shape = {"rank": lora_rank, "alpha": lora_alpha, "layers": lora_target_modules}
        self._adapt(adapter, roles, bool(transform), **shape, tower=not freeze_vision_tower)
        self.outputs = self.outputs - {"reversed_logp"} | (self.part.outputs if self.part else frozenset())
        self.compute, self.share_prefix, self.packing = DTYPES[dtype], share_prefix, packing
        self._choose_weights(freeze_vision_tower, frozen, gradient_checkpointing)
        self.inner = InnerOptions(hot_temperature, cold_temperature, top_k, rank_stride)
        self.teachers: list[Teaching] = []  # reference models that are teachers append themselves here
        self.module: nn.Module = StepModel(
            self.model,
            self.prompt_encoder.placeholders,
            compute=self.compute,
            checkpointed=gradient_checkpointing,
            share=share_prefix,
            blank={} if freeze_vision_tower else blank_media(self.prompt_encoder),
            inner=self.inner,
            part=self.part,
            together=SequenceParallel(self.model.base_model, sp_size) if sp_size > 1 else None,
            images=self.images and ImageTokens(self.images.ids, guidance_scale),
        )

    @staticmethod
    def check_folders(options: Mapping[str, Any], start: str = "") -> None:
        """Raise `ValueError` if weights are missing or belong to another model.

        Args:
            options: Options of the policy.
            start: Folder of initial weights.
        """
        model, adapter = str(options.get("model", "")), str(options.get("adapter") or "")
        loading.check_folders(model, adapter)
        if Path(model).expanduser().is_dir():
            scale = float(options.get("guidance_scale", 1))
            check_guidance(model, scale, str(options.get("negative_prompt") or ""))
        size, attention = int(options.get("sp_size", 1)), str(options.get("attn_implementation", "sdpa"))
        share, transform = bool(options.get("share_prefix", True)), options.get("transform")
        check_sequence_parallel(model, size, share, attention, transform, options.get("roles"))
        check_packing(model, bool(options.get("packing")), attention, transform, size)
        if start and (adapter or options.get("lora_rank")):
            loading.check_folders(model, start)
        elif start and not holds_part(Path(start)):
            loading.check_same_shapes(model, start)

    @staticmethod
    def prompt_check(options: Mapping[str, Any]) -> Callable[[Prompt], None]:
        """Create the check that raises `PromptError` for prompts a policy with these options cannot read."""
        variables = options.get("chat_template_kwargs")
        encoder = loading.load_encoder(
            str(options["model"]), pixels=pixel_limits(options), variables=variables
        )
        return PromptCheck(encoder)

    def _adapt(self, adapter: str, roles: tuple[str, ...], transformed: bool, **shape: Any) -> None:
        """Load the saved adapter, or add new adapters if any are configured."""
        rank, alpha = shape["rank"], shape["alpha"]
        if roles:
            check_roles(roles, new=bool(rank) and not adapter and not transformed)
        shape |= {"alpha": alpha or 2.0 * rank, "names": roles or ("default",)}
        self.adapter: Any = None
        if adapter:
            self.adapter = loading.load_adapter(self.model, adapter, rank=rank, alpha=alpha)
        elif rank:
            self.adapter = loading.add_adapter(self.model, **shape)
        self.roles = RoleAdapters(self.adapter, roles) if roles and self.adapter else None
        self.part: TrainedPart | None = self.roles if self.adapter else part_of(self.model)

    def _choose_weights(self, freeze_vision_tower: bool, frozen: bool, checkpointed: bool) -> None:
        """Select the trained weights and convert them to float32; enable gradient checkpointing if set."""
        if isinstance(self.part, nn.Module):
            self.model.requires_grad_(False)
            self.part.requires_grad_(True)
        elif self.adapter is None and freeze_vision_tower:
            self.model.requires_grad_(False)
            self.model.get_decoder().requires_grad_(True)
            self.model.get_output_embeddings().requires_grad_(True)
        if frozen:
            self.model.requires_grad_(False)
        if stays := self.prompt_encoder.family.frozen:
            self.core.get_submodule(stays).requires_grad_(False)
        keep_training_precision(self.model)
        self.packed = self.packing or checkpointed
        if checkpointed:
            checkpoint_layers(self.model)

    def check_steps_of(self, policy: Tokens) -> None:
        """Raise `ValueError` unless this model can read another policy's token ids and encoded images."""
        check_same_tokens(self.processor.tokenizer, self.model, policy)

    def reading_with(
        self, model: nn.Module, dtype: str, *, forbidden: list[int] | None = None, top_k: int = 0
    ) -> StepModel:
        """Create a module that computes log-probabilities of this policy's answers under a frozen model.

        `forbidden` (default: media placeholders) have probability 0; `top_k` overrides the policy's option.
        """
        return StepModel(
            model.requires_grad_(False),
            self.prompt_encoder.placeholders if forbidden is None else forbidden,
            compute=DTYPES[dtype],
            checkpointed=False,
            share=self.share_prefix,
            inner=replace(self.inner, top_k=top_k or self.inner.top_k),
        )

    @property
    def core(self) -> nn.Module:
        """The model without its head."""
        return self.model.base_model

    def render(self, prompt: Prompt) -> str:
        """Render a prompt with the chat template; media become `<image: 64 tokens>`."""
        return self.prompt_encoder.render(prompt)

    def input_hash(self, prompt: Prompt) -> str:
        """Hash the token ids of a prompt, and its media tensors."""
        return input_hash(self.prompt_encoder, prompt)

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> MediaReader:
        """Create the reader that loads the media of prompts."""
        return MediaReader.of_data(options, root)

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Encode a recorded answer, with its end token and earlier turns, as a row."""
        with reading(prompt):
            if outcome.image is None:
                return recorded_row(self.prompt_encoder, prompt, outcome)
            writer = self.images or ImageWriter(self.prompt_encoder)
            ids, chosen = writer.recorded(outcome)
            encoded = self.prompt_encoder.encode(prompt)
            check_length(encoded.next_position + len(ids) - 1, self.prompt_encoder.limit)
        tags = {"finish": "stop", **outcome.tags}
        answer = Outcome(outcome.text, outcome.image, end=len(ids), tags=tags, recorded=outcome.recorded)
        row = TokenRow(encoded, ids, chosen=chosen)
        return Trajectory(prompt, prompt.uid, (answer,), row, len(ids), {"token": ids}, on_policy=False)

    def encode_conversation(
        self, prompt: Prompt, outcome: Outcome, *, learn: str, max_length: int = 0
    ) -> Trajectory:
        """Encode a recorded answer as a row; `learn` selects the tokens to train on (see `recorded_row`)."""
        return recorded_row(self.prompt_encoder, prompt, outcome, learn=learn, max_length=max_length)

    def restore_rows(
        self, prompt: Prompt, notes: Mapping[str, Tensor], transcript: Transcript | None = None
    ) -> Trajectory:
        """Restore a row from values (T,) that the engine recorded per token, such as ids and temperature.

        A conversation is encoded again turn by turn from its transcript. Tokens that the engine inserted have
        the temperature 0.
        """
        ids, temperature = notes["token"].long(), float(notes["temperature"].max())
        chosen = None if notes["temperature"].all() else notes["temperature"] > 0
        script = transcript or Transcript((), (ids,), ())  # a single answer is a conversation of one turn
        turns = encode_transcript(self.prompt_encoder, prompt, script)
        if self.images and chosen is not None:
            outcome = self.images.outcome(ids, chosen)
        else:
            outcome = Outcome(text=self.prompt_encoder.text(turns[-1][1]), end=len(ids))
        restored = {name: note.float() for name, note in notes.items()} | {"token": ids}
        row = replace(TokenRow.of_turns(turns, temperature), chosen=chosen)
        return Trajectory(
            prompt, prompt.uid, (outcome,), row, len(ids), restored, on_policy=False, transcript=transcript
        )

    def pack(self, row: Trajectory) -> Trajectory:
        """Remove the encoded prompt from a row for another process, if that process can encode it again."""
        encodable = row.steps.prompt is self.prompt_encoder.encode(row.prompt)
        return replace(row, steps=replace(row.steps, prompt=None)) if encodable else row

    def unpack(self, row: Trajectory) -> Trajectory:
        """Add the encoded prompt to a row that another process packed."""
        if row.steps.prompt is not None:
            self.prompt_encoder.sources.add(row.steps.prompt, row.prompt)
            return row
        return replace(row, steps=replace(row.steps, prompt=self.prompt_encoder.encode(row.prompt)))

    def collate(self, rollouts: Rollouts) -> Batch:
        """Collate rows to a batch: pad answers on the right, and store every distinct prompt once."""
        rows: list[TokenRow] = [row.steps for row in rollouts]
        length = torch.tensor([len(row.ids) for row in rows])
        mask = (torch.arange(int(length.max()))[None] < length[:, None]).float()
        for i, row in enumerate(rows):
            if row.chosen is not None:
                mask[i, : len(row.ids)] = row.chosen.float()
        distinct, which = distinct_prompts([row.prompt for row in rows])
        ids = cat_padded([row.ids[None] for row in rows])
        suffixes = tuple(row.suffix for row in rows)
        temperature = torch.tensor([row.temperature for row in rows])
        steps = TokenSteps(distinct, which, ids, length, temperature, suffixes if any(suffixes) else ())
        steps = replace(steps, packing=self.packing)
        if self.share_prefix and reads_trees(self.model, packed=self.packed):
            steps = steps.with_tree(self.core)
        if self.images and self.guidance_scale != 1:
            answers = [row.ids for row in rows]
            negative = self.images.unconditional(self.negative_prompt)
            steps = replace(steps, unconditional=Unconditional.of(self.images, negative, answers))
        if self.part:
            steps = self.part.collate(steps, rollouts)
        # Missing values and padding are NaN. `token` and `temperature` are in `steps` instead.
        missing = torch.full((mask.shape[1],), torch.nan)
        notes = {
            name: cat_padded(
                [row.notes.get(name, missing[: row.length])[None] for row in rollouts], torch.nan
            )
            for name in sorted({name for row in rollouts for name in row.notes} - {"token", "temperature"})
        }
        return Batch.of(steps, mask, notes)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        taught = Taught.of(batch.others, self.teachers) if "divergence" in extra else None
        values = self.module(batch.steps, extra, taught)
        if taught:
            part = taught[:, : batch.steps.longest]
            values["divergence"] = part.with_spans(values["divergence"], values["logp"])
        width = batch.mask.shape[1]
        padded = {name: pad_to(value, width, 1) for name, value in values.items()}
        return StepOutput(padded.pop("logp"), padded)

    def merge(self) -> None:
        """Merge the adapter into the weights, so that `save` writes the whole model.

        Raises `ConfigError` if other weights, such as a steering vector, are trained instead of the model.
        """
        if part := self.part or part_of(self.model):
            raise ConfigError(part.cannot_merge)
        if self.adapter is not None:
            self.model, self.adapter = self.adapter.merge_and_unload(), None

    def save(self, folder: Path) -> None:
        """Write a folder with model (or adapter) and processor, which transformers (or peft) can load.

        If only a part is trained, such as a steering vector, the folder has this part instead of the model.
        """
        if self.part is not None:
            self.part.save(folder)
        elif self.adapter is not None:
            loading.save_adapter(self.adapter, folder)
        else:
            self.model.save_pretrained(str(folder))
        self.processor.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""
        if self.part is not None:
            self.part.load(folder)
            return
        if self.adapter is not None:
            loading.load_adapter_weights(self.adapter, folder)
            return
        # Read in the widest dtype of the file: trained weights are float32, whatever dtype the config names.
        widest = widest_dtype(self.model, folder)
        copy_weights(self.model, load_whole(type(self.model), folder, dtype=widest))
