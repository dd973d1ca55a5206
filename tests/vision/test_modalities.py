"""A new kind of media is one entry of `MODALITIES`, a loader and a family: the page docs/howto/media.md."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy
import pytest
import torch
import transformers as t

from mmrl.build import build
from mmrl.config import objects
from mmrl.config.registry import find
from mmrl.config.schema import Config, parse
from mmrl.core.chat import shown_media
from mmrl.core.modalities import MODALITIES, digest_of
from mmrl.core.rng import seeded
from mmrl.core.types import Frames, Media, Outcome
from mmrl.data.fields import RowError
from mmrl.data.media import MediaError
from mmrl.data.media_reader import MediaReader
from mmrl.data.messages import no_media, read_messages
from mmrl.training.loop import train
from mmrl.vision.models.model_families import FAMILIES
from mmrl.vision.policies.tokens import Tokens
from tests.support.doc_blocks import ROOT, blocks_of, folder_of
from tests.vision import tiny

PAGE = "docs/howto/media.md"
WIDTH = 3  # numbers of a point, which becomes one feature


@pytest.fixture
def clouds(tmp_path):
    """Register what the page defines; afterwards it is unknown again."""
    with folder_of(blocks_of((ROOT / PAGE).read_text(), PAGE), tmp_path):
        import my_clouds  # pyright: ignore[reportMissingImports]
        import my_family  # pyright: ignore[reportMissingImports]

        yield my_clouds, my_family
    assert list(MODALITIES) == ["image", "video", "audio"] and "my_model" not in FAMILIES


class ScannerConfig(t.LlamaConfig):
    model_type = "my_model"
    cloud_token_id = 0


class ScannerModel(t.LlamaModel):
    """Projects scans to the embeddings of their placeholder tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.eye = torch.nn.Linear(WIDTH, config.hidden_size)

    def forward(self, input_ids=None, cloud_values=None, inputs_embeds=None, **options):
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cloud_values is not None:
            seen = (input_ids == self.config.cloud_token_id)[..., None]
            embeddings = embeddings.masked_scatter(seen, self.eye(cloud_values).to(embeddings))
        return super().forward(inputs_embeds=embeddings, **options)


class Scanner(t.LlamaForCausalLM):
    config_class = ScannerConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ScannerModel(config)
        self.post_init()


class ScannerProcessor:
    """Writes as many placeholders for a cloud as it has features."""

    image_processor, cloud_token = None, "<cloud>"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def apply_chat_template(self, messages, *, tokenize=False, **options):
        begin = options.get("add_generation_prompt", False)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin)
        if not tokenize:
            return text
        clouds = [block["cloud"] for m in messages for block in m["content"] if "cloud" in block]
        return self(text=[text], clouds=clouds)

    def __call__(self, *, text, clouds=(), return_tensors="pt", text_kwargs=None):
        whole, *pieces = text[0].split(self.cloud_token)
        for values, piece in zip(clouds, pieces, strict=True):
            whole += self.cloud_token * len(values) + piece
        inputs = {
            "input_ids": self.tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
        }
        if clouds:
            inputs["cloud_values"] = torch.cat([*clouds])
        return inputs

    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


@pytest.fixture
def scanner(clouds):
    tokenizer = tiny._tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<cloud>"]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = tiny.TEMPLATE.replace("PLACEHOLDER", "<cloud>")
    placeholder = tokenizer.convert_tokens_to_ids("<cloud>")
    config = ScannerConfig(**tiny.TEXT, vocab_size=len(tokenizer), cloud_token_id=placeholder, pad_token_id=0)
    with seeded(0):
        model = Scanner(config).eval()
    name = objects.put("scanner", model)
    objects.put("scanner/processor", ScannerProcessor(tokenizer))
    return name


def scans(folder):
    """Write three rows, each with its cloud: by a mark, by a part of a message, and in a list."""
    for i, name in enumerate("abc"):
        numpy.save(folder / f"{name}.npy", numpy.arange(6, dtype="float32").reshape(2, WIDTH) + i)
    rows = [
        {"prompt": "scan <cloud> fox", "cloud": "a.npy", "solution": "fox"},
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "the"}, {"type": "cloud", "cloud": "b.npy"}],
                }
            ],
            "solution": "fox",
        },
        {"prompt": "which", "clouds": ["c.npy", "a.npy"], "solution": "fox"},
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plan(folder, model, rows):
    return {
        "policy": {"name": "vision.tokens", "model": model, "dtype": "float32"},
        "data": {"name": "vision.conversations", "path": str(rows)},
        "rollout": {
            "engine": [{"name": "vision.generate", "max_completion_length": 4}],
            "num_prompts": 3,
            "num_generations": 4,
        },
        "rewards": [{"name": "overlong", "max_completion_length": 3, "soft_punish_cache": 2}],
        "advantage": ["total"],
        "objective": {"name": "policy_gradient", "surrogate": "log_likelihood", "aggregation": "step_mean"},
        "learn": {"learning_rate": 1e-2},
        "report": {"trackers": []},
        "max_steps": 1,
        "output_dir": str(folder / "run"),
    }


