"""What a run says: plain lines, or progress with a live table where there is a terminal."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console as Screen

from mmrl.core.progress import advance, showing
from mmrl.reporting.console import Console, ProgressLines


def drawn(console: Console, width: int = 100) -> str:
    """Draw what stands on the terminal, without colours."""
    screen = Screen(file=io.StringIO(), force_terminal=True, width=width)
    screen.print(console.panel())
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue())


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.console.on_terminal", lambda: True)


def test_plain_lines_where_there_is_no_terminal(capsys):
    console = Console("grounding", 10)
    console.begin(0)
    console.step(3, {"reward": 0.12345, "step_time": 2.0, "unknown": 1.0})
    console.say("a word")
    console.warn("smoke")
    console.end()
    # Six steps are left, of two seconds each.
    assert capsys.readouterr().out == (
        "grounding 4/10  reward 0.123  step_time 2  eta 12 s\na word\nwarning: smoke\n"
    )
    quiet = Console("grounding", 10, quiet=True)
    quiet.step(3, {"reward": 0.1})
    quiet.say("a word")
    quiet.warn("smoke")
    assert capsys.readouterr().out == ""


def test_plain_lines_come_at_times_and_at_the_end(capsys):
    console = Console("grounding", 4)
    for step in range(4):
        console.step(step, {"reward": float(step)})
    assert capsys.readouterr().out == "grounding 1/4  reward 0  eta 0 s\ngrounding 4/4  reward 3  eta 0 s\n"


def test_a_terminal_shows_progress_and_is_left_as_it_was(terminal, capsys):
    console = Console("grounding", 10)
    console.begin(2)
    console.step(3, {"reward": 0.5})
    assert console.progress.tasks[0].completed == 4
    console.say("install [mmrl]")
    console.end()
    console.end()
    assert console.live is None
    assert "install [mmrl]\n" in capsys.readouterr().out


def test_the_table_sets_the_last_numbers_beside_the_first(terminal):
    console = Console("grounding", 10)
    console.begin(0)
    try:
        assert "metric" not in drawn(console), "nothing is known yet"
        console.step(0, {"reward": 0.25, "step_time": 2.0, "unknown": 1.0})
        console.step(1, {"reward": 0.75, "kl": 0.5, "loss": math.nan, "step_time": 1.0})
        lines = [line.split() for line in drawn(console).splitlines()]
    finally:
        console.end()
    assert ["metric", "last", "first", "change"] in lines
    assert ["reward", "0.75", "0.25", "+0.5"] in lines
    assert ["kl", "0.5", "-", "-"] in lines, "there was none in the first step"
    assert ["loss", "-", "-", "-"] in lines
    assert ["step_time", "1", "2", "-1"] in lines
    assert not any("unknown" in line for line in lines)
    assert any(line[0] == "grounding" and "2/10" in line and "eta" in line for line in lines if line)


def test_a_run_that_goes_on_compares_with_its_first_step(terminal):
    console = Console("grounding", 10)
    console.begin(5, {"step": 0, "reward": 0.25})
    try:
        console.step(5, {"reward": 1.0})
        assert ["reward", "1", "0.25", "+0.75"] in [line.split() for line in drawn(console).splitlines()]
    finally:
        console.end()


def test_the_last_warnings_stay_in_sight(terminal, capsys):
    console = Console("grounding", 10)
    console.begin(0)
    try:
        for word in ("one", "two", "three", "four", "[five]"):
            console.warn(word)
        text = drawn(console)
    finally:
        console.end()
    assert re.findall(r"! (.*?)\s*$", text, re.MULTILINE) == ["three", "four", "[five]", "and 2 before"]
    assert "warning: one" in capsys.readouterr().out


PROGRAM = """
from mmrl.core.progress import advance, showing
from mmrl.reporting.console import Console, ProgressLines
console = Console("grounding", 3)
console.begin(0)
for step in range(3):
    console.step(step, {"reward": step / 2, "step_time": 0.1})
console.warn("smoke")
console.end()
"""


def test_a_real_terminal_gets_the_table_and_its_cursor_back():
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "30"}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=side, stderr=side, stdin=side, env=env)
    os.close(side)
    said = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(main)
    assert child.wait() == 0
    text = said.decode()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "3/3" in plain and "warning: smoke" in plain and "! smoke" in plain
    assert re.search(r"reward +1 +0 +\+1", plain)


@pytest.fixture
def clock(monkeypatch):
    """Let a test set the seconds."""
    seconds = [0.0]
    monkeypatch.setattr("mmrl.reporting.console.time.monotonic", lambda: seconds[0])
    return seconds


def test_the_work_inside_a_step_is_a_line_after_thirty_seconds_of_silence(capsys, clock):
    console = Console("lighthouse", 200)
    console.begin(0)
    said = []
    for clock[0] in range(0, 100, 5):
        with showing(console.work):
            advance("denoising, batch 1 of 8", int(clock[0]), 100)
        said.append(bool(capsys.readouterr().out))
    assert [at * 5 for at, spoke in enumerate(said) if spoke] == [35, 70]
    console.step(0, {"reward": 1.0})
    assert console.working == ""
    advance("nobody shows this", 1, 2)
    Console("other", 1, quiet=True).work("denoising", 1, 2)
    assert capsys.readouterr().out.count("\n") == 1


def test_the_work_inside_a_step_stands_below_the_bar(terminal):
    console = Console("lighthouse", 200)
    console.begin(0)
    console.work("denoising, batch 1 of 8", 3, 10)
    console.live.stop()
    assert "denoising, batch 1 of 8 3/10" in drawn(console)
    console.step(0, {"reward": 1.0})
    assert "denoising" not in drawn(console)


def test_a_command_without_steps_shows_progress_on_standard_error(capsys, clock):
    shown = ProgressLines()
    for clock[0] in (1, 31, 40, 62):
        shown("generating, batch 1 of 2, tokens", int(clock[0]), 64)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        "generating, batch 1 of 2, tokens 31/64",
        "generating, batch 1 of 2, tokens 62/64",
    ]
