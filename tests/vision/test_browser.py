"""The environment of web pages in a real Chromium; skipped where it or Playwright is missing."""

from __future__ import annotations

import gc
import http.server
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import ImageColor

from mmrl.config.schema import ConfigError
from mmrl.vision.environments import browser
from mmrl.vision.environments.browser import Browser
from mmrl.vision.environments.browser_tasks import COLORS, WORDS, Task
from mmrl.vision.environments.chromium import find_chromium

pytest.importorskip("playwright", reason="needs the extra `browser`")


@pytest.fixture(autouse=True)
def executable():
    try:
        return find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))


def begun(task, seed=0, **options):
    environment = Browser(**options)
    _, shown = environment.reset(seed=seed, task=task)
    return environment, shown["image"]


def wanted(environment):
    return environment.task.target.get("answer") or environment.task.target["end"]


def submit(environment, y):
    return environment.computer_use("left_click", coordinate=[30, y])


def test_a_click_on_what_is_named_is_right_and_another_wrong():
    for coordinate_range in (0, 1000):  # pixels, and thousandths of the page
        rewards = set()
        for row in range(3):
            for column in range(3):
                game, image = begun("click_color", 5, size=60, coordinate_range=coordinate_range)
                assert image.size == (60, 60)
                reach = coordinate_range or 60
                place = [(column + 0.5) * reach / 3, (row + 0.5) * reach / 3]
                reply = game.computer_use("left_click", coordinate=place)
                shown = image.getpixel((20 * column + 10, 20 * row + 10))
                if shown == (255, 255, 255):  # nothing is there
                    assert reply[0]["image"].tobytes() == image.tobytes()
                else:
                    assert reply == ["The task is over."]
                    with pytest.raises(ValueError, match="the task is over"):
                        game.computer_use("left_click", coordinate=place)
                named = ImageColor.getrgb(COLORS[wanted(game)[0]])
                rewards.add((game.get_reward(), shown == named))
        assert rewards == {(1.0, True), (0.0, False)}


def test_words_are_typed_and_corrected():
    game, image = begun("type_word")
    game.computer_use("left_click", coordinate=[40, 18])
    (shown,) = game.computer_use("type", text="Wrong")
    assert shown["image"].tobytes() != image.tobytes()
    game.computer_use("key", keys=["ctrl", "a"])
    game.computer_use("key", keys=["backspace"])
    game.computer_use("type", text=wanted(game)[0])
    game.computer_use("key", keys=["Enter"])  # submits nothing, because there is no form
    assert game.state == {"answer": wanted(game), "end": []}
    assert submit(game, 48) == ["The task is over."] and game.get_reward() == 1.0


def test_boxes_options_and_lists_are_clicked():
    game, _ = begun("tick_boxes", 2)
    words = [word for word in game.task.html.split('"') if word in WORDS]
    for word in wanted(game):
        submit(game, 17 + 26 * words.index(word))
    submit(game, 150)
    assert game.get_reward() == 1.0

    game, _ = begun("choose_option", 2)
    words = [word for word in game.task.html.split('"') if word in WORDS]
    submit(game, 17 + 17 * words.index(*wanted(game)))
    submit(game, 112)
    assert game.get_reward() == 1.0

    game, first = begun("scroll_list", 2)
    (low,) = game.computer_use("scroll", pixels=-10_000)
    (up,) = game.computer_use("scroll", pixels=10_000)
    assert up["image"].tobytes() == first.tobytes() != low["image"].tobytes()
    game.computer_use("terminate", status="success")
    assert game.over and game.get_reward() == 0.0


def test_pages_reach_nothing_and_run_no_script(monkeypatch):
    asked = []

    class Log(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)

        log_message = print

    server = http.server.HTTPServer(("127.0.0.1", 0), Log)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_port}"
    html = (
        f"<img src={at}/img><iframe src={at}/frame></iframe><link rel=stylesheet href={at}/css>"
        f"<input name=end type=text value=old><script>document.querySelector('input').value = 'run'</script>"
        f"<a href={at}/away style='position:fixed;top:50px;left:0'>aaaaaaaaaaaa</a><iframe src=file:///etc/passwd></iframe>"
    )
    monkeypatch.setattr(browser, "make_task", lambda *_: Task("Do.", html, {}))
    game, _ = begun("click_color")
    assert submit(game, 58) == ["The task is over."]
    assert game.state == {"end": ["old"]} and asked == []
    server.shutdown()


def test_a_failed_browser_gives_no_reward_and_the_next_page_another_browser(monkeypatch):
    game, _ = begun("type_word")
    submit(game, 18)
    game.chromium.run(game.chromium.browser.close())
    with pytest.raises(Exception, match="closed"):
        submit(game, 18)
    with pytest.raises(RuntimeError, match="the browser failed"):
        game.get_reward()
    game, _ = begun("type_word")
    submit(game, 48)
    assert game.get_reward() == 0.0


def test_pages_are_closed_with_their_environments():
    games = [begun("type_word")[0] for _ in range(3)]
    for game in games:
        submit(game, 18)
    running = games[0].chromium.browser
    assert len(running.contexts) == 3
    games[0].get_reward()
    del game, games
    gc.collect()
    limit = time.monotonic() + 30
    while running.contexts and time.monotonic() < limit:
        time.sleep(0.05)
    assert running.contexts == []


PROGRAM = """
from mmrl.vision.environments.browser import Browser
game = Browser()
game.reset(seed=1, task="type_word")
game.computer_use("left_click", coordinate=[40, 20])
print("ready", flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_the_browser_ends_with_its_process(end):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    begun_by_it = descendants(process.pid)
    assert len(begun_by_it) > 3
    if end:
        process.send_signal(end)
    process.stdin.close()
    assert process.wait() == (-end if end else 1)  # `input` raises at the end of the file
    limit = time.monotonic() + 30
    while (left := [pid for pid in begun_by_it if alive(pid)]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert left == []


def descendants(pid):
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in children for child in file.read_text().split()]
    return [*found, *(below for child in found for below in descendants(child))]


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
