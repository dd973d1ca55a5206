"""The doctor finds planted mistakes, says what to do, and has nothing to say of a sound run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import nn

from mmrl.cli import main
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.core.step_table import StepOutput
from mmrl.core.types import Outcome
from mmrl.diagnostics.checks import training_metrics
from mmrl.diagnostics.checks.ratio import importance_correction, initial_ratio
from mmrl.diagnostics.checks.rewards import reward_sanity, rewards_apply, zero_variance_groups
from mmrl.diagnostics.checks.sampling import repeatable_rollouts, sampling_params
from mmrl.diagnostics.checks.training_metrics import fits_memory, gradient_flow
from mmrl.diagnostics.memory_estimates import estimate_memory as estimate
from mmrl.diagnostics.memory_estimates import optimizer_bytes, peak, training
from mmrl.doctor import _look, examine, printable
from mmrl.optimizers import adamw, muon, sgd
from mmrl.reporting import html
from mmrl.rewards.adapters import per_outcome
from mmrl.training.loop import train
from tests.support.toy_flow import flow_plan
from tests.support.toys import STOP, Lookup, ToyGenerate, ToyText, plan, prompts, toy_run

HERE = __name__


class Begun(ToyText):
    """A look-up table that prefers some tokens already."""

    def __init__(self, *, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.table.data.normal_(generator=torch.Generator().manual_seed(0))


class Coarse(Begun):
    """Computes in `dtype`, while the engine computes in float32."""

    def __call__(self, batch, extra=frozenset()):
        said = self.module()[batch.steps.prompt].to(self.dtype).log_softmax(-1)
        chosen = said.gather(2, batch.steps.tokens[..., None])[..., 0]
        return StepOutput(chosen.float() * batch.mask, {})


class Dropping(Begun):
    """Drops entries of its table, as a model in training does."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(Lookup(self.table.data.clone()))
        self.module.append(nn.Dropout(0.3))

    @property
    def table(self):
        return next(iter(self.module.parameters()))

    def __call__(self, batch, extra=frozenset()):
        table = self.module[0]()
        said = self.module[1](table)[batch.steps.prompt].log_softmax(-1)
        return StepOutput(said.gather(2, batch.steps.tokens[..., None])[..., 0] * batch.mask, {})


class Shifted(Begun):
    """Reads the logits of the step before."""

    def __call__(self, batch, extra=frozenset()):
        said = self.module()[batch.steps.prompt].roll(1, dims=1).log_softmax(-1)
        return StepOutput(said.gather(2, batch.steps.tokens[..., None])[..., 0] * batch.mask, {})


class Late(Begun):
    """Says of every step what belongs to the next one."""

    def __call__(self, batch, extra=frozenset()):
        said = super().__call__(batch, extra).logp
        return StepOutput(said.roll(-1, dims=1) * batch.mask, {})


class Crowded(Begun):
    """Says something else where several rows are computed together."""

    def __call__(self, batch, extra=frozenset()):
        said = super().__call__(batch, extra)
        return StepOutput(said.logp - 0.05 * (len(batch) - 1) * batch.mask, said.extra)


