"""An engine that runs the engines before it in the configuration in Ray actors, each with its own model.

A rollout depends only on its prompt, the random streams and the weights. Every request contains these inputs,
so that an actor that dies can be restarted and get the same request again.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
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
from mmrl.runtime.requests import taken
from mmrl.runtime.workers import Workers, object_in


@dataclass(frozen=True)
class RolloutRequest:
    """A request to a worker: engines, prompts, and the state of random streams and schedules."""

    engines: tuple[Piece, ...]
    prompts: tuple[Prompt, ...]
    step: int
    round: int
    purpose: str
    clock: Clock


@dataclass(frozen=True)
class RolloutReply:
    """The reply of a worker: rows, the index of each row's prompt in the request, and metrics of engines."""

    rows: Rollouts
    places: tuple[int | None, ...]  # None: the row contains a prompt that the engine changed
    metrics: Mapping[str, float]
    seconds: float  # working time


class Worker:
    """A copy of the policy and the engines of a run, in a process of its own."""

    def __init__(self, policy: Piece, seed: int, stage: int) -> None:
        # Initial weights need no seed, because the run's weights replace them before the first rollout.
        self.stream, self.version = Stream(seed, stage=stage), 0
        self.piece = policy
        self.policy: Policy = Pieces(self.stream).make("policy", policy)
        self.policy.module.to("cuda" if torch.cuda.is_available() else "cpu")
        self.chains: dict[str, tuple[Engine, Pieces]] = {}  # engines of training and evaluation

    def rollout(self, request: RolloutRequest, version: int, weights: bytes) -> RolloutReply:
        """Answer a request with the weights of `version`, which are loaded if they are new."""
        began = time.monotonic()
        if version != self.version:
            self._load(weights)
            self.version = version
        self.stream.step, self.stream.round = request.step, request.round
        self.stream.purpose = request.purpose
        engine, pieces = self._chain(request.engines)
        pieces.tick(request.clock)
        rows = engine.rollout(request.prompts)
        check_environments(outcome for row in rows for outcome in row.outcomes)
        place = {id(prompt): i for i, prompt in enumerate(request.prompts)}
        places = tuple(place.get(id(row.prompt)) for row in rows)
        packed = tuple(map(self._pack, rows, places))
        tells = [piece.pop_metrics() for piece in pieces.that_are(HasMetrics).values()]
        metrics = {k: v for part in tells for k, v in part.items()}
        return RolloutReply(packed, places, metrics, time.monotonic() - began)

    def _chain(self, listed: tuple[Piece, ...]) -> tuple[Engine, Pieces]:
        if (key := repr(listed)) not in self.chains:
            pieces = Pieces(self.stream)
            engine: Any = self.policy
            pieces.policies["policy"] = self.piece
            for i, piece in enumerate(listed):
                engine = pieces.make("engine", piece, engine, place=f"engine[{i}]")
            self.chains[key] = engine, pieces
        return self.chains[key]

    def _pack(self, row: Trajectory, place: int | None) -> Trajectory:
        if place is None:  # an engine changed the prompt, so the trainer lacks it
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
    """The Ray workers of a policy, and the weights that were last published to them."""

    def __init__(self, policy: Policy, recipe: Recipe, workers: Workers) -> None:
        self.policy, self.version, self.weights, self.seen = policy, 0, None, ""
        parts = recipe.policy, recipe.seed, recipe.stage
        self.actors = Actors(Worker, parts, workers, "the workers of `ray_workers`")
        self.busy, self.since = 0.0, 0.0  # seconds of work since the time `since`

    def publish(self) -> None:
        """Publish the trained weights in Ray's object store, if they changed.

        A hash detects changes. `id()` and `_version` of the tensors would miss some: FSDP2 gathers into the
        same tensors, and the weights of a reference that samples are assigned to `.data`.
        """
        import ray
        from safetensors.torch import save

        weights = trained(self.policy.module)
        if any(map(is_shard, weights.values())):  # sharded: `send` has published them
            return
        if (seen := of_tensors(weights.values())) == self.seen:
            return
        whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        self.version, self.weights, self.seen = self.version + 1, ray.put(save(whole)), seen


_SERVERS: WeakValueDictionary[tuple, Servers] = WeakValueDictionary()  # shared by training and evaluation


