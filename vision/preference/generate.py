"""Generation of scored answer pairs about images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from mmrl.config.binding import Bound
from mmrl.core.protocols import Engine
from mmrl.core.types import Media, Prompt, Trajectory
from mmrl.vision.media.dataset_writer import IMAGE_SIGNATURES
from mmrl.vision.media.media_root import decode_image
from mmrl.vision.media.prompts import ask
from mmrl.vision.media.video import MediaError
from mmrl.vision.preference.select import ScoredPair
from mmrl.vision.preference.sources import ImageSource, SourceItem, digest_of


def generate_pairs(
    items: Iterable[SourceItem],
    images: ImageSource,
    folder: Path,
    engine: Engine,
    reward: Bound,
    choose_prompt: Callable[[SourceItem], str],
) -> list[ScoredPair]:
    """Generate two answers to each image with an engine, and score both with a reward.

    The pairs are in the order of the items; items that cannot be used become pairs with a fault. Images that
    are stored inside rows are written to `folder`.
    """
    pairs: list[ScoredPair] = []
    prompts: dict[str, Prompt] = {}
    for item in items:
        pair, image = _decoded(item, images, folder)
        if image is not None:
            prompts[item.place] = ask(item.place, [image], choose_prompt(item), None, {})
            pair = replace(pair, prompt=prompts[item.place].text)
        pairs.append(pair)
    if not prompts:
        return pairs
    asked = [prompt for prompt in prompts.values() for _ in range(2)]
    rows: dict[str, list[Trajectory]] = {uid: [] for uid in prompts}
    for row in engine.rollout(asked):
        rows[row.prompt.uid].append(row)
    for uid, both in rows.items():
        if len(both) != 2:
            raise ValueError(f"the engine gave {len(both)} answers about '{uid}', not two")
        both.sort(key=lambda row: row.outcomes[-1].recorded.get("contrast_alpha", 0.0))
    scores = iter(reward(asked, [row.outcomes[-1] for both in rows.values() for row in both]))
    # An encoder has a limit of length; other rewards have none.
    reads_whole = getattr(reward.function, "reads_whole", lambda text: True)
    answers = {}
    for uid, both in rows.items():
        texts = tuple(row.outcomes[-1].text or "" for row in both)
        answers[uid] = {
            "texts": texts,
            "lengths": tuple(row.length for row in both),
            "scores": tuple(
                None if score is None else float(score) for score in (next(scores), next(scores))
            ),
            "h": tuple(row.outcomes[-1].recorded.get("contrast_alpha") for row in both),
            "split": tuple(not reads_whole(text) for text in texts),
        }
    return [pair if pair.fault else replace(pair, **answers[pair.place]) for pair in pairs]


def _decoded(item: SourceItem, images: ImageSource, folder: Path) -> tuple[ScoredPair, Media | None]:
    """Decode the image of an item; without one the pair has a fault."""
    name, fault = "", "bad_row"
    try:
        if item.ref is None:
            raise MediaError(item.fault)
        name, fault = item.ref.path or item.place, "missing"
        data = images.bytes_of(item.ref)
        fault = "unreadable"
        frames = decode_image(data, name)
    except MediaError as error:
        return ScoredPair(item.place, name, fault=fault, what=str(error)), None
    digest = digest_of(data)
    if item.ref.data:
        suffixes = (suffix for signature, suffix in IMAGE_SIGNATURES.items() if data.startswith(signature))
        name = f"{digest}{next(suffixes, '.img')}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return ScoredPair(item.place, name, digest=digest), Media("image", name, lambda: frames)
