"""Sounds are decoded as they are, or refused in one line."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave

import av
import numpy
import pytest
import torch

from mmrl.core.chat import shown_media
from mmrl.core.modalities import MODALITIES, digest_of, tensor_bytes
from mmrl.core.types import Frames, Message, Part, Prompt, Sound
from mmrl.data.fields import RowError
from mmrl.data.media import MediaError
from mmrl.data.media_reader import MediaReader
from mmrl.data.object_rows import plain
from mmrl.data.sound import as_wav, load_sound, resampled, sound_duration, sound_in_memory
from mmrl.data.video import FrameSampling, read_video
from mmrl.engines.chat_completions import sound_parts, video_parts
from mmrl.vision.datasets.conversations import conversations

RATE = 16000


def tone(seconds=0.5, pitch=440.0, rate=RATE):
    return 0.5 * torch.sin(2 * math.pi * pitch * torch.arange(round(seconds * rate)) / rate)


def written(path, samples, codec, *, rate=RATE, form="s16", layout="mono"):
    """Encode samples (channels, T) as a file with PyAV."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples.float().numpy(), format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(format=stream.format or form, layout=layout, rate=rate)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path


def as_int16(*channels, rate=RATE, width=2):
    """Write integers of `width` bytes as WAV, channel beside channel."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((len(channels), width, rate, 0, "NONE", ""))
        for values in zip(*channels, strict=True):
            for value in values:
                file.writeframesraw(value.to_bytes(width, "little", signed=width > 1))
    return buffer.getvalue()


def filmed(path, samples=None, *, late=0.0, fps=4, num=16, rate=RATE):
    """Write a video of grey frames, with a sound that begins `late` seconds after the first frame."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.width = video.height = 32
        audio = None if samples is None else container.add_stream("aac", rate=rate, layout="mono")
        for number in range(num):
            grey = numpy.full((32, 32, 3), 16 * number, dtype="uint8")
            container.mux(video.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(video.encode(None))
        if audio is not None and samples is not None:
            frame = av.AudioFrame.from_ndarray(samples[None].numpy(), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = rate, round(late * rate)
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return path


def test_every_number_of_bits_and_channels_has_the_value_that_it_stands_for():
    # Bytes are unsigned, and 128 is 0; the largest magnitude of a signed integer of n bits is 2 ** (n - 1).
    assert load_sound(as_int16([128, 192, 0], width=1), "a").samples.tolist() == [0, 0.5, -1]
    assert load_sound(as_int16([0, 1 << 14, -(1 << 15)]), "a").samples.tolist() == [0, 0.5, -1]
    assert load_sound(as_int16([0, 1 << 22, -(1 << 23)], width=3), "a").samples.tolist() == [0, 0.5, -1]
    assert load_sound(as_int16([0, 1 << 30, -(1 << 31)], width=4), "a").samples.tolist() == [0, 0.5, -1]
    # Channels are averaged: (0.5 + 0) / 2 and (-1 + 0.5) / 2.
    stereo = load_sound(as_int16([1 << 14, -(1 << 15)], [0, 1 << 14], rate=8000), "a")
    assert stereo.samples.tolist() == [0.25, -0.25] and stereo.rate == 8000
    loud = Sound(torch.tensor([1.5, -0.1]), 22050)  # floating-point numbers are not cut
    assert torch.equal(load_sound(as_wav(loud), "a").samples, loud.samples)
    assert load_sound(as_wav(loud, bits=16), "a").samples.tolist() == [32767 / 32768, -3277 / 32768]


@pytest.mark.parametrize(
    ("name", "codec", "near"),
    [
        ("a.wav", "pcm_f32le", 0.0),
        ("a.flac", "flac", 1e-4),
        ("a.mp3", "libmp3lame", 0.05),
        ("a.ogg", "libopus", 0.05),
        ("a.m4a", "aac", 0.05),
        ("a.aiff", "pcm_s16be", 1e-4),
    ],
)
def test_formats_are_decoded_from_files_and_from_bytes(tmp_path, name, codec, near):
    rate = 48000 if codec == "libopus" else RATE
    wanted = tone(rate=rate)
    path = written(tmp_path / name, wanted[None], codec, rate=rate)
    found = MediaReader()("audio", path, "it").load()
    assert found.rate == rate and torch.equal(found.samples, load_sound(path.read_bytes(), name).samples)
    assert abs(len(found.samples) - len(wanted)) <= (0 if near < 0.01 else 0.1 * rate)
    assert path.suffix in MODALITIES["audio"].endings
    middle = slice(round(0.1 * rate), round(0.4 * rate))  # codecs fade in and out
    assert (found.samples[middle] - wanted[middle]).abs().max() <= near
    assert sound_duration(path) == pytest.approx(0.5, abs=0.1)


def test_resampling_keeps_a_tone_and_its_length():
    for rate in (8000, 22050, 44100, 48000):
        found = resampled(Sound(tone(rate=rate), rate), RATE)
        assert len(found) == 8000
        assert (found - tone())[200:-200].abs().max() < 1e-4
    assert resampled(Sound(tone()[:3], 48000), RATE).shape == (1,)
    same = Sound(tone(), RATE)
    assert resampled(same, RATE) is same.samples


def test_arrays_in_memory_are_those_of_datasets():
    stereo = numpy.array([[0.5, 0.25, 0.0], [0.0, 0.25, -1.0]])
    for array in (stereo, stereo.T, torch.tensor(stereo), stereo.mean(0).tolist()):
        medium = sound_in_memory({"array": array, "sampling_rate": 8000, "path": None}, "it")
        assert medium.load().samples.tolist() == [0.25, 0.25, -0.5] and medium.load().rate == 8000
        assert load_sound(medium.source, "it").rate == 8000
    whole = {"array": numpy.array([0, 1 << 14], dtype="int16"), "sampling_rate": 8000}
    assert sound_in_memory(whole, "it").load().samples.tolist() == [0, 0.5]
    decoder = type(
        "AudioDecoder",
        (),
        {
            "get_all_samples": lambda _: type(
                "S", (), {"data": torch.tensor([[0.5, 0.0], [1.0, 0.0]]), "sample_rate": 9}
            )
        },
    )
    assert sound_in_memory(decoder(), "it").load().samples.tolist() == [0.75, 0]
    assert plain([{"audio": whole}])[0]["audio"]["bytes"][:4] == b"RIFF"
    assert sound_in_memory({"array": None, "sampling_rate": 8}, "it") is sound_in_memory(3, "it") is None
    for array, words in (
        (numpy.zeros((2, 3, 4)), r"is an array \(2, 3, 4\) of float64; wanted samples"),
        (numpy.zeros(3, dtype="int64"), r"is an array \(3,\) of int64"),
        (numpy.zeros(0), "holds a sound of no samples"),
        (numpy.array([math.nan]), "holds samples that are NaN or infinite"),
    ):
        with pytest.raises(MediaError, match=words):
            sound_in_memory({"array": array, "sampling_rate": 8000}, "it")


def unknown_codec(path):
    data = bytearray(as_wav(Sound(tone(), RATE)))
    data[20:22] = struct.pack("<H", 0x7777)  # the format tag
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path: path.write_bytes(b"no sound"),
            "cannot decode '.*': .*; wanted a sound as mov, mp4, .*, wav",
        ),
        (lambda path: path.write_bytes(as_int16([])), "holds a sound of no samples|cannot decode"),
        (unknown_codec, "holds a sound in a codec that this build of ffmpeg does not know"),
        (lambda path: filmed(path.with_suffix(".mp4")).rename(path), "holds no sound"),
        (lambda path: path.write_bytes(as_wav(Sound(torch.tensor([math.inf]), 8))), "NaN or infinite"),
        (lambda path: path.write_text("#EXTM3U\n/etc/passwd\n"), "cannot decode"),
    ],
    ids=["noise", "empty", "codec", "silent", "infinite", "playlist"],
)
def test_a_file_without_a_usable_sound_is_one_clear_line(tmp_path, make, words):
    path = tmp_path / "a.wav"
    make(path)
    with pytest.raises(MediaError, match=words) as raised:
        MediaReader()("audio", path, "it").load()
    assert "\n" not in str(raised.value)


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = written(tmp_path / "a.flac", tone(8.0)[None], "flac")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(MediaError, match="is cut short: its header has 8.00 s|cannot decode"):
        load_sound(path, "a")


