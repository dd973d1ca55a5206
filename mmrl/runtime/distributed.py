"""Communication between processes and placement on devices, by accelerate; the identity on one process."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Policy
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Totals
from mmrl.core.types import Prompt
from mmrl.runtime import deepspeed
from mmrl.runtime.content_hash import of_weights
from mmrl.runtime.fsdp import taken_up, unsharded
from mmrl.runtime.watchdog import GRACE, ProcessFailed, Watch

TIMEOUT = 1800.0  # seconds that a process waits for another one
T = TypeVar("T")


class Processes:
    """The processes of a run: rank, device, collectives and data parallelism."""

    known = False  # whether every process knows of the failure
    placed = ""  # hash of the weights that `place` found, where there are several processes
    _zero = False  # whether DeepSpeed wraps the optimizer
    _watch: Watch | None = None  # inside `watching`

    def __init__(self, timeout: float = TIMEOUT) -> None:
        from accelerate import Accelerator, InitProcessGroupKwargs

        self.timeout = timeout
        # Outside of `watching`, collectives time out by themselves.
        patience = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout + GRACE))
        self.accelerator = Accelerator(kwargs_handlers=[patience])
        _check_launch(self.accelerator.num_processes)
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.device = self.accelerator.device
        sharding = getattr(self.accelerator.state, "fsdp_plugin", None)
        self._reshards = bool(sharding and sharding.reshard_after_forward)

    @property
    def main(self) -> bool:
        """Whether this process writes files and to the console."""
        return self.rank == 0

    @contextmanager
    def agreeing(self, doing: str) -> Iterator[None]:
        """Raise on every process when one fails inside this context; all have to enter it."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self.world > 1:
            reason = f"{type(error).__name__}: {error}" if error else ""
            with self.meeting(doing):
                reasons = [data.decode() for data in self._all_bytes(reason.encode() or b" ")]
            failed = [(rank, words.strip()) for rank, words in enumerate(reasons) if words.strip()]
            self.known = bool(failed)
            if failed and error is None:
                rank, words = failed[0]
                raise ProcessFailed(f"process {rank} of {self.world} failed while {doing}: {words}")
        if error is not None:
            raise error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End all processes when one fails or hangs inside this context."""
        if self.world == 1:
            yield
            return
        with Watch(self.rank, self.world, self._all_bytes, lambda: self.known, self.timeout) as self._watch:
            try:
                yield
            finally:
                self._watch = None

    def meeting(self, where: str) -> AbstractContextManager:
        """Mark a point where all processes wait for each other; one that does not come is reported."""
        return self._watch.meeting(where) if self._watch else nullcontext()

    def tell(self, value: Any) -> list[Any]:
        """Gather a JSON value from every process, by rank."""
        if self.world == 1:
            return [value]
        with self.meeting("comparing notes"):
            return [json.loads(data) for data in self._all_bytes(json.dumps(value).encode())]

    def same(self, values: Mapping[str, Any]) -> None:
        """Raise on every process unless all have the JSON values of process 0."""
        everyone = self.tell(values)
        unlike = {
            rank: name
            for rank, its in enumerate(everyone)
            for name in reversed(values)
            if its[name] != everyone[0][name]
        }
        if unlike:
            rank, name = next(iter(unlike.items()))
            self.disagree(
                list(unlike),
                f"{name}: {everyone[rank][name]}, but on process 0: {everyone[0][name]}",
            )

    def disagree(self, ranks: Sequence[int], words: str) -> None:
        """Raise on every process because of some of them. Every process has to call this."""
        self.known = True
        many = f"processes {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"process {ranks[0]}"
        raise ProcessFailed(
            f"{many} of {self.world}: {words}; every process must see the same files: put the model, the "
            "data and output_dir where all of them read one copy"
        )

    def any(self, value: bool) -> bool:
        """Return whether a condition is true on any process."""
        return bool(value) if self.world == 1 else float(self.mean(torch.tensor(float(value)))) > 0

    def share(self, prompts: Sequence[Prompt], table: RewardTable) -> tuple[list[Prompt], bool]:
        """Choose this process's prompts: whole groups, known ones where they began, others by least load.

        A process without work gets one prompt and False: it has to take part in every forward pass of a
        sharded model, and its rows never enter the table.
        """
        if self.world == 1:
            return list(prompts), True
        home = dict(zip(table.uids, table.process.tolist(), strict=True))
        counts = Counter(prompt.uid for prompt in prompts)
        load = [sum(n for uid, n in counts.items() if home.get(uid) == rank) for rank in range(self.world)]
        for uid, count in counts.items():
            if uid not in home:
                home[uid] = min(range(self.world), key=lambda rank: (load[rank], rank))
                load[home[uid]] += count
        mine = [prompt for prompt in prompts if home[prompt.uid] == self.rank]
        return mine or [prompts[0]], bool(mine)

    def gather(self, table: RewardTable, order: Sequence[str]) -> RewardTable:
        """Join the tables of all processes, with rows in the order of their prompts."""
        if self.world > 1:
            with self.meeting("joining reward tables"):
                tables = [_unpack(data, self.rank) for data in self._all_bytes(_pack(table))]
            table = reduce(RewardTable.join, [part for part in tables if len(part)], RewardTable.empty())
        place = {uid: i for i, uid in enumerate(dict.fromkeys(order))}
        rows = sorted(range(len(table)), key=lambda row: place[table.uids[row]])
        table = table.select(torch.tensor(rows, dtype=torch.int64)).replace(rank=self.rank)
        if not len(table):
            return table
        numbers = torch.arange(len(table))[:, None].expand(table.ends.shape)
        return table.replace(ids={**table.ids, "row": numbers})

    def rank_mean(self, totals: Totals) -> Totals:
        """Average the divisors of losses; data parallelism averages gradients, so both together are exact."""
        values = self.mean(torch.tensor(dataclasses.astuple(totals), dtype=torch.float64))
        return Totals(*values.tolist())

    def mean(self, values: Tensor) -> Tensor:
        """Average a tensor over processes."""
        if self.world == 1:
            return values
        values = values.to(self.device, copy=True)
        with self.meeting("averaging"):
            torch.distributed.all_reduce(values)
            return values.cpu() / self.world

    def means(self, values: Mapping[str, float]) -> dict[str, float]:
        """Average named numbers over processes; a process without a number counts as 0."""
        if self.world == 1:
            return dict(values)
        parts = self.tell(dict(values))
        return {
            name: sum(part.get(name, 0.0) for part in parts) / self.world
            for name in dict.fromkeys(name for part in parts for name in part)
        }

    def even(self, micros: Sequence[T]) -> Iterator[tuple[T, float, bool]]:
        """Yield (micro-batch, counts, last), equally often on every process; repeats have `counts` 0."""
        most = len(micros)
        if self.world > 1:
            length = torch.tensor(len(micros), device=self.device)
            with self.meeting("counting micro-batches"):
                torch.distributed.all_reduce(length, torch.distributed.ReduceOp.MAX)
                most = int(length)
        for i in range(most):
            yield micros[min(i, len(micros) - 1)], float(i < len(micros)), i == most - 1

    def place(
        self,
        policy: Policy,
        make_optimizer: Callable[..., torch.optim.Optimizer],
        max_grad_norm: float,
    ) -> torch.optim.Optimizer:
        """Move a policy to its device, wrap it for data parallelism as launched, and make its optimizer.

        `max_grad_norm` (0: no limit) is for DeepSpeed, which clips gradients itself.
        """
        learning = [(name, p) for name, p in policy.module.named_parameters() if p.requires_grad]
        if not learning:
            raise ValueError(
                "no parameter of the policy is trained; thaw a part of the model or give it an adapter"
            )
        # Before data parallelism spreads the weights of one process, or shards of each.
        self.placed = of_weights(policy) if self.world > 1 else ""
        policy.module.to(self.device)
        sharing = getattr(self.accelerator.state, "deepspeed_plugin", None)
        optimizer = make_optimizer(learning)
        if sharing is not None:
            deepspeed.check(sharing.zero_stage, optimizer)
            # DeepSpeed requires a number for its speed report; micro-batches here have no fixed size.
            sharing.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
            sharing.deepspeed_config["gradient_clipping"] = max_grad_norm  # it clips gradients itself
        self._zero = sharing is not None
        policy.module, optimizer = self.accelerator.prepare(policy.module, optimizer)
        return optimizer

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by parameter. Every process has to call this."""
        return deepspeed.state_of(optimizer.optimizer) if self._zero else optimizer.state_dict()

    def take_up(self, optimizer: torch.optim.Optimizer, state: Any, weights: Sequence[Tensor]) -> None:
        """Load what `state_of` returned, after the weights themselves."""
        if self._zero:
            deepspeed.take_up(optimizer.optimizer, state)
        else:
            optimizer.load_state_dict(taken_up(state, weights, self.world))

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Synchronise gradients only at the last micro-batch."""
        self.accelerator.sync_gradients = last  # DeepSpeed takes its step where this is set
        context: AbstractContextManager = nullcontext()
        if not last and self.world > 1:
            context = self.accelerator.no_sync(module)
        try:
            with context:
                yield
        finally:
            self.accelerator.sync_gradients = True

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Unshard all weights inside this context, for generation."""
        with ExitStack() as stack:
            with self.meeting("gathering weights"):
                stack.enter_context(unsharded(module, again=self._reshards))
            yield

    def backward(self, loss: Tensor) -> None:
        """Back-propagate a loss."""
        with self.meeting("exchanging gradients"):
            self.accelerator.backward(loss)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clip the norm of all gradients together (0: no limit), and return the norm before clipping."""
        with self.meeting("measuring gradients"):
            return float(self.accelerator.clip_grad_norm_(parameters, max_norm or float("inf")))

    def wait(self) -> None:
        """Wait until every process calls this."""
        with self.meeting("waiting for all"):
            self.accelerator.wait_for_everyone()

    def _all_bytes(self, data: bytes) -> list[bytes]:
        """Gather bytes of any length from every process, by rank."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, torch.tensor([len(mine)], device=self.device))
        most = max(int(size) for size in sizes)
        padded = torch.cat([mine, mine.new_zeros(most - len(mine))])
        everyone = [torch.zeros_like(padded) for _ in range(self.world)]
        torch.distributed.all_gather(everyone, padded)
        return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]


