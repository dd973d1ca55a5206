"""Malformed rows from a seed: each is a clear error, left out under `bad_rows: drop`, or a usable prompt.

Nothing else may come of it. `make test-all` draws 1,000 of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from mmrl.config.registry import pieces
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import RowError, Rows
from mmrl.diffusion.datasets.prompts import images, prompts, videos
from mmrl.vision.builders.converted import Converted
from mmrl.vision.builders.visual_qa import VisualQa
from mmrl.vision.datasets.benchmark import benchmark
from mmrl.vision.datasets.binary_vqa import amber, pope
from mmrl.vision.datasets.captioning import closed_vocabulary
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.datasets.grounding import grounding
from mmrl.vision.datasets.preference_pairs import preference_pairs
from mmrl.vision.datasets.visual_qa import visual_qa
from mmrl.vision.preference.generate import ImageSource
from tests.support.malformed import FOREIGN, JUNK, spoiled, write
from tests.support.quick import FUZZ

LINES, LISTS, TABLES = ".jsonl", ".json", ".parquet"
SEEDS = max(4, FUZZ * 26 // 1000)  # of each reader and form
CHAT = [{"role": "user", "content": "<image>What?"}]
SPAN = {"id": "g", "video": "a.mp4", "query": "a dog", "spans": [[1, 2]], "duration": 9, "reasoning": "so"}
MOMENT = {
    "qid": 1, "query": "a dog", "duration": 10, "vid": "a", "relevant_windows": [[0, 2]],
    "relevant_clip_ids": [0], "saliency_scores": [[4, 1, 1]], "reasoning": "so",
}  # fmt: skip
PAIR = {"id": "g", "prompt": CHAT, "chosen": [{"role": "assistant", "content": "a dog"}], "rejected": "a cat",
        "images": [{"path": "a.png", "bytes": None}], "score_chosen": 1.0, "score_rejected": 0.5}  # fmt: skip
QUESTION = {"id": "g", "question": "<image>What?", "answer": "a dog", "images": ["a.png"], "choices": ["a"]}
PARTS = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}]
SAID = {"role": "assistant", "content": "a dog"}
THEIRS = {
    "verl": {"prompt": CHAT, "images": ["a.png"], "reward_model": {"ground_truth": "a"}, "extra_info": {}},
    "ms_swift": {"messages": [*PARTS, SAID], "rejected_response": "a cat"},
    "llama_factory": {"conversations": [{"from": "human", "value": "<image>What?"}], "images": ["a.png"],
                      "chosen": SAID, "rejected": {"from": "gpt", "value": "no"}},
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """What reads a file, a sound row for it, and the forms it takes."""

    row: dict[str, Any]
    read: Callable[..., Any]
    forms: tuple[str, ...] = (LINES, LISTS, TABLES)
    drops: bool = False  # whether it has the option `bad_rows`


def moments(path, bad_rows, form="jsonl"):
    options = {"demo_think": "provided", "reasoning": 1.0, "bad_rows": bad_rows}
    return grounding(path=path, root=".", stream=Stream(0), format=form, **options)


def questions(path, bad_rows):
    return visual_qa(path=path, prompt="{question}\n{choices}", demo="({answer})", bad_rows=bad_rows)


def unlabelled(path, bad_rows):
    source = ImageSource(path, ".")
    assert source.content()
    assert all(item.fault or (item.ref and item.place) for item in source)
    return []


def checked(path, bad_rows):
    for entry in pieces("check", on="data"):
        assert all(finding.place and finding.what for finding in entry.target(Rows(Path(path), Path())))
    return []


def converted(path, bad_rows, theirs, form):
    Converted(source=path, source_form=theirs, form=form, bad_rows=bad_rows).build(Path("ours"))
    return []


def collected(path, bad_rows):
    VisualQa(source=path, keep=("extra",), bad_rows=bad_rows).build(Path("ours"))
    return []


ASKED = {"question_id": 1, "image": "a.png", "text": "Is it?", "label": "yes"}


def at_home(read, **options):
    """Give a reader of files under the current folder that has no option `bad_rows`."""
    return lambda path, bad_rows: read(path=path, **options)


def asked_of(path, bad_rows, format):
    return benchmark(path=path, format=format, bad_rows=bad_rows)


def chats(path, bad_rows):
    return conversations(path=path, bad_rows=bad_rows)


def pairs(path, bad_rows):
    return preference_pairs(path=path, bad_rows=bad_rows)


SCENE = {"image": "a.png", "objects": ["dog"], "captions": ["a dog"], "id": "g"}
CHECKED = {**QUESTION, **PAIR, "messages": PARTS, "spans": [[0, 1]], "video": "a.mp4"}
ONTOLOGY = {"annotations": "known.json", "relation": "relation.json", "root": "."}
SIZE = {"num_frames": 2, "height": 8, "width": 8}
READERS = {
    "grounding": Reader(SPAN, moments, (LINES,), True),
    "qvhighlights": Reader(MOMENT, partial(moments, form="qvhighlights"), (LINES,), True),
    "visual_qa": Reader(QUESTION, questions, drops=True),
    "preference_pairs": Reader(PAIR, pairs, drops=True),
    "conversations": Reader(
        {"prompt": [*CHAT, SAID, *CHAT], "images": ["a.png", "a.png"], "solution": "a", "id": "g"},
        chats,
        drops=True,
    ),
    "implicit_pairs": Reader(
        {"chosen": [*CHAT, SAID], "rejected": [*CHAT, {**SAID, "content": "a cat"}], "image": "a.png"},
        pairs,
        drops=True,
    ),
    "pope": Reader(ASKED, at_home(pope, root=".")),
    "amber": Reader({"id": 1, "image": "a.png", "query": "?"}, at_home(amber, **ONTOLOGY)),
    "closed_vocabulary": Reader(SCENE, at_home(closed_vocabulary, ontology="words.json", root=".")),
    "benchmark": Reader(
        {"question_id": "q", "videoID": "a", "question": "?", "options": ["A. a", "B. b"], "answer": "A"},
        partial(asked_of, format="video_mme"),
        drops=True,
    ),
    "charts": Reader(
        {"image": "a.png", "query": "?", "label": ["1"]}, partial(asked_of, format="chartqa"), drops=True
    ),
    "clip_pairs": Reader({"image": "a.png", "prompt": "What?"}, unlabelled),
    "data_check": Reader(CHECKED, checked),
    "prompts": Reader({"prompt": "a", "metadata": {"tag": 1}, "id": 1}, at_home(prompts), (LINES,)),
    "pictures": Reader(
        {"prompt": "a", "images": ["a.png"], "scores": {"clip": [1]}}, at_home(images, root="."), (LINES,)
    ),
    "videos": Reader(
        {"prompt": "a", "videos": ["a.mp4"], "scores": [[1, 2]]}, at_home(videos, root=".", **SIZE), (LINES,)
    ),
    "visual_qa_rows": Reader({**QUESTION, "extra": 1}, collected, drops=True),
    "to_verl": Reader(THEIRS["verl"], partial(converted, theirs="verl", form="verl")),
}
for _theirs, _ours in (("verl", "llama_factory"), ("ms_swift", "mmrl"), ("llama_factory", "ms_swift")):
    _read = partial(converted, theirs=_theirs, form=_ours)
    READERS[f"from_{_theirs}"] = Reader(THEIRS[_theirs], _read, drops=True)
CASES = [(name, form) for name, reader in READERS.items() for form in reader.forms]


@pytest.fixture
def home(tmp_path, monkeypatch):
    Image.new("RGB", (4, 3), (200, 0, 0)).save(tmp_path / "a.png")
    (tmp_path / "a.mp4").write_bytes(b"")
    (tmp_path / "known.json").write_text('[{"type": "generative", "truth": ["dog"], "hallu": ["cat"]}]')
    (tmp_path / "relation.json").write_text('{"dog": ["puppy"]}')
    (tmp_path / "words.json").write_text('{"objects": {"dog": ["puppy"]}}')
    monkeypatch.chdir(tmp_path)
    logging.getLogger("mmrl").setLevel(logging.CRITICAL)
    yield tmp_path
    logging.getLogger("mmrl").setLevel(logging.NOTSET)


def assert_usable(prompt: Prompt) -> None:
    """See that a prompt has an id, turns of known roles, and texts that a tokenizer can read."""
    assert type(prompt.uid) is str and prompt.uid.strip()
    assert {message.role for message in prompt.messages} <= {"system", "user", "assistant"}
    answers = prompt.answers if isinstance(prompt.answers, tuple) else ()  # others are decoded when looked at
    assert "".join([prompt.uid, prompt.text, *(answer.text for answer in answers)]).encode()
    parts = [part for message in prompt.messages for part in message.parts]
    assert parts and all(part.media is not None or type(part.text) is str for part in parts)


@pytest.mark.parametrize(("name", "form"), CASES, ids=lambda value: value)
def test_malformed_rows_are_errors_or_prompts(home, name, form):
    reader, refused = READERS[name], 0
    for seed in range(SEEDS):
        path = Path(f"rows{form}")
        beside = write(path, reader.row, Random(f"{name} {form} {seed}"))
        try:
            list(map(assert_usable, reader.read(str(path), "error")))
        except RowError as error:
            assert path.name in str(error) or name.startswith(("from_", "to_", "visual_qa_rows"))
            refused += 1
            try:
                list(map(assert_usable, reader.read(str(path), "drop")))
            except RowError as error:
                assert not (beside and reader.drops), f"seed {seed} escapes `bad_rows: drop`: {error}"
    assert name in ("clip_pairs", "data_check") or refused >= SEEDS // 4


def test_malformed_lines_of_charades_and_entries_of_activitynet_are_errors_or_prompts(home):
    for seed in range(60):
        random = Random(seed)
        entry = {"duration": 9, "timestamps": [[0, 1]], "sentences": ["a dog"]}
        sound = {"a": entry, "b": {**entry, "extra": [1]}}
        text = random.choice(FOREIGN) if seed % 5 == 0 else json.dumps(spoiled(sound, random, JUNK)).encode()
        Path("rows.json").write_bytes(text)
        line = f"a 0 1##{'x'}".replace(random.choice("a 01#x"), str(random.choice(JUNK))[:90], 1)
        Path("rows.txt").write_bytes(line.encode("utf-8", "surrogatepass") + b"\n" + random.choice(FOREIGN))
        for path, form in (("rows.json", "activitynet"), ("rows.txt", "charades_sta")):
            for bad_rows in ("error", "drop"):
                try:
                    list(map(assert_usable, moments(path, bad_rows, form)))
                except RowError as error:
                    assert path in str(error)


def test_there_are_as_many_as_are_asked_for():
    assert len(CASES) * SEEDS >= FUZZ
