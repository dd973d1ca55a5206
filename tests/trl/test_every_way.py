"""One configuration of TRL by every way in which it can be given is one training."""

from __future__ import annotations

import json
from typing import Any

import pytest

import mmrl
from mmrl.api.configuration import configuration
from mmrl.config.loading import ConfigError, read
from mmrl.config.schema import Config, as_plain, parse
from mmrl.trl.translation import tell, translated

trl = pytest.importorskip("trl")

MODEL, ROWS, REWARDS = "somebody/model", "rows.jsonl", ["vision.short_answer"]
GRPO: list[dict[str, Any]] = [
    {},
    {"beta": 0.0, "loss_type": "dapo", "learning_rate": 1e-6, "num_train_epochs": 3, "logging_steps": 10},
    {"beta": 0.04, "loss_type": "grpo", "epsilon_high": 0.28, "save_steps": 500, "bf16": True},
    {"learning_rate": 1e-5, "warmup_steps": 0.1, "num_train_epochs": 2, "save_strategy": "epoch"},
    {"max_steps": 100, "gradient_accumulation_steps": 4, "steps_per_generation": 8, "save_steps": 0.1},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "seed": 1},
    {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 64, "num_iterations": 2},
    {"bf16": False, "gradient_checkpointing": False, "report_to": "none", "temperature": 0.9, "top_k": 5},
    {"eval_strategy": "no", "eval_steps": 10, "use_vllm": True, "save_total_limit": 2, "optim": "sgd"},
    {"importance_sampling_level": "sequence", "epsilon": 3e-4, "mask_truncated_completions": True},
    {"model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "eager", "revision": None}},
    {"fp16": True, "multi_objective_aggregation": "normalize_then_sum", "sync_ref_model": True, "beta": 0.1},
    {"warmup_steps": 20, "max_steps": 200, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.2},
    {"loss_type": "vespo", "vespo_k_pos": 1.5, "entropy_coef": 0.01, "top_entropy_quantile": 0.2},
]
DPO: list[dict[str, Any]] = [
    {},
    {"beta": 0.1, "loss_type": "sigmoid", "num_train_epochs": 3.0, "per_device_train_batch_size": 8},
    {"beta": 0.2, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1.0], "max_steps": 40},
    {"loss_type": ["robust"], "label_smoothing": 0.1, "gradient_accumulation_steps": 32, "max_length": None},
    {"f_divergence_type": "js_divergence", "learning_rate": 5e-7, "warmup_steps": 0.1},
    {"ld_alpha": 0.3, "loss_type": ["ipo"], "sync_ref_model": True, "activation_offloading": True},
]
SFT: list[dict[str, Any]] = [
    {},
    {"packing": True, "max_length": 512, "learning_rate": 1e-5, "warmup_steps": 0.1},
    {"completion_only_loss": False, "padding_free": True, "num_train_epochs": 2, "save_strategy": "epoch"},
    {"assistant_only_loss": True, "loss_type": "nll", "gradient_accumulation_steps": 4, "max_steps": 30},
    {"train_sampling_strategy": "group_by_length", "length_column_name": "tokens", "eval_packing": False},
    {"train_sampling_strategy": "sequential", "packing": True, "packing_strategy": "bfd", "max_length": 256},
]
KINDS = {
    "grpo": (GRPO, "GRPOConfig", "grpo", "grpo/grpo", "vision.conversations"),
    "dpo": (DPO, "DPOConfig", "dpo", "preference/dpo", "vision.preference_pairs"),
    "sft": (SFT, "SFTConfig", "supervised", "grpo/supervised", "vision.conversations"),
}


def of(args: Any, method: str = "") -> dict[str, Any]:
    return as_plain(configuration(MODEL, REWARDS, args, ROWS, method=method))


