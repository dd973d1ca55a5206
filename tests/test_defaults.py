"""The numbers that pieces take where a configuration names none: runs that name none depend on them."""

from __future__ import annotations

import inspect

import pytest

import mmrl.core.reward_table
from tests.support.configs import library_pieces

BETA = {"beta": 0.1}  # TRL's, of all comparisons
KL = {"coef": 0.001}  # verl's
DEFAULTS = {
    "advantage": {
        "action_credit": {"coef": 0.5},  # our reading of HRPO
        "alignment": {"beta": 2.0, "gamma": 0.96},  # AdAlign
        "alternate": {  # Vision-Zero
            **{"rho": 0.95, "high": 0.9, "few": 0.1, "low": 0.4, "many": 0.5},
            **{"min_stay": 5, "patience": 20},
        },
        "delegated_reward": {"failed": 0.1, "below": 0.1, "above": 1.0},  # M-GRPO
        "gated_bonus": {"format_weight": 0.2, "bonus_weight": 0.4},  # HiPRAG
        "gigpo": {"gamma": 0.95, "omega": 1.0, "eps": 1e-6},
        "hae": {"gamma": 0.99, "lam": 0.95, "lam_segment": 0.95},  # HiPER
        "hae_with_switches": {"gamma": 0.99, "lam": 0.95, "lam_segment": 0.95},
        "history_groups": {"depth": 2, "gamma": 0.95, "alpha": 1.0, "weight_offset": 1},  # HGPO
        "partial_credit": {"alpha": 0.3, "threshold": 0.5},  # E-GRPO
        "role_baseline": {"decay": 0.95},  # Vision-Zero
        "sibling_shape": {"gamma": 0.5, "lam": 0.5},  # MARS2
        "tool_productivity": {"threshold": 0.5, "smoothing": 1.0},  # our reading of OTC-PO
        "tempsamp_anchor": {"lambda_off": 1.2},  # TempSamp-R1, as `tempsamp_downscale` and `tempsamp_shaping`
        "batch_normalize": {"eps": 1e-4},  # TRL's, as those of the others
        "barrier": {"t": 20.0, "floor": 0.001, "decay": 0.9},  # C-MORL; the decay is ours
        "best_vs_worst": {"margin": 0.0, "length_ratio": 0.0},
        "bilevel_pairs": {"margin": 0.0, "threshold": 0.5},  # our reading of AdaR1
        "tempsamp_downscale": {"factor": 0.8, "max_reward": 1.0},
        "best_hint": {"threshold": 0.0, "temperature": 0.3},  # HiLL
        "hint_reward": {"threshold": 0.0, "temperature": 0.3},
        "first_success": {"threshold": 0.0, "replace": 1},  # Scaf-GRPO
        "group_center": {"shift": 0.0},
        "group_normalize": {"eps": 1e-4, "damping": 1.0},
        "high_covariance": {"share": 0.0002},  # KL-Cov
        "curvature": {  # CAPO, of GRPO
            **{"learning_rate": 1.5e-5, "max_fisher": 1e-4, "max_hessian": 1e-2, "max_share": 1.0}
        },
        "difficulty_limit": {"shortest": 1000, "longest": 4000, "decay": 0.9},  # DLER; two are our reading
        "hot_mix": {"entropy": 0.0, "target": 0.25, "limit": 0.1, "threshold": 0.05},  # DCPO
        "rank_velocity": {"gain": 2.0, "decay": 0.7},  # VERL
        "high_entropy": {"top": 0.2},  # the 80/20 rule
        "leave_one_out": {"eps": 1e-4},
        "clip_advantage": {"max_advantage": 5.0},  # Flow-GRPO
        "scale": {"factor": 0.2},  # AWM
        "scale_hinted": {"max_reward": 1.0, "eps": 1e-6},
        "kl_in_reward": {"coef": 0.05},  # TRL's, of RLOO
        "adora": {"threshold": 0.5, "factor": 0.1},
        "asymmetric_difficulty": {"alpha": 1.0, "eps": 1e-6},
        "best_margin": {"eps": 1e-6},
        "branch_pairs": {"threshold": 0.5},  # TreeCUA-DPO: right or not
        "capped_bonus": {"coef": 1.0, "cap": 0.5},
        "conditional_halves": {"mu": 1.0, "a": 1.0, "b": 0.0},  # CANON
        "conflict_tokens": {"positive": 2.0, "negative": 0.0, "entropy_coef": 0.1},  # GTPO
        "constant": {"value": 1.0},
        "consistency_mix": {"gamma": 20.0, "threshold": 0.837, "eps": 1e-6},  # COPO
        "covariance_mask": {"share": 0.0002, "low": 1.0, "high": 5.0},  # Clip-Cov
        "distinct": {"threshold": 0.5, "tau": 0.15},  # DaGRPO
        "drop_zero": {"atol": 0.0},
        "entropy_rank": {"max_reward": 0.1, "share": 0.2},  # our reading of R3
        "entropy_width": {"alpha": 1.0, "beta": 1.0, "pivot": 0.8},  # HAPO
        "group_normalize_by_step": {"limit": 5.0, "eps": 1e-6},  # HAPO
        "group_median": {"mad_floor": 0.001},  # MC-GRPO
        "log_mean_exp": {"tau": 1.0},
        "negative_only": {"positive_weight": 0.0},
        "rarity_weights": {"alpha": 1.0, "sigma": 0.2, "eps": 1e-6},  # VeRPO
        "turn_discount": {"gamma": 0.9},  # our reading of VeRPO
        "share_among_turns": {"above": 0.5, "largest": 1.0},  # meow-tea-taro
        "semantic_entropy": {"alpha": 0.0417},  # SEED-GRPO
        "serial_decay": {"base": 2.0},  # S-GRPO
        "gae": {"gamma": 1.0, "lam": 0.95},  # GAE
        "lambda_returns": {"gamma": 1.0, "lam": 0.95},
        "process_returns": {"coef": 5.0},  # PRIME's script
        "shrunk_mean": {"low": 0.0, "high": 1.0},
        "strategic_entropy": {"coef": 0.4, "kappa": 2.0},  # our reading of EGPO
        "tree_values": {"eps": 1e-8},  # SPO
        "process_advantage": {"alpha": 3.0},  # PAV
        "step_potential": {"alpha": 0.5, "xi": 0.5, "threshold": 0.9},  # SPAE
        "set_baseline": {"size": 4},  # Polychromic
        "tiers": {"zones": 4, "alpha": 0.2},  # our reading of SSL
        "variance_weights": {"eps": 1e-6},
        "variance_width": {
            "span": 1.0,
            "by_advantage": 0.5,
            "by_variance": 0.5,
            "reference": 2.0,
        },  # ours, ETR
        "virtual_maximum": {"max_reward": 1.0, "num_virtual": 1, "eps": 1e-6},  # NGRPO
        "length_band": {"shortest": 320, "longest": 512, "bonus": 0.2, "above": 0.1},  # Video-R1
        "vision.temporal_contrast": {"min_ratio": 0.8, "bonus": 0.3, "above": 0.1},
        "returns": {"gamma": 1.0},
        "tempsamp_shaping": {"threshold": 0.8, "alpha1": 0.01, "alpha2": 1.0},
        "turning_points": {"atol": 0.0},
        "value_anchor": {"k": 0.1, "steps": 5},
    },
    "surrogate": {
        "elastic_clip": {"epsilon": 0.2},  # as `clip`
        "clip": {"epsilon": 0.2},
        "in_range": {"epsilon": 0.2, "outer_low": 0.6, "outer_high": 2.0, "temperature": 1.0},  # REC
        "cispo": {"clip_max": 5.0, "clip_min": 0.0},  # arXiv 2510.13786
        "diffusion_nft": {"beta": 1.0, "max_advantage": 5.0},
        "sapo": {"temperature_pos": 1.0, "temperature_neg": 1.05},
        "gamma_weight": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},  # VESPO, TRL's
        "off_policy_mask": {"threshold": 0.5},  # DeepSeek-V3.2
    },
    "aggregation": {},
    "ratio": {"geometric_ratio": {"epsilon": 0.4}},  # GMPO
    "step_weight": {"truncated_importance": {"clip_max": 3.0}},  # TRL's
    "implicit_reward": {"ld_log_ratio": {"ld_alpha": 0.5}, "f_divergence": {"alpha": 0.5}},  # alpha: TRL's
    "penalty": {
        "gaussian_kl": {"coef": 0.04},  # Flow-GRPO
        "sft": {"coef": 0.5},
        "k1": KL,
        "k2": KL,
        "kl_abs": KL,
        "k3": KL,
        "entropy_bonus": {"coef": 0.001},
        "entropy_corridor": {**KL, "mean": 0.0, "low": 0.5, "high": 1.5, "delta": 0.1},  # EPO's scripts
        "kl_hinge": {"coef": 1000.0, "delta": 1e-4},  # DisCO
        "lost_likelihood": {"coef": 0.2},  # LLDS
        "ratio_variance": {"coef": 0.04},
        "covariance_kl": {"coef": 1.0},  # KL-Cov
        "reverse_kl": {"coef": 1.0},
        "norm_hinge": {"coef": 1.0, "factor": 1.1},
        "velocity_mse": {"coef": 0.003, "noise_level": 0.7},
    },
    "compare": {
        "cross_entropy": {"beta": 0.05},  # PRIME
        "all_pairs": {"epsilon": 0.2},
        "aot": {**BETA, "label_smoothing": 0.0},
        "discopop": {"beta": 0.05, "tau": 0.05},  # the paper's
        "discriminate": {"tau": 10.0},  # DisCO
        "dno": {**BETA, "scale": 1.0},
        "regression": {"delta": 0.01},  # our reading of Reg-GRPO
        "anchor_chosen": {**BETA, "delta": 0.0},
        "apo_down": BETA,
        "apo_zero": BETA,
        "bco_pair": {**BETA, "delta": 0.0},
        "exo_pair": {**BETA, "label_smoothing": 1e-3},
        "hinge": BETA,
        "ipo": BETA,
        "kto": {**BETA, "delta": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        "nca_pair": BETA,
        "plackett_luce": {"beta": 12.0, "tau": 0.05},  # GDRO
        "robust": {**BETA, "label_smoothing": 0.1},
        "sigmoid": {**BETA, "gamma": 0.0, "label_smoothing": 0.0},
        "sigmoid_each": BETA,
        "sppo_hard": BETA,
        "wpo": {"max_weight": 1.0},  # TRL's
    },
    "schedule": {
        "periodic": {"period": 640},  # SIRI
        "towards": {"low": 0.0, "rate": 0.1, "start": 0.0},
        "constant": {"warmup_steps": 0},
        "cosine": {"warmup_steps": 0},
        "linear": {"warmup_steps": 0},
        "ramp": {"delay": 0},
        "last_metric": {"start": 0.0},
        "running_mean": {"start": 0.0},
        "ema_warmup": {"limit": 0.9, "offset": 10},  # Flow-GRPO
        "sliding_window": {
            "start": 0,
            "step": 1,
            "every": 25,
            "least": 1,
            "rate": 0.1,
            "after": 13,
        },  # MixGRPO
    },
    "sampler": {
        "allocate": {
            **{"prior_count": 2.0, "at_least": 2, "at_most": 128},  # V_0
            **{"rollout_cost": 0.0039, "exploration": 0.5},  # V_0.5, XRPO
        },
        "learning_velocity": {"decay": 0.9, "floor": 0.05},  # our reading of GEAR
        "pools": {"earlier": 0.2, "stage": 0.0},
        "selected_by_difficulty": {"num_selected": 2500},  # Time-R1
        "vision.difficulty_augmentation": {  # DeepVideo-R1; the two largest are our reading
            **{"window": 100, "max_reward": 1.0, "max_hint": 0.5, "max_noise": 0.5}
        },
        "source_bandit": {"temperature": 0.1, "window": 300},  # DUMP
        "vade": {"decay_drawn": 0.2, "decay_others": 0.999, "init_count": 8.0},  # the paper's figure
        "variance_aware": {  # MMR1's final model, the steps are those of its code
            **{"variance_weight": 0.8, "diversity_weight": 0.2, "weighted_share": 0.5},
            **{"momentum": 0.0, "update_steps": 4},
        },
        "with_difficulty_hints": {"max_hint": 0.5, "share": 0.5, "max_reward": 1.0},
        "with_experience": {"max_experiences": 50},
        "with_reflection": {"threshold": 0.5, "window": 16, "max_letters": 4000},  # our reading
        "with_solved_examples": {  # XRPO; all but the first are our reading
            **{"examples": 2, "threshold": 0.5, "capacity": 2048, "max_letters": 1000}
        },
        "with_hints": {
            **{"written": 0, "cuts": 4, "num_hinted": 1, "hints_per_round": 1, "start": 0},
            "threshold": 0.0,
        },
    },
    "solver": {
        "diffusion.cps": {"noise_level": 0.8},
        "diffusion.dance_sde": {"noise_level": 0.3},
        "diffusion.flow_sde": {"noise_level": 0.7},
    },
    "likelihood": {
        "diffusion.matching": {  # AWM
            **{"power": 0.25, "draws": 6, "fraction": 0.9, "shift": 3.0, "lowest": 0.2},
            "segments": 1,
        },
    },
}


