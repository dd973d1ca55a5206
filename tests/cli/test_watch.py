"""`mmrl watch`: one page of a run, to this machine alone, that follows the run."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection

import pytest

from mmrl.cli import main
from mmrl.cli.watch import serve


@pytest.fixture
def ask(tmp_path):
    """Serve a folder, and ask for a path of it."""
    server = serve(tmp_path, "127.0.0.1", 0, 3)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def get(path="/", host=""):
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)

    yield get
    server.shutdown()
    server.server_close()


def step(folder, number):
    line = json.dumps({"step": number, "reward": 0.5, "loss": 0.1, "step_time": 1.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")


def test_the_page_follows_the_run_and_refreshes_until_it_ends(tmp_path, ask):
    (tmp_path / "config.yaml").write_text("max_steps: 2\n")
    status, text, headers = ask()
    assert (status, headers["Refresh"]) == (200, "3") and "has not finished a step yet" in text
    step(tmp_path, 0)
    _, first, headers = ask()
    assert tmp_path.name in first and headers["Refresh"] == "3" and first != text
    step(tmp_path, 1)
    _, second, headers = ask()
    assert second != first and "Refresh" not in headers


def test_nothing_but_the_page_is_served(tmp_path, ask):
    (tmp_path / "metrics.jsonl").write_text("")
    for path in ("/metrics.jsonl", "/../etc/passwd", "//etc/passwd", "/config.yaml"):
        assert ask(path)[0] == 404


def test_another_host_name_is_refused(ask):
    assert ask(host="evil.example:80")[0] == 404 and ask(host="localhost:1")[0] == 200


def test_a_file_that_cannot_be_read_is_a_sentence_without_markup(tmp_path, ask):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "<script>": "x"}\n')
    status, text, _ = ask()
    assert status == 200 and "cannot be made" in text and "<script>" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["/nowhere"], "there is no folder '/nowhere'"), ([".", "--every", "0"], "at least 1 second")],
)
def test_wrong_arguments(arguments, words, capsys):
    assert main(["watch", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path, capsys):
    with serve(tmp_path, "127.0.0.1", 0, 3) as server:
        assert main(["watch", str(tmp_path), "--port", str(server.server_port)]) == 2
    assert "take another --port" in capsys.readouterr().err
