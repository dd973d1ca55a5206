"""Collectives and device placement with accelerate; on one process, collectives do nothing."""

from __future__ import annotations

import atexit
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from mmrl.config.schema import ConfigError
from mmrl.core.protocols import ComparesAnswers, Engine, Policy, SendsWeights
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Totals
from mmrl.core.types import Count, Prompt
from mmrl.runtime.content_hash import of_weights
from mmrl.runtime.fsdp import check_shardable, gathered, unsharded, widen
from mmrl.runtime.launcher import check_joined, check_restarts
from mmrl.runtime.modules import LATER
from mmrl.runtime.state_tree import apart, flatten, unflatten
from mmrl.runtime.watchdog import GRACE, ProcessFailed, Watch

TIMEOUT = 1800.0  # seconds that a process waits for another process
T = TypeVar("T")


class Processes:
    """The processes of a run: rank, device, collectives and data parallelism."""

    known = False  # whether all processes already know why the run fails
    placed = ""  # hashes of all models' weights before `place` wraps them; empty with one process
    _watch: Watch | None = None  # set inside `watching`

    def __init__(self, timeout: float = TIMEOUT) -> None:
        from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs

        self.timeout = timeout
        check_restarts()
        # This timeout ends a hanging collective outside of `watching`.
        patience = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout + GRACE))
        self.accelerator = Accelerator(kwargs_handlers=[patience])
        if self.accelerator.state.deepspeed_plugin is not None:
            raise ConfigError(
                "DeepSpeed is not supported; launch with configs/accelerate/fsdp2.yaml or ddp.yaml"
            )
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.device = self.accelerator.device
        self.shards = self.accelerator.distributed_type == DistributedType.FSDP
        self._reshards = self.shards and bool(self.accelerator.state.fsdp_plugin.reshard_after_forward)
        if self.world == 1:
            check_joined()
        else:
            atexit.unregister(leave)  # register `leave` once, even if a program makes several runs
            atexit.register(leave)

    @property
    def main(self) -> bool:
        """Whether this process (rank 0) writes the files and the console output."""
        return self.rank == 0

    @property
    def load_device(self) -> torch.device | None:
        """The device that models are loaded onto; None: main memory (CPU, or before FSDP2 shards them)."""
        return None if self.shards or self.device.type == "cpu" else self.device

    # ---- agreement

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End all processes if one fails or hangs inside this context."""
        if self.world == 1:
            yield
            return
        with Watch(self.rank, self.world, self._all_bytes, lambda: self.known, self.timeout) as self._watch:
            try:
                yield
            except BaseException:
                if not self.known:  # do not wait in `leave` for processes that hang in a collective
                    atexit.unregister(leave)
                raise
            finally:
                self._watch = None

    def meeting(self, where: str) -> AbstractContextManager:
        """Announce a collective named `where`; the watchdog reports processes that do not reach it."""
        return self._watch.meeting(where) if self._watch else nullcontext()

    def waiting_for_main(self) -> AbstractContextManager:
        """Let other processes wait without a timeout until process 0 leaves this context (e.g. uploads)."""
        return self._watch.waiting_for_main() if self._watch else nullcontext()

    def wait(self) -> None:
        """Wait until every process has called this method."""
        with self.meeting("waiting for all"):
            self.accelerator.wait_for_everyone()

    @contextmanager
    def fail_together(self, doing: str) -> Iterator[None]:
        """Raise on every process if any process fails inside this context; every process must enter it."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self.world > 1:
            try:
                reasons = self.all_gather_object(f"{type(error).__name__}: {error}" if error else "", doing)
            except Exception as gone:
                if error is not None:  # report this process's own error, not the lost peer
                    raise error from gone
                raise
            failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
            self.known = bool(failed)
            if failed and error is None:
                rank, reason = failed[0]
                raise ProcessFailed(f"process {rank} of {self.world} failed while {doing}: {reason}")
        if error is not None:
            raise error

    def all_gather_object(self, value: Any, where: str = "comparing notes") -> list[Any]:
        """Gather a JSON value from every process, in order of rank."""
        if self.world == 1:
            return [value]
        with self.meeting(where):
            return [json.loads(data) for data in self._all_bytes(json.dumps(value).encode())]

    def assert_equal(self, values: Mapping[str, Any]) -> None:
        """Raise on every process unless all have the same JSON values as process 0."""
        first, *others = self.all_gather_object(values)
        unlike = {
            rank: f"{name}: {its[name]}, but on process 0: {first[name]}"
            for rank, its in enumerate(others, start=1)
            for name in reversed(values)
            if its[name] != first[name]
        }
        if unlike:
            self.disagree(list(unlike), next(iter(unlike.values())))

    def disagree(self, ranks: Sequence[int], words: str) -> None:
        """Raise an error with the ranks at fault and the reason `words`; every process must call this."""
        self.known = True
        many = f"processes {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"process {ranks[0]}"
        raise ProcessFailed(
            f"{many} of {self.world}: {words}; every process must see the same files: put the model, the "
            "data and output_dir where all of them read one copy"
        )

    def any(self, value: bool) -> bool:
        """Return whether a condition is true on any process."""
        return any(self.all_gather_object(value))

    def means(self, values: Mapping[str, float]) -> dict[str, float]:
        """Average named values over processes; sum values of type `Count`. A missing value counts as 0."""
        if self.world == 1:
            return dict(values)
        counted = [name for name, value in values.items() if isinstance(value, Count)]
        parts = self.all_gather_object([dict(values), counted])
        added_up = {name for _, names in parts for name in names}
        return {
            name: sum(part.get(name, 0.0) for part, _ in parts) / (1 if name in added_up else self.world)
            for name in dict.fromkeys(name for part, _ in parts for name in part)
        }

    def rank_mean(self, totals: Totals) -> Totals:
        """Average loss divisors over processes; as gradients are averaged too, loss / divisor stays exact."""
        return Totals(**self.means(asdict(totals)))

    def _all_bytes(self, data: bytes) -> list[bytes]:
        """Gather bytes of any length from every process, in order of rank."""
        # `all_gather` needs equal sizes: exchange the lengths first, then bytes padded to the longest.
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, torch.tensor([len(mine)], device=self.device))
        most = max(int(size) for size in sizes)
        padded = torch.cat([mine, mine.new_zeros(most - len(mine))])
        everyone = [torch.zeros_like(padded) for _ in range(self.world)]
        torch.distributed.all_gather(everyone, padded)
        return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]

    # ---- a step's rows

    def assign_prompts(self, prompts: Sequence[Prompt], table: RewardTable) -> tuple[list[Prompt], bool]:
        """Select the prompts of this process; also return whether their rows count (False: only padding).

        A group in `table` (earlier sampling rounds of the step) stays on its process; a new group goes to the
        least loaded one. A process without work gets one prompt as padding, since every process must take
        part in each forward pass of a sharded model.
        """
        home = self.homes(Counter(prompt.uid for prompt in prompts), table)
        mine = [prompt for prompt in prompts if home[prompt.uid] == self.rank]
        return mine or [prompts[0]], bool(mine)

    def homes(self, counts: Mapping[str, int], table: RewardTable) -> dict[str, int]:
        """Map prompt uids to ranks: the rank in the table, or else the rank of the least loaded process.

        `counts` maps each prompt uid to its number of rows.
        """
        # Keep all rows of a prompt on one process, since advantages compare them.
        home = dict(zip(table.uids, table.process.tolist(), strict=True))
        load = [sum(n for uid, n in counts.items() if home.get(uid) == rank) for rank in range(self.world)]
        for uid, count in counts.items():
            if uid not in home:
                home[uid] = min(range(self.world), key=lambda rank: (load[rank], rank))
                load[home[uid]] += count
        return home

    def gather(self, table: RewardTable, order: Sequence[str]) -> RewardTable:
        """Join the tables of all processes; rows follow the order of the prompt uids in `order`."""
        table = self._joined(table)
        place = place_of(order)
        rows = sorted(range(len(table)), key=lambda row: place(table.uids[row]))
        table = table.select(torch.tensor(rows, dtype=torch.int64)).replace(rank=self.rank)
        if not len(table):
            return table
        # Give rows the ids that they would have on a single process.
        numbers = torch.arange(len(table))[:, None].expand(table.ends.shape)
        return table.replace(ids={**table.ids, "row": numbers})

    def joined(self, table: RewardTable) -> RewardTable:
        """Join the parts of a reward table from all processes, and sort the rows by their id."""
        numbers = torch.tensor(
            sum(self.all_gather_object(table.ids["row"][:, 0].tolist()), []), dtype=torch.int64
        )
        whole = self._joined(table)
        ids = {**whole.ids, "row": numbers[:, None].expand(whole.ends.shape)}
        return whole.replace(ids=ids).select(numbers.argsort())

    def _joined(self, table: RewardTable) -> RewardTable:
        if self.world > 1:
            with self.meeting("joining reward tables"):
                tables = [_unpack(data) for data in self._all_bytes(_pack(table))]
            table = reduce(RewardTable.join, filter(len, tables), RewardTable.empty())  # skip empty tables
        return table.replace(rank=self.rank)

    def pad_micro_batches(
        self, micros: Sequence[T], stand_in: T | None = None
    ) -> Iterator[tuple[T, float, bool]]:
        """Yield (micro-batch, weight, is last) equally often on every process; padding has weight 0.

        Padding repeats the last micro-batch, or `stand_in` on a process without micro-batches.
        """
        most = max(self.all_gather_object(len(micros), "counting micro-batches"))
        repeated = micros[-1] if micros else cast(T, stand_in)
        for i in range(most):
            counts = i < len(micros)
            yield micros[i] if counts else repeated, float(counts), i == most - 1

    # ---- data parallelism

    def place(
        self, policy: Policy, make_optimizer: Callable[..., torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Move a policy to its device, wrap it for the launched parallelism, and create its optimizer."""
        learning = [(name, p) for name, p in policy.module.named_parameters() if p.requires_grad]
        if not learning:
            raise ValueError(
                "no parameter of the policy is trained; thaw a part of the model or give it an adapter"
            )
        # Hash before wrapping: data parallelism shards weights, or overwrites them by those of rank 0.
        self.placed += of_weights(policy) if self.world > 1 else ""
        if self.shards:  # FSDP2 moves and shards one layer at a time; a device need not hold the whole model
            check_shardable(policy.module)
        else:
            policy.module.to(self.device)
        optimizer = make_optimizer(learning)
        later = {name for name, parameter in learning if LATER in vars(parameter)}
        del learning  # drop the last references to unsharded weights
        policy.module, optimizer = self.accelerator.prepare(policy.module, optimizer)
        widen(policy.module, later)
        return optimizer

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Synchronise gradients between processes only in the last micro-batch."""
        with nullcontext() if last else self.accelerator.no_sync(module):
            yield

    @contextmanager
    def sampling(self, engine: Engine) -> Iterator[None]:
        """Provide an engine with the policy's weights: unshard them here, or send them to its servers."""
        if not isinstance(engine, SendsWeights):
            with self.unshard(engine.policy.module):
                yield
            return
        with ExitStack() as stack:
            with self.meeting("gathering weights"):
                only = list(engine.to_send())
                stack.enter_context(gathered(engine.policy.module, only=only, everywhere=True))
            engine.send()
        yield
        engine.rest()

    def compare(self, engine: Engine) -> None:
        """Check, with a sharded policy, that an engine's servers compute the policy's log-probabilities."""
        if self.shards and isinstance(engine, ComparesAnswers):
            engine.compare(self.pad_micro_batches)

    @contextmanager
    def unshard(self, module: nn.Module) -> Iterator[None]:
        """Unshard all weights of a model inside this context, for generation."""
        with ExitStack() as stack:
            with self.meeting("gathering weights"):
                stack.enter_context(unsharded(module, again=self._reshards))
            yield

    def backward(self, loss: Tensor) -> None:
        """Back-propagate a loss."""
        with self.meeting("exchanging gradients"):
            self.accelerator.backward(loss)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clip the global gradient norm (0: no limit); return the norm before clipping."""
        with self.meeting("measuring gradients"):
            return float(self.accelerator.clip_grad_norm_(parameters, max_norm or float("inf")))


def leave() -> None:
    """Destroy the process group before the interpreter exits.

    Otherwise gloo threads may free the tensors of the last collective after the exit, which aborts the
    process with "terminate called without an active exception", code 134 (pytorch#190489).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def place_of(order: Sequence[str]) -> Callable[[str], tuple[int, str]]:
    """Return a sort key for prompt uids: first those in `order`, in that order, then others by name.

    An engine may add rows of prompts that are not in `order`, such as replayed ones.
    """
    places = {uid: i for i, uid in enumerate(dict.fromkeys(order))}
    return lambda uid: (places[uid], "") if uid in places else (len(places), uid)


def _pack(table: RewardTable) -> bytes:
    """Serialise a table as safetensors bytes, with its structure in the metadata."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = flatten(vars(table), tensors)  # all fields of the table
    return save(apart(tensors), {"tree": json.dumps(tree)})


def _unpack(data: bytes) -> RewardTable:
    from safetensors.torch import load

    # A safetensors file begins with the length of its JSON header, in 8 bytes.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    columns = unflatten(json.loads(header["tree"]), load(data))
    return RewardTable(**{**columns, "uids": tuple(columns["uids"])})
