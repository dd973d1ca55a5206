"""The contracts, over every registered piece: additive, rank-exact, pure, finite at extremes, saved."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mmrl.build import make_chain
from mmrl.config.binding import Pieces
from mmrl.config.registry import Entry, find
from mmrl.config.schema import Piece
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput, Totals, spread
from mmrl.core.types import Clock, Outcome, Rollouts, Trajectory, Unit
from mmrl.runtime import checkpoint
from mmrl.runtime.distributed import Processes, _pack
from mmrl.training.score import score
from tests.support.configs import library_pieces
from tests.support.examples import paper_options, required_options
from tests.support.toy_flow import HasMetrics
from tests.support.toys import ToyText, prompts

# Options other than the derived examples (`tests/support/examples.py`), where those would show nothing on the
# rows below. A paper gives its own as `CONTRACT_OPTIONS` of tests/papers/test_NAME.py.
OPTIONS = {
    ("advantage", "for_turns"): {"where": {"stage": "clue"}},
    ("advantage", "alternate"): {"patience": 1},
    ("advantage", "delegated_reward"): {"main": "a"},
    ("advantage", "tool_productivity"): {"threshold": 0.1},
    ("advantage", "for_some"): {"advantage": ["group_normalize"], "of": ["right"]},
    ("advantage", "distinct"): {"of": "short"},
    ("advantage", "hot_mix"): {"entropy": 0.1},
    ("advantage", "difficulty_limit"): {"shortest": 1, "longest": 3},
    ("advantage", "set_baseline"): {"size": 2},
    ("advantage", "length_band"): {"shortest": 2},
    ("aggregation", "fixed_length"): {"max_completion_length": 7},
    ("sampler", "with_hints"): {"hint_column": "wanted", "when": "next_time"},
    # The outcomes of the rows below are 0.1 apart, which the bonus must stay under.
    ("advantage", "tiers"): {"outcome": "short", "alpha": 0.05},
    ("sampler", "source_bandit"): {"by": "wanted"},
    ("schedule", "towards"): {"target": -1.0},
    ("sampler", "learning_velocity"): {"by": "wanted", "open_at": -1.0},
    ("sampler", "pools"): {"pools": ("low", "high"), "edges": (3.0,)},
    ("advantage", "greedy_baseline"): {"tag": "turn"},
    ("advantage", "step_potential"): {"confidence": "short"},
    ("advantage", "value_anchor"): {"of": "right"},  # the label that it adds by default comes from another
}
SIZES = (3, 2, 1, 2)  # rollouts of the prompts p0 to p3


@dataclass(frozen=True)
class Case:
    """A piece with its required options, and perhaps one other choice among those it offers."""

    entry: Entry
    choice: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.entry.kind

    def __str__(self) -> str:
        return f"the {self.kind} '{self.entry.full_name}' of {self.entry.target.__module__}"

    @property
    def piece(self) -> Piece:
        label = "wanted" if self.kind == "sampler" else "right"  # a column of the prompts, a reward
        given = {**required_options(self.entry, label), **paper_options(self.entry)}
        given |= {**OPTIONS.get((self.kind, self.entry.full_name), {}), **self.choice}
        return Piece(self.entry.full_name.replace("tests.support.toys.", "tests.support.toys:"), given)

    def make(self, *given: Any) -> Any:
        return Pieces(Stream(3)).make(self.kind, self.piece, *given)

    def objective(self) -> Any:
        """Make an objective with the piece in its place."""
        if self.kind == "objective":
            return self.make()
        piece = [self.piece] if self.kind in ("step_weight", "penalty", "compare") else self.piece
        name = "comparison" if self.kind in ("implicit_reward", "compare") else "policy_gradient"
        options = {**required_options(find("objective", name), "right"), self.kind: piece}
        return Pieces(Stream(3)).make("objective", Piece(name, options))


def cases(*kinds: str) -> list[Case]:
    """List every piece, once as it stands and once for every other choice that its signature names."""
    listed = []
    for entry in [entry for kind in kinds for entry in library_pieces(kind)]:
        hints = entry.hints
        listed.append(Case(entry))
        for name, parameter in entry.options.items():
            hint = hints.get(name)
            offered = (False, True) if hint is bool else typing.get_args(hint)
            if hint is bool or typing.get_origin(hint) is typing.Literal:
                listed += [Case(entry, {name: value}) for value in offered if value != parameter.default]
    return listed


CHAIN, FILTERS, OBJECTIVES = cases("advantage"), cases("group_filter"), cases("objective")
PARTS = cases("ratio", "surrogate", "aggregation", "step_weight", "penalty", "implicit_reward", "compare")

MEMORIES = [
    Case(entry)
    for kind in ("advantage", "group_filter", "sampler", "schedule", "metric", "reward")
    for entry in library_pieces(kind)
    if hasattr(entry.target, "state_dict")
] + [Case(find("advantage", "tests.support.toys:RunningMean"))]


def each(listed: list[Case]):
    names = ["-".join([c.kind, c.entry.full_name, *map(str, c.choice.values())]) for c in listed]
    return pytest.mark.parametrize("case", listed, ids=names)


# ---- what the pieces are tried on


def row(place: int, turn: int, generator: torch.Generator, equal: bool) -> Trajectory:
    """Make a rollout of 1 to 4 tokens and 1 to 3 outcomes; the last of the first prompt is a
    demonstration."""
    length = 1 + (place + 2 * turn) % 4
    tokens = torch.randint(0, 6, (length,), generator=generator)
    noted = {name: -torch.rand(length, generator=generator) for name in ("logp", "entropy")}
    noted["token"] = tokens.double()
    noted["node"] = torch.arange(length).double()  # of a tree in which each part is a token
    outcomes = []
    for end in range(1, length + 1) if (place + turn) % 2 else [length]:
        recorded = {"right": float(torch.rand((), generator=generator)), "short": -0.1 * end}
        if turn % 3 == 1:
            del recorded["right"]  # does not apply
        text = " ".join(map(str, tokens[:end].tolist()))
        tags = {"finish": "length" if length == 4 else "stop", "turn": str(end)}
        tags |= {"state": str(end % 2), "action": str(place % 2), "role": "ab"[end % 2]}
        tags |= {"stage": ("clue", "decide")[turn % 2], "part": ("act", "plan")[end % 2]}
        tags |= {"node": f"{turn}.{end}", "parent": f"{turn - 1}.1"}
        recorded = {"right": 1.0, "short": 1.0} if equal else recorded
        outcomes.append(Outcome(text=text, end=end, tags=tags, recorded=recorded))
    demo = place == 0 and turn == SIZES[0] - 1
    prompt = prompts(num=place + 1)[place]
    notes = {} if demo else noted
    return Trajectory(prompt, prompt.uid, tuple(outcomes), (place, tokens), length, notes, not demo)


@cache
def collected(sizes: tuple[int, ...] = SIZES, equal: bool = False) -> Rollouts:
    generator = torch.Generator().manual_seed(11)
    return tuple(row(p, turn, generator, equal) for p, size in enumerate(sizes) for turn in range(size))


def scored(rollouts: Rollouts, rank: int = 0) -> RewardTable:
    make = Pieces(Stream()).make
    rewards = [
        make("reward", Piece("precomputed", {"key": key, "label": key, "weight": weight, "at": "every"}))
        for key, weight in (("right", 1.0), ("short", 0.5))
    ]
    table = score(rewards, rollouts, notes=frozenset({"logp", "entropy", "token", "node"}), rank=rank)
    if not len(table):
        return table
    logp, entropy = table.notes["logp"], table.notes["entropy"]
    place = 0.1 * torch.arange(logp.shape[1])
    inside = {
        "ref/logp": logp - place,
        "prm/logp": logp + place,
        "critic/value": logp - 2 * place,
        "verifier/value": logp.exp(),
        "planner/value": logp + place,
        "terminator/value": logp + 2 * place,
        "old/logp": logp,
        "old/logp_hot": logp + 0.1,
        "old/logp_cold": logp - 0.1,
        "old/hidden_sq_norm": 1e5 * entropy.abs(),
        "old/sum_p2": entropy.abs(),
        "old/sum_p3": entropy.abs() / 2,
        "old/effective_rank": 1 + entropy.abs(),
        "high_covariance": (logp < -0.5).double(),
        "think": (logp < -0.5).double(),
    }
    for name, note in inside.items():
        table = table.note(name, torch.where(logp.isnan(), torch.nan, note))  # one NaN, bit for bit
    return table


# Pieces change no table, which a test below says, so one serves all of them.
@cache
def table_of(sizes: tuple[int, ...] = SIZES, equal: bool = False) -> RewardTable:
    return scored(collected(sizes, equal))


@cache
def credit_of(
    sizes: tuple[int, ...] = SIZES, equal: bool = False, last: str = "group_normalize"
) -> RewardTable:
    credit, make = table_of(sizes, equal), Pieces(Stream()).make
    for name in ("total", last):
        credit = make("advantage", Piece(name))(credit)
    return credit


def policy_of(unit: Unit) -> HasMetrics:
    policy = HasMetrics(ToyText(num=len(SIZES), unit=unit, double=True))
    with torch.no_grad():
        policy.table.normal_(generator=torch.Generator().manual_seed(5))
    return policy


def batch_of(
    policy: HasMetrics, objective: Any, sizes: tuple[int, ...] = SIZES, equal: bool = False, gap: float = 0.2
) -> Batch:
    """Lay credit over steps in float64, and let others differ by about `gap`, their latents too."""
    needs = objective.needs
    strange = needs.outputs | frozenset().union(*needs.others.values())
    if strange - policy.outputs:
        pytest.fail(
            f"the toy policy does not say {sorted(strange - policy.outputs)}; teach tests/toy_flow.py"
        )
    others = tuple(sorted(needs.others.items()))
    return laid_out(policy.toy.unit, needs.outputs, others, sizes, equal, gap)


# Objectives change no batch either.
@cache
def laid_out(
    unit: Unit,
    outputs: frozenset[str],
    reads: tuple[tuple[str, frozenset[str]], ...],
    sizes: tuple[int, ...],
    equal: bool,
    gap: float,
) -> Batch:
    policy, strange = policy_of(unit), outputs.union(*(names for _, names in reads))
    last = "pairs_with_ties" if "score" in outputs else "group_normalize"  # scores belong to pairs
    batch = spread(credit_of(sizes, equal, last), policy.collate(collected(sizes, equal)))
    batch = batch.replace(mask=batch.mask.double(), advantage=batch.advantage.double())
    if "value_logit" in outputs:  # learned from probabilities alone
        batch = batch.replace(advantage=batch.advantage.sigmoid())
    batch = batch.replace(notes={name: note.double() for name, note in batch.notes.items()})
    generator = torch.Generator().manual_seed(7)
    if "divergence" in outputs:  # of the states of a teacher
        strange |= {"hidden"}
    with torch.no_grad():
        said = policy(batch, strange)
    others = {}
    for name in sorted({"old", "ref", "engine", *dict(reads)}):
        sign = torch.where(torch.rand(said.logp.shape, generator=generator) < 0.5, -gap, gap)
        noise = torch.rand(said.logp.shape, generator=generator, dtype=torch.float64)
        away = sign * (0.5 + 0.5 * noise)
        extra = {k: v + away[..., None] if v.dim() > 2 else v for k, v in said.extra.items()}
        others[name] = StepOutput((said.logp + away) * batch.mask, extra)
    return batch.replace(others=others)


def learn(policy: HasMetrics, objective: Any, ranks: list[Batch], micro_batch_steps: int) -> list[Tensor]:
    """Give the gradient, the loss and the metrics of one update, on as many processes as there are
    batches."""
    counted = [batch.count() for batch in ranks]
    names = [field.name for field in dataclasses.fields(Totals)]
    totals = Totals(*(sum(getattr(count, name) for count in counted) / len(ranks) for name in names))
    policy.table.grad = None
    loss, metrics = torch.zeros((), dtype=torch.float64), {}
    for batch in ranks:
        part = batch.replace(totals=totals)
        part = part.replace(weight=objective.weigh(part))
        for micro in part.split(micro_batch_steps, objective.needs.unit):
            share, shares = objective(policy(micro, objective.needs.outputs), micro)
            (share / len(ranks)).backward()
            loss = loss + share.detach() / len(ranks)
            for name, value in shares.items():
                metrics[name] = metrics.get(name, 0.0) + value.detach().double() / len(ranks)
    return [policy.table.grad.clone(), loss, *(metrics[name] for name in sorted(metrics))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare gradients and losses in float64, metrics in float32."""
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(found[2:], expected[2:], rtol=1e-6, atol=1e-7)


