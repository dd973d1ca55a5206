"""`mmrl keys` and `mmrl list`: what they print, and what they answer to names that do not exist."""

from __future__ import annotations

import pytest

from mmrl.cli import main


def test_keys_of_a_section(capsys):
    assert main(["keys", "rollout"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("rollout.num_generations"))
    assert "whole number, at least 1" in line and " 8 " in line and "rollouts per prompt" in line
    assert not any(line.startswith("learn.") for line in lines)


def test_all_keys_with_defaults_in_brackets(capsys):
    assert main(["keys"]) == 0
    printed = capsys.readouterr().out
    assert "[mean]" in printed, "no markup of rich"
    assert "of an evaluation" in printed and "cost_metrics" in printed and "output_dir" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["keys", "num_generations"],
            "no key is or begins with 'num_generations'; did you mean 'rollout",
        ),
        (["keys", "learn.learning_rte"], "did you mean 'learn.learning_rate'?"),
        (["list", "rewards"], "there is no kind 'rewards'; did you mean 'reward'?"),
        (["list", "methods", "gsqo"], "there is no method 'gsqo'; did you mean 'gspo'?"),
        (["list", "methods", "--family", "grounds"], "did you mean 'grounding'?"),
        (
            ["list", "reward", "--family", "grpo"],
            "--family is one of methods: mmrl list methods --family grpo",
        ),
        (["list", "reward", "shortanswer"], "did you mean 'vision.short_answer'?"),
    ],
)
def test_an_unknown_name_suggests(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_one_piece_whole(capsys):
    assert main(["list", "reward", "short_answer"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("reward vision.short_answer\n\nReward with 1 if the last answer block")
    assert "text or words or number" in printed and "Name of the answer block's tag." in printed
    assert "every reward also takes: weight, label" in printed
    assert "answers.py:" in printed
    assert "rewards: [{name: vision.short_answer, tolerance: 0.0, tag: answer}]" in printed


def test_a_piece_names_the_packages_that_it_needs(capsys):
    assert main(["list", "transform", "bnb_quantize"]) == 0
    assert "needs the package bitsandbytes: pip install 'mmrl[lowbit]'" in capsys.readouterr().out


def test_methods_are_listed_by_family(capsys):
    assert main(["list", "methods", "--family", "flow"]) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:6] == ["asked", "for", "by", "name", "name", "arXiv"]
    assert printed.index("flow_grpo ") < printed.index("flow  ") < printed.index("dance_grpo ")
    line = next(line for line in printed.splitlines() if line.startswith("flow_grpo "))
    assert "2505.05470" in line
    assert not any(line.startswith("dapo") for line in printed.splitlines())
    assert main(["list", "methods"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    titles = [line for line in lines if line in ("asked for by name", "flow", "grounding", "grpo")]
    assert titles == ["asked for by name", "flow", "grounding", "grpo"]


def test_one_method_whole(capsys):
    assert main(["list", "methods", "a_grae"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# A-GRAE (arXiv 2602.05548)")
    row = next(line for line in printed.splitlines() if line.startswith("asymmetric_difficulty"))
    assert row.split()[1] == "advantage"
    assert printed.rstrip().endswith("include: [methods/grpo/a_grae.yaml]")