def test_a_wav_file_that_is_cut_short_is_refused_and_one_of_a_stream_is_not(tmp_path):
    path, whole = tmp_path / "a.wav", as_int16([1000] * RATE)
    path.write_bytes(whole[: 44 + RATE // 2])
    for source in (path, path.read_bytes()):
        with pytest.raises(MediaError, match=r"'a' is cut short: its header has 32000 bytes .* 8000 are"):
            load_sound(source, "a")
    with pytest.raises(MediaError, match="is cut short"):
        sound_duration(path)
    streamed = whole[:40] + struct.pack("<I", 0xFFFFFFFF) + whole[44:]
    assert len(load_sound(streamed, "a").samples) == len(load_sound(whole, "a").samples) == RATE


def test_a_missing_codec_is_known_before_anything_is_decoded(tmp_path):
    path = tmp_path / "a.wav"
    unknown_codec(path)
    with pytest.raises(MediaError, match="in a codec that this build of ffmpeg does not know"):
        MODALITIES["audio"].check_file(path)


def test_the_sound_of_a_video_begins_with_its_first_frame(tmp_path):
    path = filmed(tmp_path / "a.mkv", tone(4.0, rate=RATE))
    silent = filmed(tmp_path / "b.mkv")
    heard = FrameSampling(load_audio_from_video=True)
    assert read_video(path).sound is None and read_video(silent, heard).sound is None
    whole = read_video(path, heard).sound
    assert whole.rate == RATE and len(whole.samples) == pytest.approx(4 * RATE, abs=2048)
    cut = read_video(path, FrameSampling(start=1.0, end=3.0, load_audio_from_video=True)).sound
    assert len(cut.samples) == 2 * RATE
    torch.testing.assert_close(cut.samples, whole.samples[RATE : 3 * RATE], rtol=0, atol=1e-6)


def test_a_track_that_begins_late_is_silent_before(tmp_path):
    path = filmed(tmp_path / "a.mkv", tone(2.0), late=1.0)
    found = read_video(path, FrameSampling(load_audio_from_video=True)).sound.samples
    assert not found[: RATE - 1100].any()
    wanted = tone(2.0)[4000:24000]
    assert (found[RATE + 4000 : RATE + 24000] - wanted).abs().max() < 0.05


def test_digests_see_the_sound_and_caches_count_it():
    frames = Frames(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1), 1.0)
    heard, other = (
        Frames(frames.pixels, frames.times, 1.0, Sound(x, 8)) for x in (torch.ones(4), torch.zeros(4))
    )
    digest = MODALITIES["video"].digest
    assert len({digest("video", one) for one in (frames, heard, other)}) == 3
    assert tensor_bytes(heard) == tensor_bytes(frames) + 16
    one, same, third = (
        MediaReader()("audio", {"array": [x, 0.0], "sampling_rate": 8}, "it") for x in (0.5, 0.5, 0.25)
    )
    assert digest_of(one) == digest_of(same) != digest_of(third)


def test_servers_get_sounds_in_the_form_of_openai():
    sound = Sound(torch.tensor([0.0, 0.5]), 8000)
    (part,) = sound_parts(sound)
    assert part["type"] == "input_audio" and part["input_audio"]["format"] == "wav"
    back = load_sound(base64.b64decode(part["input_audio"]["data"]), "it")
    assert back.rate == 8000 and back.samples[1] == pytest.approx(0.5, abs=1e-4)
    frames = Frames(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1), 1.0, sound)
    assert [one["type"] for one in video_parts(frames)] == ["text", "image_url", "input_audio"]


