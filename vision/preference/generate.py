"""Generation of scored answer pairs about images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmrl.config.binding import Bound
from mmrl.core.protocols import Engine
from mmrl.core.types import Media, Trajectory
from mmrl.vision.media.dataset_writer import IMAGE_SIGNATURES
from mmrl.vision.media.media_root import decode_image
from mmrl.vision.media.prompts import ask
from mmrl.vision.media.video import MediaError
from mmrl.vision.preference.select import ScoredPair
from mmrl.vision.preference.sources import ImageSource, SourceItem, digest_of


@dataclass(frozen=True)
class PairGenerator:
    """Generates two answers to each image with an engine, and scores both with a reward.

    Images that are stored inside rows are written to the folder `kept`.
    """

    images: ImageSource
    kept: Path
    engine: Engine
    reward: Bound
    choose_prompt: Callable[[SourceItem], str]

    def pairs(self, items: Sequence[SourceItem]) -> list[ScoredPair]:
        """Generate and score pairs, in the order of the items; faults become pairs without answers."""
        pairs, prompts = [], {}
        for item in items:
            name = item.ref and (item.ref.path or item.place)
            fault = "bad_row"
            try:
                if item.ref is None:
                    raise MediaError(item.fault)
                fault = "missing"
                data = self.images.bytes_of(item.ref)
                fault = "unreadable"
                frames = decode_image(data, name)
            except MediaError as error:
                pairs.append(ScoredPair(item.place, name or "", fault=fault, what=str(error)))
                continue
            digest = digest_of(data)
            if item.ref.data:
                ending = next(
                    (e for signature, e in IMAGE_SIGNATURES.items() if data.startswith(signature)), ".img"
                )
                name = f"{digest}{ending}"
                self.kept.mkdir(parents=True, exist_ok=True)
                (self.kept / name).write_bytes(data)
            media = Media("image", name, lambda frames=frames: frames)
            prompts[item.place] = ask(item.place, [media], self.choose_prompt(item), None, {})
            pairs.append(ScoredPair(item.place, name, prompts[item.place].text, digest=digest))
        if not prompts:
            return pairs
        rows: dict[str, list[Trajectory]] = {uid: [] for uid in prompts}
        for row in self.engine.rollout([prompt for prompt in prompts.values() for _ in range(2)]):
            rows[row.prompt.uid].append(row)
        for uid, both in rows.items():
            if len(both) != 2:
                raise ValueError(f"the engine gave {len(both)} answers about '{uid}', not two")
            both.sort(key=lambda row: row.outcomes[-1].recorded.get("contrast_alpha", 0.0))
        asked = [prompts[uid] for uid in rows for _ in range(2)]
        scores = iter(self.reward(asked, [row.outcomes[-1] for both in rows.values() for row in both]))
        answered = {uid: self._answers(both, [next(scores), next(scores)]) for uid, both in rows.items()}
        return [pair if pair.fault else replace(pair, **answered[pair.place]) for pair in pairs]

    def _answers(self, rows: Sequence[Trajectory], scores: Sequence[float | None]) -> dict[str, tuple]:
        answers = [row.outcomes[-1] for row in rows]
        texts = tuple(answer.text or "" for answer in answers)
        # An encoder has a limit of length; other rewards have none.
        reads_whole = getattr(self.reward.function, "reads_whole", lambda text: True)
        return {
            "texts": texts,
            "lengths": tuple(row.length for row in rows),
            "scores": tuple(None if score is None else float(score) for score in scores),
            "h": tuple(answer.recorded.get("contrast_alpha") for answer in answers),
            "split": tuple(not reads_whole(text) for text in texts),
        }
