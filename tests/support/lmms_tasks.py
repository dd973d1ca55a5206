"""Three local tasks of lmms-eval: multiple choice, free form and video grounding, without a hub."""

from __future__ import annotations

import json
from pathlib import Path

from tests.data.test_video import encode

COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: !function utils.text
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 12, temperature: 0, do_sample: false, num_beams: 1}}
"""
SCORED = """\
process_results: !function utils.{name}
metric_list:
{metrics}
"""
METRIC = "  - {{metric: {name}, aggregation: {how}, higher_is_better: true}}\n"
# A random model writes no letters and no spans, so they are read from the length of its answer.
UTILS = """
import json
from PIL import Image


def visual(doc):
    if doc["video"]:
        return [doc["video"]]
    return [Image.open(doc["image"]).convert("RGB")] if doc["image"] else []


def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def choice(doc, results):
    letter = "ABCD"[len(results[0]) % 4]
    return {"acc": float(letter == doc["answer"]), "parsed": {"letter": letter}}


def span(doc, results):
    start, end = json.loads(doc["answer"])
    seconds = len(results[0]) / 4
    overlap = max(0.0, min(end, seconds) - start)
    iou = overlap / (max(end, seconds) - min(start, 0.0))
    return {"iou": {"score": iou}, "recall": {"score": float(iou >= 0.5)}}


def percent(items):
    return 100 * sum(item["score"] for item in items) / len(items)


def letters(items):
    return len({item["letter"] for item in items})
"""


def write_tasks(folder: Path, num: int = 6) -> Path:
    """Write the tasks `choice`, `free` and `span` with `num` documents each; return the folder."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "utils.py").write_text(UTILS)
    rows = {"choice": [], "free": [], "span": []}
    for i in range(num):
        image = folder / f"{i}.png"
        Image.new("RGB", (56 + 28 * (i % 2), 56), (40 * i, 90, 200 - 30 * i)).save(image)
        video = folder / f"{i}.mp4"
        encode(video, 8 + 4 * (i % 2))
        shown = {"image": str(image), "video": ""}
        letters = "<image 1> Which?\nA. red\nB. green\nC. blue\nD. white"
        rows["choice"].append({**shown, "question": f"{letters} {i}", "answer": "ABCD"[i % 4]})
        rows["free"].append({"image": "", "video": "", "question": f"Say {i}.", "answer": str(i)})
        span = json.dumps([0.0, 1.0 + i])
        rows["span"].append({"image": "", "video": str(video), "question": "When?", "answer": span})
    metrics = {
        "choice": {"acc": "mean", "parsed": "!function utils.letters"},
        "free": {},
        "span": {"iou": "!function utils.percent", "recall": "!function utils.percent"},
    }
    for name, lines in rows.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        listed = "".join(METRIC.format(name=metric, how=how) for metric, how in metrics[name].items())
        scored = (
            SCORED.format(name=name, metrics=listed) if listed else "metric_list: [{metric: exact_match}]\n"
        )
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, rows=data) + scored)
    return folder
