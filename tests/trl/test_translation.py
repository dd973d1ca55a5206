"""Arguments of TRL in a configuration of mmrl: every name of the table, rules of several, what is refused."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest

from mmrl.config.loading import ConfigError, merge, read
from mmrl.config.schema import Config, parse, parse_some
from mmrl.trl.given import default_of
from mmrl.trl.names import DPO_ONLY, LACKS, NAMES, NEUTRAL, REFUSED, SFT_ONLY
from mmrl.trl.translation import RULES, arguments_of, translate

BASE = {
    "policy": {"name": "vision.tokens", "model": "x"},
    "data": {"name": "vision.visual_qa", "path": "x"},
    "rewards": ["exact_match"],
    "rollout": {"engine": ["vision.generate"]},
}
METHOD = read("methods/grpo/grpo.yaml")


def test_every_field_of_trl_is_mapped_refused_or_neutral_with_its_default() -> None:
    trl = pytest.importorskip("trl")
    kinds = (trl.GRPOConfig, trl.DPOConfig, trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments)
    assert {*NAMES} & {*REFUSED} == {*NAMES} & {*NEUTRAL} == {*REFUSED} & {*NEUTRAL} == set()
    for config in kinds:
        for field in dataclasses.fields(config):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            if row := NAMES.get(field.name):
                kind = {trl.DPOConfig: "dpo", trl.SFTConfig: "sft"}.get(config, "")
                ours = default_of(field.name, kind)
                # `dtype` has another default in a script's ModelConfig than where no script names it.
                assert default in (ours, [ours]) or field.name == "dtype", field.name
                assert row.rule in {*RULES, ""}, field.name
            elif field.name in REFUSED:
                assert default is None or default in REFUSED[field.name][1], field.name
            else:
                assert field.name in NEUTRAL, field.name
    of = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    for fields, lacked in zip(of, LACKS.values(), strict=False):
        assert not fields & lacked  # what a kind of run refuses is no field of its class
        assert lacked <= set().union(*of[:3])
    assert of[1] >= DPO_ONLY and of[2] >= SFT_ONLY
    assert set(RULES) == {row.rule for row in NAMES.values()} - {""}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_and_its_default_is_taken(name: str) -> None:
    advice, taken = REFUSED[name]
    onto = {"objective": {"name": "comparison"}} if name in DPO_ONLY else {}
    for value in (None, *taken):
        assert translate({name: value}, onto) == {}
    with pytest.raises(ConfigError, match=f"'{name}=.*of TRL is not here. .+"):
        translate({name: "something else"}, onto)


def test_arguments_become_a_configuration_that_is_valid_with_its_method() -> None:
    change = translate({"beta": 0.04, "num_generations": 4, "temperature": 0.7, "max_completion_length": 64})
    config = parse(merge(merge(METHOD, BASE), change), Config)
    assert config.rollout.num_generations == 4
    assert config.rollout.engine[0].options == {"temperature": 0.7, "max_completion_length": 64}
    assert change["objective"] == {"penalty": [{"name": "k3", "coef": 0.04, "use_bias_correction_kl": True}]}
    assert config.references["ref"].name == "frozen"


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no argument 'num_generation'; did you mean 'num_generations'"):
        translate({"num_generation": 4})


@pytest.mark.parametrize(
    ("arguments", "prompts", "minibatches"),
    [
        ({"per_device_train_batch_size": 8}, 1, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 2, 1),
        # A generation serves 8 / 2 optimizer steps.
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
            4,
            4,
        ),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 64}, 8, 16),
        # Two generations for one optimizer step.
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
            2,
            1,
        ),
    ],
)
def test_batch_sizes(arguments: dict[str, int], prompts: int, minibatches: int) -> None:
    made = translate({"num_generations": 8, **arguments})
    assert (made["rollout"]["num_prompts"], made["learn"]["minibatches"]) == (prompts, minibatches)


def test_batch_sizes_grow_with_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    made = translate({"per_device_train_batch_size": 4, "num_generations": 8})
    assert made["rollout"]["num_prompts"] == 2  # 4 x 4 / 8


@pytest.mark.parametrize(
    "arguments",
    [
        {"per_device_train_batch_size": 3, "num_generations": 8},
        {"per_device_train_batch_size": 4, "steps_per_generation": 2, "generation_batch_size": 16},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "generation_batch_size": 12},
    ],
)
def test_batch_sizes_that_contradict_each_other_are_errors(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="completions"):
        translate(arguments)


def test_steps_count_collections() -> None:
    batch = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_generations": 8}
    asked = {"num_iterations": 3, "max_steps": 100, "save_steps": 0.1, "eval_steps": 60}
    made = translate({**batch, **asked})
    # 2 x 3 optimizer steps in a collection: 100 / 6, 10 / 6 and 60 / 6, rounded up.
    assert (made["max_steps"], made["save_steps"], made["eval_steps"]) == (17, 2, 10)
    assert translate({"max_steps": 6}, {"learn": {"minibatches": 3}}) == {"max_steps": 2}


def test_the_learning_rate_and_its_schedule() -> None:
    assert translate({"learning_rate": 2e-5}) == {"learn": {"learning_rate": 2e-5}}
    made = translate(
        {"learning_rate": 1.0, "lr_scheduler_type": "linear", "max_steps": 50, "warmup_steps": 0.1}
    )
    schedule = {"name": "linear", "start": 1.0, "end": 0.0, "steps": 50, "warmup_steps": 0.1}
    assert made["learn"]["learning_rate"] == schedule
    made = translate({"lr_scheduler_type": "cosine"}, {"learn": {"learning_rate": 3.0}})
    assert made["learn"]["learning_rate"] == {
        "name": "cosine",
        "start": 3.0,
        "end": 0.0,
    }  # as long as the run
    made = translate({"num_train_epochs": 2, "lr_scheduler_type": "linear"}, {"max_steps": 9})
    assert (made["num_train_epochs"], made["max_steps"]) == (2.0, None)
    assert "steps" not in made["learn"]["learning_rate"]


CLIP = {"name": "clip", "epsilon": 0.2}
HIGH = {**CLIP, "epsilon_high": 0.28}
SAPO = {"name": "sapo", "temperature_pos": 1.0, "temperature_neg": 1.05}
VESPO = {"name": "gamma_weight", "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
MASKED = {"name": "off_policy_mask", "threshold": 0.5, "surrogate": CLIP}


@pytest.mark.parametrize(
    ("arguments", "surrogate", "aggregation"),
    [
        ({"loss_type": "dapo", "epsilon_high": 0.28}, HIGH, "step_mean"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo", "clip_max": 5.0}, "step_mean"),
        ({"loss_type": "cispo"}, {"name": "cispo", "clip_max": 0.2}, "step_mean"),
        ({"loss_type": "sapo"}, SAPO, "sequence_mean"),
        ({"loss_type": "bnpo"}, CLIP, "step_mean"),
        ({"loss_type": "vespo", "vespo_k_neg": 4.0}, {**VESPO, "k_neg": 4.0}, "step_mean"),
        ({"loss_type": "grpo", "off_policy_mask_threshold": 0.5}, MASKED, "sequence_mean"),
        (
            {"loss_type": "grpo", "off_policy_mask_threshold": 0.5, "epsilon_high": 0.28},
            {**MASKED, "surrogate": HIGH},
            "sequence_mean",
        ),
        ({"loss_type": "dr_grpo"}, CLIP, {"name": "fixed_length", "max_completion_length": 512}),
        (
            {"loss_type": "luspo", "mask_truncated_completions": True},
            CLIP,
            {"name": "length_weighted", "count": "drawn"},
        ),
    ],
)
def test_losses(arguments: dict[str, Any], surrogate: dict[str, Any], aggregation: Any) -> None:
    made = translate(arguments)["objective"]
    assert made["surrogate"] == surrogate
    assert made["aggregation"] == ({"name": aggregation} if type(aggregation) is str else aggregation)


def test_an_option_of_another_loss_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'delta' of TRL has no effect on the surrogate 'cispo'"):
        translate({"loss_type": "cispo", "delta": 4.0})
    with pytest.raises(ConfigError, match="'label_smoothing' of TRL has no effect on 'sigmoid'"):
        translate({"loss_type": "sigmoid", "label_smoothing": 0.1})


def test_vespo_has_the_ratio_of_the_answer() -> None:
    assert translate({"loss_type": "vespo"})["objective"]["ratio"] == "sequence_sum"
    made = translate({"loss_type": "vespo", "importance_sampling_level": "token"})
    assert made["objective"]["ratio"] == "sequence_sum"
    with pytest.raises(ConfigError, match="'loss_type=vespo' of TRL has its own ratio"):
        translate({"loss_type": "vespo", "importance_sampling_level": "sequence"})
    with pytest.raises(ConfigError, match="'vespo_k_pos' of TRL has no effect on the surrogate 'clip'"):
        translate({"loss_type": "grpo", "vespo_k_pos": 1.0})


def test_an_off_policy_mask_needs_the_loss_that_it_wraps() -> None:
    with pytest.raises(ConfigError, match="'off_policy_mask_threshold=0.5' of TRL wraps the surrogate"):
        translate({"off_policy_mask_threshold": 0.5}, METHOD)
    there = {"objective": {"surrogate": MASKED}}
    made = translate({"epsilon": 0.3}, there)
    assert made == {"objective": {"surrogate": {"surrogate": {"epsilon": 0.3}}}}


@pytest.mark.parametrize(
    ("arguments", "reward"),
    [
        ({"ld_alpha": 0.3}, {"name": "ld_log_ratio", "ld_alpha": 0.3}),
        ({"f_divergence_type": "js_divergence"}, {"name": "f_divergence", "divergence": "js"}),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
            {"name": "f_divergence", "divergence": "alpha", "alpha": 0.3},
        ),
    ],
)
def test_implicit_rewards_of_pairs(arguments: dict[str, Any], reward: dict[str, Any]) -> None:
    dpo = read("methods/preference/dpo.yaml")
    assert translate(arguments, dpo) == {"objective": {"implicit_reward": reward}}
    assert translate({"loss_type": "ipo", **arguments})["objective"]["implicit_reward"] == reward
    assert parse_some({"objective": merge(dpo, translate(arguments, dpo))["objective"]}, Config)
    with pytest.raises(ConfigError, match="cannot be had with the loss 'sigmoid_norm'"):
        translate({"loss_type": "sigmoid_norm", **arguments})


def test_implicit_rewards_that_are_not_there_are_errors() -> None:
    with pytest.raises(ConfigError, match="'f_divergence_type' of TRL is reverse_kl, .*; not 'kl'"):
        translate({"f_divergence_type": "kl"})
    with pytest.raises(ConfigError, match="two implicit rewards; give one"):
        translate({"f_divergence_type": "forward_kl", "ld_alpha": 0.5})
    with pytest.raises(ConfigError, match="'f_divergence_type' .* the loss 'nca_pair'"):
        translate({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"})


def test_discopop_takes_its_width() -> None:
    made = translate({"loss_type": "discopop", "discopop_tau": 0.2, "beta": 0.05})
    assert made["objective"]["compare"] == [{"name": "discopop", "beta": 0.05, "tau": 0.2}]


def test_a_chain_that_is_there_is_extended() -> None:
    there = {"advantage": ["group_normalize", "total"]}
    assert translate({"mask_truncated_completions": True}, there)["advantage"][-1] == "drop_truncated"
    made = translate({"scale_rewards": False, "top_entropy_quantile": 0.2}, there)
    assert made["advantage"] == ["total", "group_center", {"name": "high_entropy", "top": 0.2}]
    assert translate({"multi_objective_aggregation": "normalize_then_sum"})["advantage"] == [
        "group_normalize",
        "total",
        "batch_normalize",
    ]


def test_penalties_that_are_not_trls_stay() -> None:
    there = {"objective": {"penalty": [{"name": "k1", "coef": 1.0}, {"name": "entropy_bonus", "coef": 0.1}]}}
    made = translate({"beta": 0.0}, there)
    assert made["objective"]["penalty"] == [{"name": "entropy_bonus", "coef": 0.1}]
    made = translate({"use_bias_correction_kl": False}, METHOD)
    k3 = {"name": "k3", "coef": 0.04, "use_bias_correction_kl": False}
    assert made["objective"]["penalty"] == [k3]


def test_a_reference_that_follows() -> None:
    made = translate({"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 0.75})
    assert made["references"]["ref"] == {"name": "ema", "decay": 0.25, "every": 512}


def test_losses_of_pairs_and_their_weights() -> None:
    made = translate(
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.2}
    )
    assert made["objective"]["compare"] == [
        {"name": "sigmoid", "beta": 0.2, "weight": 0.8},
        {"name": "bco_pair", "beta": 0.2, "weight": 0.2},
    ]
    assert made["objective"]["penalty"] == [{"name": "sft", "coef": 1.0}]
    assert translate({"beta": 0.3}, read("methods/preference/dpo.yaml")) == {
        "objective": {"compare": {"0": {"beta": 0.3}}}
    }


class Mode(enum.StrEnum):
    STEPS = "steps"


@dataclasses.dataclass
class Like:
    """Fields as GRPOConfig has them, some of which it sets by itself."""

    beta: float = 0.0
    eval_strategy: str = "no"
    loss_type: list[str] = dataclasses.field(default_factory=lambda: ["sigmoid"])
    dataloader_pin_memory: bool = True
    steps_per_generation: int | None = None


def test_the_fields_of_a_config_that_are_no_defaults() -> None:
    listed = arguments_of(
        Like(beta=0.1, eval_strategy=Mode.STEPS, dataloader_pin_memory=False, steps_per_generation=2)
    )
    assert listed == {"beta": 0.1, "eval_strategy": "steps", "steps_per_generation": 2}
    assert type(listed["eval_strategy"]) is str


def test_a_real_config_is_translated() -> None:
    trl = pytest.importorskip("trl")
    made = translate(
        arguments_of(trl.GRPOConfig(output_dir="x", use_cpu=True, bf16=False, num_generations=4))
    )
    assert made["rollout"] == {"num_generations": 4, "num_prompts": 2}
    assert made["policy"]["dtype"] == "float32"


# ---- the mapping `trl` of a file

RUN = """
include: [methods/grpo/grpo.yaml]
rollout: {engine: [vision.generate], num_prompts: 4}
trl: {beta: 0.01, num_generations: 4, max_completion_length: 32, scale_rewards: batch}
"""


def written(home: Any, text: str) -> dict[str, Any]:
    (home / "run.yaml").write_text(text)
    return read(home / "run.yaml")


def test_a_mapping_of_trls_arguments_wins_over_included_files(tmp_path: Any) -> None:
    raw = written(tmp_path, RUN)
    assert raw["objective"]["penalty"] == [{"name": "k3", "coef": 0.01, "use_bias_correction_kl": True}]
    assert raw["objective"]["surrogate"] == {"name": "clip", "epsilon": 0.2}
    # What the block leaves out is TRL's default, where the file says nothing.
    engine = {"name": "vision.generate", "max_completion_length": 32, "temperature": 1.0, "top_p": 1.0}
    assert raw["rollout"] == {"engine": [{**engine, "top_k": 0}], "num_prompts": 4, "num_generations": 4}
    assert raw["advantage"] == ["total", {"name": "group_normalize", "scale": "batch"}]
    assert "trl" not in raw


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_prompts: 4", "num_generations: 4", "'rollout.num_generations' is given, and the arguments in"),
        ("[vision.generate]", "[{name: x, max_completion_length: 8}]", "max_completion_length' is given"),
        ("engine: [vision.generate], ", "", "'rollout.engine' names nothing up to here"),
        ("{beta: 0.01", "{betta: 0.01", "no argument 'betta'; did you mean 'beta'"),
        ("trl: {", "trl: [{", "cannot read"),
        ("trl: {beta: 0.01, num_generations: 4, max_completion_length: 32, scale_rewards: batch}", "trl: 3",
         "'trl' must be a mapping of TRL's arguments, not 3"),
    ],
)  # fmt: skip
def test_faults_of_that_mapping(tmp_path: Any, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, RUN.replace(old, new))
