"""The token policy: a vision-language model whose steps are the tokens of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import policy
from mmrl.core.onednn import onednn
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded, pad_to
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.runtime.modules import DTYPES, LOW, apply_transforms, keep_training_precision
from mmrl.vision.decoding.inner_outputs import (
    OF_LOGITS,
    OF_STATES,
    USUAL,
    InnerOptions,
    TeacherStates,
    of_logits,
    of_states,
    teacher_of,
)
from mmrl.vision.decoding.token_steps import (
    FORBIDDEN,
    TokenRow,
    TokenSteps,
    distinct_prompts,
    layer_windows,
    read_cached,
    read_packed,
)
from mmrl.vision.media.media_reader import MediaReader
from mmrl.vision.models import loading
from mmrl.vision.models.processor import PromptEncoder

LOGIT_BYTES = 256 << 20  # float32 logits that may exist at once


class StepModel(nn.Module):
    """The trainable module: maps batches of answers to log-probabilities and entropies of their tokens.

    `blank` has the inputs of a blank image, which batches without media run through a tower that learns.
    """

    def __init__(
        self,
        model: nn.Module,
        forbidden: list[int],
        *,
        compute: torch.dtype,
        checkpointed: bool,
        share: bool,
        blank: dict[str, Tensor] | None = None,
        inner: InnerOptions = USUAL,
    ) -> None:
        super().__init__()
        self.model, self.forbidden, self.compute = model, forbidden, compute
        self.checkpointed, self.share, self.blank, self.inner = checkpointed, share, blank, inner

    def forward(
        self, steps: TokenSteps, extra: Set[str], teacher: TeacherStates | None = None
    ) -> dict[str, Tensor]:
        """Compute "logp", and what is in `extra`: (N, longest) each, or (N, longest, ...).

        `inner_outputs` lists what there is. "reverse_kl" needs a `teacher`. Heads are called in here and
        nowhere else, because data parallelism wraps this module.
        """
        head = self.model.get_output_embeddings()
        device = head.weight.device
        with torch.autocast(device.type, self.compute, enabled=self.compute in LOW):
            hidden = self.states(steps)
            # Padding is skipped: the head is the largest product of the model.
            inside = torch.arange(steps.longest)[None] < steps.length[:, None]
            where = tuple(index.to(device) for index in inside.nonzero(as_tuple=True))
            ids = steps.ids[:, : steps.longest].to(device)[where]
            temperature = steps.temperature.to(device)[where[0]]
            taught = teacher and TeacherStates(teacher.head, teacher.hidden[where])
            values = chunked_logp(
                hidden[where], head, ids, temperature, self.forbidden, extra, self.inner, taught
            )
            if extra & OF_STATES:
                states = of_states(hidden, steps.length, extra, self.inner)
                values |= {name: value[where] for name, value in states.items()}
        return {
            name: value.new_zeros((*inside.shape, *value.shape[1:])).index_put(where, value)
            for name, value in values.items()
        }

    def states(self, steps: TokenSteps) -> Tensor:
        """Compute the last hidden states (N, longest, width), each of which predicts a token."""
        core = self.model.base_model
        if self.checkpointed:
            hidden = read_packed(core, steps)
        else:
            with onednn(core):  # not with checkpointing: the recomputation would run without it
                hidden = read_cached(core, steps, share_prefix=self.share)
        if self.blank and not any(steps.media):
            # Every process must have a gradient for every parameter, those of the tower too.
            inputs = {name: value.to(hidden.device) for name, value in self.blank.items()}
            features = core.get_image_features(**inputs, return_dict=True)
            # Qwen3-VL also adds features of earlier tower layers to the language model.
            layers = (features.pooler_output, *features.get("deepstack_features", ()))
            # Times 0, so that the loss stays as it is and every gradient exists.
            hidden = hidden + 0.0 * sum(part.sum() for layer in layers for part in layer)
        return hidden


def chunked_logp(
    hidden: Tensor,
    head: nn.Module,
    ids: Tensor,
    temperature: Tensor,
    forbidden: list[int],
    extra: Set[str] = frozenset(),
    options: InnerOptions = USUAL,
    teacher: TeacherStates | None = None,
) -> dict[str, Tensor]:
    """Compute `of_logits` of M tokens from (M, width) states, in float32 or better.

    At most `LOGIT_BYTES` of logits exist at once, those of the teacher (M, its width) included: with more
    tokens, chunks are recomputed in the backward pass.
    """
    heads = [head, *([teacher.head] if teacher else [])]
    size = max(1, LOGIT_BYTES // (4 * sum(h.weight.shape[0] for h in heads)))  # rows of V logits of 4 bytes

    def logits_of(head: nn.Module, states: Tensor, temperature: Tensor) -> Tensor:
        logits = head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if forbidden:
            logits = logits.index_fill(-1, torch.tensor(forbidden, device=logits.device), FORBIDDEN)
        return logits / temperature[:, None].to(logits.dtype)

    def of_chunk(
        states: Tensor, ids: Tensor, temperature: Tensor, taught: Tensor | None = None
    ) -> dict[str, Tensor]:
        other = None
        if teacher is not None and taught is not None:
            with torch.no_grad():
                other = logits_of(teacher.head, taught.to(teacher.head.weight.dtype), temperature)
        return of_logits(logits_of(head, states, temperature), ids, extra, options, other)

    columns = [hidden, ids, temperature, *([teacher.hidden] if teacher else [])]
    chunks = list(zip(*(column.split(size) for column in columns), strict=True))
    recompute = len(chunks) > 1 and torch.is_grad_enabled()
    parts = [
        checkpoint(of_chunk, *chunk, use_reentrant=False) if recompute else of_chunk(*chunk)
        for chunk in chunks
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@policy
class Tokens:
    """A vision-language or language model of transformers; a step is one token of an answer.

    Trained weights are in float32 and computed with in `dtype`; dropout is off. Media placeholders have
    probability 0.

    Args:
        model: Hub id or folder.
        dtype: Precision of frozen weights and of the computation.
        attn_implementation: Attention of transformers, such as "sdpa", "eager" or "flash_attention_2".
        lora_rank: Rank of a LoRA adapter that is trained instead of the model; 0: no adapter.
        lora_alpha: Scale of the adapter; None: twice the rank.
        adapter: Folder or hub id of a saved adapter, to train it further.
        freeze_vision_tower: Train the language model only; otherwise the vision tower too.
        frozen: Train nothing, so that all weights stay in `dtype`: for a model that only answers, as a judge.
        gradient_checkpointing: Recompute layers in the backward pass: less memory, more time.
        share_prefix: Rows with the same prompt share its keys and values; without it, every row gets a copy.
        min_pixels: Smallest image after the image processor, in pixels; None: the processor's own.
        max_pixels: Largest image after the image processor, in pixels; None: the processor's own.
        hot_temperature: Temperature of the output `logp_hot`, in units of the sampling temperature.
        cold_temperature: Temperature of the output `logp_cold`, in the same units.
        top_k: Number of tokens in the outputs `top_k_ids` and `top_k_logp`.
        rank_stride: Steps between the prefixes whose `effective_rank` is measured.
        transform: Transforms of the model, such as pruning or quantisation.
    """

    says = OF_LOGITS | OF_STATES  # computed when a piece asks for it

    def __init__(
        self,
        *,
        model: str,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        attn_implementation: str = "sdpa",
        lora_rank: NonNegativeInt = 0,
        lora_alpha: PositiveFloat | None = None,
        adapter: str = "",
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
        self.model = loading.load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        self.model = apply_transforms(self.model, transform)
        pixels = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        pixels = {name: value for name, value in pixels.items() if value is not None}
        self.prompt_encoder = PromptEncoder(self.processor, self.model.base_model, pixels=pixels)
        self.adapter = None
        if adapter:
            self.adapter = loading.load_adapter(self.model, adapter)
        elif lora_rank:
            self.adapter = loading.add_adapter(
                self.model, rank=lora_rank, alpha=lora_alpha or 2.0 * lora_rank, tower=not freeze_vision_tower
            )
        elif freeze_vision_tower:
            self.model.requires_grad_(False)
            self.model.get_decoder().requires_grad_(True)
            self.model.get_output_embeddings().requires_grad_(True)
        if frozen:
            self.model.requires_grad_(False)
        keep_training_precision(self.model)
        if gradient_checkpointing:
            layer_windows(self.model.config)  # raises for layers that cannot be packed
            loading.checkpoint_layers(self.model)
        self.compute, self.share_prefix = DTYPES[dtype], share_prefix
        self.inner = InnerOptions(hot_temperature, cold_temperature, top_k, rank_stride)
        self.teacher_head: nn.Module | None = None
        blank: dict[str, Any] = {}
        if not freeze_vision_tower and self.processor.image_processor is not None:
            black = torch.zeros(3, 56, 56, dtype=torch.uint8)  # 2 x 2 features of Qwen2-VL
            blank = dict(self.processor.image_processor(images=[black], return_tensors="pt"))
        self.module: nn.Module = StepModel(
            self.model,
            self.prompt_encoder.placeholders,
            compute=self.compute,
            checkpointed=gradient_checkpointing,
            share=share_prefix,
            blank={name: torch.as_tensor(value) for name, value in blank.items()},
            inner=self.inner,
        )

    def check_steps_of(self, policy: Tokens) -> None:
        """Raise `ValueError` where another policy's tokens mean something else to this one."""
        loading.check_same_tokens(self.processor.tokenizer, self.model, policy)

    def reading_with(self, model: nn.Module, dtype: str) -> StepModel:
        """Make a module that reads this policy's steps with another model, which does not learn.

        Its head is the one that `reverse_kl` compares with.
        """
        self.teacher_head = model.get_output_embeddings()
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
        """Write a prompt as the chat template gives it to the model; media as `<image: 64 tokens>`."""
        return self.prompt_encoder.render(prompt)

    def media_reader(self, options: Mapping[str, Any], root: Path | None = None) -> MediaReader:
        """Make the function that reads images and videos for prompts (`ReadsMedia` of the session)."""
        return MediaReader.of_data(options, root)

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Turn a recorded answer into a row, its end token included."""
        ids = self.prompt_encoder.answer(outcome.text or "")
        tags = {"finish": "stop", **outcome.tags}
        answer = Outcome(text=outcome.text, end=len(ids), tags=tags, recorded=outcome.recorded)
        row = TokenRow(self.prompt_encoder.encode(prompt), ids)
        return Trajectory(prompt, prompt.uid, (answer,), row, len(ids), {"token": ids}, on_policy=False)

    def recall(self, prompt: Prompt, notes: Mapping[str, Tensor]) -> Trajectory:
        """Make a row again from the notes (T,) of the engine: its tokens and its temperature."""
        ids, temperature = notes["token"].long(), float(notes["temperature"][0])
        outcome = Outcome(text=self.prompt_encoder.text(ids), end=len(ids))
        row = TokenRow(self.prompt_encoder.encode(prompt), ids, temperature)
        kept = {name: note.float() for name, note in notes.items()} | {"token": ids}
        return Trajectory(prompt, prompt.uid, (outcome,), row, len(ids), kept, on_policy=False)

    def pack(self, row: Trajectory) -> Trajectory:
        """Leave out the encoded prompt, with its pixels, of a row for another process, which has it too."""
        known = row.steps.prompt is self.prompt_encoder.encode(row.prompt)
        return replace(row, steps=replace(row.steps, prompt=None)) if known else row

    def unpack(self, row: Trajectory) -> Trajectory:
        """Complete a row that another process packed."""
        if row.steps.prompt is not None:
            return row
        return replace(row, steps=replace(row.steps, prompt=self.prompt_encoder.encode(row.prompt)))

    def collate(self, rollouts: Rollouts) -> Batch:
        """Pad answers on the right; distinct prompts are stored once."""
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
        # NaN where a row has no such note, and after its end. `steps` has what `token` and `temperature` say.
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
        """Merge the adapter into the weights, so that `save` writes the whole model."""
        if self.adapter is not None:
            self.model, self.adapter = self.adapter.merge_and_unload(), None

    def save(self, folder: Path) -> None:
        """Write a folder that transformers (or peft, for an adapter) loads, with the processor."""
        (self.adapter or self.model).save_pretrained(str(folder))
        self.processor.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""
        if self.adapter is not None:
            loading.load_adapter_weights(self.adapter, folder)
            return
        # The folder names one dtype, that of the frozen weights; the widest loses nothing of trained weights.
        widest = max((weight.dtype for weight in self.model.parameters()), key=lambda dtype: dtype.itemsize)
        model = type(self.model).from_pretrained(str(folder), dtype=widest, use_safetensors=True)
        saved = model.state_dict()
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(saved[name])  # in place: the optimizer and engines hold these tensors
