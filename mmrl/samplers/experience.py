"""A sampler that puts a growing list of experiences before every prompt, and what makes the list grow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import experience_update, sampler
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import EQUAL, RewardTable
from mmrl.core.types import Part, Prompt, Rollouts

TEMPLATE = "Experiences from earlier attempts:\n{experiences}\n\n"
WORDS = 300  # letters of a question or an answer that `contrast` writes down


@dataclass(frozen=True)
class AnsweredGroup:
    """A prompt and its answers with their rewards, the best first; not all rewards are equal."""

    prompt: Prompt
    answers: Sequence[tuple[str, float]]


@sampler
class WithExperience:
    """Put experiences before every prompt, a list that grows from compared answers (training-free GRPO).

    arXiv 2510.08191. After a round, groups whose rewards differ are handed to `experience_update`, which
    proposes to add, change or delete experiences; with `learn.num_iterations: 0` nothing else is learned. The
    list is saved in checkpoints. In the paper the policy itself writes the proposals; a sampler cannot call
    it, so that they come from a function, which may ask a server where a model is. The answers of all groups
    have to be on one process, unless the list stays as it is.

    Args:
        sampler: The wrapped sampler.
        path: JSON file with a list of texts to begin with; empty: an empty list.
        output: JSON file to which the list is written whenever it changes; empty: none.
        experience_update: Proposes changes of the list; None: it stays as it is.
        max_experiences: Experiences that are kept; the oldest are dropped.
        template: Text before the question; `{experiences}` are numbered lines. Nothing without experiences.
        of: Name of the reward that groups are compared by; empty: the weighted sum.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        path: str = "",
        output: str = "",
        experience_update: Callable | None = None,
        max_experiences: PositiveInt = 50,
        template: str = TEMPLATE,
        of: str = "",
    ) -> None:
        if "{experiences}" not in template:
            raise ConfigError(f"'template' must contain {{experiences}}, not be {template!r}")
        self.sampler, self.output, self.update = sampler, output, experience_update
        self.max_experiences, self.template, self.of = max_experiences, template, of
        texts = read_experiences(Path(path)) if path else []
        self.experiences = {str(i): text for i, text in enumerate(texts[:max_experiences])}
        self.added = len(texts)  # in all, so that no id comes twice
        self.asked: dict[str, Prompt] = {}  # of this round, without experiences

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw prompts, and put the experiences before them."""
        drawn = self.sampler.draw(num_prompts, num_generations)
        self.asked = {prompt.uid: prompt for prompt in drawn}
        if not self.experiences:
            return drawn
        lines = "\n".join(f"{i}. {text}" for i, text in enumerate(self.experiences.values(), 1))
        text = Part(self.template.replace("{experiences}", lines))
        return [before_question(prompt, text) for prompt in drawn]

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Change the list by what the update proposes for the groups of a round."""
        if self.update is None:
            return
        if len(rollouts) != len(table):
            raise ConfigError(
                "the sampler 'with_experience' compares answers, and only some of them are on this process; "
                "start the run on one process, or leave out `experience_update`"
            )
        rewards = (table.at_end(self.of) if self.of else table.reward()).tolist()
        answers: dict[str, list[tuple[str, float]]] = {}
        for row, reward in zip(rollouts, rewards, strict=True):
            if row.prompt.uid in self.asked and not math.isnan(reward):
                answers.setdefault(row.prompt.uid, []).append((row.outcomes[-1].text or "", reward))
        ranked = {uid: sorted(group, key=lambda answer: -answer[1]) for uid, group in answers.items()}
        groups = [
            AnsweredGroup(self.asked[uid], group)
            for uid, group in ranked.items()
            if group[0][1] - group[-1][1] > EQUAL
        ]
        if groups:
            self._apply(self.update(dict(self.experiences), groups))
            if self.output:
                listed = json.dumps(list(self.experiences.values()), indent=1, ensure_ascii=False)
                Path(self.output).write_text(listed + "\n", encoding="utf-8")

    def tell(self) -> Mapping[str, float]:
        """Report how many experiences there are."""
        return {"experiences": float(len(self.experiences))}

    def state_dict(self) -> dict[str, Any]:
        """Return the list."""
        return {"experiences": dict(self.experiences), "added": self.added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the list."""
        self.experiences, self.added = dict(state["experiences"]), state["added"]

    def _apply(self, operations: Any) -> None:
        """Carry proposals out, in order.

        Raises ValueError for anything else than the proposals that it names.
        """
        wanted = 'a list of {"add": text}, {"update": id, "text": text} and {"delete": id}'
        if not isinstance(operations, list | tuple):
            raise ValueError(f"an experience update must return {wanted}, not {operations!r:.200}")
        for operation in operations:
            match operation:
                case {"add": str(text)}:
                    self.experiences[str(self.added)] = text
                    self.added += 1
                case {"update": str(name), "text": str(text)} if name in self.experiences:
                    self.experiences[name] = text
                case {"delete": str(name)} if name in self.experiences:
                    del self.experiences[name]
                case _:
                    raise ValueError(
                        f"an experience update must return {wanted} with ids among "
                        f"{', '.join(self.experiences) or 'none'}, but one is {operation!r:.200}"
                    )
        self.experiences = dict(list(self.experiences.items())[-self.max_experiences :])


def before_question(prompt: Prompt, text: Part) -> Prompt:
    """Put a text before everything in the first message of the user."""
    place = next((i for i, message in enumerate(prompt.messages) if message.role == "user"), 0)
    first = prompt.messages[place]
    message = replace(first, parts=(text, *first.parts))
    return replace(prompt, messages=(*prompt.messages[:place], message, *prompt.messages[place + 1 :]))


def read_experiences(path: Path) -> list[str]:
    """Read a JSON list of texts; anything else is a ConfigError."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'path': cannot read the experiences in '{path}': {error}") from error
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ConfigError(f"'path': '{path}' must hold a JSON list of texts, not {listed!r:.80}")
    return listed


# ---- updates: (experiences by id, groups) to a list of proposals


@experience_update
def contrast(experiences: Mapping[str, str], groups: Sequence[AnsweredGroup]) -> list[dict[str, str]]:
    """Add the best and the worst answer of every group as an experience; no model is asked.

    A group whose prompt is in the list already adds nothing.
    """
    known, proposals = set(experiences.values()), []
    for group in groups:
        (best, high), (worst, low) = group.answers[0], group.answers[-1]
        question = f"Asked: {group.prompt.text[:WORDS]}"
        if not any(text.startswith(f"{question}\n") for text in known):
            said = f"{best[:WORDS]!r} earned {high:.3g}, {worst[:WORDS]!r} earned {low:.3g}."
            proposals.append({"add": f"{question}\n{said}"})
    return proposals
