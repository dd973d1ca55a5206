"""Images as tokens: what is sampled, that training reads the same, guidance, pairs, runs and refusals."""

from __future__ import annotations

import json
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from mmrl.build import build
from mmrl.cli import main
from mmrl.config.loading import ConfigError, merge, read
from mmrl.config.schema import Config, parse
from mmrl.core.rng import Stream, seeded
from mmrl.core.types import Message, Outcome, Part, Prompt, PromptError, Size
from mmrl.training.loop import train
from mmrl.vision.builders.tiny_image_writers import TinyChameleon, TinyEmu3, TinyJanus
from mmrl.vision.engines.generate_images import GenerateImages
from mmrl.vision.models.image_writer import IMAGE
from mmrl.vision.models.modeling_chameleon import ChameleonDecoder
from mmrl.vision.policies.tokens import Tokens
from tests.support.configs import method_file
from tests.vision.tiny_image_writers import WRITERS

SIZES = {"emu3": (8, 12), "chameleon": (16, 16), "janus": (16, 16)}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("chameleon", "janus")]
EVERY = pytest.mark.parametrize("family", ["emu3", *SLOW])


@pytest.fixture(scope="session")
def writers(tmp_path_factory):
    """Find the tiny model of a family; nobody writes to it."""

    @cache
    def find(family):
        WRITERS[family](folder := tmp_path_factory.mktemp(family))
        return folder

    return find


def load(folder, **options):
    with seeded(0):  # adapters draw their first weights from the global stream
        return Tokens(model=str(folder), **{"dtype": "float64", **options})


def ask(uid, words, **size):
    return Prompt(uid, (Message("user", (Part(words),)),), size=Size(**size) if size else None)


PROMPTS = [ask("a", "a red ball"), ask("a", "a red ball"), ask("b", "two")]


def written(policy, family, prompts=PROMPTS, **options):
    height, width = SIZES[family]
    engine = GenerateImages(policy, stream=Stream(0), **{"height": height, "width": width, **options})
    return engine.rollout(prompts)


def by_hand(policy, row, scale):
    """Compute the log-probability of every token with the model's own head, one row at a time."""
    writer, model, ids = policy.images, policy.model, row.steps.ids

    def logits(prompt, ids):
        states = model.base_model(input_ids=torch.cat([prompt, ids])[None], use_cache=False)
        return model.get_output_embeddings()(states.last_hidden_state)[0, len(prompt) - 1 : -1]

    own, start = logits(row.steps.prompt.ids, ids), writer.start(ids)
    negative = logits(writer.unconditional(policy.negative_prompt).ids, ids[start:])
    for t in range(start, len(ids)):
        own[t] = negative[t - start] + scale * (own[t] - negative[t - start])
    blocked = torch.zeros(2, own.shape[1], dtype=torch.bool)
    blocked[0, policy.prompt_encoder.placeholders] = True
    blocked[1] = ~torch.isin(torch.arange(own.shape[1]), writer.ids)
    own = own.masked_fill(blocked[torch.isin(ids, writer.ids).long()], -torch.inf)
    return own.log_softmax(-1).gather(1, ids[:, None])[:, 0]


