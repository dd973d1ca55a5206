"""Translation of TRL's arguments for the objective: loss, KL, reference, advantages, pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmrl.config.loading import ConfigError
from mmrl.config.plain import as_mapping
from mmrl.trl.given import DPO_LOSSES, GRPO_LOSSES, STEP_MEANS, Change, Given
from mmrl.trl.names import NAMES

SMOOTHED = ("robust", "exo_pair")
SFT_OBJECTIVE = {
    "objective.name": "policy_gradient",
    "objective.surrogate": "log_likelihood",
    "objective.aggregation": "step_mean",
}
DIVERGENCES = {  # maps TRL's `f_divergence_type` to the option `divergence`
    "reverse_kl": "",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
}
NO_DIVERGENCE = ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")


def objective(given: Given) -> Change:
    """Translate `loss_type` to a surrogate and an aggregation, or for DPO to comparisons of pairs."""
    if given.pairs:
        return pairs(given)
    if given.kind == "sft":
        _check_losses(given, ["nll", "chunked_nll"])
        return SFT_OBJECTIVE
    _check_losses(given, [*GRPO_LOSSES, *DPO_LOSSES, "sft"])
    threshold = given["off_policy_mask_threshold"]
    if "loss_type" not in given and threshold is not None:
        raise ConfigError(
            f"'off_policy_mask_threshold={threshold!r}' of TRL wraps the surrogate of `loss_type`; give that "
            "too, or write `off_policy_mask` at `objective.surrogate`"
        )
    kind, aggregation = GRPO_LOSSES[given.losses[0]]
    options = (
        {"max_completion_length": given["max_completion_length"]} if aggregation == "fixed_length" else {}
    )
    piece = {"name": kind, **_surrogate_options(given, kind, whole=True)}
    if threshold is not None:
        piece = {"name": "off_policy_mask", "threshold": threshold, "surrogate": piece}
    change: Change = {
        "objective.name": "policy_gradient",
        "objective.surrogate": piece,
        "objective.aggregation": {"name": aggregation, **options},
    }
    if kind == "gamma_weight":
        if given["importance_sampling_level"] != "token":
            raise ConfigError("'loss_type=vespo' of TRL has its own ratio of answers; leave out the level")
        change["objective.ratio"] = "sequence_sum"
    # `dr_grpo` divides by the maximum length, so the engine must have the same limit.
    return change | (
        {"rollout.engine.0.max_completion_length": given["max_completion_length"]} if options else {}
    )


def surrogate(given: Given) -> Change:
    """Translate clip ranges and temperatures to options of the current surrogate."""
    loss = str(given.values.get("loss_type"))
    named, place = loss in GRPO_LOSSES, "objective.surrogate"
    masked = given.at(f"{place}.name") == "off_policy_mask"
    if "off_policy_mask_threshold" in given if named else masked:
        place = f"{place}.surrogate"  # the surrogate that `off_policy_mask` wraps
    kind = GRPO_LOSSES[loss][0] if named else given.at(f"{place}.name") or "clip"
    options = _surrogate_options(given, kind, whole=False)
    return {f"{place}.{name}": value for name, value in options.items()}


def _surrogate_options(given: Given, kind: str, *, whole: bool) -> Change:
    """Return the options of a surrogate that were given, or with `whole` all its options."""
    names = {
        "clip": {"epsilon": "epsilon", "epsilon_high": "epsilon_high", "delta": "delta"},
        # One-sided surrogates in TRL read `epsilon_high`, or `epsilon` if `epsilon_high` is unset.
        "cispo": {"clip_max": "epsilon_high" if "epsilon_high" in given else "epsilon"},
        "sapo": {"temperature_pos": "sapo_temperature_pos", "temperature_neg": "sapo_temperature_neg"},
        "gamma_weight": {n: f"vespo_{n}" for n in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    }.get(kind, {})
    taken = {*names.values(), "epsilon"}  # `epsilon` is accepted even if unused
    for name, row in NAMES.items():
        if row.rule == "surrogate" and name not in taken and given[name] != row.default:
            raise ConfigError(f"'{name}' of TRL has no effect on the surrogate '{kind}'; leave it out")
    return {
        option: given[name]
        for option, name in names.items()
        if (whole or name in given) and given[name] is not None
    }


def length(given: Given) -> Change:
    """Translate `max_completion_length` to options of the engines, and to the divisor of `dr_grpo`."""
    if "max_completion_length" in given.nulls:
        raise ConfigError(
            "'max_completion_length=None' of TRL, an answer without limit, is not here; give one"
        )
    longest = given["max_completion_length"]
    change: Change = {"rollout.engine.0.max_completion_length": longest}
    change |= {f"{given.conversing}.max_completion_length": longest} if given.conversing else {}
    fixed = given.losses == ["dr_grpo"] or (
        "loss_type" not in given and given.at("objective.aggregation.name") == "fixed_length"
    )
    return change | ({"objective.aggregation.max_completion_length": longest} if fixed else {})


def _check_losses(given: Given, known: Sequence[str]) -> None:
    for name in given.losses:
        if name not in known:
            raise ConfigError(f"'loss_type={name!r}' of TRL is not here; there are {', '.join(known)}")


def pairs(given: Given) -> Change:
    """Translate DPO's losses to comparisons; without `loss_type`, to options of the present comparisons."""
    _check_losses(given, [*DPO_LOSSES, "sft"])
    options, reward = _pair_options(given), _implicit_reward(given)
    if "loss_type" not in given:
        there = given.at("objective.compare") or [""]
        return ({"objective.implicit_reward": reward} if reward else {}) | {
            f"objective.compare.{i}.{name}": value
            for i in range(len(there))
            for name, value in options(i).items()
        }
    names = {DPO_LOSSES.get(name, name) for name in given.losses}
    if "sigmoid_norm" in given.losses and len(given.losses) > 1:
        raise ConfigError("'sigmoid_norm' of TRL averages over tokens, the other losses do not; use it alone")
    listed = list(enumerate(given.losses))
    compare = [{"name": DPO_LOSSES[name], **options(i)} for i, name in listed if name != "sft"]
    change: Change = {
        "objective.name": "comparison",
        "objective.implicit_reward": reward
        or ("mean_log_ratio" if "sigmoid_norm" in given.losses else "log_ratio"),
        "objective.compare": compare,
        "references.ref": given.at("references.ref") or "frozen",
    }
    if "sft" in names:
        coef = options(given.losses.index("sft")).get("weight", 1.0)
        change |= {
            "objective.penalty": [{"name": "sft", "coef": coef}],
            "objective.aggregation": "group_mean",
        }
    return change


