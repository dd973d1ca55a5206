"""Small models that learn in a second, and engines for them: a look-up table over tokens, and a flow in two
dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmrl.build import build
from mmrl.config.loading import merge
from mmrl.config.schema import Config, parse
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Message, Outcome, Part, Prompt, Rollouts, Trajectory, Unit
from mmrl.references import Reference
from mmrl.rewards.adapters import per_outcome
from mmrl.training.trainer import Run
from mmrl.vision.decoding.branching import Branch, Grown
from mmrl.vision.decoding.decoding import inverse_cdf
from mmrl.vision.decoding.divergence import generalized_jsd
from mmrl.vision.decoding.inner_outputs import OF_LOGITS, OF_STATES, InnerOptions, of_logits, of_states

STOP = 0  # the token that ends an answer
SOLUTION = "First add. Then divide. Then round. Done."
HINTS = ("think", "add", "the answer is known")


def prompts(*, num: int = 8, answers: int = 1) -> list[Prompt]:
    """Ask for one token, again and again. The first recorded answer is right, others ask for other tokens."""
    return [
        Prompt(
            uid=f"p{i}",
            messages=(Message("user", (Part(f"say {i % 5 + 1}"),)),),
            target=i % 5 + 1,
            answers=tuple(Outcome(text=f"{(i + k) % 5 + 1} {(i + k) % 5 + 1}") for k in range(answers)),
            columns={"wanted": i % 5 + 1},
        )
        for i in range(num)
    ]


def half_shown(*, num: int = 8) -> list[Prompt]:
    """Give every other prompt a recorded answer, and the rest none."""
    return [prompts(num=num, answers=1 - i % 2)[i] for i in range(num)]


def hinted_prompts(*, num: int = 8) -> list[Prompt]:
    """Give every prompt a column of three hints and one of a solution; those of p1 have no hint."""
    hints = [[] if i == 1 else list(HINTS) for i in range(num)]
    return [
        replace(prompt, columns={"hints": listed, "solution": SOLUTION})
        for prompt, listed in zip(prompts(num=num), hints, strict=True)
    ]


def worded_prompts(*, num: int = 8) -> list[Prompt]:
    """Give every prompt its question as a column, and a paraphrase."""
    return [
        replace(prompt, columns={"question": prompt.text, "paraphrases": [f"please {prompt.text}"]})
        for prompt in prompts(num=num)
    ]


def place_of(prompt: Prompt) -> int:
    """Read the row of the table from an id such as "p3", or "p3#hint" of a changed prompt."""
    return int(prompt.uid[1:].partition("#")[0])


@per_outcome
def share_right(prompt: Prompt, outcome: Outcome) -> float:
    """Count how much of the answer is the target."""
    tokens = [int(word) for word in outcome.text.split()]
    return sum(token == prompt.target for token in tokens) / max(len(tokens), 1)


@per_outcome
def brevity(prompt: Prompt, outcome: Outcome) -> float:
    """Prefer short answers."""
    return -0.1 * len(outcome.text.split())


@dataclass(frozen=True)
class TokenSteps:
    """Which logits each step chose from, and what it chose."""

    prompt: Tensor  # (N,)
    tokens: Tensor  # (N, T)
    start: int = 0
    unit: Unit = Unit.ROW

    def cost(self, rows: Tensor) -> int:
        return len(rows) * self.tokens.shape[1]

    def __getitem__(self, cut: tuple[Tensor, slice]) -> TokenSteps:
        rows, columns = cut
        start = self.start + (columns.start or 0)
        return TokenSteps(self.prompt[rows], self.tokens[rows][:, columns], start, self.unit)


class PromptAndTokens(NamedTuple):
    """The row of the table, and the tokens (T,)."""

    prompt: int
    ids: Tensor


class ToyRow(PromptAndTokens):
    """The steps of one rollout; `chosen` (T,) is False for tokens that were not sampled."""

    chosen: Tensor | None = None


class ToyEncoder:
    """Words are numbers of tokens, as the processor of a model would have them."""

    end = (STOP,)

    def encode(self, prompt: Prompt) -> int:
        return place_of(prompt)

    def text(self, ids: Tensor) -> str:
        return " ".join(str(token) for token in ids.tolist() if token != STOP)

    def answer(self, text: str) -> Tensor:
        return torch.tensor([*[int(word) for word in text.split() if word.isdigit()], STOP])


class Lookup(nn.Module):
    """Logits that are read through `forward`, where data parallelism notices it."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self) -> Tensor:
        return self.table


