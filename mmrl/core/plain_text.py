"""Protection against control tokens of a model in text from data, tools and other models.

A control token is a word such as <|im_end|> that a chat template writes to begin and end turns. Tokenizers
recognise these words in any text. So the mark `BREAK` is inserted into each control word of a text before the
text enters a template. The tokenizer then splits the rendered template at each mark, so that the model sees
the same characters as ordinary tokens. Text without control words is tokenized as usual.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

BREAK = "\udc00"  # an unpaired surrogate; `whole` removes it from all input
PRIVATE = range(0xE000, 0xF900)  # Unicode's private-use characters
# Special tokens of common vocabularies, except <image> and <video>, with which data rows mark media.
COMMON = re.compile(
    r"<[|\N{FULLWIDTH VERTICAL LINE}][^<>\s]{1,40}>|<[^<>\s|]{1,40}[|\N{FULLWIDTH VERTICAL LINE}]>"
    r"|</?s>|<(?:bos|eos|pad|unk|mask)>|<(?:start|end)_of_\w+>|<fake_token_around_image>|<image_soft_token>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|THINK|IMG|CLS|SEP|MASK|gMASK)\]"
    r"|\[IMG_(?:BREAK|END)\]|<IMG_CONTEXT>"
)
OPEN_CLIP = ("<start_of_text>", "<end_of_text>")  # special tokens of open_clip's tokenizer
SENT = re.compile(rf"{COMMON.pattern}|<(?:image|video|audio)>")
BLOCK_END = re.compile(r"</([^<>/\s]+)>|\[/([^\[\]/\s]+)\]")


def whole(text: str) -> str:
    """Replace unpaired surrogates, which cannot be encoded, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every string in a JSON value, including keys of objects."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {each_text(key, change): each_text(item, change) for key, item in value.items()}
        case list() | tuple():
            return [each_text(item, change) for item in value]
    return value


def block_after(written: str) -> str:
    """Return the name of the first closing tag in a text ("x" for </x> or [/x]), or ""."""
    end = BLOCK_END.search(written)
    return end[1] or end[2] if end else ""


def inside(block: str, texts: Sequence[str]) -> list[str]:
    """Insert a space into every tag named `block` in texts that a template will put inside such a block.

    So a tool's reply cannot close its block, even if </tool_response> is no special token of the model.
    """
    mark = re.compile(rf"[<\[](?=\s*/?\s*{re.escape(block)}\s*[>\]])", re.IGNORECASE)
    parted = list(texts)
    for match in reversed(list(mark.finditer("".join(texts))) if block else []):
        place, at = match.end(), 0
        while place > len(texts[at]):
            place, at = place - len(texts[at]), at + 1
        parted[at] = f"{parted[at][:place]} {parted[at][place:]}"
    return parted


def unused_marker(texts: Iterable[str]) -> str:
    """Return a private-use character that no text contains; raises `ValueError` if all are used."""
    used = {letter for text in texts for letter in text if ord(letter) in PRIVATE}
    for number in PRIVATE:
        if chr(number) not in used:
            return chr(number)
    raise ValueError(f"a text holds all {len(PRIVATE)} characters for private use; remove some")


def parted(text: str, words: Iterable[str] = ()) -> str:
    """Insert a space into control words, for tokenizers of other programs, which do not know `BREAK`.

    `words` are that tokenizer's control words; empty: common ones. HTML escapes match too (for open_clip).
    """
    expression = "|".join(map(re.escape, words))
    for sign, name in (("<", "lt"), (">", "gt")):
        expression = expression.replace(sign, f"(?:{sign}|&{name};|&amp;{name};)")
    pattern = re.compile(expression, re.IGNORECASE) if expression else SENT
    return pattern.sub(lambda match: re.sub(r"^(&(?:amp;)?lt;|.)", r"\1 ", match[0]), text)