def test_rows_hold_sounds_in_every_form(tmp_path):
    from mmrl.data.dataset_io import write_rows

    (tmp_path / "a.wav").write_bytes(as_wav(Sound(tone(), RATE)))
    data = base64.b64encode(as_wav(Sound(tone(), RATE))).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    rows = [
        {"prompt": "a <audio> b", "audio": "a.wav"},
        {"prompt": "two", "audios": ["a.wav", f"data:audio/wav;base64,{data}"]},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "b"}]}]},
        {"prompt": "array", "audio": {"array": [0.0, 0.5], "sampling_rate": 8000}},
        {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    prompts = list(conversations(path=str(tmp_path / "rows.jsonl")))
    assert [[medium.kind for medium in prompt.media] for prompt in prompts] == [
        ["audio"], ["audio", "audio"], ["audio"], ["audio"], ["audio"]
    ]  # fmt: skip
    assert [part.media is None for part in prompts[0].messages[0].parts] == [True, False, True]
    rates = [medium.load().rate for prompt in prompts for medium in prompt.media]
    assert rates == [RATE, RATE, RATE, RATE, 8000, RATE]
    columns = shown_media(prompts[:1])
    assert columns["audio"][0]["sampling_rate"] == RATE and columns["audio"][0]["array"].shape == (8000,)
    write_rows(
        tmp_path / "rows.parquet",
        [{"prompt": "x", "audio": {"bytes": as_wav(Sound(tone(), 8)), "path": None}}],
    )
    (stored,) = conversations(path=str(tmp_path / "rows.parquet"))
    assert stored.media[0].load().rate == 8


def test_a_row_decides_whether_its_video_is_heard(tmp_path):
    from mmrl.data.dataset_io import write_rows

    filmed(tmp_path / "a.mkv", tone(4.0))
    name = "load_audio_from_video"
    write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": "x", "video": "a.mkv", name: value} for value in (None, True, False)],
    )
    for default in (True, False):
        prompts = conversations(path=str(tmp_path / "rows.jsonl"), load_audio_from_video=default)
        heard = [prompt.media[0].load().sound is not None for prompt in prompts]
        assert heard == [default, True, False]
        assert all(name not in prompt.columns for prompt in prompts)
    write_rows(tmp_path / "bad.jsonl", [{"prompt": "x", "video": "a.mkv", name: "yes"}])
    with pytest.raises(RowError, match="wanted true or false as `load_audio_from_video`, got 'yes'"):
        list(conversations(path=str(tmp_path / "bad.jsonl")))


def test_a_model_of_images_refuses_a_sound():
    from mmrl.vision.models.media_arguments import media_arguments

    medium = sound_in_memory({"array": [0.5], "sampling_rate": 8}, "it")
    prompt = Prompt("p", (Message("user", (Part(media=medium),)),))
    with pytest.raises(ValueError, match="prompt 'p' shows an audio, but this model reads no sounds"):
        media_arguments(object(), prompt, {})
