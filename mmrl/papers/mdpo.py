"""mDPO (arXiv 2406.11839): DPO that also compares the chosen answer with and without its image.

Title: mDPO: Conditional Preference Optimization for Multimodal Large Language Models
Formula: L = DPO(y_w, y_l) + DPO(image, corrupted image; y_w) - log sigmoid(beta g_w - delta).
Our reading: policy and reference see the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.advantages.pairs import tagged_rows
from mmrl.config.ranges import Ascending, PositiveFloat, PositiveShare, Range, Tag
from mmrl.config.registry import advantage, compare, engine
from mmrl.core.protocols import Engine
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_sum
from mmrl.core.types import Frames, Prompt, Rollouts, Unit
from mmrl.objectives.compare import Level, margins, mean_over_groups
from mmrl.objectives.labels import labelled, sum_over_labelled
from mmrl.vision.engines.derived_answers import answer_half
from mmrl.vision.media.prompts import add_frame_noise, map_frames, random_crop, without_media


@advantage
def corrupted_as_rejected(table: RewardTable, *, tag: Tag = "twin") -> RewardTable:
    """Use the corrupted copy of every best row as a further rejected row (mDPO, arXiv 2406.11839).

    All other corrupted copies are dropped. Put it after `best_vs_worst` with `tag` among its `by`, which
    compares the corrupted copies among themselves: the best of them is the copy of the best row.
    """
    twin = tagged_rows(table, tag)
    values = torch.where(twin[:, None], -table.values.clamp(min=0), table.values)  # best copy: 1 to -1
    return table.replace(values=values, learn=table.learn & (~twin | (values < 0).any(1)))


@compare(unit=Unit.GROUP)
def sigmoid_each(
    implicit_reward: Tensor, batch: Batch, *, beta: PositiveFloat = 0.1, level: Level = "row"
) -> Tensor:
    """Sum the DPO loss of the chosen rows against each rejected row of a group in turn.

    For a pair it equals `sigmoid`. With a rejected answer and the chosen answer to a corrupted image as
    rejected rows, it is mDPO's preference between answers and between images (arXiv 2406.11839).
    """
    index = group_index([batch.group])
    merit = batch.advantage * batch.mask * implicit_reward
    better, worse = (torch.where(sign * batch.advantage > 0, merit, 0.0) for sign in (1, -1))
    other = batch.mask * (batch.advantage < 0)
    if level == "row":
        better, worse, other = (part.sum(-1, keepdim=True) for part in (better, worse, other))
    margin = group_sum(better, index)[index] + worse  # chosen minus each rejected one, whose sign is -1
    loss = group_sum(torch.where(other > 0, softplus(-beta * margin), 0.0), index)
    return mean_over_groups(loss, margins(implicit_reward, batch, level)[1], batch)


@compare(unit=Unit.GROUP)
def anchor_chosen(
    implicit_reward: Tensor,
    batch: Batch,
    *,
    beta: PositiveFloat = 0.1,
    delta: float = 0.0,
    level: Level = "row",
) -> Tensor:
    """Anchor the implicit reward g of chosen rows above `delta` (mDPO, arXiv 2406.11839).

    The loss is -log sigmoid(beta g - delta).

    Args:
        beta: Scale of implicit rewards, above 0.
        delta: Value, in units of beta g, above which the chosen row is pulled.
        level: Label rows (`row`) or single steps (`step`).
    """
    reward, label = labelled(beta * implicit_reward, batch, level)
    return sum_over_labelled(softplus(delta - reward) * (label > 0), label, batch)


@engine(scope="vision", sets_tags={"twin"})
@dataclass(eq=False)
class WithCorruptedImage:
    """Pair half of a prompt's rollouts with the same answers to a corrupted image, tagged `twin` (mDPO).

    arXiv 2406.11839. The copies take the place of the second half of the rollouts. One corruption is drawn
    for all answers to a prompt in a collection. A copy's text is encoded anew, and keeps what was recorded of
    its answer. Rewards that look at the prompt see the image uncorrupted.

    Args:
        engine: The wrapped engine.
        kind: "crop" shows an enlarged random crop; "noise" adds VCD's noise; "blind" removes the media.
        scale: Least and largest share of the area that a crop shows; mDPO: 0.01 to 0.2.
        noise_step: Diffusion step of the noise, 0 to 999.
    """

    engine: Engine
    _: KW_ONLY
    stream: Stream
    kind: Literal["crop", "noise", "blind"] = "crop"
    scale: Annotated[tuple[PositiveShare, PositiveShare], Ascending()] = (0.01, 0.2)
    noise_step: Annotated[int, Range(0, 999)] = 500
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine for half of the rollouts, and append their copies with corrupted images."""
        rows, copied = answer_half(self.engine, prompts)
        twins = []
        corrupted = {prompt.uid: self._corrupted(prompt) for prompt in prompts}
        for uid, originals in copied.items():
            for row in originals:
                answer = row.outcomes[-1]
                twin = self.policy.encode(corrupted[uid], answer)
                last = twin.outcomes[-1]
                last = replace(last, tags={**last.tags, "twin": self.kind}, recorded=answer.recorded)
                twins.append(
                    replace(twin, prompt=row.prompt, group=row.group, outcomes=(last,), on_policy=False)
                )
        return (*rows, *twins)

    def _corrupted(self, prompt: Prompt) -> Prompt:
        if self.kind == "blind":
            return without_media(prompt)

        def corrupt(frames: Frames) -> Frames:
            # A new generator per call, so that a prompt that is loaded twice shows the same frames.
            generator = self.stream.generator("distortion", prompt.uid)
            if self.kind == "crop":
                return random_crop(frames, generator, self.scale)
            return add_frame_noise(frames, generator, self.noise_step)

        return map_frames(prompt, corrupt)
