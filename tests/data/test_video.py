"""Videos are decoded by the clock: the image that a player shows at a second, upright, or a clear error."""

from __future__ import annotations

import struct
from fractions import Fraction

import av
import pytest
import torch

from examples.video_grounding.spliced_videos import write_video
from mmrl.data.video import FrameSampling, MediaError, read_video, sample_times, video_duration

SHADE = 12  # frame number i is a grey of 12 i


def greys(count, *, height=32, width=48):
    numbers = torch.arange(count) % 20 * SHADE
    return numbers[:, None, None, None].expand(-1, 3, height, width).to(torch.uint8)


def numbers(frames):
    """Tell which frames of `greys` were decoded."""
    return (frames.pixels.float().mean((1, 2, 3)) / SHADE).round().int().tolist()


def encode(path, count, *, rate=4, container=None, keyframes=12, options=(), first=0.0, times=None):
    """Write `greys` with a key frame every so many frames, in any container."""
    with av.open(str(path), "w", format=container, options=dict(options)) as output:
        stream = output.add_stream("libx264", rate=rate)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        stream.codec_context.gop_size = keyframes
        stream.options = {"preset": "veryfast", "sc_threshold": "0"}
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i, picture in enumerate(greys(count)):
            frame = av.VideoFrame.from_ndarray(picture.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
            second = first + i / rate if times is None else times[i]
            frame.pts, frame.time_base = round(second * 1000), Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A video of 5 s with 4 frames a second."""
    path = tmp_path_factory.mktemp("video") / "steady.mp4"
    write_video(path, greys(20), 4)
    return path


def test_a_video_of_constant_rate_is_sampled_by_seconds(steady):
    frames = read_video(steady, FrameSampling(frames_per_second=2))
    assert frames.duration == 5
    assert frames.times.tolist() == [i / 2 for i in range(10)]
    assert numbers(frames) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert frames.pixels.dtype == torch.uint8
    assert frames.pixels.shape == (10, 3, 32, 48)


def test_between_two_frames_the_earlier_one_is_on_screen(steady):
    # 6 frames in 5 s stand at 0, 0.83, 1.67, 2.5, 3.33, 4.17 s, which is frame 0, 3.3, 6.7, 10, 13.3, 16.7.
    frames = read_video(steady, FrameSampling(min_frames=6, max_frames=6))
    assert numbers(frames) == [0, 3, 6, 10, 13, 16]


def test_more_samples_than_frames_repeat_them(steady):
    frames = read_video(steady, FrameSampling(frames_per_second=8, end=1.0))
    assert numbers(frames) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("name", ["variable.mp4", "variable.mkv"])
def test_a_video_of_variable_rate_is_sampled_by_seconds(tmp_path, name):
    # frames 0    1    2    3    4    5    6    7; the last one lasts a tenth of a second
    times = [0.0, 0.1, 0.2, 2.0, 2.9, 3.1, 5.0, 7.9]
    write_video(tmp_path / name, greys(8), 10, times=times)
    frames = read_video(tmp_path / name, FrameSampling(frames_per_second=1))
    assert frames.duration == 8
    assert frames.times.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    # At 1 s frame 2 is still on screen, at 3 s frame 4, from 5 to 7 s frame 6.
    assert numbers(frames) == [0, 2, 3, 4, 5, 6, 6, 6]
    window = read_video(tmp_path / name, FrameSampling(frames_per_second=2, start=2, end=4))
    assert numbers(window) == [3, 3, 4, 5]  # at 2, 2.5, 3 and 3.5 s


def test_frames_after_the_end_that_an_mp4_header_tells_are_read(tmp_path):
    # With B-frames and a variable rate the header adds up times of decoding: 1.43 s here.
    seconds = [0, 0.1, 0.2, 0.3, 1.0, 1.2, 2.3, 3.9]
    path = encode(tmp_path / "b.mp4", 8, rate=30, times=seconds)
    with av.open(str(path)) as opened:
        assert opened.duration < 2e6
    frames = read_video(path, FrameSampling(frames_per_second=1))
    assert frames.duration == video_duration(path) == pytest.approx(3.933, abs=0.01)
    assert numbers(frames) == [0, 3, 5, 6]
    assert numbers(read_video(path, FrameSampling(min_frames=2, start=2.0, end=3.9))) == [5, 6, 6, 6]


def test_times_count_from_the_first_image(tmp_path):
    for name in ("late.mkv", "late.mp4", "late.ts"):
        frames = read_video(encode(tmp_path / name, 20, first=5.0))
        assert frames.duration == pytest.approx(5, abs=0.01)
        assert numbers(frames) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]


def test_a_file_that_does_not_say_how_long_it_lasts_is_measured(tmp_path):
    for first in (0.0, 5.0):
        path = encode(tmp_path / "live", 20, container="matroska", options={"live": "1"}, first=first)
        with av.open(str(path)) as container:
            assert container.duration is None and container.streams.video[0].duration is None
        assert video_duration(path) == pytest.approx(5)
        assert numbers(read_video(path)) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
        assert numbers(read_video(path, FrameSampling(start=2, end=4))) == [8, 10, 12, 14]


def test_a_stream_without_a_container_is_an_error_that_names_the_file(tmp_path):
    path = encode(tmp_path / "raw.h264", 20, container="h264")
    with pytest.raises(MediaError, match=r"cannot decode '.*raw\.h264'.*wanted a video as mov, mp4"):
        read_video(path)


def test_a_window_is_read_from_where_it_starts(steady):
    frames = read_video(steady, FrameSampling(start=2, end=4))
    assert frames.times.tolist() == [2, 2.5, 3, 3.5]
    assert numbers(frames) == [8, 10, 12, 14]
    assert frames.duration == 5
    # An end beyond the video is that of the video; an open end too.
    assert numbers(read_video(steady, FrameSampling(start=3, end=100))) == [12, 14, 16, 18]
    assert numbers(read_video(steady, FrameSampling(start=3))) == [12, 14, 16, 18]


@pytest.mark.parametrize("keyframes", [7, 1000])
@pytest.mark.parametrize("name", ["far.mp4", "far.mkv"])
def test_a_window_far_inside_a_video_is_exact_with_sparse_key_frames(tmp_path, name, keyframes):
    path = encode(tmp_path / name, 240, keyframes=keyframes)
    # 43 s is frame 172, and 172 % 20 is 12.
    frames = read_video(path, FrameSampling(frames_per_second=4, start=43, end=45))
    assert numbers(frames) == [12, 13, 14, 15, 16, 17, 18, 19]
    assert frames.times.tolist() == [43 + i / 4 for i in range(8)]


@pytest.mark.parametrize(("start", "end"), [(5, None), (6, 7), (-1, 2), (3, 3), (4, 2), (0, 0)])
def test_a_window_outside_the_video_is_an_error_that_tells_its_length(steady, start, end):
    with pytest.raises(MediaError, match=r"steady\.mp4' lasts 5\.00 s"):
        read_video(steady, FrameSampling(start=start, end=end))


def test_sample_times_stand_at_equal_distances_from_the_start():
    assert sample_times(1, 3, FrameSampling(frames_per_second=2)) == [1, 1.5, 2, 2.5]
    assert sample_times(0, 1, FrameSampling(frames_per_second=1, min_frames=4)) == [0, 0.25, 0.5, 0.75]
    assert sample_times(0, 100, FrameSampling(frames_per_second=1, max_frames=4)) == [0, 25, 50, 75]


@pytest.mark.parametrize(
    ("seconds", "options", "count"),
    [
        (5, {"frames_per_second": 1}, 4),  # 5 is rounded to the nearest multiple of 2
        (7, {"frames_per_second": 1}, 8),
        (3, {"frames_per_second": 1, "multiple_of": 1, "min_frames": 1}, 3),
        (100, {"frames_per_second": 1, "max_frames": 9}, 8),  # never more than asked for
        (1, {"frames_per_second": 1, "min_frames": 5}, 6),  # never fewer
        (1, {"frames_per_second": 1, "min_frames": 1, "max_frames": 1}, 2),  # a multiple, whatever is asked
        (0.1, {"frames_per_second": 1, "min_frames": 0}, 2),
    ],
)
def test_the_number_of_frames_is_a_multiple_inside_its_bounds(seconds, options, count):
    assert len(sample_times(0, seconds, FrameSampling(**options))) == count


def test_pixel_budgets_bound_frames_and_keep_their_shape(steady):
    whole = 32 * 48
    assert read_video(steady, FrameSampling(max_pixels=whole)).pixels.shape[2:] == (32, 48)
    assert read_video(steady, FrameSampling(max_pixels=whole // 4)).pixels.shape[2:] == (16, 24)
    # 10 frames share a quarter of what they have.
    assert read_video(steady, FrameSampling(total_pixels=10 * whole // 4)).pixels.shape[2:] == (16, 24)
    # The smaller of two budgets counts.
    both = FrameSampling(max_pixels=whole // 4, total_pixels=10 * whole)
    assert read_video(steady, both).pixels.shape[2:] == (16, 24)
    assert read_video(steady, FrameSampling(total_pixels=3)).pixels.shape[2:] == (1, 1)
    for budget in (100, 333, 1000):
        frames = read_video(steady, FrameSampling(max_pixels=budget))
        assert frames.pixels[0, 0].numel() <= budget
        assert numbers(frames) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]


ONE = 1 << 16
# The matrix of a track maps x to a x + c y + tx and y to b x + d y + ty; stored as a, b, u, c, d, v, tx, ty,
# w. The
# filters are what a player does for it.
MATRICES = {
    "a quarter clockwise": ((0, 1, -1, 0), "transpose=clock"),
    "a quarter counter-clockwise": ((0, -1, 1, 0), "transpose=cclock"),
    "half a turn": ((-1, 0, 0, -1), "hflip,vflip"),
    "mirrored": ((-1, 0, 0, 1), "hflip"),
    "upside down": ((1, 0, 0, -1), "vflip"),
    "over the diagonal": ((0, 1, 1, 0), "transpose=cclock_flip"),
    "over the other diagonal": ((0, -1, -1, 0), "transpose=clock_flip"),
    "as it is": ((1, 0, 0, 1), "null"),
}


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A video with a bright corner at the top left and a grey one at the top right."""
    picture = torch.zeros(3, 32, 48, dtype=torch.uint8)
    picture[:, :16, :16], picture[:, :16, 32:] = 240, 120
    path = tmp_path_factory.mktemp("video") / "marked.mp4"
    write_video(path, picture.expand(8, -1, -1, -1), 4)
    return path


def turned(path, kind, target):
    """Copy a video with another display matrix in the header of its track."""
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd") + 4 + 40  # behind version, times, numbers and volume comes the matrix
    assert struct.unpack(">9i", data[at : at + 36]) == (ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30)
    a, b, c, d = (ONE * x for x in MATRICES[kind][0])
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target


def test_a_video_turned_clockwise_shows_its_top_left_corner_at_the_top_right(marked, tmp_path):
    # Phones held upright write this matrix: x' = -y and y' = x, so what was left is on top, what was on top
    # is right. The bright corner of the top left goes to the top right, the grey one of the top right below.
    frames = read_video(turned(marked, "a quarter clockwise", tmp_path / "turned.mp4"))
    assert frames.pixels.shape[2:] == (48, 32)
    picture = frames.pixels[0, 0].float()
    assert picture[:12, 20:].mean() == pytest.approx(240, abs=6)
    assert picture[36:, 20:].mean() == pytest.approx(120, abs=6)
    assert picture[:, :12].mean() == pytest.approx(0, abs=6)


@pytest.mark.parametrize("kind", sorted(MATRICES))
def test_a_turned_or_mirrored_video_is_shown_as_the_filters_of_a_player_show_it(marked, tmp_path, kind):
    graph = av.filter.Graph()
    with av.open(str(marked)) as container:
        chain = [graph.add_buffer(template=container.streams.video[0])]
        for part in MATRICES[kind][1].split(","):
            chain.append(graph.add(*part.split("=")))
        graph.link_nodes(*chain, graph.add("buffersink")).configure()
        graph.push(next(container.decode(video=0)))
    wanted = torch.from_numpy(graph.pull().to_ndarray(format="rgb24")).permute(2, 0, 1)
    got = read_video(turned(marked, kind, tmp_path / "turned.mp4")).pixels[0]
    assert got.shape == wanted.shape
    assert (got.float() - wanted.float()).abs().mean() < 3


def test_pixel_budgets_of_a_turned_video(marked, tmp_path):
    path = turned(marked, "a quarter clockwise", tmp_path / "turned.mp4")
    assert read_video(path, FrameSampling(max_pixels=32 * 48 // 4)).pixels.shape[2:] == (24, 16)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", ["cut.mp4", "cut.mkv"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, name, share):
    options = {"movflags": "faststart"} if name.endswith("mp4") else {}
    path = encode(tmp_path / name, 80, options=options)
    data = path.read_bytes()
    path.write_bytes(data[: round(len(data) * share)])
    with pytest.raises(MediaError, match=f"'{path}'"):
        read_video(path)


def test_images_that_end_a_little_early_are_no_error(tmp_path):
    # A window that asks for the last second again and again gets the last frame.
    path = encode(tmp_path / "short.mp4", 20)
    frames = read_video(path, FrameSampling(frames_per_second=40, start=4.5, max_frames=40))
    assert numbers(frames)[-1] == 19


def test_a_broken_file_is_an_error_that_names_it(tmp_path):
    path = encode(tmp_path / "broken.mp4", 40)
    data = bytearray(path.read_bytes())
    middle = (data.find(b"mdat") + data.find(b"moov")) // 2
    data[middle : middle + 200] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(MediaError, match=r"broken\.mp4'"):
        read_video(path)


@pytest.mark.parametrize("content", [b"", b"this is no video", b"\x00" * 4096])
def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "text.mp4"
    path.write_bytes(content)
    for read in (read_video, video_duration):
        with pytest.raises(MediaError, match=r"text\.mp4"):
            read(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    for read in (read_video, video_duration):
        with pytest.raises(MediaError, match=r"nowhere\.mp4"):
            read(tmp_path / "nowhere.mp4")


def test_sound_alone_is_an_error_that_says_so(tmp_path):
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("pcm_s16le", rate=8000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(torch.zeros(1, 800, dtype=torch.int16).numpy(), layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    for read in (read_video, video_duration):
        with pytest.raises(MediaError, match=r"sound\.mkv' holds no video stream"):
            read(path)


def test_video_duration_is_that_of_the_frames(steady):
    assert video_duration(steady) == read_video(steady).duration == 5
