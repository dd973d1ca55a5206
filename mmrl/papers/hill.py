"""HiLL (arXiv 2604.00698): a second role learns to write hints for failed prompts.

Title: Learning to Hint for Reinforcement Learning
Formula: reliance = mean log p(y | x) - mean log p(y | x, hint), below 0 where an answer relies on its hint.
Our reading: one model with two adapters, the text of the question, and that the first failed answer is
shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.advantages.hinted import hint_of, keep_rows, successes
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import advantage, engine
from mmrl.config.schema import ConfigError
from mmrl.core.answer_text import tagged
from mmrl.core.protocols import Engine
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import CHANGED, Message, Part, Prompt, Rollouts, Trajectory
from mmrl.data.hints import ATTEMPT, TAG, WANTED, WROTE, with_hint, without_hint
from mmrl.data.hints import TEMPLATE as HINT_TEMPLATE
from mmrl.data.templates import TextTemplate, quoted
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader
from mmrl.vision.engines.derived_answers import ForcedPrefixReader
from mmrl.vision.engines.generate import Generate

ROLE, HINTER, REASONER = "role", "hinter", "reasoner"
GATE = "hint_gate"  # name of the recorded reward
TEMPLATE = """\
A student answered this question wrongly.

Question:
{{ question }}

The student's answer:
{{ attempt }}
{% if solution %}

Solution, which the student does not see:
{{ solution }}
{% endif %}

Find what the student missed. Then write one to three sentences that point to it without giving away the \
answer or a result on the way, as <hint>...</hint>.
"""


@engine(sets_tags={ROLE, TAG, WROTE, CHANGED})
@dataclass(eq=False)
class WithHinter:
    """Let a second role write the hints that the sampler `with_hints` asks for, and learn to (HiLL).

    arXiv 2604.00698. For every hint that is asked for (`written` of the sampler) the role `hinter` reads the
    question, an answer that failed, and the solution where there is one, and writes a hint; the answers of
    the role `reasoner` read it after the question. Both are rows of the step table, distinguished by the tag
    `role`: `vision.tokens` with `roles: [reasoner, hinter]` and `vision.by_role` below this engine give each
    an adapter of its own, without them one model learns both. The row of a hint has the tag `wrote`, by which
    the advantage `hint_reward` pays it, and records `hint_gate`: 0, or minus the penalty for a hint that is
    not between its tags or gives the target away, which no answer is shown. `{name: precomputed, key:
    hint_gate, label: hint_gate, at: role=hinter}` reads it, and its mean says how many there are; rewards of
    answers need `at: role=reasoner`. In evaluations nothing is written. It wraps any engine of texts;
    `replay` keeps no row of a hint.

    Our readings: one model with two adapters in place of two models, the text of the question, and that the
    answer that failed is the first, where the code takes a random one.

    Args:
        solution_column: Column of the data with the solution; empty, or an empty cell: the hinter has none.
        template: Question to the hinter in jinja2, which reads `question`, `attempt` (an answer that failed),
            `solution` and `columns` (of the data). It must ask for <hint>...</hint>.
        hint_template: Text after the question; `{hint}` is the hint.
        gate_penalty: What a hint that cannot be used loses.
    """

    engine: Engine
    _: KW_ONLY
    solution_column: str = ""
    template: str = TEMPLATE
    hint_template: str = HINT_TEMPLATE
    gate_penalty: NonNegativeFloat = 0.2
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy
        if "<hint>" not in self.template or "{hint}" not in self.hint_template:
            raise ConfigError(
                "`template` of with_hinter must ask for <hint>...</hint>, and `hint_template` contain {hint}"
            )
        known = {"question", "attempt", "solution", "columns"}
        self.question = TextTemplate(
            self.template, known, {"question", "attempt"}, "the engine 'with_hinter'"
        )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Write hints, then answer all entries with a usable hint; the rows of the hints come last."""
        wanted = {(p.uid, p.tags[WANTED]): p for p in prompts if WANTED in p.tags}
        hints: dict[tuple[str, str], str] = {}  # those that can be used
        rows: list[Trajectory] = []
        written = self.engine.rollout([self._asking(prompt) for prompt in wanted.values()]) if wanted else ()
        for (key, prompt), row in zip(wanted.items(), written, strict=True):
            hint = usable_hint(row.outcomes[-1].text or "", prompt.target)
            if hint:
                hints[key] = hint
            rows.append(self._row(prompt, row, usable=bool(hint)))
        answering = [
            self._answering(prompt, hints.get((prompt.uid, prompt.tags.get(WANTED, "")), ""))
            for prompt in prompts
            if WANTED not in prompt.tags or (prompt.uid, prompt.tags[WANTED]) in hints
        ]
        answers = self.engine.rollout(answering) if answering else ()
        return (*(tagged_row(row, {ROLE: REASONER}) for row in answers), *rows)

    def _asking(self, prompt: Prompt) -> Prompt:
        """Make the question to the hinter, with the media of the prompt and an id of its own."""
        columns = {name: value for name, value in prompt.columns.items() if name != ATTEMPT}
        words = {
            "question": prompt.text,
            "attempt": quoted(prompt.columns[ATTEMPT]),
            "solution": columns.get(self.solution_column) or "",
            "columns": columns,
        }
        parts = (*(Part(media=medium) for medium in prompt.media), Part(self.question(words), quoted=True))
        tags = {name: word for name, word in prompt.tags.items() if name != WANTED}
        return replace(
            prompt,
            uid=f"{prompt.uid}#{HINTER}/{prompt.tags[WANTED]}",
            messages=(Message("user", parts),),
            columns=columns,
            tags={**tags, ROLE: HINTER},
        )

    def _answering(self, prompt: Prompt, hint: str) -> Prompt:
        """Make the question to the reasoner, with the hint that was written for it."""
        tags = {name: word for name, word in prompt.tags.items() if name != WANTED} | {ROLE: REASONER}
        columns = {name: value for name, value in prompt.columns.items() if name != ATTEMPT}
        plain = replace(prompt, tags=tags, columns=columns if hint else prompt.columns)
        return with_hint(plain, hint, tag=prompt.tags[WANTED], template=self.hint_template) if hint else plain

    def _row(self, prompt: Prompt, row: Trajectory, *, usable: bool) -> Trajectory:
        """Make a hint a row of the prompt's group."""
        tags = {ROLE: HINTER, WROTE: prompt.tags[WANTED], CHANGED: "yes"}
        asked = replace(row.prompt, uid=prompt.uid)
        recorded = {GATE: 0.0 if usable else -self.gate_penalty}
        row = replace(row, prompt=asked, group=prompt.uid, logged={**row.logged, "read": asked.text})
        return tagged_row(row, tags, recorded)


