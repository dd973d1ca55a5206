"""From unlabelled images to a trained model, with real classes: answers, an encoder, pairs, DPO, TRL."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream
from mmrl.training.loop import train
from mmrl.vision.builders.clip_pairs import ClipPairs
from mmrl.vision.datasets.preference_pairs import preference_pairs
from tests.rewards import tiny_clip
from tests.support.configs import method_file
from tests.vision.test_clip_pairs import manifest_of, paint, rows_of

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).parents[2] / "configs"
DIAL = {
    "name": "vision.contrastive_decoding",
    "contrast_alpha": [0.0, 0.6],
    "contrast_alpha_std": [0.0, 0.15],
    "gap": 0.1,
}
TALK = {"name": "vision.generate", "max_completion_length": 12, "batch_size": 8}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return {
        "name": "clip_score",
        "model": str(tiny_clip.write_folder(tmp_path_factory.mktemp("clip") / "plain")),
    }


@pytest.fixture(scope="module")
def model(checkpoint):
    return {"name": "vision.tokens", "model": str(checkpoint("llava")), "dtype": "float32"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, model, encoder):
    """Build pairs of 16 pictures. An encoder of random weights finds many texts worse than unrelated, which
    is a tie where a text has several parts."""
    folder = tmp_path_factory.mktemp("pairs")
    source = paint(folder / "pictures", [f"{i}.png" for i in range(16)])
    builder = ClipPairs(
        stream=Stream(0), source=str(source), model=model, engines=(TALK, DIAL), scores=encoder,
        tau_keep=0.0, tau_flip=0.0, shard_size=8,
    )  # fmt: skip
    builder.build(folder / "built")
    return folder / "built"


@pytest.fixture
def no_page(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


def test_a_real_encoder_decides_and_long_answers_are_split_not_cut(pairs):
    manifest, rows = manifest_of(pairs), rows_of(pairs)
    assert manifest["counts"]["train"] == len(rows) >= 6
    assert len(manifest["model_weights"]) == len(manifest["encoder_weights"]) == 64
    assert manifest["model_weights"] != manifest["encoder_weights"]
    # Its text tower reads ten tokens; random answers are rare words, of many tokens.
    assert manifest["answers_longer_than_the_encoder_reads"] > 0
    assert all(row["h_pos"] == 0 and 0.1 <= row["h_neg"] <= 1 for row in rows)
    assert len({row["h_neg"] for row in rows}) == len(rows)
    assert all(row["score_chosen"] > row["score_rejected"] for row in rows)


def plan(model, output, **changes):
    run = {
        "policy": model,
        "rollout": {"num_prompts": 4, "num_generations": 2},
        "learn": {"learning_rate": 1e-3, "micro_batch_steps": 512},
        "report": {"trackers": [], "log_completions": False},
        "max_steps": 2,
        "output_dir": str(output),
    }
    return parse(merge(merge(run, read(method_file("dpo"))), changes), Config)


def test_dpo_learns_from_what_was_built(pairs, model, tmp_path, no_page):
    data = {"name": "vision.preference_pairs", "path": str(pairs)}
    run = build(
        plan(model, tmp_path / "run", data=data, rewards=[{"name": "precomputed", "key": "preferred"}]),
        quiet=True,
    )
    train(run)
    first, second = run.journal.read()
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert second["loss"] < first["loss"] and second["rewards/margins"] > 0


def test_the_same_pairs_are_made_inside_training(pairs, model, encoder, tmp_path, no_page):
    """Group of two from the dial, decided by the encoder, with a margin; nothing is stored."""
    rows = tmp_path / "rows.jsonl"
    pictures = pairs.parent / "pictures"
    rows.write_text("".join(json.dumps({"question": "what", "answer": "-", "image": p.name}) + "\n"
                            for p in sorted(pictures.iterdir())))  # fmt: skip
    chain = ["total", {"name": "best_vs_worst", "margin": 1e-6, "length_ratio": 8.0}]
    changes = {
        "data": {"name": "vision.visual_qa", "path": str(rows), "root": str(pictures)},
        "rollout": {"engine": [TALK, DIAL]},
        "rewards": [
            encoder,
            {"name": "precomputed", "key": "contrast_alpha", "label": "contrast_alpha", "weight": 0.0},
        ],
        "advantage": chain,
    }
    run = build(plan(model, tmp_path / "run", **changes), quiet=True)
    train(run)
    first, second = run.journal.read()
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and math.isfinite(second["loss"])
    assert first["rewards/contrast_alpha/mean"] == 0.0  # of the rows that are the policy's own


def test_every_preference_variant_trains_a_real_model(pairs, model, tmp_path, no_page):
    data = {"name": "vision.preference_pairs", "path": str(pairs)}
    rewards = [{"name": "precomputed", "key": "preferred"}]
    wanted = {"kto": 0.5, "ipo": 25.0, "mdpo": 3 * math.log(2), "mpo": None, "simpo": None}
    for name, loss in wanted.items():
        variant = read(method_file(name))
        run = build(
            parse(
                merge(
                    {
                        "policy": model, "data": data, "rewards": rewards, "rollout": {"num_prompts": 3},
                        "learn": {"learning_rate": 1e-3}, "max_steps": 1, "output_dir": str(tmp_path / name),
                        "report": {"trackers": [], "log_completions": False},
                    },
                    variant,
                ),
                Config,
            ),
            quiet=True,
        )  # fmt: skip
        train(run)
        (step,) = run.journal.read()
        assert step["grad_norm"] > 0
        if loss is not None:
            assert step["loss"] == pytest.approx(loss, abs=1e-4), name


def test_trls_trainer_learns_from_it_unchanged(pairs, checkpoint, tmp_path):
    pytest.importorskip("trl")
    import datasets
    from transformers import AutoModelForImageTextToText
    from trl import DPOConfig, DPOTrainer

    loaded = datasets.load_dataset(str(pairs), split="train", cache_dir=str(tmp_path / "cache"))
    folder = str(checkpoint("llava"))
    settings = DPOConfig(
        output_dir=str(tmp_path / "trl"), max_length=None, per_device_train_batch_size=2, max_steps=2,
        learning_rate=1e-3, logging_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    from transformers import AutoProcessor

    trainer = DPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        ref_model=AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
        args=settings,
        train_dataset=loaded,
        processing_class=AutoProcessor.from_pretrained(folder),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3) and len(losses) == 2


def test_the_dataset_reads_alike_here_and_there(pairs):
    prompts = preference_pairs(path=str(pairs))
    for prompt, row in zip(prompts, rows_of(pairs), strict=True):
        assert prompt.text == row["prompt"][0]["content"]
        assert prompt.answers[0].text == row["chosen"][0]["content"]
