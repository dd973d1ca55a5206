"""Ray actors for rollouts and rewards; Ray restarts an actor that dies and repeats its request.

Requests contain everything that an actor needs, so a restarted actor gives the same answer.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mmrl.config.loading import ConfigError
from mmrl.core.types import Outcome
from mmrl.runtime.workers import Workers

OWN = "mmrl"  # custom resource that marks a cluster which a run started for itself
STARTING = 600.0  # seconds that actors may take to start and to load their models
log = logging.getLogger("mmrl")
_joined: dict[str, str] = {}  # maps a cluster's session name to the address by which this process joined
_starting = threading.Lock()  # reward threads must not join a cluster twice


class ActorsLost(RuntimeError):
    """Raised if an actor died more often than `max_restarts` allows."""


class Host:
    """The remote side of an actor: it creates an object and calls the object's methods."""

    def __init__(self, make: Callable[..., Any], arguments: bytes) -> None:
        self.thing = make(*loads(arguments))

    def call(self, method: str, request: bytes, *more: Any) -> tuple[int, bytes]:
        """Call a method (no call for an empty name); return this process's id and the pickled result."""
        return os.getpid(), dumps(method and getattr(self.thing, method)(*loads(request), *more))


class Actors:
    """A group of Ray actors that each hold one object, built remotely from the same arguments.

    Args:
        make: Class of the object.
        arguments: Positional arguments of the class.
        workers: Number of actors and the resources of each.
        what: Name of the actors in errors, such as "the actors of the reward 'x'".
    """

    def __init__(
        self, make: Callable[..., Any], arguments: Sequence[Any], workers: Workers, what: str
    ) -> None:
        self.make, self.arguments, self.workers, self.what = make, dumps(tuple(arguments)), workers, what
        self.actors: list[Any] = []
        self.pending: list[Any] = []  # last request of every actor
        self.processes: dict[int, int] = {}  # maps actor index to process id; a new id means a restart
        self.restarts = 0  # number of restarts since the metrics were last read

    def ready(self) -> None:
        """Start the actors and wait for them; replace actors that are busy with an abandoned request.

        So the next call's timeout covers neither start-up nor an abandoned request.
        """
        import ray

        self.start()
        for i, request in enumerate(self.pending):
            if not ray.wait([request], timeout=0)[0]:
                ray.kill(self.actors[i])  # also drops its request, which a restart would repeat
                self.actors[i] = self._actor()
                self.processes.pop(i, None)
        if len(self.processes) < len(self.actors):
            self.pending = []
            self.collect([actor.call.remote("", b"") for actor in self.actors], STARTING)

    def begin(self, requests: Sequence[tuple], *more: Any, method: str) -> list[Any]:
        """Send request i to actor i; returns references to the results, to pass to `collect`.

        Args:
            requests: Arguments of the method, one tuple per actor.
            more: Further arguments of every request, such as Ray object references.
            method: Name of the method to call.
        """
        self.start()
        sent = [
            actor.call.remote(method, dumps(request), *more)
            for actor, request in zip(self.actors, requests, strict=False)
        ]
        self.pending = sent + self.pending[len(sent) :]
        return sent

    def collect(self, pending: Sequence[Any], timeout: float) -> list[Any]:
        """Wait for the results of requests and return them in order.

        Raises `TimeoutError` after `timeout` seconds, and `ActorsLost` for an actor that died too often.
        """
        import ray
        from ray.exceptions import GetTimeoutError, NodeDiedError, OutOfMemoryError, RayActorError

        try:
            answers = ray.get(list(pending), timeout=max(0.0, timeout))
        except GetTimeoutError as error:
            given = self.workers
            wanted = {"CPU": given.num_cpus, "GPU": given.num_gpus, **(given.resources or {})}
            raise TimeoutError(
                f"{self.what} did not answer within {timeout:g} seconds; each asks for {_shown(wanted)}, and "
                f"the cluster has {_shown(ray.cluster_resources())}"
            ) from error
        except (RayActorError, OutOfMemoryError, NodeDiedError) as error:
            raise ActorsLost(
                f"{self.what} died more often than `max_restarts: {self.workers.max_restarts}` allows: "
                f"{error}"
            ) from error
        for number, (process, _) in enumerate(answers):
            if self.processes.get(number, process) != process:
                self.restarts += 1
                log.warning("Ray restarted one of %s; its log tells why (`ray logs`)", self.what)
            self.processes[number] = process
        return [loads(answer) for _, answer in answers]

    def start(self) -> None:
        """Join or start a cluster and start the actors, unless this was done before."""
        with _starting:
            if not self.actors:
                join(self.workers, self.what)
                self.actors = [self._actor() for _ in range(self.workers.num)]

    def _actor(self) -> Any:
        import ray

        given, own = self.workers, OWN in ray.cluster_resources()
        env = dict(given.runtime_env or {})
        if own:
            # Reserve no cores on this machine: else actors of one piece may wait for those of another.
            threads = str(max(1, int(given.num_cpus)))
            env["env_vars"] = {"OMP_NUM_THREADS": threads, **env.get("env_vars", {})}
        options = {
            "num_cpus": 0 if own else given.num_cpus,
            "num_gpus": given.num_gpus,
            "resources": dict(given.resources or {}) or None,
            "runtime_env": env or None,
            "max_restarts": given.max_restarts,
            "max_task_retries": given.max_restarts,
        }
        return ray.remote(Host).options(**options).remote(self.make, self.arguments)