class ToyText:
    """A table of logits: one row per prompt and place, one column per token. Steps are independent.

    Its hidden states are the logits; the head of a teacher weighs them by column.
    """

    outputs = OF_LOGITS | OF_STATES | {"reversed_logp"}
    prompt_encoder = ToyEncoder()

    def __init__(
        self, *, num: int = 8, length: int = 4, vocab: int = 6, unit: int = 1, double: bool = False
    ) -> None:
        self.module = Lookup(
            torch.zeros(num, length, vocab, dtype=torch.float64 if double else torch.float32)
        )
        self.unit = Unit(unit)

    @property
    def table(self) -> Tensor:
        return next(iter(self.module.parameters()))

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        tokens = torch.tensor([int(word) for word in outcome.text.split()] + [STOP])[: self.table.shape[1]]
        outcome = Outcome(
            text=outcome.text, end=len(tokens), tags={"finish": "stop"}, recorded=outcome.recorded
        )
        steps = ToyRow(place_of(prompt), tokens)
        return Trajectory(prompt, prompt.uid, (outcome,), steps, len(tokens), {}, False)

    def collate(self, rollouts: tuple[Trajectory, ...]) -> Batch:
        tokens = cat_padded([row.steps[1][None] for row in rollouts])
        # Tests make rows of plain pairs, all of whose tokens count.
        chosen = [row.steps.chosen if isinstance(row.steps, ToyRow) else None for row in rollouts]
        mask = cat_padded(
            [
                torch.ones(1, row.length) if sampled is None else sampled.float()[None]
                for row, sampled in zip(rollouts, chosen, strict=True)
            ]
        )
        names = sorted({name for row in rollouts for name in row.notes} - {"token", "temperature"})
        empty = torch.full((1, 0), float("nan"))
        notes = {}
        for name in names:
            noted = [row.notes[name][None] if name in row.notes else empty for row in rollouts]
            notes[name] = cat_padded([*noted, torch.full((1, tokens.shape[1]), 0.0)], float("nan"))[:-1]
        return Batch.of(
            TokenSteps(torch.tensor([row.steps[0] for row in rollouts]), tokens, 0, self.unit), mask, notes
        )

    def __call__(self, batch: Batch, extra: frozenset[str] = frozenset()) -> StepOutput:
        steps = batch.steps
        places = torch.arange(steps.start, steps.start + steps.tokens.shape[1])
        logp = self.module()[steps.prompt][:, places].log_softmax(-1)
        chosen = logp.gather(2, steps.tokens[..., None])[..., 0] * batch.mask
        said = {"entropy": -(logp.exp() * logp).sum(-1)} if "entropy" in extra else {}
        if "reversed_logp" in extra:  # as of a log-linear policy whose weights have the other sign
            said["reversed_logp"] = -chosen
        return StepOutput(chosen, said | self._inside(batch, places, extra - {"entropy", "reversed_logp"}))

    def _inside(self, batch: Batch, places: Tensor, extra: frozenset[str]) -> dict[str, Tensor]:
        """Give what a language model says from inside, as `vision.tokens` does."""
        if not extra & self.outputs:
            return {}
        hidden, shape = self.module()[batch.steps.prompt][:, places], batch.mask.shape
        others = [other.extra["hidden"] for other in batch.others.values() if "hidden" in other.extra]
        options = InnerOptions(rank_stride=1)
        said = of_logits(hidden.flatten(0, 1), batch.steps.tokens.flatten(), extra, options)
        if "divergence" in extra and others:
            head = torch.linspace(0.5, 1.5, hidden.shape[-1], dtype=hidden.dtype)
            teacher = (others[-1].to(hidden.dtype) * head).flatten(0, 1)
            both = (logits.log_softmax(-1) for logits in (hidden.flatten(0, 1), teacher))
            said["divergence"] = generalized_jsd(*both, 1.0)
        said = {name: value.view(*shape, *value.shape[1:]) for name, value in said.items() if name in extra}
        return said | of_states(hidden, batch.mask.new_full(shape[:1], shape[1]).long(), extra, options)

    def save(self, folder) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({"table": self.table.detach().clone()}, folder / "model.safetensors")

    def load(self, folder) -> None:
        from safetensors.torch import load_file

        self.table.data.copy_(load_file(folder / "model.safetensors")["table"])


