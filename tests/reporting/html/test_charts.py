"""Charts: where numbers are drawn, how they are written, and which data the script reads."""

from __future__ import annotations

import json
import math
import re
from itertools import combinations

import pytest

from mmrl.reporting.html.charts import (
    BANDS,
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    POINTS,
    RIGHT,
    SMOOTHED,
    TOP,
    WIDTH,
    Line,
    chart,
    diverging,
    style_of,
)
from mmrl.reporting.html.layout import spelled
from tests.support.svg import overlap, text_boxes


def shapes(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """Read the points of every path in a colour, in the order of drawing."""
    drawn = re.findall(rf'<path d="([^"]*)"[^>]*style="[^"]*stroke: {colour}', svg)
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path)] for path in drawn
    ]


def dots(svg: str) -> int:
    return svg.count("<use")


def handed(svg: str) -> dict:
    return json.loads(re.search(r"data-points='([^']*)'", svg)[1])


def labels(svg: str, anchor: str) -> list[str]:
    """Read the numbers on an axis: x has its letters in the middle, y at the end."""
    return re.findall(rf'text-anchor: {anchor}"[^>]*>([^<]*)</text>', svg)


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
    "y", [[0.0, 1.0], [-0.3, 0.31], [6.7e-5, 7.01e-5], [9.3e-4, 1e-3], [0.0, 2e6], [1e6, 1e6 + 50]]
)
def test_ticks_are_round_and_distinct(y):
    words = labels(chart([Line("reward", [1, 2], y)]), "end")
    numbers = [word.replace("\N{MINUS SIGN}", "-") for word in words]
    assert len(set(words)) == len(words) >= 3 and all(len(word) <= 9 for word in words)
    steps = [float(b) - float(a) for a, b in zip(numbers, numbers[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_the_first_and_the_last_point_are_at_the_ends_of_the_axis():
    (points,) = shapes(chart([Line("reward", [1, 2, 3], [0.0, 0.5, 1.0])]), COLOURS[0])[:1]
    assert [x for x, _ in points] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True) and TOP < heights[-1] < heights[0] == HEIGHT - BOTTOM


def test_steps_are_whole_numbers():
    svg = chart([Line("reward", [1, 2, 3], [0.0, 0.5, 1.0])])
    assert labels(svg, "middle") == ["1", "2", "3", "step"]


@pytest.mark.parametrize("y", [[0.0, 0.0], [3.0, 3.0], [1e-9, 1e-9], [1e6, 1e6 + 1e-9]])
def test_a_constant_line_is_drawn_in_the_middle(y):
    points = shapes(chart([Line("flat", [1, 2], y)]), COLOURS[0])[0]
    assert points[0][1] == points[1][1] == pytest.approx((TOP + HEIGHT - BOTTOM) / 2, abs=0.1)


def test_a_single_point_is_drawn():
    drawn = chart([Line("one", [5], [0.25])])
    assert dots(drawn) == 1 and labels(drawn, "middle") == ["5", "step"]
    (area,) = re.findall(r'<path d="([^"]*)"[^>]*fill-opacity', chart([Line("one", [5], [2.0])], "area"))
    assert len({x for x, _ in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", area)}) == 2, "as wide as a step"


def test_dots_at_the_ends_are_drawn_whole():
    drawn = chart([Line("reward", [1, 2, 3], [0.0, 0.5, 1.0])])
    clipped = re.findall(r"<g clip-path[^>]*>\s*<use", drawn)
    assert dots(drawn) == 3 and clipped == []


def test_a_chart_has_a_viewbox_and_its_letters_lie_inside_without_touching():
    svg = chart([Line("reward", [1, 123456], [0.0, 1.0])])
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in svg and " width=" not in svg.partition(">")[0]
    for y in ([-9.3e-4, 1e-3], [0.99999, 1.0], [-5e4, 5e4], [0.0, 2e6], [1e6, 1e6 + 50], [-3e-7, 2e-7]):
        for x in ([1, 2], [1, 99999]):
            boxes = text_boxes(chart([Line("a", x, y)]))
            assert len(boxes) > 5
            for left, top, right, bottom in boxes:
                assert left >= 0 and top >= 0 and right <= WIDTH and bottom <= HEIGHT, (x, y)
            assert not [pair for pair in combinations(boxes, 2) if overlap(*pair)], (x, y)


def test_a_value_that_is_not_finite_leaves_a_gap():
    nan = math.nan
    drawn = chart([Line("loss", [1, 2, 3, 4, 5], [1.0, 2.0, nan, 2.0, 1.0])])
    path = re.findall(rf'<path d="([^"]*)"[^>]*style="[^"]*stroke: {COLOURS[0]}', drawn)[0]
    assert path.count("M") == 2 and path.count("L") == 2 and dots(drawn) == 4
    assert handed(drawn)["lines"] == [[[1, 2, 3, 4, 5], [1, 2, None, 2, 1]]], "JSON has no NaN"
    assert "<output>1.00</output>" in chart([Line("loss", [1, 2], [1.0, nan])]), "the last that is known"
    # Of many points one between two gaps has no line, so it gets a dot.
    y = [0.0] * 10 + [nan, 1.0, nan] + [0.0] * 10
    assert dots(chart([Line("loss", list(range(23)), y)])) == 1
    y = [nan if i % 50 == 7 else float(i) for i in range(4 * POINTS["line"])]
    assert None not in handed(chart([Line("long", list(range(len(y))), y)]))["lines"][0][1]


def test_colours_of_signed_values_are_grey_at_zero_and_safe_for_colour_blindness():
    assert diverging(0.0, 2.0) == diverging(math.nan, 2.0) == diverging(1.0, 0.0) == "#cfd6dd"
    assert diverging(2.0, 2.0) == diverging(9.0, 2.0) == COLOURS[0], "blue"
    assert diverging(-2.0, 2.0) == COLOURS[1], "orange"

    def channels(colour):
        return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]

    blues = [
        channels(diverging(value / 4, 1.0))[2] - channels(diverging(value / 4, 1.0))[0]
        for value in range(-4, 5)
    ]
    assert blues == sorted(blues), "from orange to blue"


def test_many_points_get_a_running_mean_in_front_and_very_many_are_averaged():
    x = list(range(SMOOTHED))
    faint, front = shapes(chart([Line("noisy", x, [float(i % 2) for i in x])]), COLOURS[0])

    def moved(points):
        return max(y for _, y in points[5:-5]) - min(y for _, y in points[5:-5])

    assert moved(front) < 0.5 * moved(faint)
    x = list(range(4 * POINTS["line"]))
    points = handed(chart([Line("long", x, [float(i // 4) for i in x])]))["lines"][0]
    # Means of four equal numbers, at the last of their steps.
    assert points[0][:3] == [3, 7, 11] and points[1][:3] == [0, 1, 2] and len(points[1]) == POINTS["line"]


def test_the_script_reads_the_points_and_the_axis():
    data = handed(chart([Line("a", [1, 4], [0.123456, 2.0]), Line("b", [2], [1e-9])]))
    assert data == {"box": [LEFT, WIDTH - RIGHT, 1, 4], "lines": [[[1, 4], [0.1235, 2]], [[2], [1e-9]]]}


def test_names_are_escaped():
    svg = chart([Line("<b>", [1, 2], [0.0, 1.0])], unit="a<b")
    assert "&lt;b&gt;" in svg and "a&lt;b" in svg and "<b>" not in svg


def test_ids_of_different_charts_differ():
    svg = "".join(chart([Line(name, [1, 2], [0.0, 1.0])]) for name in "ab")
    ids = re.findall(r' id="([^"]*)"', svg)
    assert len(set(ids)) == len(ids) > 0


def test_areas_are_stacked():
    svg = chart([Line("rollout", [1, 2], [1.0, 2.0]), Line("learn", [1, 2], [3.0, 2.0])], "area")
    paths = re.findall(r'<path d="([^"]*)"[^>]*fill-opacity', svg)
    below, above = (
        {(float(x), float(y)) for x, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path)} for path in paths
    )
    # The upper edge of the first is the lower edge of the second; both add up to 4, so the top is level.
    floor = {(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)}
    assert floor < below and below - floor < above
    assert len({y for _, y in above - below}) == 1 and len(above - below) == 2


def test_intervals_are_shaded_where_there_are_few_lines():
    def lines(num):
        return [Line(f"l{i}", [1, 2], [0.0, 1.0], band=[(-1.0, 1.0), (0.0, 2.0)]) for i in range(num)]

    assert chart(lines(BANDS)).count("fill-opacity: 0.13") == BANDS
    assert "fill-opacity" not in chart(lines(BANDS + 1))
    points = shapes(chart(lines(1)), COLOURS[0])[-1]
    # From -1 to 2 with a margin: 0 and 1 are a third of that apart.
    assert points[0][1] - points[1][1] == pytest.approx((HEIGHT - BOTTOM - TOP) / 3 / 1.08, abs=0.11)


def test_lines_differ_by_colour_and_then_by_dashes():
    styles = [style_of(i) for i in range(3 * len(COLOURS))]
    assert len(set(styles)) == len(styles)
    assert style_of(1) == (COLOURS[1], "-")
