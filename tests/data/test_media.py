"""Images of any mode become 8-bit RGB upright, and no medium makes its reader open another file."""

from __future__ import annotations

import struct

import av
import numpy
import pytest
import torch
from PIL import Image, features

from examples.video_grounding.spliced_videos import write_video
from mmrl.data.dataset_io import RowError
from mmrl.data.media import MediaError, locate, opened_image, opened_video, read_image
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling, read_video, video_duration
from mmrl.diffusion.image_io import load_image, load_video
from tests.support.damaged import CODECS, IMAGES, damaged, valid

RED, WHITE = [255, 0, 0], [255, 255, 255]
GREYS = numpy.array([[0, 30000, 65535]], dtype=numpy.uint16)
SCALED = [0, 117, 255]  # 30000 / 65535 * 255 = 116.7


def both(path):
    """Decode an image for either kind of model; both see the same (height, width, 3)."""
    seen = MediaRoot(path.parent).image(path.name).load().pixels[0]
    assert torch.equal(seen, load_image(path))
    return seen.permute(1, 2, 0)


def pgm(values, white=65535):
    rows, columns = values.shape
    return f"P5 {columns} {rows} {white}\n".encode() + values.astype(">u2").tobytes()


@pytest.mark.parametrize("name", ["g.png", "g.tiff", "big.tiff", "g.pgm"])
def test_16_bit_grey_is_scaled_to_8_bits(tmp_path, name):
    path = tmp_path / name
    if name == "g.pgm":
        path.write_bytes(pgm(GREYS))
    elif name == "big.tiff":  # the other order of bytes
        Image.frombytes("I;16B", (3, 1), GREYS.astype(">u2").tobytes()).save(path)
    else:
        Image.fromarray(GREYS).save(path)
    assert both(path)[0].tolist() == [[grey] * 3 for grey in SCALED]


