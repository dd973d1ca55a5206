"""LoRA: put on, trained, saved, read by plain pipelines, and taken up again."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmrl.diffusion import adapters
from mmrl.diffusion.model_family import family_of
from tests.diffusion import tiny
from tests.diffusion.test_model_families import NAMES, noise, shape_of, theirs

RANK, ALPHA = 2, 6.0  # a scale of 3, which no reader of the file would guess


def adapted(pipe, *, rank=RANK, alpha=ALPHA, dtype=torch.float32):
    """Copy the network of a pipeline, and put an adapter on it."""
    network = copy.deepcopy(pipe.transformer).to(dtype)
    adapters.add_lora(network, rank, alpha, family_of(type(pipe).__name__).targets)
    return network


@torch.no_grad()
def trained(network):
    """Change the adapter, as training would."""
    generator = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter) / 4
    return network


def weights_of(network):
    return {name: value.detach().clone() for name, value in network.named_parameters() if value.requires_grad}


def with_network(pipe, network):
    """Make a pipeline of the same parts but the network."""
    other = type(pipe)(**{**pipe.components, "transformer": network})
    other.set_progress_bar_config(disable=True)
    return other


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_adapter_makes_the_same_images_in_a_plain_pipeline(pipeline, checkpoint, tmp_path, name):
    pipe = pipeline(name)
    latents = noise(shape_of(name, pipe))
    network = adapted(pipe)
    before = theirs(name, pipe, latents, 4.0)
    started = theirs(name, with_network(pipe, network), latents, 4.0)  # LoRA starts at zero
    torch.testing.assert_close(started, before, atol=5e-6, rtol=0)
    wanted = theirs(name, with_network(pipe, trained(network)), latents, 4.0)
    assert (wanted - before).abs().max() > 1e-3
    adapters.save_lora(network, tmp_path)
    plain = tiny.load(checkpoint(name))
    plain.load_lora_weights(str(tmp_path))
    torch.testing.assert_close(theirs(name, plain, latents, 4.0), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_adapter_is_taken_up_bit_for_bit(pipeline, tmp_path, name):
    pipe = pipeline(name)
    first, second = trained(adapted(pipe)), adapted(pipe)
    adapters.save_lora(first, tmp_path)
    adapters.load_lora(second, tmp_path)
    saved, here = weights_of(first), weights_of(second)
    assert saved.keys() == here.keys()
    assert len(saved) > 4
    assert all(torch.equal(here[key], value) for key, value in saved.items())
    assert all(value.requires_grad for key, value in second.named_parameters() if "lora" in key)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_every_target_learns_and_nothing_else_does(pipeline, name):
    pipe = pipeline(name)
    network, targets = adapted(pipe), family_of(type(pipe).__name__).targets
    learning = {key.split(".lora_")[0] for key, value in network.named_parameters() if value.requires_grad}
    linear = {
        key.removesuffix(".base_layer")
        for key, part in network.named_modules()
        if key.endswith(".base_layer") and isinstance(part, torch.nn.Linear)
    }
    assert learning == linear
    assert all(any(path.endswith(f".{target}") for target in targets) for path in learning)
    assert {target for target in targets if any(path.endswith(f".{target}") for path in learning)} == set(
        targets
    )


def test_adapters_over_low_precision_are_float32_and_saved_as_such(pipeline, tmp_path):
    pipe = pipeline("sd3")
    first, second = (adapted(pipe, dtype=torch.bfloat16) for _ in range(2))
    assert {value.dtype for value in weights_of(first).values()} == {torch.float32}
    adapters.save_lora(trained(first), tmp_path)
    adapters.load_lora(second, tmp_path)
    saved, here = weights_of(first), weights_of(second)
    assert all(torch.equal(here[key], value) for key, value in saved.items())
    # Were one of the two bfloat16 on the way, these would be multiples of a 256th of themselves.
    assert any((value != value.bfloat16()).any() for value in here.values())


def test_the_file_tells_rank_and_alpha_and_holds_the_weights_alone(pipeline, tmp_path):
    pipe = pipeline("sd3")
    network = trained(adapted(pipe))
    adapters.save_lora(network, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [adapters.FILE]
    with safe_open(tmp_path / adapters.FILE, framework="pt") as file:
        settings = json.loads(file.metadata()[adapters.SETTINGS])
        names = list(file.keys())
    assert len(names) == len(weights_of(network))
    assert all(name.startswith(adapters.PREFIX) for name in names)
    assert settings["transformer.r"] == RANK
    assert settings["transformer.lora_alpha"] == ALPHA


def test_an_adapter_of_another_rank_is_refused(pipeline, tmp_path):
    pipe = pipeline("sd3")
    adapters.save_lora(adapted(pipe), tmp_path)
    with pytest.raises(ValueError, match="was trained with r 2, not 3"):
        adapters.load_lora(adapted(pipe, rank=3), tmp_path)


def test_an_adapter_of_another_alpha_is_refused(pipeline, tmp_path):
    pipe = pipeline("sd3")
    adapters.save_lora(adapted(pipe), tmp_path)
    with pytest.raises(ValueError, match="lora_alpha 6.0, not 4.0"):
        adapters.load_lora(adapted(pipe, alpha=4.0), tmp_path)


def test_an_adapter_that_lacks_a_weight_is_refused(pipeline, tmp_path):
    pipe = pipeline("sd3")
    adapters.save_lora(adapted(pipe), tmp_path)
    weights = load_file(tmp_path / adapters.FILE)
    gone = sorted(weights)[0]
    with safe_open(tmp_path / adapters.FILE, "pt") as file:
        header = file.metadata()
    save_file({key: value for key, value in weights.items() if key != gone}, tmp_path / adapters.FILE, header)
    with pytest.raises(ValueError, match="1 weights are on one side only"):
        adapters.load_lora(adapted(pipe), tmp_path)


def test_a_file_that_does_not_tell_alpha_is_scaled_by_one(pipeline, tmp_path):
    pipe = pipeline("sd3")
    adapters.save_lora(trained(adapted(pipe)), tmp_path)
    save_file(load_file(tmp_path / adapters.FILE), tmp_path / adapters.FILE)
    with pytest.raises(ValueError, match="lora_alpha 2, not 6.0"):
        adapters.load_lora(adapted(pipe), tmp_path)
    adapters.load_lora(adapted(pipe, alpha=2.0), tmp_path)


def test_a_folder_without_an_adapter_is_named(pipeline, tmp_path):
    with pytest.raises(ValueError, match=r"there is no adapter in .*pytorch_lora_weights"):
        adapters.load_lora(adapted(pipeline("sd3")), tmp_path)


def test_a_target_that_is_not_there_is_refused(pipeline):
    with pytest.raises(ValueError, match="not_there"):
        adapters.add_lora(copy.deepcopy(pipeline("sd3").transformer), 2, 4.0, ["not_there"])


# ---- adapters of other programs

ALL = list(family_of("StableDiffusion3Pipeline").targets)
FORMS = {
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"to_q": 1, "to_k": 3}, "alpha_pattern": {"to_q": 32, "0.attn.to_v": 5}},
    "dora": {"use_dora": True, "lora_dropout": 0.0},
    "biases": {"lora_bias": True},
    "few modules": {"target_modules": r".*\.1\.attn\.to_(q|k)"},
    "no settings": {"header": False},
    "no settings, ranks": {"header": False, "rank_pattern": {"to_q": 1}, "target_modules": ["to_q", "to_k"]},
}


def foreign(pipe, folder, *, header=True, **options):
    """Save an adapter as a script of diffusers does, in the folder."""
    from peft import LoraConfig, get_peft_model_state_dict

    network = copy.deepcopy(pipe.transformer)
    network.add_adapter(LoraConfig(**{"r": RANK, "lora_alpha": 8, "target_modules": ALL, **options}))
    settings = network.peft_config["default"].to_dict() if header else None
    type(pipe).save_lora_weights(
        str(folder),
        transformer_lora_layers=get_peft_model_state_dict(trained(network)),
        transformer_lora_adapter_metadata=settings,
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_of_any_form_does_what_it_does_in_a_plain_pipeline(pipeline, checkpoint, tmp_path, form):
    pipe = pipeline("sd3")
    latents = noise(shape_of("sd3", pipe))
    foreign(pipe, tmp_path / "given", **FORMS[form])
    network = copy.deepcopy(pipe.transformer)
    adapters.continue_lora(network, tmp_path / "given", RANK, None)
    made = theirs("sd3", with_network(pipe, network), latents, 4.0)
    assert (made - theirs("sd3", pipe, latents, 4.0)).abs().max() > 1e-3
    assert all(value.dtype == torch.float32 for value in weights_of(network).values())
    adapters.save_lora(network, tmp_path / "saved")
    for folder in ("given", "saved"):  # and what is trained on is read as well
        plain = tiny.load(checkpoint("sd3"))
        plain.load_lora_weights(str(tmp_path / folder))
        wanted = theirs("sd3", plain, latents, 4.0)
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=0, msg=folder)
    again = copy.deepcopy(pipe.transformer)
    adapters.continue_lora(again, tmp_path / "given", RANK, None)
    adapters.load_lora(again, tmp_path / "saved")
    assert all(torch.equal(value, weights_of(network)[key]) for key, value in weights_of(again).items())


def test_an_adapter_of_another_scale_is_not_taken_for_the_policys(pipeline, tmp_path):
    pipe = pipeline("sd3")
    for form, named in (
        ("rslora", "use_rslora True, not None"),
        ("dora", "use_dora True"),
        ("biases", "lora_bias"),
    ):
        foreign(pipe, tmp_path / form, **FORMS[form])
        with pytest.raises(ValueError, match=named):
            adapters.load_lora(adapted(pipe, alpha=8), tmp_path / form)


def changed(weights, kind):
    """Change the weights of a file of an adapter."""
    first = min(weights)
    match kind:
        case "half":
            return {key: weights[key] for key in sorted(weights)[::2]}
        case "a block":
            return {key: value for key, value in weights.items() if ".0." in key}
        case "none":
            return {}
        case "other names":
            return {key.replace("transformer_blocks", "blocks"): value for key, value in weights.items()}
        case "no prefix":
            return {key.removeprefix(adapters.PREFIX): value for key, value in weights.items()}
        case "text encoder":
            return weights | {"text_encoder.layers.0.q_proj.lora_A.weight": torch.zeros(2, 32)}
        case "nan" | "inf":
            return weights | {first: weights[first] * float(kind)}
    return weights | {first: weights[first].int()}


WRONG = {
    "half": "does not fit|has no `lora_B`",
    "a block": "does not fit",
    "none": "holds no weights",
    "other names": "of another model|does not fit",
    "no prefix": "no LoRA of the pipeline's transformer",
    "text encoder": "no LoRA of the pipeline's transformer.*text_encoder",
    "nan": "1 of 30 weights .* hold NaN",
    "inf": "1 of 30 weights .* hold NaN, infinity",
    "int": "no floating-point numbers",
}


@pytest.mark.parametrize("header", [True, False])
def test_adapters_that_are_not_whole_are_refused_by_name(pipeline, tmp_path, header):
    pipe = pipeline("sd3")
    network, fresh = adapted(pipe, alpha=RANK), lambda: copy.deepcopy(pipe.transformer)
    foreign(pipe, tmp_path, lora_alpha=RANK)
    file = tmp_path / adapters.FILE
    weights = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() if header else None
    for kind, said in WRONG.items():
        save_file(changed(weights, kind), file, metadata=metadata)
        with pytest.raises(ValueError, match=said):
            adapters.continue_lora(fresh(), tmp_path, RANK, None)
        with pytest.raises(ValueError, match=said):
            adapters.load_lora(network, tmp_path)
    file.write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match="cannot read the adapter"):
        adapters.load_lora(network, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bias": "lora_only"}, "has bias: 'lora_only'"),
        ({"modules_to_save": ["proj_out"]}, "has modules_to_save"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"made_up": 3}, "settings that peft does not take"),
    ],
)
def test_settings_that_are_not_kept_are_refused_by_name(pipeline, tmp_path, options, said):
    foreign(pipeline("sd3"), tmp_path)
    weights = load_file(tmp_path / adapters.FILE)
    settings = {f"{adapters.PREFIX}{name}": value for name, value in {"r": 2, **options}.items()}
    save_file(weights, tmp_path / adapters.FILE, {adapters.SETTINGS: json.dumps(settings)})
    with pytest.raises(ValueError, match=said):
        adapters.read_lora(tmp_path)


def test_rank_and_scale_that_are_asked_for_are_those_of_the_file(pipeline, tmp_path):
    foreign(pipeline("sd3"), tmp_path)
    with pytest.raises(ValueError, match="has lora_rank 2, not 3; set `lora_rank: 2`"):
        adapters.continue_lora(pipeline("sd3").transformer, tmp_path, 3, None)
    with pytest.raises(ValueError, match="has lora_alpha 8, not 4.0; set `lora_alpha: 8`"):
        adapters.continue_lora(pipeline("sd3").transformer, tmp_path, 2, 4.0)


def test_an_adapter_over_other_weights_is_refused_and_one_over_rounded_weights_is_not(pipeline, tmp_path):
    pipe = pipeline("sd3")
    adapters.save_lora(trained(adapted(pipe)), tmp_path)
    adapters.load_lora(adapted(pipe, dtype=torch.bfloat16), tmp_path)
    adapters.load_lora(adapted(pipe, dtype=torch.float16), tmp_path)  # which rounds otherwise: not compared
    other = with_network(pipe, copy.deepcopy(pipe.transformer))
    other.transformer.proj_out.weight.data[0, 0] += 0.5
    with pytest.raises(ValueError, match="trained over other weights than those of the model"):
        adapters.load_lora(adapted(other), tmp_path)
