"""Teachers of another tokenizer: spans of text by hand, as TRL finds them, and on small models."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmrl.core.types import Outcome
from mmrl.vision.decoding.text_spans import SharedSpans, shared_spans, token_ends
from mmrl.vision.references.teacher import Teacher
from tests.vision.test_tokens import loaded, shaken
from tests.vision.tiny import ask, picture

HIDDEN = frozenset({"hidden"})
TEXT = "abcé"
ASKED = [ask("image", picture(seed=1), "What is this?"), ask("text", "How many?")]


def bytes_with(*merges):
    """Make a tokenizer of bytes with these merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*alphabet, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocabulary, [*merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def tokenizers():
    """Give tokenizers that cut the text into ab|c|C3|A9 and into a|bc|é, where é has the bytes C3 A9."""
    return bytes_with(("a", "b")), bytes_with(("b", "c"), ("Ã", "©"))


def test_spans_between_common_ends_by_hand(tokenizers):
    own, other = (one(TEXT, add_special_tokens=False)["input_ids"] for one in tokenizers)
    ends = token_ends(tokenizers[0], own, TEXT), token_ends(tokenizers[1], other, TEXT)
    assert ends == ([2, 3, None, 4], [1, 3, 4])
    numbers = shared_spans(*ends)
    assert numbers == ([1, 1, 2, 2], [1, 1, 2])
    # Teacher: a 0.5, bc 0.4, é 0.9; so "abc" has 0.2, and "é" 0.9.
    spans = SharedSpans(*(torch.tensor([one]) for one in numbers))
    found = spans.sums(torch.tensor([[0.5, 0.4, 0.9]]).log()).exp()
    assert found[0].tolist() == pytest.approx([0.2, 0.2, 0.9, 0.9])
    assert spans.lengths().tolist() == [[2, 2, 2, 2]]


def test_spans_are_those_of_trl(tokenizers):
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    own, other = (one(TEXT, add_special_tokens=False)["input_ids"] for one in tokenizers)
    groups = gold.ULDLoss._align_by_byte_offsets([(0, 2), (2, 3), (3, 4), (4, 5)], [(0, 1), (1, 3), (3, 5)])
    ends = token_ends(tokenizers[0], own, TEXT), token_ends(tokenizers[1], other, TEXT)
    for numbers, wanted in zip(shared_spans(*ends), groups, strict=True):
        mine = [[place for place, number in enumerate(numbers) if number == span] for span in (1, 2)]
        assert mine == wanted
    # TRL multiplies probabilities of a group as well: the last distribution times what was written before.
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4], [0.05, 0.05, 0.9]])
    loss = type("Loss", (), {"token_merge_strategy": "bayesian"})()
    merged = gold.ULDLoss._merge_probabilities_with_alignment_groups(
        loss, probabilities, groups[1], [0, 1, 2]
    )
    assert [float(merged[0, 1]), float(merged[1, 2])] == pytest.approx([0.5 * 0.4, 0.9])


@pytest.mark.parametrize(
    ("ends", "others", "wanted"),
    [
        ([1, 2], [1, 2], ([1, 2], [1, 2])),
        ([None, 2], [2], ([1, 1], [1])),
        ([1, 3, 4], [2, 4], ([1, 1, 1], [1, 1])),
        ([1, None], [1], ([1, 0], [1])),  # what shows nothing at the end is in no span
        ([], [1], ([], [0])),
    ],
)
def test_spans_of_odd_tokens(ends, others, wanted):
    assert shared_spans(ends, others) == wanted


def test_what_a_tokenizer_writes_differently_is_one_span(tokenizers):
    ids = tokenizers[0]("abXd", add_special_tokens=False)["input_ids"]
    assert token_ends(tokenizers[0], ids, "abcd") == [2, None, 4]
    broken = tokenizers[0]("aé", add_special_tokens=False)["input_ids"][:-1]  # ends inside a character
    assert token_ends(tokenizers[0], broken, tokenizers[0].decode(broken)) == [1, 2]


def test_spans_of_random_texts_cover_all_tokens_in_order(tokenizers):
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(257) for _ in range(draw.randrange(1, 12))]  # often broken characters
        text = tokenizers[0].decode(ids)
        other = tokenizers[1](text, add_special_tokens=False)["input_ids"]
        pairs = zip(tokenizers, (ids, other), strict=True)
        numbers = shared_spans(*(token_ends(one, tokens, text) for one, tokens in pairs))
        for one in numbers:
            assert one[0] == 1 and all(0 <= b - a <= 1 for a, b in itertools.pairwise(one))
        assert numbers[0][-1] == numbers[1][-1], "the last span of both ends with the text"
        logp = torch.rand(1, len(other))
        spans = SharedSpans(*(torch.tensor([one]) for one in numbers))
        assert float((spans.sums(logp) / spans.lengths()).sum()) == pytest.approx(float(logp.sum()), rel=1e-5)


