"""Parsers for words and numbers; answers and targets are normalised in the same way."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from mmrl.core.answer_text import answer_part, marks, plain, spelled

COUNTS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS = {word: str(value) for value, word in enumerate(COUNTS)}
TEENS = [
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ARTICLES = {"a", "an", "the"}
CONNECTED = {"and", "or", "nor", "to", "vs", "versus", "is", "was"}  # "a" before these is no article
OPTIONAL = {"$", "€", "£", "¥", "₹", "₩", "°", "'", '"'}  # symbols that an answer may omit, but not replace
SCALES = {"%": Fraction(1, 100), "‰": Fraction(1, 1000), "percent": Fraction(1, 100)} | {
    name: Fraction(10) ** power
    for name, power in {
        "hundred": 2, "thousand": 3, "k": 3, "million": 6, "m": 6, "billion": 9, "b": 9, "bn": 9,
        "trillion": 12,
    }.items()
}  # fmt: skip
DIGITS = 300  # limit on the number of digits, and on the exponent, of a number that is parsed

# Read a comma as decimal comma if it does not group thousands, or if dots before it do (1.234,5).
# At most six groups of digits, to bound the time of the regex search in long sequences.
_LITERAL = (
    r"(?:[1-9]\d{0,2}(?:\.\d{3}){1,6},\d++|[1-9]\d{0,2}(?:\.\d{3}){2,6}(?![.,]?\d)"
    r"|[1-9]\d{0,2}(?:,\d{2,3}){0,6},\d{3}(?!,?\d)(?:\.\d++)?"
    r"|(?<!\d,)\d++,\d++(?![.,]?\d)|\d++(?:\.\d++)?|(?<![\d.])\.\d++)"
)
_SIGN = r"(?:(?<![\w)%°'])(?P<sign>[-+]))?"
_MONEY = r"(?:[$€£¥₹₩]\s?)?"
NUMBER = re.compile(
    rf"{_SIGN}{_MONEY}{_SIGN.replace('sign', 'inner')}"
    rf"(?P<whole>\d++ (?=\d++\s?/\s?\d))?(?P<number>{_LITERAL})"
    r"(?:e(?P<e>[-+]?\d++)(?![\w.])|\s?\*\s?10\s?\^\s?\(?(?P<ten>[-+]?\d++)\)?)?"
    rf"(?:\s?/\s?(?P<under>{_LITERAL}))?(?P<power>\^\(?[-+]?\d++\)?)?"
    r"(?:\s?(?P<scale>[%‰]|per ?cent\b|hundred\b|thousand\b|million\b|billion\b|trillion\b)"
    r"|(?P<short>(?-i:[kKMB]|bn))(?![^\W_]))?",
    re.IGNORECASE,
)
_LIST = re.compile(r"(?:[\s,;&.()\[\]]|\band\b|\bor\b)*", re.IGNORECASE)  # text between the numbers of a list
NEGATED = r"(?:\b(?:not|never|isn't|aren't|wasn't|cannot be|can't be|instead of|rather than))"
DENIED = re.compile(rf"(?:{NEGATED}|\b(?:more|less|fewer|greater|smaller|larger) than)[\s(]*$", re.IGNORECASE)
# A number after such text (a negation, a comparison, a function) is not the answer itself.
BOUND = re.compile(
    rf"(?:{NEGATED}|\b(?:more|less|fewer|greater|smaller|other|larger) than|(?:^|\s|(?<![<\w/])[a-z])[<>]=?"
    r"|\b(?:sqrt|log|ln|lg|exp|sin|cos|tan)|\dx)[\s(]*$",
    re.IGNORECASE,
)
# A number before such text (a variable, a root, an unfinished sum) is part of a formula.
FACTOR = re.compile(r"(?:[ixzne]|sqrt)(?![^\W_])|x\d|\s?[π√±]|\+(?!\s?\w)")
AREA = re.compile(r"(?<![^\W\d_])([cdkm]?m|in|ft|yd|mi|units?)\^?\(?([23])\)?(?!\w|\.\d)")  # as in 5 cm^2
JOINED = re.compile(r"\s*(?:,?\s*\b(?:and|or|to|through)\b|[&~→])\s*", re.IGNORECASE)  # as in "3 or 5"
_COUNT = rf"(?:{'|'.join([*COUNTS, *TEENS, *TENS])})"
COUNTED = re.compile(
    rf"\b(minus |negative )?({_COUNT}(?:(?: and)?[- ](?:{_COUNT}|hundred|thousand))*)\b", re.IGNORECASE
)
_PRONOUN = re.compile(r"\b(?:no|the|this|that|which|any|each|every) $", re.IGNORECASE)
MINUS = re.compile(r"(?<![\w)])(?<!\d )(?:minus|negative) (?=[\d.])", re.IGNORECASE)
INSIDE = re.compile(r"(?<=[(\[{])\s*+-?[\d.]++(?:,-?[\d.]++)++\s*+(?=[)\]}])")  # (3,4) is two numbers
SPACED = re.compile(r"\s*[-+]?\W?[1-9]\d{0,2}(?: \d{3})+(?:[.,]\d+)?\s*[%°\w]*\s*")  # as in 10 000
THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")


def readable(text: str) -> str:
    """Normalise an answer to plain text in which numbers can be parsed."""
    text = MINUS.sub("-", re.sub(r"^\s*-\s+(?=[\d.])", "-", plain(text)))
    text = re.sub(r"(?<=\d) (?=\d{3})", "", text) if SPACED.fullmatch(text) else text
    return INSIDE.sub(
        lambda match: match[0] if THOUSANDS.fullmatch(match[0]) else match[0].replace(",", ", "), text
    )


# ---- words


@cache
def _tokens() -> re.Pattern:
    letter = f"[^\\W\\d_]|[{marks()}]"
    word = f"(?:{letter})(?:[^\\W_]|[{marks()}])*+"
    return re.compile(
        rf"(?P<number>{_SIGN}{_LITERAL})|(?P<word>{word}(?:'(?:{word})|\.(?:{word}))*+)(?P<end>\++(?![\w(])|#|\*(?![\w(])|-(?![\w(]))?"
        r"|(?P<operator><=|>=|!=|[-+*/^=<>:()])|(?P<symbol>[^\w\s])"
    )


def words_of(text: str) -> list[str]:
    """List the words of a text in lower case, without articles and punctuation, with numbers in digits.

    Signs, comparisons, percent, currencies, and symbols that change the meaning (C++, A-, 2/3) are words as
    well. A hyphen separates words. "A" is an article only before a noun; articles are kept if there are no
    other words.
    """
    text = readable(text)
    words: list[str] = []
    articles: set[int] = set()
    for token in _tokens().finditer(text):
        if token["number"]:
            words.append(_decimal(token["number"]))
        elif token["word"]:
            if _is_article(token, text, first=not words):
                articles.add(len(words))
            words += _word(token)
        elif written := _mark(token, text):
            words.append(written)
    words = [word for i, word in enumerate(words) if i not in articles] or words
    if not {"+", "-", "*", "/", "^", "=", "<", ">"}.intersection(words):
        words = [word for word in words if word not in "()"]
    while words[:1] == ["("] and words[-1:] == [")"] and ")" not in words[1:-1]:
        words = words[1:-1]
    if len(words) == 1 and re.fullmatch(r"-?\d+\.\d*", words[0]):
        words = [words[0].rstrip("0").rstrip(".")]
    return words


def _is_article(token: re.Match, text: str, *, first: bool) -> bool:
    word, after = token["word"], text[token.end() : token.end() + 30]
    if word.lower() not in ARTICLES or token["end"]:
        return False
    if word in ("a", "A"):  # an article only before a noun, and a capital only as the first word
        noun = re.match(r"[\s\"']+([^\W\d_]{2,})", after)
        return bool(noun and noun[1].lower() not in CONNECTED and (first or word == "a"))
    return bool(re.match(r"\s+\S", after))


def _word(token: re.Match) -> list[str]:
    word, end = token["word"].casefold(), token["end"] or ""
    if "." in word and all(len(part) == 1 for part in word.split(".")):  # U.S. becomes US
        word = word.replace(".", "")
    if end and not (len(word) <= 3 or end[0] in "+#"):
        end = ""
    if word in ("percent", "pct"):
        return ["%"]
    return [f"{WORDS.get(word, word)}{end}"]


def _mark(token: re.Match, text: str) -> str:
    """Return a symbol of a text if it has a meaning, as in 5%; empty for mere punctuation."""
    mark = token[0]
    if token["symbol"]:
        if mark in ("'", '"'):  # feet, inches, or the prime of f'(x), unless it closes a quotation
            before = re.search(
                r"(?:(\d)|(?<![^\W_])[^\W\d_])$", text[max(0, token.start() - 2) : token.start()]
            )
            single = before and text.count(mark) == 1
            return (mark if before[1] else "′") if before and single else ""
        if mark in "%‰" or mark in OPTIONAL:
            return mark
        if mark == "!":  # a factorial, if the answer has no words
            return (
                mark
                if re.search(r"[\d)]$", text[: token.start()]) and not re.search(r"[^\W\d_]{2}", text)
                else ""
            )
        if mark == "|":  # a bar between spaces separates table columns, and has no meaning
            return mark if re.search(r"\S\|$|\|\S", text[max(0, token.start() - 1) : token.end() + 1]) else ""
        return mark if unicodedata.category(mark)[0] == "S" and mark not in "~`™®©¨´" else ""
    if mark in ("=", "<", ">", "<=", ">=", "!=", "(", ")"):
        return mark
    left = re.search(r"([^\W_]+|[)%°])\s?$", text[max(0, token.start() - 20) : token.start()])
    right = re.match(r"\s?([^\W_]+|[(√∞|$€£¥-])", text[token.end() : token.end() + 20])
    if mark == ":":
        return ":" if left and right and left[1].isdigit() and right[1][0].isdigit() else ""
    if mark == "+":
        return "+" if right else ""
    if not left:
        return "-" if mark == "-" and right and not text[token.end()].isspace() else ""
    if mark == "^":
        return "^"
    if not right:
        return ""
    if mark == "*":
        return "*"
    short = all(len(side[1]) == 1 or side[1].isdigit() or _digit_first(side[1]) for side in (left, right))
    return mark if short else ""


def _digit_first(side: str) -> bool:
    return side[0].isdigit() and len(side) < 3


def same_words(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two answers have the same words; one of them may lack a currency or degree sign."""
    if words == others:
        return bool(words)
    units = [OPTIONAL.intersection(each) for each in (words, others)]
    if all(units) or not any(units):
        return False
    one, other = ([word for word in each if word not in OPTIONAL] for each in (words, others))
    return one == other != []


