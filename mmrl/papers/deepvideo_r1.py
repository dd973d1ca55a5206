"""DeepVideo-R1 (arXiv 2506.07464): repeat prompts with noise or hints, depending on their reward.

Title: DeepVideo-R1: Video Reinforcement Fine-Tuning via Difficulty-aware Regressive GRPO
Formula: difficulty = mean reward of the latest `window` prompts - mean reward of the prompt.
Our reading: sizes of noise and hints, the request for thoughts; departs: answers to plain prompts are learned
from too. The loss is in `reg_grpo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from mmrl.config.binding import Bound
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability
from mmrl.config.registry import sampler
from mmrl.core.answer_text import tagged
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Part, Prompt, Rollouts
from mmrl.data.hints import TAG, sentences, with_hint
from mmrl.vision.media.prompts import add_gaussian_noise, map_frames

ENDINGS = ("#noise", "#hint")  # of the names of changed prompts


@sampler(scope="vision", sets_tags={TAG})
class DifficultyAugmentation:
    """Ask half of a step's prompts twice: plainly, then changed by their difficulty (DeepVideo-R1).

    arXiv 2506.07464. The difficulty of a prompt is the mean reward of the latest `window` prompts asked
    plainly, minus that of its own answers. In the second round an easy prompt (below 0) shows noisy frames,
    and a hard one (above 0) gives the first sentences of a solution as a hint; both grow with the difficulty.
    The solution is in a column, or with `num_thoughts` the policy writes it: it is asked with the right
    answer given, and the text of the highest `reward` is taken. The name of a changed prompt gets the ending
    `#noise` or `#hint`, so that its answers are a group of their own. The sampler wraps the one before it and
    needs `rollout.max_rounds` of 2 or more.

    Our reading: noise is `max_noise` times the difficulty over -`max_reward`, in units of pixels scaled to
    [-1, 1]; a hint has `max_hint` times the difficulty over `max_reward` of the sentences, rounded; of a
    solution of the policy it has only what is inside <think>, if it has that. Departs: answers to the plain
    prompts are learned from too, where the paper drops them; a prompt that would not change makes room for a
    new one.

    Args:
        sampler: The wrapped sampler.
        window: Number of prompts in the mean.
        max_reward: Difference of mean rewards at which noise and hint are largest.
        max_noise: Largest standard deviation of the noise.
        max_hint: Largest share of the solution that is given.
        hint_column: Column of the data with solutions, such as `solution`; empty: hard prompts stay.
        hint_template: Line after the question; `{hint}` is the hint.
        num_thoughts: Solutions that the policy writes for a hard prompt, in place of a column; 0: none.
        reward: Chooses among them.
        answer_template: Line after the question that asks for them; `{answer}` is the target.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        stream: Stream,
        window: PositiveInt = 100,
        max_reward: PositiveFloat = 1.0,
        max_noise: NonNegativeFloat = 0.5,
        max_hint: Probability = 0.5,
        hint_column: str = "",
        hint_template: str = "Hint: {hint}",
        num_thoughts: NonNegativeInt = 0,
        reward: Callable[[], Bound] | None = None,
        answer_template: str = "The right answer is {answer}. Explain step by step how to find it.",
    ) -> None:
        if "{hint}" not in hint_template:
            raise ConfigError(f"'hint_template' must contain {{hint}}, not be {hint_template!r}")
        if num_thoughts and (reward is None or hint_column or "{answer}" not in answer_template):
            raise ConfigError(
                "`num_thoughts` needs a `reward` that chooses among them, {answer} in `answer_template`, and "
                "no `hint_column`"
            )
        self.num_thoughts, self.reward, self.answer_template = num_thoughts, reward, answer_template
        self.ask: Callable[[Sequence[Prompt]], Rollouts] | None = None
        self.tell: Callable[[Any], list[Any]] | None = None
        self.sampler, self.stream, self.window = sampler, stream, window
        self.max_reward, self.max_noise, self.max_hint = max_reward, max_noise, max_hint
        self.hint_column, self.hint_template = hint_column, hint_template
        self.recent: list[float] = []  # mean rewards of the latest prompts asked plainly
        self.waiting: dict[str, Prompt] = {}  # of the first round of a step, by name
        self.step = 0  # of those
        self.difficulty: dict[str, float] = {}  # of those
        self.drawn: dict[str, list[float]] = {"noise": [], "hint": []}  # strengths since `tell`

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw half of the prompts in the first round of a step, and the changed ones in the second."""
        if self.stream.round == 0:
            unanswered = self.waiting and self.step != self.stream.step  # there was no second round
            if num_prompts < 2 or unanswered:
                raise ConfigError(
                    "the sampler 'vision.difficulty_augmentation' asks prompts twice in a step, which needs "
                    "`rollout.max_rounds` and `rollout.num_prompts` of 2 or more"
                )
            plain = self.sampler.draw(num_prompts - num_prompts // 2, num_generations)
            self.waiting, self.step = {prompt.uid: prompt for prompt in plain}, self.stream.step
            self._check_column(plain)
            return plain
        solutions = self._solutions()
        changed = [self._changed(prompt, solutions.get(uid)) for uid, prompt in self.waiting.items()]
        changed = [prompt for prompt in changed if prompt][:num_prompts]
        self.waiting, self.difficulty = {}, {}
        again = [prompt for prompt in changed for _ in range(num_generations)]
        missing = num_prompts - len(changed)
        return again + (self.sampler.draw(missing, num_generations) if missing else [])

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Set the functions that answer prompts with the policy, and that gather from all processes."""
        self.ask, self.tell = ask, tell

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update difficulties with the prompts that had neither noise nor hints."""
        rewards: dict[str, list[float]] = {}
        sampled = table.ids["on_policy"][:, 0].tolist()
        for uid, reward, counts in zip(table.uids, table.reward().tolist(), sampled, strict=True):
            if counts and not math.isnan(reward) and not uid.endswith(ENDINGS):
                rewards.setdefault(uid, []).append(reward)
        means = {uid: fmean(of_prompt) for uid, of_prompt in rewards.items()}
        if self.recent:  # nothing to compare with before the first step
            level = fmean(self.recent)
            self.difficulty = {uid: level - mean for uid, mean in means.items() if uid in self.waiting}
        self.recent = [*self.recent, *means.values()][-self.window :]

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how many prompts were changed, and how much."""
        noise, hints = self.drawn["noise"], self.drawn["hint"]
        self.drawn = {"noise": [], "hint": []}
        return {
            "augmentation/noise_prompts": float(len(noise)),
            "augmentation/noise_mean": sum(noise) / max(len(noise), 1),
            "augmentation/hint_prompts": float(len(hints)),
            "augmentation/hint_mean": sum(hints) / max(len(hints), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the mean rewards of the window."""
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window."""
        self.recent = list(state["recent"])

    def _check_column(self, prompts: Sequence[Prompt]) -> None:
        if self.hint_column and not any(self.hint_column in prompt.columns for prompt in prompts):
            known = sorted({name for prompt in prompts for name in prompt.columns})
            raise ConfigError(
                f"hint_column: no prompt of this step has a column '{self.hint_column}'; there are "
                f"{', '.join(known) or 'none'}"
            )

    def _solutions(self) -> dict[str, Any]:
        """Return the solutions of hard prompts: from the column, or sampled with the right answer given."""
        hard = [prompt for uid, prompt in self.waiting.items() if self.difficulty.get(uid, 0.0) > 0]
        if not (self.num_thoughts and hard):
            return {prompt.uid: prompt.columns.get(self.hint_column) for prompt in hard}
        if self.ask is None or self.tell is None or self.reward is None:
            raise ConfigError("`num_thoughts` asks the engine of a run, which it was not given by `connect`")
        asked = [prompt for prompt in hard for _ in range(self.num_thoughts)]
        outcomes = [row.outcomes[-1] for row in self.ask([self._explaining(prompt) for prompt in asked])]
        best: dict[str, tuple[float, str]] = {}
        for prompt, outcome, value in zip(asked, outcomes, self.reward()(asked, outcomes), strict=True):
            text = outcome.text or ""
            if value is not None and (prompt.uid not in best or value > best[prompt.uid][0]):
                best[prompt.uid] = float(value), " ".join(tagged(text, "think")) or text
        return self.tell({uid: text for uid, (_, text) in best.items()})[0]  # equal hints on all processes

    def _explaining(self, prompt: Prompt) -> Prompt:
        """Append the target and the request to explain it to the last message."""
        *before, last = prompt.messages
        text = "\n" + self.answer_template.replace("{answer}", str(prompt.target))
        last = replace(last, parts=(*last.parts, Part(text, quoted=True)))
        return replace(prompt, uid=f"{prompt.uid}#thought", messages=(*before, last))

    def _changed(self, prompt: Prompt, solution: Any) -> Prompt | None:
        """Make the noisy prompt or the one with a hint; None where nothing would change."""
        away = self.difficulty.get(prompt.uid, 0.0) / self.max_reward
        noise = self.max_noise * min(max(-away, 0.0), 1.0)
        if noise and prompt.media:
            self.drawn["noise"].append(noise)
            return self._noisy(prompt, noise)
        parts = sentences(str(solution)) if solution else []
        count = round(self.max_hint * min(max(away, 0.0), 1.0) * len(parts))
        if not count:
            return None
        self.drawn["hint"].append(count / len(parts))
        template = f"\n{self.hint_template}"
        hinted = with_hint(prompt, " ".join(parts[:count]), tag="difficulty", template=template)
        return replace(hinted, uid=f"{prompt.uid}#hint")

    def _noisy(self, prompt: Prompt, sigma: float) -> Prompt:
        stream = replace(self.stream)  # of this step and round, whenever the frames are loaded

        def noisy(frames):
            return add_gaussian_noise(frames, stream.generator("frame_noise", prompt.uid), sigma)

        return replace(map_frames(prompt, noisy), uid=f"{prompt.uid}#noise")
