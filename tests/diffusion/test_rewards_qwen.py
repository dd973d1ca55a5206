"""HPSv3, EditReward and VideoAlign: tiny Qwen-VL classes and heads under the published names, against
computations with the language model and the vision tower alone."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from mmrl.core.rng import seeded
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.rewards.edit_reward import EditReward
from mmrl.diffusion.rewards.hpsv3 import Hpsv3
from mmrl.diffusion.rewards.qwen_scorer import published_prompts, renamed
from mmrl.diffusion.rewards.video_align import AXES, TOKENS, VideoAlign, num_frames
from tests.vision import tiny

# Of the prompts in the released code, at the commits of November 2026 and in hpsv3 1.0.0 of PyPI.
HASHES = {
    "video_align": "fdb6309bac618dd0",
    "hpsv3": "f6ee57479d4e9eee",
    "edit_reward_following": "b8c53a0a3b67db1c",
    "edit_reward_quality": "4583db70a7aba603",
    "edit_score_following": "48da73e2f5295e31",
    "edit_score_quality": "8249deba103d112d",
    "unified_edit_following": "2149de6f83cf9946",
    "unified_edit_quality": "ddb40baa511dbf2f",
    "unified_image": "6eefc0130da5c0f1",
    "unified_video": "13eb04c044d191c2",
    "unified_final_score": "d45abedf90c6753a",
}
PIXELS = 6 * 28 * 28
SIZES = ((40, 64), (70, 33), (40, 64))
TEXTS = ("a red ball", "two <|Reward|> dogs on a long road", "a {cat}")


def asking(text: str, *pixels: torch.Tensor) -> Prompt:
    media = [Media("image", "a.png", lambda p=p: Frames(p[None], torch.zeros(1))) for p in pixels]
    return Prompt(text, (Message("user", (*(Part(media=one) for one in media), Part(text))),))


def pictures(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8) for size in SIZES]


def test_the_prompts_are_the_published_ones_letter_by_letter():
    found = {
        name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in published_prompts().items()
    }
    assert found == HASHES


# ---- a plain computation


class Plain:
    """A tiny model with added tokens: the states of tokens, by its tower and its language model alone."""

    def __init__(self, kind: str, folder, tokens) -> None:
        self.folder = str(tiny.make(kind, folder))
        load = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[kind]
        model = getattr(transformers, f"{load}ForConditionalGeneration").from_pretrained(folder).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.add_tokens(list(tokens), special_tokens=True)
        with seeded(1):
            model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
        self.model, self.tokens = model, self.tokenizer.convert_tokens_to_ids(list(tokens))

    @torch.no_grad()
    def states(self, ids, features, pad) -> torch.Tensor:
        """Hidden states of the added tokens, with one position for every token."""
        embedded = self.model.get_input_embeddings()(ids)
        embedded[ids == pad] = features
        positions = torch.arange(len(ids)).expand(3, 1, -1)
        hidden = self.model.model.language_model(inputs_embeds=embedded[None], position_ids=positions)
        return hidden.last_hidden_state[0][[ids.tolist().index(token) for token in self.tokens]]

    def ids(self, kind: str, grids, filled: str, said: str) -> torch.Tensor:
        """Tokens of the chat template's text, with `said` in the prompt as plain words."""
        marks = "".join(
            f"<|vision_start|>{f'<|{kind}_pad|>' * int(grid.prod() // 4)}<|vision_end|>" for grid in grids
        )
        # A control token in the prompt is split behind its first letter.
        filled = filled.replace("{text_prompt}", said.replace("<|", "<\0|"))
        whole = f"<|im_start|>user\n{marks}{filled}<|im_end|>\n<|im_start|>assistant\n"
        return torch.tensor(sum((self.tokenizer(words)["input_ids"] for words in whole.split("\0")), []))

    @torch.no_grad()
    def of_images(self, prompt: str, said: str, images) -> torch.Tensor:
        """States of the tokens for images that are resized already, (T, D)."""
        given = self.processor.image_processor(images=images, do_resize=False, return_tensors="pt")
        ids = self.ids("image", given["image_grid_thw"], published_prompts()[prompt], said)
        seen = self.model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return self.states(ids, seen.pooler_output, pad)

    def published(self, old: bool, **heads: torch.Tensor) -> dict[str, torch.Tensor]:
        """Weights by the names of transformers before 4.52, or after."""
        names = {"model.visual.": "visual.", "model.language_model.": "model."} if old else {}
        state = {}
        for name, value in self.model.state_dict().items():
            for new, before in names.items():
                name = name.replace(new, before)
            state[name] = value.clone()
        return state | heads