class Adapted(Begun):
    """A table with an adapter that takes part in nothing, or is frozen."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.module.lora_a = nn.Parameter(torch.zeros(6, 6), requires_grad=not frozen)


class Greedy(ToyGenerate):
    """Samples as it pleases, whatever it is told."""

    def __init__(self, policy, *, stream, temperature: float = 1.0, inherited: float = 0.0) -> None:
        super().__init__(policy, stream=stream)
        self.temperature = self.inherited = inherited
        self.told = temperature

    @torch.no_grad()
    def rollout(self, asked):
        rows = []
        for i, row in enumerate(super().rollout(asked)):
            place = int(row.prompt.uid[1:])
            logp = self.policy.table[place].float().log_softmax(-1)
            heat = (logp / max(self.inherited, 1e-3)).softmax(-1)
            tokens = torch.multinomial(heat, 1, generator=self.stream.generator(i))[:, 0]
            stops = (tokens == STOP).nonzero()
            tokens = tokens[: int(stops[0]) + 1 if len(stops) else len(tokens)]
            text = " ".join(str(t) for t in tokens.tolist() if t != STOP)
            said = logp[: len(tokens)]
            notes = {"logp": said.gather(1, tokens[:, None])[:, 0], "entropy": -(said.exp() * said).sum(-1)}
            outcome = Outcome(text=text, end=len(tokens))
            rows.append(type(row)(row.prompt, row.group, (outcome,), (place, tokens), len(tokens), notes))
        return tuple(rows)


class PartlyWritten(Greedy):
    """Writes the first token of an answer itself, of which it notes nothing."""

    def rollout(self, asked):
        rows = super().rollout(asked)
        unknown = torch.tensor([math.nan])
        return tuple(
            replace(row, notes={name: torch.cat([unknown, note[1:]]) for name, note in row.notes.items()})
            for row in rows
        )


class Unseeded(ToyGenerate):
    """Leaves an answer to torch's own generator."""

    def rollout(self, asked):
        first, *rows = super().rollout(asked)
        outcome = replace(first.outcomes[-1], text=str(int(torch.randint(1 << 30, ()))))
        return (replace(first, outcomes=(outcome,)), *rows)


@per_outcome
def absent(prompt, outcome):
    return prompt.columns.get("no such column")


@per_outcome
def constant(prompt, outcome):
    return 0.5


@per_outcome
def wrong_way_round(prompt, outcome):
    tokens = [int(word) for word in outcome.text.split()]
    return sum(token != prompt.target for token in tokens) / max(len(tokens), 1)


@per_outcome
def deaf(prompt, outcome):
    """Measure what an answer begins with, whatever was asked."""
    return float(len(set(outcome.text)) > 99)


RUN = {
    "policy": f"{HERE}:Begun",
    "rewards": ["tests.support.toys:share_right"],
    "rollout": {"num_generations": 8},
    "learn": {"micro_batch_steps": 64},
}


def examined(folder, **changes):
    """Examine a toy run, and give what each checkup found, by its name."""
    raw = plan(folder, **{**RUN, **changes})
    report = examine(parse(raw, Config))
    assert not folder.exists(), "a doctor leaves nothing behind"
    return {entry.full_name: [symptom.text for symptom in found] for entry, found in report.found}


def test_a_sound_run_is_healthy(tmp_path):
    found = examined(tmp_path / "run")
    assert set(found) == {
        check.__name__
        for check in (
            initial_ratio, gradient_flow, fits_memory, zero_variance_groups, reward_sanity, sampling_params,
            importance_correction, rewards_apply, repeatable_rollouts,
        )
    }  # fmt: skip
    assert not any(found.values()), found


class Elder:
    """A teacher: another table than the policy's."""

    def __init__(self, policy) -> None:
        self.decay, self.table = 1.0, torch.zeros_like(policy.table)

    def __call__(self, batch, extra=frozenset()):
        said = self.table[batch.steps.prompt].log_softmax(-1)
        return StepOutput(said.gather(2, batch.steps.tokens[..., None])[..., 0] * batch.mask, {})


@pytest.mark.parametrize("against", ["teacher", "ref"])
def test_equal_rewards_are_fine_beside_a_teacher(tmp_path, against):
    objective = {"penalty": [{"name": "k2", "against": against}]}
    references = {"ref": "frozen", "teacher": f"{HERE}:Elder"}
    found = examined(
        tmp_path / "run", rewards=[f"{HERE}:constant"], objective=objective, references=references
    )
    assert bool(found["zero_variance_groups"]) is (against == "ref")


