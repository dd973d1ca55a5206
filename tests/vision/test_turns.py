"""Conversations in learning: replies between the tokens of an answer, against plain transformers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mmrl.core.types import Message, Outcome, Part, Trajectory, Unit
from mmrl.vision.decoding.token_steps import Suffix, TokenRow
from mmrl.vision.models.processor import PromptEncoder
from tests.vision import mixed, tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava")
MORE = ("qwen2_vl", "llava_onevision", "smolvlm", "internvl", "qwen3_5", "glm46v", "gemma3")
EVERY = pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE)]
)


def says(*parts):
    """Reply with texts and images."""
    return Message("user", tuple(Part(part) if isinstance(part, str) else Part(media=part) for part in parts))


def talk(policy, prompt, *script):
    """Make the row of a conversation in which the policy chooses texts, between replies."""
    encoder, read = policy.prompt_encoder, policy.prompt_encoder.encode(prompt)
    turns = []
    for part in script:
        if isinstance(part, Message):
            read = encoder.extend(read, turns[-1][1], part)
        else:
            turns.append((read, encoder.answer(part)))
    row = TokenRow.of_turns(turns)
    outcome = Outcome(text=script[-1], end=len(row.ids))
    return Trajectory(prompt, prompt.uid, (outcome,), row, len(row.ids)), read, turns[-1][1]


def conversations(policy, family):
    """Several uneven conversations for each of three prompts: without a reply, with texts, with images."""
    wide, small = tiny.picture(seed=11, height=28, width=56), tiny.picture(seed=12)
    for prompt in [*mixed.prompts(family)[:2], mixed.prompts(family)[-1]]:
        yield talk(policy, prompt, "0 fox")
        yield talk(policy, prompt, "the quick", says("jumps over"), "9")
        yield talk(policy, prompt, "1", says("look", wide), "brown 3", says(small, "again", wide), "fox 012")


def collated(policy, family):
    made = list(conversations(policy, family))
    rows = tuple(row for row, _, _ in made)
    batch = policy.collate(rows)
    order = {uid: i for i, uid in enumerate(dict.fromkeys(row.group for row in rows))}
    return batch.replace(group=torch.tensor([order[row.group] for row in rows])), made


def plain(policy, made):
    """Compute log-probabilities by one forward pass of transformers per conversation: (N, T)."""
    found = []
    for row, read, last in made:
        ids = torch.cat([read.ids, last])
        inputs = dict(read.media) | mixed.placed(policy, read, len(last))
        logits = policy.model(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1]
        logits = logits.index_fill(-1, torch.tensor(policy.prompt_encoder.placeholders), -1e30)
        logp = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        steps = row.steps
        chosen = torch.arange(len(steps.ids)) if steps.suffix is None else steps.suffix.chosen
        assert torch.equal(ids[len(steps.prompt.ids) + chosen], steps.ids)
        found.append(logp[len(steps.prompt.ids) - 1 + chosen])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def weighed(logp, batch):
    weight = torch.linspace(0.5, 2.0, batch.mask.numel(), dtype=logp.dtype).view(batch.mask.shape)
    return (logp * weight * batch.mask).sum()


@cache
def by_transformers(exact, family):
    """Compute log-probabilities and gradients of conversations by transformers, once for all options."""
    policy = exact(family)
    batch, made = collated(policy, family)
    logp = plain(policy, made)
    weighed(logp, batch).backward()
    return logp.detach(), mixed.gradients(policy)


def near(family, found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        within = {"rtol": 0, "atol": 1e-6 * max(1.0, float(value.abs().max()))}
        mixed.assert_close(family, found[name], value, **within, msg=lambda m, n=name: n + m)


@EVERY
@pytest.mark.parametrize(
    "options",
    [{}, {"share_prefix": False}, {"gradient_checkpointing": True}],
    ids=["shared", "copied", "packed"],
)
def test_logp_and_gradients_of_conversations_equal_plain_transformers(exact, family, options):
    policy = exact(family, **options)
    batch, made = collated(policy, family)
    assert {len(row.steps.suffix.media) > 0 if row.steps.suffix else None for row, _, _ in made} == {
        None, False, True,
    }  # fmt: skip
    logp, (wanted, gradients) = policy(batch).logp, by_transformers(exact, family)
    mixed.assert_close(family, logp * batch.mask, wanted * batch.mask, rtol=0, atol=1e-6)
    weighed(logp, batch).backward()
    near(family, mixed.gradients(policy), gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_micro_batch_cut_gives_the_same_gradient(exact, family):
    policy = exact(family)
    batch, _ = collated(policy, family)
    weight = torch.linspace(0.5, 2.0, batch.mask.numel()).view(batch.mask.shape)
    batch = batch.replace(weight=weight)

    def gradient(budget):
        for part in batch.split(budget, Unit.ROW):
            (policy(part).logp * part.weight * part.mask).sum().backward()
        return mixed.gradients(policy)

    whole = gradient(1 << 20)
    group = batch.steps.cost(torch.arange(3))
    cuts = {len(batch.split(budget, Unit.ROW)) for budget in (1, group - 1, 2 * group)}
    assert len(cuts) == 3 and max(cuts) == len(batch)
    for budget in (1, group - 1, 2 * group):
        near(family, gradient(budget), whole)


def test_cost_counts_prompts_once_and_replies_with_every_row(exact):
    policy = exact("qwen2_5_vl")
    batch, made = collated(policy, "qwen2_5_vl")
    prompt = len(made[0][0].steps.prompt.ids)
    longest = max(len(read.ids) + len(last) - prompt for _, read, last in made[:3])
    assert batch.steps.cost(torch.arange(3)) == prompt + 3 * longest
    assert batch.steps.cost(torch.tensor([0])) == prompt + made[0][0].length
    assert batch.mask.shape[1] == max(row.length for row, _, _ in made)  # replies are no steps
    assert batch.select(torch.tensor([0, 3])).steps.suffixes == ()


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["cached", "packed"])
def test_rows_without_replies_stay_as_they_are_bit_for_bit(exact, options):
    policy = exact("qwen2_5_vl", **options)
    (row, _, _), (other, _, _), *_ = conversations(policy, "qwen2_5_vl")
    assert row.steps.suffix is None
    recorded = policy.encode(row.prompt, Outcome(text="0 fox"))
    assert torch.equal(policy(policy.collate((row,))).logp, policy(policy.collate((recorded,))).logp)
    # Beside a conversation, a row without replies is read at the same positions.
    beside = policy(policy.collate((row, other))).logp[0, : row.length]
    torch.testing.assert_close(beside, policy(policy.collate((recorded,))).logp[0], rtol=0, atol=1e-10)


# LLaVA-OneVision cuts an image into tiles only where it is alone in what the processor gets.
@pytest.mark.parametrize(
    "family", [*FAMILIES, "qwen2_vl", "smolvlm", "internvl", "qwen3_5", "glm46v", "gemma3"]
)
def test_a_conversation_is_written_as_the_chat_template_writes_it(exact, family):
    policy = exact(family)
    encoder, image = policy.prompt_encoder, tiny.picture(seed=3)
    prompt = tiny.ask("p", tiny.picture(), "what")
    _, read, _ = talk(policy, prompt, "the quick", says("jumps", image, "over"), "9")
    answer = Message("assistant", (Part("the quick"),))
    whole = tiny.ask("whole", tiny.picture(), "what")
    whole = encoder.encode(type(whole)("whole", (*whole.messages, answer, says("jumps", image, "over"))))
    assert torch.equal(read.ids, whole.ids)
    assert torch.equal(read.positions, whole.positions)
    assert read.media.keys() == whole.media.keys()
    assert all(torch.equal(read.media[name].flatten(), whole.media[name].flatten()) for name in whole.media)


def test_the_end_token_stands_once_whether_the_answer_wrote_it_or_not(exact):
    encoder = exact("qwen2_5_vl").prompt_encoder
    read = encoder.encode(tiny.ask("p", "what"))
    ended = encoder.answer("9")
    both = [encoder.extend(read, ids, says("over")) for ids in (ended, ended[:-1])]
    assert torch.equal(both[0].ids, both[1].ids)


def test_a_reply_that_came_before_is_not_processed_again(exact, monkeypatch):
    policy = exact("qwen2_5_vl")
    encoder, apart = (PromptEncoder(policy.processor, policy.core) for _ in range(2))
    read, other = (encoder.encode(tiny.ask(uid, tiny.picture(seed=9), "what")) for uid in "ab")
    processed, inputs = [], encoder._inputs
    monkeypatch.setattr(encoder, "_inputs", lambda *given: (processed.append(1), inputs(*given))[1])
    for before, seed, word, times in (
        (read, 1, "x", 1),
        (other, 1, "x", 1),
        (read, 2, "x", 2),
        (read, 2, "y", 3),
    ):
        said = says(tiny.picture(seed=seed), word)
        found = encoder.extend(before, encoder.answer("9"), said)
        assert len(processed) == times
        expected = apart.extend(before, apart.answer("9"), said)
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.positions, expected.positions)
        assert all(torch.equal(found.media[name], expected.media[name]) for name in expected.media)


def test_the_suffix_of_an_answer_goes_on_after_the_largest_position(exact):
    encoded = exact("qwen2_5_vl").prompt_encoder.encode(tiny.ask("p", tiny.picture(), "what"))
    suffix = Suffix.answer(encoded, torch.tensor([5, 6]))
    assert suffix.positions.tolist() == [[encoded.next_position, encoded.next_position + 1]] * 3
