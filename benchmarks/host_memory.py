"""Host memory of a prompt: rows of text, rows that contain their images, rollouts in process and on Ray.

    python -m benchmarks.host_memory [--prompts 64] [--side 448] [--texts 100000] [--only text]

Text: rows of 2 kB of text in jsonl, in parquet (row groups of 1,000) and as a folder of `datasets`, read by
`vision.visual_qa`: what the process then has more, as prompts are, and with all in a list; milliseconds
of processor time to read a row at first, and to ask for one of 5,000 in random order, which nobody keeps.
Rows: a parquet file of PNG images of noise (the worst case of compression) is read by `vision.visual_qa`;
what the process then has more, with the images in memory and with them in the file of
`mmrl.data.stored_bytes`. Every process of a machine has that. Rollouts: answers of 16 tokens of a tiny
Qwen2.5-VL, all kept as a step keeps them until it has learned; what the learner has more after it than after
another as large, and on Ray what travels to the worker and back. Memory is what the kernel counts as private
to the process, after the allocator has given free pages back. Every line is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmrl.core.rng import Stream

RESULTS = Path(__file__).parent / "results" / "host_memory.json"
LENGTH = 16
DRAWN = 5000  # rows of text that are asked for in random order


def private() -> int:
    """Return the bytes that only this process has in memory."""
    import pyarrow

    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def png(side: int, seed: int) -> bytes:
    """Make an image of noise."""
    from PIL import Image

    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (side, side, 3), generator=draw, dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, prompts: int, side: int) -> int:
    """Write rows that contain their images; return the bytes of one."""
    import pyarrow
    from pyarrow import parquet

    images = [png(side, i) for i in range(prompts)]
    rows = {
        "id": [str(i) for i in range(prompts)],
        "question": ["What is shown?"] * prompts,
        "answer": ["noise"] * prompts,
        "image": [{"bytes": image, "path": None} for image in images],
    }
    parquet.write_table(pyarrow.table(rows), path, row_group_size=16)
    return sum(map(len, images)) // prompts


def write_texts(folder: Path, texts: int) -> None:
    """Write rows of 2 kB of text in every form that is measured."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    draw = random.Random(0)
    for name, count in (("few", 4), ("texts", texts)):
        rows = [
            {"id": f"row-{i}", "question": f"{draw.randbytes(960).hex()}?", "answer": draw.randbytes(8).hex()}
            for i in range(count)
        ]
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), folder / f"{name}_texts.parquet", row_group_size=1000
        )
        datasets.Dataset.from_list(rows).save_to_disk(folder / name)


# ---- one measurement, in a process of its own


def of_texts(folder: Path, prompts: int, form: str, held: bool) -> dict[str, Any]:
    """Read rows of text, and measure what they take and how long each takes in random order."""
    from mmrl.config.binding import Pieces
    from mmrl.config.schema import Piece

    def read(name: str) -> Any:
        source = folder / {"jsonl": f"{name}.jsonl", "parquet": f"{name}_texts.parquet", "saved": name}[form]
        data = Pieces(Stream()).prompts(Piece("vision.visual_qa", {"path": str(source)}), "data")
        return list(data) if held else data

    read("few")  # imports, and pools of pyarrow
    before, began = private(), time.process_time()
    data = read("texts")
    seconds = time.process_time() - began
    size = private() - before
    order = random.Random(1).sample(range(prompts), min(DRAWN, prompts))
    began = time.process_time()
    letters = sum(len(data[i].messages[0].parts[0].text) for i in order)
    assert letters == len(order) * 1921
    return {
        "bytes": size // len(data),
        "read_ms": round(1000 * seconds / len(data), 3),
        "random_ms": round(1000 * (time.process_time() - began) / len(order), 3),
        "bytes_after": (private() - before) // len(data),
    }