def _implicit_reward(given: Given) -> Change:
    """Return the implicit reward for `ld_alpha` or `f_divergence_type`; {} for the plain log-ratio."""
    divergence, ld_alpha = given["f_divergence_type"], given["ld_alpha"]
    if divergence not in DIVERGENCES:
        raise ConfigError(f"'f_divergence_type' of TRL is {', '.join(DIVERGENCES)}; not {divergence!r}")
    other = divergence != "reverse_kl"
    refused = [*NO_DIVERGENCE] if other else ["sigmoid_norm"] if ld_alpha is not None else []
    if wrong := [name for name in given.losses if name in refused]:
        raise ConfigError(
            f"'{'f_divergence_type' if other else 'ld_alpha'}' of TRL cannot be had with the loss "
            f"'{wrong[0]}' here; leave one of them out"
        )
    if other and ld_alpha is not None:
        raise ConfigError("'ld_alpha' and 'f_divergence_type' of TRL are two implicit rewards; give one")
    if ld_alpha is not None:
        return {"name": "ld_log_ratio", "ld_alpha": ld_alpha}
    alpha = {"alpha": given["f_alpha_divergence_coef"]} if divergence == "alpha_divergence" else {}
    return {"name": "f_divergence", "divergence": DIVERGENCES[divergence], **alpha} if other else {}


def _pair_options(given: Given) -> Callable[[int], Change]:
    """Return a function from the index of a comparison to its options."""
    weights, smoothing = given["loss_weights"], given["label_smoothing"]
    if weights and len(weights) != len(given.losses):
        raise ConfigError(f"'loss_weights' of TRL has {len(weights)} weights for the losses {given.losses}")

    def options(i: int) -> Change:
        there = given.at("objective.compare") or []
        named = there[i] if "loss_type" not in given and i < len(there) else given.losses[i]
        name = as_mapping(named).get("name")
        if smoothing and name not in SMOOTHED:
            raise ConfigError(
                f"'label_smoothing' of TRL has no effect on '{name}'; leave it out, or take "
                f"{' or '.join(SMOOTHED)}"
            )
        chosen: Change = {"beta": given["beta"]} if "beta" in given or "loss_type" in given else {}
        chosen |= {"label_smoothing": smoothing} if smoothing else {}
        chosen |= {"tau": given["discopop_tau"]} if name == "discopop" and "discopop_tau" in given else {}
        return chosen | ({"weight": weights[i]} if weights else {})

    return options