def join(workers: Workers, what: str) -> None:
    """Join or start a Ray cluster; raise `ConfigError` if this process is in another cluster already."""
    import ray

    address = workers.address or os.environ.get("RAY_ADDRESS", "")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
        # "local" starts a new cluster; without an address Ray would join a cluster on this machine.
        ray.init(
            address=address or "local",
            log_to_driver=False,
            **({} if address else {"include_dashboard": False, "resources": {OWN: 1.0}}),
        )
        _joined[ray.get_runtime_context().get_session_name()] = address
        return
    context = ray.get_runtime_context()
    # Clusters missing in `_joined` were joined or started by the user's own program.
    joined = _joined.get(context.get_session_name())
    if address not in (("", "auto") if joined is None else (joined,)) and address != context.gcs_address:
        raise ConfigError(
            f"{what} have the `address: '{address}'`, but this process is in the cluster at "
            f"'{joined or context.gcs_address}' already, and can join only one; give all pieces the same "
            "`address`, or none and set RAY_ADDRESS"
        )


def _shown(resources: Mapping[str, float]) -> str:
    named = {name: x for name, x in resources.items() if ":" not in name and not name.endswith("memory")}
    return ", ".join(f"{x:g} {name}" for name, x in sorted(named.items()) if x and name != OWN) or "nothing"


# ---- serialization


def dumps(value: Any) -> bytes:
    """Pickle a value for another process; for a tensor view, pickle only the elements of the view.

    Ray's own serialization is not used: it sends the whole storage of a view, and makes arrays read-only, so
    that rewards and environments could not change them.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:  # torch would pickle the whole storage
            if type(obj) is torch.Tensor and obj.layout == torch.strided and obj.device.type == "cpu":
                flat = obj.detach().contiguous().flatten()
                return _tensor, (flat.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    whole = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return whole.view(shape)


def loads(data: bytes) -> Any:
    """Unpickle the output of `dumps` from another process of this run."""
    from ray import cloudpickle

    return cloudpickle.loads(data)


def check_environments(outcomes: Iterable[Outcome]) -> None:
    """Raise `TypeError` with the class name if an environment of the outcomes cannot be pickled."""
    for environment in {id(o.environment): o.environment for o in outcomes}.values():
        try:
            dumps(environment)
        except Exception as error:
            raise TypeError(
                f"the environment '{type(environment).__name__}' of an answer cannot travel between "
                f"processes: {type(error).__name__}: {error}; leave what cannot be pickled out of its state "
                "(`__getstate__`), or make its rollouts and rewards in the run's own process"
            ) from error
