"""Time of episodes in `vision.browser`: a first screenshot, a click that misses with one more, and the end.

Run `python -m benchmarks.browser_steps [--episodes 64] [--executable chromium]`; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from mmrl.vision.environments.browser import Browser
from mmrl.vision.environments.chromium import CONCURRENT, find_chromium


def episode(seed: int, executable: str) -> None:
    """Begin a page, click at its edge, where nothing is, and end."""
    game = Browser(tasks=("type_word",), executable=executable)
    game.reset(seed=seed)
    game.computer_use("left_click", coordinate=[220, 220])
    game.get_reward()


def processor_seconds() -> float:
    """Sum the processor time of this process and all below it, with those that have ended."""
    process = psutil.Process()
    return sum(sum(one.cpu_times()[:4]) for one in (process, *process.children(recursive=True)))


def main() -> None:
    """Measure, after one episode that starts the browser."""
    parser = argparse.ArgumentParser(prog="benchmarks.browser_steps", description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--executable", default="")
    options = parser.parse_args()
    began = time.perf_counter()
    episode(0, options.executable)
    start = time.perf_counter() - began
    began, used = time.perf_counter(), processor_seconds()
    with ThreadPoolExecutor(CONCURRENT) as pool:
        list(pool.map(lambda seed: episode(seed, options.executable), range(1, 1 + options.episodes)))
    found = {
        "executable": find_chromium(options.executable),
        "seconds to start": round(start, 2),
        "seconds an episode": round((time.perf_counter() - began) / options.episodes, 3),
        "processor seconds an episode": round((processor_seconds() - used) / options.episodes, 3),
        "load": psutil.getloadavg()[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
