"""Two evaluations answer by answer: joined on uids, counted, and tested."""

from __future__ import annotations

import math

import pytest

from mmrl.config.schema import ConfigError
from mmrl.reporting.answers import CORRECT, write_columns
from mmrl.reporting.html.predictions import notes_on
from mmrl.reporting.predictions import Change, change_of, find_predictions, join, read_predictions


def write(path, values, *, uids=(), targets=(), judge="right", **more):
    """Write predictions with one reward."""
    count = len(values)
    columns = {
        "uid": list(uids) or [f"p{i}" for i in range(count)],
        "prompt": ["why"] * count,
        "target": list(targets) or ["t"] * count,
        "completion": ["because"] * count,
        "reward": values,
        f"reward/{judge}": values,
        **more,
    }
    write_columns(path, columns, {CORRECT: judge.encode()})
    return path


def two(tmp_path, first, second, *, by=None, **more):
    named = {"a.parquet": first, "b.parquet": second}
    paths = [write(tmp_path / name, values, **more) for name, values in named.items()]
    return join(*map(read_predictions, paths), by=by)


@pytest.mark.parametrize(
    "better, worse, p",
    [
        (5, 0, 2 / 2**5),
        (0, 5, 2 / 2**5),
        (3, 1, 2 * (1 + 4) / 2**4),
        (4, 4, 1.0),
        (0, 0, 1.0),
        # McNemar's example of discordant pairs 10 and 2: 2 * (1 + 12 + 66) / 4096.
        (10, 2, 2 * 79 / 4096),
    ],
)
def test_the_sign_test_is_exact(better, worse, p):
    assert Change("right", 0.0, 0.0, better, worse, 7).p == pytest.approx(p)


def test_many_changes_have_a_p_value_as_well():
    assert 0 < Change("right", 0.0, 0.0, 5000, 4000, 0).p < 1e-20


def test_what_got_better_and_worse_is_counted_over_prompts(tmp_path):
    joined = two(tmp_path, [0.0, 1.0, 1.0, 0.0, math.nan], [1.0, 1.0, 0.0, 1.0, 1.0])
    change = change_of(joined, "reward/right")
    assert (change.better, change.worse, change.unchanged) == (2, 1, 1)
    assert (change.before, change.after) == (0.5, 0.75)  # without the prompt that was not judged before


def test_several_answers_to_a_prompt_count_as_their_mean(tmp_path):
    uids = ["p", "p", "q", "q"]
    joined = two(tmp_path, [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0], uids=uids)
    change = change_of(joined, "reward/right")
    assert (change.better, change.worse, change.unchanged) == (1, 0, 1)
    assert len(joined.pairs) == 2 and len(joined.pairs[0][0]) == 2


def test_prompts_of_one_evaluation_alone_are_counted(tmp_path):
    first = write(tmp_path / "a.parquet", [1.0, 1.0, 0.0], uids=["p", "q", "r"], targets=["1", "2", "3"])
    second = write(
        tmp_path / "b.parquet",
        [1.0, 1.0, 1.0, 0.0],
        uids=["q", "r", "s", "t"],
        targets=["2", "other", "4", "5"],
    )
    joined = join(read_predictions(first), read_predictions(second))
    assert [a[0]["uid"] for a, _ in joined.pairs] == ["q"]
    assert (joined.only_first, joined.only_second, joined.other_targets) == (1, 2, 1)
    third = write(tmp_path / "c.parquet", [1.0], uids=["q"], targets=["2"], prompt=["in other words"])
    assert join(read_predictions(first), read_predictions(third)).other_words == 1


def renamed(tmp_path, **columns):
    """Two evaluations of three prompts whose uids have the names of two files."""
    paths = []
    for name in "ab":
        columns = {"prompt": ["why", "how", "how"], "media": [["x.png"]] * 3, **columns}
        values = {key: value[name] if isinstance(value, dict) else value for key, value in columns.items()}
        uids = [f"{name}#{i}" for i in range(3)]
        paths.append(write(tmp_path / f"{name}.parquet", [1.0, 0.0, 0.0], uids=uids, **values))
    return [read_predictions(path) for path in paths]


def test_equal_data_under_another_name_are_matched_by_content(tmp_path):
    joined = join(*renamed(tmp_path))
    assert [a[0]["uid"] for a, _ in joined.pairs] == ["a#0"]  # the other two are not to be told apart
    assert (joined.only_first, joined.only_second) == (2, 2)
    assert "no uid is in both (the first are 'a#0' and 'b#0'" in joined.note
    assert joined.note in notes_on(joined, ["x", "y"])