@pytest.mark.parametrize(("chain", "warned"), [(["total"], False), (["total", "group_center"], True)])
def test_the_doctor_knows_equal_rewards_that_give_advantages(tmp_path, chain, warned):
    """Labelled answers (KTO) have the same label in a group, and are learned from."""
    found = examined(tmp_path / "run", rewards=[f"{HERE}:constant"], advantage=chain)
    assert bool(found["zero_variance_groups"]) is warned


class Scoring(Begun):
    """A reward model: log-probabilities of 0, and a score of every answer."""

    outputs = frozenset({"score"})

    def __call__(self, batch, extra=frozenset()):
        logits = super().__call__(batch).logp.sum(-1, keepdim=True)
        return StepOutput(torch.zeros_like(logits), {"score": logits} if "score" in extra else {})

    def scores(self, rows, batch_size):
        return self(self.collate(rows), self.outputs).extra["score"]

    def collate(self, rollouts):
        batch = super().collate(rollouts)
        return batch.replace(mask=batch.mask[:, :1])


def labelled(*, num=8):
    """Recorded pairs, of which the first answer is preferred."""
    labels = [{"preferred": 1.0}, {"preferred": 0.0}]

    def pair(prompt):
        return tuple(replace(x, recorded=label) for x, label in zip(prompt.answers, labels, strict=True))

    return [replace(prompt, answers=pair(prompt)) for prompt in prompts(num=num, answers=2)]


DPO = {"name": "comparison", "implicit_reward": "log_ratio", "compare": ["sigmoid"]}


@pytest.mark.parametrize("method", ["dpo", "reward_model"])
def test_recorded_pairs_are_sound(tmp_path, method):
    """Their labels belong to the recorded answers, and a reward model has no log-probabilities."""
    found = examined(
        tmp_path / "run",
        advantage=["total", "pairs_with_ties" if method == "reward_model" else "best_vs_worst"],
        objective={"name": "bradley_terry"} if method == "reward_model" else DPO,
        references={} if method == "reward_model" else {"ref": "frozen"},
        policy=f"{HERE}:{'Scoring' if method == 'reward_model' else 'Begun'}",
        data=f"{HERE}:labelled",
        rewards=[{"name": "precomputed", "key": "preferred"}],
        rollout={"num_generations": 2, "engine": ["offline"]},
    )
    assert not any(found.values()), found


