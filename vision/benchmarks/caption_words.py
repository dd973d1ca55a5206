"""Tokenisation of captions (Penn Treebank), and singular forms of English nouns."""

from __future__ import annotations

import re

# Punctuation and contractions that become separate tokens.
_SPLIT = re.compile(
    r"""n't\b|'(?:s|re|ve|ll|d|m)\b   # contractions
    |\.\.\.|--
    |[;@\#$%&?!()\[\]{}<>"`“”]
    |[,:](?!\d)                    # but not in 1,000 or 3:1
    |'(?=\s|$)|(?<!\S)'
    |\.(?=["')\]]*(?:\s|$))        # the end of a sentence
    """,
    re.VERBOSE,
)

IRREGULAR = {
    "people": "person", "men": "man", "women": "woman", "children": "child", "feet": "foot",
    "teeth": "tooth", "geese": "goose", "mice": "mouse", "oxen": "ox", "dice": "die", "knives": "knife",
    "wives": "wife", "lives": "life", "leaves": "leaf", "loaves": "loaf", "shelves": "shelf",
    "bookshelves": "bookshelf", "wolves": "wolf", "halves": "half", "calves": "calf", "scarves": "scarf",
    "thieves": "thief", "elves": "elf", "hooves": "hoof", "selves": "self", "cacti": "cactus",
    "fungi": "fungus", "axes": "axe", "lenses": "lens", "gases": "gas", "irises": "iris",
    "quizzes": "quiz", "movies": "movie", "cookies": "cookie", "ties": "tie", "bowties": "bowtie",
    "neckties": "necktie", "pies": "pie", "zombies": "zombie", "brownies": "brownie", "hoodies": "hoodie",
    "selfies": "selfie", "smoothies": "smoothie", "veggies": "veggie", "hippies": "hippie",
    "doggies": "doggie", "menus": "menu", "emus": "emu", "gnus": "gnu", "gurus": "guru",
    "calories": "calorie", "magpies": "magpie", "collies": "collie", "potpies": "potpie",
}  # fmt: skip
# Endings of plural compounds, such as firemen and penknives, and their singular.
ENDS = {"men": "man", "children": "child", "people": "person", "feet": "foot", "knives": "knife"}
UNCHANGED = {
    "scissors", "sunglasses", "eyeglasses", "jeans", "shorts", "pants", "trousers", "tights", "pajamas",
    "pyjamas", "binoculars", "pliers", "tweezers", "sheep", "fish", "deer", "series", "species", "moose",
    "bison", "aircraft", "tennis", "bus", "gas", "lens", "iris", "canvas", "christmas", "pancreas",
    "atlas", "this", "his", "hers", "its", "was", "has", "is", "as", "us", "yes", "does", "always",
    "perhaps", "across", "besides", "towards", "downstairs", "upstairs", "outdoors", "indoors",
    "sometimes", "chess", "news", "mathematics", "pelvis", "trellis", "basis", "oasis", "chassis",
    "debris", "axis", "crisis", "analysis", "emphasis", "thesis", "clematis",
}  # fmt: skip
DROP_S = {
    "shoes", "toes", "canoes", "hoes", "oboes", "horseshoes", "aches", "headaches", "caches", "mustaches",
    "moustaches",
}  # fmt: skip


def tokens(text: str) -> list[str]:
    """Split a text into words and punctuation; hyphenated words stay whole."""
    return _SPLIT.sub(lambda match: f" {match[0]} ", text).split()


def singular(word: str) -> str:
    """Convert an English noun to its singular by our own rules.

    Other words are returned unchanged or without a final s. CHAIR's script uses the package pattern instead,
    which converts bus to bu, so that bus never matches. Object HalBench uses WordNet.
    """
    if word in IRREGULAR:
        return IRREGULAR[word]
    if word in UNCHANGED or len(word) < 3 or not word.isascii():
        return word
    for ending, replacement in ENDS.items():
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word.removesuffix(ending) + replacement
    if word.endswith(("ss", "us", "'s")) or not word.endswith("s"):
        return word
    if word in DROP_S:
        return word[:-1]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses", "zzes", "oes", "uses")) and not word.endswith("ouses"):
        # "buses" loses "es"; "blouses", "houses" and "fuses" lose only "s".
        return word[:-2] if not word.endswith(("fuses", "cuses", "muses")) else word[:-1]
    return word[:-1]
