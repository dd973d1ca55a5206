"""`mmrl.Trainer`: objects as models, functions as rewards, datasets in memory, the same run as from YAML."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, EarlyStoppingCallback, TrainerCallback

import mmrl
from mmrl.config.loading import ConfigError
from mmrl.config.schema import as_plain
from tests.diffusion import tiny

TINY = {
    "policy": {"dtype": "float32"},
    "rollout": {"num_prompts": 2, "engine": {"0": {"max_completion_length": 6}}},
    "max_steps": 2,
    "report": {"trackers": [], "startup_checks": [], "logging_steps": 1},
}


def length(prompts, completions, **columns):
    return [float(len(str(text))) for text in completions]


def images(count: int) -> list[Image.Image]:
    draw = numpy.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 255, (28, 28, 3), dtype=numpy.uint8)) for _ in range(count)]


def rows() -> list[dict]:
    return [{"question": f"how many {i}?", "answer": str(i), "image": x} for i, x in enumerate(images(3))]


def args(folder: Path, **more) -> dict:
    return {**TINY, "output_dir": str(folder), "num_generations": 3, "learning_rate": 1e-3, **more}


SMALL = Dataset.from_list([{"prompt": "a"}])
VISUAL_QA = {"data": {"name": "vision.visual_qa"}}


def journal(folder: Path) -> list[dict]:
    """Read the metrics of a run without those that are times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "time" not in k and "seconds" not in k} for line in lines]


@pytest.fixture(scope="module")
def qwen(checkpoint):
    return str(checkpoint("qwen2_5_vl"))


def test_the_same_run_from_yaml_and_from_python_has_the_same_journal(qwen, tmp_path):
    data = tmp_path / "train.jsonl"
    with data.open("w") as file:
        for i, row in enumerate(rows()):
            row["image"].save(tmp_path / f"{i}.png")
            file.write(json.dumps({**row, "image": f"{i}.png"}) + "\n")
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        json.dumps(
            {
                **{key: value for key, value in TINY.items() if key != "max_steps"},
                "include": ["methods/grpo/grpo.yaml"],
                "policy": {"name": "vision.tokens", "model": qwen, "dtype": "float32"},
                "data": {"name": "vision.visual_qa", "path": str(data)},
                "rewards": [f"{__name__}:length"],
                "rollout": {
                    "num_prompts": 2,
                    "engine": [{"name": "vision.generate", "max_completion_length": 6}],
                },
                "trl": {"num_generations": 3, "learning_rate": 1e-3, "max_steps": 2},
                "output_dir": str(tmp_path / "yaml"),
            }
        )
    )
    mmrl.Trainer(config=yaml, quiet=True).train()
    model = AutoModelForImageTextToText.from_pretrained(qwen, dtype=torch.float32)
    python = mmrl.Trainer(
        model,
        length,
        args(tmp_path / "python", **VISUAL_QA),
        rows(),
        processing_class=AutoProcessor.from_pretrained(qwen),
        quiet=True,
    )
    output = python.train()
    assert journal(tmp_path / "yaml") == journal(tmp_path / "python")
    assert output.global_step == 2
    assert output.training_loss == pytest.approx(sum(r["loss"] for r in python.history) / 2)
    assert any("length" in name for name in python.history[0])
    # The object itself was trained.
    assert not torch.equal(
        model.get_output_embeddings().weight,
        AutoModelForImageTextToText.from_pretrained(qwen, dtype=torch.float32).get_output_embeddings().weight,
    )


def test_a_dataset_with_images_and_a_function_without_a_module(qwen, tmp_path):
    table = Dataset.from_list(rows())
    reward = lambda completions, answer, **columns: [  # fmt: skip
        float(a in str(c)) for a, c in zip(answer, completions, strict=True)
    ]
    trainer = mmrl.Trainer(qwen, [reward, "vision.short_answer"], args(tmp_path / "a", **VISUAL_QA), table,
                           eval_dataset=rows(), quiet=True)  # fmt: skip
    assert [piece.name for piece in trainer.config.rewards] == ["python:<lambda>", "vision.short_answer"]
    trainer.train()
    measured = trainer.evaluate()
    assert "eval_short_answer" in measured
    answers = trainer.predict(rows()[:2])
    assert [answer.target for answer in answers] == ["0", "1"]
    assert all(set(answer.rewards) == {"<lambda>", "short_answer"} for answer in answers)
    saved = trainer.save_model(tmp_path / "model")
    assert AutoModelForImageTextToText.from_pretrained(saved)


