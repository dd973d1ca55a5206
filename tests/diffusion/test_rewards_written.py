"""EditScore and UnifiedReward: what the model is shown, and what is made of its replies."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from mmrl.config.binding import Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.diffusion.rewards.qwen_scorer import published_prompts
from mmrl.diffusion.rewards.written_scores import EditScore, UnifiedReward
from mmrl.engines.chat_completions import ChatCompletions
from tests.vision import tiny


class Says(ChatCompletions):
    """A server in the process that gives replies in turn."""

    def __init__(self, replies):
        self.replies, self.asked = iter(replies), []

    def rollout(self, prompts):
        self.asked += prompts
        return tuple(
            Trajectory(prompt, prompt.uid, (Outcome(text=next(self.replies)),), None, 0) for prompt in prompts
        )


def asked(kind, *replies, **options):
    server = Says(replies)
    return kind(engine=lambda policy: server, **options), server


def grey(value):
    return torch.full((3, 4, 4), value, dtype=torch.uint8)


def edit(words="make it {red}", source=9):
    medium = Media("image", "a.png", lambda: Frames(grey(source)[None], torch.zeros(1)))
    return Prompt("p", (Message("user", (Part(media=medium), Part(words))),))


def shown(prompt):
    """Texts and grey values of a question, in order."""
    parts = prompt.messages[0].parts
    return [int(part.media.load().pixels[0, 0, 0, 0]) if part.media else part.text for part in parts]


def says(first, second):
    return f'Well.\n{{"reasoning" : "fine, a "score" of 3", "score" : [{first}, {second}],}}'


# ---- EditScore


def test_edit_score_is_the_root_of_the_lower_scores():
    reward, server = asked(EditScore, says(20, 15), says(25, 25), says(10, 24), says("12.5", 0))
    values = reward([edit(), edit()], [Outcome(image=grey(5)), Outcome(image=grey(6))])
    assert values == [pytest.approx((15 * 10) ** 0.5 / 2.5), 0.0]
    following = published_prompts()["edit_score_following"].replace("{text_prompt}", "make it {red}")
    quality = published_prompts()["edit_score_quality"]
    assert [shown(question) for question in server.asked] == [
        ["<img1>: ", 9, "<img2>: ", 5, following],
        ["<img1>: ", 9, "<img2>: ", 6, following],
        ["<img1>: ", 5, quality],
        ["<img1>: ", 6, quality],
    ]
    assert len({question.uid for question in server.asked}) == 4


def test_passes_are_averaged_and_drawn_apart():
    replies = [says(25, 25), says(25, 25), says(16, 20), says(25, 25)]
    reward, server = asked(EditScore, *replies, num_pass=2, image_labels=False)
    assert reward([edit()], [Outcome(image=grey(5))]) == [pytest.approx((10 + 8) / 2)]
    assert len({question.uid for question in server.asked}) == 4
    assert shown(server.asked[0])[:2] == [9, 5]


@pytest.mark.parametrize(
    "bad", ["no", "[1, 2]", says(1, 26), says(-1, 2), '"score": 7', '"score": [1, 2, 3]', says("a", 1), ""]
)
def test_replies_without_two_scores_are_asked_for_again_in_the_same_words(bad):
    reward, server = asked(EditScore, bad, says(25, 25), says(16, 25))
    assert reward([edit()], [Outcome(image=grey(5))]) == [pytest.approx(8)]
    assert server.asked[0].messages == server.asked[1].messages
    assert server.asked[0].uid != server.asked[1].uid
    reward, server = asked(EditScore, bad, bad, says(1, 1), ask_again=1)
    (value,) = reward([edit()], [Outcome(image=grey(5))])
    assert 'the judge did not write "score": [a, b] from 0 to 25' in repr(value)


def test_an_edit_needs_a_source_and_an_image():
    bare = Prompt("bare", (Message("user", (Part("make it red"),)),))
    with pytest.raises(ValueError, match="edit_score compares with the source image, but prompt 'bare'"):
        asked(EditScore)[0]([bare], [Outcome(image=grey(5))])
    with pytest.raises(ValueError, match="edit_score scores edited images; an outcome of prompt 'p' is none"):
        asked(EditScore)[0]([edit()], [Outcome(video=grey(5)[None], times=torch.zeros(1))])


def test_a_local_model_reads_the_published_turn(tmp_path):
    folder = tiny.make("qwen2_5_vl", tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    adapter = get_peft_model(model, LoraConfig(target_modules=r".*language_model.*[qv]_proj"))
    adapter.save_pretrained(tmp_path / "adapter")
    options = {
        "engine": {"name": "vision.generate", "max_completion_length": 4, "temperature": 0.7},
        "policy": {
            "name": "vision.tokens",
            "model": str(folder),
            "adapter": str(tmp_path / "adapter"),
            "frozen": True,
        },
        "ask_again": 0,
        "device": "cpu",
    }
    reward = Pieces(Stream(0)).make("reward", Piece("diffusion.edit_score", options)).function
    assert all(
        "the judge did not write" in repr(v) for v in reward([edit()] * 2, [Outcome(image=grey(5))] * 2)
    )
    encoder, (_, server) = reward.asker.engine.policy.prompt_encoder, asked(EditScore)
    reward.asker.engine, server.replies = server, iter([says(1, 1), says(1, 1)])
    reward([edit()], [Outcome(image=grey(5))])
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    words = published_prompts()["edit_score_following"].replace("{text_prompt}", "make it {red}")
    wanted = f"<|im_start|>user\n<img1>: {image}<img2>: {image}{words}<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.written(server.asked[0]) == wanted


# ---- UnifiedReward

AXES = "Alignment Score (1-5): 4.5\n{} Score (1-5): 3\nStyle Score (1-5): 1.2"


def test_unified_reward_reads_three_scores_of_an_image_or_a_video():
    ask = Prompt("p", (Message("user", (Part("a dog"),)),))
    reward, server = asked(UnifiedReward, AXES.format("Coherence"))
    assert reward([ask], [Outcome(image=grey(5))]) == [pytest.approx(2.9)]
    assert shown(server.asked[0]) == [
        5, published_prompts()["unified_image"].replace("{text_prompt}", "a dog")
    ]  # fmt: skip
    video = Outcome(video=torch.stack([grey(value) for value in range(9)]), times=torch.arange(9.0))
    options = {"form": "video", "axis": "Physics Score", "frames": 4}
    reward, server = asked(UnifiedReward, AXES.format("Physics"), **options)
    assert reward([ask], [video]) == [3]
    assert shown(server.asked[0])[:-1] == [0, 2, 4, 6], "int(i * 9 / 4)"
    reward, server = asked(UnifiedReward, "a (noun): 1\nFinal Score: 4.", form="final_score")
    assert reward([ask], [Outcome(image=grey(5))]) == [4]
    reward, _ = asked(UnifiedReward, AXES.format("Physics"), ask_again=0)
    assert "Alignment Score, Coherence Score, Style Score" in repr(reward([ask], [Outcome(image=grey(5))])[0])


def test_unified_reward_scores_edits_by_its_own_prompts():
    reward, server = asked(UnifiedReward, says(20, 15), says(10, 24), form="edit")
    assert reward([edit()], [Outcome(image=grey(5))]) == [pytest.approx((15 * 10) ** 0.5 / 2.5)]
    assert [shown(question)[:-1] for question in server.asked] == [[9, 5], [5]]
    assert str(shown(server.asked[0])[-1]).endswith("Editing instruction:make it {red}\n")


def test_unified_reward_refuses_what_its_form_does_not_score():
    with pytest.raises(ConfigError, match="`axis: Style Score`, but the form 'edit' has no single scores"):
        asked(UnifiedReward, form="edit", axis="Style Score")
    with pytest.raises(ConfigError, match="the form 'image' has Alignment Score, Coherence Score, Style"):
        asked(UnifiedReward, axis="Physics Score")
    with pytest.raises(
        ValueError, match="with `form: video` scores videos; an outcome of prompt 'p' is none"
    ):
        asked(UnifiedReward, form="video")[0]([edit()], [Outcome(image=grey(5))])
