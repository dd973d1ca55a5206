"""Training from Python in the habit of TRL: objects and functions, and the same run as from YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.api.callbacks import add_callback
from mmrl.api.configuration import Factories, Reward, Tool, check_others, configuration, data_piece
from mmrl.build import build, held_out, make_evaluator
from mmrl.config.loading import ConfigError, expanded
from mmrl.config.schema import Config, as_piece, as_plain
from mmrl.core.reward_table import Measured
from mmrl.inference.session import as_answer
from mmrl.reporting.metrics import describe_measured
from mmrl.runtime.checkpoint import checkpoints
from mmrl.training.checkpointing import check_output_folder, write_model
from mmrl.training.loop import train


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns, as that of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """An answer of an evaluation, with its prompt, its target and its rewards."""

    prompt: str
    answer: Any  # a text, an image of PIL, or the frames of a video as a list of these
    target: Any
    rewards: dict[str, float]  # NaN where a reward does not apply


class Trainer:
    """Trains a vision-language model or a flow-matching image model with a published method.

    The run is the one of a YAML file with the same contents, bit for bit: `trainer.config` is its
    configuration. A second `train()` of the same `output_dir` resumes from the last checkpoint.
    `Trainer(config=...)` takes a whole configuration: a file, a dictionary or a `Config`; what is given
    beside it changes it.

    Args:
        model: Hub id, folder, a model of transformers, or a pipeline of diffusers. Objects are trained in
            place; weights that are trained become float32.
        reward_funcs: One reward or several: functions in TRL's form or mmrl's, names such as
            "vision.temporal_iou", or mappings `{"name": ..., "weight": ...}`. Left out, those of the method.
            A method that filters groups by a reward of its own, as DAPO does, filters by the first one.
        args: A `GRPOConfig`, a `DPOConfig`, or a dictionary of TRL's names (`{"beta": 0.04}`), which may have
            keys of an mmrl configuration too, nested (`{"learn": {...}}`) or dotted
            (`{"learn.num_iterations": 2}`). What neither they nor the file of another method say is TRL's
            default; of a flow model, and of a dictionary beside `config`, it is mmrl's.
        train_dataset: A dataset of `datasets`, a list of dictionaries, the path of a file, or a piece
            (`{"name": "vision.grounding", "path": ...}`). Rows of VLMs are read as TRL's conversations.
        eval_dataset: The same for evaluations.
        processing_class: The processor of a model that is an object.
        callbacks: `TrainerCallback`s of transformers, objects or classes.
        peft_config: A `LoraConfig`. What cannot be taken of it is an error; its dropout is 0 here.
        tools: Functions that the model may call, also by name ("vision.crop") or as mappings with options.
        environment_factory: A class or function that makes an environment for every rollout, or several by
            the names that the column `environment` chooses from. What its `get_reward` gives is a reward
            beside `reward_funcs`, of weight 1. Without `train_dataset` its `reset` says what is to be done.
        ref_model: The model that pairs are compared with: it must have the weights that `model` begins with.
        quantization_config: A `BitsAndBytesConfig`.
        method: Name of a file under configs/methods, such as "dapo", "flow_grpo" or "dpo" (whose rows are
            preference pairs); by default "grpo", "dpo" for a `DPOConfig` or names that it alone has, and
            "flow_grpo" for pipelines.
        config: A whole configuration to begin with.
        quiet: Print no progress.
        others: Further arguments of TRL's trainers, which may be left at their defaults.

    Raises:
        ConfigError: Where something is unknown, contradictory or missing, before a weight is loaded.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        *,
        tools: Sequence[Tool] | None = None,
        environment_factory: Factories | None = None,
        ref_model: Any = None,
        quantization_config: Any = None,
        method: str = "",
        config: str | Path | Mapping[str, Any] | Config | None = None,
        quiet: bool = False,
        **others: Any,
    ) -> None:
        check_others(others)
        self.config = configuration(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, peft_config,
            tools=tools, environment_factory=environment_factory, ref_model=ref_model,
            quantization_config=quantization_config, method=method, config=config,
        )  # fmt: skip
        check_output_folder(self.config)
        self.run = build(self.config, quiet=quiet)
        for callback in callbacks or ():
            add_callback(self.run, callback)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train until `max_steps`, from the last checkpoint of `output_dir` if there is one.

        Args:
            resume_from_checkpoint: As in transformers; of folders only the last checkpoint.
        """
        if isinstance(resume_from_checkpoint, str | Path):
            last = next(iter(checkpoints(self.run.folder)), None)
            if last is None or Path(resume_from_checkpoint).resolve() != last.resolve():
                raise ConfigError(
                    f"'resume_from_checkpoint' is '{resume_from_checkpoint}', but the run goes on from "
                    f"its last checkpoint ({last or 'there is none'}); name "
                    "that, or set `init_from` to the other one"
                )
        train(self.run)
        metrics = dict(self.run.progress.reported)
        if self.run.final is not None:
            metrics |= describe_measured(self.run.final)
        losses = [record["loss"] for record in self.history if record.get("loss") is not None]
        mean = sum(losses) / len(losses) if losses else float("nan")
        return TrainOutput(self.run.progress.step, mean, metrics)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of every reported step, as in `metrics.jsonl`."""
        return self.run.journal.read()

    @property
    def model(self) -> Any:
        """The trained module."""
        return self.run.policy.module

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Measure the policy as it is now on `eval_dataset` or another one; metrics begin with `eval_`."""
        return describe_measured(self._measure(eval_dataset))

    def predict(self, test_dataset: Any = None) -> list[Prediction]:
        """Answer and score every prompt of `eval_dataset` or another dataset."""
        measured = self._measure(test_dataset)
        rewards = {name: measured.table.at_end(name).tolist() for name in measured.table.scored}
        predictions = []
        for row, *scores in zip(measured.rollouts, *rewards.values(), strict=True):
            answer, scored = as_answer(row.outcomes[-1]), dict(zip(rewards, scores, strict=True))
            predictions.append(Prediction(row.prompt.text, answer, row.prompt.target, scored))
        return predictions

    def save_model(self, output_dir: str | Path = "") -> Path:
        """Write the model as a folder that its library loads, by default `output_dir`/model."""
        folder = Path(expanded(str(output_dir))) if output_dir else self.run.folder / "model"
        write_model(self.run, folder)
        return folder

    def push_to_hub(self, **names: Any) -> None:
        """Check that the model is pushed: a run with `push_to_hub` does it when it ends."""
        if not self.config.push_to_hub:
            raise ConfigError("set `push_to_hub` and `hub_model_id` in `args`: the run pushes when it ends")

    def _measure(self, dataset: Any) -> Measured:
        if dataset is None:
            if self.run.evaluator is None:
                raise ConfigError("there is no evaluation data; give `eval_dataset`, here or to the trainer")
            return self.run.evaluator.measure(state=self.run.log.state)
        changed = data_piece("test_dataset", dataset, "test", as_plain(self.config.data))
        evaluation = replace(self.config.evaluation, data=as_piece(changed, "evaluation.data"), num_prompts=0)
        config = replace(self.config, evaluation=evaluation)
        prompts, run = held_out(config), self.run
        evaluator = make_evaluator(config, prompts, run.policy, run.processes)
        if not self.config.evaluation.rewards:
            # Those of the training itself: by now another trainer may have handed over others of these names.
            evaluator = replace(evaluator, rewards=run.method.rewards)
        return evaluator.measure(state=run.log.state)


class GRPOTrainer(Trainer):
    """`Trainer` with the arguments of TRL's GRPOTrainer in their order."""

    def __init__(
        self, model: Any = None, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, reward_processing_classes: Any = None,
        callbacks: Any = None, optimizers: Any = None, quantization_config: Any = None,
        peft_config: Any = None, tools: Any = None, rollout_func: Any = None,
        environment_factory: Any = None, **ours: Any,
    ) -> None:  # fmt: skip
        ours = {"reward_processing_classes": reward_processing_classes, "optimizers": optimizers, **ours}
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config,
            tools=tools, environment_factory=environment_factory, quantization_config=quantization_config,
            rollout_func=rollout_func, **ours,
        )  # fmt: skip


class DPOTrainer(Trainer):
    """`Trainer` with the arguments of TRL's DPOTrainer in their order."""

    def __init__(
        self, model: Any = None, ref_model: Any = None, args: Any = None, data_collator: Any = None,
        train_dataset: Any = None, eval_dataset: Any = None, processing_class: Any = None,
        compute_metrics: Any = None, callbacks: Any = None, optimizers: Any = None,
        quantization_config: Any = None, peft_config: Any = None, **ours: Any,
    ) -> None:  # fmt: skip
        others = dict(data_collator=data_collator, compute_metrics=compute_metrics, optimizers=optimizers)
        method = "" if args is not None and not isinstance(args, Mapping) else "dpo"
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config,
            ref_model=ref_model, quantization_config=quantization_config,
            **{"method": method, **others, **ours},
        )  # fmt: skip
