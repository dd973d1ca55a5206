"""What a doctor of flow-matching models looks at."""

from __future__ import annotations

import pytest

from mmrl.config.schema import Config, parse
from mmrl.diffusion.checks import text_conditioning
from mmrl.diffusion.memory_estimates import paths
from mmrl.diffusion.model_family import Request
from mmrl.doctor import _look, examine
from tests.diffusion.test_flow_runs import MATCHING, plan

TRANSITION = "diffusion.transition"


def config_of(checkpoint, folder, likelihood=TRANSITION, **changes):
    return parse(plan(checkpoint("sd3"), folder, likelihood, **changes), Config)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [TRANSITION, MATCHING], ids=["transition", "matching"])
def test_a_sound_flow_is_healthy(checkpoint, tmp_path, likelihood):
    report = examine(config_of(checkpoint, tmp_path / "run", likelihood, policy={"lora_rank": 2}))
    found = {entry.full_name: [symptom.text for symptom in said] for entry, said in report.found}
    assert "diffusion.text_conditioning" in found and "vision.media_conditioning" not in found
    assert not any(found.values()), found
    assert {"weights", "encoders and decoder", "paths"} <= report.memory.keys()


@pytest.mark.slow
def test_a_text_that_does_not_reach_the_network_is_named(checkpoint, tmp_path):
    config = config_of(checkpoint, tmp_path / "run")
    examined = _look(config, config)
    assert not list(text_conditioning(examined))
    condition = examined.policy.condition(Request(examined.prompts[0].text))
    examined.policy.condition = lambda request: condition
    rows = tuple(row for row in examined.rollouts if row.prompt is examined.prompts[0])
    mute = type(examined)(**{**vars(examined), "rollouts": rows + examined.rollouts[-1:]})
    (symptom,) = text_conditioning(mute, rows=len(rows))
    assert symptom.what.startswith("the text of a prompt does not reach the network")


@pytest.mark.slow
def test_paths_are_estimated(checkpoint, tmp_path):
    # 6 rows, 3 stochastic steps and the start, latents of 4 by 4 by 4 in float32: 6 * 4 * 64 * 4 bytes.
    config = config_of(checkpoint, tmp_path / "run")
    policy = _look(config, config).policy
    assert paths(config, policy, [])["paths"] == 6 * 4 * 64 * 4
    drawn = config_of(checkpoint, tmp_path / "run", MATCHING)
    assert paths(drawn, policy, [])["paths"] == 6 * 64 * 4