def of_file(folder: Any, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Load a file with a mapping `trl`."""
    path = folder / "run.yaml"
    whole = {"policy": {"name": "vision.tokens", "model": MODEL}, "rewards": REWARDS, "trl": arguments}
    path.write_text(json.dumps({**whole, **more}))
    return as_plain(mmrl.load(path))


@pytest.mark.parametrize("kind", KINDS)
def test_one_configuration_by_every_way_is_one_training(kind: str, tmp_path: Any) -> None:
    cases, name, method, file, reader = KINDS[kind]
    data = {"name": reader, "path": ROWS}
    family: dict[str, Any] = {"include": [f"methods/{file}.yaml"], "data": data}
    family |= {"rollout": {"engine": ["vision.generate"]}} if kind == "grpo" else {}
    for arguments in cases:
        given = {**arguments, "output_dir": "out"}
        config = getattr(trl, name)(use_cpu=True, **given)
        ways = {
            "object": of(config),
            "object and method": of(config, method),
            "dictionary and method": of(given, method),
            "file with the method": of_file(tmp_path, given, **family),
        }
        telling = {"loss_type", "f_divergence_type", "ld_alpha", "packing", "completion_only_loss"}
        if kind == "grpo" or telling & arguments.keys():
            ways["dictionary"] = of(given)
            ways["file without a method"] = of_file(tmp_path, given, data={"path": ROWS})
        first, *others = ways
        for other in others:
            assert ways[other] == ways[first], (arguments, first, other)


def test_the_defaults_are_trls() -> None:
    config = of(trl.GRPOConfig(output_dir="out", use_cpu=True))
    assert config["objective"]["penalty"] == [] and config["references"] == {}  # beta 0
    assert config["objective"]["aggregation"] == {"name": "step_mean"}
    assert config["learn"]["learning_rate"] == {"name": "linear", "start": 1e-6, "end": 0.0}
    assert (config["num_train_epochs"], config["seed"], config["policy"]["dtype"]) == (3.0, 42, "bfloat16")
    assert (config["rollout"]["num_prompts"], config["rollout"]["num_generations"]) == (1, 8)
    config = of(trl.DPOConfig(output_dir="out", use_cpu=True))  # the class says that pairs are compared
    assert config["objective"]["compare"] == [{"name": "sigmoid", "beta": 0.1}]
    assert config["data"]["name"] == "vision.preference_pairs"
    assert (config["learn"]["learning_rate"]["name"], config["rollout"]["num_prompts"]) == ("linear", 8)


def test_what_a_method_or_a_file_says_stays_and_the_rest_is_trls(tmp_path: Any) -> None:
    config = of({"num_generations": 4}, "gspo")
    assert config["objective"]["ratio"] == "sequence_ratio"
    assert (config["learn"]["minibatches"], config["learn"]["learning_rate"]["name"]) == (4, "linear")
    config = of({"learn": {"learning_rate": 3e-4}, "rollout.num_prompts": 6, "max_steps": 10})
    assert (config["learn"]["learning_rate"], config["rollout"]["num_prompts"]) == (3e-4, 6)
    assert config["num_train_epochs"] == 0
    rows = {"data": {"path": ROWS}}
    config = of_file(tmp_path, {"beta": 0.1}, learn={"learning_rate": 2e-5}, max_steps=5, **rows)
    assert (config["learn"]["learning_rate"], config["max_steps"]) == (2e-5, 5)
    assert config["num_train_epochs"] == 0 and config["seed"] == 42
    # Without the block a file has mmrl's own defaults.
    plain = {
        "include": ["defaults/vision_language.yaml", "methods/grpo/grpo.yaml"],
        "policy": {"model": MODEL},
    }
    config = as_plain(parse(read({**plain, **rows, "rewards": REWARDS}), Config))
    assert (config["objective"]["penalty"][0]["coef"], config["num_train_epochs"]) == (0.04, 0)


def test_blocks_of_included_files_are_one_and_the_command_line_wins(tmp_path: Any) -> None:
    (tmp_path / "below.yaml").write_text("trl: {beta: 0.5, seed: 1}\nrewards: [vision.short_answer]\n")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"include: [below.yaml]\npolicy: {{model: {MODEL}}}\ndata: {{path: x}}\ntrl: {{seed: 2}}\n"
    )
    config = as_plain(mmrl.load(path, ["trl.epsilon=0.3", "max_steps=7", "learn.learning_rate=0.5"]))
    assert (config["objective"]["penalty"][0]["coef"], config["seed"]) == (0.5, 2)
    assert config["objective"]["surrogate"]["epsilon"] == 0.3
    assert (config["max_steps"], config["learn"]["learning_rate"]) == (7, 0.5)


def test_all_errors_are_told_at_once() -> None:
    wrong = {"betta": 1, "neftune_noise_alpha": 5.0, "lr_scheduler_type": "polynomial", "loss_type": "xpo"}
    with pytest.raises(ConfigError) as error:
        of(wrong)
    assert "4 arguments of TRL cannot be taken" in str(error.value)
    assert all(name in str(error.value) for name in wrong)


@pytest.mark.parametrize("loss", [["x"], ["sigmoid", "grpo"]])
def test_a_loss_that_pairs_do_not_have_is_refused_by_name(loss: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^'loss_type='{loss[-1]}'' of TRL is not here; there are sigmoid"):
        of({"loss_type": loss}, "dpo")


@pytest.mark.parametrize(
    "arguments", [{"reward_weights": 0.3}, {"torch_compile_backend": "inductor"}, {"torch_compile": True}]
)
def test_arguments_mean_the_same_by_an_object_a_dictionary_and_a_file(
    arguments: dict[str, Any], tmp_path: Any
) -> None:
    config = trl.GRPOConfig(output_dir="out", use_cpu=True, **arguments)
    by_file = of_file(tmp_path, {"output_dir": "out", **arguments}, data={"path": ROWS})
    assert of(config) == of({"output_dir": "out", **arguments}) == by_file


def test_all_errors_of_a_file_are_told_at_once(tmp_path: Any) -> None:
    wrong = {"rollouts": {}, "max_steps": "many", "rollout": {"num_prompt": 3}, "data": {"path": ROWS}}
    with pytest.raises(ConfigError) as error:
        of_file(tmp_path, {"betta": 1, "optim": "lion"}, **wrong)
    for words in (
        "betta",
        "optim='lion'",
        "'rollouts'",
        "'max_steps' must be",
        "no key 'rollout.num_prompt'",
    ):
        assert words in str(error.value), words
    with pytest.raises(ConfigError, match=r"'rollouts'(.|\n)*'max_steps' must be"):
        of_file(tmp_path, {}, **wrong)


def test_one_list_says_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    tell.cache_clear()
    of({"use_vllm": True, "log_level": "info", "lora_r": 8})
    of({"use_vllm": True, "log_level": "info", "lora_r": 8})
    (record,) = caplog.records
    for words in ("vision tower is frozen", "dropout is off", "use_vllm: Answers", "lora_r: without effect"):
        assert words in record.getMessage(), words
    assert "float32" in translated({}, {}, complete=True).differs[0]


def test_the_class_of_a_configuration_says_what_is_trained() -> None:
    for name in ("KTOConfig", "RewardConfig"):
        with pytest.raises(ConfigError, match=f"`args` is a {name}"):
            of(getattr(trl, name)(output_dir="out", use_cpu=True))
    with pytest.raises(ConfigError, match="'num_generations' is an argument of TRL's GRPOConfig"):
        of({"num_generations": 4, "loss_type": "sigmoid"})


def test_sft_is_supervised_training_without_rewards() -> None:
    given = trl.SFTConfig(output_dir="out", use_cpu=True, packing=True, max_length=512)
    config = as_plain(configuration(MODEL, None, given, ROWS))
    assert config["rewards"] == [] and config["advantage"] == ["constant"]
    assert config["objective"]["surrogate"] == "log_likelihood"
    (engine,) = config["rollout"]["engine"]
    assert (engine["name"], engine["max_length"], config["policy"]["packing"]) == ("offline", 512, True)
    assert (config["rollout"]["num_prompts"], config["rollout"]["num_generations"]) == (8, 1)
    assert (config["learn"]["learning_rate"]["start"], config["num_train_epochs"]) == (2e-5, 3.0)
    assert config["sampler"] == [{"name": "uniform", "shuffle": True}]
    sampler = of({"train_sampling_strategy": "group_by_length"}, "supervised")["sampler"]
    assert sampler in (["group_by_length"], [{"name": "group_by_length"}])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"packing": True, "beta": 0.1},
            "'beta' is an argument of TRL's GRPOConfig and DPOConfig, .* of SFT",
        ),
        ({"packing": True, "num_generations": 4}, "'num_generations' is an argument of TRL's GRPOConfig"),
        ({"loss_type": "dft"}, "'loss_type='dft'' of TRL is not here; there are nll"),
        ({"packing": True, "packing_strategy": "wrapped"}, "'packing_strategy='wrapped'' .* never cut"),
        ({"packing": True, "dataset_text_field": "words"}, "'dataset_text_field='words'' .* `messages`"),
        ({"completion_only_loss": True, "assistant_only_loss": True}, "give one of them"),
        (
            {"num_generations": 4, "train_sampling_strategy": "group_by_length"},
            "strategy='group_by_length'' of",
        ),
    ],
)
def test_what_sft_does_not_have_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(arguments)
