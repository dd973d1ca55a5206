"""Ray actors that make rollouts and rewards: started, asked, started again, and named when they die.

An actor holds nothing that a request does not say again: one that dies is started anew, and asked the same
once more.
"""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.config.loading import ConfigError
from mmrl.core.types import Outcome
from mmrl.runtime.workers import Workers

OWN = "mmrl"  # a resource of a cluster that a run started for itself
STARTING = 600.0  # seconds that actors may take to start and to load what they hold
LINES = 20  # of what a dead actor wrote last
READING = 30.0  # seconds to read them on another node
log = logging.getLogger("mmrl")
_joined: dict[str, str] = {}  # the address by which a run joined a cluster, by Ray's name of its session
_starting = threading.Lock()  # rewards run in threads of their own, and a process joins one cluster


class ActorsLost(RuntimeError):
    """An actor died more often than it may."""


class Host:
    """What runs in an actor: an object of a class, and calls of its methods."""

    def __init__(self, make: Callable[..., Any], arguments: bytes) -> None:
        self.thing = make(*loads(arguments))

    def call(self, method: str, request: bytes, *more: Any) -> tuple[int, str, bytes]:
        """Call a method, if any; return the process that answers, its node, and the answer."""
        answer = dumps(method and getattr(self.thing, method)(*loads(request), *more))
        return os.getpid(), node_ip(), answer


class Actors:
    """Ray actors that each hold one object of a class, made there from the same arguments.

    Args:
        make: The class.
        arguments: What it is made from.
        workers: How many actors, and what each of them has.
        what: Which actors these are, for errors: "the actors of the reward 'x'".
    """

    def __init__(
        self, make: Callable[..., Any], arguments: Sequence[Any], workers: Workers, what: str
    ) -> None:
        self.make, self.arguments, self.workers, self.what = make, dumps(tuple(arguments)), workers, what
        self.actors: list[Any] = []
        self.pending: list[Any] = []  # the last request of every actor
        self.processes: dict[int, int] = {}  # of every actor, to notice when it is another
        self.nodes: dict[int, str] = {}  # of every actor
        self.restarts = 0  # since somebody asked

    def ready(self) -> None:
        """Start the actors and wait until all are there, with new ones for those that still work in vain.

        So that neither the start nor a call that nobody waits for any more counts against the next one.
        """
        import ray

        self.start()
        for i, asked in enumerate(self.pending):
            if not ray.wait([asked], timeout=0)[0]:
                ray.kill(self.actors[i])  # with its request, which it would be given again otherwise
                self.actors[i] = self._actor()
                self.processes.pop(i, None)
        if len(self.processes) < len(self.actors):
            self.pending = []
            self.collect([actor.call.remote("", b"") for actor in self.actors], STARTING)

    def begin(self, requests: Sequence[tuple], *more: Any, method: str) -> list[Any]:
        """Send a request to each of the first actors; `collect` returns the answers.

        Args:
            requests: The arguments of the method, for at most as many actors as there are.
            more: Further arguments of all of them, such as references to what Ray stores.
            method: What is called.
        """
        self.start()
        sent = [
            actor.call.remote(method, dumps(request), *more)
            for actor, request in zip(self.actors, requests, strict=False)
        ]
        self.pending = sent + self.pending[len(sent) :]
        return sent

    def collect(self, asked: Sequence[Any], timeout: float) -> list[Any]:
        """Wait for the answers to requests, in order.

        Raises `TimeoutError` after `timeout` seconds, and `ActorsLost` for an actor that died too often.
        """
        import ray
        from ray.exceptions import GetTimeoutError, NodeDiedError, OutOfMemoryError, RayActorError

        try:
            answers = ray.get(list(asked), timeout=max(0.0, timeout))
        except GetTimeoutError as error:
            raise TimeoutError(
                f"{self.what} did not answer within {timeout:g} seconds; each asks for {self._wants()}, and "
                f"the cluster has {_shown(ray.cluster_resources())}"
            ) from error
        except (RayActorError, OutOfMemoryError, NodeDiedError) as error:
            pid, ip = (re.search(rf"\b{name}: (\S+)", str(error)) for name in ("pid", "ip"))
            words = last_words(int(pid[1]), ip[1]) if pid and ip else ""
            raise ActorsLost(
                f"{self.what} died more often than `max_restarts: {self.workers.max_restarts}` allows: "
                f"{error}{words}"
            ) from error
        for number, (process, node, _) in enumerate(answers):
            before = self.processes.get(number)
            if before is not None and before != process:
                self.restarts += 1
                words = last_words(before, self.nodes[number])
                log.warning("one of %s was started again%s", self.what, words)
            self.processes[number], self.nodes[number] = process, node
        return [loads(answer) for *_, answer in answers]

    def _wants(self) -> str:
        extra = dict(self.workers.resources or {})
        return _shown({"CPU": self.workers.num_cpus, "GPU": self.workers.num_gpus, **extra})

    def start(self) -> None:
        """Join or start a cluster, and start the actors, once."""
        with _starting:
            if not self.actors:
                join(self.workers, self.what)
                self.actors = [self._actor() for _ in range(self.workers.num)]

    def _actor(self) -> Any:
        import ray

        given, own = self.workers, OWN in ray.cluster_resources()
        env = dict(given.runtime_env or {})
        if own:
            # Several kinds of actors share the cores of this machine, and none may wait for another to end.
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
    """Join or start a cluster; raises `ConfigError` where this process is in another one already."""
    import ray

    address = workers.address or os.environ.get("RAY_ADDRESS", "")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        # "local": Ray would join one that it finds on the machine.
        ray.init(
            address=address or "local",
            log_to_driver=False,
            **({} if address else {"include_dashboard": False, "resources": {OWN: 1.0}}),
        )
        _joined[ray.get_runtime_context().get_session_name()] = address
        return
    context = ray.get_runtime_context()
    # Without an entry, the program itself has joined or started the cluster.
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