def head(prefix: str, width: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0": (1024, width), "3": (16, 1024), "5": (2, 16)}
    draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
    return {
        f"{prefix}.{place}.{part}": draw(*(shape if part == "weight" else shape[:1]))
        for place, shape in shapes.items()
        for part in ("weight", "bias")
    }


def first_output(state: dict[str, torch.Tensor], features: torch.Tensor) -> float:
    weight, bias = (lambda n: state[f"{n}.weight"]), (lambda n: state[f"{n}.bias"])
    for place in ("0", "3"):
        features = (features @ weight(place).T + bias(place)).clamp(min=0)
    return float((features @ weight("5").T + bias("5"))[0])


def short(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{prefix}."): v for name, v in state.items() if name.startswith(f"{prefix}.")}


OPTIONS = {"pixels": PIXELS, "dtype": "float32", "device": "cpu"}


# ---- HPSv3


@pytest.fixture(scope="module")
def hps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hps")
    plain = Plain("qwen2_vl", folder / "base", ["<|Reward|>"])
    state = plain.published(old=True, **head("rm_head", 32, 3))
    assert "visual.patch_embed.proj.weight" in state and "model.embed_tokens.weight" in state
    torch.save({"model": state}, folder / "HPSv3.pth")
    return plain, state, folder / "HPSv3.pth"


def resized(image: torch.Tensor) -> Image.Image:
    """Resize to PIXELS pixels, then up to multiples of 28: 40 x 64 to 54.2 x 86.8, to 56 x 112."""
    tall = image.shape[1] > image.shape[2]
    return to_pil(image).resize((56, 112) if tall else (112, 56), Image.Resampling.BICUBIC)


def test_hpsv3_is_its_head_on_the_state_of_the_reward_token(hps):
    plain, state, file = hps
    images = pictures(0)
    wanted = [
        first_output(short(state, "rm_head"), plain.of_images("hpsv3", text, [resized(image)])[0])
        for text, image in zip(TEXTS, images, strict=True)
    ]
    reward = Hpsv3(weights=str(file), model=plain.folder, **OPTIONS)
    prompts, outcomes = [asking(text) for text in TEXTS], [Outcome(image=image) for image in images]
    together = reward(prompts, outcomes)
    assert together == pytest.approx(wanted, abs=2e-5)
    assert len({round(value, 3) for value in wanted}) == 3
    alone = [reward([p], [o])[0] for p, o in zip(prompts, outcomes, strict=True)]
    assert alone == pytest.approx(together, abs=2e-5)
    video = Outcome(video=images[0].expand(3, -1, -1, -1), times=torch.arange(3.0))
    assert reward(prompts[:1], [video]) == pytest.approx(wanted[:1], abs=2e-5)


def test_a_model_is_shared_and_rounded_as_a_whole(hps):
    plain, _, file = hps
    options = {**OPTIONS, "dtype": "bfloat16"}
    reward, other = (Hpsv3(weights=str(file), model=plain.folder, **options) for _ in range(2))
    assert reward.scorer is other.scorer
    body = reward.scorer.body
    assert {t.dtype for t in (*body.parameters(), *body.buffers())} == {torch.bfloat16}
    assert {t.dtype for t in reward.scorer.rm_head.parameters()} == {torch.float32}
    value = reward([asking("a")], [Outcome(image=pictures(0)[0])])[0]
    assert value is not None and abs(value) < 100


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rm_head.5.bias": None}, 'Missing key.*"rm_head.5.bias"'),
        ({"rm_head.7.bias": torch.zeros(1)}, 'Unexpected key.*"rm_head.7.bias"'),
        (
            {"model.embed_tokens.weight": torch.zeros(9, 32)},
            "size mismatch for body.language_model.embed_tokens",
        ),
        (
            {"model.language_model.norm.weight": torch.zeros(32)},
            "hold 'body.language_model.norm.weight' twice",
        ),
    ],
)
def test_weights_of_another_form_are_refused(hps, tmp_path, change, told):
    plain, state, _ = hps
    changed = {name: value for name, value in {**state, **change}.items() if value is not None}
    changed.pop("lm_head.weight", None)
    save_file(changed, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=f"hpsv3: .*{told}"):
        Hpsv3(weights=str(tmp_path / "x.safetensors"), model=plain.folder, **OPTIONS)


