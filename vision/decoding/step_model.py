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
from mmrl.vision.decoding.inner_outputs import (
    OF_STATES,
    USUAL,
    InnerOptions,
    TeacherStates,
    of_logits,
    of_states,
)
from mmrl.vision.decoding.token_steps import (
    FORBIDDEN,
    TokenSteps,
    read_cached,
    read_packed,
    read_whole,
    shares_prompts,
)
from mmrl.vision.decoding.tree_reading import reads_trees
from mmrl.vision.models.trained_part import TrainedPart

LOGIT_BYTES = 256 << 20  # maximal memory of the float32 logits that exist at once


class StepModel(nn.Module):
    """Computes log-probabilities and other outputs for the tokens of a batch of answers.

    Args:
        model: The model.
        forbidden: Token ids that get probability 0.
        compute: Precision of the computation.
        checkpointed: Whether layers are recomputed in the backward pass.
        share: Whether rows share the keys and values of their prompt.
        blank: Model inputs of a blank image for batches without media, if the vision tower is trained.
        inner: Options of outputs other than log-probabilities.
        part: Weights that are trained instead of the model.
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
        part: TrainedPart | None = None,
    ) -> None:
        super().__init__()
        self.read = part.read if part else None  # storing `part` would register the module twice
        self.model, self.forbidden, self.compute = model, forbidden, compute
        self.checkpointed, self.share, self.blank, self.inner = checkpointed, share, blank, inner

    def forward(
        self, steps: TokenSteps, extra: Set[str], teacher: TeacherStates | None = None
    ) -> dict[str, Tensor]:
        """Compute "logp" and the outputs in `extra` for N answers: (N, longest) each, or (N, longest, ...).

        The file `inner_outputs` lists the outputs; "reverse_kl" needs a `teacher`. Output heads are called
        only inside this method, because data parallelism wraps this module.
        """
        if self.read is not None:
            return self.read(self.values, steps, extra, teacher)
        return self.values(steps, extra, teacher)

    def values(
        self, steps: TokenSteps, extra: Set[str], teacher: TeacherStates | None = None
    ) -> dict[str, Tensor]:
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
            taught = teacher and TeacherStates(teacher.head, teacher.hidden[where])
            columns = hidden[where], head, ids, temperature
            if steps.tree and teacher is None:  # teacher states may differ at equal steps
                first, each = (index.to(device) for index in steps.distinct_steps(inside))
                columns = hidden[where][first], head, ids[first], temperature[first]
            values = chunked_logp(*columns, self.forbidden, extra, self.inner, taught)
            if steps.tree and teacher is None:
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
        """Whether common prefixes that are longer than a prompt are computed once."""
        return self.share and reads_trees(self.model, packed=self.checkpointed)

    def states(self, steps: TokenSteps) -> Tensor:
        """Compute the last hidden states (N, longest, width) that predict the tokens."""
        core = self.model.base_model
        if steps.tree and not self.reads_trees:
            steps = replace(steps, tree=None)
        if not shares_prompts(core, steps, packed=self.checkpointed):
            hidden = read_whole(core, steps)
        elif self.checkpointed:
            hidden = read_packed(core, steps)
        else:
            with onednn(core):  # not with checkpointing, whose recomputation is outside this context
                hidden = read_cached(core, steps, share_prefix=self.share)
        if self.blank and not any(steps.media):
            # Every process needs a gradient for every parameter, also in the vision tower.
            inputs = {name: value.to(hidden.device) for name, value in self.blank.items()}
            features = core.get_image_features(**inputs, return_dict=True)
            # Qwen3-VL also passes features of earlier tower layers to the language model.
            layers = (features.pooler_output, *features.get("deepstack_features", ()))
            # Times 0: the loss stays the same, and all gradients exist.
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
    teacher: TeacherStates | None = None,
) -> dict[str, Tensor]:
    """Compute the outputs of `of_logits` for M tokens from hidden states (M, width), chunk by chunk.

    Logits are float32 or float64. Logits of model and teacher take at most `LOGIT_BYTES` at once. Several
    chunks are recomputed in the backward pass. `teacher` holds hidden states (M, width of the teacher).
    """
    heads = [head, *([teacher.head] if teacher else [])]
    size = max(1, LOGIT_BYTES // (4 * sum(h.weight.shape[0] for h in heads)))  # tokens of a chunk

    def logits_of(head: OutputHead, states: Tensor, temperature: Tensor) -> Tensor:
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
