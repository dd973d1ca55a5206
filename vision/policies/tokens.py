"""The token policy: a vision-language model whose steps are the tokens of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import policy
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded, pad_to
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory, reading
from mmrl.data.media_reader import MediaReader
from mmrl.runtime.modules import (
    DTYPES,
    apply_transforms,
    copy_weights,
    keep_training_precision,
    widest_dtype,
)
from mmrl.runtime.output_head import OutputHead
from mmrl.runtime.weights import load_whole
from mmrl.vision.decoding.inner_outputs import (
    OF_LOGITS,
    OF_STATES,
    InnerOptions,
    teacher_of,
)
from mmrl.vision.decoding.role_adapters import RoleAdapters, check_roles
from mmrl.vision.decoding.step_model import StepModel
from mmrl.vision.decoding.token_steps import (
    TokenRow,
    TokenSteps,
    distinct_prompts,
)
from mmrl.vision.decoding.tree_reading import reads_trees
from mmrl.vision.models import loading
from mmrl.vision.models.chat_template import ChatTemplate
from mmrl.vision.models.model_families import check_length
from mmrl.vision.models.processor import PromptEncoder, pixel_limits
from mmrl.vision.models.prompt_check import PromptCheck
from mmrl.vision.models.trained_part import TrainedPart, holds_part, part_of


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
        freeze_vision_tower: Train the language model only; otherwise the vision tower too.
        frozen: Train nothing and keep all weights in `dtype`, for a model that only answers, such as a judge.
        gradient_checkpointing: Recompute layers in the backward pass: less memory, more time.
        share_prefix: Whether rows share the keys and values of their prompt, and of longer common prefixes if
            that saves a twentieth of all tokens. If false, every row gets a copy.
        min_pixels: Minimal pixels of an image after the image processor; None: the processor's default.
        max_pixels: Maximal pixels of an image after the image processor; None: the processor's default.
        hot_temperature: Temperature of the output `logp_hot`, in units of the sampling temperature.
        cold_temperature: Temperature of the output `logp_cold`, in the same units.
        top_k: Number of tokens in the outputs `top_k_ids` and `top_k_logp`.
        rank_stride: Steps between the prefixes whose `effective_rank` is measured.
        transform: Transforms of the model, such as pruning or quantisation. A trained part that a transform
            adds, such as the vector of `vision.steering`, is trained instead of the model.
    """

    outputs: frozenset[str] = OF_LOGITS | OF_STATES | {"reversed_logp"}  # computed only if a piece reads them
    makes = "text"  # kind of outcomes, for commands that write outcomes

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
        min_pixels: Annotated[PositiveInt, AtMost("max_pixels")] | None = None,
        max_pixels: PositiveInt | None = None,
        hot_temperature: PositiveFloat = 1.2,
        cold_temperature: PositiveFloat = 0.8,
        top_k: PositiveInt = 20,
        rank_stride: PositiveInt = 40,
        transform: tuple[Callable, ...] = (),
    ) -> None:
        self.processor = loading.load_processor(model)
        ChatTemplate(self.processor).ends()  # fails before weights are loaded
        self.model = loading.load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        self.model = apply_transforms(self.model, transform)
        pixels = pixel_limits({"min_pixels": min_pixels, "max_pixels": max_pixels})
        self.prompt_encoder = PromptEncoder(self.processor, self.model.base_model, pixels=pixels)
        shape = {"rank": lora_rank, "alpha": lora_alpha, "layers": lora_target_modules}
        if roles:
            check_roles(roles, new=bool(lora_rank) and not adapter and not transform)
        self.adapter = self._adapted(adapter, roles, **shape, tower=not freeze_vision_tower)
        self.roles = RoleAdapters(self.adapter, roles) if roles and self.adapter else None
        self.part: TrainedPart | None = self.roles if self.adapter else part_of(self.model)
        self.outputs = self.outputs - {"reversed_logp"} | (self.part.outputs if self.part else frozenset())
        self._choose_weights(freeze_vision_tower, frozen)
        if gradient_checkpointing:
            loading.checkpoint_layers(self.model)
        self.compute, self.share_prefix, self.packed = DTYPES[dtype], share_prefix, gradient_checkpointing
        self.inner = InnerOptions(hot_temperature, cold_temperature, top_k, rank_stride)
        self.teacher_head: OutputHead | None = None
        self.module: nn.Module = StepModel(
            self.model,
            self.prompt_encoder.placeholders,
            compute=self.compute,
            checkpointed=gradient_checkpointing,
            share=share_prefix,
            blank={} if freeze_vision_tower else self._blank_image(),
            inner=self.inner,
            part=self.part,
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
        if start and (adapter or options.get("lora_rank")):
            loading.check_folders(model, start)
        elif start and not holds_part(Path(start)):
            loading.check_same_shapes(model, start)

    @staticmethod
    def prompt_check(options: Mapping[str, Any]) -> Callable[[Prompt], None]:
        """Make a check that raises `PromptError` for prompts that a policy with these options cannot read."""
        return PromptCheck(loading.load_encoder(str(options["model"]), pixel_limits(options)))

    def _blank_image(self) -> dict[str, Tensor]:
        """Make the model inputs of a black image; empty for a language model."""
        if self.processor.image_processor is None:
            return {}
        black = torch.zeros(3, 56, 56, dtype=torch.uint8)  # gives 2 x 2 features in Qwen2-VL
        inputs = self.processor.image_processor(images=[black], return_tensors="pt")
        return {name: torch.as_tensor(value) for name, value in inputs.items()}

    def _adapted(self, adapter: str, roles: tuple[str, ...], **shape: Any) -> Any:
        """Load the saved adapter, or add new adapters; return None if no adapter is configured."""
        rank, alpha = shape["rank"], shape["alpha"]
        if adapter:
            return loading.load_adapter(self.model, adapter, rank=rank, alpha=alpha)
        shape |= {"alpha": alpha or 2.0 * rank, "names": roles or ("default",)}
        return loading.add_adapter(self.model, **shape) if rank else None

    def _choose_weights(self, freeze_vision_tower: bool, frozen: bool) -> None:
        """Choose the trained weights, except adapters, and convert them to float32."""
        if isinstance(self.part, nn.Module):
            self.model.requires_grad_(False)
            self.part.requires_grad_(True)
        elif self.adapter is None and freeze_vision_tower:
            self.model.requires_grad_(False)
            self.model.get_decoder().requires_grad_(True)
            self.model.get_output_embeddings().requires_grad_(True)
        if frozen:
            self.model.requires_grad_(False)
        keep_training_precision(self.model)

    def check_steps_of(self, policy: Tokens) -> None:
        """Raise `ValueError` unless this model can read another policy's token ids and encoded images."""
        loading.check_same_tokens(self.processor.tokenizer, self.model, policy)

    def reading_with(self, model: nn.Module, dtype: str) -> StepModel:
        """Make a module that computes this policy's steps with another, frozen model.

        The output `reverse_kl` uses the head of that model.
        """
        self.teacher_head = OutputHead(model)
        return StepModel(
            model.requires_grad_(False),
            self.prompt_encoder.placeholders,
            compute=DTYPES[dtype],
            checkpointed=False,
            share=self.share_prefix,
            inner=self.inner,
        )

    @property
    def core(self) -> nn.Module:
        """The model without its head."""
        return self.model.base_model

    def render(self, prompt: Prompt) -> str:
        """Render a prompt with the chat template; media become `<image: 64 tokens>`."""
        return self.prompt_encoder.render(prompt)

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> MediaReader:
        """Make the reader that loads the images and videos of prompts."""
        return MediaReader.of_data(options, root)

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Encode a recorded answer, with its end token, as a row."""
        with reading(prompt):
            text, ids = self.prompt_encoder.recorded(prompt, outcome)
            encoded = self.prompt_encoder.encode(prompt)
            check_length(encoded.next_position + len(ids) - 1, self.prompt_encoder.limit)
        tags = {"finish": "stop", **outcome.tags}
        answer = Outcome(text=text, end=len(ids), tags=tags, recorded=outcome.recorded)
        row = TokenRow(encoded, ids)
        return Trajectory(prompt, prompt.uid, (answer,), row, len(ids), {"token": ids}, on_policy=False)

    def restore_rows(self, prompt: Prompt, notes: Mapping[str, Tensor]) -> Trajectory:
        """Restore a row from values (T,) that the engine recorded per token, such as ids and temperature."""
        ids, temperature = notes["token"].long(), float(notes["temperature"][0])
        outcome = Outcome(text=self.prompt_encoder.text(ids), end=len(ids))
        row = TokenRow(self.prompt_encoder.encode(prompt), ids, temperature)
        restored = {name: note.float() for name, note in notes.items()} | {"token": ids}
        return Trajectory(prompt, prompt.uid, (outcome,), row, len(ids), restored, on_policy=False)

    def pack(self, row: Trajectory) -> Trajectory:
        """Remove the encoded prompt from a row for another process, if that process can encode it again."""
        encodable = row.steps.prompt is self.prompt_encoder.encode(row.prompt)
        return replace(row, steps=replace(row.steps, prompt=None)) if encodable else row

    def unpack(self, row: Trajectory) -> Trajectory:
        """Add the encoded prompt to a row that another process packed."""
        if row.steps.prompt is not None:
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
        if self.share_prefix and reads_trees(self.model, packed=self.packed):
            steps = steps.with_tree(self.core)
        if self.part:
            steps = self.part.collate(steps, rollouts)
        # Missing values and values after a row's end are NaN. `token` and `temperature` are in `steps`.
        missing = torch.full((mask.shape[1],), torch.nan)
        notes = {
            name: cat_padded(
                [row.notes.get(name, missing[: row.length])[None] for row in rollouts], torch.nan
            )
            for name in sorted({name for row in rollouts for name in row.notes} - {"token", "temperature"})
        }
        return Batch.of(steps, mask, notes)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        teacher = None
        if "reverse_kl" in extra:
            states = {
                name: other.extra["hidden"] for name, other in batch.others.items() if "hidden" in other.extra
            }
            teacher = teacher_of(states, self.teacher_head)
        values = self.module(batch.steps, extra, teacher)
        width = batch.mask.shape[1]
        padded = {name: pad_to(value, width, 1) for name, value in values.items()}
        return StepOutput(padded.pop("logp"), padded)

    def merge(self) -> None:
        """Merge the adapter into the weights, so that `save` writes the whole model.

        Raises `ConfigError` for other trained parts, for which a model of transformers has no weights.
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
        # The folder's config names the dtype of frozen weights; the widest dtype keeps trained weights exact.
        widest = widest_dtype(self.model, folder)
        copy_weights(self.model, load_whole(type(self.model), folder, dtype=widest))
