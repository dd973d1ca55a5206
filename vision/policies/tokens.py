"""The token policy: a vision-language model whose steps are the tokens of its answers."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import policy
from mmrl.core.onednn import onednn
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.runtime.modules import DTYPES, LOW, apply_transforms, keep_training_precision
from mmrl.vision.decoding.token_steps import (
    FORBIDDEN,
    TokenRow,
    TokenSteps,
    distinct_prompts,
    read_cached,
    read_packed,
    windows,
)
from mmrl.vision.models import loading
from mmrl.vision.models.processor import PromptEncoder

LOGIT_BYTES = 256 << 20  # float32 logits that may exist at once


class StepModel(nn.Module):
    """A model with its head, as one module to be trained: rows of tokens to log-probabilities and
    entropies."""

    def __init__(
        self, model: nn.Module, forbidden: list[int], *, compute: torch.dtype, checkpointed: bool, share: bool
    ) -> None:
        super().__init__()
        self.model, self.forbidden, self.compute = model, forbidden, compute
        self.checkpointed, self.share = checkpointed, share
        self.blank: dict[str, Tensor] | None = None

    def forward(self, steps: TokenSteps, extra: Set[str]) -> dict[str, Tensor]:
        """Give "logp" and what of `extra` is wanted: (N, longest) each."""
        core, head = self.model.base_model, self.model.get_output_embeddings()
        device = head.weight.device
        with torch.autocast(device.type, self.compute, enabled=self.compute in LOW):
            if self.checkpointed:
                hidden = read_packed(core, steps)
            else:
                with onednn(core):  # what is computed anew in a backward pass would go without
                    hidden = read_cached(core, steps, share_prefix=self.share)
            if self.blank is not None and not any(prompt.media for prompt in steps.prompts):
                hidden = hidden + 0.0 * self._look_at_nothing(core)
            inside = torch.arange(steps.longest)[None] < steps.length[:, None]
            where = inside.nonzero(as_tuple=True)
            where = tuple(index.to(device) for index in where)
            ids = steps.ids[:, : steps.longest].to(device)[where]
            heat = steps.temperature.to(device)[where[0]]
            said = chunked_logp(hidden[where], head, ids, heat, self.forbidden, "entropy" in extra)
        flat = hidden.new_zeros(inside.shape, dtype=said["logp"].dtype)
        return {name: flat.index_put(where, value) for name, value in said.items()}

    def _look_at_nothing(self, core: nn.Module) -> Tensor:
        """Send a blank picture through a trained tower, so that every parameter has a gradient on every
        process."""
        device = core.get_input_embeddings().weight.device
        seen = core.get_image_features(
            **{name: value.to(device) for name, value in self.blank.items()}, return_dict=True
        )
        # Some towers also hand features of earlier layers to the language model.
        earlier = getattr(seen, "deepstack_features", None) or ()
        return sum(part.sum() for layer in (seen.pooler_output, *earlier) for part in layer)


def chunked_logp(
    hidden: Tensor, head: nn.Module, ids: Tensor, temperature: Tensor, forbidden: list[int], entropy: bool
) -> dict[str, Tensor]:
    """Compute log-probabilities (and entropies) of M tokens from (M, width) states, in float32 or better.

    Logits of more tokens than fit into `LOGIT_BYTES` never exist together: chunks are computed anew in the
    backward pass.
    """
    size = max(1, LOGIT_BYTES // (4 * head.weight.shape[0]))

    def one(states: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if forbidden:
            logits = logits.index_fill(-1, torch.tensor(forbidden, device=logits.device), FORBIDDEN)
        logits = logits / heat[:, None].to(logits.dtype)
        norm = logits.logsumexp(-1)
        logp = logits.gather(-1, targets[:, None])[:, 0] - norm
        return (logp, norm - ((logits - norm[:, None]).exp() * logits).sum(-1)) if entropy else (logp,)

    chunks = list(zip(hidden.split(size), ids.split(size), temperature.split(size), strict=True))
    again = len(chunks) > 1 and torch.is_grad_enabled()
    parts = [checkpoint(one, *chunk, use_reentrant=False) if again else one(*chunk) for chunk in chunks]
    return {
        name: torch.cat(values)
        for name, values in zip(("logp", "entropy"), zip(*parts, strict=True), strict=False)
    }


@policy
class Tokens:
    """A vision-language model of transformers, by hub id or folder: a step is one token of an answer.

    `lora_rank` above 0 trains an adapter (float32) over frozen weights; `adapter` goes on with a saved one.
    Without either the language model learns, and the vision tower too unless `freeze_vision_tower`. Trained
    weights are held in float32 and computed with in `dtype`. `min_pixels` and `max_pixels` bound what the
    image processor makes of a picture. Media placeholders have probability 0. Dropout is off. Keys and values
    of a prompt are held once for all rows that answer it; without `share_prefix` every row gets a copy.
    """

    says = frozenset({"entropy"})

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
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
        min_pixels: Annotated[PositiveInt, AtMost("max_pixels")] | None = None,
        max_pixels: PositiveInt | None = None,
        transform: tuple[Callable, ...] = (),
    ) -> None:
        self.processor = loading.load_processor(model)
        self.model = loading.load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        self.model = apply_transforms(self.model, transform)
        pixels = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        self.prompt_encoder = PromptEncoder(
            self.processor,
            self.model.base_model,
            pixels={name: value for name, value in pixels.items() if value is not None},
        )
        self.adapter = None
        if adapter:
            self.adapter = loading.load_adapter(self.model, adapter)
        elif lora_rank:
            self.adapter = loading.add_adapter(
                self.model, rank=lora_rank, alpha=lora_alpha or 2.0 * lora_rank, tower=not freeze_vision_tower
            )
        elif freeze_vision_tower:
            loading.freeze_tower(self.model)
        keep_training_precision(self.model)
        if gradient_checkpointing:
            windows(self.model.config)  # refuses layers that cannot be packed
            loading.checkpoint_layers(self.model)
        self.compute, self.share_prefix = DTYPES[dtype], share_prefix
        self.module: nn.Module = StepModel(
            self.model,
            self.prompt_encoder.placeholders,
            compute=self.compute,
            checkpointed=gradient_checkpointing,
            share=share_prefix,
        )
        if not freeze_vision_tower:
            self.module.blank = loading.blank_image(self.processor)

    @property
    def core(self) -> nn.Module:
        """The model without its head."""
        return self.model.base_model

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Turn a recorded answer into a row, its end token included."""
        ids = self.prompt_encoder.answer(outcome.text or "")
        seen = Outcome(
            text=outcome.text,
            end=len(ids),
            tags={"finish": "stop", **outcome.tags},
            recorded=outcome.recorded,
        )
        row = TokenRow(self.prompt_encoder.encode(prompt), ids)
        return Trajectory(prompt, prompt.uid, (seen,), row, len(ids), {"token": ids}, on_policy=False)

    def collate(self, rollouts: Rollouts) -> Batch:
        """Pad answers on the right; prompts are held once."""
        rows: list[TokenRow] = [row.steps for row in rollouts]
        length = torch.tensor([len(row.ids) for row in rows])
        mask = (torch.arange(int(length.max()))[None] < length[:, None]).float()
        distinct, which = distinct_prompts([row.prompt for row in rows])
        steps = TokenSteps(
            distinct,
            which,
            cat_padded([row.ids[None] for row in rows]),
            length,
            torch.tensor([row.temperature for row in rows]),
        )
        noted = {name for row in rollouts for name in row.notes if name != "token"}
        missing = torch.full((mask.shape[1],), float("nan"))
        notes = {
            name: cat_padded(
                [
                    torch.cat([row.notes.get(name, missing[: row.length]), missing])[None, : len(missing)]
                    for row in rollouts
                ]
            )
            for name in sorted(noted)
        }
        return Batch.of(steps, mask, notes)

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        said = self.module(batch.steps, extra)
        width = batch.mask.shape[1]
        padded = {name: nn.functional.pad(value, (0, width - value.shape[1])) for name, value in said.items()}
        return StepOutput(padded.pop("logp"), padded)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers (or peft, for an adapter) loads."""
        loading.save_model(self.model, self.adapter, self.processor, folder)

    def load(self, folder: Path) -> None:
        """Take up the weights that `save` wrote, bit for bit."""
        loading.load_weights(self.model, self.adapter, folder)
