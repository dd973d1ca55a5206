"""Training-free GRPO (arXiv 2510.08191): experiences in front of every prompt are learned instead of weights.

Title: Training-Free Group Relative Policy Optimization
Formula: E <- E + f(groups whose rewards differ); y ~ p(. | E, x).
Our reading: one question to the policy both summarises and compares the answers; the wording of both
questions is ours.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import experience_update, sampler
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import EQUAL, RewardTable
from mmrl.core.types import Message, Part, Prompt, Rollouts
from mmrl.samplers.answers import ReadsAnswers

TEMPLATE = "Experiences from earlier attempts:\n{experiences}\n\n"
LETTERS = 300  # of a question or an answer in an experience of `contrast`


@dataclass(frozen=True)
class AnsweredGroup:
    """A prompt and its answers with rewards, best first; not all rewards are equal."""

    prompt: Prompt
    answers: Sequence[tuple[str, float]]


@sampler
class WithExperience(ReadsAnswers):
    """Put a list of experiences before every prompt, updated from compared answers (training-free GRPO).

    arXiv 2510.08191. After a round `experience_update` gets the groups whose rewards differ, and proposes to
    add, change or delete experiences; with `learn.num_iterations: 0` nothing else is learned. Checkpoints
    contain the list, and evaluations while training use it. The paper's update is `by_policy`: the policy
    writes the proposals. Any other function may do so. Every process calls it with the answers of all
    processes; the result of the first process counts.

    Args:
        sampler: The wrapped sampler.
        path: JSON file with the initial list of texts; empty: an empty list.
        output: JSON file that gets the list whenever it changes; empty: none.
        experience_update: Proposes changes of the list; None: no changes.
        max_experiences: Most experiences; the oldest are dropped.
        template: Text before the question; `{experiences}` are numbered lines.
        of: Name of the reward that ranks the answers of a group; empty: the weighted sum.
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
        self.added = len(texts)  # ever, so that ids are unique
        self.plain: dict[str, Prompt] = {}  # prompts of this round without experiences

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw prompts, and put the experiences before them."""
        prompts = self.sampler.draw(num_prompts, num_generations)
        self.plain = {prompt.uid: prompt for prompt in prompts}
        return self.prepare(prompts)

    def prepare(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Put the experiences before prompts."""
        if not self.experiences:
            return list(prompts)
        text = Part(self.template.replace("{experiences}", numbered(self.experiences.values())), quoted=True)
        return [before_question(prompt, text) for prompt in prompts]

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Apply the proposals for the groups of a round to the list."""
        if self.update is None:
            return
        answers: dict[str, list[tuple[str, float]]] = {}
        rewards = (table.at_end(self.of) if self.of else table.reward()).tolist()
        for uid, text, reward in zip(table.uids, self.texts(rollouts, table), rewards, strict=True):
            if uid in self.plain and not math.isnan(reward):
                answers.setdefault(uid, []).append((text, reward))
        ranked = {uid: sorted(group, key=lambda answer: -answer[1]) for uid, group in answers.items()}
        groups = [
            AnsweredGroup(self.plain[uid], group)
            for uid, group in ranked.items()
            if group[0][1] - group[-1][1] > EQUAL
        ]
        if groups:
            proposals = self.update(dict(self.experiences), groups)
            self._apply(self.tell_all(proposals)[0] if self.tell_all else proposals)
            if self.output:
                listed = json.dumps(list(self.experiences.values()), indent=1, ensure_ascii=False)
                Path(self.output).write_text(listed + "\n", encoding="utf-8")

    def pop_metrics(self) -> Mapping[str, float]:
        """Report the number of experiences."""
        return {"experiences": float(len(self.experiences))}

    def state_dict(self) -> dict[str, Any]:
        """Return the list and the number of experiences ever added."""
        return {"experiences": dict(self.experiences), "added": self.added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the list."""
        self.experiences, self.added = dict(state["experiences"]), state["added"]

    def _apply(self, operations: Any) -> None:
        """Apply proposals in order; a `ValueError` names the valid forms."""
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


def numbered(texts: Iterable[str]) -> str:
    """Write texts as numbered lines."""
    return "\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1))


def before_question(prompt: Prompt, text: Part) -> Prompt:
    """Insert a text at the start of the first user message."""
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
    """Add the best and the worst answer of every group as an experience, without a model.

    Prompts that the list already contains are skipped.
    """
    proposals = []
    for group in groups:
        (best, high), (worst, low) = group.answers[0], group.answers[-1]
        question = f"Asked: {group.prompt.text[:LETTERS]}"
        if not any(text.startswith(f"{question}\n") for text in experiences.values()):
            earned = f"{best[:LETTERS]!r} earned {high:.3g}, {worst[:LETTERS]!r} earned {low:.3g}."
            proposals.append({"add": f"{question}\n{earned}"})
    return proposals