def word_f1(text: str, other: str) -> float:
    """Compute the word F1 of two texts; if neither has words, return 1 for equal texts, else 0."""
    words, wanted = words_of(text), words_of(other)
    shared = (Counter(words) & Counter(wanted)).total()
    if not words and not wanted:
        return float(text.strip() == other.strip())
    return 2 * shared / (len(words) + len(wanted))


# ---- numbers


def _decimal(literal: str) -> str:
    """Normalise a number literal: drop thousands separators, use a decimal point, and write 3.0 as 3."""
    sign = "-" if literal[0] == "-" else ""
    literal = literal.lstrip("+-")
    if re.fullmatch(r"[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}", literal):
        literal = literal.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", literal):
        literal = literal.replace(",", "")
    literal = literal.replace(",", ".")
    literal = f"0{literal}" if literal[0] == "." else literal
    whole, _, decimals = literal.partition(".")
    literal = literal if decimals.strip("0") else whole
    return sign + literal if literal.strip("0.") else literal


def number_in(text: str) -> Fraction | None:
    """Parse the last number of a text as a fraction; None if there is none or it is part of a formula.

    "5 %" gives 1/20, "1/2" and "½" give 1/2, and "2 million", "2e6" and "2 * 10^6" give the same number.
    "2*3", "3-5" and the list "3, 5" give None; "2*3 = 6" gives 6.
    """
    text = _in_digits(text)
    numbers = list(NUMBER.finditer(text))
    while len(numbers) > 1 and DENIED.search(text[: numbers[-1].start()][-20:]):  # as in "5, not 4"
        numbers.pop()
    if not numbers:
        return None
    several = len(numbers) > 1 and (
        _LIST.fullmatch(NUMBER.sub("", text))
        or JOINED.fullmatch(text, numbers[-2].end(), numbers[-1].start())
    )
    return None if several or _in_expression(numbers[-1], text) else _value(numbers[-1])


