"""Training from Python with the interface of TRL; the run is the same as from a YAML file."""

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
    """The result of `Trainer.train`, with the fields of transformers' class of the same name."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """An answer of an evaluation, with its prompt, its target and its rewards."""

    prompt: str
    answer: Any  # a text, a PIL image, or the frames of a video as a list of PIL images
    target: Any
    rewards: dict[str, float]  # NaN if a reward does not apply


class Trainer:
    """Trainer of vision-language models and flow-matching image models with published methods.

    The run is identical, bit for bit, to a run of a YAML file with the same contents; `trainer.config` is its
    configuration. A second `train()` with the same `output_dir` resumes from the last checkpoint.
    `Trainer(config=...)` takes a whole configuration: a file, a dictionary or a `Config`. The other arguments
    then change this configuration.

    Args:
        model: Hub id, folder, model of transformers, or pipeline of diffusers. Objects are trained in place;
            trained weights are converted to float32.
        reward_funcs: One reward or several: functions in TRL's or mmrl's form, names such as
            "vision.temporal_iou", or mappings `{"name": ..., "weight": ...}`. By default, the rewards of the
            method. A method that filters groups by its own reward, such as DAPO, uses the first given one.
        args: A `GRPOConfig`, `DPOConfig`, `SFTConfig`, or a dictionary with TRL's names (`{"beta": 0.04}`).
            The dictionary may also have keys of an mmrl configuration, nested (`{"learn": {...}}`) or dotted
            (`{"learn.num_iterations": 2}`). TRL's defaults apply to all settings that the file of `method`
            does not set. For flow models, and for a dictionary with `config`, mmrl's defaults apply.
        train_dataset: A dataset of `datasets`, a list of dictionaries, the path of a file, or a piece
            (`{"name": "vision.grounding", "path": ...}`). Rows for VLMs are read as TRL's conversations.
        eval_dataset: The dataset for evaluations, in the same forms.
        processing_class: The processor, if `model` is an object.
        callbacks: `TrainerCallback`s of transformers, objects or classes.
        peft_config: A `LoraConfig`. An unsupported setting is an error; dropout is 0.
        tools: Functions that the model can call, names ("vision.crop"), or mappings with options.
        environment_factory: A class or function that creates an environment for every rollout, or a mapping
            with the names from which the column `environment` chooses. `get_reward` is added to
            `reward_funcs` with weight 1. Without `train_dataset`, `reset` provides the tasks.
        ref_model: The reference model for preference pairs; its weights must equal the initial `model`.
        quantization_config: A `BitsAndBytesConfig`.
        method: Name of a file under configs/methods, such as "dapo", "flow_grpo" or "dpo" (for preference
            pairs). The default is "grpo", "flow_grpo" for pipelines, or "dpo" and "supervised" for a
            `DPOConfig` and an `SFTConfig`, or for argument names that exist only there.
        config: A whole configuration to start from.
        quiet: Print no progress.
        others: Further arguments of TRL's trainers, accepted only at their defaults.

    Raises: ConfigError: If an argument is unknown, contradictory or missing, before any weights are loaded.
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
        """Train until `max_steps`, starting from the last checkpoint in `output_dir` if there is one.

        Args:
            resume_from_checkpoint: As in transformers; a folder must be the last checkpoint.
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
        """Return the metrics of every reported step, as in `metrics.jsonl`."""
        return self.run.journal.read()

    @property
    def model(self) -> Any:
        """The trained module of the policy."""
        return self.run.policy.module

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate the current policy on `eval_dataset` or another dataset; metrics start with `eval_`."""
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
        """Write the model as a folder for transformers or diffusers, by default to `output_dir`/model."""
        folder = Path(expanded(str(output_dir))) if output_dir else self.run.folder / "model"
        write_model(self.run, folder)
        return folder

    def push_to_hub(self, **names: Any) -> None:
        """Raise `ConfigError` unless `args` sets `push_to_hub`; then the run pushes the model at its end."""
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
            # Reuse the reward objects of the training: other trainers may have re-registered their names.
            evaluator = replace(evaluator, rewards=run.method.rewards)
        return evaluator.measure(state=run.log.state)


class GRPOTrainer(Trainer):
    """`Trainer` whose arguments have the same order as those of TRL's GRPOTrainer."""

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
    """`Trainer` whose arguments have the same order as those of TRL's DPOTrainer."""

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


class SFTTrainer(Trainer):
    """`Trainer` whose arguments have the same order as those of TRL's SFTTrainer."""

    def __init__(
        self, model: Any = None, args: Any = None, data_collator: Any = None, train_dataset: Any = None,
        eval_dataset: Any = None, processing_class: Any = None, compute_loss_func: Any = None,
        compute_metrics: Any = None, callbacks: Any = None, optimizers: Any = None,
        optimizer_cls_and_kwargs: Any = None, preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None, formatting_func: Any = None, **ours: Any,
    ) -> None:  # fmt: skip
        others = dict(
            data_collator=data_collator, compute_loss_func=compute_loss_func, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, formatting_func=formatting_func,
        )  # fmt: skip
        method = "" if args is not None and not isinstance(args, Mapping) else "supervised"
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config,
            **{"method": method, **others, **ours},
        )  # fmt: skip