# ---- on small models


@pytest.fixture(scope="module")
def other_words(checkpoint, tmp_path_factory):
    """Save a model with other weights whose tokenizer writes "o 1" as one token; give its policy."""
    other, folder = shaken(loaded(checkpoint)), tmp_path_factory.mktemp("words") / "model"
    other.processor.tokenizer.add_tokens(["o 1"])
    other.model.resize_token_embeddings(
        max(len(other.processor.tokenizer), other.model.get_input_embeddings().num_embeddings)
    )
    other.save(folder)
    return loaded(lambda family: folder), folder


def rows(policy, *answers):
    pairs = zip(ASKED, answers, strict=True)
    return policy.collate([policy.encode(prompt, Outcome(text=text)) for prompt, text in pairs])


def test_a_teacher_of_another_vocabulary_tells_sums_over_spans(checkpoint, other_words):
    other, folder = other_words
    learner = loaded(checkpoint)
    with pytest.raises(ValueError, match="another vocabulary .*; set `align: true`"):
        Teacher(learner, model=str(folder))
    teacher = Teacher(learner, model=str(folder), dtype="float32", align=True)
    batch, theirs = rows(learner, "0 to 12", "x"), rows(other, "0 to 12", "x")
    found = teacher(batch, HIDDEN)
    with torch.no_grad():
        logp = other(theirs).logp * theirs.mask
    torch.testing.assert_close((found.logp * batch.mask).sum(-1), logp.sum(-1), rtol=1e-5, atol=1e-5)
    words = [learner.processor.tokenizer.decode(token) for token in batch.steps.ids[0]]
    span = found.extra["span"][0].tolist()
    assert theirs.steps.length[0] < batch.steps.length[0] and len({*span}) < len(span)
    for number in {*span}:
        said = "".join(word for word, one in zip(words, span, strict=True) if one == number)
        assert said in {"0", " t", " ", "t", "o 1", "2", words[-1]}, "spans end where both tokenizations do"
    with pytest.raises(ValueError, match="tells log-probabilities of spans, not"):
        teacher(batch, frozenset({"entropy"}))


def test_a_teacher_of_the_same_words_has_the_spans_of_single_tokens(checkpoint, tmp_path):
    shaken(loaded(checkpoint)).save(tmp_path)
    learner = loaded(checkpoint)
    teachers = [Teacher(learner, model=str(tmp_path), dtype="float32", align=one) for one in (False, True)]
    batch = rows(learner, "0 to 12", "x")
    plain, aligned = (teacher(batch, HIDDEN) for teacher in teachers)
    inside = batch.mask > 0
    torch.testing.assert_close(aligned.logp[inside], plain.logp[inside])
    assert aligned.extra["span"][0].tolist() == [*range(1, 1 + int(batch.steps.length[0]))]
    batch = batch.replace(others={"teacher": aligned})
    divergence = learner(batch, frozenset({"divergence"})).extra["divergence"]
    p, q = learner(batch).logp.exp(), plain.logp.exp()
    wanted = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(divergence[inside], wanted[inside], rtol=1e-4, atol=1e-6)


def test_a_teacher_of_another_family_reads_images_with_its_own_processor(checkpoint):
    learner, other = loaded(checkpoint), loaded(checkpoint, "internvl")
    teacher = Teacher(learner, model=str(checkpoint("internvl")), dtype="float32")
    batch, theirs = rows(learner, "0 to 12", "x"), rows(other, "0 to 12", "x")
    assert len(batch.steps.prompts[0].ids) != len(theirs.steps.prompts[0].ids)
    with torch.no_grad():
        wanted, found = other(theirs).logp, teacher(batch, HIDDEN)
    inside = batch.mask > 0
    torch.testing.assert_close(found.logp[inside], wanted[inside], rtol=1e-5, atol=1e-5)
    batch = batch.replace(others={"teacher": found})
    assert (learner(batch, frozenset({"divergence"})).extra["divergence"][inside] > 0).all()
    with pytest.raises(ValueError, match="the messages of prompt 'image' are not known"):
        prompts = tuple(replace(prompt) for prompt in batch.steps.prompts)
        teacher(batch.replace(steps=replace(batch.steps, prompts=prompts)), HIDDEN)
