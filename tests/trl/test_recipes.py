"""The arguments of TRL's example scripts and of open-r1's recipes, each read as it stands there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mmrl
from mmrl.api.configuration import configuration
from mmrl.config.loading import ConfigError
from mmrl.config.schema import as_plain

trl = pytest.importorskip("trl")

# What open-r1's demonstration of GRPO says, without the words of its system prompt.
DEMO: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct", "model_revision": "main", "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2", "dataset_name": "open-r1/OpenR1-Math-220k",
    "dataset_configs": ["default"], "system_prompt": "Think.", "bf16": True, "use_vllm": True,
    "vllm_device": "auto", "vllm_gpu_memory_utilization": 0.7, "do_eval": False,
    "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "hub_model_id": "Qwen2.5-1.5B-Open-R1-GRPO",
    "hub_strategy": "every_save", "learning_rate": 2.0e-05, "log_completions": True, "log_level": "info",
    "logging_first_step": True, "logging_steps": 1, "logging_strategy": "steps",
    "lr_scheduler_type": "cosine",
    "max_prompt_length": 512, "max_completion_length": 1024, "max_steps": -1, "num_generations": 16,
    "num_train_epochs": 1, "output_dir": "data/Qwen2.5-1.5B-Open-R1-GRPO", "overwrite_output_dir": True,
    "per_device_eval_batch_size": 16, "per_device_train_batch_size": 16, "push_to_hub": True,
    "report_to": ["wandb"], "reward_funcs": ["accuracy", "format"], "save_strategy": "epoch",
    "save_total_limit": 1, "seed": 42, "warmup_ratio": 0.1,
}  # fmt: skip
# What other recipes of the same place say besides.
CODE = {
    "beta": 0.01, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "max_steps": 500, "num_generations": 16, "reward_weights": [1.0, 0.1], "save_strategy": "steps",
    "save_steps": 50, "temperature": 1.0, "warmup_ratio": 0.03, "use_liger_kernel": True, "num_iterations": 4,
    "wandb_entity": "huggingface", "wandb_project": "open-r1", "ddp_find_unused_parameters": False,
}  # fmt: skip
CODEFORCES = {
    "loss_type": "dr_grpo", "scale_rewards": False, "eval_strategy": "no", "benchmarks": ["lcb_v4"],
    "dataset_prompt_column": "prompt", "hub_model_revision": "v01.00", "max_grad_norm": 0.2,
    "lr_scheduler_type": "constant_with_warmup", "num_train_epochs": 40, "save_strategy": "steps",
    "save_steps": 0.05, "mask_truncated_completions": True, "code_language": "cpp", "num_processes": 7,
    "code_eval_test_batch_size": 20, "reward_weights": [1.0, 0.1],
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, CODE, CODEFORCES])
def test_a_recipe_is_a_file_and_a_dictionary(more: dict[str, Any], tmp_path: Any) -> None:
    recipe = {**DEMO, **more}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"trl": recipe}))
    loaded = mmrl.load(path)
    assert as_plain(loaded) == as_plain(configuration(args=recipe))
    config = as_plain(loaded)
    assert config["policy"]["model"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config["policy"]["attn_implementation"] == "flash_attention_2"
    assert config["data"] == {
        "name": "vision.conversations", "path": "open-r1/OpenR1-Math-220k", "system_prompt": "Think.",
    }  # fmt: skip
    assert [str(reward).count("open_r1.rewards:") for reward in config["rewards"]] == [1, 1]
    rate = config["learn"]["learning_rate"]
    processes = recipe.get("num_processes", 1)
    assert config["rollout"]["num_prompts"] == 16 * 4 * processes // 16
    if not more:
        # An epoch is the whole run: a checkpoint at its end alone. The warmup is a tenth of it.
        assert (config["save_steps"], config["num_train_epochs"]) == (0, 1.0)
        assert rate == {"name": "cosine", "start": 2e-5, "end": 0.0, "warmup_steps": 0.1}
    elif more is CODE:
        assert rate["end"] == pytest.approx(2e-6) and rate["warmup_steps"] == 0.03
        # 4 optimizer steps of a collection
        assert (rate["steps"], config["max_steps"], config["save_steps"]) == (125, 125, 13)
        assert [reward["weight"] for reward in config["rewards"]] == [1.0, 0.1]
        assert config["report"]["trackers"] == [{"name": "wandb", "project": "open-r1"}]
    else:
        assert (config["save_steps"], rate["name"], rate["warmup_steps"]) == (0.05, "constant", 0.1)


def test_what_only_a_script_knows_is_refused_by_name() -> None:
    wrong = {
        **DEMO,
        "chat_template": "{{ messages }}",
        "callbacks": ["push_to_hub_revision"],
        "reward_funcs": ["x"],
    }
    with pytest.raises(ConfigError) as error:
        configuration(args=wrong)
    for words in ("chat_template", "Save the model's folder", "callbacks", "'reward_funcs' has 'x'"):
        assert words in str(error.value)


def arguments(text: str, kind: Any) -> tuple[Any, Any, Any]:
    """Parse the command line of a script of TRL."""
    return trl.TrlParser((trl.ScriptArguments, kind, trl.ModelConfig)).parse_args_and_config(text.split())


def test_grpo_vlm_runs_with_the_import_changed() -> None:
    # As its first lines call it; the shell leaves a comma at the first of the two layers.
    _, config, model = arguments(
        "--model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --output_dir out --learning_rate 1e-5 "
        "--gradient_checkpointing --dtype bfloat16 --max_completion_length 1024 --use_vllm "
        "--vllm_mode colocate --use_peft --lora_target_modules q_proj, v_proj --log_completions --use_cpu",
        trl.GRPOConfig,
    )
    dtype = getattr(torch, model.dtype)
    attention = model.attn_implementation
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": attention,
        "dtype": dtype,
    }
    assert trl.get_quantization_config(model) is None
    found = as_plain(
        configuration(model.model_name_or_path, ["vision.short_answer"], config, "rows.jsonl",
                      peft_config=trl.get_peft_config(model))
    )  # fmt: skip
    assert found["policy"] == {
        "name": "vision.tokens", "model": "Qwen/Qwen2.5-VL-3B-Instruct", "dtype": "bfloat16", "lora_rank": 16,
        "lora_alpha": 32.0, "lora_target_modules": ["q_proj", "v_proj"], "gradient_checkpointing": True,
    }  # fmt: skip
    given = {
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "dtype": "bfloat16",
        "output_dir": "out",
    }
    given |= {
        "learning_rate": 1e-5,
        "max_completion_length": 1024,
        "model_revision": "main",
        "lora_dropout": 0.05,
    }
    by_names = configuration(model.model_name_or_path, ["vision.short_answer"], given, "rows.jsonl")
    assert as_plain(by_names) == found


def test_dpo_vlm_runs_with_the_import_changed() -> None:
    _, config, model = arguments(
        "--dataset_name HuggingFaceH4/rlaif-v_formatted --dataset_streaming "
        "--model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 32 --dataset_num_proc 32 --output_dir out --bf16 true "
        "--dtype bfloat16 --gradient_checkpointing --use_peft --lora_target_modules=all-linear --use_cpu",
        trl.DPOConfig,
    )
    found = as_plain(
        configuration(model.model_name_or_path, args=config, train_dataset="rows.jsonl",
                      peft_config=trl.get_peft_config(model))
    )  # fmt: skip
    assert found["objective"]["compare"] == [{"name": "sigmoid", "beta": 0.1}]
    assert (found["rollout"]["num_prompts"], found["policy"]["lora_rank"]) == (64, 16)
    assert "lora_target_modules" not in found["policy"]  # all linear layers


def test_quantisation_by_names_and_by_objects() -> None:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    names = {"load_in_4bit": True, "use_bnb_nested_quant": True, "use_peft": True}
    peft = {"use_peft": True}
    ways = [
        configuration("a/b", ["exact_match"], names, "x"),
        configuration("a/b", ["exact_match"], peft, "x", quantization_config=config),
        configuration(
            "a/b", ["exact_match"], {**peft, "model_init_kwargs": {"quantization_config": config}}, "x"
        ),
    ]
    piece = {"name": "compression.bnb_quantize", "nbits": 4, "kind": "nf4", "double": True}
    for way in ways:
        assert as_plain(way) == as_plain(ways[0])
        assert as_plain(way)["policy"]["transform"] == [piece]


def test_rank_stabilised_adapters_have_another_scale() -> None:
    from peft import LoraConfig

    config = configuration(
        "a/b", ["exact_match"], None, "x", peft_config=LoraConfig(r=16, lora_alpha=8, use_rslora=True)
    )
    # 8 / sqrt(16) = 32 / 16
    assert (config.policy.options["lora_rank"], config.policy.options["lora_alpha"]) == (16, 32.0)
    refused = [({"use_dora": True}, "use_dora"), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern")]
    for wrong, word in [*refused, ({"modules_to_save": ["lm_head"]}, "lora_modules_to_save")]:
        with pytest.raises(ConfigError, match=word):
            configuration("a/b", ["exact_match"], None, "x", peft_config=LoraConfig(**wrong))