def of_rows(folder: Path, prompts: int, stored: bool) -> dict[str, Any]:
    """Read the rows, and measure what they take."""
    from mmrl.config.binding import Pieces
    from mmrl.config.schema import Piece
    from mmrl.data import stored_bytes

    def read(name: str) -> Any:
        return Pieces(Stream()).prompts(Piece("vision.visual_qa", {"path": str(folder / name)}), "data")

    read("few.parquet")  # imports, and pools of pyarrow
    stored_bytes.byte_file().limit = 0 if stored else 1 << 60
    before = private()
    data = read("rows.parquet")
    return {"bytes": (private() - before) // len(data)}


def of_rollouts(folder: Path, prompts: int, answers: int, workers: bool) -> dict[str, Any]:
    """Make rollouts, keep them, and measure what they take."""
    from mmrl.config.binding import Pieces
    from mmrl.config.schema import Piece
    from mmrl.runtime import ray_actors

    pieces = Pieces(Stream())
    data = pieces.prompts(Piece("vision.visual_qa", {"path": str(folder / "rows.parquet")}), "data")
    policy = pieces.make(
        "policy", Piece("vision.tokens", {"model": str(folder / "model"), "dtype": "float32"})
    )
    generate = Piece("vision.generate", {"max_completion_length": LENGTH, "batch_size": answers})
    engine = pieces.make("engine", generate, policy, place="rollout.engine[0]")
    travelled = {"to_worker": 0, "from_worker": 0}
    if workers:
        engine = pieces.make("engine", Piece("ray_workers"), engine, place="rollout.engine[1]")
        dumps, loads = ray_actors.dumps, ray_actors.loads

        def counting_dumps(value: Any) -> bytes:
            data = dumps(value)
            travelled["to_worker"] += len(data)
            return data

        def counting_loads(data: bytes) -> Any:
            travelled["from_worker"] += len(data)
            return loads(data)

        ray_actors.dumps, ray_actors.loads = counting_dumps, counting_loads
    half = len(data) // 2
    asked = [[prompt for prompt in part for _ in range(answers)] for part in (data[:half], data[half:])]
    kept = [engine.rollout(asked[0])]  # the first call allocates what all share
    travelled |= dict.fromkeys(travelled, 0)
    before = private()
    kept.append(engine.rollout(asked[1]))
    count = len(data) - half
    found = {"bytes": (private() - before) // count}
    return found | ({name: size // count for name, size in travelled.items()} if workers else {})


def apart(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.host_memory",
        "--one",
        json.dumps(given),
        "--folder",
        str(folder),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {**given, **json.loads(done.stdout.splitlines()[-1])}


def measure_one(folder: Path, what: str, prompts: int, **options: Any) -> dict[str, Any]:
    """Measure what a line names."""
    torch.set_num_threads(1)
    return {"texts": of_texts, "rows": of_rows, "rollouts": of_rollouts}[what](folder, prompts, **options)


def main() -> None:
    """Measure and write lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--only", choices=("text", ""), default="", help="leave what has images as it was")
    parser.add_argument("--one", default="", help="one line, as JSON; of this script itself")
    parser.add_argument("--folder", type=Path, help="of its files")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure_one(given.folder, **json.loads(given.one))))
        return
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_texts(folder, given.texts)
        texts = {"what": "texts", "prompts": given.texts}
        asked = [
            {**texts, "form": form, "held": held}
            for form in ("jsonl", "parquet", "saved")
            for held in (True, False)
        ]
        lines: list[dict[str, Any]] = []
        if given.only:
            old = given.output.read_text().splitlines() if given.output.is_file() else []
            lines = [line for line in map(json.loads, old) if line.get("what") != "texts"]
        else:
            lines, more = with_images(folder, given.prompts, given.side)
            asked += more
        for one in asked:
            lines.append(apart(folder, one))
            print(json.dumps(lines[-1]), flush=True)
            given.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_images(folder: Path, prompts: int, side: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write rows with images and a tiny model; return their sizes and what is to be measured."""
    from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl

    TinyQwen2_5Vl(stream=Stream(0), max_pixels=side**2).build(folder / "model")
    encoded = write(folder / "rows.parquet", prompts, side)
    write(folder / "few.parquet", 4, side)
    pixels = 3 * side**2
    asked = [{"what": "rows", "prompts": prompts, "stored": stored} for stored in (False, True)]
    made = {"what": "rollouts", "prompts": prompts}
    asked += [{**made, "answers": n, "workers": on_ray} for on_ray in (False, True) for n in (1, 8)]
    return [{"image": encoded, "pixels_uint8": pixels, "pixels_float32": 4 * pixels}], asked


if __name__ == "__main__":
    main()
