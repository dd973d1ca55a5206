r"""Extraction of the final answer from a text, and normalisation of the spelling of texts."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

THOUGHT_END = re.compile(r"</think\s*>", re.IGNORECASE)
THOUGHT = re.compile(r"\s*<think\s*>", re.IGNORECASE)
WRAPPED = re.compile(r"\s*<([A-Za-z][\w-]*)>(.*)</\1>\s*", re.DOTALL)
BRACE = re.compile(r"\\(?:boxed|fbox)\s*+\{|(?<!\\)[{}]")
DEEPEST = 8  # maximal depth of nested blocks and fractions that are parsed


def tagged(text: str, tag: str) -> list[str]:
    """List the contents of the blocks `<tag>...</tag>` in a text, in order, ignoring the tag's case."""
    ends = [end.end() for end in re.finditer(f"</{tag}>", text, re.IGNORECASE)]
    # Search only up to the last closing tag; each opening tag after it would cost a scan to the end.
    inside = text[: ends[-1]] if ends else ""
    return re.findall(f"<{tag}>(.*?)</{tag}>", inside, re.DOTALL | re.IGNORECASE)


def last_box(text: str) -> tuple[int, int, int] | None:
    r"""Return (start, start of content, end of content) of the last complete \boxed{...}, or None."""
    opened: list[tuple[int, int, bool]] = []
    last = None
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.start(), brace.end(), brace[0] != "{"))
        elif opened:
            start, inside, boxed = opened.pop()
            last = (start, inside, brace.start()) if boxed else last
    return last


def answer_part(text: str, tag: str = "answer") -> str:
    r"""Extract the final answer from a text, without markup.

    The answer is the first of these that the text has: the last block `tag`, the text after the thought
    (`</think>`), the last \boxed{}, the line after `####` (GSM8K), the whole text. An unclosed thought gives
    an empty answer.
    """
    for _ in range(DEEPEST):
        inside = _inside(text, tag)
        if inside is None:
            break
        text = inside
    return "" if THOUGHT.match(text) else text


def _inside(text: str, tag: str) -> str | None:
    r"""Return the content of a text's outermost markup, such as \boxed{...}; None without any."""
    if blocks := tagged(text, tag):
        return blocks[-1]
    if ends := list(THOUGHT_END.finditer(text)):
        return text[ends[-1].end() :]
    if box := last_box(text):
        return text[box[1] : box[2]]
    _, marked, rest = text.rpartition("####")
    if marked and rest.strip() and "\n" not in rest.strip():
        return rest
    wrapped = WRAPPED.fullmatch(text) if text.rstrip().endswith(">") else None
    return wrapped[2] if wrapped and f"</{wrapped[1]}>" not in wrapped[2] else None


# ---- characters

SPELLED = {
    "×": "*", "⋅": "*", "·": "*", "∗": "*", "✕": "*", "÷": "/", "⁄": "/", "∕": "/", "−": "-", "‐": "-",
    "‑": "-", "≤": "<=", "⩽": "<=", "≦": "<=", "≥": ">=", "⩾": ">=", "≧": ">=", "≠": "!=", "’": "'", "‘": "'",
    "‛": "'", "′": "'", "“": '"', "”": '"', "„": '"', "‟": '"', "″": '"', "«": '"', "»": '"', "٪": "%",
    "٫": ".", "٬": ",", "º": "°", "˚": "°",
}  # fmt: skip
FRACTIONS = re.compile(r"(\d?)([¼-¾⅐-⅞])")
SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
# Thousands separators between digits: apostrophes as in 1'234, underscores, thin and non-breaking spaces.
GROUPED = re.compile("(?<=\\d)[\u00a0\u2009\u202f'’_](?=\\d{3}(?!\\d))")
SPAN = re.compile(r"(?<=\d)(\s?)[‒–—―](\s?)(?=\d)")
SIGN = re.compile(r"(?<![\w)])[‒–](?=[\d.])")


class _Spelling(dict[int, str]):
    """Maps characters to their normalised form, computed at the first lookup."""

    def __missing__(self, code: int) -> str:
        char, kind = chr(code), unicodedata.category(chr(code))
        decomposed = unicodedata.decomposition(char)
        if char in SPELLED:
            written = SPELLED[char]
        elif kind == "Cf" or "\ufe00" <= char <= "\ufe0f":  # invisible characters
            written = ""
        elif kind == "Nd":
            written = str(unicodedata.decimal(char))
        elif kind == "Zs":
            written = " "
        elif decomposed.startswith("<") and not decomposed.startswith("<super>"):  # e.g. full-width letters
            written = unicodedata.normalize("NFKC", char)
            written = "".join(SPELLED.get(each, each) for each in written)
        else:
            written = char
        self[code] = written
        return written


_SPELLING = _Spelling()


