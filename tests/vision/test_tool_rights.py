"""Tools that declare what they may do: files, network and processes beyond it are refused, and said."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media
from mmrl.vision.tool_calls import Tool
from mmrl.vision.tool_pool import run_calls
from mmrl.vision.tool_replies import Limits
from mmrl.vision.tool_rights import Rights

LIMITS = Limits(4000, 1 << 20)


def read(path: str) -> str:
    """Read a file.

    Args:
        path: Which.
    """
    return Path(path).read_text()


def listed(path: str) -> str:
    """List a folder.

    Args:
        path: Which.
    """
    return " ".join(sorted(os.listdir(path)))


def write(path: str) -> str:
    """Write a file.

    Args:
        path: Which.
    """
    Path(path).write_text("new")
    return "written"


def remove(path: str) -> str:
    """Remove a file.

    Args:
        path: Which.
    """
    os.remove(path)
    return "removed"


def start(path: str) -> str:
    """Start a program.

    Args:
        path: Which.
    """
    return subprocess.run([sys.executable, "-c", "print(3)"], check=True, capture_output=True).stdout.decode()


async def connect(path: str) -> str:
    """Connect.

    Args:
        path: The port.
    """
    with socket.create_connection(("127.0.0.1", int(path)), timeout=5):
        return "connected"


def lazy(path: str) -> str:
    """Import a module, and compute.

    Args:
        path: Nothing.
    """
    import colorsys
    import sqlite3
    import wave

    sqlite3.connect(":memory:").close()
    return f"{colorsys.rgb_to_hsv(1, 0, 0)[2]} {wave.__name__}"


def look(image: Image.Image, *, path: str = "") -> str:
    """Look at an image, and at a file of the configuration.

    Args:
        image: Which.
    """
    return f"{image.size} {Path(path).read_text()}"


def bound(function, **options):
    piece = Piece(f"{__name__}:{function.__name__}", options)
    return Tool.of(Pieces(Stream(0)).make("tool", piece))


def told(function, argument, **options):
    (answer,) = run_calls([(bound(function, **options), [str(argument)])], LIMITS)
    return answer.fault or "".join(part.text for part in answer.parts)


@pytest.fixture
def home(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("inside")
    (tmp_path / "secret.txt").write_text("outside")
    (tmp_path / "data" / "link.txt").symlink_to(tmp_path / "secret.txt")
    return tmp_path


def test_files_outside_of_what_is_declared_are_not_read(home):
    reads = {"reads": [str(home / "data")]}
    assert told(read, home / "data" / "a.txt", **reads) == "inside"
    assert told(listed, home / "data", **reads) == "a.txt link.txt"
    for path in ("secret.txt", "data/../secret.txt", "data/link.txt"):
        fault = told(read, home / path, **reads)
        assert "PermissionError: the tool has no right to this: it reads" in fault and "`reads`" in fault
    assert "it reads" in told(listed, home, **reads)
    assert told(read, home / "secret.txt") == "outside", "without a declaration it has the rights of the run"


def store(path: str) -> str:
    """Open a database.

    Args:
        path: Which.
    """
    import sqlite3

    sqlite3.connect(path).close()
    return "written"


@pytest.mark.parametrize("change", [write, remove, store])
def test_files_are_changed_only_where_that_is_declared(home, change):
    path = home / "data" / "a.txt"
    assert "it changes" in told(change, path, reads=[str(home)])
    assert path.read_text() == "inside"
    assert told(change, path, writes=[str(home / "data")]) in ("written", "removed")
    assert "it changes" in told(change, home / "secret.txt", writes=[str(home / "data")])


def test_processes_and_the_network_have_to_be_declared():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "it uses the network; declare `network: true`" in told(connect, port, process=True)
        assert told(connect, port, network=True) == "connected"
    assert "it starts a process; declare `process: true`" in told(start, "", network=True)
    assert told(start, "", process=True) == "3\n"


def test_modules_may_be_imported_and_other_threads_stay_free(home):
    assert told(lazy, "", reads=[]) == "1 wave"
    seen = []
    with Rights().held():
        other = threading.Thread(target=lambda: seen.append((home / "secret.txt").read_text()))
        other.start()
        other.join()
        with pytest.raises(PermissionError):
            (home / "secret.txt").read_text()
    assert seen == ["outside"] and (home / "secret.txt").read_text() == "outside"


def named(path: str) -> str:
    """Import a module.

    Args:
        path: Its name.
    """
    return importlib.import_module(path).WORD


def test_code_is_read_only_where_imports_look_for_it(home, monkeypatch):
    for name in ("secret.py", "secret.so", "data/inside.py"):
        (home / name).write_text("WORD = 'code'")
    (home / "data" / "text.txt").symlink_to(home / "secret.py")
    (home / "data" / "code.py").symlink_to(home / "secret.txt")
    reads = {"reads": [str(home / "data")]}
    for path in ("secret.py", "secret.so", "data/text.txt", "data/code.py"):
        assert "it reads" in told(read, home / path, **reads)
    assert told(read, home / "data" / "inside.py", **reads) == "WORD = 'code'"
    (home / "lib" / "mine").mkdir(parents=True)
    (home / "lib" / "mine" / "__init__.py").write_text("WORD = 'imported'")
    (home / "lib" / "mine" / "key.txt").write_text("secret")
    (home / "lib" / "leak.py").symlink_to(home / "secret.txt")
    monkeypatch.syspath_prepend(home / "lib")
    assert told(named, "mine", **reads) == "imported"
    for path in ("lib/mine/key.txt", "lib/leak.py"):
        assert "it reads" in told(read, home / path, **reads)


def pipe(path: str) -> str:
    """Make a pipe.

    Args:
        path: Which.
    """
    os.mkfifo(path)
    return "made"


def move(path: str) -> str:
    """Change the working folder.

    Args:
        path: Which.
    """
    os.chdir(path)
    return "moved"


def test_pipes_are_made_only_where_files_may_be_and_the_working_folder_stays(home):
    before = os.getcwd()
    assert "it changes" in told(pipe, home / "p", reads=[str(home)])
    assert told(pipe, home / "data" / "p", writes=[str(home / "data")]) == "made"
    assert "working folder" in told(move, home / "data", reads=[str(home)], writes=[str(home)])
    assert os.getcwd() == before
    os.mkfifo(home / "q")  # outside of tools all is as it was


def test_files_that_options_name_and_images_of_the_conversation_may_be_read(home):

    def load():
        (home / "secret.txt").read_text()
        return Frames(torch.zeros(1, 3, 3, 4, dtype=torch.uint8), torch.zeros(1))

    image = Media("image", "image", load)
    tool = bound(look, path=str(home / "data" / "a.txt"), reads=[])
    (answer,) = run_calls([(tool, [image])], LIMITS)
    assert answer.fault == "" and answer.parts[0].text == "(4, 3) inside"


def test_shipped_tools_have_no_rights_but_to_their_files(home):
    (home / "rows.jsonl").write_text('{"caption": "a red cube"}\n')
    tool = Pieces(Stream(0)).make("tool", Piece("vision.search", {"path": str(home / "rows.jsonl")}))
    made = Tool.of(tool)
    assert made.rights == Rights(reads=(home / "rows.jsonl",))
    (answer,) = run_calls([(made, ["red"])], LIMITS)
    assert answer.parts[0].text == "a red cube"


def test_a_wrong_declaration_is_an_error_of_the_configuration():
    for wrong in ({"network": "maybe"}, {"reads": 3}, {"proces": True}):
        with pytest.raises(ConfigError):
            bound(read, **wrong)