def test_a_toy_kind_of_media_trains_for_a_step(scanner, tmp_path):
    run = build(parse(plan(tmp_path, scanner, scans(tmp_path)), Config), quiet=True)
    eye = run.policy.model.model.eye.weight
    before = eye.detach().clone()
    train(run)
    assert not torch.equal(before, eye)


def test_its_tokens_features_and_rewards_columns(scanner, tmp_path):
    prompts = find("data", "vision.conversations").target(path=str(scans(tmp_path)))
    policy = Tokens(model=scanner, dtype="float32")
    shown = [[medium.kind for medium in prompt.media] for prompt in prompts]
    assert shown == [["cloud"], ["cloud"], ["cloud", "cloud"]]
    # A cloud of two points has two features, each with a placeholder.
    encoded = [policy.prompt_encoder.encode(prompt) for prompt in prompts]
    placeholder = policy.model.config.cloud_token_id
    assert [int((one.ids == placeholder).sum()) for one in encoded] == [2, 2, 4]
    assert torch.equal(encoded[0].media["cloud_values"], torch.arange(6.0).view(2, 3))
    assert "<cloud: 2 tokens>" in policy.render(prompts[0])
    assert policy.prompt_encoder.placeholders == [placeholder]
    columns = shown_media(prompts[:2])
    assert columns["cloud"][1].points.tolist() == [[1, 2, 3], [4, 5, 6]] and "image" not in columns


def test_answers_depend_on_what_is_scanned(scanner, tmp_path):
    prompt, _, _ = find("data", "vision.conversations").target(path=str(scans(tmp_path)))
    policy = Tokens(model=scanner, dtype="float32")
    other = MediaReader()("cloud", tmp_path / "c.npy", "the other")
    parts = tuple(replace(part, media=part.media and other) for part in prompt.messages[0].parts)
    changed = replace(prompt, uid="changed", messages=(replace(prompt.messages[0], parts=parts),))
    rows = tuple(policy.encode(one, Outcome(text="fox")) for one in (prompt, changed, prompt))
    with torch.no_grad():
        logp = policy(policy.collate(rows)).logp
    assert torch.equal(logp[0], logp[2]) and not torch.allclose(logp[0], logp[1])


def test_the_same_content_has_the_same_digest(clouds, tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        numpy.save(tmp_path / f"{name}.npy", numpy.full((2, 3), value, dtype="float32"))
    one, same, other = (digest_of(MediaReader()("cloud", tmp_path / f"{x}.npy", x)) for x in "abc")
    assert one == same != other


def test_a_form_that_the_table_lacks_is_an_error(clouds):
    with pytest.raises(ValueError, match="chat completions take text, images, videos and sounds only"):
        MODALITIES["cloud"].chat_parts(clouds[0].Cloud(torch.zeros(2, 3)))
    with pytest.raises(RowError, match="wanted a path as the cloud, got"):
        MediaReader()("cloud", torch.zeros(4), "the cloud")


def test_a_damaged_file_and_a_missing_place_are_bad_rows(scanner, tmp_path):
    path = scans(tmp_path)
    rows = [{"prompt": "<cloud> <cloud> fox", "cloud": "a.npy"}, {"prompt": "fox", "cloud": "none.npy"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RowError, match="the messages have 2 cloud places, but 1 are given"):
        list(find("data", "vision.conversations").target(path=str(path)))
    (tmp_path / "a.npy").write_bytes(b"no numbers")
    with pytest.raises(MediaError, match=r"cannot decode '.*a\.npy'"):
        MediaReader()("cloud", tmp_path / "a.npy", "it").load()


def test_an_unknown_kind_is_refused():
    with pytest.raises(RowError, match="parts of the types text, image, video and audio"):
        read_messages([{"role": "user", "content": [{"type": "cloud", "cloud": "a"}]}], [], no_media)


def test_digests_of_images_and_videos_stay_as_they_were():
    # Caches compare them.
    pixels = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    frames = Frames(pixels, torch.tensor([0.0, 0.5], dtype=torch.float64), 1.0)
    wanted = hashlib.blake2b(b"('video', torch.Size([2, 3, 2, 2]), 1.0)")
    wanted.update(pixels.numpy())
    wanted.update(frames.times.numpy())
    assert digest_of(Media("video", "v", lambda: frames)) == wanted.digest()
