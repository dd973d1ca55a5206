"""Scripts of TRL with tools and environments: the classes run as they stand, from Python and from YAML."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial

import pytest
from datasets import Dataset
from PIL import Image

import mmrl
from mmrl.api.configuration import configuration
from mmrl.config.loading import ConfigError
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.models.chat_template import ChatTemplate
from tests.api.test_trainer import journal
from tests.vision.playing import of_letters

TINY = {"policy": {"dtype": "float32"}, "report": {"trackers": [], "startup_checks": []}}


class ClimbEnv:
    """In the form of TRL's documentation: `reset`, tools with docstrings, a reward from the state."""

    def __init__(self):
        self.rung = 0

    def reset(self, **kwargs) -> str | None:
        self.rung, self.done = 0, False
        self.top = kwargs.get("top") or random.randint(1, 6)
        return f"Climb to rung {self.top}."

    def get_reward(self) -> float:
        return float(self.rung == self.top)

    def climb(self, rungs: int) -> int:
        """
        Climb some rungs.

        Args:
            rungs: How many rungs to climb.

        Returns:
            The rung that you are on.
        """
        if self.rung > 12:
            raise ValueError("You fell.")
        self.rung += rungs
        return self.rung

    def look(self) -> list:
        """
        Look around.

        Returns:
            What you see, and a text.
        """
        shown = Image.new("RGB", (28, 28), (20 * (self.rung % 12), 90, 90))
        return [{"type": "image", "image": shown}, {"type": "text", "text": f"rung {self.rung}"}]


def near(environments, completions, **kwargs) -> list[float]:
    return [-float(abs(env.top - env.rung)) for env in environments]


def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: The number.

    Returns:
        Twice the number.
    """
    return 2 * number


@pytest.fixture
def talkative(monkeypatch):
    """Let a tiny model make calls, which it cannot write: by the letters of turns that end early."""
    ends = ChatTemplate.ends
    monkeypatch.setattr(WithTools, "parse", staticmethod(of_letters))
    more = lambda found: replace(found, tokens=[*found.tokens, *range(0, 256, 3)])
    monkeypatch.setattr(ChatTemplate, "ends", lambda self: more(ends(self)))


def arguments(folder, **more):
    return {**TINY, "output_dir": str(folder), "num_generations": 3, "rollout.num_prompts": 2, "max_steps": 2,
            "learning_rate": 1e-2, "max_completion_length": 24, **more}  # fmt: skip


def test_an_environment_is_trained_in_from_python_and_from_yaml(checkpoint, tmp_path, talkative):
    model = str(checkpoint("qwen2_5_vl"))
    prompt = [{"role": "user", "content": "Play."}]
    rows = Dataset.from_list([{"prompt": prompt, "top": top} for top in (1, 2)])
    trainer = mmrl.Trainer(
        model, near, arguments(tmp_path / "python"), rows, environment_factory=ClimbEnv, quiet=True
    )
    trainer.train()
    records = trainer.history
    assert max(record["tools/turns"] for record in records) > 1.5
    assert max(record["tools/calls"] for record in records) > 0.5
    assert {"rewards/ClimbEnv/mean", "rewards/near/mean"} <= records[0].keys()
    assert any(record["reward_std"] > 0 for record in records)
    assert any(record["grad_norm"] > 0 for record in records)
    # The same run from a file, with the names that a user would write.
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = {
        **TINY,
        "include": ["methods/grpo/grpo.yaml"],
        "policy": {"name": "vision.tokens", "model": model, "dtype": "float32"},
        "data": {"name": "vision.conversations", "path": str(data)},
        "rewards": [f"{__name__}:near", {"name": "precomputed", "key": "ClimbEnv", "label": "ClimbEnv"}],
        "rollout": {
            "num_prompts": 2,
            "engine": [
                "vision.generate",
                {
                    "name": "vision.with_environments",
                    "environment": f"{__name__}:ClimbEnv",
                    "max_turns": 100,
                    "max_images": 100,
                },
            ],
        },
        "trl": {"num_generations": 3, "max_steps": 2, "learning_rate": 1e-2, "max_completion_length": 24},
        "output_dir": str(tmp_path / "yaml"),
    }
    yaml = tmp_path / "run.yaml"
    yaml.write_text(json.dumps(plan))
    mmrl.Trainer(config=yaml, quiet=True).train()
    assert journal(tmp_path / "yaml") == journal(tmp_path / "python")


def engines(**given):
    return configuration("m", args={"num_generations": 4, **given.pop("args", {})}, **given).rollout.engine


def test_tools_and_environments_become_an_engine_without_other_limits_than_tokens():
    generate, held = engines(
        environment_factory=ClimbEnv, tools=[double, "vision.crop"], args={"max_completion_length": 300}
    )
    assert held.name == "vision.with_environments" and generate.options["max_completion_length"] == 300
    assert held.options["environment"] == [{"name": f"{__name__}:ClimbEnv", "label": "ClimbEnv"}]
    assert held.options["tool"] == [{"name": f"{__name__}:double"}, {"name": "vision.crop"}]
    assert held.options["max_completion_length"] == 300 and held.options["max_turns"] > 1000
    data = [{"prompt": "a"}]
    (_, held) = engines(
        tools=[double], reward_funcs=near, train_dataset=data, args={"max_tool_calling_iterations": 3}
    )
    assert held.name == "vision.with_tools" and held.options["max_turns"] == 4


def test_an_environment_that_says_what_to_do_needs_no_rows():
    config = configuration("m", args={"num_generations": 4}, environment_factory=partial(ClimbEnv))
    assert config.data.name == "episodes"
    assert [piece.options["key"] for piece in config.rewards] == ["ClimbEnv"]
    with pytest.raises(ConfigError, match="give `train_dataset`"):
        configuration("m", environment_factory={"one": ClimbEnv, "other": ClimbEnv})


def test_environments_by_name_have_rewards_by_name():
    config = configuration(
        "m", near, train_dataset=[{"prompt": "a", "environment": "one"}],
        environment_factory={"one": ClimbEnv, "other": "vision.grid_world"},
    )  # fmt: skip
    labels = [piece["label"] for piece in config.rollout.engine[1].options["environment"]]
    assert labels == ["one", "other"]
    assert [piece.options.get("label") for piece in config.rewards] == [None, "one", "other"]


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="has 'vision.with_tools' already"):
        engine = [{"name": "vision.generate"}, {"name": "vision.with_tools", "tool": ["vision.crop"]}]
        config = configuration("m", near, tools=[double], train_dataset=[{"prompt": "a"}])
        configuration(config={**vars(config), "rollout": {"engine": engine}}, tools=[double])
    with pytest.raises(ConfigError, match="no engine has any"):
        configuration("m", near, {"max_tool_calling_iterations": 3}, [{"prompt": "a"}])
    with pytest.raises(ConfigError, match="must be a class or a function, not 3"):
        configuration("m", environment_factory=3)
