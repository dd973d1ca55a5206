"""Tokens of a prompt that its text attends to, the others dropped (VL-Cache, arXiv 2410.23317)."""

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
    """How many tokens of a prompt a layer keeps."""

    keep: float
    by_density: bool
    window: int
    recent: float
    threshold: float
    pool: int

    def share(self, density: Tensor) -> Tensor:
        """Give every layer its share of a prompt's tokens: densities (L, P) to (L, P)."""
        if not self.by_density or self.keep == 1:  # nothing is to be shared out where everything stays
            return torch.full_like(density, self.keep)
        total = density.sum(0).clamp(min=1e-12)
        return (density / total * self.keep * len(density)).clamp(0.01, 1.0)


@dataclass(eq=False, kw_only=True)
class VLCacheRecipe(Recipe):
    """What a layer keeps, which is known once every layer has seen the queries of the prompt."""

    budget: Budget
    waiting: list[QuantizedLayer]  # of all layers, until the last one has been watched
    num_layers: int
    scores: Tensor | None = None  # (P, h, S)
    density: Tensor | None = None  # (P,)
    kept: Tensor | None = field(default=None)  # (P, h, n) slots
    needs_queries = True

    def score(self, held: QuantizedLayer, query: Tensor, scaling: float) -> None:
        """Score tokens by the attention of the text behind the last picture: (P, H, S, D) queries.

        The last layer settles what every layer keeps.
        """
        keys = held.pending[0]
        self.scores, self.density = score_tokens(
            query, keys, held.layout.visual, held.layout.real, scaling, self.budget
        )
        self.waiting.append(held)
        if len(self.waiting) == self.num_layers:
            shares = self.budget.share(torch.stack([one.recipe.density for one in self.waiting]))
            for one, share in zip(self.waiting, shares, strict=True):
                one.recipe.kept = choose(one.recipe.scores, one.layout.real, share, self.budget.recent)
                one.recipe.scores = None
                one.store(*one.pending)
            self.waiting.clear()

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Keep the chosen tokens of a prompt (P, h, S, D)."""
        keys_, values_ = (
            [Part(ExactBlock(collect(x, self.kept)), self.kept, name="")] for x in (keys, values)
        )
        return keys_, values_, GrowingTail(layout.length)


def score_tokens(
    query: Tensor, keys: Tensor, visual: Tensor, real: Tensor, scaling: float, budget: Budget
) -> tuple[Tensor, Tensor]:
    """Score tokens by the attention they get, and say how dense it is: (P, h, S) and (P,).

    Asked are the last `window` tokens behind the last visual one, or, where there are none, the last of the
    prompt (our reading). A head of keys has the mean over its query heads. The density is the share of seen
    tokens that get at least `threshold` of the largest weight.
    """
    rows, heads, length, size = query.shape
    real, visual = real.to(query.device), visual.to(query.device)
    asked = _asked(visual, real, budget.window)
    several = asked >= 0
    where = asked.clamp(min=0)
    picked = query.gather(2, where[:, None, :, None].expand(-1, heads, -1, size))
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = picked.to(exact).unflatten(1, (keys.shape[1], -1)).flatten(2, 3) * scaling
    logits = (grouped @ keys.to(exact).transpose(-1, -2)).unflatten(2, (-1, where.shape[1]))
    at = torch.arange(length, device=query.device)
    seen = (real[:, None, :] & (at <= where[:, :, None])) & several[:, :, None]
    weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    scores = weights.mean(2).sum(2)
    large = weights >= budget.threshold * weights.amax(-1, keepdim=True)
    large = (large & seen[:, None, None]).to(exact).mean((1, 2)).sum((1, 2))
    density = large / seen.sum((1, 2)).clamp(min=1)
    if budget.pool > 1:
        scores = torch.nn.functional.avg_pool1d(scores, budget.pool, 1, budget.pool // 2)[..., :length]
    return scores, density


def _asked(visual: Tensor, real: Tensor, window: int) -> Tensor:
    """List the slots (P, w) of the tokens that ask, -1 where there are fewer."""
    at = torch.arange(real.shape[1], device=real.device)
    last = torch.where(visual, at, -1).amax(1, keepdim=True)
    behind = real & (at > last)
    behind = torch.where(behind.any(1, keepdim=True), behind, real)
    newest = torch.where(behind, at, -1).sort(1, descending=True).values[:, :window]
    return newest[:, : max(1, int((newest >= 0).sum(1).max()))]


def choose(scores: Tensor, real: Tensor, share: Tensor, recent: float) -> Tensor:
    """Choose tokens: scores (P, h, S) and shares (P,) to slots (P, h, n), -1 behind those of shorter
    prompts.

    Of a prompt's budget, the part `recent` goes to its newest tokens, the rest to the highest scores; ties
    go to the newer token.
    """
    real = real.to(scores.device)
    length = real.sum(1)
    num = (share * length).floor().long().clamp(min=1).minimum(length)
    newest = (recent * num).ceil().long()
    behind = real.flip(1).cumsum(1).flip(1)  # 1 for the newest token
    rank = torch.where((behind <= newest[:, None])[:, None], torch.inf, scores)
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
    """Keep the part `keep` of every prompt, chosen once it is read, and drop the rest, for one batch.

    VL-Cache (arXiv 2410.23317): what the last `window` tokens behind the pictures attend to is kept, visual
    or not, and the newest tack on the part `recent` of it. Layers whose attention is denser keep more; with
    `layers: uniform`, `window: 64` and `pool: 7` it resembles SnapKV (arXiv 2404.14469). Heads of keys choose
    apart. `visual` and `mask` are (P, S). The whole prompt is held until its last layer has been read.
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
    many = config.get_text_config(decoder=True).num_hidden_layers
    waiting: list[QuantizedLayer] = []
    recipes = [VLCacheRecipe(budget=budget, waiting=waiting, num_layers=many) for _ in range(many)]
    return make_cache(config, PromptLayout(visual, mask), recipes, fused=True)
