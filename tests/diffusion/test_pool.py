"""A pool of scored images or videos per prompt: what others read, and a build that stops and goes on."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.data.dataset_io import RowError
from mmrl.diffusion.builders.pool import Pool
from mmrl.diffusion.datasets.prompts import images, videos
from mmrl.diffusion.image_io import load_image, load_video, save_image, save_video

WORDS = ["a red circle", "a blue square", "nothing", "a green star", "a cat"]
HERE = "tests.diffusion.test_pool"


def brightness(prompts, outcomes):
    """Give the mean of the pixels; None for a prompt that asks for nothing."""
    return [
        None if prompt.text == "nothing" else float((o.image if o.video is None else o.video).float().mean())
        for prompt, o in zip(prompts, outcomes, strict=True)
    ]


def one(prompts, outcomes):
    """Give 1 to everything."""
    return [1.0] * len(outcomes)


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("asked") / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": text, "target": i, "kind": "toy"} for i, text in enumerate(WORDS)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def pool(checkpoint, asked):
    def make(seed: int = 0, **options) -> Pool:
        size = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 1.0}
        usual = {
            "prompts": {"name": "diffusion.prompts", "path": str(asked)},
            "model": {"name": "diffusion.flow", "model": str(checkpoint("sd3")), "max_sequence_length": 1},
            "engines": [{"name": "diffusion.denoise", **size, **options.pop("engine", {})}],
            "rewards": [f"{HERE}:brightness", {"name": f"{HERE}:one", "label": "seen"}],
            "num_generations": 3,
            "shard_size": 2,
        }
        return Pieces(Stream(seed)).make("builder", Piece("diffusion.pool", {**usual, **options}))

    return make


def files_of(output: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_pool_is_read_with_its_images_and_all_scores(pool, tmp_path):
    counts = pool().build(tmp_path)
    assert counts == {"prompts": 4, "dropped": 1, "unscored_results": 3}
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["dropped"] == [{"id": "p2", "reason": "0 scored results"}]
    found = images(path=str(tmp_path / "train.jsonl"), root=str(tmp_path))
    assert [prompt.uid for prompt in found] == ["p0", "p1", "p3", "p4"]
    assert [prompt.target for prompt in found] == [0, 1, 3, 4]
    for prompt in found:
        assert len(prompt.answers) == 3 and prompt.columns["kind"] == "toy"
        for answer in prompt.answers:  # the file holds the pixels that were scored
            assert answer.recorded == {"brightness": float(answer.image.float().mean()), "seen": 1.0}
        assert len({answer.recorded["brightness"] for answer in prompt.answers}) > 1


def test_a_build_that_was_stopped_goes_on_to_the_same_files(pool, tmp_path, monkeypatch):
    pool().build(tmp_path / "whole")
    shard, stopped = Pool._rows, []

    def interrupted(self, prompts, number, *others):
        if number == 1 and not stopped:
            stopped.append(number)
            raise KeyboardInterrupt
        yield from shard(self, prompts, number, *others)

    monkeypatch.setattr(Pool, "_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool().build(tmp_path / "parts")
    assert not (tmp_path / "parts" / "train.jsonl").exists()
    before = (tmp_path / "parts" / "media" / "000000" / "0000_00.png").stat().st_mtime_ns
    pool().build(tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    assert (tmp_path / "parts" / "media" / "000000" / "0000_00.png").stat().st_mtime_ns == before


def test_a_folder_of_another_build_is_refused(pool, tmp_path):
    pool(limit=1).build(tmp_path)
    with pytest.raises(RowError, match="holds a build with another seed: 0, not 1"):
        pool(seed=1, limit=1).build(tmp_path)


def test_prompts_whose_results_have_equal_scores_are_left_out(pool, tmp_path):
    with pytest.raises(RowError, match="no prompt has results of different scores.*equal scores"):
        pool(rewards=[f"{HERE}:one"], limit=1).build(tmp_path)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rewards": []}, "at least one of `engines` and one of `rewards`"),
        ({"min_generations": 4}, "`min_generations` 4 is more than `num_generations` 3"),
        ({"rewards": [f"{HERE}:one", f"{HERE}:one"]}, "have one name"),
        ({"engines": ["diffusion.denois"]}, "did you mean 'diffusion.denoise'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(pool, options, words):
    with pytest.raises(ConfigError, match=words):
        pool(**options)


def test_a_prompt_that_the_model_cannot_read_is_a_bad_row(pool, asked, checkpoint, tmp_path, caplog):
    model = {"name": "diffusion.flow", "model": str(checkpoint("wan")), "max_sequence_length": 8}
    data = {"name": "diffusion.prompts", "path": str(asked)}
    with pytest.raises(ConfigError, match="14 tokens long, and the encoder"):
        pool(model=model).build(tmp_path)
    counts = pool(model=model, prompts={**data, "bad_rows": "drop"}).build(tmp_path)
    assert (
        counts["prompts"] == 1 and "rows are left out" in caplog.text and "nothing reads" not in caplog.text
    )


def test_videos_are_read_as_they_were_scored(pool, checkpoint, tmp_path):
    model = {"name": "diffusion.flow", "model": str(checkpoint("wan")), "max_sequence_length": 64}
    pool(model=model, engine={"num_frames": 5}, num_generations=2, limit=1).build(tmp_path)
    options = {"num_frames": 5, "height": 32, "width": 32}
    (prompt,) = videos(path=str(tmp_path / "train.jsonl"), root=str(tmp_path), **options)
    for answer in prompt.answers:
        assert answer.recorded["brightness"] == float(answer.video.float().mean())
        torch.testing.assert_close(answer.times, torch.arange(5) / 16)


def test_noised_pairs_are_scored_by_segment(pool, checkpoint, tmp_path):
    frames = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_video(frames, tmp_path / "source.mp4", Fraction(16))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a cat", "videos": ["source.mp4"]}) + "\n")
    size = {"num_frames": 5, "height": 32, "width": 32}
    likelihood = {"name": "diffusion.matching", "segments": 2}
    model = {"name": "diffusion.flow", "model": str(checkpoint("wan")), "max_sequence_length": 64}
    denoise = {"name": "diffusion.denoise", "num_inference_steps": 4, "guidance_scale": 1.0, **size}
    noised = {"name": "diffusion.partial_noise", "eta": 0.5}
    data = {"name": "diffusion.videos", "path": str(tmp_path / "rows.jsonl"), "root": str(tmp_path), **size}
    built = pool(
        prompts=data,
        model={**model, "likelihood": likelihood},
        engines=[denoise, noised, {"name": "diffusion.segment_preferences", "segments": 2}],
        rewards=[f"{HERE}:brightness"],
        num_generations=2,
    )
    built.build(tmp_path / "pool")
    # The third of five frames has its centre in the second half.
    (prompt,) = videos(path=str(tmp_path / "pool" / "train.jsonl"), root=str(tmp_path / "pool"), **size)
    for answer in prompt.answers:
        halves = {"brightness@0": answer.video[:2], "brightness@1": answer.video[2:]}
        assert answer.recorded == {name: float(half.float().mean()) for name, half in halves.items()}


def test_files_hold_the_pixels_that_were_written(tmp_path):
    frames = torch.randint(256, (4, 3, 20, 36), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    read, times = load_video(save_video(frames, tmp_path / "a.mp4", Fraction(8)), 4, 20, 36)
    assert torch.equal(read, frames)
    torch.testing.assert_close(times, torch.arange(4) / 8)
    assert torch.equal(load_image(save_image(frames[0], tmp_path / "a.png")), frames[0])


def test_a_target_that_a_row_cannot_hold_is_refused():
    from mmrl.core.types import Message, Part, Prompt
    from mmrl.diffusion.builders.pool import own_columns, write_result

    prompt = Prompt("p", (Message("user", (Part("a"),)),), target={1, 2})
    with pytest.raises(RowError, match="a column of prompt 'p' is no JSON"):
        own_columns(prompt)
    with pytest.raises(RowError, match="made no image or video of prompt 'p'"):
        write_result((Outcome(text="words"),), Path("a"), prompt)
