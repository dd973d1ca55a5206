"""Visual tokens that are alike become one."""

from __future__ import annotations

from functools import partial

from torch import nn

from mmrl.compression.importance import check_share
from mmrl.compression.pruning.prune import prune
from mmrl.compression.pruning.spec import Cut, add_cuts
from mmrl.compression.pruning.token_selection import merged
from mmrl.config.ranges import NonNegativeInt, Probability
from mmrl.config.registry import transform


@transform
def tome(model: nn.Module, *, keep: Probability = 0.5, before: NonNegativeInt = 0) -> nn.Module:
    """Merge the most alike visual tokens of a prompt, in front of layer `before`, until a share is left.

    Bipartite soft matching on hidden states, means weighed by how many tokens each stands for; a merged token
    keeps the position of one of them. Attention is not weighed by size (our reading: keys are cached once).
    arXiv 2210.09461.
    """
    check_share("keep", keep)
    cuts = add_cuts(model, [Cut(before, partial(merged, keep=keep))])
    return prune(model, "tome", {"keep": keep, "before": before}, cuts=cuts)
