"""Supervised training of recorded conversations without rewards, packed and not, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PIL import Image

from mmrl.build import build
from mmrl.cli import main
from mmrl.config.schema import as_plain, load
from mmrl.training.loop import train

WORDS = ["the", "quick", "brown", "fox", "0", "1"]


def said(number, seed):
    return " ".join(WORDS[(seed * 7 + i * i) % 6] for i in range(number))


def rows():
    """Conversations of two turns; every second one begins with an image."""
    for seed in range(6):
        turns = [said(3 + 2 * seed, seed), said(2 + seed, seed + 1), said(2, seed), said(9 - seed, seed + 2)]
        turns[0] = "<image>" * (seed % 2) + turns[0]
        roles = ("user", "assistant") * 2
        messages = [{"role": r, "content": text} for r, text in zip(roles, turns, strict=True)]
        yield {"messages": messages, **({"images": ["a.png"]} if seed % 2 else {})}


@pytest.fixture
def plan(checkpoint, tmp_path):
    """Write rows and a file that trains on them; `more` are further rows."""
    Image.new("RGB", (56, 56), (200, 10, 30)).save(tmp_path / "a.png")

    def write(*more, **data):
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in (*rows(), *more)))
        whole = {
            "method": "supervised",
            "policy": {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float64"},
            "data": {"name": "vision.conversations", "path": str(tmp_path / "rows.jsonl"), **data},
            "sampler": ["group_by_length"],
            "rollout": {
                "num_prompts": 3,
                "engine": [{"name": "offline", "assistant_only_loss": True, "max_length": 120}],
            },
            "learn": {"learning_rate": 1e-3, "micro_batch_steps": 100},
            "report": {"trackers": [], "log_completions": False},
            "num_train_epochs": 2,
            "save_steps": 0,
            "output_dir": str(tmp_path / "run"),
        }
        (tmp_path / "run.yaml").write_text(json.dumps(whole))
        return tmp_path / "run.yaml"

    return write


def test_packed_training_is_the_same_training_and_needs_no_reward(plan, tmp_path):
    losses = {}
    for packing in ("true", "false"):
        over = [f"policy.packing={packing}", f"output_dir={tmp_path / packing}"]
        run = build(load(plan(), over), quiet=True)
        train(run)
        losses[packing] = [record["loss"] for record in run.journal.read()]
        assert not [name for name in run.journal.read()[0] if name.startswith("reward")]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-6) and len(losses["true"]) == 4
    assert losses["true"][-1] < losses["true"][0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": said(200, 1)}, {"role": "assistant", "content": "0"}]},
         "exceed `max_length: 120`"),
        ({"messages": [{"role": "user", "content": "fox"}]}, "no recorded answers"),
    ],
)  # fmt: skip
def test_bad_rows_are_one_clear_error_before_a_weight_is_loaded(plan, row, words, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["train", str(plan(row))]))
    assert ended.value.code == 2
    out = capsys.readouterr()
    assert words in out.out + out.err


def test_a_row_that_is_too_long_is_dropped_where_bad_rows_are(plan):
    long = {"messages": [{"role": "user", "content": said(200, 1)}, {"role": "assistant", "content": "0"}]}
    run = build(load(plan(long, bad_rows="drop")), quiet=True)
    assert len(run.pieces.made["data"]) == 6 and run.config.max_steps == 4


def test_the_block_trl_reads_the_names_of_sft(plan):
    file = plan()
    raw = json.loads(file.read_text())
    for key in ("method", "rollout", "learn", "num_train_epochs", "save_steps", "output_dir", "sampler"):
        del raw[key]
    raw["trl"] = {"packing": True, "max_length": 99, "output_dir": "out", "max_steps": 7}
    file.write_text(json.dumps(raw))
    config = load(file)
    assert config.policy.options["packing"] and config.max_steps == 7
    assert as_plain(config)["rollout"]["engine"] == [{"name": "offline", "max_length": 99,
                                                      "assistant_only_loss": False}]  # fmt: skip
    assert replace(config, rewards=()) == config
