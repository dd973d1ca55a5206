"""The prefix engine of text: completes the beginnings of answers, to credit parts of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, Probability
from mmrl.config.registry import engine
from mmrl.core.episodes import BARE
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.branching import NO_TOKENS, Branch, Grown, grow_with
from mmrl.vision.engines.generate import Generate


@dataclass(frozen=True, eq=False)
class Probe:
    """A branch of the answer of a row, at a cut after `end` of its tokens."""

    row: int
    end: int
    kind: Literal["answer", "completion", "target"]
    branch: Branch


@engine(sets_tags={BARE})
@dataclass(eq=False)
class WithPrefixRollouts:
    """Add outcomes of an answer's prefixes, each completed several times, to credit parts of the answer.

    The text of such an outcome is the prefix with its completion, which rewards score, and its `end` is the
    number of tokens of the prefix: `mean_by_end` averages the rewards of one prefix (SPO, arXiv 2505.23564).
    Prompts and prefixes are computed once for all that share them. Answers, and evaluations, are those of the
    wrapped engine, `vision.generate`.

    Args:
        engine: The wrapped engine.
        num_probes: Completions of each prefix; 0: none, where only `score_target` is wanted.
        cut: Prefixes end before tokens that were sampled with a probability below `threshold`
            (`low_probability`), after tokens that complete a `separator`, or after any token (`token`).
        interval: Cut at every so many of these, with `low_probability` beginning with the first.
        threshold: Probability for `low_probability`.
        separator: Text that ends a step, such as a full stop and an empty line.
        at_start: Complete the bare prompt too.
        share: Share of answers whose prefixes are completed, drawn for each. Prefixes of the others are
            outcomes without a completion, with the tag `bare` and no reward, whose values a verifier
            predicts (`verifier_values`).
        opener: Text between prefix and completion, such as "The answer is".
        max_probe_length: The most tokens of a completion; 0: prefix and completion together have as many as
            an answer.
        probe_temperature: Temperature of completions; None: that of the answers.
        score_target: Record on every outcome of a prefix how likely the right answer is after the opener: the
            geometric mean over its tokens (`answer_likelihood`, IGPO, arXiv 2510.14967) and their mean
            (`answer_probability`, SPAE, arXiv 2601.03823). It is the prompt's target, or the first of them,
            if that is a text, and else the first recorded answer. Completions record their `confidence`:
            exp(- mean entropy).
        batch_size: The most rows at once; 0: that of the wrapped engine.
        policy: Another model that completes prefixes, as PAV's prover (arXiv 2410.08146) does, such as
            `{name: vision.tokens, model: ..., frozen: true}`: one of the policy's tokens, which does not
            learn. None: the policy.
    """

    engine: Generate
    _: KW_ONLY
    stream: Stream
    num_probes: NonNegativeInt = 4
    cut: Literal["low_probability", "separator", "token"] = "low_probability"
    interval: PositiveInt = 5
    threshold: Probability = 0.9
    separator: str = ".\n\n"
    at_start: bool = False
    share: PositiveShare = 1.0
    opener: str = ""
    max_probe_length: NonNegativeInt = 0
    probe_temperature: NonNegativeFloat | None = None
    score_target: bool = False
    batch_size: NonNegativeInt = 0
    policy: Any = None  # a function that makes a policy; then the policy of the wrapped engine
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.completing = self._prover(self.policy()) if self.policy else self.engine
        self.policy = self.engine.policy
        if not self.num_probes and not self.score_target:
            raise ValueError(
                "`vision.with_prefix_rollouts` has nothing to do with `num_probes: 0`; ask for completions, "
                "or set `score_target: true`"
            )
        if self.cut == "separator" and not self.separator:
            raise ValueError("`vision.with_prefix_rollouts` cuts at a `separator`, which is empty")

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run the wrapped engine, and add the outcomes of prefixes."""
        if self.stream.purpose != "train":
            return self.engine.rollout(prompts)
        distinct = {prompt.uid: prompt for prompt in prompts} if self.score_target else {}
        targets = {uid: self._target(prompt) for uid, prompt in distinct.items()}
        rows = self.engine.rollout(prompts)
        probes: list[Probe] = []
        asked: Counter[str] = Counter()
        outcomes: list[list[Outcome]] = [[] for _ in rows]
        for number, row in enumerate(rows):
            uid = row.prompt.uid
            if ends := self.cuts(row):
                key = (uid, asked[uid])  # draws depend on neither the batch nor the other rows
                if self._chosen(key):
                    probes += self._probes(number, row, ends, key, targets.get(uid), first=len(probes))
                else:
                    outcomes[number] = [self._bare(row, end) for end in ends]
            asked[uid] += 1
        branches = [probe.branch for probe in probes]
        made = grow_with(
            self.completing, branches, temperature=self.probe_temperature, batch_size=self.batch_size
        )
        found: list[list[tuple[Probe, Grown]]] = [[] for _ in rows]
        for probe, grown in zip(probes, made, strict=True):
            if grown is not None:  # a prefix holds no end token, so that none is
                found[probe.row].append((probe, grown))
        for number, pairs in enumerate(found):
            outcomes[number] += self._outcomes(pairs)
        return tuple(
            replace(row, outcomes=(*added, *row.outcomes)) for row, added in zip(rows, outcomes, strict=True)
        )

    def _chosen(self, key: tuple[str, int]) -> bool:
        """Draw whether the prefixes of an answer are completed."""
        drawn = torch.rand((), generator=self.stream.generator("share", *key))
        return float(drawn) < self.share  # below 1

    def _bare(self, row: Trajectory, end: int) -> Outcome:
        """Make the outcome of a prefix without a completion."""
        ids = row.steps.ids[:end]
        text, tokens = self.policy.prompt_encoder.text(ids), tuple(ids.tolist())
        return Outcome(text=text, end=end, tags={BARE: "yes"}, tokens=tokens)

    def _prover(self, model: Any) -> Generate:
        """Make the engine of another model, with the settings of the wrapped one."""
        model.check_steps_of(self.engine.policy)
        device = self.engine.policy.core.get_input_embeddings().weight.device
        model.module.requires_grad_(False).to(device)
        return replace(self.engine, policy=model, transform=(), cache=None)

    def cuts(self, row: Trajectory) -> list[int]:
        """List the numbers of tokens of an answer that its prefixes have, in order."""
        ids = row.steps.ids
        if self.cut == "low_probability":
            # SPO: the token that was unlikely is the first of the next part.
            found = (row.notes["logp"].exp() < self.threshold).nonzero()[:: self.interval, 0].tolist()
        else:
            each = self._after_separators(ids) if self.cut == "separator" else list(range(1, len(ids)))
            found = each[self.interval - 1 :: self.interval]
        return [0] * (self.at_start and found[:1] != [0]) + [end for end in found if end < len(ids)]

    def _after_separators(self, ids: Tensor) -> list[int]:
        """List the numbers of tokens with which one more separator is complete."""
        window = len(self.separator.encode()) + 4  # tokens that it can stand in, of at least a byte each
        ends, text, separator = [], self.policy.prompt_encoder.text, self.separator
        for end in range(1, len(ids) + 1):
            seen = ids[max(0, end - window) : end]
            if text(seen).count(separator) > text(seen[:-1]).count(separator):
                ends.append(end)
        return ends

    def _probes(
        self,
        number: int,
        row: Trajectory,
        ends: Sequence[int],
        key: tuple[str, int],
        target: Tensor | None,
        first: int,
    ) -> list[Probe]:
        """Make the branches of an answer with draws of a key; its own branch has the number `first`."""
        prompt, opener, nothing = row.steps.prompt, self._tokenized(self.opener), torch.zeros(0)
        # The answer is read up to the last cut, and nothing is sampled for it.
        probes = [Probe(number, ends[-1], "answer", Branch(prompt, nothing, row.steps.ids[: ends[-1]]))]
        for end in ends:
            room = self.max_probe_length or self.engine.max_completion_length - end - len(opener)
            for probe in range(self.num_probes):
                generator = self.stream.generator("prefix", *key, end, probe)
                uniform = torch.rand(max(1, room), generator=generator)
                branch = Branch(prompt, uniform, opener, first, end)
                probes.append(Probe(number, end, "completion", branch))
            if target is not None:
                branch = Branch(prompt, nothing, torch.cat([opener, target]), first, end)
                probes.append(Probe(number, end, "target", branch))
        return probes

    def _outcomes(self, pairs: Sequence[tuple[Probe, Grown]]) -> list[Outcome]:
        """Make the outcomes of the prefixes of one answer from what was read and sampled after them."""
        opener, text = len(self._tokenized(self.opener)), self.policy.prompt_encoder.text
        recorded = {
            probe.end: {
                "answer_likelihood": float(grown.logp[probe.end + opener :].double().mean().exp()),
                "answer_probability": float(grown.logp[probe.end + opener :].double().exp().mean()),
            }
            for probe, grown in pairs
            if probe.kind == "target"
        }
        outcomes = []
        for probe, grown in pairs:
            if probe.kind == "answer" or (probe.kind == "target" and self.num_probes):
                continue
            likelihood = recorded.get(probe.end, {})
            if probe.kind == "target":  # without completions: the prefix alone
                ids = grown.ids[: probe.end]
            else:
                ids = grown.ids
                unsure = float(grown.entropy[probe.end + opener :].double().mean())
                likelihood = {**likelihood, "confidence": math.exp(-unsure)}
            tokens = tuple(ids.tolist())
            outcomes.append(Outcome(text=text(ids), end=probe.end, recorded=likelihood, tokens=tokens))
        return outcomes

    def _tokenized(self, text: str) -> Tensor:
        """Tokenize a text that stands inside an answer."""
        return self.policy.prompt_encoder.answer(text)[:-1] if text else NO_TOKENS

    def _target(self, prompt: Prompt) -> Tensor:
        """Tokenize the right answer of a prompt. Raises `ValueError` where it has none as a text."""
        match prompt.target, prompt.answers:
            case (str(text), _) | ((str(text), *_), _) | (_, (Outcome(text=str(text)), *_)) if text:
                return self._tokenized(text)
        raise ValueError(
            f"`vision.with_prefix_rollouts` with `score_target` wants a right answer as text, but the target "
            f"of prompt '{prompt.uid}' is {prompt.target!r} and it has {len(prompt.answers)} recorded "
            "answers; add recorded answers, or use completions (`num_probes`) alone"
        )