@engine(packages={"ray": "ray"})
@dataclass(eq=False)
class RayWorkers:
    """Run the engines that precede this engine in Ray actors, on this machine or on others.

    Every actor has the model and the engines of the configuration, and gets the trained weights after each
    update. Groups are divided among actors. Random draws depend on seed, step, prompt and answer number, so
    answers equal the answers of a single process up to rounding, which depends on the batch. Ray restarts a
    worker that dies, and its request is sent again. List engines with a memory, such as `with_replay`, after
    this engine. An evaluation with the same settings shares the workers of the training. Environments of
    answers must be picklable.

    Ray sends Python objects as pickles and trusts everyone who reaches its ports: use a private network.

    Args:
        num_workers: Number of actors.
        num_cpus: CPU cores of an actor; a whole number is also its number of threads.
        num_gpus: GPUs of an actor; may be a fraction.
        resources: Custom Ray resources of an actor, such as `{rollout_node: 1}`.
        runtime_env: Ray's `runtime_env` of the actors: packages, variables, a working folder.
        address: Address of a cluster; empty: `RAY_ADDRESS`, or else a new cluster on this machine.
        timeout: Maximum seconds for the rollouts of one sampling round.
        max_restarts: Maximum number of restarts of an actor before the run fails.
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
    notes: ClassVar[frozenset[str]] = frozenset()  # declared by the wrapped engines
    answers_elsewhere: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if names := self.recipe.remembering:
            raise ConfigError(
                f"the engine '{names[0]}' remembers earlier rollouts, and each worker would remember others; "
                "list it after ray_workers"
            )
        for piece in (self.recipe.policy, *self.recipe.engines):
            if name := object_in({"name": piece.name, **piece.options}):
                raise ConfigError(
                    f"ray_workers makes '{piece.name}' again in other processes, where '{name}' of this "
                    "program is not; write it into a module and name that as `module:function`"
                )
        self.policy = self.engine.policy
        options = {name: getattr(self, name) for name in Workers.__dataclass_fields__ if name != "num"}
        workers = Workers(num=self.num_workers, **options)
        key = (id(self.policy), self.recipe.seed, self.recipe.stage, repr((self.recipe.policy, workers)))
        self.servers = _SERVERS.get(key) or Servers(self.policy, self.recipe, workers)
        _SERVERS[key] = self.servers
        self.begun: deque[tuple[int, list[Prompt], list[list[Prompt]], list[Any]]] = deque()
        self.sums: Counter[str] = Counter()  # metrics of workers, summed over rows
        self.rows = 0

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry of `prompts`; rows are in the order of prompts, and groups stay together."""
        _, _, shares, requests = taken(self.begun, self.stream.step, prompts, self.ask)
        try:
            answers: list[RolloutReply] = self.servers.actors.collect(requests, self.timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; give `timeout` more, or the run more workers") from error
        rows: list[Trajectory] = []
        for share, answer in zip(shares, answers, strict=True):
            rows += [
                self._unpack(row, share, place) for row, place in zip(answer.rows, answer.places, strict=True)
            ]
            self.rows += len(answer.rows)
            self.servers.busy += answer.seconds
            self.sums.update({name: value * len(answer.rows) for name, value in answer.metrics.items()})
        place = place_of([prompt.uid for prompt in prompts])
        return tuple(sorted(rows, key=lambda row: place(row.prompt.uid)))

    def to_send(self) -> Iterable[torch.Tensor]:
        """List the trained parameters."""
        return trained(self.policy.module).values()

    def send(self) -> None:
        """Publish the current trained weights to the workers."""
        self.servers.actors.start()
        self.servers.since = self.servers.since or time.monotonic()
        self.servers.publish()

    def rest(self) -> None:
        """Do nothing: workers keep their model."""

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Start rollouts with the current weights and random streams; `rollout` returns them later."""
        self.send()
        actors = self.servers.actors
        shares = [share for share in divided(prompts, self.num_workers) if share]
        moment = self.stream.step, self.stream.round, self.stream.purpose, self.recipe.clock()
        requests = [(RolloutRequest(self.recipe.engines, tuple(share), *moment),) for share in shares]
        weights = self.servers.version, self.servers.weights
        begun = actors.begin(requests, *weights, method="rollout")
        self.begun.append((self.stream.step, list(prompts), shares, begun))

    def pop_metrics(self) -> Mapping[str, float]:
        """Return metrics of the workers' engines (means over rows), restarts, and busy seconds per worker."""
        rows, metrics, servers, now = max(1, self.rows), self.sums, self.servers, time.monotonic()
        busy, passed = servers.busy / self.num_workers, now - (servers.since or now)
        restarts, servers.actors.restarts, servers.busy, servers.since = servers.actors.restarts, 0, 0.0, now
        self.sums, self.rows = Counter(), 0
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
    """Return the trained parameters by name, without the prefix `module.` of data parallelism."""
    return {
        name.removeprefix("module."): weight
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }


def divided(prompts: Sequence[Prompt], number: int) -> list[list[Prompt]]:
    """Divide prompts among `number` workers; a group goes to the worker with the fewest rollouts so far."""
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.uid].append(prompt)
    shares: list[list[Prompt]] = [[] for _ in range(number)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return shares
