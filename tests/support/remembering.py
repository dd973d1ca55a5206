"""Runs of the toys with every sampler, and with every engine that has a memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOYS = "tests.support.toys"
OBSERVING = "tests.support.observing"
RISING = {"name": "linear", "start": 0.0, "end": 1.0, "steps": 5}
SHARE = {"of": "share_right"}
SAMPLERS = {
    "vade": [{"name": "vade", **SHARE}],
    "variance_aware": [{"name": "variance_aware", "update_steps": 2, **SHARE}],
    "variance_aware, full passes": [
        {
            "name": "variance_aware",
            "refresh": "full",
            "update_steps": 3,
            "diversity": "edit_distance",
            **SHARE,
        }
    ],
    "group_by_length": [{"name": "group_by_length", "mega_batch": 2}],
    "source_bandit": [{"name": "source_bandit", "by": "source", "window": 7}],
    "learning_velocity": [{"name": "learning_velocity", "by": "source", "open_at": 0.15, **SHARE}],
    "pools": [
        {"name": "pools", "by": "source", "pools": ["even", "odd"], "earlier": 0.4, "stage": RISING},
    ],
    "allocate": [{"name": "vade", **SHARE}, {"name": "allocate", "at_most": 5, **SHARE}],
    "allocate, xrpo": ["uniform", {"name": "allocate", "rule": "xrpo", **SHARE}],
    "triage": [{"name": "triage", "weights": {"neutral": 1, "severe": 3}}],
    "selected_by_difficulty": [{"name": "selected_by_difficulty", "by": "difficulty", "num_selected": 6}],
    "hints": [{"name": "uniform"}, {"name": "with_hints", "hint_column": "hints", "threshold": 0.2, **SHARE}],
    "hints, next time": [
        {"name": "uniform"},
        {"name": "with_hints", "hint_column": "hints", "when": "next_time", "threshold": 0.2, **SHARE},
    ],
    "hints, written": [
        {"name": "uniform"},
        {
            "name": "with_hints",
            "written": 3,
            "hints_per_round": 3,
            "num_hinted": 2,
            "threshold": 0.2,
            **SHARE,
        },
    ],
    "hints by difficulty": [
        {"name": "uniform"},
        {"name": "with_difficulty_hints", "hint_column": "solution", "max_hint": 1.0, **SHARE},
    ],
    "reflection": [{"name": "uniform"}, {"name": "with_reflection", "threshold": 0.2, "window": 5, **SHARE}],
    "reflection on the best": [
        {"name": "uniform"},
        {"name": "with_reflection", "show": "best", "threshold": 0.3, **SHARE},
    ],
    "solved examples": [{"name": "uniform"}, {"name": "with_solved_examples", "threshold": 0.3, **SHARE}],
    "wordings": [{"name": "uniform"}, {"name": "with_wordings"}],
    "unfinished": [{"name": "uniform"}, {"name": "with_unfinished"}],
    "experience": [
        {"name": "uniform"},
        {"name": "with_experience", "experience_update": "contrast", "max_experiences": 7, **SHARE},
    ],
    "experience, by policy": [
        {"name": "uniform"},
        {"name": "with_experience", "experience_update": "by_policy", "max_experiences": 3, **SHARE},
    ],
}
MOSTLY = ("vade", "pools", "hints")  # they show what samplers keep: of a table, the prompts and a run
AUGMENTED = {  # asks a second time with noise and hints
    "data": "tests.papers.test_deepvideo_r1:filmed",
    "sampler": [
        "uniform",
        {"name": "vision.difficulty_augmentation", "hint_column": "solution", "max_reward": 0.2},
    ],
    "eval_steps": 0,
    "eval_on_start": False,
}
MEMORIES = {"with_replay": {}, "with_contrast": {"learn_from_replay": True}, "with_successes": {}}
# Without evaluations, whose bootstrap takes most of the time of so small a run.
QUICK = {"evaluation": {}, "eval_steps": 0, "eval_on_start": False}


HINT_REWARD = {"name": "hint_reward", "threshold": 0.2, **SHARE}
WRITING = {  # a second role writes the hints, and learns to
    "rewards": [
        {"name": f"{TOYS}:share_right", "at": "role=reasoner"},
        {"name": "precomputed", "key": "hint_gate", "label": "hint_gate", "at": "role=hinter"},
    ],
    "advantage": [
        {"name": "best_hint", "threshold": 0.2, **SHARE},
        "total",
        HINT_REWARD,
        {"name": "group_normalize", "by": ["group", "place", "role"]},
    ],
}


def of_sampler(name: str, policy: str = "slow") -> dict[str, Any]:
    """Write down what a run with one of `SAMPLERS` changes of `tests.support.resuming.EVERYTHING`."""
    rollout = {"num_prompts": 3, "num_generations": 3, "max_rounds": 2, "policy": policy}
    if name.startswith("hints"):
        usual = {"data": f"{TOYS}:hinted_prompts", "group_filter": {"name": "varied", **SHARE}}
        if "written" in name:
            rollout["engine"] = [f"{OBSERVING}:ToyHinting", "with_hinter"]
            usual |= WRITING
        return {**QUICK, **usual, "rollout": rollout, "sampler": SAMPLERS[name]}
    if name == "wordings":
        rollout["engine"] = [f"{OBSERVING}:ToyTokens"]
        return {**QUICK, "data": f"{OBSERVING}:worded", "rollout": rollout, "sampler": SAMPLERS[name]}
    if name == "unfinished":
        rollout |= {"engine": [f"{OBSERVING}:ToyTokens", f"{TOYS}:ToyWindow"], "max_rounds": 1}
        return {**QUICK, "data": f"{OBSERVING}:sourced", "rollout": rollout, "sampler": SAMPLERS[name]}
    rollout["engine"] = [f"{OBSERVING}:{'ToyWriting' if 'by policy' in name else 'ToyTokens'}"]
    return {**QUICK, "data": f"{OBSERVING}:sourced", "rollout": rollout, "sampler": SAMPLERS[name]}


def of_memory(name: str) -> dict[str, Any]:
    """Write down what a run with one of `MEMORIES` changes."""
    return {
        "policy": f"{TOYS}:ToyRecalling",
        "rewards": [f"{TOYS}:share_right"],
        "rollout": {
            "engine": [f"{TOYS}:ToyNoting", {"name": name, **MEMORIES[name]}],
            "num_prompts": 3,
            "num_generations": 3,
            "policy": "",
            "max_rounds": 1,
        },
        "group_filter": "keep_all",
    }


def remembering() -> dict[str, Mapping[str, Any]]:
    """List the changes of all of them by name."""
    return {
        **{f"sampler {name}": of_sampler(name) for name in SAMPLERS},
        "sampler vision.difficulty_augmentation": {**QUICK, **AUGMENTED},
        **{f"engine {name}": {**QUICK, **of_memory(name)} for name in MEMORIES},
    }
