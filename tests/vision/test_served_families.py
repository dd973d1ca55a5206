"""What vLLM servers are sent for every family: items, their ranges and tensors, and their positions."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.references import served_teacher
from mmrl.vision.references.served_teacher import ServedTeacher
from mmrl.vision.serving.served_family import Field, ServedFamily, as_bytes
from mmrl.vision.serving.wire import (
    ECHO,
    SERVED,
    Sampling,
    check_kinds,
    features,
    modalities,
    offsets,
    packed,
    request_of,
    served_family,
)
from tests.vision.family_table import makers
from tests.vision.tiny import ask, clip, picture

SENT = sorted(name for name, one in SERVED.items() if one.kinds and not one.files and name in makers())
FORMAT = json.loads(Path(__file__).with_name("vllm_0_33.json").read_text())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    made: dict[str, PromptEncoder] = {}

    def of(family: str) -> PromptEncoder:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            makers()[family](folder)
            made[family] = Tokens(model=str(folder), dtype="float32").prompt_encoder
        return made[family]

    return of


def mixed(family: str) -> list:
    """Parts of a prompt with two images, and a video between them if the family has videos."""
    if family == "smolvlm":  # which reads images or videos
        return [clip(5), "then"]
    videos = [clip(5), "then"] if "video" in SERVED[family].kinds else []
    return [picture(seed=1), "first", *videos, picture(seed=2, height=112), "last"]


def ranges(sent: dict) -> list[tuple[int, int]]:
    """List the offsets and lengths of all items, in the order of the prompt."""
    spans = [span for spans in sent["mm_placeholders"].values() for span in spans]
    return sorted((span["offset"], span["length"]) for span in spans)


@pytest.mark.parametrize("family", SENT)
def test_items_fill_all_placeholders_with_all_pixels(family, encoder):
    own = encoder(family)
    encoded = own.encode(ask("mixed", *mixed(family)))
    sent = features(own, encoded, "salt")
    held = [place for offset, length in ranges(sent) for place in range(offset, offset + length)]
    tokens = torch.tensor(placeholder_ids(own.core.config))
    assert held == torch.isin(encoded.ids, tokens).nonzero()[:, 0].tolist()
    for offset, length in ranges(sent):
        assert len(encoded.ids[offset : offset + length].unique()) == 1
    shown = [pixels(own, item.fields) for item in SERVED[family].items(own, encoded)]
    wanted = [encoded.media[name].flatten() for name in PIXELS if name in encoded.media]
    torch.testing.assert_close(torch.cat(shown), torch.cat(wanted), rtol=0, atol=1e-5)


PIXELS = ("pixel_values", "pixel_values_videos")


def pixels(own: PromptEncoder, fields: dict[str, Field]) -> Tensor:
    """Return the pixels of an item as the server reads them: it normalises bytes."""
    (value,) = (field.data for name, field in fields.items() if name in PIXELS)
    if value.dtype != torch.uint8:
        return value.flatten()
    processor = own.processor.image_processor
    mean, std = (torch.tensor(v)[:, None] for v in (processor.image_mean, processor.image_std))
    scaled = value.float().view(len(value), len(mean), -1) * processor.rescale_factor
    return ((scaled - mean) / std).flatten()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "glm46v"])
def test_positions_that_a_server_counts_from_items_are_the_policys(family, encoder):
    own = encoder(family)
    encoded = own.encode(ask("mixed", *mixed(family)))
    items = SERVED[family].items(own, encoded)
    in_order = sorted(zip(offsets(items, encoded), items, strict=True), key=lambda pair: pair[0])
    assert torch.equal(count_positions(in_order, len(encoded.ids)), encoded.positions)


def count_positions(items: Sequence, length: int) -> Tensor:
    """Count M-RoPE positions as vLLM does: text by ones, an item by its grid from the next free position."""
    parts, at, start = [], 0, 0
    for offset, item in [*items, (length, None)]:
        parts.append(torch.arange(start, start + offset - at).expand(3, -1))
        start += offset - at
        if item is not None:
            (grid,) = (field.data for name, field in item.fields.items() if name.endswith("grid_thw"))
            frames, height, width = grid.tolist()
            sides = (torch.arange(n) for n in (frames, height // 2, width // 2))
            parts.append(torch.cartesian_prod(*sides).T + start)
            at, start = offset + item.length, int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


def test_equal_media_have_one_hash_until_the_weights_change(encoder):
    own = encoder("internvl")
    encoded = own.encode(ask("same", picture(seed=1), picture(seed=2), picture(seed=1)))
    hashes = features(own, encoded, "v1")["mm_hashes"]["image"]
    first, other, again = (hashes[i : i + len(hashes) // 3] for i in range(0, len(hashes), len(hashes) // 3))
    assert first == again != other
    assert first[0] not in features(own, encoded, "v2")["mm_hashes"]["image"]


def test_fields_are_written_as_vllm_reads_them(encoder):
    assert Field(7, "shared", on_cpu=True).form == {
        "data": 7,
        "field": ["shared", {"keep_on_cpu": True, "batch_size": 1}],
    }
    tile = Field(torch.zeros(2, 3), "flat").form["field"]
    assert tile == ["flat", {"keep_on_cpu": False, "slices": [[0, 2, None]], "dim": 0}]
    own = encoder("internvl")
    sent = features(own, own.encode(ask("one", picture())), "salt")
    item, *_ = SERVED["internvl"].items(own, own.encode(ask("one", picture())))
    content = packed({name: field.form for name, field in item.fields.items()})
    assert sent["kwargs_data"]["image"][0] == base64.b64encode(content).decode()


def test_frames_that_are_images_and_images_are_one_modality():
    """An adapter of the tower cannot have two in one step of vLLM."""
    config = SimpleNamespace(model_type="qwen3_vl")
    assert modalities(config, ["image", "video"]) == {"image"}
    config.model_type = "qwen2_5_vl"
    assert modalities(config, ["image", "video"]) == {"image", "video"}


def test_images_with_gaps_are_sent_as_files_that_the_server_expands(encoder, monkeypatch):
    own = encoder("mistral3")
    encoded = own.encode(ask("two", picture(seed=1), "and", picture(seed=2, height=84), "?"))
    sent = request_of(own, encoded, Sampling(4, 1.0), model="policy", seed=0, n=1, salt="a" * 16)
    image, *ends = own.tokenizer.convert_tokens_to_ids(["<image>", "<img>", "</img>"])
    written = list(sent["token_ids"])
    assert written.count(image) == 2 and not {*written} & {*ends} and "features" not in sent
    for part, (rows, columns) in zip(sent["content_parts"], ((2, 2), (3, 2)), strict=True):
        # As vLLM's processor expands a placeholder: a break after every row, an end after the last.
        tokens = ([image] * columns + ends[:1]) * rows
        at = written.index(image, 1 + max((i for i, one in enumerate(written) if one == ends[1]), default=-1))
        written[at : at + 1] = [*tokens[:-1], ends[1]]
        shown = Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2])))
        assert shown.size == (28 * columns, 28 * rows)
    assert written == sent[ECHO] == encoded.ids.tolist()
    with pytest.raises(ValueError, match="images of prompt 'two' cannot be sent as tensors"):
        features(own, encoded, "salt")  # as a teacher is asked
    monkeypatch.setattr(served_teacher, "encoder_of", lambda model: own)
    ServedTeacher.check_prompts({"model": "m"}, [ask("words", "?")])
    with pytest.raises(ConfigError, match="images of prompt 'two' cannot be sent as tensors"):
        ServedTeacher.check_prompts({"model": "m"}, [ask("words", "?"), ask("two", picture(seed=1))])
    again = own.processor.image_processor([shown], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(again, encoded.media["pixel_values"][1], rtol=0, atol=1e-5)


def test_what_the_format_cannot_hold_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setitem(SERVED, "odd", ServedFamily(refused={"image": "its rows have gaps"}))
    with pytest.raises(ConfigError, match="images to a model of type 'odd'.*has them: its rows have gaps;"):
        check_kinds(SimpleNamespace(model_type="odd"), "p", {"image"})
    with pytest.raises(ConfigError, match=r"videos to a model of type 'molmo2'.*\(it can to gemma4, glm"):
        check_kinds(SimpleNamespace(model_type="molmo2"), "p", {"video"})
    assert not served_family(SimpleNamespace(model_type="molmo2")).kinds


def test_placeholders_that_are_apart_or_left_over_are_refused(encoder):
    own = encoder("llava")
    encoded = own.encode(ask("one", picture()))
    at = (encoded.ids == own.core.config.image_token_id).nonzero()[:, 0]
    swapped = encoded.ids.clone()
    swapped[at[0] - 1], swapped[at[0]] = encoded.ids[at[0]], encoded.ids[at[0] - 1]
    with pytest.raises(ValueError, match="placeholders of one image of prompt 'one' do not stand together"):
        features(own, EncodedPrompt("one", swapped, encoded.positions, encoded.media), "salt")
    more = torch.cat([encoded.ids, encoded.ids[at[:1]]])
    with pytest.raises(ValueError, match="prompt 'one' has 1 placeholders of media too many"):
        features(own, EncodedPrompt("one", more, encoded.positions, encoded.media), "salt")


def test_requests_have_no_field_that_vllm_0_33_does_not_know(encoder):
    """As its source declares them; it has not been run here."""
    own = encoder("internvl")
    encoded = own.encode(ask("one", picture()))
    sent = request_of(own, encoded, Sampling(4, 1.0), model="policy", seed=0, n=1, salt="a" * 16)
    assert sent.keys() <= {*FORMAT["GenerateRequest"]}
    assert sent["sampling_params"].keys() <= {*FORMAT["SamplingParams"]}
    assert sent["features"].keys() <= {*FORMAT["MultiModalFeatures"]}
    spans = sent["features"]["mm_placeholders"]["image"]
    assert all([*span] == ["length", "offset"] for span in spans)
    assert {*FORMAT["PlaceholderRangeInfo"]} == {"length", "offset"}  # and no mask of features
    item, *_ = SERVED["internvl"].items(own, encoded)
    names = {"flat": "MultiModalFlatField", "batched": "MultiModalBatchedField"}
    for field in item.fields.values():
        how, options = field.form["field"]
        known = {*FORMAT["BaseMultiModalField"], *FORMAT[names.get(how, "MultiModalSharedField")]}
        assert options.keys() <= known and field.form.keys() == {*FORMAT["MultiModalFieldElem"]}
    read = {"index", "token_ids", "weight_versions"}
    assert read <= {*FORMAT["GenerateChoiceBase"]} and "logprobs" in FORMAT["GenerateTokensChoice"]
    assert "prompt_token_ids" in FORMAT["GenerateResponseBase"] and "version" in FORMAT["WeightVersionSpan"]


def test_bytes_of_videos_and_images_share_a_normalisation(encoder):
    own = encoder("glm46v")
    encoded = own.encode(ask("video", clip(4), "when"))
    levels = as_bytes(own.processor.image_processor, encoded.media["pixel_values"], "video")
    assert levels.dtype == torch.uint8 and levels.float().std() > 30  # noise of all levels