def test_media_inside_rows_are_matched_by_their_hash(tmp_path):
    inside = {name: [[f"the image of {name}:{i}"] for i in range(3)] for name in "ab"}
    inputs = {"a": ["t 1", "t 2", "t 3"], "b": ["t 1", "t 3", "t 4"]}
    joined = join(*renamed(tmp_path, media=inside, inputs=inputs))
    assert [(a[0]["uid"], b[0]["inputs"]) for a, b in joined.pairs] == [("a#0", "t 1"), ("a#2", "t 3")]


def test_other_media_or_unknown_media_are_no_match(tmp_path):
    for media in ({"a": [["x.png"]] * 3, "b": [["y.png"]] * 3}, [None] * 3):
        with pytest.raises(ConfigError, match="named after their file and number.*give its rows an `id`"):
            join(*renamed(tmp_path, media=media))


def test_evaluations_with_nothing_in_common_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no uid is in both"):
        join(
            read_predictions(write(tmp_path / "a.parquet", [1.0])),
            read_predictions(write(tmp_path / "b.parquet", [1.0], uids=["x"])),
        )
    with pytest.raises(ConfigError, match="their targets differ"):
        join(
            read_predictions(write(tmp_path / "a.parquet", [1.0])),
            read_predictions(write(tmp_path / "b.parquet", [1.0], targets=["other"])),
        )
    with pytest.raises(ConfigError, match="nothing can be compared"):
        join(
            read_predictions(write(tmp_path / "a.parquet", [1.0])),
            read_predictions(write(tmp_path / "b.parquet", [1.0], judge="fluent")),
        )


def test_the_reward_that_orders_comes_first(tmp_path):
    more = {"reward/form": [0.5]}
    assert two(tmp_path, [1.0], [1.0], **more).measures == ["reward/right", "reward/form", "reward"]
    assert two(tmp_path, [1.0], [1.0], by="form", **more).measures[0] == "reward/form"
    with pytest.raises(ConfigError, match="no reward of both is called 'from'"):
        two(tmp_path, [1.0], [1.0], by="from", **more)


def test_predictions_are_found_where_a_user_looks(tmp_path):
    with pytest.raises(ConfigError, match="there are no predictions in"):
        find_predictions(tmp_path)
    whole = write(tmp_path / "measured" / "predictions.parquet", [1.0])
    assert find_predictions(tmp_path / "measured") == find_predictions(whole) == whole
    run = tmp_path / "run"
    last = [write(run / "predictions" / f"step-{step:06d}.parquet", [1.0]) for step in (0, 10, 100)][-1]
    assert find_predictions(run) == find_predictions(run / "predictions") == last
    for name in ("a", "b"):
        write(tmp_path / "sweep" / "predictions" / f"{name}.parquet", [1.0])
    with pytest.raises(ConfigError, match=r"several files of predictions; name one of '.*a.parquet', '"):
        find_predictions(tmp_path / "sweep")
    write(run / "predictions.parquet", [1.0])
    with pytest.raises(ConfigError, match="several files"):
        find_predictions(run)


def test_parts_of_several_processes_are_read_together(tmp_path):
    for rank in range(2):
        write(tmp_path / f"predictions-0000{rank}-of-00002.parquet", [1.0], uids=[f"p{rank}"])
    found = read_predictions(find_predictions(tmp_path / "predictions-00001-of-00002.parquet"))
    assert [row["uid"] for row in found.rows] == ["p0", "p1"]
    (tmp_path / "predictions-00000-of-00002.parquet").unlink()
    with pytest.raises(ConfigError, match="1 of 2 files are there"):
        read_predictions(tmp_path / "predictions.parquet")


@pytest.mark.parametrize(
    "column, value",
    [("uid", None), ("uid", 3), ("prompt", None), ("completion", 1.5), ("media", "a"), ("reward/right", "x"),
     ("correct", 1), ("seen", "text")],
)  # fmt: skip
def test_a_column_of_another_type_is_named(tmp_path, column, value):
    import pyarrow
    from pyarrow import parquet

    columns = {"uid": ["p"], "prompt": ["why"], "reward/right": [1.0], column: [value]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=rf"a.parquet\[0\]: '{column}' must be a "):
        read_predictions(tmp_path / "a.parquet")


def test_a_damaged_file_is_an_error_in_words(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 half")
    with pytest.raises(ConfigError, match="cannot read '.*a.parquet'"):
        read_predictions(tmp_path / "a.parquet")
