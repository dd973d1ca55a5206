"""Question benchmarks from their published files to their numbers."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from examples.video_grounding.spliced_videos import write_video
from mmrl.cli import main
from mmrl.core.types import Outcome, Prompt
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.data.media_root import MediaRoot, decode_image
from mmrl.data.video import FrameSampling
from mmrl.vision.benchmarks.question_formats import FOLDER_OF
from mmrl.vision.datasets.benchmark import benchmark
from mmrl.vision.media.frame_folder import FrameFolder
from mmrl.vision.media.subtitles import read_subtitles, subtitles_at
from mmrl.vision.rewards.benchmarks import benchmark_answer

CONFIGS = Path(__file__).parents[2] / "configs"
SRT = """1
00:00:00,000 --> 00:00:01,500
<font color="white" size=".72c">Hello
there</font>

2
00:00:02,000 --> 00:00:04,000
<font color="white" size=".72c">42</font>
"""


def png(shade):
    file = io.BytesIO()
    noise = torch.rand((3, 30, 40), generator=torch.Generator().manual_seed(shade))
    Image.fromarray((noise.permute(1, 2, 0) * 255).byte().numpy()).save(file, "PNG")
    return file.getvalue()


def held(shade):
    return {"bytes": png(shade), "path": f"{shade}.png"}


MMMU = {
    "id": "validation_Art_Theory_1", "question": "Is <image 2> like <image 1>?", "answer": "B",
    "options": "['<image 3>', \"it's a cat\"]", "question_type": "multiple-choice",
    "image_1": held(1), "image_2": held(2), "image_3": held(3), "image_4": None, "subfield": "x",
}  # fmt: skip
OPEN = {
    **MMMU, "id": "validation_Math_2", "question": "How much?", "options": "[]", "answer": "['2', 'two']",
    "question_type": "open", "image_2": None, "image_3": None,
}  # fmt: skip
MATHVISTA = {
    "pid": "7", "query": "Hint: choose.\nQuestion: which?", "question": "which?", "image": "images/7.jpg",
    "decoded_image": held(4), "choices": ["red", "blue"], "answer": "blue", "unit": None, "precision": None,
    "question_type": "multi_choice", "answer_type": "text", "metadata": {"task": "tables", "source": "x"},
}  # fmt: skip
FLOAT = {
    **MATHVISTA, "pid": "8", "choices": None, "answer": "1.2", "precision": 1.0,
    "question_type": "free_form", "answer_type": "float",
}  # fmt: skip
MMBENCH = {
    "index": 3, "question": "What?", "hint": "look", "A": "red", "B": "blue", "C": None, "answer": "A",
    "category": "color", "l2-category": "fine", "image": base64.b64encode(png(5)).decode(),
}  # fmt: skip
TURNED = {**MMBENCH, "index": 1_000_003, "A": "blue", "B": "red", "answer": "B", "hint": "nan", "image": "3"}
OCR = {
    "dataset_name": "IIIT5K", "id": 1, "image_path": "a.png", "question": "what is written?",
    "answers": "CENTRE", "type": "Regular Text Recognition",
}  # fmt: skip
FORMULA = {**OCR, "dataset_name": "HME100k", "answers": ["x + 1"], "type": "Formulas"}
CHART = {"imgname": "a.png", "query": "How many?", "label": "12"}
VIDEO = {
    "video_id": "001", "videoID": "clip", "question_id": "001-1", "duration": "short", "domain": "Knowledge",
    "sub_category": "Law", "url": "", "task_type": "Counting Problem", "question": "How many apples?",
    "options": ["A. Two.", "B. Three.", "C. None.", "D. Four."], "answer": "B",
}  # fmt: skip
MV = {"video": "a.mp4", "question": "What then?", "candidates": ["He sat.", "He ran."], "answer": "He ran."}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmrl.training.evaluate.RESAMPLES", 20)
    (tmp_path / "a.png").write_bytes(png(6))
    write_rows(tmp_path / "MMMU/Art_Theory/validation-0.parquet", [MMMU])
    write_rows(tmp_path / "MMMU/Math/validation-0.parquet", [OPEN])
    write_rows(tmp_path / "mathvista.parquet", [MATHVISTA, FLOAT])
    tsv = [list(MMBENCH), MMBENCH.values(), TURNED.values()]
    cells = ["\t".join("" if cell is None else str(cell) for cell in row) for row in tsv]
    (tmp_path / "mmbench.tsv").write_text("\n".join(cells) + "\n")
    write_rows(tmp_path / "ocrbench.json", [OCR, FORMULA])
    write_rows(tmp_path / "charts/test_human.json", [CHART])
    write_rows(tmp_path / "charts/test_augmented.json", [{**CHART, "label": "Yes"}])
    write_rows(tmp_path / "video_mme.parquet", [VIDEO, {**VIDEO, "question_id": "001-2", "duration": "long"}])
    write_rows(tmp_path / "mvbench/action_sequence.json", [{**MV, "start": 1.0, "end": 2.5}])
    write_rows(tmp_path / "mvbench/episodic_reasoning.json", [{**MV, "video": "show", "start": 0, "end": 2}])
    write_rows(tmp_path / "mvbench/moving_count.json", [MV])
    folders = ["clips", *(f"clips/{FOLDER_OF[task]}" for task in ("action_sequence", "moving_count"))]
    shades = torch.arange(16, dtype=torch.uint8)[:, None, None, None] * 15
    for folder, name in zip(folders, ("clip", "a", "a"), strict=True):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write_video(tmp_path / folder / f"{name}.mp4", shades.expand(-1, 3, 32, 32), 4)  # 4 seconds
    show = tmp_path / "clips" / FOLDER_OF["episodic_reasoning"] / "show"
    show.mkdir(parents=True)
    for i in range(1, 10):  # 3 seconds
        Image.new("RGB", (16, 8), (20 * i,) * 3).save(show / f"{i:05d}.jpg", quality=100)
    return tmp_path


FILES = {
    "mmmu": "MMMU/*/validation*", "mathvista": "mathvista.parquet", "mmbench": "mmbench.tsv",
    "ocrbench": "ocrbench.json", "chartqa": "charts/*.json", "video_mme": "video_mme.parquet",
    "mvbench": "mvbench",
}  # fmt: skip
ROOTS = {"chartqa": ".", "ocrbench": ".", "video_mme": "clips", "mvbench": "clips"}


def read(name, path="", **options):
    return benchmark(path=path or FILES[name], format=name, root=ROOTS.get(name, ""), **options)


# ---- rows become prompts


def test_mmmu_shows_images_where_the_texts_mark_them(home):
    chosen, open_one = read("mmmu")
    assert (chosen.uid, chosen.target, chosen.columns["subject"]) == (
        "validation_Art_Theory_1",
        "B",
        "Art_Theory",
    )
    assert chosen.text.startswith(
        "Is \n like \n?\n\n(A) \n\n(B) it's a cat\n\nAnswer with the option's letter"
    )
    shown = [medium.load().pixels for medium in chosen.media]
    assert all(
        torch.equal(pixels, decode_image(png(shade), "").pixels)
        for pixels, shade in zip(shown, (2, 1, 3), strict=True)
    )
    assert open_one.target == ("2", "two") and open_one.columns["choices"] == []
    assert open_one.messages[0].parts[0].media and open_one.text.startswith(
        "How much?\n\nAnswer the question using"
    )


def test_mathvista_asks_its_query(home):
    chosen, number = read("mathvista", prompt="{question} {task}")
    assert (chosen.uid, chosen.target, chosen.text) == ("7", "blue", "Hint: choose.\nQuestion: which? tables")
    assert (number.target, number.columns["precision"], number.columns["answer_type"]) == (
        "1.2",
        1.0,
        "float",
    )
    assert number.media[0].load().pixels.shape == (1, 3, 30, 40)


def test_mmbench_rotations_share_an_image_and_a_cluster(home):
    first, turned = read("mmbench")
    assert first.text.startswith("Hint: look\nQuestion: What?\nOptions:\nA. red\nB. blue\nPlease select")
    assert turned.text.startswith("Question: What?\nOptions:\nA. blue\nB. red\n")
    assert first.tags == turned.tags == {"cluster": "3"} and first.media[0] is turned.media[0]
    assert (first.target, turned.target, turned.uid) == ("A", "B", "1000003")


def test_mmbench_without_rotations_is_named(home, caplog):
    write_rows(home / "once.jsonl", [MMBENCH])
    read("mmbench", "once.jsonl")
    assert "asks every question once" in caplog.text


def test_ocrbench_and_chartqa_read_each_of_their_layouts(home):
    plain, formula = read("ocrbench")
    assert (plain.uid, plain.text, plain.target) == ("0", "what is written?", "CENTRE")
    assert formula.columns["dataset"] == "HME100k"
    row = {"dataset": "IIIT5K", "question_type": "T", "answer": ["a", "b"], "question": "?", "image": held(1)}
    write_rows(home / "hub.parquet", [row])
    (hub,) = read("ocrbench", "hub.parquet")
    assert (hub.target, hub.columns["type"]) == (("a", "b"), "T")
    augmented, human = read("chartqa")
    assert [human.columns["type"], augmented.columns["type"]] == ["human", "augmented"]
    assert (human.text, human.target, len(human.media)) == ("How many?", "12", 1)
    rows = [
        {"image": held(1), "query": "?", "label": ["3"], "human_or_machine": 0},
        {"image": held(1), "question": "?", "answer": "3", "type": "augmented_test"},
    ]
    for i, row in enumerate(rows):
        write_rows(home / f"test{i}.parquet", [row])
        (prompt,) = read("chartqa", f"test{i}.parquet")
        assert (prompt.target, prompt.columns["type"]) == ("3", ["human", "augmented"][i])


def test_video_mme_shows_the_subtitles_of_sampled_frames(home, caplog):
    first, second = read("video_mme")
    assert first.text.startswith("Select the best answer") and "\nA. Two.\nB. Three.\n" in first.text
    assert first.tags == second.tags == {"cluster": "clip"} and first.media[0].load().duration == 4
    (home / "subtitles").mkdir()
    (home / "subtitles/clip.srt").write_text(SRT)
    options = {"subtitles": "subtitles", "frames_per_second": 1.0}
    first, _ = read("video_mme", **options)  # at 0, 1, 2 and 3 seconds
    assert first.text.startswith("This video's subtitles are listed below:\nHello there\n42\nSelect the best")
    (home / "subtitles/clip.srt").rename(home / "subtitles/other.srt")
    first, _ = read("video_mme", **options)
    assert first.text.startswith("Select the best") and "1 of 1 videos have no subtitles" in caplog.text


def test_subtitles_are_those_at_the_times(home):
    (home / "a.srt").write_text(SRT)
    spoken = read_subtitles(home / "a.srt")
    assert spoken == [(0.0, 1.5, "Hello there"), (2.0, 4.0, "42")]
    assert [subtitles_at(spoken, [time]) for time in (1.4, 1.5, 2.0, 4.0)] == ["Hello there", "", "42", ""]
    (home / "a.srt").write_text("hello")
    with pytest.raises(RowError, match="holds no subtitles"):
        read_subtitles(home / "a.srt")


def test_mvbench_finds_videos_by_task_and_cuts_them(home):
    cut, folder, whole = read("mvbench", frames_per_second=4.0)
    assert cut.columns["task"] == "action_sequence" and cut.text.endswith("Only give the best option.")
    assert "Options:\n(A) He sat.\n(B) He ran.\n" in cut.text and cut.target == "He ran."
    assert cut.media[0].load().times.tolist() == [1.0, 1.25, 1.5, 1.75, 2.0, 2.25]
    assert len(whole.media[0].load().pixels) == 16
    frames = folder.media[0].load()  # 2 of its 3 seconds, at 3 images a second
    assert frames.times.tolist() == [i / 4 for i in range(8)] and frames.duration == 3
    shades = frames.pixels.float().mean((1, 2, 3))
    assert shades.tolist() == pytest.approx([20, 20, 40, 60, 80, 80, 100, 120], abs=2)


def test_a_frame_folder_keeps_the_pixel_limits_and_its_root(home):
    root = MediaRoot(home / "clips")
    name = f"{FOLDER_OF['episodic_reasoning']}/show"
    small = FrameFolder(root, name, FrameSampling(2.0, total_pixels=6 * 32))
    assert small().pixels.shape[2:] == (4, 8)
    with pytest.raises(RowError, match="there is no folder of images"):
        FrameFolder(root, "../charts", FrameSampling()).files()
    with pytest.raises(RowError, match="lasts 3.00 s; there is nothing from 9.00 s on"):
        FrameFolder(root, name, FrameSampling(start=9.0))()


# ---- what is wrong with a row

WRONG = [
    ("mmmu", MMMU, {"answer": "C"}, "wanted letters of the 2 choices as `answer`, got ['C']"),
    ("mmmu", MMMU, {"options": "['a', __import__('os')]"}, "wanted a list of texts as `options`"),
    ("mmmu", MMMU, {"options": "[" * 9999}, "wanted a list of texts as `options`"),
    ("mmmu", MMMU, {"image_3": None}, "its text shows <image 3>, but the row has no such image"),
    ("mmmu", MMMU, {"answer": "?"}, "its answer is not published; `unlabelled: true` keeps it"),
    ("mmmu", MMMU, {"tools": "x"}, "nothing reads the column `tools`"),
    ("mathvista", MATHVISTA, {"query": None}, "wanted a text as `query`, got None"),
    ("mathvista", MATHVISTA, {"answer": "green"}, "the answer 'green' is none of its `choices`"),
    ("mathvista", FLOAT, {"precision": None}, "wanted a finite number as `precision`"),
    ("mathvista", MATHVISTA, {"decoded_image": None}, "there is no file 'images/7.jpg'"),
    ("mmbench", MMBENCH, {"index": "x"}, "wanted a finite number as `index`, got 'x'"),
    ("mmbench", MMBENCH, {"index": 1.5}, "wanted a whole number as `index`"),
    ("mmbench", MMBENCH, {"B": None, "C": "x"}, "wanted at least two choices, in the columns A"),
    ("mmbench", MMBENCH, {"image": "9"}, "it shows the image of row 9, which is not before it"),
    ("mmbench", MMBENCH, {"image": None}, "wanted one image, got 0"),
    ("ocrbench", OCR, {"image_path": "../../etc/passwd"}, "leaves its root"),
    ("ocrbench", OCR, {"answers": []}, "wanted a text as `answers[0]`, got None"),
    ("chartqa", CHART, {"imgname": "b.png"}, "there is no file 'b.png'"),
    ("chartqa", CHART, {"query": None}, "wanted a text as `query`"),
    ("video_mme", VIDEO, {"videoID": "../a"}, "there is no file '../a.mp4'|leaves its root"),
    ("video_mme", VIDEO, {"answer": "E"}, "wanted letters of the 4 choices"),
    ("mvbench", MV, {"answer": "He slept."}, "the answer 'He slept.' is none of its `candidates`"),
    ("mvbench", MV, {"start": "x"}, "wanted a finite number as `start`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "change", "message"), WRONG)
def test_a_wrong_row_is_named_and_can_be_dropped(home, caplog, name, row, change, message):
    file = {
        "mvbench": "moving_count.json",
        "ocrbench": "rows.json",
        "chartqa": "rows.json",
        "mmbench": "rows.jsonl",
    }.get(name, "rows.parquet")
    ids = {
        "mmmu": ("id", "x_y_9"),
        "mathvista": ("pid", "9"),
        "mmbench": ("index", 4),
        "video_mme": ("question_id", "9"),
    }
    key, uid = ids.get(name, ("id", 2))
    write_rows(home / "bad" / file, [row, {**row, key: uid, **change}])
    with pytest.raises(RowError, match="1 row of .* cannot be used") as caught:
        read(name, f"bad/{file}")
    said = str(caught.value)
    assert any(part in said for part in message.split("|")) and ("[1]: " in said or ":2: " in said), said
    assert len(read(name, f"bad/{file}", bad_rows="drop")) == 1
    assert "dropped " in caplog.text and "1 of 2 rows are left out" in caplog.text


def test_a_file_of_another_benchmark_is_one_clear_error(home):
    with pytest.raises(
        RowError, match="no row of mmmu, it lacks id, options, question_type: imgname, query, label"
    ):
        read("mmmu", "charts/test_human.json")
    write_rows(home / "unknown_task.json", [MV])
    with pytest.raises(
        RowError, match="'unknown_task' is no task of MVBench; its files are named action_seq"
    ):
        read("mvbench", "unknown_task.json")
    (home / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(RowError, match="cannot read 'broken.parquet'"):
        read("mmmu", "broken.parquet")


def test_unlabelled_rows_get_no_reward(home):
    write_rows(home / "hidden.parquet", [{**MMMU, "answer": "?"}])
    (prompt,) = read("mmmu", "hidden.parquet", unlabelled=True)
    assert prompt.target is None
    assert benchmark_answer([prompt], [Outcome(text="A")]) == [None]


def test_a_prompt_of_no_benchmark_needs_a_form():
    prompt = Prompt("p", (), "12")
    assert benchmark_answer([prompt], [Outcome(text="12.5")], form="chartqa") == [1.0]
    with pytest.raises(ValueError, match="the prompt 'p' is of no benchmark; set `form`"):
        benchmark_answer([prompt], [Outcome(text="12")])


def test_a_tag_leaves_the_thought_out():
    prompt, text = Prompt("p", (), "12"), "<think>It is 13.</think><answer>12</answer>"
    score = lambda **options: benchmark_answer([prompt], [Outcome(text=text)], form="chartqa", **options)
    assert (score(), score(tag="answer")) == ([0.0], [1.0])


# ---- the whole way, with recorded answers

NO_MODEL = ["policy=vision.recorded_answers", "evaluation.engine=[offline]", "output_dir=out"]
ANSWERED = {  # ids and answers, and the numbers of the official rules
    "mmmu": (
        {"validation_Art_Theory_1": "(B)", "validation_Math_2": "it is 3"},
        {"accuracy": 0.5, "parsed": 1.0, "business": math.nan, "art_and_design": 1.0, "science": 0.0},
    ),
    "mathvista": (
        {"7": 'So the answer. The answer is "B".', "8": "about 1.2"},
        {"accuracy": 0.5, "parsed": 0.5, "multi_choice": 1.0, "free_form": 0.0},
    ),
    "mmbench": ({"3": "A", "1000003": "red or blue"}, {"accuracy": 0.5, "circular": 0.0, "parsed": 0.5}),
    "ocrbench": ({"0": "It says centre.", "1": "x+1"}, {"accuracy": 1.0, "recognition": 1.0}),
    "chartqa": (
        {"test_human#1": "12.6", "test_augmented#0": "No"}, {"accuracy": 0.5, "human": 1.0, "augmented": 0.0},
    ),
    # One of two questions is answered, and right.
    "video_mme": ({"001-1": "(B)", "001-2": "three"}, {"accuracy": 1.0, "short": 1.0, "parsed": 0.5}),
    "mvbench": (
        {"action_sequence#0": "(B) He ran.", "episodic_reasoning#1": "(A)", "moving_count#2": ""},
        {"accuracy": 1 / 3, "action_sequence": 1.0, "moving_count": 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERED)
def test_evaluate_gives_the_numbers_without_a_model_or_media(home, name, caplog):
    answers, wanted = ANSWERED[name]
    write_rows(home / "answers.jsonl", [{"id": key, "answer": text} for key, text in answers.items()])
    data = [f"path={FILES[name]}", "root=nowhere", "answers=answers.jsonl"]
    path = str(CONFIGS / f"evaluate/{name}.yaml")
    assert main(["evaluate", path, *NO_MODEL, *(f"evaluation.data.{text}" for text in data)]) == 0
    found = json.loads((home / "out/evaluation.json").read_text())["metrics"]
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, nan_ok=True), key
    assert "no row has a target" not in caplog.text


def test_the_command_says_in_one_line_what_is_wrong(home, capsys):
    path = str(CONFIGS / "evaluate/mmmu.yaml")
    for given, message in (
        ("evaluation.data.path=nowhere/*.parquet", "there is no file or folder 'nowhere/*.parquet'"),
        ("evaluation.data.path=charts/test_human.json", "no row of mmmu, it lacks id, options"),
        ("evaluation.data.format=mmmo", "must be one of 'mmmu', 'mathvista'"),
    ):
        assert main(["evaluate", path, *NO_MODEL, given]) == 2
        assert message in capsys.readouterr().err