@EVERY
@torch.no_grad()
def test_training_reads_what_was_sampled_with_prefixes_packing_and_adapters(writers, family):
    for scale, text, options in (
        (1.0, 0, {"share_prefix": False}),
        (2.5, 0, {"negative_prompt": "bad"}),
        (2.5, 4, {"gradient_checkpointing": True, "lora_rank": 2}),
    ):
        policy = load(writers(family), guidance_scale=scale, **options)
        rows = written(policy, family, max_text_length=text, temperature=0.0 if text else 1.0)
        batch = policy.collate(rows)
        logp, mask = policy(batch).logp, batch.mask.bool()
        height, width = SIZES[family]
        assert mask.sum(1).tolist() == [height * width // 16 + text] * 3
        torch.testing.assert_close(logp[mask].float(), batch.notes["logp"][mask], rtol=0, atol=2e-6)
        for i, row in enumerate(rows):
            chosen = row.steps.chosen
            exact = by_hand(policy, row, scale)[chosen]
            torch.testing.assert_close(logp[i, : row.length][chosen], exact, rtol=0, atol=1e-10)
            assert not row.notes["logp"][~chosen].any() and row.outcomes[-1].image.shape[0] == 3
            assert (row.outcomes[-1].text is None) == (text == 0)
        # A part of the batch is read as in the whole, and guidance counts its tokens.
        part = batch.steps[torch.tensor([2, 0]), slice(None)]
        values = policy.module(part, frozenset())["logp"]
        torch.testing.assert_close(values, logp[[2, 0], : values.shape[1]], rtol=0, atol=1e-10)
        alone = policy.collate(rows[:1]).steps
        tokens = len(rows[0].steps.prompt.ids) + len(rows[0].steps.ids)
        assert alone.cost(torch.tensor([0])) > tokens or scale == 1


@EVERY
def test_gradients_flow_through_both_rows_and_leave_the_autoencoder(writers, family):
    gradients = []
    for packed in (False, True):
        policy = load(writers(family), guidance_scale=3.0, gradient_checkpointing=packed)
        batch = policy.collate(written(policy, family, max_text_length=2))
        (policy(batch, {"entropy"}).logp * batch.mask).sum().backward()
        named = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        assert named and not [name for name in named if "vqmodel" in name]
        gradients.append({name: p.grad for name, p in named.items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-4)


def test_emu3_writes_the_layout_of_its_processor_and_decodes_as_transformers(writers):
    policy = load(writers("emu3"))
    writer, encoder = policy.images, policy.prompt_encoder
    word = encoder.tokenizer.convert_tokens_to_ids
    layout = writer.layout(2, 3)
    line = word("<|extra_200|>")
    places = [IMAGE, IMAGE, IMAGE, line] * 2
    end = [word("<|extra_201|>"), word("<|image end|>"), word("<|im_end|>")]
    assert layout[-11:] == [*places, *end] and encoder.tokenizer.decode(layout[1:-12]) == "2*3"
    text = encoder.written(PROMPTS[0])
    asked = policy.processor(
        text=[text], return_for_image_generation=True, image_area=24**2, return_tensors="pt"
    )
    ids = encoder.encode(PROMPTS[0]).ids
    assert asked["input_ids"][0].tolist() == [*ids.tolist(), *writer.layout(3, 3)[:-15]]
    (row,) = written(policy, "emu3", PROMPTS[:1])
    tokens = row.steps.ids[-11:][None]
    pixels = policy.core.decode_image_tokens(tokens, 2, 3)
    image = policy.processor.postprocess(pixels[0], return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.as_tensor(image), row.outcomes[-1].image)


@EVERY
def test_a_text_ends_with_begin_of_image_and_holds_no_image_tokens(writers, family):
    policy = load(writers(family), dtype="float32")
    begin = policy.images.begin
    with torch.no_grad():  # make begin-of-image likely in texts
        policy.model.get_output_embeddings().weight[begin] *= 3
    rows = written(policy, family, [ask("a", "x")] * 12, max_text_length=6, batch_size=5)
    sampled = 0
    for row in rows:
        start = policy.images.start(row.steps.ids)
        words, chosen = row.steps.ids[:start], row.steps.chosen
        assert not set(words.tolist()) & set(policy.prompt_encoder.placeholders)
        assert chosen[:start].all() and start <= 6
        assert bool(chosen[start]) == (start < 6)  # sampled, or inserted at the limit
        sampled += bool(chosen[start])
    assert 0 < sampled < 12
    again = written(policy, family, [ask("a", "x")] * 12, max_text_length=6)
    for row, other in zip(rows, again, strict=True):
        assert torch.equal(row.steps.ids, other.steps.ids)


@EVERY
def test_a_recorded_image_is_encoded_and_sizes_are_the_prompts(writers, family):
    policy = load(writers(family))
    height, width = SIZES[family]
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
    row = policy.encode(PROMPTS[0], Outcome("first", image))
    ids, chosen = row.steps.ids, row.steps.chosen
    start = policy.images.start(ids)
    assert policy.prompt_encoder.text(ids[:start]) == "first" and chosen[: start + 1].all()
    assert torch.isin(ids[start + 1 :], policy.images.ids).equal(chosen[start + 1 :])
    assert len(policy.images.encode(image)[0]) == len(ids) - start
    assert not policy.encode(PROMPTS[0], Outcome(image=image)).steps.chosen[0]
    with pytest.raises(PromptError, match="multiples of 4|images of"):
        policy.encode(PROMPTS[0], Outcome(image=image[:, 1:]))
    with pytest.raises(PromptError, match="multiples of 4|images of"):
        written(policy, family, [ask("c", "x", height=6)])


def plan(folder, output, **changes):
    run = {
        "policy": {"name": "vision.tokens", "model": str(folder), "dtype": "float32", "guidance_scale": 2.0},
        "rewards": ["diffusion.jpeg_compressibility"],
        "rollout": {
            "num_prompts": 2,
            "num_generations": 2,
            "engine": {"name": "vision.generate_images", "height": 8, "width": 12},
        },
        "learn": {"learning_rate": 1e-3, "micro_batch_steps": 64},
        "report": {"trackers": [], "log_completions": False},
        "max_steps": 2,
        "output_dir": str(output),
    }
    return merge(run, changes)


def test_grpo_and_dpo_train_a_model_that_writes_images(writers, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("a red ball", "two")))
    method = read(method_file("grpo"))
    raw = merge(plan(writers("emu3"), tmp_path / "grpo"), method)
    raw |= {"data": {"name": "diffusion.prompts", "path": str(lines)}}
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    assert main(["check", str(tmp_path / "run.yaml"), "--data"]) == 0
    run = build(parse(raw, Config), quiet=True)
    train(run)
    first, second = run.journal.read()
    assert abs(first["loss"]) < 1e-4 and math.isfinite(second["loss"])
    rows = tmp_path / "pairs.jsonl"
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (12, 8), colour).save(tmp_path / f"{name}.png")
    rows.write_text(json.dumps({"prompt": "a ball", "chosen": "red.png", "rejected": "blue.png"}) + "\n")
    raw = merge(plan(writers("emu3"), tmp_path / "dpo", policy={"lora_rank": 2}), read(method_file("dpo")))
    raw |= {"data": {"name": "diffusion.images", "path": str(rows), "root": str(tmp_path)}}
    raw |= {"rewards": [{"name": "precomputed", "key": "score"}]}
    raw["rollout"] |= {"num_prompts": 1}
    run = build(parse(raw, Config), quiet=True)
    train(run)
    first, second = run.journal.read()
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and second["loss"] < first["loss"]


