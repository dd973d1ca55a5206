"""Forward pass of a `PrefixTree`: every node runs once, with the keys and values of its ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kv_cache.attention_interface import read_shared_prefix, record_keys
from mmrl.kv_cache.hf_cache import exact_cache, only_attends, share_prefix
from mmrl.runtime.fsdp import sharded_parts
from mmrl.vision.decoding.prefill import merge_media, pad_positions, pad_rows, squeeze_axes
from mmrl.vision.decoding.prefix_tree import PrefixTree
from mmrl.vision.models.model_families import family_of, types_argument


def reads_trees(model: nn.Module, *, packed: bool) -> bool:
    """Return whether a model can run prefix trees: in one sequence if `packed`, else with a KV cache."""
    core = model.base_model
    # Exclude pruned models (replaced `forward`), which select among the visual tokens of a whole prompt.
    pruned = any("forward" in vars(part) for part in (core, core.get_decoder()))
    # Exclude sharded weights: all processes must run equally many passes, but trees differ in depth.
    return (
        not pruned
        and only_attends(core.config.get_text_config(decoder=True))
        and not types_argument(core.config)
        and (packed or not sharded_parts(model))
    )


@dataclass(eq=False)
class States:
    """The last hidden states of all nodes, concatenated; node i begins at `starts[i]`."""

    starts: list[int]
    parts: list[Tensor] = field(default_factory=list)
    size: int = 0

    def add(self, hidden: Tensor, level: Sequence[int], padding: Sequence[int]) -> None:
        """Append states (n, L, W) of a level's n nodes; `padding` is the left padding of each, in tokens."""
        for place, (number, before) in enumerate(zip(level, padding, strict=True)):
            self.starts[number] = self.size + place * hidden.shape[1] + before
        self.parts.append(hidden.flatten(0, 1))
        self.size += len(self.parts[-1])


def read_tree(core: nn.Module, tree: PrefixTree) -> tuple[Tensor, list[int]] | None:
    """Run a tree level by level; return the hidden states (M, W) of all nodes, and the nodes' offsets.

    Gradients of all rows below a node add up in the node. Returns None if the attention of the model does not
    read the keys of its cache (see `share_prefix`).
    """
    device = core.get_input_embeddings().weight.device
    states, inner = States([0] * len(tree.nodes)), {node.parent for node in tree.nodes}
    first, *levels = tree.levels()
    cache = _read_roots(core, tree, first, states, device)
    if cache is None:
        return None
    above = first  # numbers of the nodes that the cache stores as shared prompts
    for level in levels:
        place = {number: i for i, number in enumerate(above)}
        cache.batch_select_indices(
            torch.tensor([place[tree.nodes[number].parent] for number in level]).to(device)
        )
        with read_shared_prefix(core.config):  # the cache knows the padding, so no mask is needed
            hidden = core(
                **_inputs(core, tree, level, device, "right"), past_key_values=cache, use_cache=True
            )
        states.add(hidden.last_hidden_state, level, [0] * len(level))
        if rows := [i for i, number in enumerate(level) if number in inner]:
            count = torch.tensor([len(tree.nodes[number]) for number in level], device=device)
            cache = cache.rows_as_prompts(torch.tensor(rows, device=device), count)
        above = [level[i] for i in rows]
    return torch.cat(states.parts), states.starts


def _read_roots(
    core: nn.Module, tree: PrefixTree, level: Sequence[int], states: States, device: torch.device
) -> Any | None:
    """Run the root nodes; return a cache with them as shared prompts, None if attention ignores it."""
    inputs, filled = _inputs(core, tree, level, device, "left"), exact_cache(core.config)
    mask = pad_rows([torch.ones_like(tree.ids(number)) for number in level], device)
    with record_keys(core.config) as recorded:
        hidden = core(**inputs, attention_mask=mask, past_key_values=filled, use_cache=True).last_hidden_state
    states.add(hidden, level, (mask == 0).sum(1).tolist())
    return share_prefix(filled, recorded, mask) if recorded else None


def _inputs(
    core: nn.Module, tree: PrefixTree, level: Sequence[int], device: torch.device, side: str
) -> dict[str, Tensor]:
    """Create the model inputs of nodes, padded on the left or right (`side`)."""
    positions = pad_positions([tree.positions(number) for number in level], device, side)
    ids = pad_rows([tree.ids(number) for number in level], device, side)
    return {
        "input_ids": ids,
        "position_ids": squeeze_axes(positions),
        **family_of(core.config).experts(core.config, ids),
        **merge_media(core, [media for number in level for media in tree.media(number)], device),
    }
