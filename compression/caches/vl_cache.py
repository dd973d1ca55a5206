"""The cache `vl_cache`: drops prompt tokens that get the least attention from text (arXiv 2410.23317)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt, PositiveShare, Probability
from mmrl.config.registry import cache
from mmrl.kv_cache.blocks import ExactBlock, collect
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import QuantizedLayer, Recipe, Stored
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.tails import GrowingTail


@dataclass(eq=False, kw_only=True)
class VLCacheRecipe(Recipe):
    """Recipe of VL-Cache: options and token scores of all layers so far, in one object for all layers."""

    keep: float
    by_density: bool
    window: int
    recent: float
    threshold: float
    pool: int
    num_layers: int
    # Layers scored so far, with scores (P, h, S) and density (P,); all tokens are chosen after the last one.
    scored: list[tuple[QuantizedLayer, Tensor, Tensor]] = field(default_factory=list)
    chosen: Tensor | None = None  # (P, h, n) chosen slots of the layer that is stored next
    needs_queries = True

    def score(self, layer: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Score tokens by the attention from the text after the last image; queries are (P, H, S, D).

        The call for the last layer also chooses the tokens of every layer and stores them.
        """
        masks = layer.layout.visual, layer.layout.real  # (P, S) each
        options = {"window": self.window, "threshold": self.threshold, "pool": self.pool}
        self.scored.append((layer, *score_tokens(query, layer.pending[0], *masks, scaling, **options)))
        if len(self.scored) < self.num_layers:
            return
        density = torch.stack([density for _, _, density in self.scored])
        shares = allocate(density, self.keep) if self.by_density else torch.full_like(density, self.keep)
        for (waiting, scores, _), share in zip(self.scored, shares, strict=True):
            self.chosen = choose(scores, waiting.layout.real, share, self.recent)
            waiting.store(*waiting.pending)
        self.scored, self.chosen = [], None

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Store only the chosen tokens of P prompts' keys and values (P, h, S, D)."""
        parts = ([Part(ExactBlock(collect(x, self.chosen)), self.chosen)] for x in (keys, values))
        return *parts, GrowingTail(layout.length)


def allocate(density: Tensor, keep: float) -> Tensor:
    """Compute the fractions (L, P) of P prompts' tokens that L layers keep, by attention densities (L, P)."""
    if keep == 1:
        return torch.ones_like(density)
    # Fractions are proportional to densities; after clamping to [0.01, 1], their mean may differ from `keep`.
    total = density.sum(0).clamp(min=1e-12)
    return (density / total * keep * len(density)).clamp(0.01, 1.0)


