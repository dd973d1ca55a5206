"""The benchmarks from their files to their numbers: readers, ready-made answers, and `mmrl evaluate`."""

from __future__ import annotations

import base64
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.cli import main
from mmrl.core.types import Frames, Media, Outcome, Prompt
from mmrl.data.dataset_io import RowError
from mmrl.data.messages import interleaved
from mmrl.vision.benchmarks.amber import Words
from mmrl.vision.benchmarks.benchmark_files import FileError, read_answers
from mmrl.vision.datasets.binary_vqa import amber, pope
from mmrl.vision.datasets.captioning import chair, closed_vocabulary, object_halbench
from mmrl.vision.media.prompts import with_answers
from mmrl.vision.policies.recorded_answers import RecordedAnswers
from tests.support.official_metrics import amber_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
INSTANCES = {
    "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}],
    "images": [{"id": 7, "file_name": "seven.png"}, {"id": 8, "file_name": "eight.png"}],
    "annotations": [
        {"image_id": 7, "category_id": 1},
        {"image_id": 7, "category_id": 1},
        {"image_id": 8, "category_id": 2},
    ],
}
CAPTIONS = {
    "annotations": [{"image_id": 8, "caption": "A man with puppies."}, {"image_id": 9, "caption": "x"}]
}
MADE = {"7": "Two dogs and a cat.", "8": "A cat."}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with small files of every benchmark, from where commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for name in ("seven.png", "eight.png"):
        Image.new("RGB", (4, 3), (200, 0, 0)).save(tmp_path / "pictures" / name)
    files = {
        "instances.json": INSTANCES,
        "captions.json": CAPTIONS,
        "made.json": {
            "overall": {},
            "imgToEval": {key: {"image_id": int(key), "caption": text} for key, text in MADE.items()},
        },
        "relation.json": {"tree": ["forest"], "dog": ["puppy"], "cat": []},
        "annotations.json": [
            {"id": 1, "type": "generative", "truth": ["tree"], "hallu": ["dog"]},
            {"id": 2, "type": "discriminative-hallucination", "truth": "no"},
            {"id": 3, "type": "discriminative-attribute-state", "truth": "yes"},
        ],
        "query.json": [
            {"id": 1, "image": "seven.png", "query": "Describe this image."},
            {"id": 2, "image": "seven.png", "query": "Is there a dog in this image?"},
            {"id": 3, "image": "eight.png", "query": "Is the tree green?"},
        ],
        "responses.json": [
            {"id": 1, "response": "a forest, a puppy"},
            {"id": 2, "response": "No"},
            {"id": 3, "response": "yes"},
        ],
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "synonyms.txt").write_text("person, man\ndog, puppy\ncat\n")
    (tmp_path / "safe_words.txt").write_text("orange\nline\n")
    return tmp_path


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


COCO = {"ontology": "synonyms.txt", "instances": ("instances.json",), "captions": ("captions.json",)}
AMBER = {"path": "query.json", "annotations": "annotations.json", "relation": "relation.json"}


# ---- CHAIR


def test_chair_joins_instances_and_reference_captions(home):
    seven, eight = chair(**COCO, root="pictures")
    assert (seven.uid, seven.target.objects) == ("7", {"dog"})
    assert eight.target.objects == {"cat", "person", "dog"}
    assert seven.text == "Describe this image." and not seven.answers
    assert seven.media[0].load().pixels.shape == (1, 3, 3, 4)


def test_chair_takes_the_images_it_is_told_to(home):
    images = lines(home / "images.jsonl", {"image_id": 8})
    (only,) = chair(**COCO, root="pictures", images=images)
    assert only.uid == "8"
    images = lines(home / "images.jsonl", {"image_id": 10})
    with pytest.raises(FileError, match="the instances contain 2 images, but not '10'"):
        chair(**COCO, root="pictures", images=images)


def test_chair_scores_ready_made_captions_without_images(home):
    prompts = chair(**COCO, answers="made.json")
    assert {prompt.uid: prompt.answers[0].text for prompt in prompts} == MADE
    answers = lines(home / "made.jsonl", {"image_id": 8, "caption": "a dog"})
    (only,) = chair(**COCO, answers=answers)
    assert only.uid == "8"


