"""Adapters for callbacks of transformers (`TrainerCallback`), such as `EarlyStoppingCallback`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from mmrl.config.schema import Config
from mmrl.training.trainer import Run


class CallbackAdapter:
    """Adapter that calls a callback with arguments, state and control as transformers' trainer would.

    `on_step_begin` and methods for events inside a step are never called. The only flag of `control` that is
    read is `should_training_stop`: the run ends after the step, with a last evaluation and a checkpoint.
    """

    def __init__(self, callback: Any, run: Run) -> None:
        from transformers.trainer_callback import TrainerControl, TrainerState

        self.callback, self.run = callback, run
        self.arguments, self.control = training_arguments(run.config), TrainerControl()
        self.state = TrainerState(max_steps=run.config.max_steps, is_world_process_zero=run.processes.main)

    @property
    def ended(self) -> bool:
        """Whether the callback has requested to stop the training."""
        return self.control.should_training_stop

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Call the callback's methods for an event of the run, such as `on_step_end` and `on_log`."""
        self.state.global_step, callback = step, self.callback
        match event:
            case "train_begin" if not self.ended:  # not on a resumed run: it would reset the stop flag
                self._call(callback.on_train_begin)
            case "step_end":
                record = {**metrics, "step": step}
                self.state.log_history.append(record)
                self._call(callback.on_step_end)
                self._call(callback.on_log, logs=record)
                if any(name.startswith("eval_") for name in metrics):
                    self._call(callback.on_evaluate, metrics=record)
                    self._note_best(record)
            case "save":
                self._call(callback.on_save)
            case "train_end":
                self._call(callback.on_train_end)

    def _call(self, method: Callable[..., Any], **more: Any) -> None:
        parts = {"model": self.run.policy.module, "optimizer": self.run.learner.optimizer, **more}
        self.control = method(self.arguments, self.state, self.control, **parts) or self.control

    def _note_best(self, record: Mapping[str, float]) -> None:
        """Update the best metric, as transformers does after it has called `on_evaluate`."""
        value, best = record.get(self.arguments.metric_for_best_model or ""), self.state.best_metric
        if value is None:
            return
        if best is None or (value > best if self.arguments.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step


class StatefulCallbackAdapter(CallbackAdapter):
    """Adapter that stores a callback's exported `state()` and its stop flag in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's exported attributes, its stop flag, and the best metric so far."""
        return {
            "attributes": self.callback.state()["attributes"],
            "ended": self.ended,
            "best_metric": self.state.best_metric,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values that `state_dict` returned."""
        for name, value in state["attributes"].items():
            setattr(self.callback, name, value)
        self.control.should_training_stop = state["ended"]
        self.state.best_metric = state["best_metric"]


def add_callback(run: Run, callback: Any) -> None:
    """Add a callback of transformers (an object or a class) to a run that has not started."""
    from transformers import TrainerCallback

    match callback() if isinstance(callback, type) else callback:
        case TrainerCallback(state=_) as instance:  # such callbacks are an `ExportableState`
            adapter = StatefulCallbackAdapter(instance, run)
        case TrainerCallback() as instance:
            adapter = CallbackAdapter(instance, run)
        case other:
            raise TypeError(f"a callback must be a transformers.TrainerCallback, not {other!r}")
    number = sum(place.startswith("callbacks[") for place in run.pieces.made)
    run.pieces.made[f"callbacks[{number}]"] = adapter


def training_arguments(config: Config) -> SimpleNamespace:
    """Return an object with the attributes of transformers' `TrainingArguments` that mmrl supports."""
    evaluates = bool(config.eval_steps and config.evaluation.data)
    rate = config.learn.learning_rate
    return SimpleNamespace(
        output_dir=config.output_dir,
        max_steps=config.max_steps,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.eval_steps or None,
        save_strategy="steps",
        save_steps=config.save_steps,
        save_total_limit=config.save_total_limit,
        logging_strategy="steps",
        logging_steps=config.report.logging_steps,
        learning_rate=rate.get("start") if isinstance(rate, Mapping) else rate,
        max_grad_norm=config.learn.max_grad_norm,
        metric_for_best_model=config.metric_for_best_model or None,
        greater_is_better=config.greater_is_better,
        load_best_model_at_end=False,  # the policy keeps its last weights
        num_train_epochs=None,
        seed=config.seed,
        push_to_hub=config.push_to_hub,
        report_to=[tracker.name for tracker in config.report.trackers],
    )
