"""Bytes of media: in memory up to a limit, then in a file, and the same to everybody who reads them."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from mmrl.core.types import Media, Message, Part, Prompt
from mmrl.data.media_root import MediaRef, MediaRoot
from mmrl.data.stored_bytes import ByteFile, BytesInMemory, StoredBytes
from mmrl.data.video import FrameSampling
from mmrl.runtime.content_hash import of_prompts


def test_what_exceeds_the_limit_goes_to_the_file():
    file = ByteFile(limit=10)
    kept = [file.put(data) for data in (b"1234567", b"abcdef", b"", b"xyz", b"last")]
    assert [type(one) for one in kept] == [
        BytesInMemory,
        StoredBytes,
        BytesInMemory,
        BytesInMemory,
        StoredBytes,
    ]
    assert [one.read() for one in kept] == [b"1234567", b"abcdef", b"", b"xyz", b"last"]
    assert (file.in_memory, file.end) == (10, 10)


def test_another_process_gets_the_bytes_themselves():
    stored = ByteFile(limit=0).put(b"image")
    again = pickle.loads(pickle.dumps([stored, stored]))
    assert again[0].read() == b"image" and again[0] is again[1]  # once, however often it is named


def test_threads_may_write_at_once():
    file, data = ByteFile(limit=0), [bytes([i]) * (i + 1) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(file.put, data))
    assert [one.read() for one in kept] == data


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_an_image_inside_a_row_is_read_and_hashed_wherever_it_is(tmp_path, monkeypatch, limit):
    file = ByteFile(limit=limit)
    monkeypatch.setattr("mmrl.data.media_root.byte_file", lambda: file)
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(buffer, "PNG")
    data = buffer.getvalue()
    medium = MediaRoot(tmp_path).medium(MediaRef("image", "", data), "row 1", FrameSampling(max_frames=1))
    assert torch.equal(medium.load().pixels[0, :, 0, 0], torch.tensor([9, 8, 7], dtype=torch.uint8))
    prompts = [
        [Prompt("a", (Message("user", (Part(media=m),)),))]
        for m in (medium, Media("image", medium.name, medium.load, data))
    ]
    assert of_prompts(prompts[0]) == of_prompts(prompts[1])  # a run of before goes on
