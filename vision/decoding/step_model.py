"""The trainable module of a token policy, which computes log-probabilities and other outputs of steps."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.core.onednn import onednn
from mmrl.runtime.modules import LOW
from mmrl.runtime.output_head import OutputHead
from mmrl.vision.decoding.divergence import Taught
from mmrl.vision.decoding.guidance import ImageTokens, guide
from mmrl.vision.decoding.inner_outputs import (
    OF_STATES,
    USUAL,
    InnerOptions,
    of_logits,
    of_states,
)
from mmrl.vision.decoding.packed import read_packed
from mmrl.vision.decoding.prefill import merge_media
from mmrl.vision.decoding.sequence_parallel import SequenceParallel
from mmrl.vision.decoding.token_steps import (
    FORBIDDEN,
    TokenSteps,
    read_cached,
    read_whole,
    shares_prompts,
)
from mmrl.vision.decoding.tree_reading import reads_trees
from mmrl.vision.models.trained_part import TrainedPart

LOGIT_BYTES = 256 << 20  # maximal memory of float32 logits at a time


class StepModel(nn.Module):
    """Computes log-probabilities and other outputs for the tokens of a batch of answers.

    Args:
        model: The language model.
        forbidden: Token ids that get probability 0.
        compute: dtype of the computation; autocast is used for low precision.
        checkpointed: Whether layers are recomputed in the backward pass.
        share: Whether rows share the keys and values of their prompt.
        blank: Dummy inputs for batches without images or audio, so that trained towers get gradients (of 0):
            a blank image for the vision tower, a prompt with silence for the model. Keys are kinds of media.
        inner: Options of the outputs other than log-probabilities.
        part: Weights that are trained instead of the model.
        together: Processes that compute the layers of every row together; None: each computes its own rows.
        images: Image tokens and their guidance, for a model that writes images.
    """

    def __init__(
        self,
        model: nn.Module,
        forbidden: list[int],
        *,
        compute: torch.dtype,
        checkpointed: bool,
        share: bool,
        blank: dict[str, dict[str, Tensor]] | None = None,
        inner: InnerOptions = USUAL,
        part: TrainedPart | None = None,
        together: SequenceParallel | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        super().__init__()
        self.together, self.images = together, images
        self.read = part.read if part else None  # `part` itself would be registered twice
        self.model, self.forbidden, self.compute = model, forbidden, compute
        self.checkpointed, self.share, self.blank, self.inner = checkpointed, share, blank or {}, inner

    def forward(self, steps: TokenSteps, extra: Set[str], taught: Taught | None = None) -> dict[str, Tensor]:
        """Compute "logp" and the outputs in `extra` for N answers: (N, longest) each, or (N, longest, ...).

        `inner_outputs.py` lists the outputs; "divergence" needs `taught`. Output heads are called only in
        this method, because data parallelism (DDP, FSDP) wraps this module and not its parts.
        """
        if self.read is not None:
            return self.read(self.values, steps, extra, taught)
        return self.values(steps, extra, taught)

    def values(self, steps: TokenSteps, extra: Set[str], taught: Taught | None = None) -> dict[str, Tensor]:
        """Compute the outputs of all rows with the active adapter."""
        head = OutputHead(self.model)
        device = head.weight.device
        with torch.autocast(device.type, self.compute, enabled=self.compute in LOW):
            hidden = self.states(steps)
            # Skip padding, because the head is the largest product of the model.
            inside = torch.arange(steps.longest)[None] < steps.length[:, None]
            where = tuple(index.to(device) for index in inside.nonzero(as_tuple=True))
            ids = steps.ids[:, : steps.longest].to(device)[where]
            temperature = steps.temperature.to(device)[where[0]]
            taught, second = taught and taught[where], None
            if steps.unconditional and int(steps.unconditional.steps.length.max()):
                begin = steps.unconditional.begin.to(device)[where[0]]
                second = self.states(steps.unconditional.steps)[where[0], (where[1] - begin).clamp(min=0)]
            columns = hidden[where], head, ids, temperature
            # Compute equal steps only once, unless teachers or guidance may give them different outputs.
            distinct = steps.tree and taught is None and second is None
            if distinct:
                first, each = (index.to(device) for index in steps.distinct_steps(inside))
                columns = hidden[where][first], head, ids[first], temperature[first]
            rest = extra, self.inner, taught, self.images, second
            values = chunked_logp(*columns, self.forbidden, *rest)
            if distinct:
                values = {name: value[each] for name, value in values.items()}
            if extra & OF_STATES:
                states = of_states(hidden, steps.length, extra, self.inner)
                values |= {name: value[where] for name, value in states.items()}
        return {
            name: value.new_zeros((*inside.shape, *value.shape[1:])).index_put(where, value)
            for name, value in values.items()
        }

    @property
    def reads_trees(self) -> bool:
        """Whether prefixes that rows share beyond their prompt are computed once."""
        return self.share and reads_trees(self.model, packed=self.checkpointed)

    def states(self, steps: TokenSteps) -> Tensor:
        """Compute the last hidden states (N, longest, width) that predict the tokens."""
        core = self.model.base_model
        if steps.tree and not self.reads_trees:
            steps = replace(steps, tree=None)
        # Only passes with gradients: processes run different numbers of other passes, and would deadlock.
        if self.together and torch.is_grad_enabled():
            with self.together.active():
                hidden = read_whole(core, steps)
        elif not shares_prompts(core, steps, packed=self.checkpointed or steps.packing):
            hidden = read_whole(core, steps)
        elif self.checkpointed:
            hidden = read_packed(core, steps)
        else:
            with onednn(core):  # not with checkpointing, which recomputes layers outside of this context
                if steps.packing:
                    hidden = read_packed(core, steps)
                else:
                    hidden = read_cached(core, steps, share_prefix=self.share)
        shown, heard = (
            {name for media in steps.media for name in media},
            self.blank.get("audio", {}).keys() - {"input_ids"},
        )
        for kind, blank in self.blank.items():
            if shown & heard if kind == "audio" else shown - heard:
                continue
            # Every process needs gradients of all parameters, including those of vision and audio towers.
            inputs = merge_media(core, [blank], hidden.device)
            if kind == "audio":
                hidden = hidden + 0.0 * core(**inputs, use_cache=False).last_hidden_state.sum()
                continue
            features = core.get_image_features(**inputs, return_dict=True)
            # Qwen3-VL also passes features of earlier tower layers to the language model.
            layers = (features.pooler_output, *features.get("deepstack_features", ()))
            # Add 0 times the dummy output, so that all gradients exist.
            hidden = hidden + 0.0 * sum(part.sum() for layer in layers for part in layer)
        return hidden


def chunked_logp(
    hidden: Tensor,
    head: OutputHead,
    ids: Tensor,
    temperature: Tensor,
    forbidden: list[int],
    extra: Set[str] = frozenset(),
    options: InnerOptions = USUAL,
    taught: Taught | None = None,
    images: ImageTokens | None = None,
    second: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the outputs of `of_logits` for M tokens from hidden states (M, width), chunk by chunk.

    Logits are float32 or float64. Logits of model and teachers take at most `LOGIT_BYTES` at once. If there
    are several chunks, the backward pass recomputes them. With `taught`, "divergence" is computed too.
    `second` (M, width) are the states of the unconditional rows, which guide the image tokens of `images`.
    """
    heads = [head, *(taught.heads if taught else []), *([head] if second is not None else [])]
    size = max(1, LOGIT_BYTES // (4 * sum(h.weight.shape[0] for h in heads)))  # tokens per chunk

    def exact(head: OutputHead, states: Tensor) -> Tensor:
        logits = head(states)
        return logits if logits.dtype == torch.float64 else logits.float()

    def tempered(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
        if images:
            logits = images.masked(logits, ids, forbidden)
        elif forbidden:
            logits = logits.index_fill(-1, torch.tensor(forbidden, device=logits.device), FORBIDDEN)
        return logits / temperature[:, None].to(logits.dtype)

    def of_chunk(states: Tensor, ids: Tensor, temperature: Tensor, *columns: Tensor) -> dict[str, Tensor]:
        logits = exact(head, states)
        if images and second is not None:
            *columns, other = columns
            weights = images.weights(ids).to(logits.dtype)[:, None]
            logits = guide(logits, exact(head, other), weights)
        logits = tempered(logits, ids, temperature)

        @torch.no_grad()
        def read(head: OutputHead, states: Tensor, rows: Tensor) -> Tensor:
            return tempered(exact(head, states.to(head.weight.dtype)), ids[rows], temperature[rows])

        values = of_logits(logits, ids, extra, options)
        if taught:
            part = Taught(taught.teachers, dict(zip(taught.columns, columns, strict=True)))
            values["divergence"] = part.divergence(logits, ids, forbidden, read)
        return values

    columns = [hidden, ids, temperature, *(taught.columns.values() if taught else [])]
    columns += [] if second is None else [second]
    chunks = list(zip(*(column.split(size) for column in columns), strict=True))
    recompute = len(chunks) > 1 and torch.is_grad_enabled()
    parts = [
        checkpoint(of_chunk, *chunk, use_reentrant=False) if recompute else of_chunk(*chunk)
        for chunk in chunks
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