MISTAKES = {
    "wrong dtype": (
        {"policy": {"name": f"{HERE}:Coarse", "dtype": "bfloat16"}},
        "initial_ratio",
        "but not in float32: it is the precision of bfloat16; set policy.dtype=float32",
    ),
    "dropout on": (
        {"policy": f"{HERE}:Dropping"},
        "initial_ratio",
        "because dropout is on in '1'; put the model into evaluation mode",
    ),
    "shifted labels": (
        {"policy": f"{HERE}:Shifted"},
        "initial_ratio",
        "do not score the same steps; compare labels (shifted by one?)",
    ),
    "one step late": (
        {"policy": f"{HERE}:Late"},
        "initial_ratio",
        "the log-probabilities of the policy belong one step later; compare labels",
    ),
    "batch size": (
        {"policy": f"{HERE}:Crowded"},
        "initial_ratio",
        "not when rows are asked one at a time: it depends on the batch size; look at padding",
    ),
    "constant reward": (
        {"rewards": [f"{HERE}:constant"]},
        "zero_variance_groups",
        "in all 4 groups every answer has the same reward, so nothing is learned: constant (0.5); see",
    ),
    "absent reward": (
        {"rewards": [f"{HERE}:absent", "tests.support.toys:share_right"]},
        "rewards_apply",
        "see whether it reads the column or target that the data have",
    ),
    "one constant reward": (
        {"rewards": [f"{HERE}:constant", "tests.support.toys:share_right"]},
        "zero_variance_groups",
        "these rewards are the same for all answers of every prompt: constant (0.5)",
    ),
    "reversed reward": (
        {"rewards": [f"{HERE}:wrong_way_round"]},
        "reward_sanity",
        "earns less than one to another prompt for 4 of 4 prompts",
    ),
    "reversed weight": (
        {"rewards": [{"name": "tests.support.toys:share_right", "weight": -1.0}]},
        "reward_sanity",
        "), which 'share_right' prefer; higher must be better",
    ),
    "deaf reward": (
        {"rewards": [f"{HERE}:deaf"]},
        "reward_sanity",
        "earns exactly as much as an empty one or one to another prompt, for every prompt; see",
    ),
    "detached adapters": (
        {"policy": f"{HERE}:Adapted"},
        "gradient_flow",
        "no gradient reaches 'lora_a', though they are to be trained; see that",
    ),
    "frozen adapters": (
        {"policy": {"name": f"{HERE}:Adapted", "frozen": True}},
        "gradient_flow",
        "'lora_a' look like an adapter and are frozen, while other weights learn; load",
    ),
    "inherited greedy sampling": (
        {"rollout": {"engine": [f"{HERE}:Greedy"]}},
        "sampling_params",
        "sampled steps are likelier than chance allows",
    ),
    "greedy groups": (
        {"rollout": {"engine": [f"{HERE}:Greedy"]}},
        "sampling_params",
        "all answers of every prompt are the same; sample",
    ),
    "inherited greedy sampling after a written token": (
        {"rollout": {"engine": [f"{HERE}:PartlyWritten"], "num_generations": 32}},
        "sampling_params",
        "sampled steps are likelier than chance allows",
    ),
    "inherited cold sampling": (
        {"rollout": {"engine": [{"name": f"{HERE}:Greedy", "inherited": 0.3}], "num_generations": 32}},
        "sampling_params",
        "the engine samples greedily or at a lower temperature than configured",
    ),
    "unseeded draws": (
        {"rollout": {"engine": [f"{HERE}:Unseeded"]}},
        "repeatable_rollouts",
        "1 of 4 answers differ when the same prompts are answered again with the same seed; draw from",
    ),
    "an overwritten setting": (
        {"rollout": {"engine": [{"name": f"{HERE}:Greedy", "temperature": 1.0, "inherited": 0.5}]}},
        "sampling_params",
        f"the engine '{HERE}:Greedy' was given temperature=1 and works with 0.5; something overwrites it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_and_nothing_else_of_its_kind(tmp_path, name):
    changes, checkup, message = MISTAKES[name]
    found = examined(tmp_path / "run", **changes)
    assert any(message in text for text in found[checkup]), found
    others = {"initial_ratio", "gradient_flow", "fits_memory"} - {checkup}
    assert not any(found[other] for other in others), found


def test_a_reward_that_prefers_short_answers_is_no_mistake_beside_another(tmp_path):
    changes = {
        "rewards": ["tests.support.toys:share_right", {"name": "tests.support.toys:brevity", "weight": 0.5}]
    }
    assert not examined(tmp_path / "run", **changes)["reward_sanity"]


def test_greedy_groups_that_were_asked_for_are_told_with_the_setting(tmp_path):
    engine = {"name": f"{HERE}:Greedy", "temperature": 0.0}
    (said,) = examined(tmp_path / "run", rollout={"engine": [engine]})["sampling_params"]
    assert said.startswith("all answers of every prompt are the same (temperature=0.0)")


class Cheap(ToyGenerate):
    """An engine with a cache, which finds every step likelier than the policy does, by `by` nats."""

    def __init__(self, policy, *, stream: Stream, cache: Callable | None = None, by: float = 0.0):
        super().__init__(policy, stream=stream)
        self.by = by

    def rollout(self, prompts):
        rows = super().rollout(prompts)
        return tuple(replace(row, notes={**row.notes, "logp": row.notes["logp"] + self.by}) for row in rows)


def cheap_engine(by, **options):
    return {"engine": [{"name": f"{HERE}:Cheap", "by": by, **options}]}


FEW_BITS = "compression.visual_quant"
WEIGHED = {"step_weight": ["truncated_importance"]}


@pytest.mark.parametrize("by, grave", [(0.1, False), (1.0, True)])
def test_a_gap_that_is_on_purpose_is_told_and_wrong_only_where_it_is_wide(tmp_path, by, grave):
    changes = {"rollout": cheap_engine(by, cache=FEW_BITS), "objective": WEIGHED}
    report = examine(parse(plan(tmp_path / "run", **{**RUN, **changes}), Config))
    (said,) = next(found for entry, found in report.found if entry.name == "initial_ratio")
    kl = math.exp(-by) + by - 1  # k3 of what the policy finds `by` nats less likely
    assert (
        f"(cache {FEW_BITS}): log-probabilities differ by {by:.3g} on average, KL {kl:.3g} nats" in said.what
    )
    assert "% of as many exact ones" in said.what
    assert said.grave is grave and report.healthy is not grave


def test_a_gap_that_is_not_on_purpose_is_a_defect_still(tmp_path):
    found = examined(tmp_path / "run", rollout=cheap_engine(0.1))
    assert found["initial_ratio"][0].startswith("the ratio is not 1 before the first update")


def test_cheap_rollouts_that_nothing_weighs_are_complained_about(tmp_path):
    cheap = cheap_engine(0.01, cache=FEW_BITS)
    (said,) = examined(tmp_path / "run", rollout=cheap)["importance_correction"]
    assert said.startswith(
        "rollouts come from a cheaper model than the one that learns (cache compression.visual_quant), "
    )
    assert not examined(tmp_path / "run", rollout=cheap, objective=WEIGHED)["importance_correction"]
    assert not examined(tmp_path / "run", rollout=cheap_engine(0.01))["importance_correction"]


@pytest.mark.parametrize("form", ["transition", "matching"])
def test_a_flow_is_examined_alike(tmp_path, form):
    raw = flow_plan(tmp_path / "run", policy={"name": "tests.support.toy_flow:ToyFlow", "form": form})
    raw |= {"advantage": ["total", "group_normalize"]}
    raw |= {"objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"}}
    found = examine(parse(raw, Config))
    assert found.healthy and found.example["answer"] == "2 numbers"


def test_an_example_cannot_control_the_terminal():
    assert printable("a\x1b[2Jb\nc") == "a\ufffd[2Jb\nc"
    assert printable("é" * 2003) == "é" * 2000 + " ... (3 letters more)"


def test_weights_are_as_they_were_after_an_examination(tmp_path):
    config = parse(plan(tmp_path / "run", **RUN), Config)
    assert torch.equal(_look(config, config).policy.table, Begun().table)


# ---- memory


def test_what_an_optimizer_keeps_of_a_weight_is_measured():
    # Two float32 moments, nothing, one moment.
    assert [optimizer_bytes(make) for make in (adamw, sgd, muon)] == [8.0, 0.0, 4.0]


def test_the_estimate_of_training_adds_up(tmp_path):
    # 8 prompts of 4 steps over 6 tokens in float32: 768 bytes, as many of gradients, twice that of moments.
    config = parse(plan(tmp_path, references={"ref": "frozen"}), Config)
    wanted = {"weights": 768, "learning/gradients": 768, "optimizer": 1536, "references": 768}
    assert training(config, ToyText(), []) == wanted
    assert estimate(config) == wanted
    # A second model of that size has weights, gradients and moments: 4 times 768.
    second = {"name": "second_model", "advantage": ["total"], "objective": "value_regression"}
    references = {"ref": "frozen", "critic": {**second, "policy": "tests.support.toys:ToyCritic"}}
    config = parse(plan(tmp_path, references=references), Config)
    assert training(config, ToyText(), []) == {**wanted, "references": 5 * 768}


def test_of_the_phases_of_a_step_the_largest_counts():
    parts = {"weights": 5.0, "rollouts/cache": 7.0, "learning/gradients": 4.0, "learning/activations": 4.0}
    assert peak(parts) == 5 + 8
    assert peak({"weights": 5.0}) == 5 and peak({}) == 0


@dataclass(frozen=True)
class Machine:
    memory: dict


@pytest.mark.parametrize(("room", "found"), [(0, 0), (100, 1), (130, 1), (140, 0)])
def test_a_machine_that_is_too_small_is_named(room, found, monkeypatch):
    # 120 bytes are wanted, and nine tenths of a machine may be used: 133.3.
    monkeypatch.setattr(training_metrics, "room", lambda: (room, "a device"))
    said = list(fits_memory(Machine({"weights": 100.0, "cache": 20.0})))
    assert len(said) == found
    if said:
        assert "weights 1e-07 GB, cache 2e-08 GB; train an adapter" in said[0].text


# ---- the command


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])

    def write(**changes):
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(plan(tmp_path / "out", **{**RUN, **changes})))
        return str(path)

    return write