def test_missing_images_are_named_before_anything_runs(home):
    (home / "pictures" / "eight.png").unlink()
    with pytest.raises(
        RowError, match=r"1 row of 'instances\.json' cannot be used; mend them:\n  8: there is no file"
    ):
        chair(**COCO, root="pictures")
    with pytest.raises(ValueError, match="name the folder of the images"):
        chair(**COCO)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON dict"),
        ("{", "cannot read"),
        ('{"images": [], "annotations": []}', "is no file of COCO instances: KeyError: 'categories'"),
    ],
)
def test_files_that_are_no_coco_are_refused(home, text, message):
    (home / "instances.json").write_text(text)
    with pytest.raises(FileError, match=message):
        chair(**COCO, root="pictures")


# ---- ready-made answers


def test_answers_of_every_form(home):
    assert read_answers(home / "made.json") == MADE
    for name, rows in (
        ("a.jsonl", [{"image_id": 7, "caption": "a"}]),
        ("lines.json", [{"question_id": 7, "text": "a"}, {"question_id": 8, "text": "b"}]),
    ):
        found = read_answers(Path(lines(home / name, *rows)))
        assert found["7"] == "a"
    assert read_answers(home / "responses.json")["2"] == "No"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"image_id": 7}], "wanted one of"),
        ([{"caption": "a"}], "wanted one of"),
        ([{"id": 7, "text": "a"}, {"id": 7, "text": "b"}], "was answered before"),
    ],
)
def test_answers_without_an_id_or_twice_are_refused(home, rows, message):
    with pytest.raises(FileError, match=message):
        read_answers(Path(lines(home / "a.jsonl", *rows)))


def test_answers_to_nothing_are_an_error_and_missing_ones_are_counted(home, caplog):
    prompts = chair(**COCO, root="pictures")
    with pytest.raises(ValueError, match="answers 1 unknown prompts, such as '9'"):
        with_answers(prompts, {"9": "a"}, "made.json")
    with caplog.at_level(logging.WARNING, "mmrl"):
        assert len(with_answers(prompts, {"7": "a"}, "made.json")) == 1
    assert "'made.json' answers 1 of 2 prompts" in caplog.text


def test_no_model_takes_answers_as_rows_and_refuses_to_learn():
    policy = RecordedAnswers()
    row = policy.encode(Prompt("a", ()), Outcome(text="two words"))
    assert (row.length, row.outcomes[0].text, row.on_policy) == (2, "two words", True)
    with pytest.raises(ValueError, match="learns nothing"):
        policy.collate((row,))
    with pytest.raises(ValueError, match="gives no step a probability"):
        policy(None)


# ---- Object HalBench and sets of our own


def test_object_halbench_asks_about_encoded_images(home):
    encoded = base64.b64encode((home / "pictures" / "seven.png").read_bytes()).decode()
    path = lines(home / "bench.jsonl", {"image_id": 7, "question": "What is there?", "image": encoded})
    (prompt,) = object_halbench(path=path, **COCO)
    assert prompt.text == "What is there?" and prompt.target.objects == {"dog"}
    assert prompt.media[0].load().pixels[0, :, 0, 0].tolist() == [200, 0, 0]
    answers = lines(home / "answers.jsonl", {"image_id": 7, "question": "What?", "text": "Assistant: a dog"})
    (prompt,) = object_halbench(path=path, **COCO, answers=answers)
    assert prompt.answers[0].text == "a dog"


def test_object_halbench_reads_files_where_nothing_is_encoded(home):
    path = lines(home / "bench.jsonl", {"image_id": 7, "question": "What is there?"})
    (prompt,) = object_halbench(path=path, **COCO, root="pictures")
    assert prompt.media[0].load().pixels.shape == (1, 3, 3, 4)
    path = lines(home / "bench.jsonl", {"image_id": 7, "question": "What?", "image": "seven.png"})
    (prompt,) = object_halbench(path=path, **COCO)  # a path, but no root
    with pytest.raises(ValueError, match="is no base64"):
        prompt.media[0].load()
    path = lines(home / "bench.jsonl", {"image_id": 9, "question": "What?"})
    with pytest.raises(RowError, match="wanted a question and an image_id of the instances, got '9'"):
        object_halbench(path=path, **COCO)


