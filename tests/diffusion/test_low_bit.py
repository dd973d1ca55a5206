"""LoRA over networks of 4 and 8 bits: what is quantised, what learns, and what plain diffusers reads."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from mmrl.compression.transforms.bnb_quantize import bnb_quantize
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.diffusion import adapters
from mmrl.runtime.modules import loading_onto
from tests.diffusion import tiny, tiny_wan  # noqa: F401  the latter registers its makers
from tests.diffusion.flows import asked, denoise, flow
from tests.diffusion.test_lora import trained, with_network
from tests.diffusion.test_model_families import noise, shape_of, theirs

pytestmark = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is an extra")
LENGTHS = {"sd3": 16, "flux": 16, "wan_a14b": 64}


def low(checkpoint, name, nbits=4, **options):
    given = {"dtype": "float32", "lora_rank": 2, "max_sequence_length": LENGTHS[name], **options}
    return flow(checkpoint(name), transform=[Piece("compression.bnb_quantize", {"nbits": nbits})], **given)


def bits_of(network):
    """Names of quantised layers, without the wrappers of LoRA."""
    kinds = ("bitsandbytes.nn.modules",)
    names = [name for name, m in network.named_modules() if type(m).__module__ in kinds]
    return {name.removesuffix(".base_layer") for name in names}


@pytest.mark.parametrize("nbits", [4, 8])
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_linear_layers_of_the_blocks_are_quantised_and_the_adapter_learns(checkpoint, name, nbits):
    policy = low(checkpoint, name, nbits, gradient_checkpointing=True)
    plain = tiny.load(checkpoint(name)).transformer
    linear = {n for n, m in plain.named_modules() if type(m) is torch.nn.Linear}
    assert bits_of(policy.network) == {n for n in linear if "transformer_blocks." in n}
    learning = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
    assert learning and all("lora_" in n and p.dtype == torch.float32 for n, p in learning.items())
    batch = policy.collate(denoise(policy, solver="diffusion.flow_sde").rollout(asked("a cat", num=2)))
    before = policy(batch).logp
    for _ in range(2):
        (-policy(batch).logp.sum()).backward()
        with torch.no_grad():
            for parameter in learning.values():
                assert parameter.grad is not None
                parameter -= 1e-2 * parameter.grad.clamp(-1, 1)
                parameter.grad = None
    assert policy(batch).logp.sum() > before.sum()


@pytest.mark.parametrize("nbits", [4, 8])
def test_a_saved_adapter_does_the_same_in_a_plain_pipeline_with_such_a_network(checkpoint, tmp_path, nbits):
    policy = low(checkpoint, "sd3", nbits)
    trained(policy.network)
    policy.save(tmp_path)
    latents = noise(shape_of("sd3", policy.pipe))
    made = theirs("sd3", policy.pipe, latents, 4.0)
    exact = tiny.load(checkpoint("sd3"))
    few = with_network(exact, bnb_quantize(exact.transformer, nbits=nbits))
    without = theirs("sd3", few, latents, 4.0)
    few.load_lora_weights(str(tmp_path))
    assert_close(theirs("sd3", few, latents, 4.0), made, atol=1e-5, rtol=0)
    plain = tiny.load(checkpoint("sd3"))
    plain.load_lora_weights(str(tmp_path))
    # The effect of the adapter is larger than the rounding of the weights under it.
    assert (theirs("sd3", plain, latents, 4.0) - made).abs().mean() < (without - made).abs().mean() / 2
    again = low(checkpoint, "sd3", nbits, adapter=str(tmp_path))
    assert_close(theirs("sd3", again.pipe, latents, 4.0), made, atol=0, rtol=0)


@pytest.mark.parametrize("networks", ["both", "high", "low"])
def test_both_networks_of_wan_are_quantised_and_the_chosen_ones_learn(checkpoint, tmp_path, networks):
    policy = low(checkpoint, "wan_a14b", networks=networks)
    for name in ("transformer", "transformer_2"):
        assert len(bits_of(getattr(policy.pipe, name))) > 10
    engine = denoise(policy, num_frames=5, solver="diffusion.flow_sde")
    policy(policy.collate(engine.rollout(asked("a cat")))).logp.sum().backward()
    learning = {name: p.grad for name, p in policy.module.named_parameters() if p.requires_grad}
    assert {name.split(".")[2] for name in learning} == set(policy.trained)
    assert all(grad.any() for name, grad in learning.items() if "lora_B" in name)
    policy.save(tmp_path)
    files = [path for path in tmp_path.rglob(adapters.FILE)]
    assert len(files) == len(policy.trained)
    assert all(value.dtype == torch.float32 for file in files for value in load_file(file).values())


def test_layers_that_diffusers_keeps_exact_stay_as_they_are(checkpoint):
    network = tiny.load(checkpoint("sd3")).transformer
    network._keep_in_fp32_modules = ["ff"]
    names = bits_of(bnb_quantize(network))
    assert names and not any(".ff." in name for name in names)


def test_low_bits_without_lora_answer_and_do_not_learn(checkpoint):
    with pytest.raises(ConfigError, match="set `lora_rank`"):
        low(checkpoint, "sd3", lora_rank=0)
    with loading_onto(None, learns=False):
        policy = low(checkpoint, "sd3", lora_rank=0)
    assert denoise(policy, solver="diffusion.flow_sde").rollout(asked("a cat"))
    with pytest.raises(ConfigError, match=r"set `policy.transform=\[\]`"):
        low(checkpoint, "sd3").merge()
