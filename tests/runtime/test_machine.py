"""Commit of a folder, and energy counters: wrap-around, missing and unreadable ones."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from mmrl.runtime import machine
from mmrl.runtime.machine import EnergyMeter, commit


def git(folder, *arguments):
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def test_the_commit_of_a_folder_tells_of_changes(tmp_path, monkeypatch):
    assert commit(tmp_path) == ""
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-m", "a")
    name = commit(tmp_path)
    assert len(name) == 40
    (tmp_path / "b").write_text("not tracked")
    assert commit(tmp_path) == name
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{name}+"
    monkeypatch.setattr(machine.shutil, "which", lambda program: None)
    assert commit(tmp_path) == ""


def test_processor_packages_are_added_and_wrap_around(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, start in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 9_000_000), ("intel-rapl:0:0", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{start}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    meter = EnergyMeter(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("7000000\n")  # 2 J
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1500000\n")  # 1 J to the wrap at 10 J, and 1.5 J
    assert meter.read() == {"energy/cpu_joules": 4.5} and meter.unmetered == []
    assert meter.read() == {"energy/cpu_joules": 0.0}


def test_missing_and_unreadable_counters_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    meter = EnergyMeter(tmp_path)
    assert meter.read() == {} and meter.unmetered == [f"cpu: no RAPL counters in '{tmp_path}'"]
    (tmp_path / "intel-rapl:0" / "energy_uj").mkdir(parents=True)  # cannot be read as a file
    assert "cannot be read" in EnergyMeter(tmp_path).unmetered[0]


@pytest.mark.parametrize("fails", [False, True])
def test_energy_of_gpus_is_read_in_millijoules(tmp_path, monkeypatch, fails):
    class NVMLError(Exception):
        pass

    spent = {"GPU-0": 1000, "GPU-1": 500}

    def energy(handle):
        if fails:
            raise NVMLError("Not Supported")
        return spent[handle]

    library = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(uuid=str(i)))
    meter = EnergyMeter(tmp_path)
    spent |= {"GPU-0": 4000, "GPU-1": 1000}
    assert meter.read() == ({} if fails else {"energy/gpu_joules": 3.5})
    assert ("gpu: Not Supported" in meter.unmetered) is fails
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert "gpu: install mmrl[energy]" in EnergyMeter(tmp_path).unmetered