def test_closed_set_reads_objects_absent_ones_and_captions(home):
    row = {"image": "seven.png", "objects": ["puppies"], "absent": ["cat"], "captions": ["a man"]}
    path = lines(home / "set.jsonl", row)
    (prompt,) = closed_vocabulary(
        path=path, ontology="synonyms.txt", root="pictures", prompt="What is there?"
    )
    assert prompt.target.objects == {"dog", "person"} and prompt.target.absent == {"cat"}
    assert prompt.uid == "seven.png" and prompt.text == "What is there?"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "seven.png"}, "wanted image and objects, got \\['image'\\]"),
        ({"image": "seven.png", "objects": ["cow"]}, "'cow' names no class"),
        ({"image": "seven.png", "objects": ["dog"], "absent": ["puppy"]}, "cannot be both there and absent"),
    ],
)
def test_closed_set_names_rows_that_are_wrong(home, row, message):
    path = lines(home / "set.jsonl", row)
    with pytest.raises(RowError, match=message):
        closed_vocabulary(path=path, ontology="synonyms.txt", root="pictures")


# ---- POPE and AMBER

ASKED = (
    {"question_id": 1, "image": "seven.png", "text": "Is there a dog in the image?", "label": "yes"},
    {"question_id": 2, "image": "seven.png", "text": "Is there a cat in the image?", "label": "no"},
)


def test_pope_reads_questions_and_answers_in_their_order(home):
    path = lines(home / "coco_pope_random.json", *ASKED)  # lines, though it is called json
    first, second = pope(path=path, root="pictures", prompt="{text} Answer yes or no.")
    assert first.text == "Is there a dog in the image? Answer yes or no."
    assert (first.target, second.target) == ("yes", "no")
    given = [
        {"question": "is there a dog in the image?", "answer": "Yes."},
        {"question": ASKED[1]["text"], "answer": ""},
    ]
    prompts = pope(path=path, answers=lines(home / "answers.jsonl", *given))
    assert [prompt.answers[0].text for prompt in prompts] == ["Yes.", ""]


def test_pope_refuses_answers_in_another_order_or_number(home):
    path = lines(home / "pope.jsonl", *ASKED)
    swapped = lines(home / "a.jsonl", *[{"question": row["text"], "answer": "Yes"} for row in ASKED[::-1]])
    with pytest.raises(FileError, match="answers must be in the order of the questions"):
        pope(path=path, answers=swapped)
    with pytest.raises(FileError, match="holds 1 answers to 2 questions"):
        pope(path=path, answers=lines(home / "a.jsonl", {"answer": "Yes"}))


def test_pope_refuses_labels_other_than_yes_and_no(home):
    path = lines(home / "pope.jsonl", {**ASKED[0], "label": "Yes"})
    with pytest.raises(RowError, match="the label must be yes or no, not 'Yes'"):
        pope(path=path, root="pictures")
    path = lines(home / "pope.jsonl", {"image": "seven.png", "text": "Is it?"})
    with pytest.raises(RowError, match="the label must be yes or no, not None"):
        pope(path=path, root="pictures")


def test_amber_asks_for_descriptions_and_for_yes_or_no(home):
    described, asked, state = amber(**AMBER, root="pictures", safe_words="safe_words.txt")
    assert described.target.counts("a forest, a puppy, an orange")["mentions"] == 2
    assert described.target.words.safe == {"orange", "line"}
    assert (asked.target, asked.columns["type"]) == ("no", "discriminative-hallucination")
    assert state.target == "yes"
    answered = amber(**AMBER, answers="responses.json")
    assert [prompt.answers[0].text for prompt in answered] == ["a forest, a puppy", "No", "yes"]


def shouting(text):
    return text.upper().split()


def alike(one, other):
    return True


def test_amber_takes_other_functions_for_nouns_and_meaning(home):
    here = "tests.vision.test_hallucination_data"
    described = amber(**AMBER, root="pictures", nouns_by=f"{here}:shouting", similar_by=f"{here}:alike")[0]
    assert described.target.counts("tree")["mentions"] == 0
    assert described.target.words.similar("a", "b")


@pytest.mark.parametrize("uid", [0, 4, "1"])
def test_amber_refuses_ids_without_an_annotation(home, uid):
    (home / "query.json").write_text(json.dumps([{"id": uid, "image": "seven.png", "query": "?"}]))
    with pytest.raises(RowError, match="wanted as `id` a number of 1 to 3 annotations, got"):
        amber(**AMBER, root="pictures")


# ---- the whole way

NO_MODEL = ["policy=vision.recorded_answers", "evaluation.engine=[offline]", "output_dir=out"]


def measured(name, home, *overrides):
    path = str(CONFIGS / f"evaluate/{name}.yaml")
    data = [f"evaluation.data.{text}" for text in overrides]
    assert main(["evaluate", path, *NO_MODEL, *data]) == 0
    return json.loads((home / "out" / "evaluation.json").read_text())


