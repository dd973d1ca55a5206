"""A vision-language model of transformers as the judge of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Trajectory
from mmrl.training.score import RewardFault, score
from tests.vision import mixed

FAMILY = "qwen2_5_vl"


def judge(checkpoint, **options):
    policy = {"name": "vision.tokens", "model": str(checkpoint(FAMILY)), "frozen": True}
    engine = {"name": "vision.generate", "temperature": 0.0, "max_completion_length": 4}
    return Pieces(Stream()).make("reward", Piece("judge", {"policy": policy, "engine": engine, **options}))


def rows(*texts):
    asked = mixed.prompts(FAMILY)
    return tuple(Trajectory(p, p.uid, (Outcome(text=text),), None, 1) for p in asked for text in texts)


def test_a_frozen_model_judges_questions_with_media(checkpoint, monkeypatch):
    made = judge(checkpoint)
    policy = made.function.asker.engine.policy
    assert not any(weight.requires_grad for weight in policy.module.parameters())
    assert {weight.dtype for weight in policy.module.parameters()} == {torch.bfloat16}
    rolled, seen = made.function.asker.engine.rollout, []

    def judged(prompts):
        # The random model writes anything; what is read is put in its place.
        seen.extend(found := rolled(prompts))
        return tuple(replace(row, outcomes=(Outcome(text="<score>4</score>"),)) for row in found)

    monkeypatch.setattr(made.function.asker.engine, "rollout", judged)
    asked = mixed.prompts(FAMILY)
    table = score([made], rows("a cat", "a dog"))
    assert table.scored["judge"][:, 0].tolist() == [pytest.approx(1 / 3)] * 2 * len(asked)
    assert len(seen) == 2 * len(asked)
    media = [len(row.prompt.media) for row in seen[::2]]
    assert media == [len(prompt.media) for prompt in asked] and max(media) > 0


def test_what_a_random_model_writes_is_a_fault(checkpoint):
    with pytest.raises(RewardFault, match="gave no verdict, because the judge did not write yes or no"):
        score([judge(checkpoint, form="yes_no", ask_again=1)], rows("a cat"))


def test_the_first_word_of_a_judge_is_weighed_by_its_whole_distribution(checkpoint, monkeypatch):
    # The tokenizer of the small model has a token for every letter.
    monkeypatch.setattr("mmrl.rewards.judge.YES", ("y", "Y", "yes"))
    monkeypatch.setattr("mmrl.rewards.judge.NO", ("n",))
    made = judge(checkpoint, form="p_yes")
    engine = made.function.asker.engine
    encode = engine.policy.prompt_encoder.tokenizer.convert_tokens_to_ids
    asked = mixed.prompts(FAMILY)
    found = engine.first_words(asked, [("y", "Y", "yes"), ("n",)])
    for prompt, (yes, no) in zip(asked, found, strict=True):
        encoded = engine.policy.prompt_encoder.encode(prompt)
        with torch.no_grad():
            share = engine.reader([encoded]).read(None).float().softmax(-1)[0]
        # Each prompt alone, in bfloat16.
        assert yes == pytest.approx(float(share[encode("y")] + share[encode("Y")]), rel=0.05)
        assert no == pytest.approx(float(share[encode("n")]), rel=0.05)
    with pytest.raises(ConfigError, match="token of an answer tells them apart"):
        engine.first_words(asked, [("y", "n"), ("n",)])
    table = score([made], rows("a cat"))
    assert bool(((table.scored["judge"] > 0) & (table.scored["judge"] < 1)).all())
    with pytest.raises(ConfigError, match="must be a token of its own"):
        judge(checkpoint, form="expected_score")  # of which 10 is two tokens
