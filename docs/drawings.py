"""Draw the figures of README and docs: `python docs/drawings.py` draws `idea.svg` and `steps.svg`,
`python docs/drawings.py runs/demo` draws `demo.svg` as well."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
INK, SOFT, LINE, FILL = "#1d2733", "#5b6b7b", "#b8c4d0", "#f4f7fa"
COLOURS = {"tempsamp_r1": "#c2571a", "grpo": "#7a4fb5", "cold_start": "#5b6b7b"}


def idea() -> str:
    """Draw the way of the data: six boxes, the pieces under them, and the one arrow that goes back."""
    boxes = (
        ("prompts", "sampler", ("uniform, vade", "with_hints")),
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
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    pyplot.rcParams.update({"svg.hashsalt": "mmrl", "font.size": 9})
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


GOOD, BAD, NONE = "#f3c9ad", "#c3d8ee", "white"  # cells of positive, negative and no advantage
LEFT, CELL, HIGH = 150, 62, 28  # where cells begin, how wide and how high they are


def steps() -> str:
    """Draw the step table: rows of one group for text, for a denoised image, and for a pair.

    The numbers are those of `group_normalize` (rewards 0.8, 0.3, 0.1 deviate by 0.36 from 0.4) and of
    `increments`.
    """
    spans = (
        ("from", "12.5", "to", "18.0", "s", "end"),
        ("12", "to", "30", "end"),
        ("the", "whole", "clip", "end"),
    )
    text = [
        (f"answer {i + 1}", [(word, told) for word in words], reward, told)
        for i, (words, reward, told) in enumerate(
            zip(spans, (0.8, 0.3, 0.1), (1.11, -0.28, -0.83), strict=True)
        )
    ]
    times = ("t = 1.0", "0.95", "0.88", "0.77", "0.55", "0")
    whole = [(time, 0.71) for time in times[:5]] + [(times[5], None)]
    single = list(zip(times[:5], (0.1, -0.05, 0.2, 0.15, 0.02), strict=True)) + [(times[5], None)]
    image = [("Flow-GRPO", whole, 0.7, 0.71), ("DenseGRPO", single, 0.7, None)]
    pair = [
        ("chosen", [(word, 1.0) for word in ("a", "red", "cube", "end")], 0.9, 1.0),
        ("rejected", [(word, -1.0) for word in ("a", "cat", "on", "a", "mat", "end")], 0.2, -1.0),
    ]
    parts, y = [], 6
    for title, words, rows in (
        ("text: a step is a token", "three answers to one prompt: a group", text),
        ("image: a step is a denoising step", "the last one draws nothing, so it is not learned from", image),
        ("pair: a group of two rows", "tokens, or draws of time and noise", pair),
    ):
        parts.append(f"<text x='12' y='{y + 18}' class='t'>{title}</text>")
        parts.append(f"<text x='{LEFT + 6.2 * CELL}' y='{y + 18}' class='h'>reward</text>")
        parts.append(f"<text x='{LEFT + 7.35 * CELL}' y='{y + 18}' class='h'>advantage</text>")
        parts.append(f"<text x='12' y='{y + 35}' class='w'>{words}</text>")
        y += 46
        for row in rows:
            parts.append(_row(row, y))
            y += HIGH + 5
        y += 16
    y += 4
    for x, fill, words in (
        (12, GOOD, "more likely"),
        (132, BAD, "less likely"),
        (248, NONE, "mask 0: padding, or no choice"),
    ):
        dash = " stroke-dasharray='3 3'" if fill == NONE else ""
        parts.append(
            f"<rect x='{x}' y='{y - 12}' width='18' height='14' rx='3' fill='{fill}' stroke='{LINE}'{dash}/>"
        )
        parts.append(f"<text x='{x + 24}' y='{y}' class='w'>{words}</text>")
    parts.append(
        f"<text x='12' y='{y + 26}' class='w'>loss = sum over all cells of weight \u00b7 surrogate(ratio, "
        "advantage)</text>"
    )
    style = (
        f"text{{font-family:system-ui,sans-serif;font-size:13px;fill:{INK}}}.t{{font-size:15px;font-weight:600}}"
        f".w{{fill:{SOFT}}}.h{{fill:{SOFT};text-anchor:middle}}.c{{text-anchor:middle}}"
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 660 {y + 40}'><style>{style}</style>"
        f"<rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>\n"
    )


def _row(row: tuple, y: int) -> str:
    """Draw one row of the step table: what it is, its cells, its reward and its advantage."""
    name, cells, reward, advantage = row
    middle = y + HIGH / 2 + 5
    parts = [f"<text x='12' y='{middle}'>{name}</text>"]
    for i in range(6):
        word, told = cells[i] if i < len(cells) else ("", None)
        fill = NONE if told is None else GOOD if told > 0 else BAD
        dash = " stroke-dasharray='3 3'" if told is None else ""
        x = LEFT - 40 + i * CELL
        parts.append(
            f"<rect x='{x}' y='{y}' width='{CELL - 4}' height='{HIGH}' rx='4' fill='{fill}' "
            f"stroke='{LINE}'{dash}/>"
            f"<text x='{x + CELL / 2 - 2}' y='{middle}' class='c'>{html.escape(word)}</text>"
        )
    told = "per step" if advantage is None else f"{advantage:+.2f}"
    parts.append(f"<text x='{LEFT + 6.2 * CELL}' y='{middle}' class='c'>{reward}</text>")
    parts.append(f"<text x='{LEFT + 7.35 * CELL}' y='{middle}' class='c'>{told}</text>")
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "idea.svg").write_text(idea())
    (HERE / "steps.svg").write_text(steps())
    for run in sys.argv[1:]:
        demo(Path(run))
