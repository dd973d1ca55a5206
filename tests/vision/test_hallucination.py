"""What answers mention, against what is there: words, ontologies, and the counts of the benchmarks."""

from __future__ import annotations

import json

import pytest

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks import amber
from mmrl.vision.benchmarks.caption_words import singular, tokens
from mmrl.vision.benchmarks.chair import COUNTS, Scene
from mmrl.vision.benchmarks.object_vocabulary import CHAIR_PHRASES, ontology_of, read_ontology
from mmrl.vision.benchmarks.pope import NEITHER, NO, YES, parse_yes_no, with_article
from mmrl.vision.builders.pope_questions import PopeQuestions
from mmrl.vision.rewards.answers import binary_vqa, object_f1, object_mentions
from tests.support.official_metrics import amber_metrics, chair_metrics

SYNONYMS = """person, man, people, baby, passenger
dog, puppy
cat
chair, seat
toilet
tie, bow
train, locomotive
bus
cake,  cheesecake
traffic light, stop light
wine glass
"""
PETS = ontology_of({"dog": ["puppy"], "cat": [], "hot dog": [], "sunglasses": []})


@pytest.fixture
def coco(tmp_path):
    def read(style="chair", **options):
        (tmp_path / "synonyms.txt").write_text(SYNONYMS)
        return read_ontology(tmp_path / "synonyms.txt", style, **options)

    return read


def names(ontology, text):
    return [mention.name for mention in ontology.mentions(text)]


# ---- words


@pytest.mark.parametrize(
    ("many", "one"),
    [
        ("dogs", "dog"), ("buses", "bus"), ("bus", "bus"), ("boxes", "box"), ("glasses", "glass"),
        ("men", "man"), ("policemen", "policeman"), ("people", "person"), ("ties", "tie"), ("tvs", "tv"),
        ("puppies", "puppy"), ("scissors", "scissors"), ("skis", "ski"), ("horses", "horse"),
        ("couches", "couch"), ("tomatoes", "tomato"), ("shoes", "shoe"), ("taxis", "taxi"), ("gas", "gas"),
        ("children", "child"), ("grandchildren", "grandchild"), ("grass", "grass"), ("houses", "house"),
    ],
)  # fmt: skip
def test_singular(many, one):
    assert singular(many) == one


def test_singular_of_a_singular_is_itself():
    # The script of CHAIR brings them to the singular as well, and so never finds a sports ball.
    for word in set(" ".join(CHAIR_PHRASES).split()) - {"sports"}:
        assert singular(word) == word


def test_tokens_part_signs_and_contractions_from_words():
    text = "It isn't the dog's \"bowl\", (two) cats... 1,000. A traffic-light; u.s. army."
    wanted = "It is n't the dog 's \" bowl \" , ( two ) cats ... 1,000 . A traffic-light ; u.s . army ."
    assert " ".join(tokens(text)) == wanted


# ---- ontologies


def test_mentions_keep_order_and_repeats():
    assert names(PETS, "Two dogs, a cat and a PUPPY.") == ["dog", "cat", "dog"]
    assert PETS.mentions("puppies")[0].word == "puppy"


def test_a_phrase_is_one_word_and_hides_what_is_inside():
    assert names(PETS, "hot dogs") == ["hot dog"]
    assert names(PETS, "hot, dogs") == ["dog"]


def test_classes_named_in_the_plural_are_found():
    assert names(PETS, "a man with sunglasses") == ["sunglasses"]


def test_phrases_of_three_words_come_before_those_of_two():
    ontology = ontology_of({"stop light": [], "stop light pole": [], "light": []})
    assert names(ontology, "a stop light pole, a stop light") == ["stop light pole", "stop light"]


def test_phrases_may_be_read_as_something_else_or_as_nothing():
    ontology = ontology_of({"train": []}, {"train track": "", "freight train": "train"})
    assert names(ontology, "a freight train on train tracks") == ["train"]


