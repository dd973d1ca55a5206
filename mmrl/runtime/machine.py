"""The machine of a run: commit of the working directory, devices, and energy meters."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")  # RAPL counters of Linux, one folder per processor package
JOULES = {"cpu": "energy/cpu_joules", "gpu": "energy/gpu_joules"}  # metric name per kind of device

# (function that reads a device's cumulative joules, value at which the counter wraps around to 0)
Counter = tuple[Callable[[], float], float]


@cache  # once: later commits do not affect a running process
def describe_machine() -> dict[str, Any]:
    """Return commit (with `+` if files were changed), devices, and the devices without an energy meter."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = gpus or [f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"]
    return {"commit": commit(Path.cwd()), "devices": devices, "unmetered": EnergyMeter().unmetered}


def commit(folder: Path) -> str:
    """Return the git commit of a folder, with `+` if tracked files were changed; "" outside a repository."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    name = git("rev-parse", "HEAD")
    return name + "+" * bool(name and git("status", "--porcelain", "--untracked-files=no"))


class EnergyMeter:
    """Reader of the energy counters of this machine: its processors (RAPL) and its visible GPUs (NVML).

    The counters measure whole devices, including other programs. A device without a readable counter is left
    out of `read` and listed in `unmetered` with the reason.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self.unmetered: list[str] = []
        self.counters = {"cpu": self._of_processors(powercap), "gpu": self._of_gpus()}
        self.last = {name: [read() for read, _ in some] for name, some in self.counters.items() if some}

    def read(self) -> dict[str, float]:
        """Return the joules of every metered kind of device since the last call, by metric name."""
        spent = {}
        for name, before in self.last.items():
            now = [read() for read, _ in self.counters[name]]
            pairs = zip(before, now, self.counters[name], strict=True)
            steps = [b - a + (wrap if b < a else 0.0) for a, b, (_, wrap) in pairs]
            spent[JOULES[name]] = sum(max(0.0, step) for step in steps)  # negative if the driver restarted
            self.last[name] = now
        return spent

    def _of_processors(self, powercap: Path) -> list[Counter]:
        """List the counters of processor packages, in microjoules; subzones are part of a package."""
        files = sorted(powercap.glob("intel-rapl:[0-9]*/energy_uj"))
        files = [file for file in files if file.parent.name.count(":") == 1]
        try:
            for file in files:
                file.read_text()
        except OSError as error:
            self.unmetered.append(f"cpu: '{file}' cannot be read ({error.strerror})")
            return []
        if not files:
            self.unmetered.append(f"cpu: no RAPL counters in '{powercap}'")
        ranges = [int(file.with_name("max_energy_range_uj").read_text()) / 1e6 for file in files]
        reads = [lambda file=file: int(file.read_text()) / 1e6 for file in files]
        return list(zip(reads, ranges, strict=True))

    def _of_gpus(self) -> list[Counter]:
        """List the counters of the visible GPUs, in millijoules."""
        if not torch.cuda.is_available():
            return []
        if find_spec("pynvml") is None:
            self.unmetered.append("gpu: install mmrl[energy]")
            return []
        import pynvml  # pyright: ignore[reportMissingImports]

        try:
            pynvml.nvmlInit()
            names = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
            handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{name}") for name in names]
            for handle in handles:
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError as error:  # such as a GPU before Volta
            self.unmetered.append(f"gpu: {error}")
            return []
        read = pynvml.nvmlDeviceGetTotalEnergyConsumption
        return [(lambda handle=handle: read(handle) / 1e3, 0.0) for handle in handles]
