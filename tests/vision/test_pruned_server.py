"""Prompts for servers that drop tokens of videos, and answers that are not the policy's on purpose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmrl.build import check
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece, load
from mmrl.diagnostics.context import lossy_pieces
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.command import command_lines
from mmrl.vision.serving.pruning import check_pruning, kept, without_pruned
from tests.support.vllm_stand_in import StandIn
from tests.vision.test_vllm import PROMPTS, engine_of


def test_the_number_of_tokens_that_remain_is_that_of_the_server():
    # 8 frames of 3 tokens: 0.25 of 24 are dropped, or 0.9, but never a whole frame's worth.
    assert [kept(24, 8, rate) for rate in (0.25, 0.5, 0.9)] == [18, 12, 3]


def test_placeholders_of_dropped_tokens_are_removed_and_later_media_move():
    image, video = 90, 91
    ids = [1, image, 2, *[video] * 8, 3, image, 4, *[video] * 4, 5]
    spans = {
        "image": [{"offset": 1, "length": 1}, {"offset": 12, "length": 1}],
        "video": [{"offset": 3, "length": 8}, {"offset": 14, "length": 4}],
    }
    request = {"token_ids": ids, "features": {"mm_placeholders": spans, "mm_hashes": {}}, "n": 2}
    encoded = SimpleNamespace(media={"video_grid_thw": torch.tensor([[4, 4, 2], [2, 4, 2]])})
    sent = without_pruned(request, encoded, 0.5)
    assert sent["token_ids"] == [1, image, 2, *[video] * 4, 3, image, 4, *[video] * 2, 5]
    assert sent["features"]["mm_placeholders"] == {
        "image": [{"offset": 1, "length": 1}, {"offset": 8, "length": 1}],
        "video": [{"offset": 3, "length": 4}, {"offset": 10, "length": 2}],
    }
    assert sent["n"] == 2 and request["token_ids"] == ids and spans["video"][1]["offset"] == 14
    assert without_pruned(request, encoded, 0.0) == request


def test_answers_about_videos_may_differ_and_the_gap_is_told(checkpoint, tmp_path):
    policy = Tokens(model=str(checkpoint("qwen2_5_vl")), dtype="float32")
    server = StandIn(policy, PROMPTS)
    engine = engine_of(policy, tmp_path, server.url, video_pruning_rate=0.5)
    whole = policy.prompt_encoder.encode(PROMPTS[3])
    frames = int(whole.media["video_grid_thw"][0, 0])
    config = policy.prompt_encoder.core.config
    tokens = int((whole.ids == config.video_token_id).sum())
    fewer = tokens - kept(tokens, frames, 0.5)
    first = (whole.ids == config.video_token_id).nonzero()[0].item()
    shorter = torch.cat([whole.ids[:first], whole.ids[first + fewer :]])
    server.known[tuple(shorter.tolist())] = PROMPTS[3]
    server.off = 0.01
    (row,) = engine.rollout(PROMPTS[3:])
    assert fewer > 0 and torch.equal(row.steps.prompt.ids, whole.ids)  # the policy learns from all tokens
    assert engine.pop_metrics()["vllm/pruning_gap"] == pytest.approx(0.01, abs=1e-4)
    assert "vllm/pruning_gap" not in engine.pop_metrics()
    with pytest.raises(RuntimeError, match=r"prompt 'image' \(image\) differ by 0.01 nats"):
        engine.rollout(PROMPTS[1:2])  # images are not pruned
    server.kill()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
def test_families_without_pruning_are_refused(family):
    with pytest.raises(ConfigError, match=f"`video_pruning_rate` needs .* qwen2_5_vl, not '{family}'"):
        check_pruning(SimpleNamespace(model_type=family))


def changes(*more: str) -> list[str]:
    engine = "name: vision.vllm, servers: [http://localhost:8000], video_pruning_rate: 0.5"
    return [f"rollout.engine=[{{{engine}}}]", "policy.model=m", *more]


def test_an_objective_has_to_correct_for_a_pruned_server():
    place = "configs/train/charades_sta_grpo.yaml"
    with pytest.raises(ConfigError, match=r"`video_pruning_rate`.*add `step_weight: .truncated_importance"):
        check(load(place, changes()))
    config = load(place, changes("objective.step_weight=[truncated_importance]"))
    check(config)
    assert lossy_pieces(config) == ["video_pruning_rate 0.5"]


def test_servers_are_started_with_the_rate():
    options = {"servers": ["http://a:1"], "video_pruning_rate": 0.25}
    (line,) = command_lines(Piece("vision.tokens", {"model": "m"}), options, "policy")
    assert "--video-pruning-rate 0.25" in line
