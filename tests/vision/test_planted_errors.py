"""The doctor names errors of templates, targets and weights that are planted in a sound run."""

from __future__ import annotations

import json
import re
import shutil
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from mmrl.cli import main
from mmrl.rewards.adapters import per_outcome
from mmrl.vision.policies.tokens import Tokens

FAMILY = "qwen2_5_vl"
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
TURN = "<|im_start|>{{ m['role'] }}\n"
TEXT = "{% if c['type'] == 'text' %}"


@per_outcome
def alike(prompt, outcome):
    """Measure how alike an answer and the target are, since a model of random numbers never answers right."""
    return SequenceMatcher(a=str(prompt.target), b=outcome.text).ratio()


class Planted:
    """A sound run in a folder, of a tiny model over rows with images."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, Path(shutil.copytree(model, folder / "model"))
        Image.new("RGB", (44, 30), "red").save(folder / "a.png")
        self.rows = [{"question": f"Which colour, {i}?", "image": "a.png", "answer": c} for i, c in
                     enumerate(("red", "green", "blue", "grey"))]  # fmt: skip
        self.run = {
            "policy": {"name": "vision.tokens", "model": str(self.model), "dtype": "float32", "lora_rank": 2},
            "data": {"name": "vision.visual_qa", "path": str(folder / "rows.jsonl")},
            "rollout": {
                "engine": [{"name": "vision.generate", "max_completion_length": 6}],
                "num_prompts": 4,
                "num_generations": 4,
            },
            "rewards": [f"{__name__}:alike"],
            "advantage": ["total", "group_normalize"],
            "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "sequence_mean"},
            "output_dir": str(folder / "out"),
            "report": {"trackers": []},
            "max_steps": 1,
        }

    def doctor(self, capsys) -> tuple[int, str]:
        """Run the command, and give its exit code with what it finds wrong."""
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.run))
        code, said = main(["doctor", str(self.folder / "run.yaml")]), capsys.readouterr()
        return code, said.err + "".join(re.findall(r"^wrong .*\n(?: {7}.*\n)+", said.out, re.MULTILINE))

    def template(self, old: str, new: str) -> None:
        path = self.model / "chat_template.jinja"
        assert old in (text := path.read_text())
        path.write_text(text.replace(old, new))

    def settings(self, file: str, *keys: str, **changes) -> None:
        path = self.model / file
        whole = part = json.loads(path.read_text())
        for key in keys:
            part = part[key]
        part.update(changes)
        path.write_text(json.dumps(whole))

    def adapter(self, change) -> None:
        folder = self.folder / "adapter"
        Tokens(model=str(self.model), dtype="float32", lora_rank=2).save(folder)
        save_file(change(load_file(folder / ADAPTER)), folder / ADAPTER, {"format": "pt"})
        self.run["policy"]["adapter"] = str(folder)


def contents_as_lists(run):
    run.template(f"{TEXT}{{{{ c['text'] }}}}", f"{TEXT}{{{{ [c] }}}}")


def begins_twice(run):
    run.template("{% for m in messages %}", "<|endoftext|><|endoftext|>{% for m in messages %}")
    run.settings("tokenizer_config.json", bos_token="<|endoftext|>")


def begins_no_answer(run):
    run.template("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")


def ends_otherwise(run):
    run.settings("generation_config.json", eos_token_id=7)


def system_beside_user(run):
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    run.template("{% for m in messages %}", refusal + "{% for m in messages %}")
    run.rows[0]["system"] = "Be brief."


def thoughts_unread(run):
    says = {"role": "assistant", "content": "red", "reasoning_content": "so"}
    asked = {"role": "user", "content": "Which?"}
    run.rows = [{"messages": [asked, says, asked, {"role": "assistant", "content": "red"}], "answer": "red"}]
    run.run["data"] = {"name": "vision.conversations", "path": run.run["data"]["path"]}


def other_patches(run):
    run.settings("processor_config.json", "image_processor", merge_size=1)


def rewards_everything(run):
    for number, row in enumerate(run.rows):
        row["answer"] = str(number + 3)
    run.run["rewards"] = [{"name": "vision.short_answer", "form": "number", "tolerance": 10.0}]


def reward_of_other_targets(run):
    run.run["rewards"].append("vision.box_iou")


def target_of_nothing(run):
    for row in run.rows:
        row["answer"] = "<think>red</think>"
    run.run["rewards"] = ["vision.short_answer"]


def boxes_of_another_size(run):
    run.rows = [
        {"query": f"the box {i}", "image": "a.png", "bbox": [100 * i, 0, 100 * i + 90, 300]} for i in range(4)
    ]
    run.run["data"]["name"] = "vision.boxes"
    run.run["rewards"] = ["vision.box_iou"]


def lacks_a_layer(run):
    weights = load_file(run.model / WEIGHTS)
    kept = {name: value for name, value in weights.items() if "layers.1." not in name}
    save_file(kept, run.model / WEIGHTS, {"format": "pt"})


def half_an_adapter(run):
    run.adapter(lambda weights: dict(list(weights.items())[::2]))


def adapter_with_nan(run):
    run.adapter(lambda weights: {name: value.fill_(torch.nan) for name, value in weights.items()})


def adapter_of_another_base(run):
    base = load_file(run.model / WEIGHTS)
    Tokens(model=str(run.model), dtype="float32", lora_rank=2).save(run.folder / "adapter")
    save_file({name: 1.1 * value for name, value in base.items()}, run.model / WEIGHTS, {"format": "pt"})
    run.run["policy"]["adapter"] = str(run.folder / "adapter")


PLANTED = {
    contents_as_lists: "takes no",
    begins_twice: "begins with .* twice",
    begins_no_answer: "nothing begins an answer",
    ends_otherwise: "generation_config",
    system_beside_user: "no system role",
    thoughts_unread: "does not read `reasoning_content`",
    other_patches: "placeholder tokens",
    rewards_everything: "rewards.0. 'short_answer'",
    reward_of_other_targets: "box_iou",
    target_of_nothing: "short_answer",
    boxes_of_another_size: "box .0, 0, 90, 300. .* does not lie in its image of 44 x 30 .4 of 4",
    lacks_a_layer: "lack .* weights of",
    half_an_adapter: "are on one side only",
    adapter_with_nan: "hold NaN",
    adapter_of_another_base: "was trained over other weights",
}


@pytest.fixture
def run(checkpoint, tmp_path):
    return Planted(tmp_path, checkpoint(FAMILY))


def test_a_sound_run_is_healthy(run, capsys):
    assert run.doctor(capsys) == (0, "")


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_named(run, plant, capsys):
    plant(run)
    code, wrong = run.doctor(capsys)
    assert code and re.search(PLANTED[plant], wrong), wrong