@pytest.fixture
def few(monkeypatch):
    """Draw fewer bootstrap samples."""
    monkeypatch.setattr("mmrl.training.evaluate.RESAMPLES", 50)


FROM_COCO = ("ontology=synonyms.txt", "instances=[instances.json]", "captions=[captions.json]")


def test_evaluate_chair_gives_its_numbers_with_intervals(home, few, capsys):
    found = measured("chair", home, *FROM_COCO, "images=''", "answers=made.json")
    # dog, cat; cat: one of three mentions and one of two captions is wrong, 1 of 1 and 1 of 3 classes named
    wanted = {"CHAIRs": 1 / 2, "CHAIRi": 1 / 3, "recall": 2 / 4, "completions/mean_length": 3.5}
    assert {name: found["metrics"][name] for name in wanted} == pytest.approx(wanted)
    # the first image alone: 1 of 2; the second: 0 of 1
    assert found["intervals"]["CHAIRi"] == [0.0, 0.5]
    assert "CHAIRi" in capsys.readouterr().out


def test_evaluate_object_halbench_gives_its_numbers(home, few):
    rows = [{"image_id": int(key), "question": "What?", "image": "AAAA"} for key in MADE]
    path = lines(home / "bench.jsonl", *rows)
    answers = lines(home / "a.jsonl", *[{"image_id": key, "answer": text} for key, text in MADE.items()])
    found = measured("object_halbench", home, *FROM_COCO, f"path={path}", f"answers={answers}")["metrics"]
    wanted = {
        "response_hallucination": 1 / 2,
        "object_hallucination": 1 / 3,
        "precision": 2 / 3,
        "recall": 1 / 2,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert found["f1"] == pytest.approx(4 / 7)  # 2 * 2/3 * 1/2 / (7/6)


def test_evaluate_closed_set_gives_its_numbers(home, few):
    row = {"id": "7", "image": "seven.png", "objects": ["dog"], "absent": ["cat", "man"]}
    path = lines(home / "set.jsonl", row)
    answers = lines(home / "a.jsonl", {"id": "7", "text": "a dog and a cat"})
    given = ("ontology=synonyms.txt", f"path={path}", f"answers={answers}")
    found = measured("closed_vocabulary", home, *given)["metrics"]
    assert (found["tempted"], found["precision"], found["recall"]) == (0.5, 0.5, 1.0)


def test_evaluate_pope_gives_its_numbers(home, few):
    path = lines(home / "pope.jsonl", *ASKED)
    answers = lines(home / "a.jsonl", {"answer": "Yes"}, {"answer": "Hm"})
    found = measured("pope", home, f"path={path}", f"answers={answers}")["metrics"]
    wanted = {"accuracy": 0.5, "precision": 0.5, "recall": 1.0, "f1": 2 / 3, "yes_ratio": 1.0}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_evaluate_amber_gives_the_numbers_of_its_script(home, few):
    paths = [f"{key}={home / value}" for key, value in AMBER.items()]
    found = measured("amber", home, *paths, "safe_words=safe_words.txt", "answers=responses.json")["metrics"]
    read = lambda name: json.loads((home / name).read_text())
    wanted = amber_metrics(read("responses.json"), read("annotations.json"), Words(read("relation.json")))
    # the script rounds to one decimal, precision and recall before F1
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=0.06), name
    assert set(wanted) <= set(found)


def test_evaluate_says_what_is_wrong_with_answers(home, capsys):
    path = lines(home / "pope.jsonl", *ASKED)
    answers = lines(home / "a.jsonl", {"answer": "Yes"})
    given = [f"evaluation.data.path={path}", f"evaluation.data.answers={answers}"]
    assert main(["evaluate", str(CONFIGS / "evaluate/pope.yaml"), *NO_MODEL, *given]) == 1
    assert re.search("failed: FileError: .*holds 1 answers to 2 questions", capsys.readouterr().err)


def test_media_stand_where_a_text_marks_them():
    one, two = (Media("image", name, lambda: Frames(torch.zeros(0), torch.zeros(0))) for name in "ab")
    shown = lambda text, *media: [
        part.media.name if part.media else part.text for part in interleaved(text, media)
    ]
    assert shown("which?", one, two) == ["a", "b", "which?"]
    assert shown("is <image> like\n<image>?", one, two) == ["is ", "a", " like\n", "b", "?"]
    assert shown("<image>which?", one) == ["a", "which?"]
    with pytest.raises(RowError, match="the text marks image, but the row holds image, image"):
        shown("<image>", one, two)
