"""An engine whose rollouts are made by Ray actors, on this machine or on others, each with its own model.

A rollout depends on its prompt, the random streams and the weights, and on nothing else. So an actor holds
nothing that a request does not say again: one that dies is started anew, and asked the same once more.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from mmrl.config.binding import Pieces, Recipe
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import engine
from mmrl.config.schema import Piece
from mmrl.core.protocols import Engine, HasMetrics, Policy, Portable
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Count, Prompt, Rollouts, Trajectory
from mmrl.runtime.content_hash import of_tensors
from mmrl.runtime.distributed import place_of
from mmrl.runtime.fsdp import is_shard
from mmrl.runtime.ray_actors import Actors, check_environments
from mmrl.runtime.workers import Workers, object_in


@dataclass(frozen=True)
class Asked:
    """A request to a worker: prompts to answer with engines, at a step and round, at a clock's schedules."""

    engines: tuple[Piece, ...]
    prompts: tuple[Prompt, ...]
    step: int
    round: int
    purpose: str
    clock: Clock


@dataclass(frozen=True)
class Answered:
    """What a worker made: rows, the place of each row's prompt in the request, and what its engines tell."""

    rows: Rollouts
    places: tuple[int | None, ...]  # None: the engine changed the prompt, which the row then holds
    metrics: Mapping[str, float]
    seconds: float  # that it took


class Worker:
    """The policy of a run, made again in a process of its own, and the engines that it is asked with."""

    def __init__(self, policy: Piece, seed: int, stage: int) -> None:
        # What the run has drawn is overwritten by its weights, so no seed is set here.
        self.stream, self.version = Stream(seed, stage=stage), 0
        self.piece = policy
        self.policy: Policy = Pieces(self.stream).make("policy", policy)
        self.policy.module.to("cuda" if torch.cuda.is_available() else "cpu")
        self.chains: dict[str, tuple[Engine, Pieces]] = {}  # of training, and of an evaluation

    def rollout(self, asked: Asked, version: int, weights: bytes) -> Answered:
        """Answer prompts with the weights of a version."""
        began = time.monotonic()
        if version != self.version:
            self._load(weights)
            self.version = version
        self.stream.step, self.stream.round, self.stream.purpose = asked.step, asked.round, asked.purpose
        engine, pieces = self._chain(asked.engines)
        pieces.tick(asked.clock)
        rows = engine.rollout(asked.prompts)
        check_environments(outcome for row in rows for outcome in row.outcomes)
        place = {id(prompt): i for i, prompt in enumerate(asked.prompts)}
        places = tuple(place.get(id(row.prompt)) for row in rows)
        packed = tuple(map(self._pack, rows, places))
        tells = [piece.metrics() for piece in pieces.that_are(HasMetrics).values()]
        metrics = {k: v for part in tells for k, v in part.items()}
        return Answered(packed, places, metrics, time.monotonic() - began)

    def _chain(self, listed: tuple[Piece, ...]) -> tuple[Engine, Pieces]:
        if (key := repr(listed)) not in self.chains:
            pieces = Pieces(self.stream)
            engine: Any = self.policy
            pieces.trained = self.piece
            for i, piece in enumerate(listed):
                engine = pieces.make("engine", piece, engine, place=f"engine[{i}]")
            self.chains[key] = engine, pieces
        return self.chains[key]

    def _pack(self, row: Trajectory, place: int | None) -> Trajectory:
        if place is None:  # the other side does not have the prompt
            return row
        row = self.policy.pack(row) if isinstance(self.policy, Portable) else row
        return replace(row, prompt=None)

    def _load(self, weights: bytes) -> None:
        from safetensors.torch import load

        sent, own = load(weights), trained(self.policy.module)
        if unlike := sorted(sent.keys() ^ own.keys()):
            raise RuntimeError(f"the worker's model trains other weights than the run's: {unlike[:3]}")
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(sent[name])


class Servers:
    """The workers of a policy, and the weights that were put where they take them from."""

    def __init__(self, policy: Policy, recipe: Recipe, workers: Workers) -> None:
        self.policy, self.version, self.weights, self.seen = policy, 0, None, ""
        parts = recipe.policy, recipe.seed, recipe.stage
        self.actors = Actors(Worker, parts, workers, "the workers of `ray_workers`")
        self.busy, self.since = 0.0, 0.0  # seconds of all workers' work, and the moment from which they count

    def publish(self) -> None:
        """Put the trained weights where workers take them from, if they changed.

        A hash tells, as identities and versions of tensors do not: FSDP2 gathers into the same tensors,
        and a reference that samples is swapped in as `.data`.
        """
        import ray
        from safetensors.torch import save

        weights = trained(self.policy.module)
        if any(map(is_shard, weights.values())):  # they were put there while they were whole
            return
        if (seen := of_tensors(weights.values())) == self.seen:
            return
        whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        self.version, self.weights, self.seen = self.version + 1, ray.put(save(whole)), seen


_SERVERS: WeakValueDictionary[tuple, Servers] = WeakValueDictionary()  # of training and evaluation together