def test_a_word_may_not_name_two_classes():
    with pytest.raises(ValueError, match="'bow' names two classes of the ontology: 'tie' and 'ribbon'"):
        ontology_of({"tie": ["bow"], "ribbon": ["bow"]})


def test_the_rules_of_chair(coco):
    assert names(coco(), "a baby elephant and an adult dog") == ["dog"]  # no person
    assert names(coco(), "a passenger train") == ["train"]
    assert names(coco(), "a man in a bow tie") == ["person", "tie"]
    assert names(coco(), "wine glasses near traffic lights") == ["wine glass", "traffic light"]
    assert names(coco(), "train tracks and a home plate") == []
    assert names(coco(), "a toilet seat; the seat of the toilet") == ["toilet", "toilet"]
    assert names(coco(), "a seat") == ["chair"]


def test_styles_differ_in_phrases_and_in_a_space_of_the_list(coco):
    # the script of CHAIR leaves a space before a word, which is thus never found; RLAIF-V's takes it off
    assert (names(coco(), "a cheesecake"), names(coco("refined"), "a cheesecake")) == ([], ["cake"])
    ontology = coco("refined")
    assert names(ontology, "a stop light by train tracks") == ["traffic light"]
    assert "hair drier" not in ontology.phrases and "hair drier" in coco().phrases


def drop_every_s(word):
    return word.rstrip("s")


def test_another_function_of_singular_forms_can_be_named(coco):
    other = coco(singular_by="tests.vision.test_hallucination:drop_every_s")
    assert (names(coco(), "a bus"), names(other, "a bus")) == (["bus"], [])
    with pytest.raises(ValueError, match="cannot import 'nothing:at_all'"):
        coco(singular_by="nothing:at_all")


def test_an_ontology_in_json(tmp_path):
    path = tmp_path / "ontology.json"
    raw = {
        "objects": {"Dog": ["puppy"], "seat": []},
        "phrases": {"home plate": None},
        "unless": {"seat": ["dog"]},
    }
    path.write_text(json.dumps(raw))
    ontology = read_ontology(path)
    assert names(ontology, "a puppy") == ["Dog"] and ontology.name_of("puppies") == "Dog"
    assert names(ontology, "a seat") == ["seat"] and names(ontology, "a seat for a dog") == ["Dog"]
    with pytest.raises(ValueError, match="'cow' names no class"):
        ontology.name_of("cow")
    for wrong in ("[]", "{}", '{"objects": 3}', "{"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="is no ontology"):
            read_ontology(path)
    with pytest.raises(ValueError, match="cannot read the ontology"):
        read_ontology(tmp_path / "nothing.json")


# ---- CHAIR and Object HalBench


def scene(*objects, absent=()):
    return Scene(frozenset(objects), PETS, frozenset(absent))


def test_chair_on_two_dogs_and_a_cat():
    # mentions dog, cat; the cat is not there
    found = chair_metrics([scene("dog").counts("two dogs and a cat")])
    assert (found["CHAIRi"], found["CHAIRs"]) == (0.5, 1.0)


def test_counts_have_repeats_in_mentions_and_none_in_classes():
    counts = scene("dog", "hot dog", absent=("cat", "sunglasses")).counts("a dog, a puppy, a cat, a cat")
    assert counts == dict(zip(COUNTS, [4, 2, 1, 2, 1, 1, 0, 1, 2], strict=True))


def test_a_corpus_is_a_ratio_of_sums():
    captions = [
        scene("dog").counts("a dog and a dog and a cat"),  # 1 of 3 wrong, 1 of 1 class found
        scene("dog", "cat").counts("a cat"),  # 0 of 1 wrong, 1 of 2 classes
        scene("dog").counts("nothing to see"),  # 0 of 0, 0 of 1
    ]
    found = chair_metrics(captions)
    # precision 3/4, recall 2/4, F1 2 * 3/4 * 1/2 / (5/4)
    wanted = {"CHAIRs": 1 / 3, "CHAIRs_refine": 1 / 2, "CHAIRi": 1 / 4, "precision": 3 / 4, "recall": 1 / 2}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert found["f1"] == pytest.approx(0.6) and found["tempted"] == 0.0


