"""Rewards of another machine: what is sent, what is read, and what is a fault."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Trajectory
from mmrl.rewards.http import Http
from mmrl.runtime import json_client
from mmrl.training.score import RewardFault, score
from tests.support.toys import prompts


def lengths(asked):
    return {"rewards": [len(one["text"]) if one["text"] else None for one in asked["outcomes"]]}


@pytest.fixture
def server():
    """Serve what `answer` says: a body, a status, or a wait in seconds before an answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            http.seen.append(asked)
            said = http.answer(asked) if callable(http.answer) else http.answer.pop(0)
            status = 200
            if isinstance(said, int):
                status, said = said, {"why": "out of order"}
            if isinstance(said, float):
                time.sleep(said)
                said = lengths(asked)
            body = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.handle_error = lambda request, address: None  # who gave up waiting does not read
    http.seen, http.answer = [], lengths
    http.url = f"http://127.0.0.1:{http.server_port}/"
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()


@pytest.fixture
def raw():
    """Serve the bytes of `answer` as they are; with `pause`, one at a time."""

    class Handler(StreamRequestHandler):
        def handle(self):
            head = b""
            while b"\r\n\r\n" not in head:
                head += self.rfile.readline()
            self.rfile.read(int(re.search(rb"Content-Length: (\d+)", head)[1]))
            step = 1 if tcp.pause else len(tcp.answer) or 1
            for at in range(0, len(tcp.answer), step):
                self.wfile.write(tcp.answer[at : at + step])
                time.sleep(tcp.pause)

    tcp = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    tcp.daemon_threads, tcp.block_on_close = True, False
    tcp.handle_error = lambda request, address: None
    tcp.answer, tcp.pause = b"", 0.0
    tcp.url = f"http://127.0.0.1:{tcp.server_address[1]}/"
    threading.Thread(target=tcp.serve_forever, args=(0.01,), daemon=True).start()
    yield tcp
    tcp.shutdown()
    tcp.server_close()


TEXTS = ("a", "", "ccc")


def asked_for(server, *texts, **options):
    asks = Http(url=server.url, wait=0.0, **options)
    return asks(prompts()[: len(texts)], [Outcome(text=text) for text in texts])


def test_numbers_and_nulls_come_back_in_order_whatever_the_batch(server):
    for batch in (1, 2, 9):
        assert asked_for(server, *TEXTS, batch=batch) == [1, None, 3]
    assert [len(one["outcomes"]) for one in server.seen[-1:]] == [3]
    assert sorted(len(one["outcomes"]) for one in server.seen[:5]) == [1, 1, 1, 1, 2]


def test_what_is_sent_is_plain(server):
    prompt = Prompt("p", (), target={"span": (1.0, 2.5), "box": torch.tensor([1, 2])}, columns={"a": [None]})
    pixels = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    outcome = Outcome(
        text="x", image=pixels, video=pixels[None], times=torch.tensor([0.5]), end=3, tags={"t": "1"}
    )
    Http(url=server.url)([prompt], [outcome])
    (sent,) = server.seen[0]["outcomes"]
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(sent.pop("image"))))
    assert picture.size == (2, 2) and picture.getpixel((1, 0)) == (1, 5, 9)
    assert len(sent.pop("video")) == 1
    assert sent == {
        "uid": "p",
        "prompt": "",
        "target": {"span": [1.0, 2.5], "box": [1, 2]},
        "columns": {"a": [None]},
        "text": "x",
        "tags": {"t": "1"},
        "end": 3,
        "recorded": {},
        "times": [0.5],
    }


@pytest.mark.parametrize("busy", [[503], [429, 500]])
def test_a_busy_server_is_asked_again(server, busy):
    server.answer = [*busy, {"rewards": [2.5]}]
    assert asked_for(server, "a") == [2.5]
    assert len(server.seen) == 1 + len(busy)


def test_a_request_that_is_wrong_is_not_sent_again(server):
    server.answer = [404, {"rewards": [1]}]
    with pytest.raises(ConnectionError, match="answered with 404 Not Found: .*out of order"):
        asked_for(server, "a")
    assert len(server.seen) == 1


def test_a_slow_server_is_given_up(server):
    server.answer = [5.0, 5.0]
    with pytest.raises(ConnectionError, match=r"does not answer within 0.05 s, asked 2 times: timed out"):
        asked_for(server, "a", request_timeout=0.05, request_retries=1)


