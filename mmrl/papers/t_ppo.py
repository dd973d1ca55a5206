"""T-PPO (arXiv 2506.15050): truncate answers at a window and continue them in the next step.

Title: Truncated Proximal Policy Optimization
Formula: y_k ~ p(. | x, y_(<k)), at most `window` tokens a step; each is learned from in the step that
sampled it, with r = 0 where it goes on.
Our reading: the window; groups of one prompt are not kept together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import advantage, engine, sampler
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import CHANGED, Prompt, Rollouts, Trajectory
from mmrl.data.row_prompts import ByUid
from mmrl.vision.decoding.continuing import ContinuingEngine
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.decoding.token_steps import continued
from mmrl.vision.models.processor import EncodedPrompt

UNFINISHED = "unfinished"  # tag of answers that go on in the next step; an engine sets it
BEGUN = "begun_answer"  # column of a prompt with what was noted of its answer so far
NOTED = ("token",)  # the notes in it


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
        """Return the prompts of unfinished answers with these answers as prefixes, then new prompts."""
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

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how many answers go on in the next step."""
        return {"sampler/unfinished": float(len(self.waiting))}

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished answers."""
        return {"waiting": {str(number): dict(answer) for number, answer in enumerate(self.waiting)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the unfinished answers."""
        found = {int(number): answer for number, answer in state["waiting"].items()}
        self.waiting = [dict(found[number]) for number in sorted(found)]


@engine(scope="vision", sets_tags={UNFINISHED, CHANGED})
@dataclass(eq=False)
class WithWindow:
    """Sample at most a window of tokens of every answer in a step (T-PPO, arXiv 2506.15050).

    Answers that did not end are tagged `unfinished`; the sampler `with_unfinished` asks for their rest in the
    next step. Only the tokens of this step are learned; those before it were learned when they were sampled,
    have no notes, and are prefilled with the prompt. An answer ends for good at the engine's
    `max_completion_length`. `with_replay` and its relatives remember answers of one window only.
    Evaluations get whole answers of the wrapped engine, `vision.generate` or `vision.vllm`.

    Args:
        engine: The wrapped engine.
        window: The most tokens of an answer that are sampled in a step.
    """

    engine: ContinuingEngine
    _: KW_ONLY
    stream: Stream
    window: PositiveInt
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Begin, or continue, an answer to every entry."""
        if self.stream.purpose != "train":
            return self.engine.rollout(prompts)
        counters: dict[str, count[int]] = defaultdict(count)
        begun = [prompt.columns.get(BEGUN) or {name: torch.zeros(0) for name in NOTED} for prompt in prompts]
        plain = [_without_begun(prompt) for prompt in prompts]
        encoded = [self.policy.prompt_encoder.encode(prompt) for prompt in plain]
        requests = []
        for prompt, read, before in zip(plain, encoded, begun, strict=True):
            index = next(counters[prompt.uid])
            ids = before["token"].long()
            left = min(self.window, self.engine.max_completion_length - len(ids))
            # Of this step and this row alone, so that a draw depends on no other row.
            uniform = torch.rand(left, generator=self.stream.generator(prompt.uid, index))
            requests.append(GenerationRequest(prompt, index, continued(read, ids), uniform))
        rows = self.engine.answer(requests)
        return tuple(map(self._joined, rows, encoded, begun))

    def _joined(self, row: Trajectory, encoded: EncodedPrompt, before: dict[str, Tensor]) -> Trajectory:
        """Make the row of the whole answer so far; the tokens of earlier steps are not learned again."""
        begun = len(before["token"])
        notes = {"token": torch.cat([before["token"].to(row.notes["token"]), row.notes["token"]])}
        for name in sorted({"logp", "entropy"} & row.notes.keys()):
            notes[name] = torch.cat([row.notes[name].new_full((begun,), torch.nan), row.notes[name]])
        chosen = torch.arange(len(notes["token"])) >= begun
        stopped = row.outcomes[-1].tags["finish"] == "stop"
        whole = self.engine.row(row.prompt, encoded, notes, stopped, chosen if begun else None)
        # A replayed row is made from its tokens alone, so those of earlier steps would be learned again.
        tags = {CHANGED: "yes"} if begun else {}
        if not stopped and whole.length < self.engine.max_completion_length:
            tags[UNFINISHED] = "yes"
        (outcome,) = whole.outcomes
        return replace(whole, outcomes=(replace(outcome, tags={**outcome.tags, **tags}),))


def _without_begun(prompt: Prompt) -> Prompt:
    columns = {name: value for name, value in prompt.columns.items() if name != BEGUN}
    return replace(prompt, columns=columns) if BEGUN in prompt.columns else prompt


@advantage
def zero_unfinished(table: RewardTable) -> RewardTable:
    """Set the rewards of answers that go on in the next step to 0 (T-PPO).

    So the value of a critic stands for them. Answers are tagged `unfinished`, as `vision.with_window` does.
    Put it before `{name: gae, bootstrap: true}` (arXiv 2506.15050).
    """
    if "unfinished" not in table.ids:
        return table
    unfinished = (table.ids["unfinished"] != 0).any(-1)[:, None, None]
    return table.put(torch.where(unfinished & table.valid, 0.0, table.values))