def score_tokens(
    query: Tensor, keys: Tensor, visual: Tensor, real: Tensor, scaling: float, *, window: int,
    threshold: float, pool: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Score tokens by the attention they get, (P, h, S), and measure the density of that attention, (P,).

    The queries are the last `window` tokens after the last visual token, or the last tokens of the prompt if
    it ends with visual tokens (our reading). The scores of a key head are averaged over its query heads. The
    density is the fraction of visible tokens with at least `threshold` times the largest weight.
    """
    _, heads, length, size = query.shape
    real, visual = real.to(query.device), visual.to(query.device)
    at = torch.arange(length, device=query.device)
    after = real & (at > torch.where(visual, at, -1).amax(1, keepdim=True))
    after = torch.where(after.any(1, keepdim=True), after, real)
    # Slots (P, w) of the tokens whose queries are used, the newest first; -1 if there are fewer tokens.
    slots = torch.where(after, at, -1).sort(1, descending=True).values[:, :window]
    slots = slots[:, : max(1, int((slots >= 0).sum(1).max()))]
    index = slots.clamp(min=0)
    picked = query.gather(2, index[:, None, :, None].expand(-1, heads, -1, size))
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    # r query heads share a key head: queries (P, h, r * w, D) @ keys (P, h, D, S) -> (P, h, r, w, S)
    grouped = picked.to(exact).unflatten(1, (keys.shape[1], -1)).flatten(2, 3) * scaling
    logits = (grouped @ keys.to(exact).mT).unflatten(2, (-1, index.shape[1]))
    seen = (real[:, None, :] & (at <= index[:, :, None])) & (slots >= 0)[:, :, None]
    weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    scores = weights.mean(2).sum(2)  # mean over the query heads of a key head, sum over queries
    large = weights >= threshold * weights.amax(-1, keepdim=True)
    large = (large & seen[:, None, None]).to(exact).mean((1, 2)).sum((1, 2))
    density = large / seen.sum((1, 2)).clamp(min=1)
    if pool > 1:
        scores = torch.nn.functional.avg_pool1d(scores, pool, 1, pool // 2)[..., :length]
    return scores, density


def choose(scores: Tensor, real: Tensor, share: Tensor, recent: float) -> Tensor:
    """Choose the fraction `share` (P,) of each prompt's tokens; return their slots (P, h, n), padded with -1.

    The fraction `recent` of a prompt's budget goes to its newest tokens, the rest to the tokens with the
    highest `scores` (P, h, S). Among equal scores the newer token is chosen.
    """
    real = real.to(scores.device)
    length = real.sum(1)
    num = (share * length).floor().long().clamp(min=1).minimum(length)
    newest = (recent * num).ceil().long()
    age = real.flip(1).cumsum(1).flip(1)  # 1 for the newest token
    rank = torch.where((age <= newest[:, None])[:, None], torch.inf, scores)
    rank = rank.masked_fill(~real[:, None], -torch.inf)
    # Reverse the tokens before the stable sort, so that among equal scores the newer token comes first.
    order = rank.flip(-1).argsort(dim=-1, descending=True, stable=True)
    order = scores.shape[-1] - 1 - order[..., : int(num.max())]
    kept = torch.arange(order.shape[-1], device=scores.device) < num[:, None, None]
    # Sort the slots in sequence order; slots that are not chosen sort to the end and become -1.
    return torch.where(kept, order, order.shape[-1] + scores.shape[-1]).sort(-1).values.where(kept, -1)


@cache
def vl_cache(
    config: Any,
    visual: Tensor | None,
    mask: Tensor | None,
    *,
    keep: PositiveShare = 0.1,
    layers: Literal["density", "uniform"] = "density",
    window: PositiveInt = 50,
    recent: Probability = 0.1,
    threshold: Probability = 0.01,
    pool: PositiveInt = 1,
) -> Any:
    """Keep the prompt tokens that the text after the images attends to most (VL-Cache, arXiv 2410.23317).

    Visual and text tokens are treated alike. Each key head has its own selection. The whole prompt stays in
    memory until the last layer is scored. With `layers: uniform`, `window: 64` and `pool: 7` the cache
    resembles SnapKV (arXiv 2404.14469).

    Args:
        config: Configuration of the model.
        visual: Mask of the visual tokens, (P, S) bool for P prompts of S tokens.
        mask: Mask of the tokens that are not padding, (P, S) bool.
        keep: Fraction of the tokens to keep, in (0, 1], averaged over layers (paper: 0.1).
        layers: Allocation of the tokens. `density`: more tokens to layers with denser attention, as in the
            paper. `uniform`: the same fraction in all layers.
        window: Number of newest tokens whose attention gives the scores.
        recent: Fraction of the budget for the newest tokens, in [0, 1].
        threshold: Attention weight, relative to the largest, from which a token counts as attended to (paper:
            0.01).
        pool: Number of neighbouring tokens over which scores are averaged; must be odd.
    """
    if pool % 2 == 0:
        raise ValueError(
            f"`pool` of vl_cache must be odd, so that a mean is centred on its token, not {pool}"
        )
    recipe = VLCacheRecipe(
        keep=keep, by_density=layers == "density", window=window, recent=recent, threshold=threshold,
        pool=pool, num_layers=config.get_text_config(decoder=True).num_hidden_layers,
    )  # fmt: skip
    return make_cache(config, visual, mask, recipe, fused=True)