def test_nobody_there_is_named():
    with pytest.raises(ConnectionError, match="127.0.0.1:1/' does not answer .* asked 1 times: .*refused"):
        Http(url="http://127.0.0.1:1/", request_retries=0)(prompts()[:1], [Outcome(text="a")])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"\x80\x04K\x01.", "must answer with JSON"),  # a pickle of 1
        ({"scores": [1]}, "must answer with JSON"),
        ([1], "must answer with JSON"),
        ({"rewards": [1, 2]}, "gave .1, 2. for 1 outcomes"),
        ({"rewards": 1}, "gave 1 for 1 outcomes"),
        ({"rewards": ["1"]}, "gave the reward '1', not a finite number or null"),
        ({"rewards": [True]}, "gave the reward True"),
        ({"rewards": [[1.0]]}, r"gave the reward \[1.0\], not"),
        ({"rewards": [{"value": 1}]}, "gave the reward {'value': 1}, not"),
        ({"rewards": [float("nan")]}, "gave the reward nan, not a finite number"),
        (b'{"rewards": [1e400]}', "gave the reward inf, not a finite number"),
        ({"rewards": [10**400]}, "gave the reward 1000.*, not a finite number"),
        (b'{"rewards": [' + b"9" * 5000 + b"]}", "must answer with JSON"),
        (b"[" * 200_000, "must answer with JSON"),
        (b"", "must answer with JSON"),
    ],
)
def test_what_is_not_as_agreed_is_a_fault(server, said, message):
    server.answer = [said]
    with pytest.raises(ValueError, match=message):
        asked_for(server, "a")
    assert len(server.seen) == 1


def test_numbers_of_the_agreed_form_are_floats(server):
    server.answer = [{"rewards": [2, None, -0.5]}]
    assert [type(value) for value in asked_for(server, *TEXTS)] == [float, type(None), float]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(server, raw, status):
    raw.answer = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {server.url}\r\n\r\n".encode()
    with pytest.raises(
        ConnectionError, match=f"with {status} Elsewhere to '{server.url}', which is not followed"
    ):
        asked_for(raw, "a")
    assert server.seen == []


@pytest.mark.parametrize(
    "slow", [b"HTTP/1.0 200 OK\r\nX-Filler: ", b"HTTP/1.0 200 OK\r\n\r\n"], ids=["headers", "body"]
)
def test_a_server_that_sends_a_byte_at_a_time_does_not_outlast_the_limit(raw, slow):
    raw.answer, raw.pause = slow + b" " * 6000, 0.02  # 120 s in all, each byte well within the limit
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"does not answer within 0.3 s, asked 1 times: timed out"):
        asked_for(raw, "a", request_timeout=0.3, request_retries=0)
    assert time.monotonic() - began < 60


def test_an_answer_that_is_too_large_is_not_read_to_its_end(raw, monkeypatch):
    monkeypatch.setattr(json_client, "LARGEST", 1000)
    raw.answer = b'HTTP/1.0 200 OK\r\n\r\n{"rewards": [1' + b" " * 2000 + b"]}"
    with pytest.raises(ValueError, match="answered with more than 1000 bytes"):
        asked_for(raw, "a")


@pytest.mark.parametrize(
    "said", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{"]
)
def test_what_is_no_whole_answer_is_named(raw, said):
    raw.answer = said
    with pytest.raises(ConnectionError, match="does not answer"):
        asked_for(raw, "a", request_retries=0)


def test_what_cannot_travel_is_named(server):
    with pytest.raises(TypeError, match="the target of prompt 'p' holds a object"):
        Http(url=server.url)([Prompt("p", (), target=object())], [Outcome(text="a")])


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://"])
def test_an_address_is_checked(url):
    with pytest.raises(ValueError, match="must be"):
        Http(url=url)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="'reward.batch' must be at least 1"):
        Pieces(Stream()).check("reward", Piece("http", {"url": "http://a", "batch": 0}), "reward")


def test_it_stands_in_a_configuration_with_the_policy_of_any_reward(server):
    asked = prompts()[0]
    rows = tuple(Trajectory(asked, asked.uid, (Outcome(text=text),), None, 1) for text in ("a", "bb"))

    def bound(**settings):
        return Pieces(Stream()).make("reward", Piece("http", {"url": server.url, "wait": 0.0, **settings}))

    assert score([bound(weight=2.0, timeout=300.0)], rows).values[:, 0, 0].tolist() == [1, 2]
    server.answer = lambda asked: {"rewards": [float("nan")] * len(asked["outcomes"])}
    with pytest.raises(RewardFault, match="reward 'http' raised ValueError: .* gave the reward nan"):
        score([bound()], rows)
    assert not score([bound(on_error="skip")], rows).learn.any()
    with pytest.raises(ConfigError, match="has no option 'ulr'"):
        Pieces(Stream()).make("reward", Piece("http", {"ulr": ""}))
