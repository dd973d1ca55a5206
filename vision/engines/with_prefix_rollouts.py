"""Engine that completes prefixes of answers several times, for credit assignment within an answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, Probability
from mmrl.config.registry import engine
from mmrl.core.episodes import BARE
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.branching import Branch, Grown, right_answer, target_scores, tokenized
from mmrl.vision.decoding.continuing import ContinuingEngine
from mmrl.vision.engines.generate import Generate


@dataclass(frozen=True, eq=False)
class Probe:
    """A branch of a row's answer, which begins after the first `end` tokens of the answer."""

    row: int
    end: int
    kind: Literal["answer", "completion", "target"]
    branch: Branch


@engine(sets_tags={BARE})
@dataclass(eq=False)
class WithPrefixRollouts:
    """Complete prefixes of every answer several times, for credit assignment within the answer.

    Every completion becomes an outcome of the answer. The text of this outcome, for rewards, is prefix and
    completion; its `end` is the number of prefix tokens. `mean_by_end` averages the rewards of one prefix
    (SPO, arXiv 2505.23564). Common prefixes are computed once. The wrapped engine, `vision.generate` or
    `vision.vllm`, samples the answers. Evaluations complete no prefixes.

    Args:
        engine: The wrapped engine.
        num_probes: Completions of each prefix; 0: none, for `score_target` alone.
        cut: Where prefixes may end. `low_probability`: before tokens that were sampled with a probability
            below `threshold`. `separator`: after tokens that complete a separator. `token`: after any token.
        interval: Use every `interval`-th of these positions; `low_probability` includes the first one.
        threshold: Probability for `low_probability`.
        separator: Text that ends a step, such as a full stop and an empty line.
        at_start: Complete the empty prefix (the prompt alone) too.
        share: Probability that the prefixes of an answer are completed. Prefixes of other answers become
            outcomes without a completion and without a reward, with the tag `bare`, for which a verifier
            predicts values (`verifier_values`).
        opener: Text between prefix and completion, such as "The answer is".
        max_probe_length: Maximal tokens of a completion; 0: prefix and completion together are limited like
            an answer.
        probe_temperature: Temperature of completions; None: the temperature of the answers.
        score_target: Record with these outcomes the probability of the right answer after the opener: the
            geometric mean over its tokens (`answer_likelihood`, IGPO, arXiv 2510.14967) and the arithmetic
            mean (`answer_probability`, SPAE, arXiv 2601.03823). The right answer is the (first) target if it
            is a text, else the first recorded answer. Completions record a `confidence`, exp(-mean entropy),
            except with `vision.vllm`, whose servers compute no entropies.
        batch_size: Maximal number of rows in a batch; 0: as in the wrapped engine.
        policy: Another model that completes prefixes, such as PAV's prover (arXiv 2410.08146): `{name:
            vision.tokens, model: ..., frozen: true}`. This model must have the policy's tokens, and is not
            trained. None: the policy.
    """

    engine: ContinuingEngine
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
    policy: Any = None  # the option; `__post_init__` replaces it
    notes: ClassVar[frozenset[str]] = frozenset()

    @staticmethod
    def copies_engine(options: Mapping[str, Any]) -> bool:
        """Whether another model completes prefixes, with a copy of the wrapped engine."""
        return options.get("policy") is not None

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
        """Sample answers with the wrapped engine, and add the outcomes of their prefixes in training."""
        if self.stream.purpose != "train":
            return self.engine.rollout(prompts)
        distinct = {prompt.uid: prompt for prompt in prompts} if self.score_target else {}
        name = "vision.with_prefix_rollouts"
        targets = {uid: self._tokenized(right_answer(prompt, name)) for uid, prompt in distinct.items()}
        rows = self.engine.rollout(prompts)
        probes: list[Probe] = []
        counts: Counter[str] = Counter()  # number of rows of each prompt so far
        outcomes: list[list[Outcome]] = [[] for _ in rows]
        for number, row in enumerate(rows):
            uid = row.prompt.uid
            if ends := self.cuts(row):
                key = (uid, counts[uid])  # makes random numbers independent of other rows
                if self._chosen(key):
                    probes += self._probes(number, row, ends, key, targets.get(uid), first=len(probes))
                else:
                    outcomes[number] = [self._bare(row, end) for end in ends]
            counts[uid] += 1
        branches = [probe.branch for probe in probes]
        options = {"temperature": self.probe_temperature, "batch_size": self.batch_size}
        completed: list[list[tuple[Probe, Grown]]] = [[] for _ in rows]
        for probe, grown in zip(probes, self.completing.grow(branches, **options), strict=True):
            if grown is not None:  # never None, because a prefix has no end token
                completed[probe.row].append((probe, grown))
        for number, pairs in enumerate(completed):
            outcomes[number] += self._outcomes(pairs)
        return tuple(
            replace(row, outcomes=(*added, *row.outcomes)) for row, added in zip(rows, outcomes, strict=True)
        )

    def _chosen(self, key: tuple[str, int]) -> bool:
        """Decide at random, with probability `share`, whether to complete the prefixes of an answer."""
        number = torch.rand((), generator=self.stream.generator("share", *key))
        return float(number) < self.share  # always true if `share` is 1

    def _bare(self, row: Trajectory, end: int) -> Outcome:
        """Create the outcome of a prefix without a completion."""
        ids = row.steps.ids[:end]
        text, tokens = self.policy.prompt_encoder.text(ids), tuple(ids.tolist())
        return Outcome(text=text, end=end, tags={BARE: "yes"}, tokens=tokens)

    def _prover(self, model: Any) -> Generate:
        """Create an engine that completes prefixes with another model, with the wrapped engine's settings."""
        if not isinstance(self.engine, Generate):
            raise ConfigError("another `policy` of `vision.with_prefix_rollouts` needs `vision.generate`")
        model.check_steps_of(self.engine.policy)
        device = self.engine.policy.core.get_input_embeddings().weight.device
        model.module.requires_grad_(False).to(device)
        return replace(self.engine, policy=model, transform=(), cache=None)

    def cuts(self, row: Trajectory) -> list[int]:
        """Return the lengths of an answer's prefixes in tokens, in rising order."""
        ids = row.steps.ids
        if self.cut == "low_probability":
            # As in SPO, an unlikely token begins the next segment.
            cuts = (row.notes["logp"].exp() < self.threshold).nonzero()[:: self.interval, 0].tolist()
        else:
            each = self._after_separators(ids) if self.cut == "separator" else list(range(1, len(ids)))
            cuts = each[self.interval - 1 :: self.interval]
        return [0] * (self.at_start and cuts[:1] != [0]) + [end for end in cuts if end < len(ids)]

    def _after_separators(self, ids: Tensor) -> list[int]:
        """Return the prefix lengths in tokens at which one more separator is complete."""
        window = len(self.separator.encode()) + 4  # a separator has at most one token per byte
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
        """Create the branches that complete an answer's prefixes, from index `first` on; `key` seeds them."""
        prompt, opener, nothing = row.steps.prompt, self._tokenized(self.opener), torch.zeros(0)
        # The first branch replays the answer up to the last cut, without sampling.
        probes = [
            Probe(
                number, ends[-1], "answer", Branch(prompt, nothing, row.steps.ids[: ends[-1]], scored=False)
            )
        ]
        for end in ends:
            room = self.max_probe_length or self.engine.max_completion_length - end - len(opener)
            for probe in range(self.num_probes):
                generator = self.stream.generator("prefix", *key, end, probe)
                uniform = torch.rand(max(1, room), generator=generator)
                branch = Branch(prompt, uniform, opener, first, end, scored=False)
                probes.append(Probe(number, end, "completion", branch))
            if target is not None:
                branch = Branch(prompt, nothing, torch.cat([opener, target]), first, end)
                probes.append(Probe(number, end, "target", branch))
        return probes

    def _outcomes(self, pairs: Sequence[tuple[Probe, Grown]]) -> list[Outcome]:
        """Create the outcomes of an answer's prefixes from the finished branches (`pairs`)."""
        opener, text = len(self._tokenized(self.opener)), self.policy.prompt_encoder.text
        recorded = {
            probe.end: target_scores(grown.logp[probe.end + opener :])
            for probe, grown in pairs
            if probe.kind == "target"
        }
        outcomes = []
        for probe, grown in pairs:
            if probe.kind == "answer" or (probe.kind == "target" and self.num_probes):
                continue
            likelihood = recorded.get(probe.end, {})
            if probe.kind == "target":  # the prefix was scored, not completed
                ids = grown.ids[: probe.end]
            else:
                ids = grown.ids
                if grown.entropy is not None:
                    unsure = float(grown.entropy[probe.end + opener :].double().mean())
                    likelihood = {**likelihood, "confidence": math.exp(-unsure)}
            tokens = tuple(ids.tolist())
            outcomes.append(Outcome(text=text(ids), end=probe.end, recorded=likelihood, tokens=tokens))
        return outcomes

    def _tokenized(self, text: str) -> Tensor:
        """Tokenize a text inside an answer, without an end token."""
        return tokenized(self.policy.prompt_encoder, text)
