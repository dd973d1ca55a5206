"""Pairs without a judge: the rule, the data set that others read, and a build that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece, as_piece
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, row_files
from mmrl.runtime.content_hash import of_weights
from mmrl.vision.builders.clip_pairs import ClipPairs
from mmrl.vision.datasets.preference_pairs import preference_pairs
from mmrl.vision.preference.export import PairShards
from mmrl.vision.preference.select import FLIPPED, KEPT, PairSelector, ScoredPair, SelectionRule, with_faults

TOYS = "tests.vision.pair_toys"
TOY = {
    "model": {"name": f"{TOYS}:Talker"},
    "engines": ({"name": f"{TOYS}:Talk"},),
    "scores": {"name": f"{TOYS}:brightness"},
    "shard_size": 4,
}


def paint(folder: Path, names, seed: int = 0) -> Path:
    """Paint small images, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        pixels = torch.randint(256, (12, 16, 3), generator=generator, dtype=torch.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(folder / name)
    return folder


@pytest.fixture
def pictures(tmp_path):
    return paint(tmp_path / "pictures", [f"{i:02d}.png" for i in range(10)])


def build(source: Path, output: Path, seed: int = 0, **options):
    return ClipPairs(stream=Stream(seed), source=str(source), **{**TOY, **options}).build(output)


def rows_of(output: Path) -> list[dict]:
    from pyarrow import parquet

    return [row for path in row_files(output) for row in parquet.read_table(path).to_pylist()]


def manifest_of(output: Path) -> dict:
    return json.loads((output / "manifest.json").read_text())


def bytes_of(output: Path) -> dict[str, bytes]:
    """Read everything that is left of a build."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }


# ---- the rule


def pair(gap: float, **changes) -> ScoredPair:
    """Make a pair of which the first answer is better by `gap`."""
    usual = {"place": f"p{gap}", "prompt": "what", "texts": ("a dog", "a cat"), "lengths": (3, 3)}
    return ScoredPair(**{**usual, "scores": (gap, 0.0), "h": (0.0, 0.6), "digest": f"{gap}", **changes})


def test_pairs_are_kept_reversed_or_dropped_by_their_gap():
    rule = SelectionRule(tau_keep=0.1, tau_flip=0.2)
    verdicts = [rule.judge(gap, (0.1, 0.2), 0.0) for gap in (0.1, 0.09, 0.0, -0.19, -0.2)]
    assert verdicts == [KEPT, "small_gap", "tie", "small_gap", FLIPPED]


def test_without_thresholds_only_ties_are_dropped():
    verdicts = [
        SelectionRule(tau_keep=0.0, tau_flip=0.0).judge(gap, (0.0, 0.0), 0.0) for gap in (1e-6, -1e-6, 0.0)
    ]
    assert verdicts == [KEPT, FLIPPED, "tie"]


def test_a_threshold_that_is_left_out_is_a_quantile_of_the_gaps():
    # sizes .1 .2 .3 .4 .5: the fifth of the way from the first to the last is .1 + .8 * .1
    assert SelectionRule(quantile=0.2).thresholds([0.5, -0.1, 0.3, -0.4, 0.2]) == pytest.approx((0.18, 0.18))
    assert SelectionRule(quantile=0.5, tau_flip=0.05).thresholds([0.5, -0.1, 0.3]) == pytest.approx(
        (0.3, 0.05)
    )
    assert SelectionRule().thresholds([]) == (0.0, 0.0)


def test_a_fifth_of_the_pairs_is_dropped_and_every_other_gap_is_at_least_0():
    gaps = torch.randn(500, generator=torch.Generator().manual_seed(0)).tolist()
    rule = SelectionRule()
    verdicts = PairSelector(rule, rule.thresholds(gaps), Stream())
    pairs = with_faults(rule, [pair(gap) for gap in gaps])
    for one, verdict, image in verdicts.select(pairs, lambda one: b"image"):
        assert (one.gap if verdict == KEPT else -one.gap) > 0 and image == b"image"
    assert verdicts.summary()["train"] == 400 and verdicts.summary()["small_gap"] == 100
    assert verdicts.means()["mean_gap_before"] == pytest.approx(sum(gaps) / 500)
    assert verdicts.means()["mean_gap_after"] > abs(verdicts.means()["mean_gap_before"])


def test_turning_a_pair_twice_changes_nothing():
    rule = SelectionRule(tau_keep=0.1, tau_flip=0.1)
    for gap in (0.3, 0.05, -0.3):
        back = {KEPT: FLIPPED, FLIPPED: KEPT}
        verdict, other = (rule.judge(sign * gap, (0.1, 0.1), 0.0) for sign in (1, -1))
        assert other == back.get(verdict, verdict)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fault": "missing"}, "missing"),
        ({"texts": ("a dog", " \n")}, "empty"),
        ({"texts": ("a  dog", "a dog\n")}, "identical"),
        ({"scores": (None, 0.1)}, "not_finite"),
        ({"scores": (float("nan"), 0.1)}, "not_finite"),
        ({"lengths": (7, 3)}, "length"),
        ({"lengths": (6, 3)}, ""),
    ],
)
def test_what_cannot_be_decided_is_dropped_for_a_reason(changes, reason):
    assert SelectionRule(length_ratio=2.0).fault(pair(0.5, **changes)) == reason


def test_a_image_that_was_there_with_the_same_prompt_is_a_duplicate():
    pairs = [pair(0.5), pair(0.4), pair(0.5, place="again"), pair(0.5, prompt="why")]
    assert [one.fault for one in with_faults(SelectionRule(), pairs)] == ["", "", "duplicate", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quantile": 1.0}, "quantile"), ({"tau_keep": -1.0}, "tau_keep"), ({"length_ratio": 0.5}, "length")],
)
def test_a_selection_rule_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pieces(Stream()).make("builder", Piece("vision.clip_pairs", {"source": "x", **TOY, **options}))


# ---- building


def test_a_folder_of_images_becomes_pairs(pictures, tmp_path, capsys):
    output = tmp_path / "pairs"
    told = build(pictures, output, tau_keep=0.0, tau_flip=0.0)
    rows = rows_of(output)
    assert told["train"] == len(rows) == told[KEPT] + told[FLIPPED] > 5
    assert told[KEPT] > 0 < told[FLIPPED]
    for row in rows:
        assert row["score_chosen"] > row["score_rejected"]
        assert (row["h_pos"], row["h_neg"]) == (0.0, 0.6)
        assert row["images"][0]["bytes"] == (pictures / row["id"]).read_bytes()
        assert row["prompt"] == [{"role": "user", "content": "Describe this image in detail."}]
        assert row["conversations"][0]["content"] == "<image>Describe this image in detail."
        assert row["chosen"] == [row["chosen_answer"]] and row["rejected"] == [row["rejected_answer"]]
    shards = [one for number in range(3) for one in PairShards(output).read(number)]
    answers = {one.place: one.texts for one in shards}
    for row in rows:
        better = answers[row["id"]][int(row["flipped"])]
        assert row["chosen"][0]["content"] == better != row["rejected"][0]["content"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and said[0].startswith("4 of 10 images") and said[-1].endswith("00:00:00 left")


def test_the_manifest_makes_a_build_repeatable(pictures, tmp_path):
    output = tmp_path / "pairs"
    told = build(pictures, output, seed=3, prompts=("What?", "Where?"))
    manifest = manifest_of(output)
    assert manifest["seed"] == 3 and manifest["images"] == 10 and manifest["prompts"] == ["What?", "Where?"]
    assert manifest["model"] == TOY["model"]["name"] and manifest["scores"] == TOY["scores"]["name"]
    assert len(manifest["model_weights"]) == 64 and manifest["encoder_weights"] == ""
    assert manifest["counts"] == {k: v for k, v in told.items() if k != "dropped"}
    assert manifest["mean_gap_after"] >= manifest["thresholds"]["tau_keep"] > 0
    assert {row["prompt"][0]["content"] for row in rows_of(output)} == {"What?", "Where?"}
    again = tmp_path / "again"
    build(pictures, again, seed=3, prompts=("What?", "Where?"))
    assert bytes_of(again) == bytes_of(output)
    other = tmp_path / "other"
    build(pictures, other, seed=4, prompts=("What?", "Where?"))
    assert rows_of(other) != rows_of(output)


def test_everything_that_is_left_out_is_counted_and_named(tmp_path):
    folder = paint(
        tmp_path / "pictures", ["a.png", "b.png", "same.png", "mute.png", "tie.png", "blank.png", "c.png"]
    )
    (folder / "again.png").write_bytes((folder / "b.png").read_bytes())
    (folder / "broken.png").write_bytes(b"\x89PNG nothing")
    rows = [json.dumps({"image": path.name}).encode() for path in sorted(folder.glob("*.png"))]
    rows += [
        b'{"image": "gone.png"}',
        b'{"image": "../../outside.png"}',
        b'{"image": "caf\xe9.png"}',
        b'{"a": 1}',
    ]
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"\n".join(rows) + b"\n")
    output = tmp_path / "pairs"
    # the toys read names off the place, which for rows is the line
    names = {f"rows.jsonl:{i}": json.loads(row)["image"] for i, row in enumerate(rows[:9], 1)}
    assert "broken.png" in names.values()
    told = build(source, output, root=str(folder), tau_keep=0.0, tau_flip=0.0)
    assert (
        told["missing"] == 2 and told["unreadable"] == 1 and told["bad_row"] == 2 and told["duplicate"] == 1
    )
    assert told["train"] + told["dropped"] == 13
    named = manifest_of(output)["dropped"]
    for words in (
        "gone.png",
        "leaves its root",
        "not UTF-8",
        "wanted one image",
        "cannot decode",
        "duplicate",
    ):
        assert any(words in line for line in named), words
    told = build(folder, tmp_path / "folder", tau_keep=0.0, tau_flip=0.0)
    wanted = {"unreadable": 1, "empty": 1, "identical": 1, "not_finite": 1, "tie": 1, "duplicate": 1}
    assert {name: told.get(name) for name in wanted} == wanted
    assert told["train"] == 3 and told["dropped"] == 6


def test_another_rule_uses_the_answers_again_and_another_seed_is_refused(pictures, tmp_path):
    output, log = tmp_path / "pairs", tmp_path / "log"
    logged = ({"name": f"{TOYS}:Talk", "log": str(log)},)
    everything = build(pictures, output, tau_keep=0.0, tau_flip=0.0, engines=logged)
    asked = log.read_text().splitlines()
    assert len(asked) == 20 and len(set(asked)) == 10
    half = build(pictures, output, quantile=0.5, engines=logged)
    assert half["train"] < everything["train"] and log.read_text().splitlines() == asked
    dial = build(pictures, output, decide="dial", engines=logged)
    assert dial[KEPT] == 10 and dial[FLIPPED] == 0
    chance = build(pictures, output, decide="random", engines=logged)
    assert chance["train"] == 10 and chance[FLIPPED] > 0
    with pytest.raises(RowError, match="another seed: 0, not 1"):
        build(pictures, output, seed=1, engines=logged)
    paint(pictures, ["new.png"])
    with pytest.raises(RowError, match="another images"):
        build(pictures, output, engines=logged)


def test_other_weights_are_another_build(pictures, tmp_path):
    output = tmp_path / "pairs"
    build(pictures, output)
    plan = json.loads((output / ".build" / "plan.json").read_text())
    plan["model"] = {"name": f"{TOYS}:Talker", "weight": 2.0}
    (output / ".build" / "plan.json").write_text(json.dumps(plan))
    PairShards(output).path(1).unlink()
    with pytest.raises(RowError, match="another model_weights"):
        build(pictures, output, model=plan["model"])


def test_weights_are_named_by_what_they_are():
    from tests.vision.pair_toys import Talker

    one, same, other = (of_weights(Talker(weight=w)) for w in (1.0, 1.0, 2.0))
    assert one == same != other and len(one) == 64
    half = torch.nn.Linear(2, 2).to(torch.bfloat16)
    assert len(of_weights(half)) == 64 and of_weights("nothing") == ""


def test_rows_are_parted_into_files_and_none_is_lost(pictures, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    options = {"tau_keep": 0.0, "tau_flip": 0.0}
    count = build(pictures, whole, **options)["train"]
    build(pictures, parted, file_rows=2, **options)
    files = sorted(path.name for path in (parted / "data").iterdir())
    assert files == [f"train-{i:05d}-of-{-(-count // 2):05d}.parquet" for i in range(-(-count // 2))]
    assert rows_of(parted) == rows_of(whole)


def test_a_image_that_changed_since_is_left_out(pictures, tmp_path):
    output = tmp_path / "pairs"
    options = {"tau_keep": 0.0, "tau_flip": 0.0}
    count = build(pictures, output, **options)["train"]
    gone = rows_of(output)[0]["id"]
    paint(pictures, [gone], seed=9)
    told = build(pictures, output, **options)
    assert told["train"] == count - 1 and told["missing"] == 1
    assert gone not in {row["id"] for row in rows_of(output)}
    assert any("another image" in line for line in manifest_of(output)["dropped"])


def test_images_inside_rows_are_taken_along(pictures, tmp_path):
    import pyarrow
    from pyarrow import parquet

    data = [path.read_bytes() for path in sorted(pictures.iterdir())]
    table = {"image": [{"bytes": one, "path": None} for one in data], "question": ["why?"] * len(data)}
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    output = tmp_path / "pairs"
    build(tmp_path / "rows.parquet", output, tau_keep=0.0, tau_flip=0.0)
    (tmp_path / "rows.parquet").touch()
    rows = rows_of(output)
    assert {row["images"][0]["bytes"] for row in rows} <= set(data) and len(rows) > 5
    assert {row["prompt"][0]["content"] for row in rows} == {"why?"}


def test_nothing_to_do_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RowError, match="no image in"):
        build(tmp_path / "empty", tmp_path / "pairs")
    folder = paint(tmp_path / "ties", ["tie.png"])
    with pytest.raises(RowError, match=r"gave a pair: tie.png: small gap"):
        build(folder, tmp_path / "pairs")
    with pytest.raises(ValueError, match="did you mean 'vision.generate'"):
        build(folder, tmp_path / "pairs", engines=("vision.generat",))


# ---- kill -9


KILLED = """
import sys
from pathlib import Path
from mmrl.core.rng import Stream
from mmrl.vision.builders.clip_pairs import ClipPairs
from tests.vision.test_clip_pairs import TOY, TOYS
engines = ({"name": f"{TOYS}:Talk", "pause": 0.2, "log": sys.argv[3]},)
ClipPairs(stream=Stream(0), source=sys.argv[1], **{**TOY, "engines": engines}).build(Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_build_that_is_killed_goes_on_and_gives_the_same_data_set(tmp_path):
    pictures = paint(tmp_path / "pictures", [f"{i:02d}.png" for i in range(40)])
    output, log, whole = tmp_path / "pairs", tmp_path / "log", tmp_path / "whole"
    engines = ({"name": f"{TOYS}:Talk", "pause": 0.2, "log": str(log)},)
    home = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(pictures), str(output), str(log)],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home)},
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 600
    while not PairShards(output).has(2) and time.monotonic() < limit:
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=f"is in use by process {process.pid} on"):
        build(pictures, output, engines=engines)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = [number for number in range(10) if PairShards(output).has(number)]
    assert done and len(done) < 10 and not (output / "data").exists()
    build(pictures, output, engines=engines)
    log_of_both = log.read_text().splitlines()
    finished = {f"{i:02d}.png" for number in done for i in range(4 * number, 4 * number + 4)}
    # What was finished was answered once: two entries a image.
    assert all(log_of_both.count(name) == 2 for name in finished)
    assert set(log_of_both) == {f"{i:02d}.png" for i in range(40)}
    build(pictures, whole, engines=engines)
    assert bytes_of(output) == bytes_of(whole)