def tagged_row(
    row: Trajectory, tags: Mapping[str, str], recorded: Mapping[str, float] = MappingProxyType({})
) -> Trajectory:
    """Add tags to all outcomes of a row, and rewards to the last."""
    outcomes = [replace(outcome, tags={**outcome.tags, **tags}) for outcome in row.outcomes]
    outcomes[-1] = replace(outcomes[-1], recorded={**outcomes[-1].recorded, **recorded})
    return replace(row, outcomes=tuple(outcomes))


def usable_hint(text: str, target: object) -> str:
    """Return the last hint of a text; empty where there is none, or it gives the target away.

    Of a target of one or two letters only phrases such as "is 7" or "= 7" count, of a longer one every place
    (HiLL's code).
    """
    blocks = tagged(text.rpartition("</think>")[2], "hint")
    hint = quoted(blocks[-1].strip()) if blocks else ""
    answer = str(target).strip().lower() if type(target) in (str, int, float) else ""
    if len(answer) > 2:
        return "" if answer in hint.lower() else hint
    phrase = rf"(?:=|\b(?:equals|is|equal to|answer:))\s*{re.escape(answer)}(?!\w)"
    return "" if answer and re.search(phrase, hint.lower()) else hint


@engine(scope="vision")
class ByRole:
    """Answer every prompt with the adapter of the role that its tag `role` names.

    The policy is `vision.tokens` with `roles`. It wraps any engine that samples from the policy.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy = engine, engine.policy
        self.roles: Any = getattr(engine.policy, "roles", None)
        if self.roles is None:
            raise ConfigError(
                "the engine `vision.by_role` needs a policy with an adapter for each role; set `roles` and "
                "`lora_rank` of `vision.tokens`"
            )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer all entries in order, role by role; rows that the engine adds come last."""
        numbers = [self.roles.of(prompt.tags, prompt.uid) for prompt in prompts]
        rows: dict[int, Trajectory] = {}
        added: list[Trajectory] = []
        for number in sorted(set(numbers)):
            places = [place for place, found in enumerate(numbers) if found == number]
            with self.roles.acting(number):
                made = self.engine.rollout([prompts[place] for place in places])
            rows |= dict(zip(places, made, strict=False))
            added += made[len(places) :]
        return (*(rows[place] for place in range(len(prompts))), *added)


