"""Weights are those that were named: folders that lack some, and adapters of other models, are refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cli import main
from mmrl.config.loading import ConfigError, merge
from mmrl.rewards.text_models import load_text_model
from mmrl.vision.models import loading
from mmrl.vision.models.model_families import check_family
from mmrl.vision.policies.tokens import Tokens
from tests.rewards import tiny_text
from tests.support.toys import plan

FAMILY = "qwen2_5_vl"
FILE, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def changed(source, folder, file, change, **settings):
    """Copy a folder with other weights, and other settings of the adapter."""
    shutil.copytree(source, folder)
    save_file(change(load_file(source / file)), folder / file, {"format": "pt"})
    if settings:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def without(part):
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


@pytest.mark.parametrize("part", ["layers.1", "norm", ""], ids=["a layer", "one kind", "all"])
def test_a_folder_that_lacks_weights_is_refused(checkpoint, tmp_path, part):
    folder = changed(checkpoint(FAMILY), tmp_path / "model", FILE, without(part))
    wanted = r"lack \d+ of the \d+ weights of Qwen2_5_VLForConditionalGeneration, the first is '\S+'"
    for read in (
        lambda: Tokens(model=str(folder)),
        lambda: loading.check_folders(str(folder)),  # `mmrl check`, without the weights
        lambda: Tokens(model=str(checkpoint(FAMILY)), dtype="float32").load(folder),  # `init_from`
    ):
        with pytest.raises(ValueError, match=wanted):
            read()


def test_weights_that_the_model_does_not_use_are_named(checkpoint, tmp_path, caplog):
    def grow(weights):
        more = {name.replace("layers.1", "layers.2"): w.clone() for name, w in weights.items()}
        return {**more, **weights, "model.rotary_emb.inv_freq": torch.ones(2)}

    folder = changed(checkpoint(FAMILY), tmp_path / "model", FILE, grow)
    loading.check_folders(str(folder))
    said_of = lambda: [record.getMessage() for record in caplog.records if record.name == "mmrl"]
    (said,) = said_of()
    assert "does not use" in said and "layers.2." in said and "smaller model" in said
    for family in ("gemma3", "smolvlm", FAMILY):
        loading.check_folders(str(checkpoint(family)))
    assert len(said_of()) == 1


def test_a_damaged_file_is_one_clear_line(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "model")
    (folder / FILE).write_bytes(b"123")
    with pytest.raises(ValueError, match="cannot load the model .*: its weights cannot be read"):
        Tokens(model=str(folder))


def few_bits(dtype):
    return lambda weights: {n: v.to(dtype) if v.ndim == 2 else v for n, v in weights.items()}


def cut(weights):
    return {n: v[:8].clone() if "layers.0.mlp.gate" in n else v for n, v in weights.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (few_bits(torch.int8), r"28 weights .* stored in few bits, the first is 'lm_head.weight' in I8"),
        (few_bits(torch.float8_e4m3fn), "stored in few bits, .* no `quantization_config`"),
        (
            cut,
            r"1 weights .* other shapes .* '\S+gate_proj.weight' with \[8, 32\], not \[64, 32\]",
        ),
    ],
    ids=["int8", "fp8", "shapes"],
)
def test_weights_that_would_be_other_numbers_are_refused(checkpoint, tmp_path, change, message):
    folder = changed(checkpoint(FAMILY), tmp_path / "model", FILE, change)
    for read in (lambda: Tokens(model=str(folder)), lambda: loading.check_folders(str(folder))):
        with pytest.raises(ConfigError, match=message):
            read()


def test_a_model_with_nan_is_refused(checkpoint, tmp_path):
    spoil = lambda weights: {n: v * torch.nan if "layers.1.mlp.up" in n else v for n, v in weights.items()}
    folder = changed(checkpoint(FAMILY), tmp_path / "model", FILE, spoil)
    with pytest.raises(ConfigError, match=r"1 of \d+ weights .* hold NaN .* first is '\S+up_proj"):
        Tokens(model=str(folder))


def test_a_configuration_that_transformers_refuses_is_one_clear_line(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"cannot load the model (.|\n)*num_hidden_layers"):
        loading.check_folders(str(folder))


def test_tied_weights_are_not_missing(checkpoint):
    for family in ("gemma3", "smolvlm", FAMILY):
        loading.check_folders(str(checkpoint(family)))


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    tiny_text.write_bert(tmp_path / "scorer", labels=1)
    load_text_model("AutoModelForSequenceClassification", str(tmp_path / "scorer"), "cpu")
    folder = changed(tmp_path / "scorer", tmp_path / "headless", FILE, without("classifier"))
    with pytest.raises(ValueError, match="lack 2 of the .* the first is 'classifier.bias'"):
        load_text_model("AutoModelForSequenceClassification", str(folder), "cpu")


# ---- adapters


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """Save an adapter of the policy, once."""
    folder = tmp_path_factory.mktemp("saved")
    Tokens(model=str(checkpoint(FAMILY)), dtype="float32", lora_rank=2).save(folder)
    return folder


@pytest.fixture
def adapter(saved, tmp_path):
    """A copy of this adapter, which a test may change."""
    return shutil.copytree(saved, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: dict(list(weights.items())[:3]), "25 weights are on one side only"),
        (lambda weights: {}, "holds no weights"),
        (lambda weights: {n.replace("mlp", "moe"): v for n, v in weights.items()}, "on one side only"),
        (lambda weights: {n: v.fill_(torch.nan) for n, v in weights.items()}, "28 of 28 weights .* hold NaN"),
        (lambda weights: {n: v[:, :1].contiguous() for n, v in weights.items()}, "does not fit"),
    ],
    ids=["half", "none", "another model", "nan", "shapes"],
)
def test_an_adapter_that_does_not_fit_is_refused(checkpoint, adapter, tmp_path, change, message):
    folder, model = changed(adapter, tmp_path / "other", ADAPTER, change), str(checkpoint(FAMILY))
    for read in (
        lambda: Tokens(model=model, adapter=str(folder)),
        lambda: loading.check_folders(model, str(folder)),  # `mmrl check`
    ):
        with pytest.raises(ConfigError, match=message):
            read()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": "lora_only"}, "has bias: 'lora_only', which cannot be trained .*`merge_and_unload`"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"peft_type": "IA3"}, "only LoRA is trained here"),
        ({"target_modules": ["nothing"]}, "Target modules {'nothing'} not found"),
    ],
)
def test_an_adapter_that_changes_more_than_its_own_weights_is_refused(
    checkpoint, adapter, tmp_path, settings, message
):
    folder, model = changed(adapter, tmp_path / "other", ADAPTER, dict, **settings), str(checkpoint(FAMILY))
    for read in (
        lambda: Tokens(model=model, adapter=str(folder)),
        lambda: loading.check_folders(model, str(folder)),
    ):
        with pytest.raises(ConfigError, match=message):
            read()


def test_a_missing_or_old_folder_of_an_adapter_is_found_without_weights(checkpoint, adapter):
    model = str(checkpoint(FAMILY))
    loading.check_folders(model, str(adapter))
    with pytest.raises(ConfigError, match="there is no folder '.*/nowhere'"):
        loading.check_folders(model, str(adapter.parent / "nowhere"))
    (adapter / ADAPTER).rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match="an adapter_model.bin is not read"):
        loading.check_folders(model, str(adapter))


def test_a_model_folder_that_holds_an_adapter_too_is_refused(checkpoint, adapter, tmp_path):
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "both")
    for name in (ADAPTER, "adapter_config.json"):
        shutil.copy(adapter / name, folder / name)
    for read in (lambda: Tokens(model=str(folder)), lambda: loading.check_folders(str(folder))):
        with pytest.raises(ConfigError, match="holds an adapter .* beside a model"):
            read()


def test_an_adapter_belongs_to_the_weights_it_was_trained_over(checkpoint, adapter, tmp_path):
    model = str(checkpoint(FAMILY))
    for dtype in ("float32", "bfloat16"):
        assert Tokens(model=model, adapter=str(adapter), dtype=dtype).adapter is not None
    other = changed(checkpoint(FAMILY), tmp_path / "base", FILE, lambda w: {n: 1.1 * v for n, v in w.items()})
    for read in (
        lambda: Tokens(model=str(other), adapter=str(adapter)),
        lambda: Tokens(model=str(other), lora_rank=2, dtype="float32").load(adapter),
    ):
        with pytest.raises(ValueError, match="was trained over other weights than those of the model"):
            read()


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}, {"lora_alpha": 9}]
)
def test_first_weights_of_an_adapter_need_the_same_settings(checkpoint, adapter, tmp_path, settings):
    policy = Tokens(model=str(checkpoint(FAMILY)), lora_rank=2, dtype="float32")
    policy.load(adapter)
    folder = changed(adapter, tmp_path / "other", ADAPTER, dict, **settings)
    with pytest.raises(ValueError, match=f"was trained with {next(iter(settings))}"):
        policy.load(folder)


def test_an_adapter_goes_on_with_its_own_rank(checkpoint, adapter):
    with pytest.raises(ValueError, match="it has lora_rank 2, not 4; set `lora_rank: 2`"):
        Tokens(model=str(checkpoint(FAMILY)), adapter=str(adapter), lora_rank=4)


# ---- models that are read otherwise


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Mllama", "reads images by an encoder or by cross-attention"),
        ("Florence2", "reads images by an encoder or by cross-attention"),
        ("Git", "names no token that stands for an image"),
    ],
)
def test_models_without_images_in_the_place_of_tokens_are_refused(kind, message):
    import transformers

    config = getattr(transformers, f"{kind}Config")()
    with pytest.raises(ConfigError, match=message):
        check_family(config, transformers.MODEL_MAPPING[type(config)])


# ---- what `mmrl check` opens


@pytest.fixture
def checked(checkpoint, tmp_path, capsys):
    """Run `mmrl check` on a run of the policy with other keys, and give its exit code and its words."""
    rows = [{"question": f"Is it {word}?", "answer": word} for word in ("one", "two", "three")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {
        "policy": {"name": "vision.tokens", "model": str(checkpoint(FAMILY)), "dtype": "float32"},
        "data": {"name": "vision.visual_qa", "path": str(tmp_path / "rows.jsonl")},
        "rollout": {"engine": ["vision.generate"]},
        "rewards": ["vision.short_answer"],
    }

    def check(**changes):
        (tmp_path / "run.yaml").write_text(json.dumps(plan(tmp_path / "out", **merge(usual, changes))))
        return main(["check", str(tmp_path / "run.yaml")]), capsys.readouterr().out

    return check


def test_first_weights_and_references_are_opened(checkpoint, adapter, checked, tmp_path):
    whole, lacking = (
        str(checkpoint(FAMILY)),
        str(changed(checkpoint(FAMILY), tmp_path / "lacking", FILE, without("layers.1"))),
    )
    nan = changed(adapter, tmp_path / "nan", ADAPTER, lambda w: {n: v.fill_(torch.nan) for n, v in w.items()})
    half = changed(adapter, tmp_path / "half", ADAPTER, lambda w: dict(list(w.items())[::2]))
    other = changed(
        adapter, tmp_path / "foreign", ADAPTER, lambda w: {n.replace("mlp", "moe"): v for n, v in w.items()}
    )
    teacher = lambda model: {"references": {"big": {"name": "vision.teacher", "model": model}}}
    critic = {"name": "vision.critic", "policy": {"name": "vision.tokens", "model": lacking}}
    second = {
        "name": "second_model",
        "advantage": ["total"],
        "objective": "value_regression",
        "policy": critic,
    }
    lora = {"policy": {"lora_rank": 2}}
    assert checked(init_from=whole) == checked(**teacher(whole)) == checked(**lora, init_from=str(adapter))
    for changes, words in (
        ({"init_from": str(tmp_path / "nowhere")}, "which is no folder"),
        ({"init_from": lacking}, "lack "),
        ({"init_from": str(checkpoint("gemma3"))}, "are of another model than"),
        ({**lora, "init_from": whole}, "it holds no 'adapter_model.safetensors'"),
        ({**lora, "init_from": str(other)}, "are on one side only"),
        ({**lora, "init_from": str(nan)}, "hold NaN"),
        ({**lora, "init_from": str(half)}, "are on one side only"),
        (teacher("/models/none"), "references.big.model is '/models/none', which does not exist here"),
        (teacher(lacking), "references.big: "),
        ({"references": {"value": {**second, "policy": critic}}}, "references.value.policy.policy: "),
    ):
        code, said = checked(**changes)
        assert code == 2 and words in said, (changes, said)
