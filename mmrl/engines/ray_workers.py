"""An engine whose rollouts are made by Ray actors, on this machine or on others, each with its own model.

A rollout depends on its prompt, the random streams and the weights, and on nothing else. So an actor holds
nothing that a request does not say again: one that dies is started anew, and asked the same once more.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch

from mmrl.config import objects
from mmrl.config.binding import Pieces, Recipe
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine, Portable, Telling
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Prompt, Rollouts, Trajectory
from mmrl.runtime.distributed import place_of


@dataclass(frozen=True)
class Asked:
    """A request to a worker: prompts to answer, at a step and round, with schedules as of a clock."""

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
    process: int


class Worker:
    """The policy and engines of a run, made again in a process of their own."""

    def __init__(self, recipe: Recipe) -> None:
        # What the run has drawn is overwritten by its weights, so no seed is set here.
        stream = Stream(recipe.seed, stage=recipe.stage)
        self.pieces, self.version = Pieces(stream), 0
        self.policy = engine = self.pieces.make("policy", recipe.policy)
        self.policy.module.to("cuda" if torch.cuda.is_available() else "cpu")
        for i, piece in enumerate(recipe.engines):
            engine = self.pieces.make("engine", piece, engine, place=f"engine[{i}]")
        self.engine: Engine = engine

    def rollout(self, version: int, weights: bytes, asked: Asked) -> Answered:
        """Answer prompts with the weights of a version."""
        if version != self.version:
            self._load(weights)
            self.version = version
        stream = self.pieces.stream
        stream.step, stream.round, stream.purpose = asked.step, asked.round, asked.purpose
        self.pieces.tick(asked.clock)
        rows = self.engine.rollout(asked.prompts)
        place = {id(prompt): i for i, prompt in enumerate(asked.prompts)}
        places = tuple(place.get(id(row.prompt)) for row in rows)
        packed = tuple(map(self._pack, rows, places))
        tells = [piece.tell() for piece in self.pieces.that_are(Telling).values()]
        return Answered(packed, places, {k: v for part in tells for k, v in part.items()}, os.getpid())

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


@engine(packages={"ray": "ray"})
@dataclass(eq=False)
class RayWorkers:
    """Make the rollouts of the engines before it in Ray actors, on this machine or on others.

    Every actor has the model and the engines of the configuration and gets the trained weights after each
    update; groups are divided among actors. Answers are those of the run's own process: draws depend on seed,
    step, prompt and number, and only sums of floating-point numbers differ with the rows that are computed
    together. A worker that dies is started again by Ray, and what it was asked is asked again. Engines with a
    memory, such as `with_replay`, stand after this one. An evaluation has workers of its own.

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
        self.workers: list[Any] = []
        self.version, self.weights, self.seen = 0, None, ()
        self.processes: dict[int, int] = {}  # of every worker, to notice when it is another
        self.restarts = 0
        self.begun: tuple[list[Prompt], list[list[Prompt]], list[Any]] | None = None
        self.metrics: Counter[str] = Counter()  # sums over rows
        self.rows = 0

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry; groups stay together, and rows are in the order of their prompts."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        if self.begun is None or [*map(id, self.begun[0])] != [*map(id, prompts)]:
            self.ask(prompts)
        (_, shares, asked), self.begun = self.begun, None
        try:
            answers: list[Answered] = ray.get(asked, timeout=self.timeout)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the workers did not answer within `timeout: {self.timeout:g}` seconds; give ray_workers "
                "more time, or the run more workers"
            ) from error
        except RayActorError as error:
            raise RuntimeError(
                f"a worker died more often than `max_restarts: {self.max_restarts}` allows: {error}"
            ) from error
        rows: list[Trajectory] = []
        for number, (share, answer) in enumerate(zip(shares, answers, strict=True)):
            rows += [
                self._unpack(row, share, place) for row, place in zip(answer.rows, answer.places, strict=True)
            ]
            self._note(number, answer)
        place = place_of([prompt.uid for prompt in prompts])
        return tuple(sorted(rows, key=lambda row: place(row.prompt.uid)))

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Begin with the weights, the step and the round of this moment; `rollout` of these collects."""
        self._start()
        self._publish()
        shares = [share for share in divided(prompts, self.num_workers) if share]
        moment = self.stream.step, self.stream.round, self.stream.purpose, self.recipe.clock()
        asked = [
            worker.rollout.remote(self.version, self.weights, Asked(tuple(share), *moment))
            for worker, share in zip(self.workers, shares, strict=False)  # some workers have no share
        ]
        self.begun = list(prompts), shares, asked

    def tell(self) -> Mapping[str, float]:
        """Return what the workers' engines tell, averaged over rows, and how many workers were restarted."""
        rows, metrics, restarts = max(1, self.rows), self.metrics, self.restarts
        self.metrics, self.rows, self.restarts = Counter(), 0, 0
        return {**{k: v / rows for k, v in metrics.items()}, "workers/restarts": float(restarts)}

    def _start(self) -> None:
        """Join or start a cluster, and start the actors, once."""
        if self.workers:
            return
        import ray

        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
            address = self.address or os.environ.get("RAY_ADDRESS")
            local: dict[str, Any] = {
                "num_cpus": max(os.cpu_count() or 1, self.num_workers),
                "include_dashboard": False,
            }
            ray.init(address=address or None, log_to_driver=False, **({} if address else local))
        options = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources or {}) or None,
            "runtime_env": dict(self.runtime_env or {}) or None,
            "max_restarts": self.max_restarts,
            "max_task_retries": self.max_restarts,
        }
        recipe = replace(self.recipe, clock=Clock)  # that of the run stays here
        actor = ray.remote(Worker).options(**options)
        self.workers = [actor.remote(recipe) for _ in range(self.num_workers)]

    def _publish(self) -> None:
        """Put the trained weights where workers take them from, if they changed."""
        import ray
        from safetensors.torch import save

        weights = trained(self.policy.module)
        seen = tuple((id(weight), weight._version) for weight in weights.values())
        if seen == self.seen:
            return
        whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        self.version, self.weights, self.seen = self.version + 1, ray.put(save(whole)), seen

    def _unpack(self, row: Trajectory, share: Sequence[Prompt], place: int | None) -> Trajectory:
        row = row if place is None else replace(row, prompt=share[place])
        return self.policy.unpack(row) if isinstance(self.policy, Portable) else row

    def _note(self, number: int, answer: Answered) -> None:
        self.restarts += self.processes.get(number, answer.process) != answer.process
        self.processes[number] = answer.process
        self.rows += len(answer.rows)
        self.metrics.update({name: value * len(answer.rows) for name, value in answer.metrics.items()})


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


def object_in(value: Any) -> str:
    """Find an object of a Python program that a part of a configuration names; empty without one."""
    match value:
        case str() if objects.is_object(value):
            return value
        case Mapping():
            return next(filter(None, map(object_in, value.values())), "")
        case list() | tuple():
            return next(filter(None, map(object_in, value)), "")
    return ""
