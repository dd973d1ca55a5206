"""Questions about tones: their sounds say what their answers say, and a small model learns to hear them."""

from __future__ import annotations

import json

import pytest
import torch

from examples.sounds.tones import ORDER, PLACES, RATE, Tones, beep, two_tones
from mmrl.build import build
from mmrl.config.loading import read
from mmrl.config.schema import load
from mmrl.core.rng import Stream
from mmrl.training.loop import train
from mmrl.vision.builders.tiny_models import TinyQwen2_5Omni
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.policies.tokens import Tokens
from tests.support.doc_blocks import ROOT
from tests.vision import tiny, tiny_omni


def loudest(samples: torch.Tensor) -> float:
    """The frequency with the most power."""
    return float(torch.fft.rfft(samples).abs().argmax()) * RATE / len(samples)


def test_the_answer_is_what_a_spectrum_says():
    quarter, seen = RATE // 4, set()
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        asked = two_tones(draw)
        first, second = loudest(asked.sound.samples[:quarter]), loudest(asked.sound.samples[-quarter:])
        assert asked.answer == ORDER[second > first]
        assert max(first, second) / min(first, second) > 1.23  # four semitones are 2 ** (1 / 3) = 1.26
        beeped = beep(draw)
        parts = beeped.sound.samples.view(3, -1).square().mean(1)
        assert beeped.answer == PLACES[int(parts.argmax())]
        seen |= {asked.answer, beeped.answer}
        assert len(asked.sound.samples) == len(beeped.sound.samples) == 6 * RATE // 10
    assert seen == {*ORDER, *PLACES}


def test_rows_are_questions_with_sounds_and_recorded_answers(tmp_path):
    assert Tones(stream=Stream(0), train=4, test=2).build(tmp_path) == {"train": 4, "test": 2}
    prompts = conversations(path=str(tmp_path / "train.jsonl"))
    assert [prompt.text for prompt in prompts] == ["where?", "higher?"] * 2
    assert all(prompt.answers[0].text == prompt.target for prompt in prompts)
    assert [len(prompt.media[0].load().samples) for prompt in prompts] == [9600] * 4


def test_the_tiny_model_reads_sounds_images_and_videos(tmp_path):
    TinyQwen2_5Omni(stream=Stream(0), width=32, layers=1, vision_width=32, vision_layers=1).build(tmp_path)
    policy = Tokens(model=str(tmp_path), dtype="float32", freeze_vision_tower=False)
    encoder = policy.prompt_encoder
    encoded = encoder.encode(tiny.ask("a", tiny_omni.sound(1.0), tiny.picture(), tiny.clip(2), "x"))
    assert encoder.transcript(encoded.ids).count("<audio: 25 tokens>") == 1
    assert "<image: 1 tokens>" in encoder.transcript(encoded.ids)


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_tiny_model_learns_to_hear(tmp_path):
    Tones(stream=Stream(0), train=300, test=60).build(tmp_path / "questions")
    model = read(ROOT / "examples/sounds/model.yaml")["build"]
    TinyQwen2_5Omni(stream=Stream(0), **{name: model[name] for name in model if name != "name"}).build(
        tmp_path / "model"
    )
    places = {
        "policy.model": "model",
        "data.path": "questions/train.jsonl",
        "evaluation.data.path": "questions/test.jsonl",
        "output_dir": "run",
    }
    given = [f"{name}={tmp_path / place}" for name, place in places.items()]
    steps = 100  # fewer, and of fewer rows, than those of the demo
    given += [f"{name}={steps}" for name in ("max_steps", "eval_steps", "learn.learning_rate.steps")]
    given += ["rollout.num_prompts=20"]
    train(build(load(ROOT / "examples/sounds/train.yaml", given), quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (accuracy,) = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row][-1:]
    assert accuracy > 0.8  # guessing has (1 / 2 + 1 / 3) / 2
