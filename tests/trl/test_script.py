"""Scripts of TRL for vision-language models, ported by importing the trainer from here."""

from __future__ import annotations

import numpy
import pytest
from datasets import Dataset
from PIL import Image

from mmrl import DPOTrainer, GRPOTrainer
from mmrl.config.loading import ConfigError

trl = pytest.importorskip("trl")

SYSTEM_PROMPT = "First think inside <think> </think>, then answer inside <answer> </answer>."
pytestmark = pytest.mark.slow


def answer_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float]:
    return [float(text in c[0]["content"]) for c, text in zip(completions, solution, strict=True)]


def make_conversation(example):
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": example["problem"]}]
    return {"prompt": prompt}


def test_the_script_trains_saves_and_logs_what_trl_logs(checkpoint, tmp_path):
    from trl.rewards import think_format_reward

    draw = numpy.random.default_rng(0)
    pixels = [draw.integers(0, 255, (28, 28, 3), dtype=numpy.uint8) for _ in range(10)]
    dataset = Dataset.from_list(
        [
            {"problem": f"How many? {i}", "solution": str(i % 3), "image": Image.fromarray(image)}
            for i, image in enumerate(pixels)
        ]
    )
    dataset = dataset.train_test_split(test_size=2, seed=42)
    train_dataset, eval_dataset = (dataset[name].map(make_conversation) for name in ("train", "test"))
    train_dataset = train_dataset.remove_columns(["problem"])
    training_args = trl.GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, num_generations=4, per_device_train_batch_size=8,
        max_completion_length=6, learning_rate=1e-4, beta=0.04, bf16=False, use_cpu=True, report_to=[],
        logging_steps=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(checkpoint("qwen2_5_vl")),
        args=training_args,
        reward_funcs=[think_format_reward, answer_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quiet=True,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir + "/final")
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    names = ["reward", "reward_std", "kl", "entropy", "loss", "grad_norm", "completions/mean_length"]
    names += ["rewards/think_format_reward/mean", "rewards/answer_reward/mean"]
    assert set(names) <= trainer.history[0].keys()
    # TRL's defaults: DAPO's loss, a learning rate that falls linearly to 0, two prompts of four completions.
    config = trainer.config
    assert config.objective.options["aggregation"] == {"name": "step_mean"}
    assert [record["learning_rate"] for record in trainer.history] == [1e-4, 5e-5]
    assert (config.rollout.num_prompts, config.rollout.num_generations) == (2, 4)
    trainer.save_model(training_args.output_dir)  # as `grpo_vlm.py` does
    assert (tmp_path / "run" / "model.safetensors").is_file() and (tmp_path / "run" / "config.yaml").is_file()


@pytest.mark.parametrize("adapted", [False, True])
def test_pairs_are_compared_with_the_model_that_dpo_vlm_hands_over(checkpoint, tmp_path, adapted):
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText, AutoProcessor

    name = str(checkpoint("qwen2_5_vl"))
    model, reference = (AutoModelForImageTextToText.from_pretrained(name) for _ in range(2))
    image = Image.new("RGB", (28, 28), (200, 30, 30))
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
    rows = [{"prompt": asked, "images": [image], "chosen": f"red {i}", "rejected": "blue"} for i in range(4)]
    args = trl.DPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, bf16=False, use_cpu=True,
        logging_steps=1,
    )  # fmt: skip
    trainer = DPOTrainer(
        model,
        None if adapted else reference,
        args=args,
        train_dataset=rows,
        eval_dataset=None,
        processing_class=AutoProcessor.from_pretrained(name),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
        if adapted
        else None,
        quiet=True,
    )
    trainer.train()
    assert trainer.config.objective.name == "comparison"
    assert trainer.history[0]["loss"] == pytest.approx(numpy.log(2))  # nothing was learned before
    if not adapted:
        next(reference.parameters()).data += 1
        with pytest.raises(ConfigError, match="`ref_model` has other weights"):
            DPOTrainer(model, reference, args=args, train_dataset=rows, processing_class=object())