class ToyGenerate:
    """Sample tokens until the stop token."""

    notes = frozenset({"logp", "entropy"})
    temperature = 1.0  # 0: the most likely tokens

    def __init__(self, policy: ToyText, *, stream: Stream) -> None:
        self.policy, self.stream = policy, stream

    @torch.no_grad()
    def rollout(self, prompts: Sequence[Prompt]) -> tuple[Trajectory, ...]:
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            index = asked[prompt.uid] = asked.get(prompt.uid, -1) + 1
            generator = self.stream.generator(prompt.uid, index)
            place = place_of(prompt)
            logp = self.policy.table[place].float().log_softmax(-1)
            tokens = torch.multinomial(logp.exp(), 1, generator=generator)[:, 0]
            tokens = tokens if self.temperature else logp.argmax(-1)
            stops = (tokens == STOP).nonzero()
            length = int(stops[0]) + 1 if len(stops) else len(tokens)
            tokens = tokens[:length]
            text = " ".join(str(t) for t in tokens.tolist() if t != STOP)
            outcome = Outcome(text=text, end=length, tags={"finish": "stop" if len(stops) else "length"})
            notes = {
                "logp": logp.gather(1, tokens[:, None])[:, 0],
                "entropy": -(logp.exp() * logp).sum(-1)[:length],
            }
            rows.append(Trajectory(prompt, prompt.uid, (outcome,), ToyRow(place, tokens), length, notes))
        return tuple(rows)

    def row(
        self,
        prompt: Prompt,
        encoded: int,
        notes: dict[str, Tensor],
        stopped: bool,
        chosen: Tensor | None = None,
    ) -> Trajectory:
        ids = notes["token"]
        text = self.policy.prompt_encoder.text(ids)
        outcome = Outcome(text=text, end=len(ids), tags={"finish": "stop" if stopped else "length"})
        steps = ToyRow(encoded, ids)
        steps.chosen = chosen
        return Trajectory(prompt, prompt.uid, (outcome,), steps, len(ids), notes)

    @property
    def max_completion_length(self) -> int:
        return self.policy.table.shape[1]

    @torch.no_grad()
    def answer(self, rows: Sequence[Any]) -> Rollouts:
        """Sample an answer for every request."""
        return self.rollout([row.prompt for row in rows])

    def greedily(self) -> Any:
        """Return a copy that decodes greedily."""
        greedy = copy(self)
        greedy.temperature = 0.0
        return greedy

    def grow(
        self, branches: Sequence[Branch], *, temperature: float | None = None, batch_size: int = 0
    ) -> list[Grown | None]:
        """Sample answers that part from each other, one after the other."""
        grown: list[Grown | None] = []
        for branch in branches:
            before = torch.zeros(0, dtype=torch.int64)
            if branch.parent is not None:
                parent = grown[branch.parent]
                if parent is None or (parent.stopped and len(parent.ids) <= branch.start):
                    grown.append(None)
                    continue
                before = parent.ids[: branch.start]
            logp = self.policy.table[branch.encoded].float().log_softmax(-1)
            ids = torch.cat([before, branch.forced])
            numbers = branch.uniform[: max(0, len(logp) - len(ids))]
            drawn = inverse_cdf(logp[len(ids) : len(ids) + len(numbers)].exp(), numbers)
            stops = (drawn == STOP).nonzero()
            stopped = len(stops) > 0
            ids = torch.cat([ids, drawn[: int(stops[0]) + 1] if stopped else drawn])
            at = torch.arange(len(ids)).clamp(max=len(logp) - 1)
            chosen = logp[at].gather(1, ids[:, None])[:, 0]
            grown.append(Grown(ids, chosen, -(logp.exp() * logp).sum(-1)[at], stopped))
        return grown


