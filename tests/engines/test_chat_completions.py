"""A server of chat completions: what it is asked, and what of its answers is a fault."""

from __future__ import annotations

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.engines.chat_completions import ChatCompletions
from mmrl.vision.policies.recorded_answers import RecordedAnswers


@pytest.fixture
def server():
    """Answer with the last text that was asked, in capitals, or with what `answer` holds."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat.seen.append((self.path, self.headers.get("Authorization"), asked))
            content = asked["messages"][-1]["content"]
            text = content if isinstance(content, str) else content[-1]["text"]
            choice = {"message": {"content": text.upper()}, "finish_reason": "stop"}
            said = chat.answer.pop(0) if chat.answer else {"choices": [choice]}
            status, said = (said, {}) if isinstance(said, int) else (200, said)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *words):
            pass

    chat = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    chat.seen, chat.answer = [], []
    chat.url = f"http://127.0.0.1:{chat.server_port}/v1/"
    threading.Thread(target=chat.serve_forever, args=(0.01,), daemon=True).start()
    yield chat
    chat.shutdown()
    chat.server_close()


def prompt(uid, *parts):
    parts = tuple(Part(part) if isinstance(part, str) else Part(media=part) for part in parts)
    return Prompt(uid, (Message("system", (Part("Be brief."),)), Message("user", parts)))


def engine(server, policy=None, **options):
    return ChatCompletions(policy, stream=Stream(), url=server.url, model="judge-7b", wait=0.0, **options)


def test_answers_come_back_in_order(server):
    asked = [prompt(f"p{i}", f"word {i}") for i in range(20)]
    rows = engine(server, temperature=0.0, max_completion_length=7).rollout(asked)
    assert [row.outcomes[0].text for row in rows] == [f"WORD {i}" for i in range(20)]
    assert not any(row.on_policy for row in rows)
    path, key, sent = server.seen[0]
    assert path == "/v1/chat/completions" and key is None
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("judge-7b", 0.0, 7)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}


def test_seeds_follow_the_prompt_and_its_turn(server):
    def seeds(*uids):
        server.seen.clear()
        engine(server, parallel=1).rollout([prompt(uid, "a") for uid in uids])
        return [sent["seed"] for _, _, sent in server.seen]

    first, again = seeds("p", "p", "q"), seeds("q", "p", "p")
    assert len(set(first)) == 3 and again == [first[2], *first[:2]]


def test_images_and_frames_travel_as_png(server):
    pixels = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    image = Media("image", "a.png", lambda: Frames(pixels[:1], torch.zeros(1)))
    video = Media("video", "b.mp4", lambda: Frames(pixels, torch.tensor([0.0, 1.5]), 3.0))
    engine(server).rollout([prompt("p", image, video, "what?")])
    content = server.seen[0][2]["messages"][1]["content"]
    kinds = [part["type"] for part in content]
    assert kinds == ["image_url", "text", "image_url", "text", "image_url", "text"]
    assert [part.get("text") for part in content[1::2]] == ["Video at 0.00 s:", "Video at 1.50 s:", "what?"]
    from PIL import Image

    head, _, data = content[4]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).getpixel((1, 0)) == (13, 17, 21)


def test_a_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    engine(server, api_key_env="JUDGE_KEY", extra={"top_p": 0.5}).rollout([prompt("p", "a")])
    assert server.seen[0][1] == "Bearer secret" and server.seen[0][2]["top_p"] == 0.5
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="environment variable JUDGE_KEY, which is not set"):
        engine(server, api_key_env="JUDGE_KEY")


def test_an_answer_that_was_cut_or_refused_is_an_answer(server):
    cut = {"choices": [{"message": {"content": "hm"}, "finish_reason": "length"}]}
    server.answer = [cut, {"choices": [{"message": {"content": None}}]}]
    rows = engine(server, parallel=1).rollout([prompt("p", "a"), prompt("q", "a")])
    assert [row.outcomes[0].tags["finish"] for row in rows] == ["length", "stop"]
    assert [row.outcomes[0].text for row in rows] == ["hm", ""]


@pytest.mark.parametrize("said", [{}, [], {"choices": []}, {"choices": [{"message": {"content": 3}}]}])
def test_what_is_no_completion_is_named(server, said):
    server.answer = [said]
    with pytest.raises(ValueError, match="must answer with a chat completion"):
        engine(server).rollout([prompt("p", "a")])


def test_a_busy_server_is_asked_again_and_a_broken_one_is_named(server):
    server.answer = [503, 429]
    assert engine(server).rollout([prompt("p", "a")])[0].outcomes[0].text == "A"
    server.answer = [404]
    with pytest.raises(ConnectionError, match="answered with 404"):
        engine(server).rollout([prompt("p", "a")])


def test_with_a_policy_answers_are_rows_of_it(server):
    (row,) = engine(server, RecordedAnswers()).rollout([prompt("p", "two words")])
    assert (row.length, row.group, row.outcomes[0].text) == (2, "p", "TWO WORDS")