def test_the_command_tells_what_is_wrong_and_what_to_do(file, capsys):
    assert main(["doctor", file()]) == 0
    printed = capsys.readouterr().out
    assert "ok     initial_ratio: Check that the ratio" in printed and "wrong" not in printed
    assert "GB  weights" in printed and "learning/activations of 64 steps" in printed
    start = printed.index("one rollout, its prompt as the model reads it:")
    shown = [line.split(maxsplit=1) for line in printed[start:].splitlines()[1:5]]
    assert [name for name, _ in shown] == ["prompt", "answer", "target", "rewards"]
    assert shown[0][1] == f"say {shown[2][1]}", "the toy asks for its target"
    assert main(["doctor", file(rewards=[f"{HERE}:constant"])]) == 1
    printed = capsys.readouterr().out
    assert "wrong  zero_variance_groups" in printed and "What to do: see whether" in printed


def test_the_plan_of_a_run_is_printed(file, capsys):
    assert main(["estimate-memory", file()]) == 0
    printed = capsys.readouterr().out
    assert "GB  weights" in printed and "without activations" in printed


# ---- in the first step


def test_the_first_step_is_looked_at_for_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    run = toy_run(tmp_path, rewards=[f"{HERE}:constant"], policy=f"{HERE}:Begun", max_steps=2)
    run.report.console.quiet = False
    train(run)
    assert capsys.readouterr().out.count("every answer has the same reward") == 1
    assert "every answer has the same reward" in (tmp_path / "report.html").read_text()