class RunningMean:
    """An advantage with a memory: subtract the mean of everything that was ever observed."""

    def __init__(self) -> None:
        self.sum, self.count = torch.zeros((), dtype=torch.float64), 0

    def __call__(self, table: RewardTable) -> RewardTable:
        return table.put(table.values - self.sum / max(self.count, 1))

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        self.sum = self.sum + table.values[table.valid].sum()
        self.count += int(table.valid.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sum, self.count = state["sum"], state["count"]


def plan(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """Write down a small run of the look-up table, as YAML would hold it; `changes` are merged over it."""
    usual = {
        "policy": "tests.support.toys:ToyText",
        "data": "tests.support.toys:prompts",
        "rollout": {"engine": ["tests.support.toys:ToyGenerate"], "num_prompts": 4, "num_generations": 4},
        "rewards": ["tests.support.toys:share_right", {"name": "tests.support.toys:brevity", "weight": 0.5}],
        "advantage": ["total", "group_normalize"],
        "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "sequence_mean"},
        "learn": {"learning_rate": 0.1},
        "report": {"trackers": []},
        "max_steps": 3,
        "output_dir": str(folder),
    }
    return merge(usual, changes)


def toy_run(folder: Path | str, **changes: Any) -> Run:
    """Build that run."""
    return build(parse(plan(folder, **changes), Config), quiet=True)


class ToyRecalling(ToyText):
    """The look-up table, which makes rows again from what was noted."""

    def restore_rows(self, prompt: Prompt, notes: Mapping[str, Tensor]) -> Trajectory:
        tokens = notes["token"].long()
        text = " ".join(str(token) for token in tokens.tolist() if token != STOP)
        outcome = Outcome(text=text, end=len(tokens))
        kept = {"logp": notes["logp"].float()}
        return Trajectory(
            prompt, prompt.uid, (outcome,), ToyRow(int(prompt.uid[1:]), tokens), len(tokens), kept, False
        )


class ToyNoting(ToyGenerate):
    """Sample tokens, and note them."""

    notes = frozenset({"logp", "entropy", "token", "temperature"})

    def rollout(self, prompts: Sequence[Prompt]) -> tuple[Trajectory, ...]:
        return tuple(
            replace(row, notes={**row.notes, "token": row.steps[1], "temperature": torch.ones(row.length)})
            for row in super().rollout(prompts)
        )


class ToyWindow:
    """Take answers that begin with the token 1 for unfinished."""

    sets_tags = frozenset({"finish", "unfinished"})
    notes: frozenset[str] = frozenset()

    def __init__(self, engine: ToyNoting) -> None:
        self.engine, self.policy = engine, engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> tuple[Trajectory, ...]:
        return tuple(map(self._cut, self.engine.rollout(prompts)))

    def _cut(self, row: Trajectory) -> Trajectory:
        last = row.outcomes[-1]
        if not (last.text or "").startswith("1"):
            return row
        tags = {**last.tags, "finish": "length", "unfinished": "yes"}
        return replace(row, outcomes=(*row.outcomes[:-1], replace(last, tags=tags)))


class ToyTurns(ToyNoting):
    """Sample tokens, and take every token for a turn of a conversation between two roles."""

    sets_tags = frozenset(
        {"turn", "state", "action", "tool", "role", "stage", "part", "game", "node", "parent"}
    )

    def rollout(self, prompts: Sequence[Prompt]) -> tuple[Trajectory, ...]:
        return tuple(self._talk(row, number) for number, row in enumerate(super().rollout(prompts)))

    def _talk(self, row: Trajectory, number: int) -> Trajectory:
        words = [str(token) for token in row.steps[1].tolist()]
        return replace(row, outcomes=tuple(self._turn(words, k, number) for k in range(len(words))))

    def _turn(self, words: Sequence[str], k: int, number: int) -> Outcome:
        tags = {
            "turn": str(k),
            "state": words[k - 1] if k else "start",
            "action": words[k],
            "tool": words[k],
            "role": ("main", "sub")[k % 2],
            "stage": ("clue", "decide")[k % 2],
            "part": ("plan", "act")[k % 2],
            "game": str(number),
            "node": f"{number}.{k}",
            "parent": f"{number}.{k - 1}" if k else "",
        }
        return Outcome(text=words[k], end=k + 1, tags=tags)


class ToyTurnText(ToyText):
    """The look-up table for rows that begin at any turn: what it is asked is prompt * length + turn."""

    def __call__(self, batch: Batch, extra: frozenset[str] = frozenset()) -> StepOutput:
        steps, length = batch.steps, self.table.shape[1]
        places = steps.prompt[:, None] % length + torch.arange(
            steps.start, steps.start + steps.tokens.shape[1]
        )
        prompt = steps.prompt.div(length, rounding_mode="floor")[:, None]
        logp = self.module()[prompt, places.clamp(max=length - 1)].log_softmax(-1)
        chosen = logp.gather(2, steps.tokens[..., None])[..., 0] * batch.mask
        return StepOutput(chosen, {"entropy": -(logp.exp() * logp).sum(-1)} if "entropy" in extra else {})


class ToyTurnRows(ToyTurns):
    """The same conversations, with one row each or with a row per turn."""

    sets_tags = ToyTurns.sets_tags | {"episode"}

    def __init__(self, policy: ToyText, *, rows: bool = False, stream: Stream) -> None:
        super().__init__(policy, stream=stream)
        self.rows = rows

    def _place(self, row: Trajectory, turn: int) -> int:
        return row.steps[0] * self.policy.table.shape[1] + turn

    def rollout(self, prompts: Sequence[Prompt]) -> tuple[Trajectory, ...]:
        whole = super().rollout(prompts)
        if not self.rows:
            return tuple(replace(row, steps=(self._place(row, 0), row.steps[1])) for row in whole)
        return tuple(
            replace(
                row,
                steps=(self._place(row, k), row.steps[1][k : k + 1]),
                length=1,
                notes={name: note[k : k + 1] for name, note in row.notes.items()},
                outcomes=(replace(outcome, end=1, tags={**outcome.tags, "episode": str(number)}),),
            )
            for number, row in enumerate(whole)
            for k, outcome in enumerate(row.outcomes)
        )


class ToyCritic(ToyText):
    """A look-up table of values: one per prompt and place."""

    outputs = frozenset({"value", "value_logit"})

    def __init__(
        self, *, num: int = 8, length: int = 4, double: bool = False, probability: bool = False
    ) -> None:
        super().__init__(num=num, length=length, vocab=1, double=double)
        self.probability = probability
        if not probability:
            self.outputs = self.outputs - {"value_logit"}

    def __call__(self, batch: Batch, extra: frozenset[str] = frozenset()) -> StepOutput:
        steps = batch.steps
        places = torch.arange(steps.start, steps.start + steps.tokens.shape[1])
        logit = self.module()[steps.prompt][:, places, 0]
        said = {"value": logit.sigmoid() if self.probability else logit, "value_logit": logit}
        return StepOutput(torch.zeros_like(logit), {name: said[name] for name in said.keys() & extra})


class ToyScores(ToyText):
    """A reward model that scores an answer by the logit of its first token; all labels have this score."""

    outputs = frozenset({"score"})

    def __init__(self, *, num: int = 8, labels: tuple[str, ...] = ()) -> None:
        super().__init__(num=num)
        self.names = tuple(f"score/{label}" for label in labels) or ("score",)

    def __call__(self, batch: Batch, extra: frozenset[str] = frozenset()) -> StepOutput:
        score = self.module()[batch.steps.prompt].gather(2, batch.steps.tokens[..., None])[..., 0]
        return StepOutput(torch.zeros_like(score), dict.fromkeys(self.names, score))


def teacher(policy: ToyText) -> Reference:
    """Make a policy of the same table with other weights, which never learns."""
    other = Reference(policy, 1.0)
    generator = torch.Generator().manual_seed(3)
    for weight in other.weights.values():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return other
