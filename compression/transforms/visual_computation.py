"""Transforms that remove visual computation: layers, heads, feed-forward units, distant attention."""

from __future__ import annotations

from torch import nn

from mmrl.compression.importance import best_each, best_overall, check_chosen, first_units, read_plan
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import TokenReduction, shape_of
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Probability
from mmrl.config.registry import transform


@transform
def drop_visual_heads(
    model: nn.Module,
    *,
    keep: Probability = 0.5,
    plan: str = "",
    whole: NonNegativeInt = 2,
    heads: tuple[tuple[NonNegativeInt, ...] | None, ...] | None = None,
) -> nn.Module:
    """Keep a fraction of the attention heads for visual tokens; text attends to text in all heads.

    In a dropped head, visual tokens are neither queries nor keys. They are excluded before the softmax, which
    saves their computation; the released code zeroes them after the softmax. arXiv 2410.06169.

    Args:
        keep: Fraction of the query heads to keep, in [0, 1].
        plan: Path of an importance plan. The heads with the most attention to visual tokens are kept, ranked
            over all layers together. Without a plan, the first heads of every layer are kept.
        whole: Number of layers at the start that keep all heads; used only with a `plan`.
        heads: Query heads to keep, listed per layer (`null`: all heads of the layer), instead of `keep`.
    """
    shape = shape_of(model)
    if heads is None and plan:
        heads = best_overall(read_plan(plan, "heads"), keep, whole)  # the number may vary between layers
    elif heads is None:
        heads = first_units(keep, shape.layers, shape.heads)
    chosen = check_chosen("heads", heads, shape.layers, shape.heads)
    return prune(model, "drop_visual_heads", {"heads": chosen}, heads=chosen)


@transform
def drop_visual_layers(model: nn.Module, *, after: PositiveInt) -> nn.Module:
    """Remove visual tokens after `after` layers: later layers compute and cache text only.

    Text keeps its position ids. If `after` is the number of layers, nothing changes. arXiv 2410.06169; the
    released Qwen2-VL code masks the tokens, while this transform removes them.
    """
    return prune(model, "drop_visual_layers", {"after": after}, reductions=[TokenReduction(after)])


@transform
def local_visual_attention(model: nn.Module, *, radius: NonNegativeInt = 2, causal: bool = True) -> nn.Module:
    """Restrict attention between visual tokens to a window on the patch grid of their image.

    The window is `2 * radius + 1` patches wide and high. Visual tokens still attend to the text before them,
    and text attends to everything. Every image, tile and video frame has its own patch grid, and grids do not
    attend to each other. With `causal`, tokens attend only to earlier neighbours, as in the model's training;
    in the released LLaVA checkpoints they attend to later ones, too. With one image, a radius as large as the
    image changes nothing if `causal`. Separate grids and `causal` are our reading of arXiv 2410.06169.
    """
    options = {"radius": radius, "causal": causal}
    return prune(model, "local_visual_attention", options, **options)


@transform
def sparse_visual_ffn(
    model: nn.Module,
    *,
    keep: Probability = 0.5,
    plan: str = "",
    ffn_units: tuple[tuple[NonNegativeInt, ...] | None, ...] | None = None,
) -> nn.Module:
    """Keep a fraction of every feed-forward layer's inner units for visual tokens; text uses all units.

    By default the first units are kept, as in the paper, which then fine-tunes. arXiv 2410.06169.

    Args:
        keep: Fraction of the inner units to keep, in [0, 1].
        plan: Path of an importance plan that ranks units (our reading, for use without fine-tuning). The kept
            units are then not contiguous, so every call copies their weights.
        ffn_units: Inner units to keep, listed per layer (`null`: all units of the layer), instead of `keep`.
    """
    shape = shape_of(model)
    if ffn_units is None and plan:
        ffn_units = best_each(read_plan(plan, "ffn_units"), keep)
    elif ffn_units is None:
        ffn_units = first_units(keep, shape.layers, shape.inner)
    chosen = check_chosen("ffn_units", ffn_units, shape.layers, shape.inner)
    return prune(model, "sparse_visual_ffn", {"ffn_units": chosen}, ffn_units=chosen)


@transform
def shortv(
    model: nn.Module,
    *,
    freeze: Probability = 0.6,
    plan: str = "",
    layers: tuple[NonNegativeInt, ...] | None = None,
) -> nn.Module:
    """Skip visual tokens in the least important layers; text still attends to them there (ShortV).

    Frozen layers add nothing to the hidden states of visual tokens. arXiv 2504.00502.

    Args:
        freeze: Fraction of the layers that are frozen for visual tokens, in [0, 1] (the paper's 0.6).
        plan: Path of an importance plan; the layers with the lowest scores are frozen.
        layers: Layers to freeze, counted from 0, instead of `freeze` and `plan`.
    """
    total = shape_of(model).layers
    if layers is None:
        if not plan:
            raise ValueError(
                "`shortv` needs a `plan` with the importance of layers, or the `layers` to freeze"
            )
        # Negate the scores, so that the least important layers rank first.
        (layers,) = best_each([[-score for score in read_plan(plan, "layers")]], freeze)
    unknown = sorted(set(layers) - set(range(total)))
    if unknown:
        raise ValueError(f"the model has {total} layers, so there is no layer {unknown[0]}")
    chosen = tuple(sorted(set(layers)))
    return prune(model, "shortv", {"layers": chosen}, frozen=frozenset(chosen))


@transform
def yopo25(model: nn.Module, *, plan: str = "", causal: bool = True) -> nn.Module:
    """Prune visual computation to about a quarter by keeping half of the layers, heads and inner units.

    Visual attention has a window of 5 by 5 patches. The file `plan` chooses the heads. `causal` is as in
    `local_visual_attention`. The paper (arXiv 2410.06169) does not publish how budgets map to settings. This
    mapping is our reading; it leaves 24.5 % of the visual computation of LLaVA-1.5-7B by the paper's formula.
    """
    return _yopo(model, 0.5, plan, causal)


@transform
def yopo12(model: nn.Module, *, plan: str = "", causal: bool = True) -> nn.Module:
    """Prune visual computation to about an eighth: keep half of the layers, a quarter of heads and units.

    The window, `plan`, `causal` and our reading are as in `yopo25`. By the formula of the paper (arXiv
    2410.06169), 12.2 % of the visual computation remains.
    """
    return _yopo(model, 0.25, plan, causal)


def _yopo(model: nn.Module, keep: float, plan: str, causal: bool) -> nn.Module:
    model = local_visual_attention(model, radius=2, causal=causal)
    model = drop_visual_heads(model, keep=keep, plan=plan)
    model = sparse_visual_ffn(model, keep=keep)  # keeps the first units, as in the paper
    return drop_visual_layers(model, after=max(1, shape_of(model).layers // 2))
