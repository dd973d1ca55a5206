"""How mmrl takes every argument of TRL's GRPOConfig and DPOConfig: the table, as data.

The names, defaults and meanings are those of TRL 1.16 and of transformers' TrainingArguments, which both
classes inherit; a few names of earlier versions are listed too. `mmrl.config.trl_arguments` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Argument:
    """An argument of TRL: its default there, and what becomes of it here.

    `how` is "maps" (the same meaning under `key`), "differs" (`note` says how), "ignored" (no effect on what
    is learned; any value is taken) or "absent" (only the default and `accepts` are taken; `note` says what to
    use). `rule` names the function that makes the change where a value alone does not; `values` maps TRL's
    values to those here.
    """

    how: Literal["maps", "differs", "ignored", "absent"]
    default: Any = None
    key: str = ""
    note: str = ""
    rule: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    accepts: tuple[Any, ...] = ()  # besides the default, and besides None where that means "not set"
    dpo: Any = ...  # the default of DPOConfig, where it is another one


def _same(key: str, default: Any, **more: Any) -> Argument:
    return Argument("maps", default, key, **more)


def _absent(default: Any, note: str, *accepts: Any) -> Argument:
    return Argument("absent", default, note=note, accepts=accepts)


def _ignored(note: str, names: str) -> dict[str, Argument]:
    return dict.fromkeys(names.split(), Argument("ignored", note=note))


_ENGINE = "rollout.engine.0"
_BATCHES = (
    "Together with the number of processes: completions of an optimizer step and of a collection. Memory is "
    "limited by `learn.micro_batch_steps` here, which changes no result."
)
_COUNTED = (
    "Optimizer steps there, collections here: divided by the optimizer steps of a collection, rounded up."
)

OBJECTIVE: dict[str, Argument] = {
    "loss_type": Argument(
        "differs",
        "dapo",
        "objective",
        "`bnpo` is a mean over the update and not over a micro-batch, `sft` one over answers; `aot` and "
        "`aot_unpaired`, which sort a micro-batch, are absent: the comparison `aot` sorts a group.",
        rule="objective",
        dpo="sigmoid",
    ),
    "beta": _same(
        "objective.penalty",
        0.0,
        rule="penalty",
        dpo=0.1,
        note="And `references.ref`; of DPO the `beta` of the comparison.",
    ),
    "use_bias_correction_kl": Argument(
        "differs",
        True,
        "objective.penalty",
        "Multiplies by the ratio of the token. With `importance_sampling_level: sequence` set it to False.",
        rule="penalty",
    ),
    "entropy_coef": Argument(
        "differs",
        0.0,
        "objective.penalty",
        "`entropy_bonus`, a mean over all steps. Only with a `loss_type` that is one: dapo, bnpo, cispo.",
        rule="penalty",
    ),
    "epsilon": _same("objective.surrogate.epsilon", 0.2, rule="surrogate"),
    "epsilon_high": _same(
        "objective.surrogate.epsilon_high", None, rule="surrogate", note="Of `cispo`: `clip_max`."
    ),
    "delta": _same("objective.surrogate.delta", None, rule="surrogate"),
    "sapo_temperature_pos": _same("objective.surrogate.temperature_pos", 1.0, rule="surrogate"),
    "sapo_temperature_neg": _same("objective.surrogate.temperature_neg", 1.05, rule="surrogate"),
    "vespo_k_pos": _same("objective.surrogate.k_pos", 2.0, rule="surrogate"),
    "vespo_lambda_pos": _same("objective.surrogate.lambda_pos", 3.0, rule="surrogate"),
    "vespo_k_neg": _same("objective.surrogate.k_neg", 3.0, rule="surrogate"),
    "vespo_lambda_neg": _same("objective.surrogate.lambda_neg", 2.0, rule="surrogate"),
    "importance_sampling_level": _same(
        "objective.ratio", "token", values={"token": "step_ratio", "sequence": "sequence_ratio"}
    ),
    "scale_rewards": _same("advantage", "group", rule="advantage", note="group, batch, none, True or False."),
    "multi_objective_aggregation": _same("advantage", "sum_then_normalize", rule="advantage"),
    "mask_truncated_completions": _same(
        "advantage", False, rule="advantage", note="`drop_truncated`, with `count: drawn`."
    ),
    "top_entropy_quantile": Argument(
        "differs",
        1.0,
        "advantage",
        "`high_entropy` ranks the tokens of the collection as they were sampled, not those of a micro-batch.",
        rule="advantage",
    ),
    "sync_ref_model": _same("references.ref", False, rule="penalty", note="`ema`."),
    "ref_model_mixup_alpha": _same("references.ref.decay", 0.6, rule="penalty", note="decay is 1 - alpha."),
    "ref_model_sync_steps": _same("references.ref.every", 512, rule="penalty"),
    "reward_weights": _same("rewards.0.weight", None, rule="reward_weights", note="One for each reward."),
    "off_policy_mask_threshold": _same(
        "objective.surrogate.threshold",
        None,
        rule="objective",
        note="`off_policy_mask` around the surrogate; only together with `loss_type`.",
    ),
    "use_adaptive_entropy": _absent(False, "Use a schedule as the `coef` of `entropy_bonus`."),
    "router_aux_loss_coef": _absent(None, "Experts are not balanced by a loss here.", 0.0),
    "label_smoothing_factor": _absent(0.0, "Use `label_smoothing` of a comparison."),
    "neftune_noise_alpha": _absent(None, "No noise is added to embeddings here."),
    "loss_weights": _same("objective.compare.0.weight", None, rule="pairs"),
    "label_smoothing": Argument(
        "differs",
        0.0,
        "objective.compare.0.label_smoothing",
        "Only of `robust` and `exo_pair`, as there.",
        rule="pairs",
    ),
    "discopop_tau": _same("objective.compare.0.tau", 0.05, rule="pairs", note="Of `discopop`."),
    "ld_alpha": _same(
        "objective.implicit_reward", None, rule="pairs", note="`ld_log_ratio`. Not with `sigmoid_norm`."
    ),
    "f_divergence_type": _same(
        "objective.implicit_reward",
        "reverse_kl",
        rule="pairs",
        note="`f_divergence`. Not with `ld_alpha` or `sigmoid_norm`.",
    ),
    "f_alpha_divergence_coef": _same("objective.implicit_reward.alpha", 0.5, rule="pairs"),
    "use_weighting": _absent(False, "WPO's weights of pairs are not here."),
}

ROLLOUT: dict[str, Argument] = {
    "num_generations": _same("rollout.num_generations", 8),
    "num_generations_eval": Argument(
        "differs", None, "evaluation.num_generations", "None is `num_generations` there and 1 here."
    ),
    **{
        name: Argument("differs", default, "rollout.num_prompts, learn.minibatches", _BATCHES, rule="batches")
        for name, default in {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": None,
            "generation_batch_size": None,
        }.items()
    },
    "max_completion_length": _same(f"{_ENGINE}.max_completion_length", 512, rule="length"),
    "temperature": _same(f"{_ENGINE}.temperature", 1.0),
    "top_p": _same(f"{_ENGINE}.top_p", 1.0),
    "top_k": _same(f"{_ENGINE}.top_k", 0, values={None: 0, -1: 0}),
    "min_p": _same(f"{_ENGINE}.min_p", None),
    "repetition_penalty": _absent(
        1.0, "Tokens are drawn from the policy as it is; use a reward on repetition."
    ),
    "generation_kwargs": _absent(None, "Use the options of `rollout.engine` (`mmrl list engine`).", {}),
    "chat_template_kwargs": _absent(None, "The template of the model is used as it is.", {}),
    "cache_implementation": _absent(None, f"Use `{_ENGINE}.cache` (`mmrl list cache`)."),
    "use_vllm": _absent(False, "`vision.generate` samples in the process that trains; leave it out."),
    "use_transformers_continuous_batching": _absent(
        False, "`vision.generate` batches by itself; leave it out."
    ),
    "use_transformers_paged": _absent(False, "`vision.generate` batches by itself; leave it out."),
    "max_tool_calling_iterations": Argument(
        "differs",
        None,
        "rollout.engine[1].max_turns",
        "Turns of the policy, one more than replies. Tokens of replies count in no limit here.",
        "turns",
    ),
    "max_prompt_length": Argument("ignored", note="Of earlier versions. Prompts are never cut."),
    "shuffle_dataset": _same("sampler[0].shuffle", True, rule="sampler"),
    "train_sampling_strategy": _absent("random", "Use `shuffle_dataset=False` for data order."),
    "remove_unused_columns": Argument("ignored", note="Rewards may read every column."),
    "max_length": Argument("ignored", note="Nothing is cut: longer pairs are learned from as they are."),
}

TRAINING: dict[str, Argument] = {
    "learning_rate": _same("learn.learning_rate", 1e-6, rule="learning_rate"),
    "lr_scheduler_type": Argument(
        "differs",
        "linear",
        "learn.learning_rate",
        "constant, constant_with_warmup, linear or cosine; constant unless it is given. The first step of a "
        "warmup has a rate above 0, and decay begins at step 0.",
        rule="learning_rate",
    ),
    "lr_scheduler_kwargs": _absent(None, "Write the schedule at `learn.learning_rate`.", {}),
    "warmup_steps": Argument(
        "differs",
        0,
        "learn.learning_rate.warmup_steps",
        f"{_COUNTED} Below 1 it is a share.",
        rule="learning_rate",
    ),
    "warmup_ratio": Argument(
        "differs",
        0.0,
        "learn.learning_rate.warmup_steps",
        "Of earlier versions; needs `max_steps`.",
        rule="learning_rate",
    ),
    "optim": Argument(
        "differs",
        "adamw_torch_fused",
        "learn.optimizer",
        "adamw_torch, adamw_torch_fused, adamw_hf, adamw_bnb_8bit, adamw_8bit, paged_adamw_8bit or sgd.",
        rule="optimizer",
    ),
    "weight_decay": _same("learn.optimizer.weight_decay", 0.0, rule="optimizer"),
    "adam_beta1": _same("learn.optimizer.beta1", 0.9, rule="optimizer"),
    "adam_beta2": _same("learn.optimizer.beta2", 0.999, rule="optimizer"),
    "adam_epsilon": _same("learn.optimizer.eps", 1e-8, rule="optimizer"),
    "optim_args": _absent(None, "Write the options at `learn.optimizer`.", ""),
    "optim_target_modules": _absent(None, "Use `policy.lora_rank` for fewer states of the optimizer."),
    "max_grad_norm": _same("learn.max_grad_norm", 1.0),
    "num_iterations": _same("learn.num_iterations", 1),
    "num_train_epochs": _same("num_train_epochs", 3.0, rule="steps"),
    "max_steps": Argument("differs", -1, "max_steps", _COUNTED, rule="steps"),
    "seed": _same("seed", 42),
    "data_seed": _absent(None, "`seed` is that of the data too."),
    "full_determinism": _absent(
        False, "Draws are seeded one by one; see docs/howto/processes.md for what is exact."
    ),
    "bf16": _same("policy.dtype", None, rule="precision"),
    "fp16": _same("policy.dtype", False, rule="precision"),
    "tf32": _absent(None, "Set torch.backends.cuda.matmul.allow_tf32 in the program.", False),
    "model_init_kwargs": Argument(
        "differs", None, "policy", "Only `dtype` (or `torch_dtype`) and `attn_implementation`.", rule="model"
    ),
    "trust_remote_code": _absent(False, "Models run no code of their repository here."),
    "cast_lm_head_to_fp32": _absent(
        False, "Logits are compared in float32; for a head in float32: `policy.dtype`."
    ),
    "disable_dropout": Argument("ignored", note="Dropout is always off."),
    "gradient_checkpointing": _same("policy.gradient_checkpointing", True, note="False unless it is given."),
    "activation_checkpointing": _same("policy.gradient_checkpointing", None),
    "torch_compile": _absent(False, "Nothing is compiled here."),
    "use_liger_kernel": _absent(False, "Log-probabilities are computed in chunks by themselves."),
    "auto_find_batch_size": _absent(
        False, "Set `learn.micro_batch_steps`; `mmrl estimate-memory` tells the size."
    ),
    "use_cpu": Argument(
        "differs",
        False,
        "",
        "True only where there is no GPU; hide it with CUDA_VISIBLE_DEVICES=.",
        rule="device",
    ),
    "average_tokens_across_devices": _absent(True, "Losses are averaged over all processes."),
    "parallelism_config": _absent(None, "See docs/howto/processes.md."),
    "fsdp": _absent(
        None, "Start with `accelerate launch --config_file`; see docs/howto/processes.md.", "", []
    ),
    "fsdp_config": _absent(
        None, "Start with `accelerate launch --config_file`; see docs/howto/processes.md.", {}
    ),
    "deepspeed": _absent(None, "Start with `accelerate launch --config_file`; see docs/howto/processes.md."),
    "ddp_backend": _absent(None, "The backend of the device is used."),
    "ddp_timeout": _same("ddp_timeout", 1800),
}

OUTPUT: dict[str, Argument] = {
    "output_dir": _same("output_dir", None),
    "overwrite_output_dir": _same("overwrite_output_dir", False, note="Of earlier versions."),
    "logging_steps": Argument("differs", 10, "report.logging_steps", _COUNTED, rule="steps"),
    "logging_strategy": _absent("steps", "Set `logging_steps`."),
    "logging_first_step": _absent(False, "Set `logging_steps=1`."),
    "log_completions": _same("report.log_completions", False, note="As parquet files, not on the console."),
    "log_multimodal": _same("report.media_log_steps", True, values={True: ..., False: 0}),
    "log_completions_hub_repo": _absent(None, "Upload `completions/` of the output folder."),
    "report_to": _same(
        "report.trackers", "none", rule="trackers", note="tensorboard, wandb, trackio or all."
    ),
    "run_name": _same("report.trackers.0.run_name", None, rule="trackers", note="Of wandb and trackio."),
    "project": _same("report.trackers.0.project", "huggingface", rule="trackers"),
    "trackio_space_id": _same("report.trackers.0.space_id", None, rule="trackers"),
    "trackio_bucket_id": _absent(None, "Set `trackio_space_id`."),
    "trackio_static_space_id": _absent(None, "Set `trackio_space_id`."),
    "eval_strategy": Argument(
        "differs", "no", "eval_steps", "no or steps. There is always one after the last step.", rule="steps"
    ),
    "eval_steps": Argument("differs", None, "eval_steps", _COUNTED, rule="steps"),
    "eval_delay": _absent(0, "Evaluations come every `eval_steps` from the start.", None),
    "eval_on_start": _same("eval_on_start", False),
    "include_for_metrics": _absent((), "Metrics are pieces: `evaluation.metrics`.", []),
    "save_strategy": _absent("steps", "Set `save_steps`, and `metric_for_best_model` to keep the best."),
    "save_steps": Argument(
        "differs", 500, "save_steps", f"{_COUNTED} Below 1 it is a share of `max_steps`.", rule="steps"
    ),
    "save_total_limit": _same("save_total_limit", None, values={None: 0}),
    "save_only_model": _absent(False, "A checkpoint can always be resumed."),
    "load_best_model_at_end": Argument(
        "differs",
        False,
        "metric_for_best_model",
        "The best checkpoint is kept besides the latest, and pushed; weights are not loaded again.",
        rule="best",
    ),
    "metric_for_best_model": _same(
        "metric_for_best_model", None, rule="best", note="`eval_` is put before it, as there."
    ),
    "greater_is_better": _same("greater_is_better", None, rule="best"),
    "resume_from_checkpoint": _absent(
        None, "The same command resumes from the last checkpoint of `output_dir`.", True, False
    ),
    "ignore_data_skip": _absent(False, "A resumed run goes on with the prompts that it would have had."),
    "push_to_hub": _same("push_to_hub", False, note="When the run ends."),
    "hub_model_id": _same("hub_model_id", None),
    "hub_private_repo": _same("hub_private_repo", None, note="Here True unless it is given."),
    "hub_strategy": _absent(
        "every_save", "The best model, or else the last, is pushed when the run ends.", "end"
    ),
    "hub_token": _absent(None, "Log in with `hf auth login`, or set HF_TOKEN."),
    "hub_revision": _absent(None, "The main branch is written."),
    "debug": _absent("", "Use `mmrl doctor`.", []),
}

IGNORED: dict[str, Argument] = {
    **_ignored(
        "Of an engine that is not here: without effect where `use_vllm` is False.",
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex "
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
        "vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap transformers_continuous_batching_config",
    ),
    **_ignored(
        "Of a loss that is not here: without effect on the others.",
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    ),
    **_ignored(
        "How memory or time is spent; results are the same.",
        "ds3_gather_for_generation pad_to_multiple_of gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs activation_offloading torch_compile_backend torch_compile_mode "
        "liger_kernel_config use_cache torch_empty_cache_steps per_device_eval_batch_size "
        "eval_accumulation_steps bf16_full_eval fp16_full_eval padding_free precompute_ref_log_probs "
        "precompute_ref_batch_size dataset_num_proc dataloader_drop_last dataloader_num_workers "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph accelerator_config local_rank",
    ),
    **_ignored(
        "Of loops and files of transformers that are not here.",
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
        "label_names length_column_name truncation_mode pad_token do_train do_eval do_predict "
        "save_on_each_node enable_jit_checkpoint hub_always_push save_safetensors logging_dir "
        "restore_callback_states_from_checkpoint skip_memory_metrics log_on_each_node "
        "logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm "
        "num_completions_to_print log_unique_prompts",
    ),
}

PARTS = {
    "Objective": OBJECTIVE,
    "Rollouts and data": ROLLOUT,
    "Training": TRAINING,
    "Output": OUTPUT,
    "No effect": IGNORED,
}
ARGUMENTS: dict[str, Argument] = {name: row for part in PARTS.values() for name, row in part.items()}
_DPO_ONLY = (
    "loss_weights label_smoothing ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting "
    "discopop_tau max_length truncation_mode padding_free precompute_ref_log_probs precompute_ref_batch_size "
    "dataset_num_proc pad_token"
)
DPO_ONLY = frozenset(_DPO_ONLY.split())  # what GRPOConfig does not have
_SHARED = (
    "loss_type beta sync_ref_model ref_model_mixup_alpha ref_model_sync_steps per_device_train_batch_size "
    "gradient_accumulation_steps"
)
SHARED = frozenset(_SHARED.split())  # arguments of objective and batches that both classes have