def penalty(given: Given) -> Change:
    """Translate `beta` and `entropy_coef` to a list of penalties; add the reference model for the KL."""
    change: Change = {}
    if given["sync_ref_model"]:
        decay, every = 1 - given["ref_model_mixup_alpha"], given["ref_model_sync_steps"]
        change["references.ref"] = {"name": "ema", "decay": decay, "every": every}
    if given.pairs:
        return change | (pairs(given) if "beta" in given and "loss_type" not in given else {})
    there = [as_mapping(piece) for piece in given.at("objective.penalty") or ()]
    level, corrected = given["importance_sampling_level"], given["use_bias_correction_kl"]
    if "beta" in given:
        there = [p for p in there if p["name"] not in ("k1", "k2", "k3")]
        if given["beta"]:
            there.append({"name": "k3", "coef": given["beta"], "use_bias_correction_kl": corrected})
            change.setdefault("references.ref", given.at("references.ref") or "frozen")
            if corrected and level == "sequence":
                raise ConfigError(
                    "with importance_sampling_level='sequence' TRL multiplies its KL by the ratio of the "
                    "sequence, and mmrl by the token's; set use_bias_correction_kl=False"
                )
    elif "use_bias_correction_kl" in given:
        there = [{**p, "use_bias_correction_kl": corrected} if p["name"] == "k3" else p for p in there]
    if "entropy_coef" in given:
        there = [p for p in there if p["name"] != "entropy_bonus"]
        if given["entropy_coef"]:
            if "loss_type" in given and given.losses[0] not in STEP_MEANS:
                raise ConfigError(
                    f"'entropy_coef' of TRL is a mean over tokens, and the loss '{given.losses[0]}' is not; "
                    f"take {', '.join(STEP_MEANS)}, or write `objective.penalty`"
                )
            there.append({"name": "entropy_bonus", "coef": given["entropy_coef"]})
    is_given = given.has("beta", "entropy_coef", "use_bias_correction_kl")
    alone = given.at("references") == {"ref": "frozen"} and "references.ref" not in change
    if given.whole and alone and not given["beta"]:
        change["references"] = None  # no penalty uses the reference
    return change | ({"objective.penalty": there} if is_given else {})


def advantage(given: Given) -> Change:
    """Translate reward scaling, reward aggregation and masking to advantage functions."""
    chain = list(given.at("advantage") or ())
    scale = {True: "group", False: "none"}.get(given["scale_rewards"], given["scale_rewards"])
    heads = {
        "group": ["total", "group_normalize"],
        "batch": ["total", {"name": "group_normalize", "scale": "batch"}],
        "none": ["total", "group_center"],
    }
    ways = ("sum_then_normalize", "normalize_then_sum")
    if scale not in heads or given["multi_objective_aggregation"] not in ways:
        raise ConfigError(
            f"'scale_rewards' of TRL is {', '.join(heads)}, True or False, and 'multi_objective_aggregation' "
            f"{' or '.join(ways)}; not {scale!r} and {given['multi_objective_aggregation']!r}"
        )
    if given.has("scale_rewards", "multi_objective_aggregation") or not chain:
        summed = given["multi_objective_aggregation"] == ways[0]
        chain = heads[scale] if summed else ["group_normalize", "total", "batch_normalize"]
    change: Change = {}
    if given["top_entropy_quantile"] < 1:
        chain = [*chain, {"name": "high_entropy", "top": given["top_entropy_quantile"]}]
    if given["mask_truncated_completions"]:
        chain = [*chain, "drop_truncated"]
        named = given.at("objective.aggregation.name")
        aggregation = GRPO_LOSSES.get(given.losses[0], ("", ""))[1] if "loss_type" in given else named
        # TRL's mean over rows includes masked rows; its mean over tokens does not.
        if aggregation not in (None, "step_mean"):
            change["objective.aggregation.count"] = "drawn"
    return {**change, "advantage": chain}


RULES = {f.__name__: f for f in (objective, surrogate, length, pairs, penalty, advantage)}
