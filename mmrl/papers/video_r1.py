"""Video-R1 (arXiv 2503.21776): bonuses for answers that need the order of frames, and for length.

Title: Video-R1: Reinforcing Video Reasoning in MLLMs
Formula: reward + bonus for right answers where p(ordered) >= min_ratio p(shuffled) over a group, and
+ 0.2 at 320 to 512 tokens.
Our reading: one order for all answers to a prompt; departs: single frames are shuffled before the
processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar

import torch

from mmrl.advantages.shape import column_of
from mmrl.config.ranges import AtMost, NonNegativeFloat, NonNegativeInt, Probability
from mmrl.config.registry import advantage, engine
from mmrl.core.protocols import Engine
from mmrl.core.reward_table import GroupStatistics, RewardTable, name_id
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Prompt, Rollouts, Trajectory
from mmrl.vision.media.prompts import map_frames


@engine(scope="vision", sets_tags={"frames"})
@dataclass(eq=False)
class WithShuffledFrames:
    """Sample further answers to copies of the videos with shuffled frames (Video-R1, arXiv 2503.21776).

    They are tagged `frames: shuffled`, are off-policy, and stand in the group of the video;
    `vision.temporal_contrast` compares them and takes them out of it. The times of frames stay in
    order, for models that see them. One order is drawn for all answers to a prompt in a
    collection. Prompts without a video get no further answers. Rewards see the video in order.

    Args:
        engine: The wrapped engine.
        share: Further answers, as a share of those asked for, rounded down.
    """

    engine: Engine
    _: KW_ONLY
    stream: Stream
    share: Probability = 0.5
    notes: ClassVar[frozenset[str]] = frozenset()  # all rows have the notes of the wrapped engine

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, and the copies of videos after them."""
        originals = {prompt.uid: prompt for prompt in prompts}
        counts = Counter(prompt.uid for prompt in prompts)
        # A name of its own: draws are keyed by it, and equal ones would tie both answers together.
        copies = {
            f"{uid}#shuffled": self._shuffled(prompt)
            for uid, prompt in originals.items()
            if any(medium.kind == "video" for medium in prompt.media)
        }
        asked = [
            replace(copy, uid=name)
            for name, copy in copies.items()
            for _ in range(int(self.share * counts[copy.uid]))
        ]
        rows = self.engine.rollout([*prompts, *asked])
        return tuple(
            _tagged(row, originals[copies[row.prompt.uid].uid]) if row.prompt.uid in copies else row
            for row in rows
        )

    def _shuffled(self, prompt: Prompt) -> Prompt:
        """Permute the frames of a prompt's videos, when they are loaded."""
        stream = replace(self.stream)  # of this step and round, whenever the frames are loaded

        def shuffle(frames: Frames) -> Frames:
            order = torch.randperm(
                len(frames.pixels), generator=stream.generator("shuffled_frames", prompt.uid)
            )
            return replace(frames, pixels=frames.pixels[order])  # an image is one frame and stays

        return map_frames(prompt, shuffle)


def _tagged(row: Trajectory, prompt: Prompt) -> Trajectory:
    """Put a row to a copy into the group of the original, with the tag."""
    outcomes = tuple(
        replace(outcome, tags={**outcome.tags, "frames": "shuffled"}) for outcome in row.outcomes
    )
    return replace(row, prompt=prompt, group=prompt.uid, outcomes=outcomes, on_policy=False)


@advantage(scope="vision")
def temporal_contrast(
    table: RewardTable, *, of: str, min_ratio: NonNegativeFloat = 0.8, bonus: float = 0.3, above: float = 0.1
) -> RewardTable:
    """Add a bonus to right answers of groups that do no worse than with shuffled frames (T-GRPO).

    arXiv 2503.21776. The rows that `vision.with_shuffled_frames` added are compared here and then leave
    their group: they count in no later statistic and are not learned from. Groups without such rows, of
    images, get no bonus. Put it before `total`, which multiplies the bonus by the weight of the reward.

    Args:
        of: Name of the reward that says whether an answer is correct, and that gets the bonus.
        min_ratio: Least mean reward for a bonus, as a share of the mean with shuffled frames.
        bonus: What is added.
        above: An answer is correct where the reward is larger than this.
    """
    place = column_of(table, of)
    frames = table.ids.get("frames", torch.zeros_like(table.ends))
    shuffled = (frames == name_id("shuffled")).any(-1)[:, None]  # (N, 1): the row as a whole
    reward, known = table.values[:, place], table.valid[:, place]  # (N, K) each
    index = table.index(("group", "place"))
    ordered, other = (
        GroupStatistics(reward[:, None], (known & rows)[:, None], index) for rows in (~shuffled, shuffled)
    )
    # A group without shuffled rows has the mean 0 there, which every group would reach.
    earned = (other.count() > 0) & (ordered.mean() >= min_ratio * other.mean())  # (N, 1, K)
    values = table.values.clone()
    right = earned[:, 0] & known & (reward > above) & ~shuffled
    values[:, place] = torch.where(right, reward + bonus, reward)
    return table.replace(values=values, valid=table.valid & ~shuffled[:, None], learn=table.learn & ~shuffled)


@advantage
def length_band(
    table: RewardTable,
    *,
    of: str,
    shortest: Annotated[NonNegativeInt, AtMost("longest")] = 320,
    longest: NonNegativeInt = 512,
    bonus: float = 0.2,
    above: float = 0.1,
) -> RewardTable:
    """Add a bonus to correct answers of medium length (Video-R1, arXiv 2503.21776).

    It is for groups in which more than one answer is correct as measured; other pieces of the chain do not
    count. Put it before `total`, which multiplies the bonus by the weight of the reward.

    Args:
        of: Name of the reward that says whether an answer is correct, and that gets the bonus.
        shortest: Fewest tokens of an answer with a bonus, the end token included.
        longest: Most tokens.
        bonus: What is added.
        above: An answer is correct where the reward is larger than this.
    """
    place = column_of(table, of)
    right = table.valid[:, place] & (table.scored[of] > above)  # (N, K); rows that left the group are not
    index = table.index(("group", "place"))
    several = GroupStatistics(table.values[:, [place]], right[:, None], index).count()[:, 0] > 1
    inside = (table.ends >= shortest) & (table.ends <= longest)
    values = table.values.clone()
    values[:, place] = torch.where(right & several & inside, values[:, place] + bonus, values[:, place])
    return table.put(values)
