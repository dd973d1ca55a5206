"""Protocols of the pieces that the training loop calls: policies, engines, samplers, observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from mmrl.core.types import Outcome, Prompt, Rollouts, TrainerState, Trajectory

if TYPE_CHECKING:
    from mmrl.core.reward_table import Measured, RewardTable
    from mmrl.core.step_table import Batch, StepOutput


class LogProbs(Protocol):
    """Computes log-probabilities of the steps of a batch: a policy or a reference."""

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        """Return log-probabilities (N, T), and the further outputs that `extra` names."""
        ...


@runtime_checkable
class Policy(LogProbs, Protocol):
    """The model that is trained; its log-probabilities are differentiable."""

    module: nn.Module  # the optimizer moves its trainable parameters
    outputs: frozenset[str]  # names of the further outputs that it can compute

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Convert a recorded answer into a row."""
        ...

    def collate(self, rollouts: Rollouts) -> Batch:
        """Combine rows into a padded batch."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model as a folder that its library loads."""

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""


@runtime_checkable
class RendersPrompts(Protocol):
    """A policy that renders prompts as its model reads them."""

    def render(self, prompt: Prompt) -> str:
        """Render a prompt with its chat template; media become short placeholders."""
        ...


@runtime_checkable
class Portable(Policy, Protocol):
    """A policy whose rows are sent between processes without parts that the receiver can recompute."""

    def pack(self, row: Trajectory) -> Trajectory:
        """Remove the parts of a row that `unpack` recomputes from its prompt."""
        ...

    def unpack(self, row: Trajectory) -> Trajectory:
        """Restore a row that another process packed."""
        ...


class Engine(Protocol):
    """Makes rollouts: generates text, denoises images, or reads stored answers.

    A class lists the tags that it sets on outcomes in `sets_tags`, and sets `reads_answers` if it encodes
    recorded answers of prompts.
    """

    policy: Policy
    notes: frozenset[str]  # names of the values that it records for every step

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Create one rollout per entry, in order; rollouts of the same prompt form a group."""
        ...


@runtime_checkable
class AsyncEngine(Engine, Protocol):
    """An engine that can start rollouts before they are collected."""

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Start rollouts with the current weights, step and round; `rollout` collects them."""


@runtime_checkable
class SendsWeights(AsyncEngine, Protocol):
    """An engine that sends weights to servers, which sample the answers.

    The policy may stay sharded while it waits for answers.
    """

    def to_send(self) -> Iterable[Tensor]:
        """List the parameters of the policy that are sent."""
        ...

    def send(self) -> None:
        """Send the current weights; the parameters of `to_send` are whole on every process."""


@runtime_checkable
class ComparesAnswers(Engine, Protocol):
    """An engine that checks the answers of servers against the policy, by a forward pass for each."""

    def compare(self, even: Callable[..., Iterable[tuple]]) -> None:
        """Check the last result of `rollout` against a sharded policy.

        Every process has to call this; `even(list, stand_in)` pads the passes to an equal number on each.
        """


@runtime_checkable
class WeighsWords(Engine, Protocol):
    """An engine that computes the probability of the first word of an answer, without sampling."""

    def first_words(self, prompts: Sequence[Prompt], words: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return, per prompt and list of words, the probability that the answer starts with one of them."""
        ...


class Sampler(Protocol):
    """Chooses prompts, and the number of rollouts for each.

    The first sampler takes the data, each further one wraps the sampler before it.
    """

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Return one prompt per rollout; an empty list if no prompt is left."""
        ...


class HeldOut(Protocol):
    """Measures a policy on prompts that it is not trained on."""

    data: Sequence[Prompt]

    def measure(self, *, state: TrainerState | None = None) -> Measured:
        """Answer and score every prompt, and compute the metrics; `state` is passed to rewards."""
        ...


class Tracker(Protocol):
    """Sends metrics to a dashboard; only the main process opens one."""

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> str:
        """Start a dashboard run, or resume it at step `start`; return a console line, possibly empty."""
        ...

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the finite metrics of a step."""

    def close(self) -> None:
        """Close the dashboard."""


@runtime_checkable
class HasMetrics(Protocol):
    """A piece that reports metrics."""

    def pop_metrics(self) -> Mapping[str, float]:
        """Return metrics since the last call, under the same names on every process."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A piece with state that is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and strings, nested in dictionaries."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@runtime_checkable
class Observer(Stateful, Protocol):
    """A piece with state that observes every round of a collection, before groups are dropped."""

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update the state from a round; `rollouts` are this process's rows of `table`."""


@runtime_checkable
class UsesEngine(Protocol):
    """A piece that calls the engine between rollouts, or reads values of other processes."""

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Set both functions; the run calls this once, before any prompt is drawn.

        Args:
            ask: Answers prompts with the first engine of the run. Every process has to call it.
            tell: Gathers a JSON value from every process, by rank. Every process has to call it.
        """


@runtime_checkable
class UsesValueModel(Protocol):
    """A piece that estimates the values of prompts with a second model, before they are answered."""

    value_model: str  # its name in `references`; empty: none

    def connect_value_model(self, values: Callable[[Sequence[Prompt]], list[float]]) -> None:
        """Set the function that estimates prompt values; all processes must call it with equal prompts."""


@runtime_checkable
class Preparing(Protocol):
    """A sampler that adds learned text to prompts, also in evaluations."""

    def prepare(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts for the engine, with the same uids."""
        ...


@runtime_checkable
class AdvantageObserver(Stateful, Protocol):
    """A piece with state that observes the advantages of a collection."""

    def observe_advantages(self, credit: RewardTable) -> None:
        """Update the state; `credit.values` (N, 1, K) are the advantages at the end of the chain."""


@runtime_checkable
class RecallsRows(Policy, Protocol):
    """A policy that can rebuild a row from the values that the engine recorded for each step."""

    def restore_rows(self, prompt: Prompt, notes: Mapping[str, Tensor]) -> Trajectory:
        """Rebuild the row of a prompt from notes (T,): "token", "logp", "temperature" and others."""
        ...


@runtime_checkable
class Replay(Stateful, Protocol):
    """A piece with state that replays rows of earlier steps, before or after the advantage chain."""

    def replay_before(self, table: RewardTable) -> tuple[Tensor, RewardTable]:
        """Return a mask (N,) of the rows to keep, and the rows to add before the advantage chain."""
        ...

    def replay_after(
        self, table: RewardTable, credit: RewardTable
    ) -> tuple[Tensor, RewardTable, RewardTable]:
        """Return a mask (N,) of rows to keep, and rows to add to the tables before and after the chain."""
        ...

    def restore_rows(self, table: RewardTable) -> Rollouts:
        """Rebuild the rollouts of rows that were added."""
        ...


@runtime_checkable
class ReadsSteps(Policy, Protocol):
    """A policy that can read the rows of another policy, as a critic does."""

    def check_steps_of(self, policy: Any) -> None:
        """Raise `ValueError` if a step of the other policy has another meaning for this one."""


@runtime_checkable
class RunCallback(Protocol):
    """A callback for events of a training run, on every process, which may end the run."""

    ended: bool  # whether the run is to end after this step, as if it were the last

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Handle an event: "train_begin", "step_end", "save" or "train_end".

        `step` counts finished steps; `metrics` are those of the last step, with `eval_` metrics if it ended
        with an evaluation.
        """
