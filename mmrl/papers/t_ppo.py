"""A sampler that asks first for the rest of answers that a window cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrl.config.registry import sampler
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.row_prompts import ByUid
from mmrl.data.unfinished import BEGUN, NOTED, UNFINISHED


@sampler(notes=set(NOTED))
class WithUnfinished:
    """Ask for the rest of unfinished answers first, and fill the step up with new prompts (T-PPO).

    arXiv 2506.15050. The engine `vision.with_window` cuts answers and continues them. A step has as many
    rollouts as without it; groups of one prompt are not kept together, so that the chain must compare with a
    critic and not within groups.
    """

    def __init__(self, sampler: Sampler, *, stream: Stream, train_prompts: Sequence[Prompt] = ()) -> None:
        self.sampler, self.stream = sampler, stream
        self.prompts = ByUid(train_prompts)
        self.waiting: list[dict[str, Any]] = []  # unfinished answers, in the order of the reward table

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Return the prompts of unfinished answers with what they begin with, then new ones."""
        slots = num_prompts * num_generations
        # Those of another round of this step wait for the next one.
        begun = [answer for answer in self.waiting if answer["step"] < self.stream.step][:slots]
        self.waiting = [answer for answer in self.waiting if not any(answer is one for one in begun)]
        entries = [self._begun(answer) for answer in begun]
        if missing := slots - len(entries):
            # Rounded up to whole groups, the last of which is cut.
            entries += self.sampler.draw(-(-missing // num_generations), num_generations)[:missing]
        return entries

    def _begun(self, answer: Mapping[str, Any]) -> Prompt:
        prompt = self.prompts[answer["uid"]]
        return replace(prompt, columns={**prompt.columns, BEGUN: {name: answer[name] for name in NOTED}})

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Remember the unfinished answers of a round."""
        if UNFINISHED not in table.ids:
            return
        open_rows = (table.ids[UNFINISHED].any(-1) & (table.ids["on_policy"][:, 0] == 1)).nonzero()[:, 0]
        for row in open_rows.tolist():
            notes = {name: table.notes[name][row, : int(table.length[row])] for name in NOTED}
            self.waiting.append({"uid": table.uids[row], "step": self.stream.step, **notes})

    def tell(self) -> Mapping[str, float]:
        """Report how many answers go on in the next step."""
        return {"sampler/unfinished": float(len(self.waiting))}

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished answers."""
        return {"waiting": {str(number): dict(answer) for number, answer in enumerate(self.waiting)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the unfinished answers."""
        found = {int(number): answer for number, answer in state["waiting"].items()}
        self.waiting = [dict(found[number]) for number in sorted(found)]