def _check_launch(seen: int) -> None:
    """Raise where several processes were started that accelerate does not join; each would be its own run."""
    asked = int(os.environ.get("WORLD_SIZE") or 1)
    if asked > 1 and seen == 1:
        raise ConfigError(
            f"WORLD_SIZE is {asked}, but accelerate sees one process, so {asked} runs would write into one "
            "folder; start with `accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes "
            f"{asked} -m mmrl ...`, or without a GPU with `ACCELERATE_USE_CPU=true torchrun --nproc_per_node "
            f"{asked} -m mmrl ...`; unset WORLD_SIZE where one process is wanted"
        )


def _pack(table: RewardTable) -> bytes:
    """Serialise a table as safetensors."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {name: getattr(table, name) for name in _COLUMNS}
    for group in _MAPPINGS:
        tensors |= {f"{group}/{name}": column for name, column in getattr(table, group).items()}
    words = {"names": json.dumps(table.names), "uids": json.dumps(table.uids)}
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, words)


def _unpack(data: bytes, rank: int) -> RewardTable:
    from safetensors.torch import load

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load(data)
    mappings: dict[str, Mapping[str, Tensor]] = {
        group: {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(group + "/")}
        for group in _MAPPINGS
    }
    return RewardTable(
        **{name: tensors[name] for name in _COLUMNS},
        **mappings,
        names=tuple(json.loads(header["names"])),
        uids=tuple(json.loads(header["uids"])),
        rank=rank,
    )


_COLUMNS = ("values", "valid", "weights", "ends", "length", "learn", "process")
_MAPPINGS = ("scored", "ids", "notes")
