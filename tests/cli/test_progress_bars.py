"""Progress bars of libraries: none in log files, as ever on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mmrl.cli import quiet_progress_bars

NAMES = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_off_where_stderr_is_no_terminal(terminal, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    quiet_progress_bars()
    assert [os.environ.get(name) for name in NAMES] == [None if terminal else "1"] * 3


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "0")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    quiet_progress_bars()
    assert os.environ["TQDM_DISABLE"] == "0"


def test_tqdm_writes_nothing_then():
    code = (
        "from mmrl.cli import quiet_progress_bars; quiet_progress_bars()\n"
        "from tqdm.auto import tqdm; list(tqdm(range(3), desc='Loading weights'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.slow
def test_the_bars_of_transformers_datasets_and_diffusers_write_nothing_then():
    code = (
        "from mmrl.cli import quiet_progress_bars; quiet_progress_bars()\n"
        "from transformers.utils.logging import tqdm; list(tqdm(range(3), desc='Loading weights'))\n"
        "from datasets import Dataset; Dataset.from_dict({'a': [1, 2]}).map(lambda row: row)\n"
        "from diffusers.utils.logging import tqdm; list(tqdm(range(3)))\n"
        "from huggingface_hub.utils import tqdm; list(tqdm(range(3)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "%|" not in done.stderr and "it/s" not in done.stderr, done.stderr
