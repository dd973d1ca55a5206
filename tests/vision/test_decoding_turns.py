"""Turns that go on from kept keys and values give the conversations that reading all anew gives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.transforms.visual_computation import drop_visual_heads
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import Call
from mmrl.vision.decoding import turns
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.decoding.image_features import distinct_images, find_distinct
from mmrl.vision.decoding.prefill import merge_media
from mmrl.vision.decoding.turns import TurnReader
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.model_families import family_of
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.tools.images import crop
from tests.vision import mixed
from tests.vision.talking import Talkative, ruled
from tests.vision.test_sliding_windows import sliding

FAMILY = "qwen2_5_vl"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava")
MORE = ("qwen2_vl", "llava_onevision", "smolvlm", "internvl")
EVERY = pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE)]
)
LEFT, RIGHT = [0, 0, 0.5, 1], [0.5, 0, 1, 1]


class Chatty(Talkative):
    """Answers call no tool, one, or several, whose replies are texts, images, or both."""

    @staticmethod
    def parse(text: str) -> list[Call]:
        total = sum(map(ord, text))
        crops = [Call("crop", {"image": 0, "box": box}) for box in (LEFT, RIGHT, LEFT)]
        return [
            [],
            [Call("ruled", {"number": total % 7})],
            crops[:1],
            crops,
            [crops[1], Call("ruled", {"number": 3})],
        ][total % 5]


def converse(policy, asked, *, kept=True, seed=0, each=7, tools=Chatty, told=False, **options):
    inner = Generate(policy, stream=Stream(seed), max_completion_length=each, **options)
    if not kept:
        inner.turns = lambda: SimpleNamespace(begin=lambda rows: inner.reader([row.encoded for row in rows]))
    ends = policy.prompt_encoder.end
    try:
        talking = tools(inner, stream=Stream(seed), tool=(crop, ruled), max_images=9)
        if not told:  # random models follow no description of tools, which has 1,000 tokens of a byte
            talking.schemas = ()
        return talking.rollout(asked)
    finally:
        policy.prompt_encoder.end = ends


def same(rows, others, atol=1e-10):
    for row, other in zip(rows, others, strict=True):
        assert row.steps.ids.tolist() == other.steps.ids.tolist()
        assert row.outcomes[-1].tags == other.outcomes[-1].tags
        assert row.logged == other.logged
        for name in ("logp", "entropy"):
            torch.testing.assert_close(row.notes[name], other.notes[name], rtol=0, atol=atol)


@pytest.fixture
def continued(monkeypatch):
    """Count the turns that went on, and the sizes of their chunks."""
    sizes = []
    read = TurnReader._read_chunk
    monkeypatch.setattr(
        TurnReader,
        "_read_chunk",
        lambda self, chunk: (sizes.append(chunk.length.tolist()), read(self, chunk))[1],
    )
    return sizes


@EVERY
def test_conversations_are_those_of_reading_all_anew(exact, family, continued):
    policy = exact(family)
    asked = [prompt for prompt in (*mixed.prompts(family)[:3], mixed.prompts(family)[-1]) for _ in range(3)]
    rows = converse(policy, asked)
    same(rows, converse(policy, asked, kept=False))
    turns = {row.outcomes[-1].tags["turn"] for row in rows}
    assert len(turns) > 1  # some end early
    assert len(continued) >= 2 and all(len(set(sizes)) > 1 for sizes in continued[:2])


def asked(num=2, rows=4):
    return [prompt for prompt in mixed.prompts(FAMILY)[:num] for _ in range(rows)]


@pytest.mark.parametrize("size", [1, 3])
def test_the_size_of_a_batch_changes_no_conversation(exact, size, continued):
    policy = exact(FAMILY)
    rows = converse(policy, asked(), batch_size=size)
    assert max(map(len, continued)) <= size
    same(rows, converse(policy, asked()))


@pytest.mark.parametrize("kind", ["last", "both"])
def test_layers_with_a_sliding_window_see_as_far_in_later_turns(checkpoint, tmp_path, kind, continued):
    _, folder = sliding(checkpoint, kind, 24, tmp_path / "model")
    policy = Tokens(model=str(folder), dtype="float64")
    same(converse(policy, asked()), converse(policy, asked(), kept=False))
    assert len(continued) > 1


def test_in_float32_turns_go_on_with_the_same_answers(checkpoint, continued):
    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float32")
    same(converse(policy, asked()), converse(policy, asked(), kept=False), atol=1e-5)
    assert len(continued) > 1


@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_copies_of_prompts_go_on_too(checkpoint, family, continued):
    policy = Tokens(model=str(checkpoint(family)), dtype="float64", share_prefix=False)
    every = [prompt for prompt in (*mixed.prompts(family)[:3], mixed.prompts(family)[-1]) for _ in range(3)]
    rows = converse(policy, every)
    assert len(continued) >= 2 and all(len(set(sizes)) > 1 for sizes in continued[:2])
    same(rows, converse(policy, every, kept=False))
    same(rows, converse(policy, every, batch_size=2))
    assert len({row.outcomes[-1].tags["turn"] for row in rows}) > 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cache": partial(visual_quant, nbits=4)}, "`cache` codes the images of replies"),
        ({"transform": (partial(drop_visual_heads, keep=0.5),)}, "a pruned model chooses among"),
        ({"share_prefix": False}, "(DynamicSlidingWindowLayer)"),
    ],
    ids=["cache", "transform", "window"],
)
def test_where_keys_and_values_cannot_go_on_all_is_read_anew(
    checkpoint, tmp_path, options, why, continued, caplog
):
    share, folder = options.pop("share_prefix", True), str(checkpoint(FAMILY))
    if not share:
        _, folder = sliding(checkpoint, "last", 24, tmp_path / "model")
    policy = Tokens(model=str(folder), dtype="float64", share_prefix=share)
    turns._tell.cache_clear()
    rows = converse(policy, asked(), **options)
    assert not continued
    (said,) = [record.getMessage() for record in caplog.records if record.name == turns.__name__]
    assert "every turn of a conversation is read anew" in said and why in said, "once, not in every turn"
    same(rows, converse(policy, asked(), kept=False, **options))
    assert max(int(row.outcomes[-1].tags["turn"]) for row in rows) > 1


@pytest.mark.parametrize(
    ("family", "why"), [("gemma3", "attend in both directions"), ("qwen3_5", "(RecurrentLayer)")]
)
def test_families_that_read_turns_anew_note_what_learning_computes(exact, family, why, continued, caplog):
    policy = exact(family)
    turns._tell.cache_clear()
    rows = converse(policy, [prompt for prompt in mixed.prompts(family)[:3] for _ in range(2)])
    assert why in caplog.text and not continued
    assert any(row.steps.suffix.media for row in rows if row.steps.suffix), "a reply shows an image"
    batch = policy.collate(rows)
    with torch.no_grad():
        logp = policy(batch).logp
    inside = batch.mask.bool()
    torch.testing.assert_close(batch.notes["logp"][inside].double(), logp[inside], rtol=0, atol=2e-3)


def test_a_row_keeps_the_longest_beginning_by_content(exact):
    policy = exact(FAMILY)
    engine, core = Generate(policy, stream=Stream(0), max_completion_length=2), policy.core
    turns, encode = engine.turns(), policy.prompt_encoder.encode
    requests = [
        GenerationRequest(prompt, 0, encode(prompt), torch.rand(2)) for prompt in mixed.prompts(FAMILY)[:2]
    ]
    (first, _) = engine.answer(requests, turns.begin)
    kept = turns.reader.kept_rows()["words", 0]
    read = requests[0].encoded
    ids = torch.cat([read.ids, first.steps.ids, read.ids])
    longer = replace(read, ids=ids, positions=torch.arange(len(ids)).expand(len(read.positions), -1))
    assert kept.count(core, longer) == len(read.ids) + 1  # of two tokens the last was drawn and not read
    other = ids.clone()
    other[3] += 1
    assert kept.count(core, replace(longer, ids=other)) == 3
    later = longer.positions + (torch.arange(len(ids)) >= 5)
    assert kept.count(core, replace(longer, ids=ids.roll(-1), positions=later)) == 0
    assert kept.count(core, replace(longer, ids=other.roll(0), positions=later)) == 3
    pictured, shown = turns.reader.kept_rows()["picture", 0], requests[1].encoded
    assert pictured.count(core, replace(shown, ids=torch.cat([shown.ids, shown.ids]))) == len(shown.ids)
    # Another image: what comes before it is the same.
    pixels = {**shown.media, "pixel_values": shown.media["pixel_values"] + 1}
    image = int((shown.ids == core.config.image_token_id).nonzero()[0])
    assert pictured.count(core, replace(shown, media=pixels)) == image > 0
    assert pictured.unread(core, shown, image)[0]["image_grid_thw"].shape == (1, 3)
    assert pictured.unread(core, shown, len(shown.ids) - 1) == []


@pytest.mark.parametrize(
    ("family", "most"),
    [(FAMILY, 1), *((f, 2) for f in FAMILIES)],
)
def test_conversations_whose_older_images_leave_are_those_of_reading_all_anew(
    exact, family, most, continued, caplog
):
    policy = exact(family)
    asked = [prompt for prompt in (*mixed.prompts(family)[:3], mixed.prompts(family)[-1]) for _ in range(3)]
    options = {"tools": partial(Chatty, only_n_most_recent_images=most, max_turns=5)}
    turns._tell.cache_clear()
    rows = converse(policy, asked, **options)
    same(rows, converse(policy, asked, kept=False, **options))
    assert any("episode" in row.outcomes[-1].tags for row in rows), "an image left"
    if family_of(policy.core.config).split:
        assert len(continued) == 4 and not caplog.records, "no turn was read anew"
        whole = max(len(row.steps.prompt.ids) for row in rows)
        assert max(map(max, continued)) < whole, "what came before the image that left was kept"


def test_copies_of_prompts_go_on_where_images_leave(checkpoint, continued):
    policy = Tokens(model=str(checkpoint(FAMILY)), dtype="float64", share_prefix=False)
    options = {"tools": partial(Chatty, only_n_most_recent_images=1, max_turns=5)}
    rows = converse(policy, asked(3), **options)
    same(rows, converse(policy, asked(3), kept=False, **options))
    assert any("episode" in row.outcomes[-1].tags for row in rows) and len(continued) == 4


def test_prompts_are_held_once_in_every_turn_and_only_while_someone_reads_them(exact, monkeypatch):
    policy = exact(FAMILY)
    monkeypatch.setattr(policy.prompt_encoder, "end", policy.prompt_encoder.end)  # `Chatty` sets another
    seen = []
    inner = Generate(policy, stream=Stream(0), max_completion_length=7)

    def begin(rows, turns):
        reader = turns.begin(rows)
        layers = reader.reader.prefix.cache.layers
        seen.append((len({row.prompt.uid for row in rows}), len(rows), {len(x.keys) for x in layers}))
        return reader

    make = inner.turns
    inner.turns = lambda: SimpleNamespace(begin=partial(begin, turns=make()))
    encoder = policy.prompt_encoder
    monkeypatch.setattr(encoder, "end", encoder.end)  # which the tools change
    Chatty(inner, stream=Stream(0), tool=(crop, ruled)).rollout(asked(3, 4))
    assert len(seen) > 2 and seen[0] == (3, 12, {3})
    assert all(stored == {prompts} for prompts, _, stored in seen)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_equal_images_of_rows_go_through_the_tower_once(exact, family):
    policy = exact(family)
    core, encode = policy.core, policy.prompt_encoder.encode
    first, second = (encode(prompt).media for prompt in mixed.prompts(family)[1:3])
    again = {name: value.clone() for name, value in first.items()}
    media = [first, {}, second, again, first]
    split = family_of(core.config).split
    _, which = find_distinct([image for tensors in media[:1] + media[2:] for image in split(tensors)])
    assert which == [0, 1, 2, 0, 0]
    computed = []
    tower = getattr(core, "visual", None) or core.vision_tower
    hook = tower.register_forward_pre_hook(lambda module, inputs: computed.append(len(inputs[0])))
    found = []
    with torch.no_grad(), distinct_images(core, media, torch.device("cpu")) as tensors:
        found.append(core.get_image_features(**tensors, return_dict=True))
    with torch.no_grad():
        found.append(
            core.get_image_features(**merge_media(core, media, torch.device("cpu")), return_dict=True)
        )
    hook.remove()
    assert computed[0] < computed[1] and "get_image_features" not in vars(core)
    for name in ("pooler_output", "deepstack_features"):
        one, other = (flat(getattr(x, name, None)) for x in found)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def flat(features):
    """List the tensors of nested features."""
    if features is None or torch.is_tensor(features):
        return [features] if torch.is_tensor(features) else []
    return [x for feature in features for x in flat(feature)]