def bits(thing: Any) -> Any:
    """Turn anything into what two exact copies share."""
    if isinstance(thing, Tensor):
        return str(thing.dtype), tuple(thing.shape), thing.detach().contiguous().numpy().tobytes()
    if dataclasses.is_dataclass(thing):
        return {field.name: bits(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
    if isinstance(thing, Mapping):
        return {name: bits(value) for name, value in thing.items()}
    return [bits(value) for value in thing] if isinstance(thing, tuple | list) else thing


# ---- additive


@each(PARTS + OBJECTIVES)
@pytest.mark.parametrize("unit", [Unit.STEP, Unit.ROW])
def test_micro_batches_add_up_to_the_whole(case, unit):
    policy, objective = policy_of(unit), case.objective()
    batch = batch_of(policy, objective)
    whole = learn(policy, objective, [batch], 10**6)
    assert whole[0].abs().max() > 1e-4  # equal zeros would show nothing
    # One step and four, or one row and two of the widest.
    for micro_batch_steps in {Unit.STEP: (1, 4), Unit.ROW: (1, 9)}[unit]:
        assert_same(learn(policy, objective, [batch], micro_batch_steps), whole)


# ---- rank-exact


@each(PARTS + OBJECTIVES)
def test_two_processes_give_the_gradients_of_one(case):
    policy, objective = policy_of(Unit.ROW), case.objective()
    batch = batch_of(policy, objective)
    one = learn(policy, objective, [batch], 9)
    # The last splits a group over two processes, which only comparisons of whole groups cannot bear.
    shares = [[[0, 1, 2], [3, 4, 5, 6, 7]], [[5], [6, 7, 0, 1, 2, 3, 4]], [[], [*range(8)]]]
    shares += [[[0, 1, 3], [2], [4, 5, 6, 7]]] if objective.needs.unit < Unit.GROUP else []
    for share in shares:
        ranks = [batch.select(torch.tensor(rows)) if rows else batch.blank() for rows in share]
        assert_same(learn(policy, objective, ranks, 9), one)


@each(PARTS + OBJECTIVES)
def test_fewer_steps_than_processes_divide_by_what_there_is(case):
    policy, objective = policy_of(Unit.ROW), case.objective()
    alone = batch_of(policy, objective, (2,)).select(torch.tensor([0]))
    assert alone.mask.sum() == 1
    one = learn(policy, objective, [alone], 9)
    assert_same(learn(policy, objective, [alone, alone.blank(), alone.blank()], 9), one)


@cache
def gathered(share: tuple[tuple[int, ...], ...]) -> list[RewardTable]:
    """Score groups where `share` puts them, and give the table that every process then holds."""
    rollouts = collected()
    local = []
    for rank, places in enumerate(share):
        mine = tuple(row for place in places for row in rollouts if row.steps[0] == place)
        local.append(scored(mine, rank))
    tables = []
    for rank, table in enumerate(local):
        processes = object.__new__(Processes)  # without a launcher; `gather` only needs the exchange
        processes.rank, processes.world = rank, len(share)
        processes._all_bytes = lambda data: [_pack(part) for part in local]
        tables.append(processes.gather(table, [row.prompt.uid for row in rollouts]))
    return tables


SHARES = [((0,), (1, 2, 3)), ((3, 1), (2, 0)), ((), (0, 1, 2, 3)), ((2,), (0, 3), (), (1,))]


@pytest.mark.parametrize("share", SHARES)
def test_every_process_holds_the_whole_table(share):
    one = table_of()
    homes = [rank for place in range(4) for rank, mine in enumerate(share) if place in mine]
    for rank, table in enumerate(gathered(share)):
        assert table.rank == rank
        assert table.process.tolist() == [homes[row.steps[0]] for row in collected()]
        assert bits(table.replace(process=one.process, rank=0)) == bits(one)


@each(CHAIN + FILTERS)
def test_chains_and_filters_see_the_same_on_every_process(case):
    one = table_of()
    expected = case.make()(one)
    for share in SHARES[1::2]:  # the tables of all are those of one process, as the test above says
        for table in gathered(share):
            given = case.make()(table)
            if case.kind == "advantage":
                given = given.replace(process=one.process, rank=0)
            assert bits(given) == bits(expected)


# ---- pure


@each(CHAIN + FILTERS)
def test_chains_and_filters_change_nothing_and_draw_nothing(case):
    table, piece = table_of(), case.make()
    before = bits(table)
    stream = torch.get_rng_state()
    first = bits(piece(table))
    assert_pure(case, first, bits(piece(table)), before, bits(table), stream)


def assert_pure(case, first, second, before, after, stream):
    """Compare two calls, what was given before and after them, and the state of the random numbers."""
    assert after == before, f"{case} changes what it is given; make new tensors, as `table.put` does"
    assert second == first, f"{case} gives another result when it is called again; keep nothing between calls"
    assert torch.equal(torch.get_rng_state(), stream), (
        f"{case} draws from torch's global generator; draw from an option named `generator`"
    )


def weighed(case):
    """Make the objective of a piece, a batch with its weights, and what the policy computes on it."""
    policy, objective = policy_of(Unit.ROW), case.objective()
    batch = batch_of(policy, objective)
    batch = batch.replace(totals=batch.count())
    batch = batch.replace(weight=objective.weigh(batch))
    with torch.no_grad():
        new = policy(batch, policy.outputs)
    return objective, batch, new


@each(PARTS + OBJECTIVES)
def test_objectives_and_their_parts_change_nothing_and_draw_nothing(case):
    objective, batch, new = weighed(case)
    log_ratio = new.logp - batch.others["old"].logp
    given = {
        "ratio": (new, batch),
        "surrogate": (log_ratio, new, batch),
        "aggregation": (batch,),
        "step_weight": (batch,),
        "penalty": (new, batch),
        "implicit_reward": (new, batch),
        "compare": (log_ratio * batch.mask, batch.replace(others={**batch.others, "new": new})),
        "objective": (new, batch),
    }[case.kind]
    piece = objective if case.kind == "objective" else case.make()
    before = bits(given)
    stream = torch.get_rng_state()
    first = piece(*given)
    assert_pure(case, bits(first), bits(piece(*given)), before, bits(given), stream)
    if case.kind != "objective":
        wanted = () if case.kind == "compare" else batch.mask.shape
        assert first.shape == wanted, f"{case} returns the shape {(*first.shape,)}; return {(*wanted,)}"


# ---- extremes


@each(CHAIN)
@pytest.mark.parametrize("extreme", ["equal", "alone", "dropped"])
def test_chains_stay_finite(case, extreme):
    table = table_of(SIZES if extreme != "alone" else (1, 1, 1), extreme == "equal")
    if extreme == "dropped":  # a filter that kept nothing
        table = table.select(torch.zeros(len(table), dtype=torch.bool))
    credit = case.make()(table)
    assert len(credit) == len(table), f"{case} returns {len(credit)} of {len(table)} rows; keep all of them"
    assert credit.values[credit.valid].isfinite().all(), (
        f"{case} gives NaN or infinity for '{extreme}' rows; give 0 to groups that cannot be compared"
    )


@each(PARTS + OBJECTIVES)
@pytest.mark.parametrize("extreme", ["far", "very far", "equal", "alone", "empty row", "blank"])
def test_objectives_stay_finite(case, extreme):
    policy, objective = policy_of(Unit.ROW), case.objective()
    gap = 1000.0 if extreme == "very far" else 50.0  # exp(1000) is infinite, exp(50) is only large
    sizes = (1, 1, 1) if extreme == "alone" else SIZES
    batch = batch_of(policy, objective, sizes, extreme == "equal", gap)
    assert batch.notes["logp"].isnan().any() or extreme == "alone"
    if extreme == "empty row":
        mask = batch.mask.clone()
        mask[1] = 0
        batch = batch.replace(mask=mask, advantage=batch.advantage * mask)
    for found in learn(policy, objective, [batch.blank() if extreme == "blank" else batch], 9):
        assert found.isfinite().all(), (
            f"{case}: loss or gradient is NaN or infinite for '{extreme}' rows; limit log-ratios before "
            "`exp`, as `log_ratio.clamp(-20.0, 20.0)`, and divide by nothing that may be 0"
        )


# ---- saved


@each(MEMORIES)
def test_memories_are_saved(case, tmp_path):
    rollouts, table = collected(), table_of()
    table = table.note("token", table.notes["logp"].mul(-9).floor())  # for samplers
    stream = Stream(3)

    def use(piece: Any) -> Any:
        if case.kind == "sampler":
            drawn = [prompt.uid for prompt in piece.draw(3, 4)]
            stream.round = 1  # as `collect` draws what is missing
            missing = 3 - len(set(drawn))
            drawn += [prompt.uid for prompt in piece.draw(missing, 4)] if missing else []
            stream.round = 0
            return drawn
        if case.kind in ("advantage", "group_filter"):
            return bits(piece(table))
        if case.kind == "schedule":
            said = {"rewards/chosen": 1.0, "rewards/rejected": 0.0}
            return [piece(Clock(step, {k: v * step for k, v in said.items()})) for step in (1, 2)]
        if case.kind == "reward":
            outcomes = [(row.prompt, outcome) for row in rollouts for outcome in row.outcomes]
            return piece(*map(list, zip(*outcomes, strict=True)))
        return pytest.fail(f"tests/test_contracts.py does not know how to use a {case.kind} with a memory")

    def make() -> tuple[Any, dict[str, Any]]:
        """Give the piece as the run calls it, and the things in it that remember, by place."""
        made_of = Pieces(stream)
        if case.kind == "sampler":
            wraps = next(iter(inspect.signature(case.entry.target).parameters)) == "sampler"
            listed = [*[Piece("uniform")] * wraps, case.piece]
            return make_chain(made_of, "sampler", listed, prompts(), "sampler"), made_of.made
        made = made_of.make(case.kind, case.piece)
        return made, {place: thing for place, thing in made_of.made.items() if hasattr(thing, "state_dict")}

    (piece, memories), (other, empty) = make(), make()
    use(piece)
    for memory in memories.values():
        if hasattr(memory, "observe"):
            memory.observe(rollouts, table)
        if hasattr(memory, "observe_advantages"):
            memory.observe_advantages(table)
    checkpoint.write_state(tmp_path, {place: memory.state_dict() for place, memory in memories.items()})
    saved = checkpoint.read_state(tmp_path)
    for place, memory in empty.items():
        memory.load_state_dict(saved[place])
    stream.step += 1  # checkpoints are written between steps
    after = use(piece)
    assert use(other) == after
    assert after != use(make()[0])  # otherwise forgetting everything would pass as well