def _in_digits(text: str) -> str:
    """Normalise an answer; if it has no digits, convert number words such as twenty-one to digits."""
    text = AREA.sub(lambda unit: unit[1] + "²³"[int(unit[2]) - 2], readable(text))
    if len(text) > 2000 or any(char.isdigit() for char in text):
        return text
    return COUNTED.sub(_counted, text)


def _counted(match: re.Match) -> str:
    """Convert a match of number words to digits; return it unchanged if the words form no number."""
    before, after = match.string[: match.start()][-10:], match.string[match.end() :]
    if match[0].lower() == "one" and (_PRONOUN.search(before) or after.startswith(" of ")):
        return match[0]
    total = part = 0
    for word in re.split(r"[- ]", match[2].lower()):
        if word in ("hundred", "thousand"):
            if not part or (word == "hundred" and part > 9):
                return match[0]
            part *= 100 if word == "hundred" else 1000
            total, part = (total + part, 0) if word == "thousand" else (total, part)
        elif word != "and":
            value = [*COUNTS, *TEENS].index(word) if word not in TENS else 10 * TENS.index(word) + 20
            # Number words have a valid order: units follow tens, and tens or units follow hundreds.
            if part % 100 and not (part % 100 >= 20 and part % 10 == 0 and 0 < value < 10):
                return match[0]
            part += value
    return "-" * bool(match[1]) + str(total + part)


