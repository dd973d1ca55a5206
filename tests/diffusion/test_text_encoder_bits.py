"""Text encoders in 4 and 8 bits: what is quantised, what prompts become, and what is refused."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.diagnostics.memory_estimates import estimate_memory
from mmrl.diffusion.model_family import Request
from mmrl.runtime.low_bit import scales_of
from tests.diffusion.flows import asked, denoise, flow
from tests.diffusion.test_flow_runs import plan
from tests.diffusion.test_memory_estimates import config_of, policy_of

pytestmark = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is an extra")
BNB = "bitsandbytes.nn.modules"
LENGTHS = {"sd3": 16, "flux": 16, "qwen_image_edit": 400}


def low(checkpoint, name, bits=4, **options):
    given = {"dtype": "float32", "lora_rank": 2, "max_sequence_length": LENGTHS[name], **options}
    return flow(checkpoint(name), text_encoder_bits=bits, **given)


def encoders(pipe):
    return {name: part for name, part in pipe.components.items() if name.startswith("text_encoder") and part}


@pytest.mark.parametrize(
    ("name", "bits"), [("sd3", 4), ("flux", 8), pytest.param("qwen_image_edit", 4, marks=pytest.mark.slow)]
)
def test_blocks_of_text_encoders_are_quantised_and_prompts_stay_close(checkpoint, pipeline, name, bits):
    policy, few = low(checkpoint, name, bits), set()
    plain = pipeline(name)
    for part, encoder in encoders(plain).items():
        exact = set(encoder._keep_in_fp32_modules or ())
        for inner, layer in encoder.named_modules():
            inside = type(layer) is nn.Linear and re.search(r"(layers|block|blocks)\.\d", inner)
            made = policy.pipe.components[part].get_submodule(inner)
            if inside and not exact & set(inner.split(".")):
                assert type(made).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
                few.add(part)
            else:
                assert type(made) is type(layer)
    assert few == encoders(plain).keys()
    assert not any(type(m).__module__ == BNB for m in (*policy.network.modules(), *policy.pipe.vae.modules()))
    images = (torch.full((3, 48, 40), 90, dtype=torch.uint8),) * policy.family.images[0]
    request = Request("a cat", images, (1, 32, 32))
    with torch.no_grad():
        (wanted,) = policy.family.__class__().encode(plain, [request], LENGTHS[name])
    found = policy.condition(request)["encoder_hidden_states"].float()
    states = wanted["encoder_hidden_states"].float()
    distance = (found - states).norm() / states.norm()
    assert 0 < distance < (0.5 if bits == 4 else 0.1)


def test_a_run_learns_over_few_bits(checkpoint):
    policy = low(checkpoint, "sd3")
    batch = policy.collate(denoise(policy, solver="diffusion.flow_sde").rollout(asked("a cat", num=2)))
    policy(batch).logp.sum().backward()
    assert all(p.grad is not None for p in policy.module.parameters() if p.requires_grad)
    with pytest.raises(ConfigError, match="`policy.text_encoder_bits=null`"):
        policy.merge()


def test_encoders_of_four_bits_are_offloaded_and_read_when_a_prompt_is_missing(checkpoint, tmp_path):
    wanted = low(checkpoint, "sd3").condition(Request("a cat"))
    away = low(checkpoint, "sd3", offload=["text_encoders"])
    stored = low(checkpoint, "sd3", encoded_prompts=str(tmp_path))
    for policy in (away, stored):
        found = policy.condition(Request("a cat"))
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    exact = low(checkpoint, "sd3", None, encoded_prompts=str(tmp_path)).condition(Request("a cat"))
    assert not torch.equal(exact["encoder_hidden_states"], wanted["encoder_hidden_states"])
    assert len([*tmp_path.rglob("*.safetensors")]) == 2, "precision is in the name"


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_scales_are_estimated(checkpoint, bits):
    options = {"dtype": "bfloat16", "lora_rank": 2}
    whole, few = (
        estimate_memory(config_of(checkpoint("sd3"), text_encoder_bits=given, **options))
        for given in (None, bits)
    )
    policy = policy_of(config_of(checkpoint("sd3"), text_encoder_bits=bits, **options))
    assert few["encoders and decoder"] == sum(
        tensor.nbytes
        for group in ("text_encoders", "vae")
        for part in policy.frozen.parts(group)
        for tensor in (*part.parameters(), *part.buffers(), *scales_of(part))
    )
    parts = policy.frozen.parts("text_encoders")
    linear = [m for part in parts for m in part.modules() if type(m).__module__ == BNB]
    saved = sum(m.in_features * m.out_features for m in linear) * (2 - bits / 8)
    scales = sum(tensor.nbytes for part in parts for tensor in scales_of(part))
    assert whole["encoders and decoder"] - few["encoders and decoder"] == saved - scales > 0
    assert few["weights"] == whole["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 0}, "`text_encoder_bits` wants `lora_rank`"),
        (
            {"text_encoder_bits": 8, "offload": ["text_encoders"]},
            "in 8 bits stay on the device",
        ),
        (
            {"text_encoder_bits": 8, "encoded_prompts": "prompts"},
            "in 8 bits stay on the device",
        ),
        ({"text_encoder_bits": 5}, "policy.text_encoder_bits"),
    ],
)
def test_what_cannot_be_is_refused_by_check(checkpoint, tmp_path, capsys, options, message):
    policy = {"text_encoder_bits": 4, "lora_rank": 2, **options}
    raw = plan(checkpoint("sd3"), tmp_path / "run", "diffusion.transition", policy=policy)
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert message in line
