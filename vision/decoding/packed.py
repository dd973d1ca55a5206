"""Forward passes over packed sequences: several rows of a batch in one sequence, with masks between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.kv_cache.attention_interface import BASES, attention_of, install
from mmrl.kv_cache.hf_cache import attention_types
from mmrl.vision.decoding.prefill import merge_media, pad_rows, squeeze_axes
from mmrl.vision.decoding.prefix_tree import ROOT, PrefixTree
from mmrl.vision.decoding.token_steps import TokenSteps, prompts_and_answers, where_read
from mmrl.vision.models.loading import model_config
from mmrl.vision.models.model_families import family_of, types_argument


def check_packing(model: str, packing: bool, attention: str, transform: Any, sp_size: int) -> None:
    """Raise `ConfigError` if these options of a policy, or its model, do not allow packing."""
    if not packing:
        return
    from transformers import MODEL_MAPPING

    config = objects.get(model).config if objects.is_object(model) else model_config(model)
    text, kind = config.get_text_config(decoder=True), f"a model of type '{config.model_type}'"
    other = sorted({*attention_types(text)} - {"full_attention", "sliding_attention", "chunked_attention"})
    attends = getattr(MODEL_MAPPING.get(type(config), None), "_supports_attention_backend", True)
    wrong = {
        f"layers that only attend, and {kind} has {', '.join(other)}": other,
        f"attention without token types, and tokens of an image attend to each other in {kind}": (
            types_argument(config)
        ),
        f"layers with the attention interface of transformers, which {kind} lacks": not attends,
        f"`attn_implementation: {' or '.join(BASES)}`, not '{attention}'": attention not in BASES,
        "no `transform`, which may read all tokens": transform,
        "`sp_size: 1`": sp_size != 1,
    }
    for needed, holds in wrong.items():
        if holds:
            raise ConfigError(f"`policy.packing` needs {needed}; set `packing: false`")


def read_packed(core: nn.Module, steps: TokenSteps) -> Tensor:
    """Compute the hidden states (N, longest, width) that predict tokens, without a KV cache.

    Gradient checkpointing needs this function: a recomputed layer must not write to a cache again. A prompt
    and its answers are one sequence; with `steps.packing`, all rows are one sequence without padding. The
    mask lets a token attend to earlier tokens of its own row only. States after a row's end are arbitrary.
    """
    device = core.get_input_embeddings().weight.device
    tree = steps.tree or prompts_and_answers(steps)
    roots = list(range(len(tree.nodes)))  # maps a node to its root
    for number, node in enumerate(tree.nodes):
        roots[number] = number if node.parent == ROOT else roots[node.parent]
    packs: dict[int, list[int]] = {}
    for number, root in enumerate(roots):
        packs.setdefault(root, []).append(number)
    packed = [number for pack in packs.values() for number in pack]
    sizes = [sum(len(tree.nodes[number]) for number in pack) for pack in packs.values()]
    rows = [packed] if steps.packing else list(packs.values())
    starts, longest = [0] * len(tree.nodes), sum(sizes) if steps.packing else max(sizes)
    for place, row in enumerate(rows):
        # Sequences are padded on the left.
        at = (place + 1) * longest - sum(len(tree.nodes[number]) for number in row)
        for number in row:
            starts[number], at = at, at + len(tree.nodes[number])
    ids, positions, owner, index, mask = _inputs(tree, rows, device)
    # Padding attends only to itself, so any id is valid. Use an id of an answer: the embedding of id 0 may be
    # a zero vector, at which the gradient of Gemma 3n is NaN.
    ids = ids.masked_fill(~mask, int(steps.ids.max()))
    # Eager attention needs an additive mask.
    dtype = core.dtype if attention_of(core.config) == "eager" else None
    windows, before = layer_windows(core.config), tree.before().to(device)
    if steps.packing:
        install(core.config)  # registers an attention function that keeps parts apart
        lines = all(len(pack) == len({tree.nodes[n].parent for n in pack}) for pack in packs.values())
        options = _masks_of_parts(windows, before, owner[0], index[0], sizes, dtype, causal=lines)
    else:
        options = {"attention_mask": _masks(windows, before, owner, index, mask, dtype)}
    media = [tensors for row in rows for number in row for tensors in tree.media(number)]
    hidden = core(
        input_ids=ids,
        use_cache=False,
        position_ids=squeeze_axes(positions.contiguous()),
        **options,
        **family_of(core.config).experts(core.config, ids),
        **merge_media(core, media, device),
    ).last_hidden_state
    return hidden.flatten(0, 1)[where_read(steps, tree, starts).to(device)]


def _inputs(tree: PrefixTree, rows: list[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Concatenate the nodes of each of P rows and pad them on the left to S tokens.

    Returns token ids (P, S), positions (A axes, P, S), the node of every token (P, S), its index in
    prompt and answer (P, S), and a bool mask (P, S) that is false for padding.
    """

    def packed(part: Callable[[int], Tensor]) -> Tensor:
        return pad_rows([torch.cat([part(number) for number in row]) for row in rows], device)

    sizes = list(map(len, tree.nodes))
    return (
        packed(tree.ids),
        packed(lambda number: tree.positions(number).T).permute(2, 0, 1),
        packed(lambda number: torch.full((sizes[number],), number)),
        packed(lambda number: torch.arange(tree.nodes[number].begin, tree.nodes[number].end)),
        packed(lambda number: torch.ones(sizes[number], dtype=torch.bool)),
    )