def test_what_cannot_work_is_refused_before_weights_are_loaded(writers, checkpoint, tmp_path, capsys):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "two", "height": 10, "width": 8}\n')
    emu3, text = writers("emu3"), checkpoint("llava")
    data = {"name": "diffusion.prompts", "path": str(lines), "size": "engine"}
    method = read(method_file("grpo"))
    engine = {"name": "vision.generate_images", "height": 8, "width": 8}
    for folder, changes, words in (
        (emu3, {"rollout": {"engine": {**engine, "width": 7}}}, "multiples of 4 here, not 8 x 7"),
        (
            emu3,
            {"data": {**data, "size": "row"}, "rollout": {"engine": engine}},
            "multiples of 4 here, not 10 x 8",
        ),
        (text, {"policy": {"guidance_scale": 1}}, "writes no images"),
        (
            text,
            {"rollout": {"engine": "vision.generate"}},
            "`guidance_scale` is 2, but a model of type 'llava'",
        ),
        (
            emu3,
            {"rollout": {"engine": "vision.generate"}},
            "scores images or videos, but the outcomes are texts",
        ),
        (
            emu3,
            {"rollout": {"engine": [engine, "vision.contrastive_decoding"]}},
            "wraps 'vision.generate' alone, not 'vision.generate_images'",
        ),
        (
            emu3,
            {"rollout": {"engine": [{**engine, "max_text_length": 2}, "vision.with_plans", "with_replay"]}},
            "'vision.with_plans' answers other prompts",
        ),
        (
            emu3,
            {
                "rollout": {"engine": engine},
                "references": {"t": {"name": "vision.teacher", "model": str(emu3)}},
            },
            "a teacher scores texts, and the engine writes images",
        ),
    ):
        raw = merge(merge(plan(folder, tmp_path / "out", data=data), method), changes)
        (tmp_path / "run.yaml").write_text(json.dumps(raw))
        assert main(["check", str(tmp_path / "run.yaml")]) == 2
        assert words in capsys.readouterr().out
    with pytest.raises(ConfigError, match="`negative_prompt` is read by guidance only"):
        Tokens(model=str(emu3), negative_prompt="bad")