def numbers(target) -> dict[str, float]:
    """Read the options of a piece that are numbers by default."""
    made = target.__init__ if inspect.isclass(target) else target
    options = inspect.signature(made).parameters.items()
    return {name: one.default for name, one in options if type(one.default) in (int, float)}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_numbers_by_default_are_those_of_the_papers_and_libraries(kind):
    found = {entry.full_name: numbers(entry.target) for entry in library_pieces(kind)}
    found = {name: options for name, options in found.items() if options}
    wrong = {name for name in found.keys() | DEFAULTS[kind] if found.get(name) != DEFAULTS[kind].get(name)}
    assert not wrong, (
        f"DEFAULTS['{kind}'] of tests/test_defaults.py must hold, with their source in a comment: "
        + (", ".join(f"'{name}': {found.get(name) or 'nothing'}" for name in sorted(wrong)))
    )


def test_switches_are_off_but_where_a_method_has_them_on():
    on = set()
    for kind in DEFAULTS:
        for entry in library_pieces(kind):
            made = entry.target.__init__ if inspect.isclass(entry.target) else entry.target
            options = inspect.signature(made).parameters.items()
            on |= {f"{entry.full_name}.{name}" for name, one in options if one.default is True}
    turning = {"consistent", "balance", "first_step"}
    wanted = {f"turning_points.{name}" for name in turning} | {
        "sliding_window.roll_back",
        "selected_by_difficulty.shuffle",
        "group_median.drop_pivot",
        "capped_bonus.only_positive",
        "conflict_tokens.per_conflict",
        "shared_steps.history",
        "uniform.shuffle",
        "vade.thompson",
    }
    assert on == wanted, (
        f"{sorted(on ^ wanted)}: a switch is False by default, unless its method has it on and "
        "tests/test_defaults.py lists it here"
    )


def test_rewards_closer_than_1e_8_are_equal():
    assert mmrl.core.reward_table.EQUAL == 1e-8
    assert mmrl.core.reward_table.ABSENT == -1