# ---- reading


def test_training_reads_what_was_built(pictures, tmp_path, monkeypatch):
    output = tmp_path / "pairs"
    monkeypatch.setattr("mmrl.vision.preference.export.ROWS_AT_ONCE", 2)
    build(pictures, output, tau_keep=0.0, tau_flip=0.0, file_rows=5)
    rows, prompts = rows_of(output), preference_pairs(path=str(output))
    assert [prompt.uid for prompt in prompts] == [row["id"] for row in rows]
    for prompt, row in zip(prompts, rows, strict=True):
        chosen, rejected = prompt.answers
        assert (chosen.text, rejected.text) == tuple(row[s][0]["content"] for s in ("chosen", "rejected"))
        assert chosen.recorded == {"preferred": 1.0, "score": row["score_chosen"]}
        assert rejected.recorded == {"preferred": 0.0, "score": row["score_rejected"]}
        pixels = prompt.media[0].load().pixels
        assert (pixels[0].permute(1, 2, 0).numpy() == Image.open(pictures / row["id"])).all()
        assert prompt.text == "Describe this image in detail."
        assert set(prompt.columns) == {"id", "score_chosen", "score_rejected", "h_pos", "h_neg", "flipped"}
    build(pictures, output, quantile=0.5)  # in the place of the one before
    prompts = preference_pairs(path=str(output))
    assert [prompt.uid for prompt in prompts] == [row["id"] for row in rows_of(output)]
    last = prompts[-1].media[0].load().pixels[0].permute(1, 2, 0).numpy()
    assert (last == Image.open(pictures / prompts[-1].uid)).all()
    build(pictures, output, tau_keep=0.0, tau_flip=0.0)
    gaps = sorted(row["score_chosen"] - row["score_rejected"] for row in rows)
    assert len(preference_pairs(path=str(output), min_gap=gaps[3])) == len(gaps) - 3
    assert len(preference_pairs(path=str(output), limit=2)) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what", "chosen": "a dog", "rejected": "a cat"},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}],
            "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "a dog"}]}],
            "rejected": {"role": "assistant", "content": "a cat"},
        },
        {
            "prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "<image>what"}],
            "chosen": [{"role": "assistant", "content": "a dog"}],
            "rejected": [{"role": "assistant", "content": "a cat"}],
        },
    ],
)
def test_pairs_are_read_in_all_of_trls_forms(pictures, tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, "images": ["00.png"]}))
    (prompt,) = preference_pairs(path=str(path), root=str(pictures))
    assert [answer.text for answer in prompt.answers] == ["a dog", "a cat"]
    assert [answer.recorded["score"] for answer in prompt.answers] == [1.0, 0.0]
    parts = prompt.messages[-1].parts
    assert parts[0].media.name == "00.png" and parts[1].text == "what" and len(parts) == 2