def node_ip() -> str:
    """Return the address of the node that this process is on."""
    import ray

    return ray.util.get_node_ip_address()


def last_words(process: int, node: str) -> str:
    """Return the last lines that an actor's process wrote to its standard error, or where they are."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    session = ray.get_runtime_context().get_session_name()
    if node == node_ip():
        return written_last(session, process)
    where = f"; its last words are on the node {node}, in {log_of(session, process)}"
    ids = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeManagerAddress"] == node]
    if not ids:
        return where
    there = NodeAffinitySchedulingStrategy(ids[0], soft=False)
    reading = ray.remote(written_last).options(num_cpus=0, scheduling_strategy=there)
    try:
        return ray.get(reading.remote(session, process), timeout=READING) or where
    except RayError:  # such as GetTimeoutError: the node ends as well
        return where


def log_of(session: str, process: int) -> Path:
    """Return the pattern of the file that a process of a session of Ray writes its standard error to."""
    root = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    return root / "ray" / session / "logs" / f"worker-*-{process}.err"


def written_last(session: str, process: int) -> str:
    """Read the last lines that a process on this machine wrote to its standard error."""
    pattern = log_of(session, process)
    for path in sorted(pattern.parent.glob(pattern.name)):
        lines = [line for line in path.read_text(errors="replace").splitlines() if not line.startswith(":")]
        if lines:
            return "; its last words:\n" + "\n".join(lines[-LINES:])
    return ""


# ---- what travels


def dumps(value: Any) -> bytes:
    """Pickle a value for another process; of a tensor only its own numbers, not those it is cut from."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:  # a pickle of torch's has the whole storage
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
    """Read what `dumps` wrote in another process of this run."""
    from ray import cloudpickle

    return cloudpickle.loads(data)


def check_environments(outcomes: Iterable[Outcome]) -> None:
    """Raise `TypeError` for an environment that cannot travel to another process, with its name."""
    for environment in {id(o.environment): o.environment for o in outcomes}.values():
        try:
            dumps(environment)
        except Exception as error:
            raise TypeError(
                f"the environment '{type(environment).__name__}' of an answer cannot travel between "
                f"processes: {type(error).__name__}: {error}; leave what cannot be pickled out of its state "
                "(`__getstate__`), or make its rollouts and rewards in the run's own process"
            ) from error