def test_16_bit_grey_stays_upright_and_keeps_what_is_transparent(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3  # half a turn
    Image.fromarray(GREYS).save(tmp_path / "turned.png", exif=exif)
    assert both(tmp_path / "turned.png")[0, :, 0].tolist() == SCALED[::-1]
    Image.fromarray(GREYS).save(tmp_path / "clear.png", transparency=0)
    assert both(tmp_path / "clear.png")[0, :, 0].tolist() == [255, 117, 255]


def test_fewer_bits_and_white_as_zero_of_a_tiff(tmp_path):
    tags = {262: 0}  # white is zero
    Image.fromarray(GREYS).save(tmp_path / "white.tiff", tiffinfo=tags)
    assert both(tmp_path / "white.tiff")[0, :, 0].tolist() == [255 - grey for grey in SCALED]
    (tmp_path / "g.pgm").write_bytes(pgm(numpy.array([[0, 500, 1000]]), 1000))
    assert both(tmp_path / "g.pgm")[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize(("mode", "what"), [("F", "floating-point numbers"), ("I", "32-bit integers")])
def test_numbers_without_a_known_white_are_refused(tmp_path, mode, what):
    path = tmp_path / "a.tiff"
    Image.new(mode, (2, 2), 1).save(path)
    for read in (lambda: read_image(path, "a.tiff"), lambda: load_image(path)):
        with pytest.raises(MediaError, match=rf"a\.tiff' holds {what}.*save it with 8 or 16 bits"):
            read()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_what_is_transparent_shows_white(tmp_path, mode):
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    shown = {"RGBA": image, "LA": image.convert("LA"), "P": image.quantize(), "PA": Image.new("P", (2, 1))}[
        mode
    ]
    if mode == "PA":
        shown = shown.convert("PA")
        shown.putalpha(Image.frombytes("L", (2, 1), b"\x00\xff"))
    path = tmp_path / ("a.tiff" if mode == "PA" else "a.png")
    shown.save(path)
    with opened_image(path, "a") as image:
        assert image.mode == mode
    assert both(path)[0].tolist() == [WHITE, [0, 0, 0]]


def test_half_transparent_red_is_half_white(tmp_path):
    Image.new("RGBA", (1, 1), (255, 0, 0, 128)).save(tmp_path / "a.webp", lossless=True)
    assert both(tmp_path / "a.webp")[0, 0].tolist() == [255, 127, 127]
    assert numpy.array(read_image(tmp_path / "a.webp", "a", transparent=True))[0, 0].tolist() == [
        255,
        0,
        0,
        128,
    ]


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tiff"])
def test_of_an_animation_or_pages_the_first_image_is_read(tmp_path, name):
    images = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if name == "a.webp" else {}
    images[0].save(tmp_path / name, save_all=True, append_images=images[1:], **options)
    assert both(tmp_path / name)[0, 0].tolist() == RED


@pytest.mark.parametrize("ending", ["eps", "tga", "png"])
def test_formats_that_are_not_on_the_list_are_refused_under_any_name(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    Image.new("RGB", (2, 2)).save(path, "EPS" if ending == "png" else None)
    with pytest.raises(MediaError, match="cannot decode .* wanted an image as PNG, JPEG"):
        read_image(path, path.name)


# ---- other files


@pytest.fixture
def outside(tmp_path):
    """A folder of media, and a video beside it that nothing in the folder may show."""
    (tmp_path / "media").mkdir()
    write_video(tmp_path / "secret.ts", torch.zeros(8, 3, 32, 48, dtype=torch.uint8), 4)
    Image.new("RGB", (48, 32)).save(tmp_path / "secret_1.png")
    return tmp_path


LISTS = {
    "m3u8": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:3\n#EXTINF:2,\n{0}/secret.ts\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile {1}\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n",
    "dash": "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011' type='static'>"
    "<Period><AdaptationSet><Representation id='1' mimeType='video/mp2t'><BaseURL>{0}/secret.ts</BaseURL>"
    "</Representation></AdaptationSet></Period></MPD>",
}


@pytest.mark.parametrize("ending", ["mp4", "m3u8", "mkv"])
@pytest.mark.parametrize("kind", LISTS)
def test_a_file_that_lists_others_is_refused_under_any_name(outside, kind, ending):
    path = outside / "media" / f"a.{ending}"
    path.write_text(LISTS[kind].format(outside, "../secret.ts"))
    for read in (
        lambda: MediaRoot(path.parent).video(path.name, FrameSampling()).load(),
        lambda: video_duration(path),
        lambda: load_video(path, 2, 16, 16),
    ):
        with pytest.raises(MediaError, match=r"cannot decode '.*/a\.\w+'.*wanted a video as mov, mp4"):
            read()


def test_the_list_above_would_show_the_other_file_to_a_careless_reader(outside):
    """Else the bad_rows_error could come from a list that nobody can read."""
    path = outside / "media" / "a.m3u8"
    path.write_text(LISTS["m3u8"].format(outside))
    with av.open(str(path)) as container:
        assert len(list(container.decode(video=0))) == 8


def test_a_pattern_of_files_is_the_name_of_one_file(outside):
    with pytest.raises(MediaError, match="secret_%d.png"):
        read_video(outside / "secret_%d.png")
    with pytest.raises(MediaError, match="there is no file 'concat:"):
        locate(f"concat:{outside}/secret.ts", outside / "media")


def test_a_container_that_asks_for_another_file_gets_none(outside, monkeypatch):
    """Even a format that slips into the list reaches nothing but its own file."""
    monkeypatch.setattr("mmrl.data.media.CONTAINERS", "hls,concat,mpegts,mov")
    (outside / "media" / "a.m3u8").write_text(LISTS["m3u8"].format(outside))
    (outside / "media" / "b.mp4").write_text(LISTS["concat"].format(outside, "secret.ts"))
    for name in ("a.m3u8", "b.mp4"):
        with pytest.raises(MediaError, match="cannot decode"), opened_video(outside / "media" / name) as film:
            list(film.decode(video=0))


@pytest.mark.parametrize("name", ["a\0b.png", "x" * 5000, "a/" * 3000])
def test_names_that_no_file_system_knows_are_media_errors(tmp_path, name):
    with pytest.raises(MediaError, match=r"cannot be the path of a file|there is no file"):
        MediaRoot(tmp_path).locate(name)


def test_a_media_error_is_a_row_error():
    assert issubclass(MediaError, RowError)  # what diffusion's data sets and `bad_rows` catch


def test_a_video_beyond_the_limit_of_pixels_is_refused(outside):
    with (
        pytest.raises(MediaError, match=r"48x32 pixels; the limit is 1535"),
        opened_video(outside / "secret.ts", 1535),
    ):
        pass


def test_a_video_whose_frames_change_their_size_is_an_error(tmp_path):
    for name, side in (("a.ts", 32), ("b.ts", 64)):
        write_video(tmp_path / name, torch.zeros(8, 3, side, side, dtype=torch.uint8), 4)
    whole = tmp_path / "whole.ts"  # pieces of a transport stream may simply follow each other
    whole.write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    with pytest.raises(MediaError, match=r"whole\.ts' changes its size: .*\(32, 32\), \(64, 64\)"):
        read_video(whole, FrameSampling(min_frames=16))


def test_a_title_that_is_no_utf_8_does_not_make_a_video_unreadable(tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "EEEEEEEE"
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode())
    path.write_bytes(path.read_bytes().replace(b"EEEEEEEE", b"\xe9" * 8))  # in latin 1
    assert read_video(path, FrameSampling(min_frames=2)).pixels.shape == (2, 3, 32, 32)


def test_a_turned_video_is_upright_for_image_models_as_well(tmp_path):
    frames = torch.zeros(4, 3, 32, 48, dtype=torch.uint8)
    frames[:, :, :16] = 255  # white above black
    write_video(tmp_path / "a.mp4", frames, 4)
    turned = turned_by_a_quarter(tmp_path / "a.mp4", tmp_path / "turned.mp4")
    film, _ = load_video(turned, 2, 48, 32)
    seen = read_video(turned, FrameSampling(min_frames=2)).pixels
    assert film.shape[1:] == seen.shape[1:] == (3, 48, 32)
    assert (film[0].float() - seen[0].float()).abs().mean() < 2
    assert (film[0, 0, :, 0].float() - film[0, 0, :, -1].float()).abs().min() > 200  # beside each other


def turned_by_a_quarter(path, target):
    """Write another display matrix into the header of an MP4: the track's `tkhd`, 40 bytes after its type."""
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd") + 4 + 40
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target


def readings(path, data):
    """Read a file in every way that the library has; give what was decoded, or the media error."""
    root = MediaRoot(path.parent, cache_bytes=0)
    for read in (
        lambda: root.image(path.name).load(),
        lambda: read_image(data, path.name),
        lambda: load_image(path, 8, 8),
        lambda: root.video(path.name, FrameSampling(max_frames=16)).load(),
        lambda: video_duration(path),
        lambda: load_video(path, 2, 16, 16),
    ):
        try:
            yield read()
        except MediaError as error:
            assert path.name in str(error)
            yield None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of tags that it skips
def test_a_thousand_damaged_media_are_decoded_or_media_errors(tmp_path):
    """Nothing else comes out of any of the readers, so `bad_rows: drop` catches all of it."""
    found = []
    for name, data in damaged(1000, seed=0):
        path = tmp_path / name
        path.write_bytes(data)
        found += readings(path, data)
        path.unlink()
    refused = sum(one is None for one in found)
    assert len(found) == 6000 and 3000 < refused < 5000  # some of the damage leaves enough to see


def test_all_kinds_of_media_are_read_before_they_are_damaged(tmp_path):
    """Else a damaged file could be refused for what it is."""
    absent = set() if features.check("avif") else {"avif"}
    for name in set(IMAGES) - {"eps", "dds", "tga", "jp2", "ico"} - absent:
        assert read_image(valid(name), name).size in [(24, 16), (16, 24)]
    for name in CODECS:
        (tmp_path / name).write_bytes(valid(name))
        assert load_video(tmp_path / name, 2, 16, 16)[0].shape == (2, 3, 16, 16)


def referring(data, path):
    """Move the media of an MP4 of ours to another file: an alias in its `dref` in the place of "in here"."""
    absolute = struct.pack(">hH", 2, len(path)) + path + bytes(len(path) % 2) + struct.pack(">hH", -1, 0)
    volume = bytes(10) + b"\3" + b"vol".ljust(27, b"\0") + bytes(12) + b"\1" + b"x".ljust(63, b"\0")
    entry = b"alis" + bytes(4) + volume + bytes(16) + struct.pack(">HH", 1, 1) + bytes(16) + absolute
    entry = struct.pack(">I", len(entry) + 4) + entry
    at = data.find(b"dref") - 4
    assert data[at + 20 : at + 24] == b"url " and data.find(b"mdat") < at  # no offsets move
    referring = bytearray(data[: at + 16] + entry + data[at + 28 :])
    for name in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        start = referring.find(name) - 4
        (size,) = struct.unpack(">I", referring[start : start + 4])
        referring[start : start + 4] = struct.pack(">I", size + len(entry) - 12)
    return bytes(referring)


def test_a_video_whose_frames_lie_in_another_file_does_not_show_them(tmp_path):
    write_video(tmp_path / "secret.mp4", torch.zeros(8, 3, 32, 48, dtype=torch.uint8), 4)
    (tmp_path / "media").mkdir()
    path = tmp_path / "media" / "a.mov"
    path.write_bytes(referring((tmp_path / "secret.mp4").read_bytes(), str(tmp_path / "secret.mp4").encode()))
    opened = []
    options = {"enable_drefs": "1", "use_absolute_path": "1"}
    with path.open("rb") as file, pytest.raises(ValueError):  # a reader that follows it asks for it
        av.open(file, io_open=lambda url, *_: opened.append(url), container_options=options)
    assert opened and opened[0].endswith("secret.mp4")
    for read in (read_video, lambda path: load_video(path, 2, 16, 16)):
        with pytest.raises(MediaError, match=r"a\.mov'"):
            read(path)


def test_the_error_of_an_unreadable_image_is_the_same_in_every_run():
    """Manifests of builds list these errors, and two builds of the same data are equal."""
    with pytest.raises(MediaError, match=r"cannot decode 'a\.png': cannot identify image file; wanted"):
        read_image(b"no image", "a.png")
