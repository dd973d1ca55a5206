"""The command that compares families on two devices finds them all, and a family that differs."""

from __future__ import annotations

import torch

from mmrl.config.registry import pieces
from mmrl.core.types import Outcome
from mmrl.diffusion.loading import class_of
from tests.diffusion import on_devices
from tests.diffusion.flows import picture


def test_every_pipeline_has_a_maker(checkpoint):
    served = {pipeline for entry in pieces("family") for pipeline in entry.target.pipelines}
    made = {class_of(str(checkpoint(name))) for name, _ in on_devices.makers()}
    assert made == served


def test_a_family_that_differs_is_named(monkeypatch, capsys):
    results = {"cpu": picture(1), "cuda": picture(2)}
    monkeypatch.setattr(
        on_devices, "step", lambda folder, name, device: (Outcome(image=results[device]), torch.zeros(1), 0.0)
    )
    monkeypatch.setattr(on_devices, "makers", lambda: [("sd3", lambda folder: None)])
    assert on_devices.main(["cpu", "cuda"]) == 1 and "failed: sd3" in capsys.readouterr().out
    assert on_devices.main(["cpu", "cpu"]) == 0
