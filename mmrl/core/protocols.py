"""Protocols of the pieces that the training loop calls: policies, engines, samplers, observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mmrl.core.types import Outcome, Prompt, Rollouts, TrainerState, Trajectory, Transcript

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmrl.core.reward_table import Collection, Measured, RewardTable
    from mmrl.core.step_table import Batch, StepOutput


class LogProbs(Protocol):
    """A model that computes the log-probabilities of the steps of a batch: a policy or a reference."""

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        """Return log-probabilities (N rows, T steps), and the further outputs that `extra` names."""
        ...


@runtime_checkable
class Policy(LogProbs, Protocol):
    """The model that is trained; its log-probabilities are differentiable."""

    module: nn.Module  # the optimizer updates its trainable parameters
    outputs: frozenset[str]  # names of outputs that it can compute besides log-probabilities

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Convert a recorded answer of a prompt to a trajectory (one row of a batch)."""
        ...

    def collate(self, rollouts: Rollouts) -> Batch:
        """Combine trajectories into a padded batch."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model to a folder that the model's library, such as transformers, can load."""

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote, bit for bit."""


@runtime_checkable
class RendersPrompts(Protocol):
    """Renders prompts with the model's chat template: a policy, or its prompt check without weights."""

    def render(self, prompt: Prompt) -> str:
        """Render a prompt with its chat template; media become short placeholders."""
        ...

    def input_hash(self, prompt: Prompt) -> str:
        """Hash the model inputs of a prompt: token ids, then media tensors, separated by a space."""
        ...


@runtime_checkable
class ScoresAnswers(Policy, Protocol):
    """A reward model: its further outputs are scores of answers, and all its log-probabilities are 0."""

    def scores(self, rows: Rollouts, batch_size: int) -> Tensor:
        """Compute the scores (N, labels) of encoded answers, in float64 and on the CPU."""
        ...


@runtime_checkable
class EncodesConversations(Policy, Protocol):
    """A policy that can train on chosen tokens of a recorded conversation, not only on its last answer."""

    def encode_conversation(
        self, prompt: Prompt, outcome: Outcome, *, learn: str, max_length: int = 0
    ) -> Trajectory:
        """Convert a conversation to a trajectory of at most `max_length` tokens; 0: no limit.

        The trained tokens are those of the last answer ("completion"), of all turns of the assistant
        ("assistant"), or of the whole conversation ("all").
        """
        ...


@runtime_checkable
class Portable(Policy, Protocol):
    """A policy that removes recomputable data from a row before the row is sent to another process."""

    def pack(self, row: Trajectory) -> Trajectory:
        """Remove the data of a row that `unpack` can recompute from the row's prompt."""
        ...

    def unpack(self, row: Trajectory) -> Trajectory:
        """Restore a row that another process packed."""
        ...


class Engine(Protocol):
    """A piece that makes rollouts: it generates text, denoises images, or reads stored answers.

    A class lists the tags that it sets on outcomes in `sets_tags`, and sets `reads_answers` if it encodes
    recorded answers of prompts.
    """

    policy: Policy
    notes: frozenset[str]  # names of the values that it records for every step

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Create one rollout per entry of `prompts`, in order; rollouts of the same prompt form a group."""
        ...


@runtime_checkable
class AsyncEngine(Engine, Protocol):
    """An engine that starts rollouts now and returns them later; several steps can be in flight."""

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Start rollouts with the current weights, for the current training step and sampling round.

        A later `rollout` of the same prompt objects and step returns them, in the order of the requests.
        """


@runtime_checkable
class SendsWeights(AsyncEngine, Protocol):
    """An engine that sends weights to servers, which sample the answers.

    The policy may stay sharded while it waits for answers.
    """

    def to_send(self) -> Iterable[Tensor]:
        """List the policy's parameters that are sent to the servers."""
        ...

    def send(self) -> None:
        """Send the current weights to the servers; the caller has unsharded `to_send` on every process."""

    def rest(self) -> None:
        """Put servers to sleep for the learning phase, if configured; called once all answers arrived."""


@runtime_checkable
class ComparesAnswers(Engine, Protocol):
    """An engine that checks servers' log-probabilities against the policy, one forward pass per answer."""

    def compare(self, even: Callable[..., Iterable[tuple]]) -> None:
        """Compare the servers' log-probabilities of the last `rollout` with those of the sharded policy.

        Every process has to call this. `even(list, stand_in)` pads a list of forward-pass inputs, so that all
        processes run equally many passes; a process with an empty list runs `stand_in`.
        """


