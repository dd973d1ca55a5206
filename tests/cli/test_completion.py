"""What the shell completes: commands, configuration files, keys, kinds and pieces."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from mmrl.cli import completion, parser


def test_files_of_the_folder_and_of_mmrl(tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    (tmp_path / "my_run.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert completion.configs("m") == ["my_run.yaml", "methods/"]
    assert completion.configs("train") == ["train/"]
    assert "train/charades_sta_grpo.yaml" in completion.configs("train/c")
    assert completion.configs("nowhere/") == []


def test_keys_as_overrides_and_alone():
    assert completion.overrides("learn.lea") == ["learn.learning_rate="]
    assert {"learn", "learn.learning_rate"} <= set(completion.keys("learn"))


def test_kinds_and_the_pieces_of_the_kind_before():
    assert completion.kinds("surr") == ["surrogate"]
    assert "cispo" in completion.names("ci", argparse.Namespace(kind="surrogate"))
    assert completion.names("", argparse.Namespace(kind="surrogates")) == []


def test_without_the_package_nothing_happens(monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert completion.complete(parser()) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("mmrl che", {"check"}),
        ("mmrl list surro", {"surrogate"}),
        ("mmrl list surrogate cis", {"cispo"}),
        ("mmrl train train/charades_sta_g", {"train/charades_sta_grpo.yaml"}),
        ("mmrl train train/charades_sta_grpo.yaml max_s", {"max_steps="}),
    ],
)
def test_argcomplete_gives_them_to_the_shell(line, wanted, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "out"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    shell["_ARGCOMPLETE_STDOUT_FILENAME"] = str(out)
    command = [sys.executable, "-m", "mmrl"]
    subprocess.run(command, env={**os.environ, **shell}, check=False, timeout=120, stderr=subprocess.DEVNULL)
    assert {text.strip() for text in out.read_text().split("\n")} == wanted


def test_help_and_completion_start_without_torch():
    listed = "print({'torch', 'numpy', 'PIL'} & {*sys.modules})"
    code = f"import sys; from mmrl.cli import parser; parser(); {listed}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
