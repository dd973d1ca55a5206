"""Names that were replaced by the field's do not come back in the library, the configurations or the docs."""

from __future__ import annotations

import re
from pathlib import Path

from mmrl.config.registry import HOMES, pieces
from tests.support.rules import rule

ROOT = Path(__file__).parents[1]
FOLDERS = ("mmrl", "vision", "diffusion", "compression", "configs", "examples", "docs")
ENDINGS = {".py", ".yaml", ".md", ".toml"}
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in ENDINGS and not any(parent.is_symlink() for parent in path.parents)
)

# As words anywhere: identifiers that mean nothing else.
GONE = [
    "visual_bits", "all_bits", "sign_bits", "sign_books", "importance_drop", "merge_tokens",
    "low_bit_weights", "cut_weights", "with_unrelated", "with_blind_mix", "with_blind_tail",
    "with_distortion", "from_noised", "by_segment", "with_probes", "check_cache", "compare_exact",
    "h_ratio", "twin_as_worse", "soft_shape", "detached_clip", "soft_gate", "negative_aware",
    "guarded_ratio", "velocity_gap", "negative_entropy", "jpeg_size", "share_above", "settling",
    "staircase", "ratio_is_not_one", "held_out_falls", "samples_as_asked", "groups_vary", "rewards_order",
    "texts_reach", "media_reach", "memory_suffices", "effective_share", "times_faster", "same_answers",
    "pictured_steps", "tiny_model", "contrastive_model", "closed_set", "no_model", "neurons",
]  # fmt: skip

# As names of pieces: words that have honest uses elsewhere.
NAMES = {
    "beside", "limit", "rescale", "downscale", "anchor", "plain", "imitation", "stored", "saturation",
    "diversity", "recorded", "remote", "reported", "confusion", "combination", "collapses", "rises", "yes_no",
    "pictures",
}  # fmt: skip

# Phrases of a private dialect.
PHRASES = (
    r"\bthat (?:is|are) none\b",
    r"\bmay see none\b",
    r"\bas they came\b",
    r"\bwhat is held\b",
    r"\bis told\b",
    r"(?<![-\"])\b[Pp]ictures?\b",  # but `make demo-pictures`
)
REPLACED = re.compile("|".join([rf"(?<!\w)(?:{'|'.join(GONE)})(?!\w)", *PHRASES]))


@rule(FILES, lambda path: str(path.relative_to(ROOT)))
def test_replaced_names_and_phrases_do_not_occur(path):
    text = path.read_text()
    for found in REPLACED.finditer(text):
        yield f"line {text.count(chr(10), 0, found.start()) + 1}: replace '{found[0]}' by the field's word"


@rule(sorted(HOMES))
def test_no_piece_has_a_replaced_name(kind):
    for name in sorted({entry.name for entry in pieces(kind)} & (NAMES | set(GONE))):
        yield f"give '{name}' the name that replaced it"


def test_no_kind_has_a_replaced_name():
    replaced = {"focus", "gain", "aggregate", "exhibit", "meter"}
    assert not (replaced | {"estimate", "alarm", "checkup", "data_check"}) & set(HOMES)
