"""The arguments of TRL's GRPOConfig, DPOConfig, ModelConfig and ScriptArguments, as a table.

Names, defaults and meanings are those of TRL 1.16 and of transformers' TrainingArguments, which the first two
inherit; a few of earlier versions and of open-r1's recipes are listed too. Every name is in one of three
tables: `NAMES` (what it becomes here), `REFUSED` (taken at neutral values only), `NEUTRAL` (taken at any).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Name(NamedTuple):
    """An argument that has a key here.

    Args:
        key: The dotted key; of several, the one that says whether a file gives it.
        default: TRL's default.
        rule: The function of `mmrl.trl.objective` or `mmrl.trl.run` that makes the change where a value alone
            does not.
        note: What differs; printed for a run where the argument is given.
        values: TRL's values to those here; `...` changes nothing.
        dpo: The default of DPOConfig, where it is another one.
    """

    key: str
    default: Any = None
    rule: str = ""
    note: str = ""
    values: Mapping[Any, Any] = {}
    dpo: Any = ...


ENGINE = "rollout.engine.0"
_COUNTED = "Optimizer steps there, collections here: divided by the optimizer steps of a collection."
_VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
_LEVELS = {"token": "step_ratio", "sequence": "sequence_ratio"}
_RATE = "learn.learning_rate"

GRPO: dict[str, Name] = {
    "use_bias_correction_kl": Name(
        "objective.penalty", True, "penalty", "The ratio of the token; with the level `sequence`: False."
    ),
    "entropy_coef": Name("objective.penalty", 0.0, "penalty", "A mean over all steps: `entropy_bonus`."),
    "epsilon": Name("objective.surrogate", 0.2, "surrogate"),
    "epsilon_high": Name("objective.surrogate", None, "surrogate"),
    "delta": Name("objective.surrogate", None, "surrogate"),
    "sapo_temperature_pos": Name("objective.surrogate", 1.0, "surrogate"),
    "sapo_temperature_neg": Name("objective.surrogate", 1.05, "surrogate"),
    **{f"vespo_{name}": Name("objective.surrogate", value, "surrogate") for name, value in _VESPO.items()},
    "importance_sampling_level": Name("objective.ratio", "token", values=_LEVELS),
    "scale_rewards": Name("advantage", "group", "advantage"),
    "multi_objective_aggregation": Name("advantage", "sum_then_normalize", "advantage"),
    "mask_truncated_completions": Name("advantage", False, "advantage"),
    "top_entropy_quantile": Name(
        "advantage", 1.0, "advantage", "Ranks the tokens of the collection, not those of a micro-batch."
    ),
    "reward_weights": Name("rewards", None, "rewards"),
    "off_policy_mask_threshold": Name("objective.surrogate", None, "objective"),
    "num_generations": Name("rollout.num_generations", 8),
    "num_generations_eval": Name("evaluation.num_generations", None, note="1 where it is not given."),
    "steps_per_generation": Name("rollout.num_prompts", None, "batches"),
    "generation_batch_size": Name("rollout.num_prompts", None, "batches"),
    "max_completion_length": Name(f"{ENGINE}.max_completion_length", 512, "length"),
    "temperature": Name(f"{ENGINE}.temperature", 1.0),
    "top_p": Name(f"{ENGINE}.top_p", 1.0),
    "top_k": Name(f"{ENGINE}.top_k", 0, values={-1: 0}),
    "min_p": Name(f"{ENGINE}.min_p", None),
    "max_tool_calling_iterations": Name(
        "rollout.engine.1.max_turns", None, "turns", "Tokens of replies count in no limit."
    ),
    "shuffle_dataset": Name("sampler", True, "sampler"),
    "num_iterations": Name("learn.num_iterations", 1),
    "log_multimodal": Name("report.media_log_steps", True, values={True: ..., False: 0}),
}
DPO: dict[str, Name] = {
    "loss_weights": Name("objective.compare", None, "pairs"),
    "label_smoothing": Name("objective.compare", 0.0, "pairs"),
    "discopop_tau": Name("objective.compare", 0.05, "pairs"),
    "ld_alpha": Name("objective.implicit_reward", None, "pairs"),
    "f_divergence_type": Name("objective.implicit_reward", "reverse_kl", "pairs"),
    "f_alpha_divergence_coef": Name("objective.implicit_reward", 0.5, "pairs"),
}
BOTH: dict[str, Name] = {
    "loss_type": Name(
        "objective.aggregation",
        "dapo",
        "objective",
        "`bnpo` is a mean over the update, not over a micro-batch; `sft` one over answers.",
        dpo="sigmoid",
    ),
    "beta": Name("objective.penalty", 0.0, "penalty", dpo=0.1),
    "sync_ref_model": Name("references.ref", False, "penalty"),
    "ref_model_mixup_alpha": Name("references.ref", 0.6, "penalty"),
    "ref_model_sync_steps": Name("references.ref", 512, "penalty"),
    "per_device_train_batch_size": Name("rollout.num_prompts", 8, "batches"),
    "gradient_accumulation_steps": Name("rollout.num_prompts", 1, "batches"),
    "num_processes": Name("rollout.num_prompts", None, "batches", "It counts, however many processes run."),
    "learning_rate": Name(_RATE, 1e-6, "learning_rate"),
    "lr_scheduler_type": Name(_RATE, "linear", "learning_rate", "Decay begins at step 0."),
    "lr_scheduler_kwargs": Name(_RATE, None, "learning_rate"),
    "warmup_steps": Name(_RATE, 0, "learning_rate", "The first step has a rate above 0."),
    "warmup_ratio": Name(_RATE, 0.0, "learning_rate", "The first step has a rate above 0."),
    "optim": Name("learn.optimizer", "adamw_torch_fused", "optimizer"),
    "weight_decay": Name("learn.optimizer", 0.0, "optimizer"),
    "adam_beta1": Name("learn.optimizer", 0.9, "optimizer"),
    "adam_beta2": Name("learn.optimizer", 0.999, "optimizer"),
    "adam_epsilon": Name("learn.optimizer", 1e-8, "optimizer"),
    "max_grad_norm": Name("learn.max_grad_norm", 1.0),
    "num_train_epochs": Name("num_train_epochs", 3.0, "length_of_run"),
    "max_steps": Name("max_steps", -1, "length_of_run", _COUNTED),
    "seed": Name("seed", 42),
    "bf16": Name("policy.dtype", None, "model"),
    "fp16": Name("policy.dtype", False, "model"),
    "model_init_kwargs": Name("policy.attn_implementation", None, "model"),
    "gradient_checkpointing": Name("policy.gradient_checkpointing", True, "checkpointing"),
    "activation_checkpointing": Name("policy.gradient_checkpointing", None, "checkpointing"),
    "use_cpu": Name("", False, "device"),
    "ddp_timeout": Name("ddp_timeout", 1800),
    "output_dir": Name("output_dir", None),
    "overwrite_output_dir": Name("overwrite_output_dir", None),
    "logging_steps": Name("report.logging_steps", 10, "logging", _COUNTED),
    "report_to": Name("report.trackers", "none", "trackers"),
    "run_name": Name("report.trackers", None, "trackers"),
    "project": Name("report.trackers", "huggingface", "trackers"),
    "wandb_project": Name("report.trackers", None, "trackers"),
    "trackio_space_id": Name("report.trackers", None, "trackers"),
    "eval_strategy": Name("eval_steps", "no", "evaluations", "There is always one after the last step."),
    "eval_steps": Name("eval_steps", None, "evaluations", _COUNTED),
    "eval_on_start": Name("eval_on_start", False),
    "save_strategy": Name("save_steps", "steps", "saves", "A checkpoint is always written at the end."),
    "save_steps": Name("save_steps", 500, "saves", _COUNTED),
    "save_total_limit": Name("save_total_limit", None, "saves"),
    "load_best_model_at_end": Name(
        "metric_for_best_model", False, "best", "The best one is kept and pushed, not loaded again."
    ),
    "metric_for_best_model": Name("metric_for_best_model", None, "best"),
    "greater_is_better": Name("greater_is_better", None, "best"),
    "push_to_hub": Name("push_to_hub", False, note="When the run ends."),
    "hub_model_id": Name("hub_model_id", None),
    "hub_private_repo": Name("hub_private_repo", None),
}
MODEL: dict[str, Name] = {
    "model_name_or_path": Name("policy.model", None),
    "dtype": Name("policy.dtype", None, "model"),
    "torch_dtype": Name("policy.dtype", None, "model"),
    "attn_implementation": Name("policy.attn_implementation", None, "model"),
    "use_peft": Name("policy.lora_rank", False, "adapter"),
    "lora_r": Name("policy.lora_rank", 16, "adapter"),
    "lora_alpha": Name("policy.lora_alpha", 32, "adapter"),
    "lora_dropout": Name("policy.lora_rank", 0.05, "adapter"),
    "lora_target_modules": Name("policy.lora_target_modules", None, "adapter"),
    "use_rslora": Name("policy.lora_alpha", False, "adapter"),
    "load_in_8bit": Name("policy.transform", False, "quantization"),
    "load_in_4bit": Name("policy.transform", False, "quantization"),
    "bnb_4bit_quant_type": Name("policy.transform", "nf4", "quantization"),
    "use_bnb_nested_quant": Name("policy.transform", False, "quantization"),
    "dataset_name": Name("data.path", None, "dataset"),
    "system_prompt": Name("data.system_prompt", None, "dataset"),
    "reward_funcs": Name("rewards", None, "rewards"),
}
NAMES: dict[str, Name] = {**GRPO, **DPO, **BOTH, **MODEL}

_LAUNCH = "Start with `accelerate launch --config_file`; see docs/howto/processes.md."
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {  # what to do, and the values that are taken besides None
    "use_adaptive_entropy": ("Use a schedule as the `coef` of `entropy_bonus`.", (False,)),
    "router_aux_loss_coef": ("Experts are not balanced by a loss here.", (0.0,)),
    "label_smoothing_factor": ("Use `label_smoothing` of a comparison.", (0.0,)),
    "neftune_noise_alpha": ("No noise is added to embeddings here.", (0.0,)),
    "use_weighting": ("WPO's weights of pairs are in `methods/preference/wpo.yaml`.", (False,)),
    "repetition_penalty": ("Tokens are drawn from the policy itself; use a reward on repetition.", (1.0,)),
    "generation_kwargs": ("Use the options of `rollout.engine` (`mmrl list engine`).", ({},)),
    "chat_template_kwargs": ("The template of the model is used as it is.", ({},)),
    "chat_template": ("Save the model's folder with this template.", ("",)),
    "cache_implementation": (f"Use `{ENGINE}.cache` (`mmrl list cache`).", ()),
    "train_sampling_strategy": ("Use `shuffle_dataset=False` for data order.", ("random",)),
    "optim_args": ("Write the options at `learn.optimizer`.", ("",)),
    "optim_target_modules": ("Use `policy.lora_rank` for fewer states of the optimizer.", ([],)),
    "data_seed": ("`seed` is that of the data too.", ()),
    "full_determinism": ("See docs/howto/processes.md for what is exact.", (False,)),
    "tf32": ("Set torch.backends.cuda.matmul.allow_tf32 in the program.", (False,)),
    "trust_remote_code": ("Models run no code of their repository here.", (False,)),
    "cast_lm_head_to_fp32": ("For a head in float32: `policy.dtype`.", (False,)),
    "auto_find_batch_size": ("Set `learn.micro_batch_steps`; `mmrl estimate-memory` tells it.", (False,)),
    "average_tokens_across_devices": ("Losses are averaged over all processes.", (True,)),
    "parallelism_config": (_LAUNCH, ()),
    "fsdp": (_LAUNCH, ("", [], False)),
    "fsdp_config": (_LAUNCH, ({},)),
    "deepspeed": (_LAUNCH, ("", {})),
    "ddp_backend": ("The backend of the device is used.", ("nccl", "gloo")),
    "logging_strategy": ("Set `logging_steps`.", ("steps",)),
    "log_completions_hub_repo": ("Upload `completions/` of the output folder.", ()),
    "trackio_bucket_id": ("Set `trackio_space_id`.", ()),
    "trackio_static_space_id": ("Set `trackio_space_id`.", (False,)),
    "eval_delay": ("Evaluations come every `eval_steps` from the start.", (0,)),
    "include_for_metrics": ("Metrics are pieces: `evaluation.metrics`.", ([],)),
    "save_only_model": ("A checkpoint can always be resumed.", (False,)),
    "resume_from_checkpoint": ("The same command goes on from `output_dir`'s last one.", (True, False)),
    "ignore_data_skip": ("A resumed run goes on with the prompts that it would have had.", (False,)),
    "hub_strategy": ("The model is pushed when the run ends.", ("every_save", "end")),
    "hub_token": ("Log in with `hf auth login`, or set HF_TOKEN.", ()),
    "hub_revision": ("The main branch is written.", ("main",)),
    "debug": ("Use `mmrl doctor`.", ("", [])),
    "model_revision": ("Download it with `hf download --revision`, and name the folder.", ("main",)),
    "lora_target_parameters": ("Name layers in `lora_target_modules`.", ([],)),
    "lora_modules_to_save": ("Adapters are trained alone; leave it out, or `use_peft`.", ([],)),
    "lora_task_type": ("Models that write text are trained here.", ("CAUSAL_LM",)),
    "use_dora": ("Set it to False: adapters are LoRA.", (False,)),
    "bnb_4bit_quant_storage": ("Weights are stored as uint8.", ("uint8",)),
    "push_to_hub_revision": ("Set `push_to_hub`: the main branch is written when the run ends.", (False,)),
    "callbacks": ("Give them to `mmrl.Trainer(callbacks=...)`.", ([],)),
}

_NEUTRAL = {
    "Answers are drawn by `vision.generate` in the process that trains.": "use_vllm "
    "use_transformers_continuous_batching use_transformers_paged vllm_mode vllm_device vllm_dtype "
    "vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_max_model_len vllm_tensor_parallel_size vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_cap transformers_continuous_batching_config remote_gen_model_url",
    "Prompts and answers of pairs are never cut.": "max_prompt_length max_length truncation_mode",
    "Dropout is always off.": "disable_dropout",
    "Rows of completions are always stored as parquet, and not printed.": "log_completions "
    "num_completions_to_print log_unique_prompts wandb_log_unique_prompts",
    "Without effect on the losses that are here.": "entropy_coef_min entropy_coef_max entropy_coef_delta "
    "entropy_target",
    "How memory or time is spent; results are the same.": "ds3_gather_for_generation pad_to_multiple_of "
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_offloading "
    "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache "
    "torch_empty_cache_steps per_device_eval_batch_size eval_accumulation_steps bf16_full_eval "
    "fp16_full_eval padding_free precompute_ref_log_probs precompute_ref_batch_size dataset_num_proc "
    "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph accelerator_config "
    "local_rank preprocessing_num_workers",
    "Of loops and files of transformers that are not here.": "prediction_loss_only eval_do_concat_batches "
    "eval_use_gather_object batch_eval_metrics label_names length_column_name pad_token do_train do_eval "
    "do_predict save_on_each_node enable_jit_checkpoint hub_always_push save_safetensors logging_dir "
    "restore_callback_states_from_checkpoint skip_memory_metrics log_on_each_node logging_nan_inf_filter "
    "include_num_input_tokens_seen log_level log_level_replica disable_tqdm remove_unused_columns "
    "logging_first_step ignore_bias_buffers",
    "Read by the script that loads data and rewards, never by the trainer.": "dataset_config dataset_configs "
    "dataset_train_split dataset_test_split dataset_streaming dataset_prompt_column dataset_mixture "
    "benchmarks wandb_entity wandb_run_group hub_model_revision overwrite_hub_revision code_language "
    "code_provider code_eval_test_batch_size parallel_code_exec_per_proc e2b_router_url morph_router_url "
    "ioi_provider cosine_min_value_wrong cosine_max_value_wrong cosine_min_value_correct "
    "cosine_max_value_correct cosine_max_len repetition_n_grams repetition_max_penalty "
    "reward_model_name_or_path max_completion_len soft_punish_cache",
}
NEUTRAL: dict[str, str] = {name: words for words, names in _NEUTRAL.items() for name in names.split()}
DPO_ONLY = frozenset(
    {*DPO, "use_weighting", "truncation_mode", "padding_free", "precompute_ref_log_probs", "max_length"}
)
DIFFERS = (  # of every run, whatever is given
    "trained weights and their optimizer are in float32; dropout is off, that of adapters too",
    "`max_steps`, `save_steps` and the learning rate count collections, not optimizer steps",
)


def advice(key: str) -> str:
    """Say what an argument of TRL is here, for an error about a key; empty for another name."""
    if key in NAMES:
        here = f"; here it is {NAMES[key].key}" if NAMES[key].key else ""
        return f"that is an argument of TRL{here}; as it is, it goes into a mapping: `trl: {{{key}: ...}}`"
    words = REFUSED[key][0] if key in REFUSED else NEUTRAL.get(key, "")
    return f"that is an argument of TRL, which is not here. {words}" if words else ""
