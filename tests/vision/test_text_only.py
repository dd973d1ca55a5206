"""A language model without a vision tower trains as the token policy."""

from __future__ import annotations

import pytest
import torch
import transformers as t

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream, seeded
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.training.loop import train
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny

# A template of content that is a text, as those of language models are.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + ' ' + m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = tiny._tokenizer()
    tokenizer.chat_template = TEMPLATE
    with seeded(0):
        t.LlamaForCausalLM(t.LlamaConfig(**tiny.TEXT, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def asked(*parts):
    return Prompt("a", (Message("user", tuple(parts)),))


def test_log_probabilities_are_those_of_the_model_on_the_rendered_chat(llama):
    policy = Tokens(model=str(llama), dtype="float64")
    prompt = asked(Part(text="the fox"), Part(text=" 12"))
    assert policy.render(prompt) == "<|im_start|>user the fox 12<|im_end|><|im_start|>assistant "
    row = policy.encode(prompt, Outcome(text="brown"))
    with torch.no_grad():
        found = policy(policy.collate((row,))).logp[0]
        before, answer = row.steps.prompt.ids, row.steps.ids
        logits = policy.model(torch.cat([before, answer])[None]).logits[0, len(before) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    assert answer[-1] == policy.prompt_encoder.end[0] and len(answer) > 1
    torch.testing.assert_close(found.double(), wanted)


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8}), ("granite", {"logits_scaling": 8.0})],
)
def test_scaled_and_capped_logits_are_sampled_and_learned_as_the_model_makes_them(
    family, options, llama, tmp_path
):
    tokenizer = t.AutoTokenizer.from_pretrained(llama)
    usual = {**tiny.TEXT, "vocab_size": len(tokenizer), "initializer_range": 0.5, "pad_token_id": 0}
    with seeded(0):
        config = t.AutoConfig.for_model(family, **usual, **options)
        t.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # Gemma 2 caps the logits of its attention as well, which is eager attention only.
    policy = Tokens(model=str(tmp_path), dtype="float64", attn_implementation="eager")
    rows = Generate(policy, stream=Stream(0), max_completion_length=6).rollout([asked(Part(text="the"))] * 3)
    with torch.no_grad():
        batch = policy.collate(rows)
        found = policy(batch).logp
        for i, row in enumerate(rows):
            before, answer = row.steps.prompt.ids, row.steps.ids
            logits = policy.model(torch.cat([before, answer])[None], use_cache=False).logits
            wanted = logits[0, len(before) - 1 : -1].log_softmax(-1).gather(1, answer[:, None])[:, 0]
            torch.testing.assert_close(found[i, : row.length], wanted, rtol=0, atol=1e-5)
            torch.testing.assert_close(row.notes["logp"].double(), wanted, rtol=0, atol=1e-5)


def test_a_reply_goes_on_in_the_words_of_the_template(llama):
    encoder = Tokens(model=str(llama), dtype="float32").prompt_encoder
    begun = encoder.encode(asked(Part(text="the fox")))
    answer = encoder.tokenizer("brown<|im_end|>", add_special_tokens=False, return_tensors="pt")["input_ids"][
        0
    ]
    read = encoder.extend(begun, answer, Message("user", (Part(text="12"),)))
    words = "<|im_start|>user the fox<|im_end|><|im_start|>assistant brown<|im_end|>"
    words += "<|im_start|>user 12<|im_end|><|im_start|>assistant "
    assert encoder.tokenizer.decode(read.ids) == words
    assert read.positions.shape[-1] == len(read.ids) and not read.media


def test_an_image_is_refused_by_name(llama):
    policy = Tokens(model=str(llama), dtype="float32", freeze_vision_tower=False)
    with pytest.raises(ValueError, match="shows an image, but this model reads text only"):
        policy.prompt_encoder.encode(asked(Part(text="what?"), Part(media=tiny.picture())))


def test_an_adapter_of_a_language_model_trains_and_its_checkpoint_is_one_of_peft(llama, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(4)))
    raw = {
        "policy": {"name": "vision.tokens", "model": str(llama), "dtype": "float32", "lora_rank": 2},
        "data": {"name": "vision.visual_qa", "path": str(rows)},
        "rewards": [{"name": "overlong", "max_completion_length": 3, "soft_punish_cache": 2}],
        "advantage": ["total"],
        "objective": {"name": "policy_gradient", "surrogate": "log_likelihood", "aggregation": "step_mean"},
        "rollout": {
            "engine": [{"name": "vision.generate", "max_completion_length": 3}],
            "num_prompts": 2,
            "num_generations": 4,
        },
        "learn": {"learning_rate": 1e-2},
        "report": {"trackers": [], "log_completions": False, "media_log_steps": 0, "startup_checks": []},
        "max_steps": 2,
        "output_dir": str(tmp_path / "run"),
    }
    run = build(parse(raw, Config), quiet=True)
    first = {
        name: value.clone() for name, value in run.policy.module.named_parameters() if value.requires_grad
    }
    train(run)
    assert first and all("lora_" in name for name in first)
    moved = dict(run.policy.module.named_parameters())
    assert any(not torch.equal(value, moved[name]) for name, value in first.items())
    again = Tokens(
        model=str(llama), dtype="float32", adapter=str(tmp_path / "run" / "checkpoint-2" / "model")
    )
    for (_, one), (_, other) in zip(
        run.policy.module.named_parameters(), again.module.named_parameters(), strict=True
    ):
        assert torch.equal(one, other)