KEY = "hint_reliance"


@engine(scope="vision")
class WithHintReliance:
    """Record how much less likely the answers to prompts with hints are without them (HiLL).

    arXiv 2604.00698. It is the mean log-probability of the answer's tokens given the bare prompt minus that
    given the prompt with its hint, below 0 where the answer relies on the hint; both are of the whole
    distribution at the engine's temperature. The advantage `best_hint` reads it as a label: `{name:
    precomputed, key: hint_reliance, label: hint_reliance, weight: 0}` among the rewards. Both passes read
    token by token, so that they take about as long as sampling those answers twice. It wraps
    `vision.generate`.
    """

    notes: frozenset[str] = frozenset()

    in_process: ClassVar[str] = "scores whole answers at the engine's temperature"

    def __init__(self, engine: Generate) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, and record the reliance of hinted answers."""
        rows = self.engine.rollout(prompts)
        hinted = [row for row in rows if TAG in row.prompt.tags]
        bare = self.mean_logp([without_hint(row.prompt) for row in hinted], hinted)
        given = self.mean_logp([row.prompt for row in hinted], hinted)
        found = iter([a - b for a, b in zip(bare, given, strict=True)])
        return tuple(recorded(row, next(found)) if TAG in row.prompt.tags else row for row in rows)

    def mean_logp(self, prompts: Sequence[Prompt], rows: Sequence[Trajectory]) -> list[float]:
        """Return the mean log-probability of each row's tokens as the answer to a prompt."""
        readers: list[ScoringReader] = []
        answers = iter([row.steps.ids for row in rows])

        def begin(asked: Sequence[GenerationRequest]) -> LogitsReader:
            reader = self.engine.reader([request.encoded for request in asked])
            device = self.policy.core.get_input_embeddings().weight.device
            tokens = [next(answers).to(device) for _ in asked]  # requests are in the order of the prompts
            readers.append(ScoringReader(reader, tokens, self.engine.temperature or 1.0))
            return readers[-1]

        self.engine.decode(prompts, begin)  # nothing but the tokens of the answers can be drawn
        return [value for reader in readers for value in reader.means()]


class ScoringReader(ForcedPrefixReader):
    """Forces rows to be given answers, and adds up the log-probabilities of their tokens."""

    def __init__(self, reader: LogitsReader, answers: Sequence[Tensor], temperature: float) -> None:
        super().__init__(reader, answers)
        self.temperature = temperature
        self.rows = torch.arange(len(answers), device=self.forced.device)  # those that are still read
        self.lengths = torch.tensor([len(answer) for answer in answers], dtype=torch.float64)
        self.sums = torch.zeros(len(answers), dtype=torch.float64)

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token, add up the log-probability of the next one, and force it."""
        place = self.length
        forced = super().read(token)
        if place < self.forced.shape[1]:
            wanted = self.forced[:, place]
            logp = (self.logits / self.temperature).log_softmax(-1).gather(1, wanted.clamp(min=0)[:, None])
            self.sums[self.rows.cpu()] += torch.where(wanted >= 0, logp[:, 0], 0.0).double().cpu()
        return forced

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows."""
        super().keep(rows)
        self.rows = self.rows[rows]

    def means(self) -> list[float]:
        """Return the mean log-probability of every answer."""
        return (self.sums / self.lengths).tolist()


def recorded(row: Trajectory, reliance: float) -> Trajectory:
    """Record the reliance of the last outcome of a row."""
    answer = replace(row.outcomes[-1], recorded={**row.outcomes[-1].recorded, KEY: reliance})
    return replace(row, outcomes=(*row.outcomes[:-1], answer))


# ---- advantage functions


