"""Real vLLM servers on this machine, for tests and benchmarks: started, waited for, and ended with -9."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from examples.video_grounding import demo
from examples.video_grounding.spliced_videos import SHOTS, write_video
from mmrl.config.schema import Piece
from mmrl.runtime.json_client import JsonClient
from mmrl.vision.serving.command import command_lines

START = float(os.environ.get("MMRL_VLLM_START", "600"))  # seconds that a server may take to start
SMALL = "--max-model-len 1024 --max-num-batched-tokens 4096 --max-num-seqs 64 --enforce-eager"


def free_port() -> int:
    """Find a port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def family(pid: int) -> set[int]:
    """List a process, the processes that it began, and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def processor_seconds(pids: set[int]) -> float:
    """Add up the processor time that processes have used, all threads included."""
    ticks = 0
    for pid in pids:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(process: subprocess.Popen) -> None:
    """End a server with -9, and the processes that it began, which would stay."""
    for pid in family(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


@contextmanager
def serving(
    home: str,
    policy: Piece,
    number: int,
    log: Path,
    *,
    flags: str = SMALL,
    cache_bytes: int = 64 << 20,
    threads: int = 1,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[list[str], list[subprocess.Popen]]]:
    """Start servers with the lines of `mmrl serve-command --cpu`; yields their addresses and processes.

    Args:
        home: Environment with vLLM.
        policy: The policy that they serve.
        number: Number of servers.
        log: Folder of their logs.
        flags: Further words of each line.
        cache_bytes: Memory of keys and values.
        threads: Of each server's matrix products.
        options: Options of the engine that asks them.
    """
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(number)]
    environment = {
        "PATH": f"{Path(home).resolve()}/bin:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/tmp"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    lines = command_lines(policy, {"servers": urls, **(options or {})}, "policy", cpu=True)
    with ExitStack() as stack:
        processes = []
        for i, line in enumerate(lines):
            out = stack.enter_context((log / f"server{i}.log").open("w"))
            line = line.replace("VLLM_CPU_KVCACHE_SPACE=4 ", "")
            command = ["sh", "-c", f"env {line} {flags} --kv-cache-memory-bytes {cache_bytes}"]
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=log))
            stack.callback(kill, processes[-1])
        for url, process in zip(urls, processes, strict=True):
            wait_for(url, process, log)
        yield urls, processes


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until a server answers; raises where it ends, with the end of its log."""
    client = JsonClient(f"{url}/weight_info", request_timeout=20, request_retries=0, wait=0)
    for _ in range(int(START)):
        assert process.poll() is None, "\n".join(path.read_text()[-3000:] for path in log.glob("*.log"))
        try:
            client.get()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError(f"{url} did not start in {START:g} s: {[*log.glob('*.log')]}")


def demo_files(folder: Path) -> Path:
    """Build the model of `make demo`, with its first weights, and videos of plain shots for it."""
    generator = torch.Generator().manual_seed(0)
    (folder / "sources").mkdir()
    for file in {shot.file for shot in SHOTS}:
        frames = 1 + max(shot.last for shot in SHOTS if shot.file == file)
        shades = torch.randint(0, 255, (frames, 3, 1, 1), generator=generator, dtype=torch.uint8)
        write_video(folder / "sources" / file, shades.expand(-1, -1, 32, 32), 25)
    few = [f"build.sources={folder / 'sources'}", "build.num_train=4", "build.num_test=1", "build.side=56"]
    demo.build("examples/video_grounding/videos.yaml", folder / "videos", 3, few)
    demo.build("examples/video_grounding/model.yaml", folder / "model", 3)
    return folder