def test_a_corpus_without_mentions_is_0_and_no_crash():
    found = chair_metrics([scene("dog").counts("")])
    assert (found["CHAIRi"], found["CHAIRs"], found["CHAIRs_refine"], found["f1"]) == (0, 0, 0, 0)


# ---- yes or no


@pytest.mark.parametrize(
    ("text", "pope", "exact", "first"),
    [
        ("Yes", YES, YES, YES),
        ("No", NO, NO, NO),
        ("", YES, NEITHER, NEITHER),  # the script of POPE takes whatever does not say no for yes
        ("Yes, there is no doubt.", NO, NEITHER, YES),
        ("It is. There is no doubt", YES, NEITHER, NO),  # the text up to the first full stop counts
        ("no,", NO, NEITHER, NO),
        ("NO", YES, NEITHER, NO),
        ("I do not know", NO, NEITHER, NEITHER),
        ("yes <answer>no</answer>", YES, NEITHER, NO),
        ("Nobody knows", YES, NEITHER, NEITHER),
        ("not yes", NO, NEITHER, NEITHER),
        ("Yes/No", YES, NEITHER, NEITHER),
        ("yes or no", NO, NEITHER, NEITHER),
        ("neither yes nor no", NO, NEITHER, NEITHER),
        ("ＹＥＳ, no doubt", NO, NEITHER, YES),
    ],
)
def test_parse_yes_no(text, pope, exact, first):
    assert [parse_yes_no(text, form) for form in ("pope", "exact", "first_word")] == [pope, exact, first]


# ---- POPE


PICTURES = {
    "a.jpg": ["dog", "cat", "tree"],
    "b.jpg": ["dog", "apple", "cow"],
    "c.jpg": ["dog", "cow", "car"],
    "d.jpg": ["cat", "car"],
}


def questions(strategy, **options):
    return PopeQuestions(stream=Stream(0), source="", **options).questions(PICTURES, strategy)


@pytest.mark.parametrize("strategy", ["random", "popular", "adversarial"])
def test_pope_asks_for_three_objects_and_after_each_for_one_that_is_not_there(strategy):
    rows = questions(strategy)
    assert len(rows) == 3 * 3 * 2 and {row["image"] for row in rows} == {"a.jpg", "b.jpg", "c.jpg"}
    assert [row["question_id"] for row in rows] == list(range(1, 19))
    assert [row["label"] for row in rows] == ["yes", "no"] * 9
    for image in ("a.jpg", "b.jpg", "c.jpg"):
        mine = [row for row in rows if row["image"] == image]
        asked = [row["text"].removeprefix("Is there a").removeprefix("n").split()[0] for row in mine]
        assert asked[::2] == PICTURES[image][:3]
        assert not set(asked[1::2]) & set(PICTURES[image]) and len(set(asked)) == 6


def test_pope_asks_for_what_is_frequent_or_near():
    # dog 3, car 2, cat 2, cow 2, apple 1, tree 1: of those the image of dog, cat and tree does not hold
    of_a = lambda rows: [row["text"] for row in rows if row["image"] == "a.jpg" and row["label"] == "no"]
    asked = lambda *names: [f"Is there {with_article(name)} in the image?" for name in names]
    assert of_a(questions("popular")) == asked("car", "cow", "apple")
    # the dog stands with the cow most often, the cat also with the car; nothing new stands with the tree,
    # so that one is drawn, and only the apple is left
    assert of_a(questions("adversarial")) == asked("cow", "car", "apple")


def test_pope_draws_images_by_its_generator():
    assert len(questions("random", num_images=2)) == 12
    assert questions("random") == questions("random")
    other = PopeQuestions(stream=Stream(1), source="")
    assert other.questions(PICTURES, "random") != questions("random")