def test_a_configuration_as_a_dictionary_with_includes(qwen):
    config = mmrl.load(
        {
            "include": ["methods/grpo/dapo.yaml"],
            "policy": {"name": "vision.tokens", "model": qwen},
            "data": {"name": "vision.visual_qa", "path": "rows.jsonl"},
            "rollout": {"engine": ["vision.generate"]},
        }
    )
    assert as_plain(config)["objective"]["surrogate"]["epsilon_high"] == 0.28


class Noting(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **others):
        self.events.append(("begin", state.global_step, args.max_steps))

    def on_step_end(self, args, state, control, **others):
        self.events.append(("step", state.global_step))

    def on_log(self, args, state, control, logs, **others):
        self.events.append(("log", logs["step"], len(state.log_history)))

    def on_train_end(self, args, state, control, **others):
        self.events.append(("end", state.global_step))


def test_callbacks_of_transformers_are_called(qwen, tmp_path):
    noting = Noting()
    mmrl.Trainer(qwen, length, args(tmp_path, **VISUAL_QA), rows(), callbacks=[noting], quiet=True).train()
    assert noting.events == [
        ("begin", 0, 2), ("step", 1), ("log", 1, 1), ("step", 2), ("log", 2, 2), ("end", 2),
    ]  # fmt: skip


def constant(completions, **columns):
    return [1.0 + 0.0 * len(str(text)) for text in completions]


def test_early_stopping_ends_a_run_and_holds_after_a_resume(qwen, tmp_path):
    def make():
        settings = args(
            tmp_path,
            **VISUAL_QA,
            max_steps=6,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            metric_for_best_model="eval_constant",
        )
        stopping = EarlyStoppingCallback(early_stopping_patience=2)
        return mmrl.Trainer(qwen, constant, settings, rows(), rows()[:1], callbacks=[stopping], quiet=True)

    assert make().train().global_step == 3  # the first evaluation is the best, two are no better
    assert (tmp_path / "checkpoint-3").is_dir()
    assert make().train().global_step == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "there is no model"),
        ({"method": "grpoo"}, "did you mean 'grpo'"),
        ({"reward_funcs": [3]}, "a reward must be a function"),
        ({"train_dataset": 3}, "'train_dataset' must be a dataset"),
        ({"train_dataset": {"prompt": ["a"]}}, "'train_dataset' is a dictionary; wanted rows"),
        ({"train_dataset": DatasetDict(train=SMALL, test=SMALL)}, "has the splits train, test; give one"),
        ({"reward_funcs": [], "method": "dapo"}, "rewards: no reward has a weight"),
        ({"args": {"reward_weights": [1.0, 2.0]}}, "2 numbers for 1 rewards"),
        ({"model": torch.nn.Linear(1, 1)}, "processing_class"),
        ({"peft_config": LoraConfig(r=2, use_dora=True)}, "'use_dora=True' of TRL is not here"),
        ({"ref_model": torch.nn.Linear(1, 1)}, "`ref_model` is for pairs"),
        ({"rollout_func": len}, "'rollout_func' of TRL's trainers is not here. Write an engine"),
        ({"rollout_fun": len}, "no argument 'rollout_fun'; did you mean 'rollout_func'"),
    ],
)
def test_wrong_arguments_are_named(qwen, tmp_path, changed, message):
    given = {"model": qwen, "reward_funcs": length, "args": args(tmp_path, **VISUAL_QA)}
    if "args" in changed:
        changed = {"args": {**given["args"], **changed["args"]}}
    with pytest.raises(ConfigError, match=message):
        mmrl.Trainer(**{**given, "train_dataset": rows(), **changed}, quiet=True)


