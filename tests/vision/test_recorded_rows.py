"""Learned tokens of recorded conversations: the last answer, all turns of the assistant, or all tokens."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt, PromptError
from mmrl.engines.dataset_answers import Offline
from mmrl.kv_cache.layout import media_ids
from mmrl.vision.models.prompt_check import PromptCheck
from tests.vision import tiny
from tests.vision.test_prefix_tree import alone, precise, weights

FAMILIES = pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])


def turn(role, *parts):
    return Message(role, tuple(Part(part) if isinstance(part, str) else Part(media=part) for part in parts))


def talk(*before, answer="fox 12"):
    """A conversation of two turns of the assistant, with an image in each question."""
    asked = (
        turn("user", tiny.picture(seed=1), "what is it"),
        turn("assistant", "the quick brown"),
        turn("user", "and", tiny.picture(seed=2)),
    )
    return Prompt("talk", (*before, *asked), answers=(Outcome(answer),))


def encode(policy, prompt, **options):
    return Offline(policy, stream=Stream(), **options).rollout([prompt])[0]


def whole(policy, prompt):
    """The tokens of the conversation as the chat template writes it, with the end of the last answer."""
    read = policy.prompt_encoder.encode(prompt)
    return torch.cat([read.ids, policy.prompt_encoder.answer(prompt.answers[0].text)])


@FAMILIES
def test_what_is_learned_of_a_conversation(exact, family):
    policy, prompt = exact(family), talk()
    encoder = policy.prompt_encoder
    answer, first = encoder.answer("fox 12"), encoder.answer("the quick brown")
    rows = {
        "completion": encode(policy, prompt),
        "assistant": encode(policy, prompt, assistant_only_loss=True),
        "all": encode(policy, prompt, completion_only_loss=False),
    }
    for row in rows.values():
        steps = row.steps
        after = steps.ids if steps.suffix is None else steps.suffix.ids
        # Whatever is learned, the model reads the same tokens, at the same positions.
        assert torch.equal(torch.cat([steps.prompt.ids, after]), whole(policy, prompt))
        assert row.outcomes[-1].text.strip() == "fox 12" and row.length == len(steps.ids)
    assert torch.equal(rows["completion"].steps.ids, answer)
    assert torch.equal(rows["assistant"].steps.ids, torch.cat([first, answer]))
    ids = whole(policy, prompt)[1:]  # nothing predicts the first token
    shown = torch.isin(ids, torch.tensor(media_ids(policy.core.config)))
    assert shown.any() and torch.equal(rows["all"].steps.ids, ids[~shown])


@FAMILIES
@pytest.mark.parametrize("packing", [False, True])
def test_learned_tokens_have_the_gradients_of_plain_transformers(checkpoint, family, packing):
    policy = precise(checkpoint(family), packing=packing)
    rows = [
        encode(policy, talk(answer=answer), **options)
        for answer in ("fox 12", "0")
        for options in ({}, {"assistant_only_loss": True}, {"completion_only_loss": False})
    ]
    batch = policy.collate(tuple(rows))
    weight = weights(batch)
    logp = policy(batch).logp * batch.mask
    (logp * weight).sum().backward()
    found = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    wanted, loss = alone(policy, rows, weight)
    torch.testing.assert_close(logp.detach(), wanted, rtol=1e-10, atol=1e-10)
    loss.backward()
    for name, p in policy.model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-10)


def test_a_row_of_too_many_tokens_is_a_bad_row_before_and_while_it_is_read(exact):
    policy, prompt = exact("qwen2_5_vl"), talk()
    size = len(whole(policy, prompt))
    check = PromptCheck(policy.prompt_encoder)
    for most in (0, size):  # 0: no limit
        assert encode(policy, prompt, max_length=most).length == encode(policy, prompt).length
        check.check_engine(Piece("offline", {"max_length": most}))
        check(prompt)
    words = f"its {size} tokens exceed `max_length: {size - 1}`, and rows are never cut"
    with pytest.raises(PromptError, match=words):
        encode(policy, prompt, max_length=size - 1, assistant_only_loss=True)
    check.check_engine(Piece("offline", {"max_length": size - 1}))
    with pytest.raises(PromptError, match=words):
        check(prompt)


def test_conversations_that_cannot_be_learned_are_named(exact):
    policy = exact("qwen2_5_vl")
    twice = Prompt("p", (turn("user", "fox"), turn("assistant", "0")), answers=(Outcome("1"),))
    with pytest.raises(PromptError, match="'p'.*two turns of the assistant follow each other"):
        encode(policy, twice, assistant_only_loss=True)
    image = Prompt("p", (turn("user", "fox"),), answers=(Outcome(image=torch.zeros(3, 4, 4)),))
    with pytest.raises(PromptError, match="its recorded answer is no text"):
        encode(policy, image, max_length=50)


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("tests.support.toys:ToyText", {"assistant_only_loss": True}, "'assistant_only_loss' of `offline`"),
        (
            "tests.support.toys:ToyText",
            {"completion_only_loss": False},
            "'completion_only_loss' of",
        ),
        ("diffusion.flow", {"max_length": 9}, "'max_length' of `offline`.*'diffusion.flow'"),
        ("vision.tokens", {"assistant_only_loss": True, "completion_only_loss": True}, "give one of the two"),
    ],
)
def test_options_that_clash_are_refused_before_a_weight_is_loaded(policy, options, words):
    with pytest.raises(ConfigError, match=words):
        Offline.check_learning(Piece(policy), options)
    Offline.check_learning(Piece(policy), {"completion_only_loss": None, "max_length": 0})