def test_pope_runs_out_of_objects_with_a_clear_error():
    with pytest.raises(ValueError, match=r"no absent object is left for image 'a\.jpg'"):
        PopeQuestions(stream=Stream(0), source="").questions({"a.jpg": ["a", "b", "c"]}, "random")


def test_articles():
    assert [with_article(name) for name in ("dog", "apple", "Umbrella")] == [
        "a dog",
        "an apple",
        "an Umbrella",
    ]
    assert questions("random", template="See {}?")[0]["text"].startswith("See a")


# ---- AMBER


WORDS = amber.Words(
    {"tree": ["leaf", "forest"], "dog": ["puppy"], "sea": ["beach"], "cat": []}, frozenset({"leaf"})
)
NOUNS = {"mentions": 6, "hallucinated": 2, "correct": 1, "truth": 2, "matched": 1, "tempting": 2}


def test_amber_counts_nouns():
    # of the vocabulary: leaf (never counted, but in the denominator), forest and tree (cover the tree), puppy
    # (matches the dog), sea (neither), tree; Dog is written with a capital and rock is not known
    described = amber.AmberScene(("tree", "cat"), ("dog", "beach"), WORDS)
    counts = described.counts("A leaf of a forest, trees, a puppy, the sea, a tree. Dog and rock.")
    assert {name: counts[name] for name in NOUNS} == NOUNS
    assert (counts["hallucinating"], counts["clean"]) == (1.0, 0.0)


def test_amber_looks_associations_up_before_names():
    # the forest is an associated word of the tree, so it covers the tree and not the forest
    words = amber.Words({"tree": ["forest"], "forest": []})
    counts = amber.AmberScene(("tree", "forest"), (), words).counts("a forest and a tree")
    assert (counts["correct"], counts["truth"], counts["hallucinated"]) == (1, 2, 0)


def test_amber_never_counts_safe_words_as_hallucinated():
    counts = amber.AmberScene(("cat",), (), WORDS).counts("a leaf and a puppy")
    assert (counts["mentions"], counts["hallucinated"]) == (2, 1)


def test_amber_takes_words_of_about_the_same_meaning():
    alike = lambda one, other: {one, other} == {"sea", "beach"} or {one, other} == {"puppy", "cat"}
    words = amber.Words(WORDS.association, WORDS.safe, similar=alike)
    counts = amber.AmberScene(("tree", "cat"), ("dog", "beach"), words).counts("a puppy by the sea")
    # the puppy matches the tempting dog by name, but is near the cat that is there, so it is no hallucination
    # and covers the cat; the sea is near the tempting beach
    assert (counts["hallucinated"], counts["correct"], counts["matched"]) == (1, 1, 2)


ANNOTATIONS = [
    {"id": 1, "type": "generative", "truth": ["tree", "cat"], "hallu": ["dog"]},
    {"id": 2, "type": "discriminative-hallucination", "truth": "no"},
    {"id": 3, "type": "discriminative-attribute-state", "truth": "yes"},
    {"id": 4, "type": "discriminative-attribute-number", "truth": "no"},
    {"id": 5, "type": "relation", "truth": "no"},
]


def answered(*texts):
    return [{"id": i, "response": text} for i, text in enumerate(texts, 1)]


def test_amber_prints_what_its_script_prints():
    given = answered("A tree, a puppy and the sea.", "No", "No", "yes", "Yes")
    found = amber_metrics(given, ANNOTATIONS, WORDS)
    # 2 of 3 nouns, 1 of 2 objects, 1 of 1 tempting one; denominators begin at .001: 200 / 3.001 = 66.6
    assert [found[name] for name in ("CHAIR", "Cover", "Hal", "Cog")] == [66.6, 50.0, 100.0, 99.9]
    # of 4 answers one is right; of 2 answered No one is right; of 3 true noes one was found:
    # 2 * .5 * .333 / (.8331) = 40.0
    names = ("accuracy", "precision", "recall", "f1")
    assert [found[f"discriminative/{name}"] for name in names] == [25.0, 50.0, 33.3, 40.0]
    # .999^2 * 2 / (1.998 + .001) = 99.85
    assert [found[f"existence/{name}"] for name in names] == [99.9, 99.9, 99.9, 99.9]
    assert [found[f"attribute/{name}"] for name in names] == [0.0, 0.0, 0.0, 0.0]
    assert found["AMBER"] == pytest.approx((100 - 66.6 + 40.0) / 2)