def test_an_adapter_is_read_from_a_lora_config(qwen, tmp_path):
    trainer = mmrl.Trainer(
        qwen, length, args(tmp_path, **VISUAL_QA), rows(), quiet=True,
        peft_config=LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], lora_dropout=0.1),
    )  # fmt: skip
    options = trainer.config.policy.options
    assert (options["lora_rank"], options["lora_alpha"], options["lora_target_modules"]) == (
        2,
        6.0,
        ["q_proj"],
    )
    adapted = {name for name, module in trainer.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted and all(name.endswith("q_proj") for name in adapted)


def test_a_configuration_that_names_an_object_elsewhere_says_what_to_do():
    from mmrl.config import objects

    with pytest.raises(ConfigError, match="run that program again"):
        objects.get("python:nothing_here")


def test_a_pipeline_object_is_trained_for_prompts_in_memory(pipelines, tmp_path):
    def redness(prompts, completions, **columns):
        return [float(image[0].float().mean() - image[1:].float().mean()) for image in completions]

    pipe = tiny.load(pipelines("sd3"))
    settings = {
        "policy": {"lora_rank": 2},
        "rollout": {
            "num_prompts": 2,
            "engine": {"0": {"num_inference_steps": 3, "height": 16, "width": 16, "guidance_scale": 1.0}},
        },
        "num_generations": 2,
        "max_steps": 1,
        "report": {"trackers": [], "startup_checks": []},
        "output_dir": str(tmp_path),
    }
    prompts = [{"prompt": "a red cube"}, {"prompt": "a blue ball"}]
    trainer = mmrl.Trainer(pipe, redness, settings, prompts, method="flow_grpo", quiet=True)
    assert trainer.config.data.name == "diffusion.prompts"
    trainer.train()
    assert "rewards/redness/mean" in trainer.history[0]
    answers = trainer.predict(prompts)
    assert [(answer.answer.mode, *answer.answer.size) for answer in answers] == [("RGB", 16, 16)] * 2


def test_preference_pairs_in_memory_are_trained_with_dpo(qwen, tmp_path):
    pairs = [
        {"prompt": "what is it?", "chosen": f"a dog {i}", "rejected": "a cat", "image": image}
        for i, image in enumerate(images(2))
    ]
    settings = {k: v for k, v in args(tmp_path).items() if k != "num_generations"}
    settings["rollout"] = {"num_prompts": 2}
    settings["beta"] = 0.2
    trainer = mmrl.Trainer(qwen, args=settings, train_dataset=pairs, method="dpo", quiet=True)
    assert as_plain(trainer.config)["objective"]["compare"][0]["beta"] == 0.2
    trainer.train()
    assert trainer.history[0]["loss"] == pytest.approx(numpy.log(2))  # -log sigmoid(0): nothing learned yet


@dataclasses.dataclass
class Arguments:
    """Some fields of TRL's `GRPOConfig`, with its defaults."""

    beta: float = 0.0
    num_generations: int = 8
    learning_rate: float = 1e-6
    max_steps: int = -1
    output_dir: str = ""


def test_an_object_of_arguments_is_completed_by_the_defaults_of_trl(qwen, tmp_path):
    def made(**more):
        given = Arguments(beta=0.1, num_generations=4, max_steps=2, output_dir=str(tmp_path))
        asked = [{"prompt": row["question"], "image": row["image"]} for row in rows()]
        return as_plain(mmrl.Trainer(qwen, length, given, asked, quiet=True, **more).config)

    alone = made()
    assert made(method="grpo") == alone
    # TRL's default loss is DAPO's, the mean over all tokens.
    assert alone["objective"]["penalty"][0]["coef"] == 0.1
    assert alone["objective"]["aggregation"] == {"name": "step_mean"}
    assert alone["learn"]["learning_rate"] == {"name": "linear", "start": 1e-6, "end": 0.0, "steps": 2}


def test_a_method_that_filters_by_a_reward_of_its_own_filters_by_the_first_one_given(qwen, tmp_path):
    asked = [{"prompt": row["question"], "image": row["image"]} for row in rows()]
    trainer = mmrl.Trainer(qwen, [length, constant], args(tmp_path), asked, method="dapo", quiet=True)
    assert trainer.config.group_filter.options["of"] == "length"


def test_two_functions_of_one_name_stay_two(qwen, tmp_path):
    short, long, other = (lambda completions, n=n, **columns: [n] * len(completions) for n in (1.0, 2.0, 9.0))
    asked = [{"prompt": row["question"], "image": row["image"]} for row in rows()]
    rewards = [{"name": short, "label": "short"}, {"name": long, "label": "long"}]
    trainer = mmrl.Trainer(qwen, rewards, args(tmp_path / "a"), asked, quiet=True)
    assert [piece.name for piece in trainer.config.rewards] == ["python:<lambda>", "python:<lambda>_2"]
    # Another trainer has a function of the same name; what the first one measures is still its own.
    mmrl.Trainer(qwen, other, args(tmp_path / "b"), asked, quiet=True)
    assert [prediction.rewards for prediction in trainer.predict(asked[:1])] == [{"short": 1.0, "long": 2.0}]


def test_training_twice_goes_on_from_where_it_ended(qwen, tmp_path):
    asked = [{"prompt": row["question"], "image": row["image"]} for row in rows()]
    trainer = mmrl.Trainer(qwen, length, args(tmp_path), asked, quiet=True)
    first = trainer.train()
    assert trainer.train().global_step == first.global_step == 2
    assert [record["step"] for record in trainer.history] == [0, 1]