def _masks_of_parts(
    windows: dict[str, int | None],
    before: Tensor,
    owner: Tensor,
    index: Tensor,
    sizes: list[int],
    dtype: torch.dtype | None,
    *,
    causal: bool,
) -> dict[str, Any]:
    """Create the model arguments with which the tokens of a part attend to tokens of the same part only.

    A part is a prompt with its answers. The mask of a layer type is the flattened masks of all parts, shape
    (1, 1, 1, sum of squared `sizes`). A bool mask is empty, (1, 1, 1, 0), if plain causal attention within
    each part is right: `causal` says that no part branches, and no part exceeds the layer's window.
    """
    masks = {}
    for name, window in windows.items():
        if dtype is None and causal and (window is None or max(sizes) <= window):
            masks[name] = owner.new_zeros((1, 1, 1, 0), dtype=torch.bool)
            continue
        parts = [
            _masks(
                {name: window}, before, o[None], i[None], torch.ones_like(o, dtype=torch.bool)[None], dtype
            )
            for o, i in zip(owner.split(sizes), index.split(sizes), strict=True)
        ]
        masks[name] = torch.cat([part.flatten() for part in parts])[None, None, None]  # pyright: ignore
    mask = masks if len(masks) > 1 else masks.popitem()[1]
    return {"attention_mask": mask, "packed_sizes": tuple(sizes)}


def _masks(
    windows: dict[str, int | None],
    before: Tensor,
    owner: Tensor,
    index: Tensor,
    mask: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor | dict[str, Tensor]:
    """Create the mask (P, 1, S, S) of P packed sequences; if layers differ, one mask per layer type.

    Args:
        windows: Maps each layer type to its window, see `layer_windows`.
        before: (n, n) bool, the nodes that each node attends to.
        owner: (P, S) index of every token's node.
        index: (P, S) index of every token in its row.
        mask: (P, S) bool, False for padding.
        dtype: dtype of an additive mask; None: make a bool mask.
    """
    size = owner.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=owner.device).tril()
    seen = before[owner[:, :, None], owner[:, None, :]]  # (P, S, S): sequence, query token, key token
    # Let padding attend to itself, because a softmax over no keys is NaN.
    alone = torch.eye(size, dtype=torch.bool, device=owner.device) & ~mask[:, :, None]
    allowed = (earlier & seen & mask[:, None, :]) | alone
    distance = index[:, :, None] - index[:, None, :]  # (P, S, S) tokens between query and key in their row
    masks = {
        name: (allowed if window is None else allowed & (distance < window))[:, None]
        for name, window in windows.items()
    }
    if dtype is not None:
        lowest = torch.finfo(dtype).min
        masks = {
            name: torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, lowest)
            for name, allowed in masks.items()
        }
    return masks if len(masks) > 1 else masks.popitem()[1]


def layer_windows(config: Any) -> dict[str, int | None]:
    """Map each layer type of a model (full or sliding attention) to its window in tokens; None: no limit."""
    text = config.get_text_config(decoder=True)
    types = attention_types(text)
    window = text.sliding_window if "sliding_attention" in types else None
    windows = {"full_attention": None, "sliding_attention": window, "chunked_attention": None}
    return {name: windows[name] for name in types}
