"""Draw the pictures of the README, `idea.svg` and `demo.svg`: `python docs/pictures.py runs/demo`."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

HERE = Path(__file__).parent
INK, SOFT, LINE, FILL = "#1d2733", "#5b6b7b", "#b8c4d0", "#f4f7fa"
COLOURS = {"tempsamp_r1": "#c2571a", "grpo": "#7a4fb5", "cold_start": "#5b6b7b"}


def idea() -> str:
    """Draw the way of the data: six boxes, the pieces under them, and the one arrow that goes back."""
    boxes = (
        ("prompts", "sampler", ("uniform", "vade, ...")),
        ("rollouts", "engine", ("vision.generate", "with_demos, stored")),
        ("reward table", "rewards", ("N rollouts", "by K outcomes")),
        ("advantages", "chain", ("total", "group_normalize")),
        ("step table", "policy", ("N rollouts", "by T steps")),
        ("loss", "objective", ("clip, k3", "step_mean")),
    )
    width, gap, parts = 138, 22, []
    for i, (title, kind, words) in enumerate(boxes):
        x = 12 + i * (width + gap)
        parts.append(
            f"<rect x='{x}' y='34' width='{width}' height='84' rx='8' fill='{FILL}' stroke='{LINE}'/>"
            f"<text x='{x + width / 2}' y='58' class='t'>{html.escape(title)}</text>"
            f"<text x='{x + width / 2}' y='80' class='w'>{words[0]}</text>"
            f"<text x='{x + width / 2}' y='97' class='w'>{words[1]}</text>"
            f"<text x='{x + width / 2}' y='22' class='k'>{kind}</text>"
        )
        if i:
            parts.append(f"<path d='M{x - gap + 3} 76 h{gap - 10}' class='a'/>")
    end = 12 + len(boxes) * (width + gap) - gap
    back = f"<path d='M{end - 60} 118 v26 H{12 + width / 2} v-20' class='a'/>"
    words = "update: the policy has moved; pieces with a memory have seen the rewards"
    note = f"<text x='{end / 2}' y='160' class='k'>{words}</text>"
    style = (
        f"text{{font-family:system-ui,sans-serif;text-anchor:middle;fill:{INK}}}.t{{font-size:15px;font-weight:600}}"
        f".w{{font-size:12px;fill:{SOFT}}}.k{{font-size:12px;fill:{SOFT}}}"
        f".a{{stroke:{SOFT};stroke-width:1.6;fill:none;marker-end:url(#m)}}"
    )
    marker = (
        "<marker id='m' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0 8 4 0 8z' fill='{SOFT}'/></marker>"
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {end + 12} 172'><style>{style}</style>"
        f"<defs>{marker}</defs><rect width='100%' height='100%' fill='white'/>"
        f"{''.join(parts)}{back}{note}</svg>\n"
    )


def demo(folder: Path) -> None:
    """Draw rewards over steps, and held-out mIoU before and after, of a run of the demo."""
    summary = json.loads((folder / "summary.json").read_text())
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=(2, 1))
    for name in ("tempsamp_r1", "grpo"):
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        reward = [record["rewards/temporal_iou/mean"] for record in records]
        smooth = [
            sum(reward[max(0, i - 9) : i + 1]) / len(reward[max(0, i - 9) : i + 1])
            for i in range(len(reward))
        ]
        left.plot(reward, color=COLOURS[name], alpha=0.2, linewidth=1)
        left.plot(smooth, color=COLOURS[name], label=name)
    left.set(xlabel="step", ylabel="temporal IoU of sampled answers")
    left.legend(frameon=False)
    for i, name in enumerate(("cold_start", "grpo", "tempsamp_r1")):
        value, (low, high) = summary[name]["metrics"]["mIoU"], summary[name]["intervals"]["mIoU"]
        right.bar(i, value, color=COLOURS[name], yerr=[[value - low], [high - value]], capsize=4, ecolor=INK)
    right.set(xticks=range(3), xticklabels=("cold start", "GRPO", "TempSamp-R1"), ylabel="held-out mIoU")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "demo.svg", metadata={"Date": None})


if __name__ == "__main__":
    matplotlib.use("svg")
    pyplot.rcParams.update({"svg.hashsalt": "mmrl", "font.size": 9})
    (HERE / "idea.svg").write_text(idea())
    demo(Path(sys.argv[1]))