def spelled(text: str) -> str:
    """Normalise Unicode to NFC, with one form of digits, signs, quotes and spaces.

    Full-width forms and digits of all scripts become ASCII; invisible characters are dropped. Letters keep
    their diacritics.
    """
    if text.isascii():
        return text
    text = SUPERSCRIPTS.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
    text = FRACTIONS.sub(lambda match: f"{match[1]} " * bool(match[1]) + _fraction(match[2]), text)
    text = SIGN.sub("-", SPAN.sub(r"\1-\2", text))
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).translate(_SPELLING))


def _fraction(char: str) -> str:
    return unicodedata.normalize("NFKC", char).replace("⁄", "/")


# ---- LaTeX and Markdown

WRAPPERS = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|sf|sc|normal)?|math(?:rm|bf|it|sf|tt|bb|cal|frak)|operatorname|mbox|emph|"
    r"boldsymbol|boxed|fbox)\*?\s*\{([^{}]*)\}"
)
FRAC = re.compile(r"(\d?)\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
ROOT = re.compile(r"\\sqrt\s*(?:\[([^][{}]*)\])?\s*(?:\{([^{}]*)\}|(\w))")
DEGREE = re.compile(r"\s*\^\s*\{?\s*\\circ\b\s*\}?|\s*\\degree\b")
POWER = re.compile(r"\^\s*\{([^{}]*)\}")
SIMPLE = re.compile(r"[-+]?\w+(?:\.\w+)?")
COMMAND = re.compile(r"\\([A-Za-z]+)\s?|\\(.)", re.DOTALL)
COMMANDS = {
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=",
    "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=", "lt": "<", "gt": ">", "pm": "±", "approx": "≈",
    "infty": "∞", "to": "→", "rightarrow": "→", "left": "", "right": "", "big": "", "Big": "",
    "displaystyle": "",    "quad": " ", "qquad": " ", "percent": "%",
} | {
    name: unicodedata.lookup(f"GREEK SMALL LETTER {name.upper()}")
    for name in ("alpha", "beta", "gamma", "delta", "theta", "mu", "pi", "sigma", "phi", "omega", "tau")
}  # fmt: skip
BOLD = re.compile(r"(?<!\w)(\*\*|__)(?=\S)(.+?)(?<=\S)\1(?!\w)", re.DOTALL)
SQUARE_ROOT = re.compile(r"√\s?(?:\(([^()]*)\)|(\w+))")
ITALIC = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]+?)(?<=[^\s*])\*(?![\w*])")


def plain(text: str) -> str:
    r"""Normalise a text like `spelled`, and remove LaTeX and Markdown: \frac{1}{2} becomes 1/2."""
    text = spelled(GROUPED.sub("", text)).replace("`", "")
    if "\\" in text or "{" in text:
        text = without_latex(text)
    if text.count("$") >= 2 and text.count("$") % 2 == 0:
        text = re.sub(r"\$([^$]*)\$", r"\1", text)
    if "*" in text or "__" in text:
        text = ITALIC.sub(r"\1", BOLD.sub(r"\2", text))
        text = re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text)
    return SQUARE_ROOT.sub(lambda match: f" sqrt({match[1] or match[2]})", text) if "√" in text else text


def without_latex(text: str) -> str:
    """Convert LaTeX to plain text; an unknown command becomes its name."""
    text = text.replace("{,}", ",").replace("\\\\", " ")
    text = DEGREE.sub("°", text)
    for _ in range(DEEPEST):  # from the innermost braces outwards
        before = text
        text = WRAPPERS.sub(r" \1 ", text)
        text = ROOT.sub(_root, text)
        text = FRAC.sub(_frac, text)
        text = POWER.sub(lambda match: "^" + _grouped(match[1]), text)
        if text == before:
            break
    text = COMMAND.sub(_command, text)
    return text.replace("{", "").replace("}", "")


def _grouped(text: str) -> str:
    text = text.strip()
    return text if SIMPLE.fullmatch(text) else f"({text})"


def _root(match: re.Match) -> str:
    inside = (match[2] if match[2] is not None else match[3]).strip()
    return f" sqrt{match[1].strip() if match[1] else ''}({inside})"


def _frac(match: re.Match) -> str:
    over, under = (a if a is not None else b for a, b in ((match[2], match[3]), (match[4], match[5])))
    return f"{match[1]} " * bool(match[1]) + f"{_grouped(over)}/{_grouped(under)}"


def _command(match: re.Match) -> str:
    if match[1] is not None:
        return COMMANDS.get(match[1], f" {match[1]} ")
    char = match[2]
    return "" if char in ",!()[]" else " " if char in ";: " else char


@cache
def marks() -> str:
    """Return all combining characters (accents, vowel signs) for a regular expression's character class."""
    combining = (chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M")
    return "".join(combining) + "\U000e0100-\U000e01ef"
