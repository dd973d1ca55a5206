"""Runs a tree of common beginnings through a model: every node once, with the keys and values before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.kv_cache.attention_interface import read_shared_prefix, record_keys
from mmrl.kv_cache.hf_cache import exact_cache, only_attends, share_prefix
from mmrl.kv_cache.prefix_growth import rows_as_prompts
from mmrl.runtime.fsdp import sharded_parts
from mmrl.vision.decoding.prefill import merge_media, squeeze_axes
from mmrl.vision.decoding.prefix_tree import PrefixTree
from mmrl.vision.models.model_families import family_of


def reads_trees(model: nn.Module, *, packed: bool) -> bool:
    """Return whether a model reads what rows share once, `packed` into one sequence or with a cache."""
    core = model.base_model
    # A pruned model chooses among the visual tokens of a prompt as a whole.
    own = any("forward" in vars(part) for part in (core, core.get_decoder()))
    # Processes whose weights are sharded wait for each other in every pass, and trees differ in depth.
    return (
        not own
        and only_attends(core.config.get_text_config(decoder=True))
        and not family_of(core.config).types
        and (packed or not sharded_parts(model))
    )


@dataclass(eq=False)
class States:
    """The last hidden states of nodes, all in a row: those of a node begin at `starts`."""

    starts: list[int]
    parts: list[Tensor] = field(default_factory=list)
    size: int = 0

    def add(self, hidden: Tensor, level: Sequence[int], padding: Sequence[int]) -> None:
        """Append the states (n, L, W) of nodes with `padding` tokens before them."""
        for place, (number, before) in enumerate(zip(level, padding, strict=True)):
            self.starts[number] = self.size + place * hidden.shape[1] + before
        self.parts.append(hidden.flatten(0, 1))
        self.size += len(self.parts[-1])


def read_tree(core: nn.Module, tree: PrefixTree) -> tuple[Tensor, list[int]] | None:
    """Run the nodes of one depth at a time: states (M, W), and where those of every node begin.

    Gradients of all that read a node add up in it. Returns None where the attention of the model reads other
    keys than those of its cache.
    """
    device = core.get_input_embeddings().weight.device
    states, inner = States([0] * len(tree.nodes)), {node.parent for node in tree.nodes}
    first, *levels = tree.levels()
    cache = _read_roots(core, tree, first, states, device)
    if cache is None:
        return None
    above = first  # the nodes that are prompts of the cache
    for level in levels:
        place = {number: i for i, number in enumerate(above)}
        cache.batch_select_indices(
            torch.tensor([place[tree.nodes[number].parent] for number in level]).to(device)
        )
        with read_shared_prefix(core.config):  # it knows the padding, and needs no mask
            hidden = core(**_inputs(tree, level, device, "right"), past_key_values=cache, use_cache=True)
        states.add(hidden.last_hidden_state, level, [0] * len(level))
        if rows := [i for i, number in enumerate(level) if number in inner]:
            count = torch.tensor([len(tree.nodes[number]) for number in level], device=device)
            cache = rows_as_prompts(cache, torch.tensor(rows, device=device), count)
        above = [level[i] for i in rows]
    return torch.cat(states.parts), states.starts


def _read_roots(
    core: nn.Module, tree: PrefixTree, level: Sequence[int], states: States, device: torch.device
) -> Any | None:
    """Run the nodes that begin rows, and return a cache of them."""
    inputs, filled = _inputs(tree, level, device, "left"), exact_cache(core.config)
    mask = pad_nodes([torch.ones_like(tree.ids(number)) for number in level], device)
    with record_keys(core.config) as recorded:
        hidden = core(**inputs, attention_mask=mask, past_key_values=filled, use_cache=True).last_hidden_state
    states.add(hidden, level, (mask == 0).sum(1).tolist())
    return share_prefix(filled, recorded, mask) if recorded else None


def _inputs(tree: PrefixTree, level: Sequence[int], device: torch.device, side: str) -> dict[str, Tensor]:
    """Make the inputs of nodes, padded on a side."""
    positions = pad_nodes([tree.positions(number).T for number in level], device, side)
    return {
        "input_ids": pad_nodes([tree.ids(number) for number in level], device, side),
        "position_ids": squeeze_axes(positions.permute(2, 0, 1).contiguous()),
        **merge_media([media for number in level for media in tree.media(number)], device),
    }


def pad_nodes(sequences: list[Tensor], device: torch.device, side: str = "left") -> Tensor:
    """Pad sequences (L, ...) with 0 to one tensor (n, S, ...)."""
    return pad_sequence(sequences, batch_first=True, padding_side=side).to(device)
