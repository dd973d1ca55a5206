"""Charts: where numbers fall, how they are written, and what the script is handed."""

from __future__ import annotations

import json
import math
import re

import pytest

from mmrl.reporting.html.charts import (
    BANDS,
    COLOURS,
    HEIGHT,
    LEFT,
    POINTS,
    RIGHT,
    SMOOTHED,
    WIDTH,
    Line,
    area_chart,
    bars,
    frontier_chart,
    line_chart,
    spelled,
    style_of,
    ticks,
)


def paths(svg: str) -> list[list[tuple[float, float]]]:
    """Read the points of every line."""
    found = re.findall(r"<path d='M([^']*)'", svg)
    return [[tuple(map(float, point.split(","))) for point in one.split()] for one in found]


def handed(svg: str) -> dict:
    return json.loads(re.search(r"data-points='([^']*)'", svg)[1])


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0.0, "0"), (1e-17, "0"), (-6e-34, "0"), (0.5, "0.500"), (-0.0969, "-0.0969"), (0.001, "0.00100"),
        (12.345, "12.3"), (123.45, "123"), (1234.5, "1,234"), (5.8e-4, "5.8e-4"), (2.5e6, "2.5e6"),
        (math.nan, "–"), (math.inf, "–"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_digits(value, wanted):
    assert spelled(value) == wanted


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (1.0, 12.0, ["2.5", "5.0", "7.5", "10.0"]),
        (-0.3, 0.31, ["-0.2", "0.0", "0.2"]),
        (6.7e-5, 7.01e-5, ["6.70e-5", "6.80e-5", "6.90e-5", "7.00e-5"]),
        (9.3e-4, 1e-3, ["9.4e-4", "9.6e-4", "9.8e-4", "1.00e-3"]),
        (0.0, 2e6, ["0", "5.0e5", "1.0e6", "1.5e6", "2.0e6"]),
    ],
)
def test_ticks_are_round_and_told_apart(low, high, wanted):
    words = [word for _, word in ticks(low, high, 5)]
    assert len(set(words)) == len(words)
    assert [float(word) for word in words] == pytest.approx([float(word) for word in wanted])
    assert [value for value, _ in ticks(low, high, 5)] == pytest.approx([float(w) for w in words], abs=1e-12)


def test_the_first_and_the_last_point_stand_at_the_ends_of_the_axis():
    (points,) = paths(line_chart([Line("reward", [1, 2, 3], [0.0, 0.5, 1.0])]))
    assert [x for x, _ in points] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True) and 0 < heights[-1] < heights[0] < HEIGHT


def test_steps_are_whole_numbers():
    svg = line_chart([Line("reward", [1, 2, 3], [0.0, 0.5, 1.0])])
    assert re.findall(r"text-anchor='(?:middle|end)'>(\d+)</text>", svg) == ["1", "2", "3"]


@pytest.mark.parametrize("y", [[0.0, 0.0], [3.0, 3.0], [1e-9, 1e-9], [1e6, 1e6 + 1e-9]])
def test_a_line_that_does_not_move_is_drawn_in_the_middle(y):
    (points,) = paths(line_chart([Line("flat", [1, 2], y)]))
    assert points[0][1] == points[1][1] and 0 < points[0][1] < HEIGHT


def test_a_single_point_is_drawn():
    assert "<circle" in line_chart([Line("one", [5], [0.25])])


def test_many_points_get_a_mean_in_front_and_very_many_are_averaged():
    x = list(range(SMOOTHED))
    behind, front = paths(line_chart([Line("noisy", x, [float(i % 2) for i in x])]))

    def moved(points):
        return max(y for _, y in points[5:-5]) - min(y for _, y in points[5:-5])

    assert moved(front) < 0.5 * moved(behind)
    x = list(range(4 * POINTS))
    points = handed(line_chart([Line("long", x, [float(i // 4) for i in x])]))["lines"][0]
    # Means of four equal numbers, at the last of their steps.
    assert points[0][:3] == [3, 7, 11] and points[1][:3] == [0, 1, 2] and len(points[1]) == POINTS


def test_the_script_is_handed_the_points_and_the_axis():
    told = handed(line_chart([Line("a", [1, 4], [0.123456, 2.0]), Line("b", [2], [1e-9])]))
    assert told == {"box": [LEFT, WIDTH - RIGHT, 1, 4], "lines": [[[1, 4], [0.1235, 2]], [[2], [1e-9]]]}


def test_names_are_escaped():
    svg = line_chart([Line("<b>", [1, 2], [0.0, 1.0])], unit="a<b")
    assert "&lt;b&gt;" in svg and "a&lt;b" in svg and "<b>" not in svg


def test_areas_stand_on_each_other():
    svg = area_chart([Line("rollout", [1, 2], [1.0, 2.0]), Line("learn", [1, 2], [3.0, 2.0])])
    found = [
        [tuple(map(float, point.split(","))) for point in one.split()]
        for one in re.findall(r"<polygon points='([^']*)'", svg)
    ]
    below, above = found
    # The upper edge of the first is the lower edge of the second; both add up to 4, so the top is level.
    assert below[:2] == above[:1:-1]
    assert above[0][1] == above[1][1]
    assert below[2][1] == below[3][1] == HEIGHT - 32


def test_a_frontier_begins_at_a_ring_and_leaves_out_what_lies_far_off():
    short = frontier_chart([Line("run", [0.0, 1.0], [0.0, 1.0])], x_label="kl", unit="reward")
    assert short.count("<circle") == 4 and short.count("fill='#fff'") == 1, "two steps, a ring and a dot"
    x = [i / 100 for i in range(100)]
    x[50] = 1000.0
    far = frontier_chart([Line("run", x, [i / 100 for i in range(100)])], x_label="kl", unit="reward")
    assert far.count("<circle") == 99 + 2, "one step is not shown"


def test_intervals_are_shaded_where_there_are_few_lines():
    def lines(num):
        return [Line(f"l{i}", [1, 2], [0.0, 1.0], band=[(-1.0, 1.0), (0.0, 2.0)]) for i in range(num)]

    assert line_chart(lines(BANDS)).count("<polygon") == BANDS
    assert "<polygon" not in line_chart(lines(BANDS + 1))
    (points,) = paths(line_chart(lines(1)))
    # From -1 to 2 with a margin: 0 and 1 are a third of that apart.
    assert points[0][1] - points[1][1] == pytest.approx((HEIGHT - 32 - 8) / 3 / 1.08, abs=0.11)


def test_bars_are_to_one_scale():
    svg = bars({"a": {"rollout": 1.0, "learn": 3.0}, "b<": {"learn": 1.0}}, unit="s")
    assert re.findall(r"width:([\d.]+)%", svg) == ["25.00", "75.00", "25.00"]
    assert "4.00 s" in svg and "b&lt;" in svg
    assert re.findall(r"width:75.00%;background:(#\w+)", svg) == [COLOURS[1]]


def test_lines_are_told_apart_by_colour_and_then_by_dashes():
    styles = [style_of(i) for i in range(3 * len(COLOURS))]
    assert len(set(styles)) == len(styles)
    assert style_of(1) == (COLOURS[1], "")