@pytest.mark.slow
@torch.no_grad()
def test_janus_embeds_and_scores_images_as_transformers_does(writers, tmp_path):
    from transformers import JanusForConditionalGeneration

    policy = load(writers("janus"))
    policy.save(tmp_path)
    plain = JanusForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64).eval()
    policy.load(tmp_path)
    assert policy.model.state_dict().keys() == plain.state_dict().keys()
    (row,) = written(policy, "janus", PROMPTS[:1])
    codes = row.steps.ids[1:17] - plain.config.text_config.vocab_size
    texts = torch.cat([row.steps.prompt.ids, row.steps.ids[:1]])
    embeds = torch.cat(
        [plain.get_input_embeddings()(texts), plain.prepare_embeddings_for_image_generation(codes)]
    )
    hidden = plain.model.language_model(inputs_embeds=embeds[None]).last_hidden_state[0, len(texts) - 1 : -1]
    logp = plain.model.generation_head(hidden).log_softmax(-1).gather(1, codes[:, None])[:, 0]
    own = policy(policy.collate([row])).logp[0, 1:17]
    torch.testing.assert_close(own, logp, rtol=0, atol=1e-9)
    image = plain.decode_image_tokens(codes[None])[0].permute(2, 0, 1)
    wanted = policy.processor.postprocess([image.float()], return_tensors="pt")["pixel_values"][0]
    assert (wanted.int() - row.outcomes[-1].image.int()).abs().max() <= 1


def test_chameleons_decoder_is_that_of_janus_without_attention():
    from transformers import ChameleonVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

    config = ChameleonVQVAEConfig(base_channels=32, channel_multiplier=[1, 2, 2], latent_channels=4)
    decoder = ChameleonDecoder(config)
    other = JanusVQVAEDecoder(SimpleNamespace(**config.to_dict(), out_channels=3))
    named = {
        f"up.{2 - int(name[3])}{name[4:]}" if name[:3] == "up." else name: value
        for name, value in decoder.state_dict().items()
    }
    assert not other.load_state_dict(named, strict=False).unexpected_keys
    for level in other.up:
        for block in level.attn:  # a projection to 0 leaves the residual
            torch.nn.init.zeros_(block.proj_out.weight), torch.nn.init.zeros_(block.proj_out.bias)
    latents = torch.randn(1, 4, 2, 2)
    torch.testing.assert_close(decoder(latents), other(latents))


@pytest.mark.parametrize("builder", [TinyChameleon, TinyEmu3, TinyJanus])
def test_channels_fill_the_groups_of_the_norms(builder):
    with pytest.raises(ValueError, match="`vq_channels` is a multiple of 32"):
        builder(stream=Stream(0), vq_channels=40)
