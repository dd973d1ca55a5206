"""The cache `vl_cache`: prompt tokens that the text attends to least are dropped (arXiv 2410.23317)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import cache
from mmrl.kv_cache.blocks import ExactBlock, collect
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import GrowingTail, QuantizedLayer, Recipe, Stored
from mmrl.kv_cache.layout import Part, PromptLayout


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Options of VL-Cache: how tokens are scored, and how many each layer keeps."""

    keep: float
    by_density: bool
    window: int
    recent: float
    threshold: float
    pool: int

    def share(self, density: Tensor) -> Tensor:
        """Allocate each layer its share of a prompt's tokens: densities (L, P) to (L, P)."""
        if not self.by_density or self.keep == 1:
            return torch.full_like(density, self.keep)
        total = density.sum(0).clamp(min=1e-12)
        return (density / total * self.keep * len(density)).clamp(0.01, 1.0)


@dataclass(eq=False, kw_only=True)
class VLCacheRecipe(Recipe):
    """Tokens of one layer, chosen once every layer has seen the queries of the prompt."""

    budget: Budget
    waiting: list[QuantizedLayer]  # shared by all layers, until the last one is scored
    num_layers: int
    scores: Tensor | None = None  # (P, h, S)
    density: Tensor | None = None  # (P,)
    kept: Tensor | None = field(default=None)  # (P, h, n) slots
    needs_queries = True

    def score(self, held: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Score tokens by the attention of the text after the last image, with queries (P, H, S, D).

        The last layer's call decides what every layer keeps, and stores it.
        """
        keys = held.pending[0]
        self.scores, self.density = score_tokens(
            query, keys, held.layout.visual, held.layout.real, scaling, self.budget
        )
        self.waiting.append(held)
        if len(self.waiting) == self.num_layers:
            shares = self.budget.share(torch.stack([x.recipe.density for x in self.waiting]))
            for waiting, share in zip(self.waiting, shares, strict=True):
                recipe = waiting.recipe
                recipe.kept = choose(recipe.scores, waiting.layout.real, share, self.budget.recent)
                recipe.scores = None
                waiting.store(*waiting.pending)
            self.waiting.clear()

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Keep the chosen tokens of prompts (P, h, S, D)."""
        keys_, values_ = (
            [Part(ExactBlock(collect(x, self.kept)), self.kept, name="")] for x in (keys, values)
        )
        return keys_, values_, GrowingTail(layout.length)


def score_tokens(
    query: Tensor, keys: Tensor, visual: Tensor, real: Tensor, scaling: float, budget: Budget
) -> tuple[Tensor, Tensor]:
    """Score tokens by the attention they get, (P, h, S), and measure the density of that attention, (P,).

    The queries are those of the last `window` tokens after the last visual one, or of the last tokens of the
    prompt if there are none (our reading). A key head gets the mean over its query heads. The density is the
    share of visible tokens with at least `threshold` times the largest weight.
    """
    rows, heads, length, size = query.shape
    real, visual = real.to(query.device), visual.to(query.device)
    slots = _query_slots(visual, real, budget.window)
    index = slots.clamp(min=0)
    picked = query.gather(2, index[:, None, :, None].expand(-1, heads, -1, size))
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = picked.to(exact).unflatten(1, (keys.shape[1], -1)).flatten(2, 3) * scaling
    logits = (grouped @ keys.to(exact).transpose(-1, -2)).unflatten(2, (-1, index.shape[1]))
    at = torch.arange(length, device=query.device)
    seen = (real[:, None, :] & (at <= index[:, :, None])) & (slots >= 0)[:, :, None]
    weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    scores = weights.mean(2).sum(2)
    large = weights >= budget.threshold * weights.amax(-1, keepdim=True)
    large = (large & seen[:, None, None]).to(exact).mean((1, 2)).sum((1, 2))
    density = large / seen.sum((1, 2)).clamp(min=1)
    if budget.pool > 1:
        scores = torch.nn.functional.avg_pool1d(scores, budget.pool, 1, budget.pool // 2)[..., :length]
    return scores, density


def _query_slots(visual: Tensor, real: Tensor, window: int) -> Tensor:
    """List the slots (P, w) of the tokens whose queries score, -1 where there are fewer."""
    at = torch.arange(real.shape[1], device=real.device)
    last = torch.where(visual, at, -1).amax(1, keepdim=True)
    after = real & (at > last)
    after = torch.where(after.any(1, keepdim=True), after, real)
    newest = torch.where(after, at, -1).sort(1, descending=True).values[:, :window]
    return newest[:, : max(1, int((newest >= 0).sum(1).max()))]


def choose(scores: Tensor, real: Tensor, share: Tensor, recent: float) -> Tensor:
    """Choose tokens by scores (P, h, S) and shares (P,): slots (P, h, n), -1 at the end of shorter prompts.

    The part `recent` of a prompt's budget goes to its newest tokens, the rest to the highest scores; of equal
    scores the newer token stays.
    """
    real = real.to(scores.device)
    length = real.sum(1)
    num = (share * length).floor().long().clamp(min=1).minimum(length)
    newest = (recent * num).ceil().long()
    age = real.flip(1).cumsum(1).flip(1)  # 1 for the newest token
    rank = torch.where((age <= newest[:, None])[:, None], torch.inf, scores)
    rank = rank.masked_fill(~real[:, None], -torch.inf)
    order = rank.flip(-1).argsort(dim=-1, descending=True, stable=True)
    order = scores.shape[-1] - 1 - order[..., : int(num.max())]
    kept = torch.arange(order.shape[-1], device=scores.device) < num[:, None, None]
    return torch.where(kept, order, order.shape[-1] + scores.shape[-1]).sort(-1).values.where(kept, -1)


@cache
def vl_cache(
    config: Any,
    visual: Tensor | None,
    mask: Tensor | None,
    *,
    keep: Probability = 0.1,
    layers: Literal["density", "uniform"] = "density",
    window: PositiveInt = 50,
    recent: Probability = 0.1,
    threshold: Probability = 0.01,
    pool: PositiveInt = 1,
) -> Any:
    """Keep the prompt tokens, visual or not, that the text after the images attends to (arXiv 2410.23317).

    Key heads choose separately. The whole prompt is in memory until its last layer has been read. With
    `layers: uniform`, `window: 64` and `pool: 7` this resembles SnapKV (arXiv 2404.14469).

    Args:
        config: Config of the model.
        visual: Which tokens are visual, (P, S) bool.
        mask: Which tokens are not padding, (P, S) bool.
        keep: Share of tokens to keep, in (0, 1], on average over layers (paper: 0.1).
        layers: Layers with denser attention keep more (as in the paper), or all keep the same share.
        window: Newest tokens whose attention scores the others.
        recent: Share of the budget for the newest tokens, in [0, 1].
        threshold: Weight, relative to the largest, above which attention counts as dense (paper: 0.01).
        pool: Scores are averaged over so many neighbouring tokens, an odd number.
    """
    for name, number, good in (
        ("keep", keep, 0 < keep <= 1),
        ("recent", recent, 0 <= recent <= 1),
        ("window", window, window >= 1),
        ("pool", pool, pool >= 1 and pool % 2 == 1),
    ):
        if not good:
            raise ValueError(f"`{name}` of vl_cache is out of its range: {number}")
    budget = Budget(
        keep=keep,
        by_density=layers == "density",
        window=window,
        recent=recent,
        threshold=threshold,
        pool=pool,
    )
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    waiting: list[QuantizedLayer] = []
    recipes = [
        VLCacheRecipe(budget=budget, waiting=waiting, num_layers=num_layers) for _ in range(num_layers)
    ]
    return make_cache(config, PromptLayout(visual, mask), recipes, fused=True)