def test_equal_rewards_of_a_group_are_fine_where_they_give_advantages(tmp_path, monkeypatch):
    """Labelled answers (KTO) have the same label in a group, and are learned from."""
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    for chain, warned in ((["total"], False), (["total", "group_center"], True)):
        changes = {"advantage": chain, "learn": {"on_no_learning": "warn"}}
        run = toy_run(tmp_path / str(warned), rewards=[f"{HERE}:constant"], max_steps=1, **changes)
        train(run)
        assert any("nothing is learned" in text for text in run.report.raised) is warned


def test_the_look_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    run = toy_run(
        tmp_path, rewards=[f"{HERE}:constant"], max_steps=1, report={"startup_checks": [], "trackers": []}
    )
    train(run)
    assert run.report.raised == []


def test_a_sound_first_step_raises_nothing_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    runs = []
    for name, doctor in (
        ("with", ["zero_variance_groups", "sampling_params", "gradient_flow"]),
        ("without", []),
    ):
        runs.append(
            toy_run(
                tmp_path / name, policy=f"{HERE}:Begun", report={"startup_checks": doctor, "trackers": []}
            )
        )
        train(runs[-1])
    assert runs[0].report.raised == []
    assert torch.equal(runs[0].policy.table, runs[1].policy.table)


def test_prompts_without_a_known_answer_say_nothing_of_order(tmp_path):
    data = {"name": "tests.support.toys:prompts", "answers": 0}
    assert not examined(tmp_path / "run", data=data)["reward_sanity"]
