"""Logits of models that scale or cap those of their head, against their own forward passes."""

from __future__ import annotations

import pytest
import torch
import transformers as t

from mmrl.config.loading import ConfigError
from mmrl.core.rng import seeded
from mmrl.runtime.output_head import OutputHead, check_head

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60, "initializer_range": 0.5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SCALED = [
    ("llama", {}, 1.0, None),
    ("cohere", {"logit_scale": 0.25}, 0.25, None),
    ("granite", {"logits_scaling": 8.0}, 0.125, None),
    ("gemma2", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    ("gemma3_text", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    ("nanochat", {"final_logit_softcapping": 15.0}, 1.0, 15.0),
]


def model_of(family: str, **options) -> torch.nn.Module:
    with seeded(0):
        config = t.AutoConfig.for_model(family, **SIZES, **options)
        return t.AutoModelForCausalLM.from_config(config).double().eval()


@pytest.mark.parametrize(("family", "options", "factor", "cap"), SCALED, ids=[name for name, *_ in SCALED])
def test_logits_are_those_of_the_forward_pass(family, options, factor, cap):
    model, ids = model_of(family, **options), torch.tensor([[5, 9, 33, 7]])
    check_head(model)
    head = OutputHead(model)
    assert (head.factor, head.cap) == (factor, cap) and head.weight.shape == (60, 32)
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        torch.testing.assert_close(head(hidden), model(ids).logits)
        if family != "llama":
            assert not torch.allclose(head.linear(hidden), head(hidden), rtol=1e-2)


def test_a_cap_by_hand():
    model = model_of("gemma2", final_logit_softcapping=2.0)
    weight = model.get_output_embeddings().weight
    hidden = 3.0 * weight[5:6].detach() / weight[5].square().sum()  # the logit of token 5 is 3
    assert float(OutputHead(model)(hidden)[0, 5]) == pytest.approx(1.81029650)  # 2 tanh(1.5)


def test_a_model_that_does_something_else_with_its_logits_is_refused(monkeypatch):
    model = model_of("llama")
    forward = type(model).forward

    def shifted(self, *given, **named):
        out = forward(self, *given, **named)
        out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out

    monkeypatch.setattr(type(model), "forward", shifted)
    with pytest.raises(ConfigError, match="type 'llama' does not take the logits of its head as they are"):
        check_head(model)
    assert "forward" not in vars(model.base_model)