EXTRACT = (
    "\n\nBelow are answers to this question with their scores. Compare them, and write down at most {count} "
    "short rules, one a line, that would have led to the better ones. Each has to hold for other questions.\n"
    "{answers}\n"
)
CONSOLIDATE = (
    "These are experiences by their ids:\n{experiences}\n\nThese are proposed:\n{candidates}\n\nMake one "
    "list of experiences that is short, general and free of repetitions. Answer with a JSON list of changes, "
    'each {{"add": text}}, {{"update": id, "text": text}} or {{"delete": id}}, and with nothing else.\n'
)
BULLET = re.compile(r"^\s*(?:[-*\u2022]|\d+[.)])\s*")


@experience_update
class ByPolicy:
    """Let the policy write experiences: rules from each group, then edits of the list.

    Training-free GRPO (arXiv 2510.08191). The first engine of the run answers one question per group, with
    the prompt, its images and some answers, and one question with the list and all new rules, which asks for
    edits as JSON. Our reading: the paper's summaries and comparison are one question, and both wordings are
    ours. Unreadable edits change nothing and are counted.

    Args:
        max_rules: Most rules from a group.
        max_answers: Answers of a group in its question: the better half of them the best, the rest the worst.
        max_letters: Letters of an answer in a question.
    """

    def __init__(
        self, *, max_rules: PositiveInt = 3, max_answers: PositiveInt = 4, max_letters: PositiveInt = 2000
    ) -> None:
        self.max_rules, self.max_answers, self.max_letters = max_rules, max_answers, max_letters
        self.ask: Callable[[Sequence[Prompt]], Rollouts] | None = None
        self.counts = dict.fromkeys(("experiences/changes", "experiences/unread"), 0.0)

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Take the function that answers prompts."""
        self.ask = ask

    def __call__(
        self, experiences: Mapping[str, str], groups: Sequence[AnsweredGroup]
    ) -> list[dict[str, str]]:
        """Return changes of the list."""
        rules = [
            BULLET.sub("", line).strip()
            for text in self._answers([self._extract(group) for group in groups])
            for line in [line for line in text.splitlines() if line.strip()][: self.max_rules]
        ]
        if not rules:
            return []
        listed = "\n".join(f"{name}: {text}" for name, text in experiences.items()) or "none"
        text = CONSOLIDATE.format(experiences=listed, candidates=numbered(rules))
        last = replace(
            groups[0].prompt,
            uid=f"{groups[0].prompt.uid}#changes",
            messages=(Message("user", (Part(text, quoted=True),)),),
        )
        changes = changes_in(self._answers([last])[0], experiences)
        self.counts["experiences/changes"] += len(changes or ())
        self.counts["experiences/unread"] += changes is None
        return changes or []

    def pop_metrics(self) -> Mapping[str, float]:
        """Report the number of proposed edits, and of unreadable answers."""
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0.0)
        return counts

    def _answers(self, prompts: Sequence[Prompt]) -> list[str]:
        if self.ask is None:
            raise ConfigError("'by_policy' asks the engine of a run, which it was not given by `connect`")
        return [row.outcomes[-1].text or "" for row in self.ask(prompts)]

    def _extract(self, group: AnsweredGroup) -> Prompt:
        """Append the request for rules, with the answers, to the prompt."""
        best = group.answers[: -(-self.max_answers // 2)]
        worst = group.answers[len(best) :][-(self.max_answers // 2) :] if self.max_answers > 1 else ()
        shown = (f"Score {reward:.3g}: {text[: self.max_letters]}" for text, reward in (*best, *worst))
        text = EXTRACT.format(count=self.max_rules, answers=numbered(shown))
        *before, last = group.prompt.messages
        extended = replace(last, parts=(*last.parts, Part(text, quoted=True)))
        return replace(group.prompt, uid=f"{group.prompt.uid}#rules", messages=(*before, extended))


def changes_in(text: str, experiences: Mapping[str, str]) -> list[dict[str, str]] | None:
    """Parse the edits in the last JSON list of an answer; None without a list.

    Malformed entries and edits of unknown experiences are skipped.
    """
    listed, at = None, 0
    while (at := text.find("[", at)) >= 0:
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        listed = value if all(isinstance(change, dict) for change in value) else listed
    if listed is None:
        return None
    ids, changes = set(experiences), []
    for change in listed:
        match change:
            case {"add": str(rule), **rest} if rule.strip() and not rest:
                changes.append({"add": rule})
            case {"update": str(name), "text": str(rule), **rest} if name in ids and not rest:
                changes.append({"update": name, "text": rule})
            case {"delete": str(name), **rest} if name in ids and not rest:
                ids.discard(name)
                changes.append({"delete": name})
    return changes
