"""A folder belongs to the command that made it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.runtime.files import LOCK, hold, make_private
from mmrl.runtime.folders import MARK, check_owner, check_writable, making, mark, mark_of
from tests.support.toys import plan


def files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def fill(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")


def test_what_is_made_takes_the_place_of_all_that_was_there(tmp_path):
    out = tmp_path / "out"
    for names in (("train", "test"), ("train",)):
        with making(out, "build", overwrite=True, names=list(names)) as folder:
            assert folder.name == "out" and files(out) == ([] if len(names) == 2 else ["test", "train"])
            fill(folder, *names)
    assert files(out) == ["train"] and not (out / LOCK).exists()
    assert mark_of(out) == {"by": "build", "names": ["train"]}
    with making(out, "build", names=["train"]) as folder:  # the same again needs no permission
        fill(folder, "train")
    refused = pytest.raises(ConfigError, match="exists and is not empty; .* give --overwrite")
    with refused, making(out, "build", names=["other"]):
        pass


def test_what_fails_leaves_everything_as_it_was(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), making(out, "build") as folder:
        fill(folder, "half")
        raise RuntimeError
    assert not out.exists()
    with making(out, "build") as folder:
        fill(folder, "whole")
    (out / ".unfinished").mkdir()  # of a process that was killed
    (out / ".unfinished" / "half").write_text("")
    with pytest.raises(RuntimeError), making(out, "build", overwrite=True) as folder:
        assert not folder.exists()
        raise RuntimeError
    assert files(out) == ["whole"] and not (out / ".unfinished").exists()


def test_two_at_once_do_not_mix_and_a_dead_owner_holds_nothing(tmp_path):
    out = tmp_path / "out"
    with making(out, "build", n=1) as folder:
        with (
            pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "),
            making(out, "build", n=2),
        ):
            pass
        fill(folder, "first")
    assert files(out) == ["first"]
    code = (
        "import os, sys; from pathlib import Path; from mmrl.runtime.folders import making\n"
        "with making(Path(sys.argv[1]), 'build') as folder:\n"
        "    folder.mkdir(); (folder / 'half').write_text(''); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "new"], check=False).returncode == -9
    with making(tmp_path / "new", "build") as folder:
        fill(folder, "second")
    assert files(tmp_path / "new") == ["second"]


@pytest.mark.parametrize("by", ["train", "evaluate", "build", "export"])
def test_the_folder_of_another_command_is_refused_by_name(tmp_path, by):
    fill(tmp_path / "a", "x")
    mark(tmp_path / "a", by)
    for other in {"train", "evaluate", "build", "export"} - {by}:
        with pytest.raises(ConfigError, match=f"was made by `mmrl {by}`, and `mmrl {other}` does not"):
            check_owner(tmp_path / "a", other, ["y"])
    check_owner(tmp_path / "a", by)


@pytest.mark.parametrize(
    ("by", "name", "text"),
    [
        ("train", "config.yaml", "policy: a\ndata: b\nrollout: c\noutput_dir: d\n"),
        ("train", "stages.json", "{}"),
        ("evaluate", "evaluation.json", '{"metrics": {}}'),
        ("build", "manifest.json", '{"counts": {}}'),
        ("export", "README.md", "---\nbase_model: x\ntags: [mmrl]\n---\n"),
        (None, "config.yaml", "policy: mine\n"),
        (None, "trainer_state.json", "{}"),
        (None, "manifest.json", "{}"),
        (None, "README.md", "about mmrl\n"),
    ],
)
def test_folders_without_a_mark_are_known_by_what_is_in_them(tmp_path, by, name, text):
    (tmp_path / name).write_text(text)
    assert mark_of(tmp_path).get("by") == by


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"by": "eva', "Unterminated"),
        ("[1]", "JSON object"),
        ('{"of": {}}', "JSON object"),
        ("\udcff", "decode"),  # no UTF-8
    ],
)
def test_a_damaged_mark_is_an_error_that_names_the_file(tmp_path, text, reason):
    fill(tmp_path, "evaluation.json")
    (tmp_path / MARK).write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=f"'{tmp_path / MARK}', which .* is damaged .*{reason}"):
        mark_of(tmp_path)


def test_what_nobody_of_us_made_is_neither_overwritten_nor_emptied(tmp_path):
    fill(tmp_path / "a", "notes.txt", "metrics.jsonl")
    check_owner(tmp_path / "a", "train", ["config.yaml"])  # beside what others have there
    for writes in (None, ["metrics.jsonl"]):
        with pytest.raises(ConfigError, match="metrics.jsonl.*, which no `mmrl train` made"):
            check_owner(tmp_path / "a", "train", writes)
    with (
        pytest.raises(ConfigError, match="which no `mmrl build` made"),
        making(tmp_path / "a", "build", overwrite=True),
    ):
        pass
    assert files(tmp_path / "a") == ["metrics.jsonl", "notes.txt"]


def test_a_place_that_cannot_be_a_folder_is_known_before(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/x/y"):
        with pytest.raises(ConfigError, match=f"'{tmp_path / 'file'}' is no folder"):
            check_writable(tmp_path / place)
    with pytest.raises(ConfigError, match="'/proc' takes no file"):  # as root, too
        check_writable(Path("/proc/nope"))


def test_commands_say_in_one_line_that_nothing_can_be_written(tmp_path, capsys):
    (tmp_path / "b.yaml").write_text("build: {name: vision.visual_qa, source: both.jsonl}\noutput: out\n")
    (tmp_path / "run.yaml").write_text(json.dumps(plan(tmp_path / "out")))
    for line in (
        f"build {tmp_path}/b.yaml output=/proc/nope",
        f"train {tmp_path}/run.yaml output_dir=/proc/nope",
        f"evaluate {tmp_path}/run.yaml output_dir=/proc/nope",
        "export no_such_model /proc/nope",
        "generate no_such_model --prompt a --output /proc/nope/a.jsonl",
        "generate no_such_model --prompt a --output /proc/nope",
    ):
        assert main(line.split()) == 2, line
        err = capsys.readouterr().err
        assert "takes no file" in err and err.count("\n") == 1


def test_an_owner_that_removed_its_lock_is_not_mistaken(tmp_path):
    with hold(tmp_path, leave=False):
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()
    with hold(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()


def test_a_build_over_another_leaves_no_old_split(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "what?", "answer": "a", "split": split} for split in ("train", "test")]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (tmp_path / "b.yaml").write_text("build: {name: vision.visual_qa, source: both.jsonl}\noutput: out\n")
    assert main(["build", "b.yaml"]) == main(["build", "b.yaml"]) == 0
    other = ["build", "b.yaml", "build.source=one.jsonl"]
    assert main(other) == 2 and "give --overwrite" in capsys.readouterr().err
    assert files(tmp_path / "out") == ["manifest.json", "test.jsonl", "train.jsonl"]
    assert main([*other, "--overwrite"]) == 0
    assert files(tmp_path / "out") == ["manifest.json", "train.jsonl"]


def test_a_private_folder_is_read_by_its_owner_alone(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o755)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="link' belongs to another user, or is a link"):
        make_private(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="mine' belongs to another user"):
        make_private(folder)
