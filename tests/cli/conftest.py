"""Tiny models that the commands for using a model are tested with."""

from __future__ import annotations

import io
import random

import pytest
from PIL import Image

from mmrl.cli import main
from tests.diffusion import tiny as pipelines
from tests.vision.conftest import checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(scope="session")
def model(checkpoint):
    """The folder of a vision-language model."""
    return str(checkpoint("qwen2_5_vl"))


@pytest.fixture(scope="session")
def flow_model(tmp_path_factory):
    """The folder of a flow model."""
    folder = tmp_path_factory.mktemp("sd3")
    pipelines.tiny_sd3(folder)
    return str(folder)


@pytest.fixture
def image(tmp_path):
    """The path of an image."""
    path = tmp_path / "media" / "a.png"
    path.parent.mkdir()
    Image.frombytes("RGB", (56, 56), random.Random(0).randbytes(3 * 56 * 56)).save(path)
    return path


@pytest.fixture
def mmrl(capsys, monkeypatch):
    """Run a command; return its exit code, its lines and what it wrote to the standard error."""

    def run(*arguments, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err

    return run


QUICK = ("policy.dtype=float64", "rollout.engine.0.max_completion_length=6", "rollout.engine.0.temperature=0")
IMAGES = ("policy.dtype=float32",) + tuple(
    f"rollout.engine.0.{option}" for option in ("num_inference_steps=2", "height=32", "width=32")
)