@runtime_checkable
class WeighsWords(Engine, Protocol):
    """An engine that computes the probability of the first word of an answer, without sampling."""

    def first_words(self, prompts: Sequence[Prompt], words: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return, per prompt and list of words, the probability that the answer starts with one of them."""
        ...


class Sampler(Protocol):
    """A piece that chooses the prompts of a step and the number of rollouts per prompt.

    The first sampler reads the data; each further sampler wraps the sampler before it.
    """

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Return one prompt per rollout; an empty list if no prompt is left."""
        ...


class HeldOut(Protocol):
    """An evaluation of a policy on held-out prompts."""

    data: Sequence[Prompt]

    def measure(self, *, state: TrainerState | None = None) -> Measured:
        """Answer and score every prompt, and compute the metrics; `state` is passed to rewards."""
        ...


class Tracker(Protocol):
    """A dashboard client that sends metrics; only the main process opens it."""

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
        """Return the state as tensors, numbers and strings, nested in dictionaries."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


@runtime_checkable
class Observer(Stateful, Protocol):
    """A piece with state that observes every sampling round of a step, before groups are filtered."""

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update the state after a sampling round; `rollouts` are the rows of `table` on this process."""


@runtime_checkable
class UsesEngine(Protocol):
    """A piece that answers prompts of its own with the engine, or communicates with other processes."""

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Receive the functions `ask` and `tell`; called once, before any prompt is drawn.

        Args:
            ask: Answers prompts with the first engine of the run. Every process has to call it.
            tell: Gathers a JSON value from every process, by rank. Every process has to call it.
        """


@runtime_checkable
class UsesValueModel(Protocol):
    """A piece that estimates the values of prompts before the rollouts, with a model such as a critic."""

    value_model: str  # name of the value model in `references`; empty: none

    def connect_value_model(self, values: Callable[[Sequence[Prompt]], list[float]]) -> None:
        """Receive the function that estimates prompt values; processes must call it with equal prompts."""


@runtime_checkable
class Preparing(Protocol):
    """A sampler that adds learned text to prompts, also in evaluations."""

    def prepare(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts for the engine, with the same uids."""
        ...


@runtime_checkable
class AdvantageObserver(Stateful, Protocol):
    """A piece with state that observes the advantages of every training step."""

    def observe_advantages(self, credit: RewardTable) -> None:
        """Update this piece's state from the final advantages, `credit.values` (N rows, 1, K outcomes)."""


@runtime_checkable
class RecallsRows(Policy, Protocol):
    """A policy that can rebuild a trajectory from the values that the engine recorded for each step."""

    def restore_rows(
        self, prompt: Prompt, notes: Mapping[str, Tensor], transcript: Transcript | None = None
    ) -> Trajectory:
        """Rebuild a trajectory from a prompt and values (T,) per step: "token", "logp", "temperature" etc.

        Conversations also have a `transcript`.
        """
        ...


@runtime_checkable
class Replay(Stateful, Protocol):
    """A piece with state that replays rows of earlier steps, before or after advantages are computed."""

    def replay_before(self, collection: Collection) -> tuple[Tensor, RewardTable]:
        """Return a mask (N,) of rows to keep, and replayed rows to add before advantages are computed."""
        ...

    def replay_after(
        self, collection: Collection, credit: RewardTable
    ) -> tuple[Tensor, RewardTable, RewardTable]:
        """Return a mask (N,) of rows to keep, and replayed rows that already have advantages."""
        ...

    def restore_rows(self, table: RewardTable) -> Rollouts:
        """Rebuild the rollouts of the replayed rows in `table`."""
        ...


@runtime_checkable
class ReadsSteps(Policy, Protocol):
    """A model that can read the trajectories of another policy, as a critic does."""

    def check_steps_of(self, policy: Any) -> None:
        """Raise `ValueError` if the other policy's steps differ in kind (tokens, denoising steps)."""


@runtime_checkable
class RunCallback(Protocol):
    """A callback for events of a training run, on every process, which may end the run."""

    ended: bool  # set True to end the run after the current step

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Handle an event: "train_begin", "step_end", "save" or "train_end".

        `step` counts finished steps. `metrics` are the metrics of the last step, including `eval_` metrics if
        the step ended with an evaluation.
        """
