"""Videos are read, cut into segments, and every segment is a preference of its own."""

import json
from fractions import Fraction

import pytest
import torch

from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.data.dataset_io import RowError
from mmrl.diffusion.datasets.prompts import videos
from mmrl.diffusion.steps import segments_of
from mmrl.papers.dense_dpo import SegmentPreferences


def film(path, shades):
    import av

    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=Fraction(10), options={"crf": "0", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv444p"
        for shade in shades:
            picture = torch.full((32, 32, 3), shade, dtype=torch.uint8).numpy()
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)


def listed(folder, **row):
    path = folder / "films.jsonl"
    path.write_text(json.dumps({"prompt": "a sunrise", "videos": ["a.mp4", "b.mp4"], **row}) + "\n")
    return {"path": str(path), "root": str(folder), "num_frames": 4, "height": 16, "width": 16}


@pytest.fixture
def folder(tmp_path):
    film(tmp_path / "a.mp4", [0, 40, 80, 120, 160, 200, 240])
    film(tmp_path / "b.mp4", [200] * 8)
    return tmp_path


def test_frames_are_spread_from_the_first_to_the_last(folder):
    # 4 of 7 frames: places 0, 2, 4, 6, at ten frames a second
    answer = videos(**listed(folder))[0].answers[0]
    assert answer.video.shape == (4, 3, 16, 16)
    assert [round(float(frame.float().mean()) / 10) for frame in answer.video] == [0, 8, 16, 24]
    torch.testing.assert_close(answer.times, torch.tensor([0.0, 0.2, 0.4, 0.6]))


def test_a_score_is_of_the_whole_video_or_of_its_segments(folder):
    first, second = videos(**listed(folder, scores=[[0.1, 0.9], 0.5]))[0].answers
    assert first.recorded == {"score@0": 0.1, "score@1": 0.9}
    assert second.recorded == {"score": 0.5}


@pytest.mark.parametrize(
    "row, words",
    [
        ({"videos": ["a.mp4", "c.mp4"]}, "(?s)1 row of .*films.jsonl:1: there is no file 'c.mp4'"),
        ({"videos": ["../a.mp4"]}, "leaves its root"),
        ({"videos": []}, "wanted at least one path in `videos`"),
        ({"scores": [1.0]}, "wanted a list of 2 as `scores`"),
        ({"scores": [1.0, "good"]}, r"wanted a finite number as `scores\[1\]`, got 'good'"),
    ],
)
def test_a_broken_row_is_named_with_its_line(folder, row, words):
    with pytest.raises(RowError, match=words):
        videos(**listed(folder, **row))


def test_a_film_shorter_than_asked_for_is_an_error(folder):
    prompts = videos(**{**listed(folder), "num_frames": 8})
    with pytest.raises(RowError, match="has 7 frames, but 8"):
        prompts[0].answers[0]


class Recording:
    """Give every prompt one row with this video and number of steps."""

    policy = None

    def __init__(self, outcome, length):
        self.outcome, self.length = outcome, length

    def rollout(self, prompts):
        return tuple(Trajectory(p, p.uid, (self.outcome,), None, self.length) for p in prompts)


def cut(frames, length, segments, recorded):
    video = torch.arange(frames, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    outcome = Outcome(video=video, times=torch.arange(frames) / 2, recorded=recorded)
    return (
        SegmentPreferences(Recording(outcome, length), segments=segments)
        .rollout([Prompt("p", ())])[0]
        .outcomes
    )


def test_a_video_becomes_an_outcome_per_segment_that_ends_its_steps():
    # 5 frames in 2 segments: centres .5 1.5 2.5 3.5 4.5 of 5, so the middle one lies in the second half
    first, second = cut(5, 4, 2, {"score@0": 1.0, "score@1": 0.0, "sharp": 0.3})
    assert first.video[:, 0, 0, 0].tolist() == [0, 1]
    assert second.video[:, 0, 0, 0].tolist() == [2, 3, 4]
    assert second.times.tolist() == [1.0, 1.5, 2.0]
    assert (first.end, second.end) == (2, 4)
    assert (first.recorded, second.recorded) == ({"score": 1.0, "sharp": 0.3}, {"score": 0.0, "sharp": 0.3})


def test_latent_frames_of_81_frames_in_5_segments():
    # Segments are 16.2 frames long: frames 0 to 15, 16 to 31, 32 to 48, 49 to 64, 65 to 80. Latent frame 4
    # stands for frames 13 to 16, 8 for 29 to 32: three of four lie in the earlier segment.
    owner = segments_of((1, *[4] * 20), 5)
    assert owner.tolist() == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert segments_of([1] * 81, 5).tolist() == [0] * 16 + [1] * 16 + [2] * 17 + [3] * 16 + [4] * 16


@pytest.mark.parametrize(
    ("lengths", "segments", "wanted"),
    [
        # 25 frames, 12.5 each: the third stands for frames 9 to 16, of which 12 to 16 are in the second half
        ((1, 8, 8, 8), 2, [0, 0, 1, 1]),
        # no shorter first one: the second lies on both sides alike
        ((4, 4, 4), 2, [0, 1, 1]),
        ((2, 2, 2, 2, 2, 2), 3, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_latent_frames_of_other_autoencoders(lengths, segments, wanted):
    assert segments_of(lengths, segments).tolist() == wanted


@pytest.mark.parametrize("span", [1, 4, 6, 8])
def test_no_segment_holds_more_frames_of_a_latent_frame_than_its_own(span):
    for num in range(2, 25):
        lengths = (1, *[span] * (num - 1))
        for segments in range(1, num + 1):
            own, pixels = segments_of(lengths, segments), segments_of([1] * sum(lengths), segments)
            for mine, frames in zip(own.tolist(), pixels.split(lengths), strict=True):
                counts = frames.bincount(minlength=segments)
                assert counts[mine] == counts.max()


@pytest.mark.parametrize("frames, length, segments", [(5, 3, 2), (2, 3, 3), (0, 2, 2)])
def test_what_cannot_be_cut_is_refused(frames, length, segments):
    with pytest.raises(ValueError, match=f"cannot be cut into {segments} segments"):
        cut(frames, length, segments, {})