def test_a_base_of_another_type_is_refused(hps, tmp_path):
    folder = tiny.make("qwen3_vl", tmp_path / "base")
    with pytest.raises(ValueError, match="is of type 'qwen3_vl'; its published weights are of qwen2_vl or"):
        Hpsv3(weights=str(hps[2]), model=str(folder), **OPTIONS)
    with pytest.raises(ValueError, match="hpsv3: there is no file 'gone.pt'"):
        Hpsv3(weights="gone.pt", model=str(folder), **OPTIONS)
    with pytest.raises(ValueError, match="hpsv3: cannot load configuration and processor of"):
        Hpsv3(weights=str(hps[2]), model=str(tmp_path / "nothing"), **OPTIONS)


# ---- EditReward


def test_edit_reward_is_the_mean_of_two_heads_on_two_prompts(tmp_path):
    plain = Plain("qwen2_5_vl", tmp_path / "base", ["<|Reward|>"])
    heads = head("rm_heads.head_0", 32, 4) | head("rm_heads.head_1", 32, 5)
    state = plain.published(old=False, **heads)
    state = {name: value for name, value in state.items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    reward = EditReward(weights=str(tmp_path / "model.safetensors"), model=plain.folder, **OPTIONS)
    sources, results = pictures(0), pictures(1)
    wanted = []
    for text, before, after in zip(TEXTS, sources, results, strict=True):
        images = [resized(before), resized(after)]
        follows = plain.of_images("edit_reward_following", text, images)[0]
        looks = plain.of_images("edit_reward_quality", text, images)[0]
        scores = [
            first_output(short(state, f"rm_heads.head_{i}"), states)
            for i, states in enumerate((follows, looks))
        ]
        wanted.append(sum(scores) / 2)
    prompts = [asking(text, source) for text, source in zip(TEXTS, sources, strict=True)]
    outcomes = [Outcome(image=image) for image in results]
    assert reward(prompts, outcomes) == pytest.approx(wanted, abs=2e-5)
    assert len({round(value, 3) for value in wanted}) == 3
    with pytest.raises(ValueError, match="edit_reward compares with the source image, but prompt 'a'"):
        reward([asking("a")], outcomes[:1])


# ---- VideoAlign

CONFIG = {
    "data_config": {
        "fps": 2.0,
        "num_frames": None,
        "max_frame_pixels": 200704,
        "sample_type": "uniform",
        "prompt_template_type": "detailed_special",
        "eval_dim": ["VQ", "MQ", "TA"],
    },
    "model_config": {"use_special_tokens": True, "output_dim": 3},
    "peft_lora_config": {"lora_enable": True, "lora_r": 2, "lora_alpha": 4, "use_rslora": False},
    "inference_config": {
        "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105,
        "TA_std": 2.5121,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def video_align(tmp_path_factory):
    """Weights in the layout of peft, whose adapter changes one layer; the plain model has it merged."""
    folder = tmp_path_factory.mktemp("video-align")
    plain = Plain("qwen2_vl", folder / "base", TOKENS)
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(3, 32, generator=generator)
    state = {
        f"base_model.model.{k}": v for k, v in plain.published(True, **{"rm_head.weight": weight}).items()
    }
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    down, up = (torch.randn(*shape, generator=generator) for shape in ((2, 32), (32, 2)))
    for part in ("weight", "bias"):
        state[f"{layer}.base_layer.{part}"] = state.pop(f"{layer}.{part}")
    state |= {f"{layer}.lora_A.default.weight": down, f"{layer}.lora_B.default.weight": up}
    torch.save(state, folder / "model.pth")
    (folder / "model_config.json").write_text(json.dumps(CONFIG))
    merged = plain.model.model.language_model.layers[1].self_attn.q_proj.weight
    merged.data += 4 / 2 * up @ down
    options = {"weights": str(folder / "model.pth"), "config": str(folder / "model_config.json")}
    return plain, weight, state, {**options, "model": plain.folder, "dtype": "float32", "device": "cpu"}


def moving(frames: int, seed: int) -> Outcome:
    generator = torch.Generator().manual_seed(seed)
    video = torch.randint(256, (frames, 3, 40, 60), generator=generator, dtype=torch.uint8)
    return Outcome(video=video, times=torch.arange(frames) / 8)


@torch.no_grad()
def axes_of(
    plain: Plain, weight: torch.Tensor, text: str, outcome: Outcome, frames: list[int]
) -> list[float]:
    """Standardised scores of the three axes, from chosen frames."""
    from torchvision.transforms.functional import InterpolationMode, resize

    # 40 x 60 pixels become 280 x 392: at least 128 * 28 * 28 pixels, and sides of multiples of 28.
    assert outcome.video is not None
    video = resize(outcome.video[frames], [280, 392], InterpolationMode.BICUBIC, antialias=True)
    given = plain.processor.video_processor(
        videos=[video], do_resize=False, do_sample_frames=False, return_tensors="pt"
    )
    grid = given["video_grid_thw"]
    ids = plain.ids("video", grid, published_prompts()["video_align"], text)
    seen = plain.model.model.visual(given["pixel_values_videos"], grid_thw=grid).pooler_output
    states = plain.states(ids, seen, plain.tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    norm = CONFIG["inference_config"]
    return [
        (float(states[i] @ weight[i]) - norm[f"{axis}_mean"]) / norm[f"{axis}_std"]
        for i, axis in enumerate(AXES)
    ]


def test_video_align_sums_three_standardised_outputs_of_three_tokens(video_align):
    plain, weight, _, options = video_align
    # 20 frames at 8 a second are 5 at 2 a second, which round to 4; 9 frames become the fewest, 4.
    outcomes, texts = [moving(20, 0), moving(9, 1)], ["a dog runs", "a <|VQ_reward|> ball"]
    frames = [[0, 6, 13, 19], [0, 3, 5, 8]]
    wanted = [axes_of(plain, weight, *row) for row in zip(texts, outcomes, frames, strict=True)]
    prompts = [asking(text) for text in texts]
    reward = VideoAlign(**options)
    assert reward(prompts, outcomes) == pytest.approx([sum(scores) for scores in wanted], abs=1e-4)
    for i, axis in enumerate(AXES):  # alone, as together
        one = VideoAlign(axis=axis, **options)
        assert one(prompts[1:], outcomes[1:]) == pytest.approx([wanted[1][i]], abs=1e-4)


@pytest.mark.parametrize(
    ("total", "rate", "fps", "count"),
    [(81, 16, 2, 10), (20, 8, 2, 4), (75, 30, 2, 4), (3, 8, 2, 2), (5000, 8, 8, 768), (49, 8, 2, 12)],
)
def test_the_number_of_frames_is_that_of_the_released_code(total, rate, fps, count):
    # 81 / 16 * 2 = 10.1; 20 / 8 * 2 = 5 and round(2.5) is 2; 75 / 30 * 2 = 5; at most 3 // 2 * 2; 12.25.
    assert num_frames(total, rate, fps) == count


def test_video_align_refuses_other_files_and_images(video_align, tmp_path):
    _, _, state, options = video_align
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    lost = {name: value for name, value in state.items() if name != f"{layer}.lora_B.default.weight"}
    with pytest.raises(
        ValueError, match="video_align: the weights have '.*lora_A.default.weight', but no base"
    ):
        renamed("video_align", lost)
    torch.save({name: v for name, v in state.items() if "rm_head" not in name}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="no `rm_head.weight` with 1 or 3 rows"):
        VideoAlign(**{**options, "weights": str(tmp_path / "model.pth")})
    other = tmp_path / "model_config.json"
    for change, told in (
        ({"data_config": {**CONFIG["data_config"], "prompt_template_type": "simple"}}, "it is for prompts"),
        ({"inference_config": {}}, "is no model_config.json of VideoReward: 'VQ_mean'"),
    ):
        other.write_text(json.dumps({**CONFIG, **change}))
        with pytest.raises(ValueError, match=told):
            VideoAlign(**{**options, "config": str(other)})
    with pytest.raises(ValueError, match="video_align scores videos of at least 2 frames"):
        VideoAlign(**options)([asking("a")], [Outcome(image=pictures(0)[0])])
    with pytest.raises(ValueError, match="has no times of its frames"):
        VideoAlign(**options)([asking("a")], [Outcome(video=moving(4, 0).video)])