def only_number(text: str) -> bool:
    """Whether a text contains exactly one number."""
    return len(NUMBER.findall(_in_digits(text))) <= 1 and number_in(text) is not None


def _in_expression(match: re.Match, text: str) -> bool:
    before = text[max(0, match.start() - 3) : match.start()].rstrip()
    if before[-1:] in ("*", "/", "^") or re.search(r"\d\.$", before):
        return True
    if re.search(r"[\w)]\s?[-+]$|\d\s?:$", before):
        return True
    after = text[match.end() : match.end() + 8]
    if after[:1] == "!" and not re.search(r"[^\W\d_]", text):  # "5!" is a factorial, "There are 5!" is not
        return True
    if re.match(r"[*^/]\s?[\w(]|:\d", after) or FACTOR.match(after):
        return True
    return BOUND.search(text[max(0, match.start() - 20) : match.start()]) is not None


def besides_numbers(text: str) -> set[str]:
    """Return the words of a text without its numbers."""
    return set(words_of(NUMBER.sub(" ", _in_digits(text)))) - OPTIONAL


def _value(match: re.Match) -> Fraction | None:
    literals = [match["number"], match["under"] or "1"]
    power = (match["power"] or "^1").strip("^()")
    exponents = [int(match[name][:6] or 0) for name in ("e", "ten") if match[name]]
    if any(len(each) > DIGITS for each in (*literals, match["whole"] or "")) or len(power) > 3:
        return None
    if any(abs(each) > DIGITS for each in exponents):
        return None
    over, under = (Fraction(_decimal(literal)) for literal in literals)
    over *= Fraction(10) ** sum(exponents)
    if not under or (not over and int(power) < 0) or (power != "1" and len(literals[0]) > 6):
        return None
    value = ((over / under) ** int(power) + int(match["whole"] or 0)) * SCALES.get(
        (match["scale"] or match["short"] or "").lower().replace("per cent", "percent"), 1
    )
    return -value if "-" in (match["sign"], match["inner"]) else value


def exact_text(text: str) -> str:
    """Normalise the case, whitespace and LaTeX text commands of an answer, and write 3.0 as 3."""
    text = re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", spelled(text))
    text = " ".join(text.casefold().split())
    return re.sub(r"(?<=\d)\.0+", "", text) if re.fullmatch(r"[-+]?\d+\.0+", text) else text


def targets_of(target: Any) -> list[str]:
    """List the correct answers of a target as texts; empty for None and for unsupported types.

    3.0 becomes 3, because pandas converts integers to floats. NaN gives no answer. True gives "yes", "true".
    """
    match target:
        case None:
            return []
        case bool():
            return ["yes", "true"] if target else ["no", "false"]
        case str():
            return [target] if answer_part(target).strip() else []
        case int():
            return [str(target)]
        case float():
            if math.isnan(target):
                return []
            return [str(int(target)) if target.is_integer() else repr(target)]
        case list() | tuple() | set() | frozenset():
            return [text for each in target for text in targets_of(each)]
        case object(tolist=tolist):  # numbers and arrays of numpy
            return targets_of(tolist())
    return []
