"""The arguments of TRL's GRPOConfig, DPOConfig, SFTConfig, ModelConfig and ScriptArguments, as a table.

Names, defaults and meanings are those of TRL 1.16 and of transformers' TrainingArguments, from which the
first three inherit. A few names of earlier versions and of open-r1's recipes are included. Every name is in
one of three tables: `NAMES` (translated to a key of mmrl), `REFUSED` (accepted only at neutral values),
`NEUTRAL` (accepted at any value, without effect).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Name(NamedTuple):
    """An argument of TRL that is translated to a configuration key of mmrl.

    Args:
        key: The dotted key. If `rule` sets several keys: if a file sets this one, TRL's default is not used.
        default: TRL's default.
        rule: Function in `mmrl.trl.objective` or `mmrl.trl.run` that translates the argument; empty: copy.
        note: How mmrl differs from TRL in this argument; printed if the argument is given.
        values: Maps values of TRL to values of mmrl; `...` leaves the key unchanged.
        dpo: The default in DPOConfig, if it is different.
        sft: The default in SFTConfig, if it is different.
    """

    key: str
    default: Any = None
    rule: str = ""
    note: str = ""
    values: Mapping[Any, Any] = {}
    dpo: Any = ...
    sft: Any = ...


def _rows(key: str, rule: str = "", note: str = "", **defaults: Any) -> dict[str, Name]:
    """Create table entries for arguments that share a key and a rule; `defaults` maps names to defaults."""
    return {name: Name(key, default, rule, note) for name, default in defaults.items()}


ENGINE = "rollout.engine.0"
_COUNTED = "Optimizer steps there, collections here: divided by the optimizer steps of a collection."
_RATE, _SURROGATE = "learn.learning_rate", "objective.surrogate"

GRPO: dict[str, Name] = {
    **_rows("objective.penalty", "penalty", "The ratio of the token; with the level `sequence`: False.",
            use_bias_correction_kl=True),
    **_rows("objective.penalty", "penalty", "A mean over all steps: `entropy_bonus`.", entropy_coef=0.0),
    **_rows(_SURROGATE, "surrogate", epsilon=0.2, epsilon_high=None, delta=None, sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
            vespo_lambda_neg=2.0),
    "importance_sampling_level": Name(
        "objective.ratio", "token", values={"token": "step_ratio", "sequence": "sequence_ratio"}
    ),
    **_rows("advantage", "advantage", scale_rewards="group", mask_truncated_completions=False,
            multi_objective_aggregation="sum_then_normalize"),
    **_rows("advantage", "advantage", "Ranks the tokens of the collection, not those of a micro-batch.",
            top_entropy_quantile=1.0),
    **_rows("rewards", "rewards", reward_weights=None),
    **_rows(_SURROGATE, "objective", off_policy_mask_threshold=None),
    **_rows("policy.chat_template_kwargs", chat_template_kwargs=None),
    **_rows("rollout.num_generations", num_generations=8),
    **_rows("evaluation.num_generations", "", "1 where it is not given.", num_generations_eval=None),
    **_rows("rollout.num_prompts", "batches", steps_per_generation=None, generation_batch_size=None),
    **_rows(f"{ENGINE}.max_completion_length", "length", max_completion_length=512),
    **_rows(f"{ENGINE}.temperature", temperature=1.0),
    **_rows(f"{ENGINE}.top_p", top_p=1.0),
    "top_k": Name(f"{ENGINE}.top_k", 0, values={-1: 0}),
    **_rows(f"{ENGINE}.min_p", min_p=None),
    **_rows("rollout.engine.1.max_turns", "turns", "Tokens of replies count in no limit.",
            max_tool_calling_iterations=None),
    "shuffle_dataset": Name("sampler", True, "sampler", sft=False),
    **_rows("learn.num_iterations", num_iterations=1),
    "log_multimodal": Name("report.media_log_steps", True, values={True: ..., False: 0}),
}  # fmt: skip
DPO: dict[str, Name] = {
    **_rows("objective.compare", "pairs", loss_weights=None, label_smoothing=0.0, discopop_tau=0.05),
    **_rows("objective.implicit_reward", "pairs", ld_alpha=None, f_divergence_type="reverse_kl",
            f_alpha_divergence_coef=0.5),
}  # fmt: skip
SFT: dict[str, Name] = {
    **_rows("policy.packing", "rows", "A batch counts rows, not blocks of `max_length` tokens.",
            packing=False),
    **_rows(f"{ENGINE}.completion_only_loss", "rows", "None: True.", completion_only_loss=None),
    **_rows(f"{ENGINE}.assistant_only_loss", "rows", "Turns are written as the last one is.",
            assistant_only_loss=False),
}  # fmt: skip
SHARED: dict[str, Name] = {  # arguments of both DPOConfig and SFTConfig
    **_rows("", "rows", "Nothing is ever cut: of SFT, a longer row is an error (`bad_rows: drop`).",
            max_length=1024),
    **_rows("", "rows", "Of SFT: as `packing`.", padding_free=False),
}  # fmt: skip
BOTH: dict[str, Name] = {
    "loss_type": Name(
        "objective.aggregation",
        "dapo",
        "objective",
        "`bnpo` is a mean over the update, not over a micro-batch; `sft` one over answers.",
        dpo="sigmoid",
        sft="nll",
    ),
    "beta": Name("objective.penalty", 0.0, "penalty", dpo=0.1, sft=None),
    "sync_ref_model": Name("references.ref", False, "penalty", sft=None),
    "ref_model_mixup_alpha": Name("references.ref", 0.6, "penalty", sft=None),
    "ref_model_sync_steps": Name("references.ref", 512, "penalty", sft=None),
    **_rows("rollout.num_prompts", "batches", per_device_train_batch_size=8, gradient_accumulation_steps=1),
    **_rows("rollout.num_prompts", "batches", "It counts, however many processes run.", num_processes=None),
    "learning_rate": Name(_RATE, 1e-6, "learning_rate", sft=2e-5),
    **_rows(_RATE, "learning_rate", lr_scheduler_kwargs=None),
    **_rows("", "sampler", train_sampling_strategy="random"),
    **_rows("", "sampler", "Read with `group_by_length` alone; not given, characters are counted.",
            length_column_name="length"),
    **_rows(_RATE, "learning_rate", "Decay begins at step 0.", lr_scheduler_type="linear"),
    **_rows(_RATE, "learning_rate", "The first step has a rate above 0.", warmup_steps=0, warmup_ratio=0.0),
    **_rows("learn.optimizer", "optimizer", optim="adamw_torch_fused", weight_decay=0.0, adam_beta1=0.9,
            adam_beta2=0.999, adam_epsilon=1e-8),
    **_rows("learn.max_grad_norm", max_grad_norm=1.0),
    **_rows("num_train_epochs", "length_of_run", num_train_epochs=3.0),
    **_rows("max_steps", "length_of_run", _COUNTED, max_steps=-1),
    **_rows("seed", seed=42),
    **_rows("policy.dtype", "model", bf16=None, fp16=False),
    **_rows("policy.attn_implementation", "model", model_init_kwargs=None),
    **_rows("policy.gradient_checkpointing", "checkpointing", gradient_checkpointing=True,
            activation_checkpointing=None),
    **_rows("", "device", use_cpu=False),
    **_rows("ddp_timeout", ddp_timeout=1800),
    **_rows("output_dir", output_dir=None),
    **_rows("overwrite_output_dir", overwrite_output_dir=None),
    **_rows("report.logging_steps", "logging", _COUNTED, logging_steps=10),
    **_rows("report.trackers", "trackers", report_to="none", run_name=None, project="huggingface",
            wandb_project=None, trackio_space_id=None),
    **_rows("eval_steps", "evaluations", "There is always one after the last step.", eval_strategy="no"),
    **_rows("eval_steps", "evaluations", _COUNTED, eval_steps=None),
    **_rows("eval_on_start", eval_on_start=False),
    **_rows("save_steps", "saves", "A checkpoint is always written at the end.", save_strategy="steps"),
    **_rows("save_steps", "saves", _COUNTED, save_steps=500),
    **_rows("save_total_limit", "saves", save_total_limit=None),
    **_rows("metric_for_best_model", "best", "The best one is kept and pushed, not loaded again.",
            load_best_model_at_end=False),
    **_rows("metric_for_best_model", "best", metric_for_best_model=None),
    **_rows("greater_is_better", "best", greater_is_better=None),
    **_rows("push_to_hub", "", "When the run ends.", push_to_hub=False),
    **_rows("hub_model_id", hub_model_id=None),
    **_rows("hub_private_repo", hub_private_repo=None),
}  # fmt: skip
MODEL: dict[str, Name] = {
    **_rows("policy.model", model_name_or_path=None),
    **_rows("policy.dtype", "model", dtype=None, torch_dtype=None),
    **_rows("policy.attn_implementation", "model", attn_implementation=None),
    **_rows("policy.lora_rank", "adapter", use_peft=False, lora_r=16, lora_dropout=0.05),
    **_rows("policy.lora_alpha", "adapter", lora_alpha=32, use_rslora=False),
    **_rows("policy.lora_target_modules", "adapter", lora_target_modules=None),
    **_rows("policy.transform", "quantization", load_in_8bit=False, load_in_4bit=False,
            bnb_4bit_quant_type="nf4", use_bnb_nested_quant=False),
    **_rows("data.path", "dataset", dataset_name=None),
    **_rows("data.system_prompt", "dataset", system_prompt=None),
    **_rows("rewards", "rewards", reward_funcs=None),
}  # fmt: skip
NAMES: dict[str, Name] = {**GRPO, **DPO, **SFT, **SHARED, **BOTH, **MODEL}

_LAUNCH = "Start with `accelerate launch --config_file`; see docs/howto/processes.md."
# Unsupported arguments, with the values that have no effect. Only these values and None are accepted.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "use_adaptive_entropy": (False,), "router_aux_loss_coef": (0.0,), "label_smoothing_factor": (0.0,),
    "neftune_noise_alpha": (0.0,), "use_weighting": (False,), "repetition_penalty": (1.0,),
    "generation_kwargs": ({},), "chat_template": ("",),
    "cache_implementation": (), "optim_args": ("",), "packing_strategy": ("bfd",),
    "dataset_text_field": ("text",), "dataset_kwargs": ({},), "chat_template_path": (), "eos_token": (),
    "optim_target_modules": ([],), "data_seed": (), "full_determinism": (False,), "tf32": (False,),
    "trust_remote_code": (False,), "cast_lm_head_to_fp32": (False,), "auto_find_batch_size": (False,),
    "average_tokens_across_devices": (True,), "parallelism_config": (), "fsdp": ("", [], False),
    "fsdp_config": ({},), "deepspeed": ("", {}), "ddp_backend": ("nccl", "gloo"),
    "logging_strategy": ("steps",), "log_completions_hub_repo": (), "trackio_bucket_id": (),
    "trackio_static_space_id": (False,), "eval_delay": (0,), "include_for_metrics": ([],),
    "save_only_model": (False,), "resume_from_checkpoint": (True, False), "ignore_data_skip": (False,),
    "hub_strategy": ("every_save", "end"), "hub_token": (), "hub_revision": ("main",), "debug": ("", []),
    "model_revision": ("main",), "lora_target_parameters": ([],), "lora_modules_to_save": ([],),
    "lora_task_type": ("CAUSAL_LM",), "use_dora": (False,), "bnb_4bit_quant_storage": ("uint8",),
    "push_to_hub_revision": (False,), "callbacks": ([],),
}  # fmt: skip
_INSTEAD = {  # advice for arguments that have a replacement
    "use_adaptive_entropy": "Use a schedule as the `coef` of `entropy_bonus`.",
    "label_smoothing_factor": "Use `label_smoothing` of a comparison.",
    "use_weighting": "WPO's weights of pairs are in `methods/preference/wpo.yaml`.",
    "repetition_penalty": "Tokens are drawn from the policy itself; use a reward on repetition.",
    "generation_kwargs": "Use the options of `rollout.engine` (`mmrl list engine`).",
    "chat_template": "Save the model's folder with this template.",
    "cache_implementation": f"Use `{ENGINE}.cache` (`mmrl list cache`).",
    "packing_strategy": "Rows are never cut; leave it out.",
    "dataset_text_field": "Rows hold `prompt` and `completion`, or `messages` (docs/howto/data.md).",
    "chat_template_path": "Save the model's folder with this template.",
    "eos_token": "The end of a turn is read from the chat template.",
    "optim_args": "Write the options at `learn.optimizer`.",
    "full_determinism": "See docs/howto/processes.md for what is exact.",
    "auto_find_batch_size": "Set `learn.micro_batch_steps`; `mmrl estimate-memory` tells it.",
    **dict.fromkeys(("parallelism_config", "fsdp", "fsdp_config", "deepspeed"), _LAUNCH),
    "logging_strategy": "Set `logging_steps`.",
    "trackio_bucket_id": "Set `trackio_space_id`.",
    "resume_from_checkpoint": "The same command goes on from the last checkpoint of `output_dir`.",
    "include_for_metrics": "Metrics are pieces: `evaluation.metrics`.",
    "hub_token": "Log in with `hf auth login`, or set HF_TOKEN.",
    "model_revision": "Download it with `hf download --revision`, and name the folder.",
    "lora_target_parameters": "Name layers in `lora_target_modules`.",
    "lora_modules_to_save": "Adapters are trained alone; leave it out, or `use_peft`.",
    "use_dora": "Set it to False: adapters are LoRA.",
    "push_to_hub_revision": "Set `push_to_hub`: the main branch is written when the run ends.",
    "callbacks": "Give them to `mmrl.Trainer(callbacks=...)`.",
}
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {  # maps a name to advice and the accepted values
    name: (_INSTEAD.get(name, "Nothing takes its place; leave it out."), accepted)
    for name, accepted in _ABSENT.items()
}

_NEUTRAL = {
    "Answers are drawn by `vision.generate` in the process that trains.": "use_vllm "
    "use_transformers_continuous_batching use_transformers_paged vllm_mode vllm_device vllm_dtype "
    "vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_max_model_len vllm_tensor_parallel_size vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_cap transformers_continuous_batching_config remote_gen_model_url",
    "Prompts and answers are never cut.": "max_prompt_length truncation_mode",
    "Dropout is always off.": "disable_dropout",
    "Rows of completions are always stored as parquet, and not printed.": "log_completions "
    "num_completions_to_print log_unique_prompts wandb_log_unique_prompts",
    "Without effect on the losses that are here.": "entropy_coef_min entropy_coef_max entropy_coef_delta "
    "entropy_target",
    "How memory or time is spent; results are the same.": "ds3_gather_for_generation pad_to_multiple_of "
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_offloading "
    "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache "
    "torch_empty_cache_steps per_device_eval_batch_size eval_accumulation_steps bf16_full_eval "
    "fp16_full_eval eval_packing precompute_ref_log_probs precompute_ref_batch_size dataset_num_proc "
    "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph accelerator_config "
    "local_rank preprocessing_num_workers",
    "Of loops and files of transformers that are not here.": "prediction_loss_only eval_do_concat_batches "
    "eval_use_gather_object batch_eval_metrics label_names pad_token do_train do_eval "
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
DPO_ONLY = frozenset({*DPO, *SHARED, "use_weighting", "truncation_mode", "precompute_ref_log_probs"})
SFT_ONLY = frozenset(
    {*SFT, "packing_strategy", "eval_packing", "dataset_text_field", "dataset_kwargs", "chat_template_path"}
) | {"eos_token"}
# For each kind of run, the arguments that its configuration class lacks.
LACKS: dict[str, frozenset[str]] = {
    "grpo": DPO_ONLY | SFT_ONLY,
    "dpo": frozenset(GRPO) | SFT_ONLY,
    "sft": (frozenset(GRPO) - {"shuffle_dataset"})
    | (DPO_ONLY - {*SHARED, "truncation_mode"})
    | {name for name, row in BOTH.items() if row.sft is None},
}
DIFFERS = (  # differences in every run, independent of the arguments
    "trained weights and their optimizer are in float32; dropout is off, that of adapters too",
    "`max_steps`, `save_steps` and the learning rate count collections, not optimizer steps",
)


def advice(key: str) -> str:
    """Explain an argument of TRL for an error message about an unknown key; empty for any other name."""
    if key in NAMES:
        ours = f"; here it is {NAMES[key].key}" if NAMES[key].key else ""
        return f"that is an argument of TRL{ours}; as it is, it goes into a mapping: `trl: {{{key}: ...}}`"
    words = REFUSED[key][0] if key in REFUSED else NEUTRAL.get(key, "")
    return f"that is an argument of TRL, which is not here. {words}" if words else ""