@advantage
def best_hint(
    table: RewardTable,
    *,
    of: str = "",
    threshold: float = 0.0,
    reliance: str = "",
    temperature: PositiveFloat = 0.3,
) -> RewardTable:
    """Replace a failed group by the rows of its most informative hint (HiLL, arXiv 2604.00698).

    A hint with n answers and a success rate p has the value 1 - p^n - (1 - p)^n: the probability that n
    answers do not all have the same result. `reliance` discounts it by exp(min(d, 0) / `temperature`), with d
    the mean of that label over the successes. Plain rows stay where their own 1 - p^n - (1 - p)^n is at least
    that of the best hint. Put it first in the chain, with the sampler `with_hints` and `num_hinted` of 2 or
    more. Rows that are hints stay; `hint_reward` rewards them by the same value.

    Args:
        of: Name of the reward that must be above `threshold`; empty: the weighted sum.
        threshold: The highest reward that counts as a failure.
        reliance: Label that the engine `vision.with_hint_reliance` records; empty: no discount.
        temperature: Change of the label that discounts by a factor of e.
    """
    hint, answers = hint_of(table), hint_of(table, WROTE) == 0
    success, relied = successes(table, of, threshold), reliances(table, reliance)
    kept = torch.ones(len(table), dtype=torch.bool)
    for group in table.group.unique().tolist():
        rows = (table.group == group) & answers
        # In the order of first occurrence: of equal hints the first and weakest one wins.
        hints = list(dict.fromkeys(hint[rows & (hint != 0)].tolist()))
        if not hints:
            continue
        shown = {name: rows & (hint == name) for name in hints}
        best = max(hints, key=lambda name: hint_value(success[shown[name]], relied[shown[name]], temperature))
        plain = rows & (hint == 0)
        stays = bool(plain.any()) and informativeness(success[shown[best]]) <= informativeness(success[plain])
        kept[rows & ~(plain if stays else shown[best])] = False
    return keep_rows(table, kept)


@advantage
def hint_reward(
    table: RewardTable,
    *,
    of: str,
    threshold: float = 0.0,
    reliance: str = "",
    temperature: PositiveFloat = 0.3,
) -> RewardTable:
    """Reward rows that are hints for the answers that saw them (HiLL, arXiv 2604.00698).

    The value of a hint, as in `best_hint`, is added to the reward of the row that wrote it; it is 0 where its
    answers are not more informative than the plain ones. Put it after `total`, with the engine `with_hinter`,
    and compare hints with hints: `{name: group_normalize, by: [group, place, role]}`.

    Args:
        of: Name of the reward of answers that must be above `threshold`.
        threshold: The highest reward that counts as a failure.
        reliance: Label that the engine `vision.with_hint_reliance` records; empty: no discount.
        temperature: Change of the label that discounts by a factor of e.
    """
    wrote, hint = hint_of(table, WROTE), hint_of(table)
    success, relied = successes(table, of, threshold), reliances(table, reliance)
    values = table.values.clone()
    for row in (wrote != 0).nonzero()[:, 0].tolist():
        group = table.group == table.group[row]
        shown, plain = group & (hint == wrote[row]), group & (hint == 0) & (wrote == 0)
        before = informativeness(success[plain]) if plain.any() else 0.0
        # No answer saw an unusable hint.
        if shown.any() and informativeness(success[shown]) > before:
            values[row] += hint_value(success[shown], relied[shown], temperature)
    return table.put(torch.where(table.valid, values, table.values))


def reliances(table: RewardTable, label: str) -> Tensor:
    """Label of how much each answer relies on its hint: (N,), 0 where none was recorded."""
    return table.at_end(label).nan_to_num() if label else torch.zeros(len(table), dtype=torch.float64)


def hint_value(success: Tensor, reliance: Tensor, temperature: float) -> float:
    """Value of a hint: how informative its answers are, discounted by their reliance on it."""
    relied = float(reliance[success].mean()) if success.any() else 0.0
    return informativeness(success) * math.exp(min(relied, 0.0) / temperature)


def informativeness(success: Tensor) -> float:
    """1 - p^n - (1 - p)^n: probability that n answers with a success rate p have different results."""
    n, p = len(success), float(success.double().mean())
    return 1.0 - p**n - (1.0 - p) ** n
