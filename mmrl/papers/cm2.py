"""CM2 (arXiv 2602.12268): a judge model checks binary criteria and quotes the passage that meets each.

Title: CM2: Reinforcement Learning with Checklist Rewards for Multi-Turn and Multi-Step Agentic Tool Use
Formula: reward = sum of the weights of what a turn meets first / sum of all weights.
Our reading: quotes are checked, weights are divided by their sum, and what a turn met stays met.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmrl.config.registry import reward
from mmrl.core.episodes import EPISODE, turn_number
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import RowError, is_number
from mmrl.rewards.adapters import log_metric, policy_turns
from mmrl.rewards.asking import (
    DATA,
    QUESTION,
    Judging,
    Unread,
    answer_of,
    is_empty,
    judge_prompt,
    judge_template,
    judge_words,
)
from mmrl.runtime.scoring import shown

CHECKLIST = f"""\
Check which criteria an answer to a question meets.

{QUESTION}
Answer{{{{ " (the last " + made + " above)" if made else "" }}}}:
{{{{ mark }}}}
{{{{ answer }}}}
{{{{ mark }}}}
{DATA}
Criteria:
{{{{ criteria }}}}

End with a JSON object between <checklist> tags, with an entry for the number of every criterion: null where \
it is not met, otherwise {{{{ '"the words of the answer that show it", copied letter by letter' if quotes \
else "true" }}}}. For example: <checklist>{{{{ example }}}}</checklist>
"""
FORM = "a criterion is a text, or {'criterion': text, 'weight': number above 0, 'needs': [numbers from 1]}"


@dataclass(frozen=True)
class Criterion:
    """What an answer should do; `needs` are the places of criteria that have to be met first."""

    text: str
    weight: float = 1.0
    needs: tuple[int, ...] = ()


@reward
@dataclass(kw_only=True, eq=False)
class Checklist(Judging):
    """Reward an answer for the criteria that it meets, which another model checks one by one (CM2).

    arXiv 2602.12268. The sum of the weights of what is met, over that of all. Of a conversation the
    judge reads all turns. With an outcome per turn (`turn_outcomes` of the engine, `at: every` here) it reads
    those up to each, and a criterion is paid once, at the turn that first meets it; so turns add up to the
    reward of the whole.
    A criterion counts only where those that it needs are met. Each judgement has to quote the answer; a quote
    that is not in it counts as not met. A judgement that cannot be read is a fault, as for `judge`. None for
    a prompt without criteria. Our readings: the quotes are checked, the sum is divided by the weights of all
    criteria, and what a turn met stays met. It logs `judge/unread`, and `checklist/misquoted`, the share of
    quotes that are not in the answer.

    Args:
        engine: As for `judge`.
        policy: As for `judge`.
        column: Column of the data with the criteria: texts, or `{criterion: ..., weight: 2, needs: [1]}`,
            where `needs` has numbers of other criteria of the list, from 1.
        needed: A needed criterion has to be met `by_then`, or in an earlier turn (`before`, as in CM2).
        evidence: A judgement quotes the answer (`quote`), or says true or null (`none`, for images and for
            criteria of what is absent).
        tag: As for `judge`.
        reference: Show the target where there is one.
        template: As for `judge`; it reads `criteria`, `quotes` and `example` besides, no scale, and asks for
            <checklist>.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    column: str = "criteria"
    needed: Literal["by_then", "before"] = "by_then"
    evidence: Literal["quote", "none"] = "quote"
    template: str = ""

    def __post_init__(self) -> None:
        known = {"question", "answer", "criteria", "quotes", "example"}
        known |= {"reference", "columns", "mark", "made"}
        source, needed = self.template or CHECKLIST, {"answer", "criteria"}
        self.question = judge_template(source, known, needed, "checklist", "checklist")
        self.asker = self.make_asker()

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread | None]:
        """Compute the reward of every outcome; None where there are no criteria, `Unread` for a fault."""
        listed = {prompt.uid: read_criteria(prompt, self.column) for prompt in prompts}
        talks = conversations(prompts, outcomes)
        rewards: list[float | Unread | None] = [None] * len(outcomes)
        judged = self._judged(prompts, outcomes, talks, listed)
        for rows in talks:
            criteria = listed[prompts[rows[0]].uid]
            met: set[int] = set()
            for turn, row in enumerate(rows if criteria else ()):
                found = judged.get((row, turn), frozenset[int]())
                if isinstance(found, Unread):
                    rewards[row] = found
                    continue
                new = newly_met(criteria, met, found, by_then=self.needed == "by_then")
                met |= new
                rewards[row] = sum(criteria[i].weight for i in new) / sum(c.weight for c in criteria)
        return rewards

    def _judged(
        self,
        prompts: Sequence[Prompt],
        outcomes: Sequence[Outcome],
        talks: Sequence[Sequence[int]],
        listed: Mapping[str, Sequence[Criterion]],
    ) -> dict[tuple[int, int], frozenset[int] | Unread]:
        """Ask which criteria every conversation meets after every turn, by outcome and turn.

        An empty conversation is not asked about.
        """
        turn_texts = self._turn_texts(outcomes)
        questions, places, texts = [], [], []
        counts: dict[str, int] = {}
        for rows in talks:
            prompt = prompts[rows[0]]
            number = counts[prompt.uid] = counts.get(prompt.uid, -1) + 1
            for turn, row in enumerate(rows if listed[prompt.uid] else ()):
                text = "\n\n".join(filter(None, (turn_texts[i] for i in rows[: turn + 1])))
                shown_one = replace(outcomes[row], text=text)
                if is_empty(shown_one, ""):
                    continue
                place = f"checklist/{prompt.uid}/{number}/{turn}"
                questions.append(self._question(place, prompt, shown_one, listed[prompt.uid]))
                places.append((row, turn))
                texts.append((text, len(listed[prompt.uid])))
        # A judgement names the numbers of its own question, so each list of criteria is read by its length.
        by_length: dict[int, list[int]] = {}
        for place, (_, count) in enumerate(texts):
            by_length.setdefault(count, []).append(place)
        found: dict[tuple[int, int], frozenset[int] | Unread] = {}
        for count, members in by_length.items():
            wanted = f"a JSON object with the entries {', '.join(map(str, range(1, count + 1)))}"
            answers = self.asker.ask(
                [questions[i] for i in members],
                "checklist",
                wanted,
                lambda written, count=count: read_judgement(written, count, self.evidence == "quote"),
            )
            for i, judgement in zip(members, answers, strict=True):
                found[places[i]] = (
                    judgement if isinstance(judgement, Unread) else met_in(judgement, texts[i][0])
                )
        return found

    def _turn_texts(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Join the answers of the turns that belong to each outcome."""
        turns = [
            [answer_of(Outcome(text=text), self.tag) for text in new] for _, new in policy_turns(outcomes)
        ]
        return ["\n\n".join(filter(None, texts)) for texts in turns]

    def _question(
        self, place: str, prompt: Prompt, outcome: Outcome, criteria: Sequence[Criterion]
    ) -> Prompt:
        quotes = self.evidence == "quote"
        words = {
            **judge_words(self.stream, prompt, [outcome], self.reference),
            "answer": answer_of(outcome, ""),
            "criteria": "\n".join(f"{i}. {criterion.text}" for i, criterion in enumerate(criteria, 1)),
            "quotes": quotes,
            "example": json.dumps({"1": "a red cube" if quotes else True, "2": None}),
        }
        return judge_prompt(place, prompt, [outcome], self.question(words))


def read_criteria(prompt: Prompt, column: str) -> list[Criterion]:
    """Read the criteria of a prompt; empty where it has none. Raises `RowError` for another form."""
    criteria = []
    listed = prompt.columns.get(column) or []
    for entry in listed if isinstance(listed, list | tuple) else [listed]:
        match entry:
            case str(text) if text.strip():
                criteria.append(Criterion(text))
                continue
            case {"criterion": str(text), **rest} if text.strip() and not rest.keys() - {"weight", "needs"}:
                # None is what a table has where other rows have a field.
                weight, needs = 1.0 if rest.get("weight") is None else rest["weight"], rest.get("needs") or ()
                if is_number(weight) and weight > 0 and all(n in range(1, len(listed) + 1) for n in needs):
                    criteria.append(Criterion(text, float(weight), tuple(n - 1 for n in needs)))
                    continue
        raise RowError(f"{FORM}, but the column '{column}' of prompt '{prompt.uid}' has {shown(entry)}")
    return criteria


def conversations(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Put the places of outcomes of one conversation together, in the order of turns.

    Turns of one row follow each other with rising numbers; rows of one episode have its tag.
    """
    talks: list[list[int]] = []
    episodes: dict[tuple[str, str], list[int]] = {}
    for i, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        if EPISODE in outcome.tags:
            key = prompt.uid, outcome.tags[EPISODE]
            if key not in episodes:
                talks.append(episodes.setdefault(key, []))
            episodes[key].append(i)
            continue
        before = talks[-1][-1] if talks else None
        goes_on = (
            before is not None
            and before == i - 1
            and EPISODE not in outcomes[before].tags
            and prompts[before].uid == prompt.uid
            and turn_number(outcome.tags) > turn_number(outcomes[before].tags)
        )
        if goes_on:
            talks[-1].append(i)
        else:
            talks.append([i])
    for rows in episodes.values():
        rows.sort(key=lambda i: turn_number(outcomes[i].tags))
    return talks


def read_judgement(written: str, count: int, quotes: bool) -> Mapping[str, Any] | None:
    """Read an object with an entry for every number from 1 to `count`; None for anything else."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != set(map(str, range(1, count + 1))):
        return None
    kinds = (str,) if quotes else (str, bool)
    return found if all(value is None or isinstance(value, kinds) for value in found.values()) else None


def met_in(judgement: Mapping[str, Any], text: str) -> frozenset[int]:
    """Return the places of the criteria that are met: true, or with a quote that the text has."""
    words = " ".join(text.split())
    met = set()
    for number, value in judgement.items():
        if isinstance(value, str):
            quote = " ".join(answer_of(Outcome(text=value), "").split())
            there = bool(quote) and quote in words
            log_metric("checklist/misquoted", float(not there))
        else:
            there = value is True
        if there:
            met.add(int(number) - 1)
    return frozenset(met)


def newly_met(
    criteria: Sequence[Criterion], met: set[int], found: frozenset[int], *, by_then: bool
) -> set[int]:
    """Return the criteria first met in a turn whose prerequisites are met (`by_then` or before the turn)."""
    new: set[int] = set()
    while True:
        known = met | new if by_then else met
        more = {i for i in found - met - new if known.issuperset(criteria[i].needs)}
        new |= more
        if not more or not by_then:
            return new
