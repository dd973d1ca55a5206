"""Builder of preference pairs: a reward such as CLIP's ranks two answers per image, without a judge."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mmrl.config.binding import Pieces
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, ShareBelowOne
from mmrl.config.registry import builder
from mmrl.config.schema import as_piece, as_plain
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, SourceError
from mmrl.data.media_root import MediaRef
from mmrl.data.video import MediaError
from mmrl.runtime.content_hash import of_weights
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import locked, write_whole
from mmrl.runtime.shards import hash_of_files
from mmrl.vision.preference.export import PairShards, as_row, write_data_set
from mmrl.vision.preference.generate import (
    ImageSource,
    SourceItem,
    digest_of,
    generate_pairs,
)
from mmrl.vision.preference.select import (
    SELECTED,
    Decide,
    PairSelector,
    ScoredPair,
    SelectionRule,
    with_faults,
)

DESCRIBE = ("Describe this image in detail.",)
# Default engines: one answer with hallucination ratio 0 (plain decoding), one with 0.6 (contrastive).
DIAL = (
    {"name": "vision.generate", "max_completion_length": 256, "batch_size": 32},
    {
        "name": "vision.contrastive_decoding",
        "contrast_alpha": [0.0, 0.6],
        "contrast_alpha_std": [0.0, 0.15],
        "gap": 0.1,
    },
)


@builder
@dataclass(kw_only=True)
class ClipPairs:
    """Build preference pairs from two descriptions per image, of which one should hallucinate more.

    The hallucination ratio, a weight of contrastive decoding, differs between the two; a reward ranks them
    (arXiv 2411.17760; ratios and thresholds are our reading). Let d be the score of the answer with the
    lower ratio minus the score of the other. A pair is kept for d >= `tau_keep`, reversed for d <=
    -`tau_flip`, and dropped otherwise. Pairs with d = 0, empty and identical answers, answers without a
    finite score, and repeats of an image and prompt are dropped.

    A killed build resumes from the shards under `.build` with the same result. A build with other thresholds
    reuses the shards. The processes of a launch divide the shards among them. A second concurrent build into
    the same output is an error. The data set is in parquet files for `vision.preference_pairs`, TRL and
    LLaMA-Factory. The manifest lists dropped pairs, counts, the seed, and the models with weight hashes.

    Args:
        source: A folder of images, or a file of rows with `image` and optionally `prompt`.
        model: The policy that generates the answers.
        scores: The reward that scores the answers.
        engines: The engines that generate the answers, innermost first; each wraps the one before.
        prompts: Prompts for images without a prompt; one is chosen at random for each image.
        root: Folder of the images; by default the folder of the rows.
        decide: `score`: rank by the scores. Baselines: `dial` keeps every pair as generated; `random` keeps
            or reverses each pair at random.
        tau_keep: Smallest d of a kept pair; if null, the `quantile` of all |d|.
        tau_flip: Smallest -d of a reversed pair; if null, the `quantile` of all |d|.
        quantile: Quantile of |d| used for each threshold that is null, in [0, 1).
        length_ratio: Largest ratio of the token counts of two answers, at least 1; 0: no limit.
        shard_size: Number of images per shard.
        file_rows: Maximum number of rows per parquet file.
        limit: Maximum number of images; 0: all images.
    """

    goes_on = True  # resumable: `mmrl build` passes the output folder, not a temporary one

    stream: Stream
    source: str
    model: Mapping[str, Any]
    scores: Mapping[str, Any]
    engines: tuple[Any, ...] = DIAL
    prompts: tuple[str, ...] = DESCRIBE
    root: str = ""
    decide: Decide = "score"
    tau_keep: NonNegativeFloat | None = None
    tau_flip: NonNegativeFloat | None = None
    quantile: ShareBelowOne = 0.2
    length_ratio: NonNegativeFloat = 0.0
    shard_size: PositiveInt = 256
    file_rows: PositiveInt = 5000
    limit: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("wanted at least one of `prompts`, got none")
        self.rule = SelectionRule(self.decide, self.tau_keep, self.tau_flip, self.quantile, self.length_ratio)
        self.model, self.scores = as_piece(self.model, "build.model"), as_piece(self.scores, "build.scores")
        self.engines = [as_piece(piece, f"build.engines[{i}]") for i, piece in enumerate(self.engines)]
        pieces = Pieces(Stream())
        pieces.check("policy", self.model, "build.model")
        pieces.name("reward", self.scores, "build.scores")
        for i, piece in enumerate(self.engines):
            pieces.check("engine", piece, f"build.engines[{i}]")

    def build(self, output: Path) -> dict[str, Any]:
        """Generate and score missing pairs, select pairs, and write the data set and its manifest."""
        images, shards = ImageSource(self.source, self.root, self.limit), PairShards(output)
        processes, total = Processes(), sum(1 for _ in images)
        if not total:
            raise SourceError(f"there is no image in '{self.source}'")
        content = images.content()  # hash of the images; must be equal in all processes and when resuming
        processes.assert_equal({"images": f"{total}, {content}"})
        with processes.watching(), locked(shards.folder, processes):
            numbers = range(math.ceil(total / self.shard_size))
            generate = partial(self._generate, images, shards, total, processes)
            shards.fill(numbers, processes, lambda: self._plan(total, content), generate)
            return self._assemble(images, shards, numbers, output) if processes.main else {"images": total}

    def _plan(self, total: int, content: str) -> dict[str, Any]:
        """Return the settings and file hashes on which answers and scores depend, to check resumed builds."""
        return {
            "source": Path(self.source).name,
            "images": total,
            "images_hash": content,
            "seed": self.stream.seed,
            "prompts": list(self.prompts),
            "model": as_plain(self.model),
            "engines": [as_plain(piece) for piece in self.engines],
            "scores": as_plain(self.scores),
            "shard_size": self.shard_size,
            "model_files": hash_of_files(self.model),  # local files only; no weights are loaded yet
            "scores_files": hash_of_files(self.scores),
        }

    def _generate(
        self, images: ImageSource, shards: PairShards, total: int, processes: Processes, numbers: list[int]
    ) -> None:
        pieces = Pieces(self.stream)
        policy = pieces.make("policy", self.model, place="build.model")
        policy.module.to(processes.device)
        engine = policy
        for i, piece in enumerate(self.engines):
            engine = pieces.make("engine", piece, engine, place=f"build.engines[{i}]")
        reward = pieces.make("reward", self.scores, place="build.scores")
        if processes.main:
            hashes = {"model": of_weights(policy.module), "encoder": of_weights(reward.function)}
            shards.agree("hashes", {f"{name}_weights": value for name, value in hashes.items()})
        processes.wait()
        items, began, done, generated = iter(images), time.monotonic(), 0, 0
        for number in range(math.ceil(total / self.shard_size)):
            chunk = list(islice(items, self.shard_size))
            done += len(chunk)
            if number not in numbers:
                continue
            pairs = generate_pairs(chunk, images, shards.media, engine, reward, self._choose_prompt)
            shards.write(number, pairs)
            generated += len(chunk)
            rate = generated * processes.world / (time.monotonic() - began)  # assumes equally fast processes
            left = time.strftime("%H:%M:%S", time.gmtime((total - done) / max(rate, 1e-9)))
            print(f"{done} of {total} images, {rate:.2f} a second, {left} left", file=sys.stderr, flush=True)

    def _choose_prompt(self, item: SourceItem) -> str:
        """Return the prompt of the row, or a random prompt of `prompts`."""
        generator = self.stream.fixed("prompt", item.place)
        return item.prompt or self.prompts[int(torch.randint(len(self.prompts), (), generator=generator))]

    def _assemble(
        self, images: ImageSource, shards: PairShards, numbers: range, output: Path
    ) -> dict[str, Any]:
        """Select pairs, and write the data set and the manifest."""
        shards.remove_unfinished()
        pairs = lambda: with_faults(self.rule, (pair for number in numbers for pair in shards.read(number)))
        # Thresholds depend on all score gaps, so the shards are read twice, one at a time.
        gaps = [pair.gap for pair in pairs() if not pair.fault]
        selector = PairSelector(self.rule, self.rule.thresholds(gaps), self.stream)
        # Count the selected pairs. The coin, here 0, only decides whether to reverse a selected pair.
        count = sum(self.rule.judge(gap, selector.thresholds, 0.0) in SELECTED for gap in gaps)
        if not count:
            reasons = [
                f"{pair.place}: {pair.what or pair.fault or 'small gap'}" for pair in islice(pairs(), 3)
            ]
            raise RowError(f"no image of '{self.source}' gave a pair: {'; '.join(reasons)}")

        def image_of(pair: ScoredPair) -> bytes:
            stored = shards.media / pair.image
            data = stored.read_bytes() if stored.is_file() else images.bytes_of(MediaRef("image", pair.image))
            if digest_of(data) != pair.digest:
                raise MediaError(f"'{pair.image}' is another image than the one described")
            return data

        rows = (as_row(*selected) for selected in selector.select(pairs(), image_of))
        write_data_set(output, rows, count, self.file_rows)
        summary = selector.summary()
        manifest = {
            **shards.recorded("plan"),
            **shards.recorded("hashes"),
            "rule": vars(self.rule),
            "thresholds": dict(zip(("tau_keep", "tau_flip"), selector.thresholds, strict=True)),
            "counts": summary,
            "answers_longer_than_the_encoder_reads": selector.split,
            **selector.means(),
            "dropped": selector.dropped,
        }
        write_whole(output / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        return summary | ({"dropped": len(selector.dropped)} if selector.dropped else {})
