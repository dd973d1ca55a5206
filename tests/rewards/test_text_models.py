"""A reward model of transformers, and its sum with rules."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.rewards.text_models import RewardModel
from tests.rewards.tiny_text import write_bert

TEMPLATE = "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}"
PROMPT = Prompt("a", (Message("user", (Part("who painted it?"),)),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("reward"), labels=1, template=TEMPLATE)


def logit(folder, text):
    """Ask the model as its documentation shows."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt")).logits)


def test_the_score_is_the_logit_of_the_conversation(folder):
    found = RewardModel(model=folder, device="cpu")([PROMPT] * 2, [Outcome(text="he"), Outcome(text="no")])
    wanted = [logit(folder, f"user who painted it? assistant {answer} ") for answer in ("he", "no")]
    assert found == pytest.approx(wanted, abs=1e-5) and abs(wanted[0] - wanted[1]) > 1e-2


def test_without_a_template_the_answer_follows_the_prompt(tmp_path):
    folder = write_bert(tmp_path, labels=1)
    found = RewardModel(model=folder, device="cpu")([PROMPT], [Outcome(text=" he")])
    assert found == pytest.approx([logit(folder, "who painted it? he")], abs=1e-5)


@pytest.mark.parametrize("template", [TEMPLATE + "[PAD]", None])
def test_words_of_an_answer_are_no_special_tokens(tmp_path, template):
    reward, seen = RewardModel(model=write_bert(tmp_path, labels=1, template=template), device="cpu"), []
    note = lambda _, __, options: seen.append(options["input_ids"][0].tolist())
    reward.model.register_forward_pre_hook(note, with_kwargs=True)
    for words in ("no yes no", "no [PAD] no", "no [P", "\ud800 no"):
        reward([PROMPT], [Outcome(text=words)])
    assert {ids.count(reward.tokenizer.pad_token_id) for ids in seen} == {int(template is not None)}


def test_batches_and_padding_do_not_matter(folder):
    answers = [Outcome(text=text) for text in ("he", "no no no no", "yes he was", "")]
    found = [RewardModel(model=folder, device="cpu", batch_size=n)([PROMPT] * 4, answers) for n in (1, 4)]
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_what_is_too_long_loses_its_beginning(folder):
    short = RewardModel(model=folder, device="cpu", max_length=2)([PROMPT], [Outcome(text="he was")])
    assert short == pytest.approx([logit(folder, "he was")], abs=1e-5)


def test_of_two_labels_one_is_named(tmp_path):
    folder = write_bert(tmp_path, labels=2)
    scores = [RewardModel(model=folder, of=f"LABEL_{i}", device="cpu").column for i in range(2)]
    assert scores == [0, 1]
    for wrong in ("", "safe"):
        with pytest.raises(
            ValueError, match=f"has the labels LABEL_0, LABEL_1; set `of` to one, not '{wrong}'"
        ):
            RewardModel(model=folder, of=wrong, device="cpu")
