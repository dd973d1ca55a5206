"""Sequence parallelism: several processes compute the decoder layers of one sequence together.

Every process has its own rows, as in data parallelism. A group runs the rows of one process after another:
each process computes a slice of the tokens, and attention exchanges slices of tokens for slices of heads
(Ulysses, arXiv 2309.14509). Vision towers, embeddings and the head run only on the process of the row.
So the sum of the gradients over processes is the same as in data parallelism, and is averaged afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.kv_cache.attention_interface import install
from mmrl.runtime.fsdp import sharded_parts

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2", "qwen3", "llama")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SequenceParallel:
    """A group of processes that compute the layers of a model together.

    Args:
        core: The model without its head.
        size: Number of processes in a group; the ranks of a group are consecutive.
    """

    def __init__(self, core: nn.Module, size: int) -> None:
        self.trunk = cast(Any, getattr(core, "language_model", core))
        self.size, self.rank, self.group = size, 0, None
        install(core.config)  # registers an attention function that calls `attend`

    def join(self) -> None:
        """Create the process groups in the first forward pass; every process must call this method."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % self.size:
            raise ConfigError(
                f"`policy.sp_size` is {self.size}, but {world} processes run: launch a multiple of it"
            )
        if sharded_parts(self.trunk):
            raise ConfigError("`policy.sp_size` needs whole weights; launch with configs/accelerate/ddp.yaml")
        own = dist.get_rank() // self.size
        for number in range(world // self.size):
            ranks = list(range(number * self.size, (number + 1) * self.size))
            group = dist.new_group(ranks)
            if number == own:
                self.group, self.rank, self.ranks = group, dist.get_rank() % self.size, ranks

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the context, run the layers of the model on all processes of the group."""
        if self.group is None:
            self.join()
        alone = self.trunk.forward
        self.trunk.forward = lambda *args, **options: self._together(alone, *args, **options)
        try:
            yield
        finally:
            del self.trunk.forward

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[Tensor, None]:
        """Compute causal attention over all tokens from slices (rows, heads, tokens / size, channels)."""
        if key.shape[1] % self.size:  # repeat heads that cannot be divided among processes
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        # Rows are padded on the right, so no token attends to padding.
        query, key, value = (self._swap(x, split=1, join=2) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self._swap(out, split=2, join=1).transpose(1, 2).contiguous(), None

    def _swap(self, x: Tensor, split: int, join: int) -> Tensor:
        """Split dimension `split` among processes, and concatenate their slices along dimension `join`."""
        parts = torch.stack(x.chunk(self.size, split))
        return torch.cat(list(_Exchange.apply(parts, self.group)), join)

    def _together(self, alone: Any, *args: Any, **options: Any) -> Any:
        """Run the layers for the rows of each process in turn; return the output for this process's rows."""
        ids, embedded = options.pop("input_ids", None), options.pop("inputs_embeds", None)
        embedded = self.trunk.get_input_embeddings()(ids) if embedded is None else embedded
        known = {"position_ids", "attention_mask", "visual_pos_masks"}
        odd = {name for name, value in options.items() if isinstance(value, Tensor)} - known
        if args or odd or options.get("past_key_values") is not None:
            raise ValueError(f"sequence parallelism cannot share out {sorted(odd) or 'a cache'}")
        deep = self._dense(embedded, options)
        results, others = None, []
        for owner in range(self.size):
            mine = owner == self.rank
            sequences = [embedded, *deep] if mine else None
            out, length = self._of_rows(
                alone, owner, sequences, options.get("position_ids") if mine else None
            )
            states = _Collect.apply(out.last_hidden_state, owner, self)
            if mine:
                out.last_hidden_state = states[:, :length]
                results = out
            else:
                others.append(states)
        assert results is not None
        # Add 0 times the others' outputs, so that the backward pass includes their slices.
        results.last_hidden_state = results.last_hidden_state + 0.0 * sum(other.sum() for other in others)
        return results

    def _of_rows(
        self, alone: Any, owner: int, sequences: Sequence[Tensor] | None, positions: Tensor | None
    ) -> tuple[Any, int]:
        """Run this process's slice of the rows of process `owner`; return output and unpadded length."""
        device = next(self.trunk.parameters()).device
        plan = torch.zeros(7, dtype=torch.int64, device=device)
        if sequences is not None:
            first = sequences[0]
            axes = 0 if positions is None else (1 if positions.ndim == 2 else len(positions))
            # Bit i of `needs`: whether sequence i needs gradients, which are exchanged only then.
            needs = sum(sequence.requires_grad << i for i, sequence in enumerate(sequences))
            plan = torch.tensor(
                [*first.shape, len(sequences), axes, needs, DTYPES.index(first.dtype)], device=device
            )
        dist.broadcast(plan, self.ranks[owner], self.group)
        rows, length, width, number, axes, needs, dtype = plan.tolist()
        more = -length % self.size
        places = torch.zeros(max(axes, 1), rows, length + more, dtype=torch.int64, device=device)
        if positions is not None:
            places[..., :length] = positions
        if axes:
            dist.broadcast(places, self.ranks[owner], self.group)
        slices = places.chunk(self.size, -1)[self.rank]
        shape = (rows, (length + more) // self.size, width)
        shared = []
        for i in range(number):
            whole = nn.functional.pad(sequences[i], (0, 0, 0, more)) if sequences else None
            anchor = torch.zeros((), device=device, requires_grad=bool(needs >> i & 1))
            shared.append(
                _Share.apply(whole if whole is not None else anchor, owner, self, shape, DTYPES[dtype])
            )
        options: dict[str, Any] = {"position_ids": slices if axes > 1 else slices[0]} if axes else {}
        if number > 1:
            options["visual_pos_masks"] = torch.ones(shape[:2], dtype=torch.bool, device=device)
            options["deepstack_visual_embeds"] = [part.flatten(0, 1) for part in shared[1:]]
        # Layers pass `sequence_parallel` on to attention, also when recomputed in the backward pass.
        return alone(inputs_embeds=shared[0], use_cache=False, sequence_parallel=self, **options), length

    def _dense(self, embedded: Tensor, options: dict[str, Any]) -> list[Tensor]:
        """Place DeepStack features (Qwen3-VL) at their visual tokens, in zeros shaped like `embedded`."""
        deep = options.get("deepstack_visual_embeds") or ()
        where = options["visual_pos_masks"].nonzero(as_tuple=True) if deep else ()
        return [torch.zeros_like(embedded).index_put(where, part.to(embedded.dtype)) for part in deep]


class _Exchange(torch.autograd.Function):
    """All-to-all with gradients: sends part i (dimension 0) to process i, and receives one from each."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Exchange.apply(gradients[0], ctx.group), None


class _Share(torch.autograd.Function):
    """Scatter with gradients: splits the owner's tokens; other processes pass an unused tensor as `whole`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, owner: int, of: SequenceParallel, shape: Any, dtype: Any) -> Tensor:
        ctx.owner, ctx.of, ctx.given = owner, of, whole.shape
        mine = torch.empty(shape, dtype=dtype, device=whole.device)
        _scatter(mine, whole, owner, of)
        return mine

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = _gather(gradients[0], ctx.owner, ctx.of)
        return (gradients[0].new_zeros(ctx.given) if whole is None else whole), None, None, None, None


class _Collect(torch.autograd.Function):
    """Gather with gradients: returns all tokens on the owner, and an unused scalar on other processes."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, owner: int, of: SequenceParallel) -> Tensor:
        ctx.owner, ctx.of, ctx.like = owner, of, (mine.shape, mine.dtype, mine.device)
        whole = _gather(mine, owner, of)
        return mine.new_zeros(()) if whole is None else whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shape, dtype, device = ctx.like
        mine = torch.empty(shape, dtype=dtype, device=device)
        _scatter(mine, gradients[0], ctx.owner, ctx.of)
        return mine, None, None


def _scatter(mine: Tensor, whole: Tensor, owner: int, of: SequenceParallel) -> None:
    """Fill `mine` (rows, tokens / size, width) with this process's slice of the owner's tokens."""
    parts = [part.contiguous() for part in whole.chunk(of.size, 1)] if owner == of.rank else None
    dist.scatter(mine, parts, of.ranks[owner], of.group)


def _gather(mine: Tensor, owner: int, of: SequenceParallel) -> Tensor | None:
    """Gather the token slices `mine`; return all tokens on the owner, and None on other processes."""
    mine = mine.contiguous()
    parts = [torch.empty_like(mine) for _ in range(of.size)] if owner == of.rank else None
    dist.gather(mine, parts, of.ranks[owner], of.group)
    return None if parts is None else torch.cat(parts, 1)


def check_sequence_parallel(
    model: str, size: int, share_prefix: bool, attention: str, transform: Any, roles: Any
) -> None:
    """Raise `ConfigError` if these options of a policy do not allow sequence parallelism."""
    if size == 1:
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    kind, text = config.model_type, config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    wrong = {
        f"a model of type {', '.join(FAMILIES)}, not '{kind}'": kind not in FAMILIES,
        "`share_prefix: false`, because rows are whole sequences": share_prefix,
        f"a number of attention heads that {size} divides, not {heads}": heads % size,
        f"full attention in every layer, not {', '.join(sorted(kinds))}": kinds,
        f"`attn_implementation: sdpa`, not '{attention}'": attention != "sdpa",
        "no `transform`, which may read all tokens": transform,
        "no `roles`, of which every process has other ones in a batch": roles,
    }
    for needed, holds in wrong.items():
        if holds:
            raise ConfigError(f"`policy.sp_size: {size}` needs {needed}")
