"""Using models with tools: the whole conversation, its images, from Python and in the terminal."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

import mmrl
from mmrl.cli import main
from mmrl.cli.chat import Conversation
from mmrl.core.games import Game
from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.data.fields import RowError
from mmrl.inference.session import Session
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(scope="module")
def plan(checkpoint, tmp_path_factory):
    """The file of a run whose engine has an environment."""
    file = tmp_path_factory.mktemp("plan") / "run.yaml"
    engine = {"name": "tests.vision.playing:Playing", "environment": "tests.vision.playing:Ladder"}
    raw = {
        "include": ["methods/grpo/grpo.yaml"],
        "policy": {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"},
        "data": "tests.vision.playing:seen",
        "rewards": [{"name": "precomputed", "key": "Ladder"}],
        "rollout": {"engine": [{"name": "vision.generate", "max_completion_length": 6}, engine]},
        "max_steps": 1,
        "output_dir": "unused",
    }
    file.write_text(json.dumps(raw))
    return str(file)


def test_a_conversation_has_its_turns_its_images_and_its_environment(plan):
    session = mmrl.load_engine(plan)
    held = [session.converse("what", columns={"top": 3}) for _ in range(12)]
    several = [talk for talk in held if len(talk.messages) > 1]
    assert several and any(talk.images for talk in held)
    for talk in held:
        assert talk.messages[0]["role"] == talk.messages[-1]["role"] == "assistant"
        assert talk.messages[-1]["content"] == talk.text
        assert talk.environment.top == 3 and talk.rewards == {"Ladder": float(talk.environment.rung == 3)}
        shown = [
            block for message in talk.messages if message["role"] == "tool" for block in message["content"]
        ]
        assert [block["image"] for block in shown if block["type"] == "image"] == talk.images
        assert all(isinstance(image, Image.Image) for image in talk.images)
    assert {talk.finish for talk in held} <= {"stop", "length", "turns"}
    again = mmrl.load_engine(plan)
    assert [again.answer("what") for _ in range(2)] == mmrl.load_engine(plan).answer(["what"] * 2)


def test_an_engine_without_tools_holds_a_conversation_of_one_turn(plan):
    session = mmrl.load_engine(plan, ["rollout.engine=[{name: vision.generate, max_completion_length: 4}]"])
    talk = session.converse("what")
    assert talk.messages == [{"role": "assistant", "content": talk.text}]
    assert talk.finish and not talk.images and talk.environment is None
    with pytest.raises(RowError):
        session.converse("")


def test_generate_prints_the_turns_and_writes_them_with_rows(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = "".join(json.dumps({"prompt": f"what {i}", "id": str(i)}) + "\n" for i in range(12))
    (tmp_path / "rows.jsonl").write_text(asked)
    assert main(["generate", plan, "--input", "rows.jsonl", "--output", "out/answers.jsonl"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    talks = [row["conversation"] for row in rows if "conversation" in row]
    assert talks
    blocks = [block for talk in talks for message in talk for block in message["content"]]
    paths = [tmp_path / "out" / block["path"] for block in blocks if block["type"] == "image"]
    assert paths and all(Image.open(path).size == (56, 28) for path in paths)
    assert all(
        talk[-1]["content"][0]["text"] == row["completion"]
        for talk, row in zip(talks, [row for row in rows if "conversation" in row], strict=True)
    )
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("what\n" * 12))
    assert main(["generate", plan]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tool: ") for line in lines)
    shown = [line for line in lines if line.startswith("tool: images")]
    assert len(shown) == len(list((tmp_path / "images").glob("*.png")))


def test_chat_prints_the_turns(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("what\n" * 12))
    assert main(["chat", plan, "--output", "shown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tool: ") for line in lines)
    assert list((tmp_path / "shown").glob("*.png"))


def test_chat_asks_with_the_replies_of_tools_before(plan, monkeypatch):
    session = mmrl.load_engine(plan)
    read, run = [], session.rollout
    monkeypatch.setattr(session, "rollout", lambda prompts: (read.extend(prompts), run(prompts))[1])
    talk = Conversation(session)
    held = [talk.ask("what") for _ in range(6)]
    assert any(part.media for row in held[:-1] for message in row.turns for part in message.parts)
    wanted = []
    for prompt, row in zip(read, held, strict=True):
        wanted.append(("user", "what", 0))
        assert [content_of(message) for message in prompt.messages] == wanted
        wanted += map(content_of, row.turns)
    encoder = session.policy.prompt_encoder
    climb = {"name": "climb", "description": "Climb", "parameters": {"type": "object", "properties": {}}}
    text = encoder.transcript(encoder.encode(read[-1], ({"type": "function", "function": climb},)).ids)
    replies = [message for row in held[:-1] for message in row.turns if message.role == "tool"]
    assert text.count("<tool_response>\n") == len(replies) > 0 and "<|im_start|>tool" not in text
    assert text.count("<image: ") == len(read[-1].media) > 0


def content_of(message):
    words = "".join(part.text for part in message.parts)
    return message.role, words, sum(part.media is not None for part in message.parts)


def test_rows_for_training_are_not_taken_for_answers():
    def row(uid, text):
        return Trajectory(Prompt(uid, ()), uid, (Outcome(text=text),), None, 1)

    class Adding:
        policy, notes = None, frozenset()

        def rollout(self, prompts):
            return tuple(
                made for prompt in prompts for made in (row(prompt.uid, "answer"), row(prompt.uid, "draft"))
            )

    asked = [Prompt("a", ()), Prompt("b", ())]
    rows = Session(Adding()).one_each(asked)
    assert [(one.prompt.uid, one.outcomes[-1].text) for one in rows] == [("a", "answer"), ("b", "answer")]


def test_an_engine_that_plays_games_is_not_asked_and_plays_none():
    class Playing:
        policy, notes, game = None, frozenset(), Game()

        def rollout(self, prompts):
            raise AssertionError("a game began")

    class Around:
        policy, notes, engine = None, frozenset(), Playing()
        rollout = Playing.rollout

    for engine in (Playing(), Around()):
        with pytest.raises(
            RowError, match="plays the game Game, which has no single answer; name the folder"
        ):
            Session(engine).answer("Who is it?")