def test_amber_pools_attributes_with_three_starts():
    found = amber_metrics([{"id": 4, "response": "No"}], ANNOTATIONS, WORDS)
    names = ("accuracy", "precision", "recall", "f1")
    # 1 / 1.001 = .9990 of one count, 1 / 1.003 = .9970 of three; 2 * .997^2 / (1.994 + .0001) = .99695
    assert [found[f"number/{name}"] for name in names[:3]] == [99.9, 99.9, 99.9]
    assert [found[f"attribute/{name}"] for name in names] == [99.7, 99.7, 99.7, 99.7]


def test_amber_without_the_quirks():
    given = answered("A tree, a puppy and the sea.", "No", "No", "yes", "Yes")
    found = amber_metrics(given, ANNOTATIONS, WORDS, official=False, form="first_word")
    assert found["CHAIR"] == pytest.approx(200 / 3) and found["existence/f1"] == 100.0


def test_amber_with_all_answers_yes_finds_nothing_and_does_not_crash():
    given = [{"id": i, "response": "Yes"} for i in range(2, 6)]
    for official in (True, False):
        found = amber_metrics(given, ANNOTATIONS, WORDS, official=official)
        assert (found["discriminative/recall"], found["discriminative/f1"]) == (0.0, 0.0)
    assert "CHAIR" not in found and "AMBER" not in found


# ---- rewards


def rewarded(reward, target, text, columns=None, **options):
    return reward([Prompt("a", (), target, columns=columns or {})], [Outcome(text=text)], **options)[0]


def test_object_mentions_gives_every_count_and_nothing_for_other_prompts():
    target = scene("dog", absent=("cat",))
    given = [rewarded(object_mentions, target, "a dog, a cat", count=name) for name in COUNTS]
    assert given == [2, 1, 1, 1, 1, 1, 0, 1, 1]
    assert rewarded(object_mentions, "yes", "a dog") is None
    assert rewarded(object_mentions, target, None, count="mentions") == 0


def test_object_f1_of_the_best_a_worse_and_an_empty_description():
    target = scene("dog", "cat")
    assert rewarded(object_f1, target, "a dog and a cat") == 1.0
    # one of two mentions is there, one of two classes is found
    assert rewarded(object_f1, target, "a dog, a hot dog") == 0.5
    assert rewarded(object_f1, target, "a dog, a dog, a hot dog", form="precision") == pytest.approx(2 / 3)
    assert rewarded(object_f1, target, "a dog, a dog, a hot dog", form="recall") == 0.5
    assert rewarded(object_f1, target, "") == 0.0
    assert rewarded(object_f1, None, "a dog") is None


def test_yes_no_is_right_wrong_or_unreadable():
    assert [rewarded(binary_vqa, "no", text) for text in ("No.", "yes", "maybe")] == [1.0, 0.0, 0.0]
    assert [rewarded(binary_vqa, "no", text, of="answer") for text in ("No.", "yes", "maybe")] == [
        NO,
        YES,
        NEITHER,
    ]
    assert rewarded(binary_vqa, "yes", "No", of="truth") == YES
    assert rewarded(binary_vqa, scene("dog"), "No") is None


def test_yes_no_keeps_a_dimension():
    state = {"type": "discriminative-attribute-state"}
    kept = {
        dimension: rewarded(binary_vqa, "no", "No", state, dimension=dimension)
        for dimension in ("state", "attribute", "number", "existence")
    }
    assert kept == {"state": 1.0, "attribute": 1.0, "number": None, "existence": None}