@engine(packages={"ray": "ray"})
@dataclass(eq=False)
class RayWorkers:
    """Make the rollouts of the engines before it in Ray actors, on this machine or on others.

    Every actor has the model and the engines of the configuration and gets the trained weights after each
    update; groups are divided among actors. Answers are those of the run's own process: draws depend on seed,
    step, prompt and number, and only sums of floating-point numbers differ with the rows that are computed
    together. A worker that dies is started again by Ray, and what it was asked is asked again. Engines with a
    memory, such as `with_replay`, stand after this one. An evaluation whose engines end with the same
    settings has the workers of the training. Environments that answers hold must be picklable.

    Ray sends Python objects as pickles and trusts whoever reaches its ports: keep them in a private network.

    Args:
        num_workers: Actors.
        num_cpus: CPU cores of an actor; whole numbers are also its threads.
        num_gpus: GPUs of an actor, which may be shares.
        resources: Further resources of an actor, as the cluster names them: `{rollout_node: 1}`.
        runtime_env: Environment of the actors, as Ray takes it: packages, variables, a working folder.
        address: Address of a cluster; empty: `RAY_ADDRESS`, or a cluster of this process on this machine.
        timeout: Seconds that the rollouts of one round may take.
        max_restarts: How often an actor is started again before the run ends.
    """

    engine: Engine
    _: KW_ONLY
    stream: Stream
    recipe: Recipe
    num_workers: PositiveInt = 1
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: NonNegativeFloat = 0.0
    resources: Mapping[str, NonNegativeFloat] | None = None
    runtime_env: Mapping[str, Any] | None = None
    address: str = ""
    timeout: PositiveFloat = 1800.0
    max_restarts: NonNegativeInt = 3
    notes: ClassVar[frozenset[str]] = frozenset()  # those of the engines before it
    answers_elsewhere: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if names := self.recipe.remembering:
            raise ConfigError(
                f"the engine '{names[0]}' remembers earlier rollouts, and each worker would remember others; "
                "list it after ray_workers"
            )
        for piece in (self.recipe.policy, *self.recipe.engines):
            if found := object_in({"name": piece.name, **piece.options}):
                raise ConfigError(
                    f"ray_workers makes '{piece.name}' again in other processes, where '{found}' of this "
                    "program is not; write it into a module and name that as `module:function`"
                )
        self.policy = self.engine.policy
        options = {name: getattr(self, name) for name in Workers.__dataclass_fields__ if name != "num"}
        workers = Workers(num=self.num_workers, **options)
        key = (id(self.policy), self.recipe.seed, self.recipe.stage, repr((self.recipe.policy, workers)))
        self.servers = _SERVERS.get(key) or Servers(self.policy, self.recipe, workers)
        _SERVERS[key] = self.servers
        self.begun: tuple[list[Prompt], list[list[Prompt]], list[Any]] | None = None
        self.metrics: Counter[str] = Counter()  # sums over rows
        self.rows = 0

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry; groups stay together, and rows are in the order of their prompts."""
        if self.begun is None or [*map(id, self.begun[0])] != [*map(id, prompts)]:
            self.ask(prompts)
        assert self.begun is not None  # `ask` set it
        (_, shares, asked), self.begun = self.begun, None
        try:
            answers: list[Answered] = self.servers.actors.collect(asked, self.timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; give `timeout` more, or the run more workers") from error
        rows: list[Trajectory] = []
        for share, answer in zip(shares, answers, strict=True):
            rows += [
                self._unpack(row, share, place) for row, place in zip(answer.rows, answer.places, strict=True)
            ]
            self.rows += len(answer.rows)
            self.servers.busy += answer.seconds
            self.metrics.update({name: value * len(answer.rows) for name, value in answer.metrics.items()})
        place = place_of([prompt.uid for prompt in prompts])
        return tuple(sorted(rows, key=lambda row: place(row.prompt.uid)))

    def to_send(self) -> Iterable[torch.Tensor]:
        """List the trained parameters."""
        return trained(self.policy.module).values()

    def send(self) -> None:
        """Put the weights of this moment where workers take them from."""
        self.servers.actors.start()
        self.servers.since = self.servers.since or time.monotonic()
        self.servers.publish()

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Begin with the weights, the step and the round of this moment; `rollout` of these collects."""
        self.send()
        actors = self.servers.actors
        shares = [share for share in divided(prompts, self.num_workers) if share]  # some have none
        moment = self.stream.step, self.stream.round, self.stream.purpose, self.recipe.clock()
        requests = [(Asked(self.recipe.engines, tuple(share), *moment),) for share in shares]
        weights = self.servers.version, self.servers.weights
        self.begun = list(prompts), shares, actors.begin(requests, *weights, method="rollout")

    def metrics(self) -> Mapping[str, float]:
        """Return what the workers' engines tell, averaged over rows, restarts, and a worker's seconds."""
        rows, metrics, servers, now = max(1, self.rows), self.metrics, self.servers, time.monotonic()
        busy, passed = servers.busy / self.num_workers, now - (servers.since or now)
        restarts, servers.actors.restarts, servers.busy, servers.since = servers.actors.restarts, 0, 0.0, now
        self.metrics, self.rows = Counter(), 0
        return {
            **{k: v / rows for k, v in metrics.items()},
            "workers/restarts": Count(restarts),
            "workers/busy_seconds": busy,
            "workers/idle_seconds": max(0.0, passed - busy),
        }

    def _unpack(self, row: Trajectory, share: Sequence[Prompt], place: int | None) -> Trajectory:
        row = row if place is None else replace(row, prompt=share[place])
        return self.policy.unpack(row) if isinstance(self.policy, Portable) else row


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """List the trained parameters by name, without what data parallelism puts before names."""
    return {
        name.removeprefix("module."): weight
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }


def divided(prompts: Sequence[Prompt], number: int) -> list[list[Prompt]]:
    """Divide prompts among workers: whole groups, each to the worker with the fewest rollouts so far."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.uid].append(prompt)
    shares: list[list[Prompt]] = [[] for _ in range(number)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return shares