def test_pairs_that_cannot_be_used_are_named(pictures, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "what", "chosen": "a", "rejected": "b", "image": "00.png"}
    bad = [{"image": "no.png"}, {"chosen": ""}, {"prompt": None}, {"image": "../rows.jsonl"}]
    path.write_text("\n".join(json.dumps(good | changes) for changes in [{}, *bad]))
    with pytest.raises(RowError, match=r"4 rows of(.|\n)*no file 'no.png'(.|\n)*wanted a text as `chosen`"):
        preference_pairs(path=str(path), root=str(pictures))
    with caplog.at_level("WARNING", logger="mmrl"):
        assert len(preference_pairs(path=str(path), root=str(pictures), bad_rows="drop")) == 1
    assert caplog.text.count("dropped") == 4


def test_the_dataset_is_one_of_the_hub_and_of_llama_factory(pictures, tmp_path):
    import datasets

    output = tmp_path / "pairs"
    count = build(pictures, output, tau_keep=0.0, tau_flip=0.0, file_rows=4)["train"]
    loaded = datasets.load_dataset(str(output), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == count and loaded[0]["images"][0].size == (16, 12)
    told = json.loads((output / "dataset_info.json").read_text())["pairs"]
    assert told["formatting"] == "sharegpt" and told["ranking"] is True
    assert (output / told["file_name"]).is_dir()
    row, tags = loaded[0], told["tags"]
    turns = row[told["columns"]["messages"]]
    assert len(turns) % 2 == 1 and turns[0][tags["role_tag"]] == tags["user_tag"]
    assert turns[0][tags["content_tag"]].count("<image>") == len(row[told["columns"]["images"]]) == 1
    for side in ("chosen", "rejected"):
        answer = row[told["columns"][side]]
        assert type(answer) is dict and answer[tags["role_tag"]] == tags["assistant_tag"]


def test_a_config_builds(pictures, tmp_path):
    options = {**TOY, "engines": list(TOY["engines"]), "source": str(pictures), "quantile": 0}
    piece = as_piece({"name": "vision.clip_pairs", **options, "quantile": 0.0}, "build")
    made = Pieces(Stream(0)).make("builder", piece)
    assert made.build(tmp_path / "pairs")["train"] > 0
