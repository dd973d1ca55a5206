"""A critic of token policies: the value before every token, from the states that predict it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mmrl.vision.decoding.token_steps import read_cached
from mmrl.vision.policies.critic import Critic
from tests.vision.test_tokens import loaded, recorded

FAMILY = "qwen2_5_vl"


def critic_of(checkpoint, **options) -> Critic:
    """Make a critic whose layer of values is not 0."""
    critic = Critic(policy=partial(loaded, checkpoint, **options))
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    return critic


def test_a_value_is_read_from_the_state_that_predicts_the_token(checkpoint):
    policy, critic = loaded(checkpoint), critic_of(checkpoint)
    batch = recorded(policy, FAMILY)
    output = critic(batch, frozenset({"value"}))
    states = read_cached(policy.core, batch.steps)
    wanted = (states @ critic.head.weight[0].double().to(states)) + critic.head.bias
    inside = batch.mask[:, : states.shape[1]] > 0
    torch.testing.assert_close(output.extra["value"][:, : states.shape[1]][inside], wanted[inside])
    assert output.extra["value"].requires_grad and not output.logp.any()


def test_a_critic_begins_at_0_and_trains_no_head_of_tokens(checkpoint):
    critic = Critic(policy=partial(loaded, checkpoint))
    batch = recorded(loaded(checkpoint), FAMILY)
    assert not critic(batch, frozenset({"value"})).extra["value"].any()
    critic(batch, frozenset({"value"})).extra["value"].sum().backward()
    trained = {name for name, p in critic.module.named_parameters() if p.requires_grad}
    assert "head.weight" in trained and not any("lm_head" in name for name in trained)
    # Data parallelism waits for a gradient of every trained parameter.
    assert all(p.grad is not None for p in critic.module.parameters() if p.requires_grad)


def test_values_may_be_probabilities_and_say_their_logits(checkpoint):
    plain = critic_of(checkpoint)
    critic = Critic(policy=partial(loaded, checkpoint), probability=True)
    batch = recorded(loaded(checkpoint), FAMILY)
    assert "value_logit" in critic.outputs and "value_logit" not in plain.outputs
    assert torch.equal(critic(batch, frozenset({"value"})).extra["value"], torch.full(batch.mask.shape, 0.5))
    critic.head.load_state_dict(plain.head.state_dict())
    said = critic(batch, frozenset({"value", "value_logit"})).extra
    assert torch.equal(said["value_logit"], plain(batch, frozenset({"value"})).extra["value"])
    assert torch.equal(said["value"], said["value_logit"].sigmoid())
    assert set(critic(batch).extra) == set()


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}], ids=["whole", "adapter"])
def test_a_critic_is_saved_and_loaded(checkpoint, tmp_path, options):
    critic, other = critic_of(checkpoint, **options), Critic(policy=partial(loaded, checkpoint, **options))
    critic.save(tmp_path)
    other.load(tmp_path)
    batch = recorded(loaded(checkpoint), FAMILY)
    values = [one(batch, frozenset({"value"})).extra["value"] for one in (critic, other)]
    assert torch.equal(*values) and values[0].any()


def test_a_critic_of_another_family_is_refused(checkpoint):
    policy, critic = loaded(checkpoint), critic_of(checkpoint)
    critic.check_steps_of(policy)
    critic.tokens.processor.tokenizer.add_tokens(["another"])
    try:
        with pytest.raises(ValueError, match="has another vocabulary"):
            critic.check_steps_of(policy)
    finally:
        critic.tokens.processor.tokenizer = policy.processor.tokenizer