def control_words(tokenizer: Any) -> set[str]:
    """Return all special tokens of a tokenizer; `all_special_tokens` lacks tokens without a role."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {*map(str, tokenizer.all_special_tokens), *(token.content for token in added if token.special)}


class PlainText:
    """Marks the control words in texts, and tokenizes marked texts.

    Args:
        tokenizer: A transformers tokenizer, which is not changed.
        more: Further control words.
        mark: Character inserted into control words; no text may contain it.
        any_case: Ignore case, for a tokenizer that lower-cases texts.
    """

    def __init__(
        self, tokenizer: Any, more: Iterable[str] = (), mark: str = BREAK, any_case: bool = False
    ) -> None:
        self.source, self.mark = tokenizer, mark
        words = {word for word in {*control_words(tokenizer), *more} if len(word) > 1}
        longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        self.pattern = re.compile(longest_first or "(?!)", re.IGNORECASE if any_case else 0)
        self.begun = {word[:end] for word in words for end in range(1, len(word))}
        self.longest = max(map(len, self.begun), default=0)

    def marked(self, value: Any) -> Any:
        """Mark all texts in a value (text, messages, schemas) before a template or a tokenizer reads them."""
        return each_text(value, self._marked)

    def settled(self, rendered: str) -> str:
        """Remove marks from a rendered template wherever the unmarked text contains no control word."""
        if self.mark not in rendered:
            return rendered
        plain = rendered.replace(self.mark, "")
        return plain if self.pattern.findall(plain) == self.pattern.findall(rendered) else rendered

    def ids(self, text: str) -> list[int]:
        """Tokenize a text without template, and without bos and eos tokens."""
        return self.batch([text], add_special_tokens=False)["input_ids"][0]

    def batch(self, texts: Iterable[str], **options: Any) -> Any:
        """Tokenize texts without template; `options` go to the tokenizer."""
        return self.tokenizer([self.settled(self.marked(text)) for text in texts], **options)

    @cached_property
    def tokenizer(self) -> MarkedTokenizer:
        """A replacement of the tokenizer that also accepts marked texts."""
        return MarkedTokenizer(self.source, self.mark)

    def processor(self, processor: Any) -> Any:
        """Return a shallow copy of a processor that also accepts marked texts."""
        twin = copy.copy(processor)
        twin.tokenizer = self.tokenizer
        return twin

    def _marked(self, text: str) -> str:
        """Mark control words in a text, and an incomplete one at its end that following text may complete."""
        text = whole(text)
        while self.pattern.search(text):
            text = self.pattern.sub(lambda match: match[0][0] + self.mark + match[0][1:], text)
        core = text.rstrip()
        begins = any(core[-size:] in self.begun for size in range(1, min(self.longest, len(core)) + 1))
        return core + self.mark + text[len(core) :] if begins else text


class MarkedTokenizer:
    """A tokenizer that splits texts at marks and drops the marks."""

    def __init__(self, source: Any, mark: str) -> None:
        self.source, self.mark = source, mark
        self._twin: tuple[str, Any] = "", None  # replacement of the mark, and a tokenizer with it as a token

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # `copy` looks these up before `__init__`
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __call__(self, text: str | Sequence[str], **options: Any) -> Any:
        """Tokenize like the original tokenizer, but split texts at marks."""
        texts = [text] if isinstance(text, str) else list(text)
        if not any(self.mark in words for words in texts):
            return self.source(text, **options)
        token, twin = self._knowing(texts)
        late = {name: options.pop(name) for name in ("padding", "return_tensors") if name in options}
        if late.get("padding") == "max_length":
            late["max_length"] = options.get("max_length")
        rows = twin([words.replace(self.mark, token) for words in texts], **options)
        mark_id = twin.convert_tokens_to_ids(token)
        places = [[i for i, token_id in enumerate(ids) if token_id != mark_id] for ids in rows["input_ids"]]
        rows = {
            name: [[row[i] for i in indices] for row, indices in zip(listed, places, strict=True)]
            for name, listed in rows.items()
        }
        if isinstance(text, str) and not late.get("return_tensors"):
            rows = {name: listed[0] for name, listed in rows.items()}
        return self.source.pad(rows, **{"padding": False, **late})

    def _knowing(self, texts: Sequence[str]) -> tuple[str, Any]:
        """Return a character that no text contains, and a copy of the tokenizer in which it is a token."""
        from tokenizers import AddedToken

        token, twin = self._twin
        if twin is None or any(token in words for words in texts):
            token, twin = unused_marker(texts), copy.deepcopy(self.source)
            twin.add_tokens([AddedToken(token, normalized=False, special=False)])
            self._twin = token, twin
        return token, twin
