"""Preference pairs without a judge: a model answers twice, a small encoder says which answer fits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mmrl.config.binding import Pieces
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, ShareBelowOne
from mmrl.config.registry import builder
from mmrl.config.schema import Piece, as_piece, as_plain
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, SourceError
from mmrl.runtime.content_hash import of_weights
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import locked, write_whole
from mmrl.vision.media.media_columns import MediaRef
from mmrl.vision.media.video import MediaError
from mmrl.vision.preference.export import Shards, as_row, write_data_set
from mmrl.vision.preference.generate import Maker
from mmrl.vision.preference.select import FLIPPED, KEPT, Decide, Pair, Rule, Verdicts, decidable
from mmrl.vision.preference.sources import Item, Pictures, content_of, digest_of

DESCRIBE = ("Describe this image in detail.",)
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
class ClipPairs:
    """Let a model describe pictures with two hallucination ratios, score both answers, and keep, reverse or
    drop the pair (arXiv 2411.17760; ratios and thresholds are our reading).

    `source` is a folder of pictures, or rows with `image` and perhaps a `prompt`; else one of `prompts` is
    drawn. `model` is a policy, `engines` are what it answers with, `scores` the reward that decides. With d
    the gap between the answer of the lower ratio and the other, a pair is kept if d is at least `tau_keep`,
    reversed if d is at most -`tau_flip`, and else dropped; a threshold that is left out is the `quantile` of
    all |d|. Ties are dropped, as are empty and identical answers, answers without a finite score, pairs of
    which one has over `length_ratio` times the tokens of the other (0: any), and pictures that were there
    before with the same prompt. `decide: dial` keeps every pair that can be decided, `random` tosses a coin.

    Work is done in shards of `shard_size` pictures under `.build`, from which a build that was killed goes
    on: its data set is the same. Another rule uses them again. The processes of a launch share them; a second
    build of the same output is refused while one goes on. The data set is parquet, at most `file_rows` rows a
    file, for `vision.preference_pairs`, TRL and LLaMA-Factory; the manifest names what was left out, and
    holds counts, seed, model and encoder with hashes of their weights.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        source: str,
        model: Mapping[str, Any],
        scores: Mapping[str, Any],
        engines: tuple[Any, ...] = DIAL,
        prompts: tuple[str, ...] = DESCRIBE,
        root: str = "",
        decide: Decide = "score",
        tau_keep: NonNegativeFloat | None = None,
        tau_flip: NonNegativeFloat | None = None,
        quantile: ShareBelowOne = 0.2,
        length_ratio: NonNegativeFloat = 0.0,
        shard_size: PositiveInt = 256,
        file_rows: PositiveInt = 5000,
        limit: NonNegativeInt = 0,
    ) -> None:
        if shard_size < 1 or file_rows < 1 or not prompts:
            raise ValueError("`shard_size` and `file_rows` must be at least 1, and `prompts` not empty")
        self.rule = Rule(decide, tau_keep, tau_flip, quantile, length_ratio)
        self.stream, self.prompts, self.shard_size, self.file_rows = stream, prompts, shard_size, file_rows
        self.source, self.root, self.limit = source, root, limit
        self.model, self.scores = as_piece(model, "build.model"), as_piece(scores, "build.scores")
        self.engines = [as_piece(piece, f"build.engines[{i}]") for i, piece in enumerate(engines)]
        pieces = Pieces(Stream())
        pieces.check("policy", self.model, "build.model")
        pieces.name("reward", self.scores, "build.scores")
        for i, piece in enumerate(self.engines):
            pieces.check("engine", piece, f"build.engines[{i}]")

    def build(self, output: Path) -> dict[str, Any]:
        """Answer and score what is missing, decide, and write the data set and its manifest."""
        pictures, shards, processes = (
            Pictures(self.source, self.root, self.limit),
            Shards(output),
            Processes(),
        )
        total = pictures.count()
        if not total:
            raise SourceError(f"there is no picture in '{self.source}'")
        content = pictures.content()
        processes.same({"pictures": f"{total}, {content}"})
        with locked(shards.folder, processes):
            if processes.main:
                shards.agree("plan", self._plan(total, content))
            numbers = range(-(-total // self.shard_size))
            # Process 0 looks for all: one that sees shards later would answer while the others do not.
            if not processes.tell(all(map(shards.has, numbers)))[0]:
                self._answer(pictures, shards, total, processes)
            processes.wait()
            told = {"pictures": total}
            return self._assemble(pictures, shards, numbers, output) if processes.main else told

    def _plan(self, total: int, name: str) -> dict[str, Any]:
        """Tell what the answers and their scores depend on."""
        return {
            "source": Path(self.source).name,
            "pictures": total,
            "pictures_hash": name,
            "seed": self.stream.seed,
            "prompts": list(self.prompts),
            "model": as_plain(self.model),
            "engines": [as_plain(piece) for piece in self.engines],
            "scores": as_plain(self.scores),
            "shard_size": self.shard_size,
            "model_files": _files_of(self.model),
            "scores_files": _files_of(self.scores),
        }

    # ---- answering and scoring

    def _answer(self, pictures: Pictures, shards: Shards, total: int, processes: Processes) -> None:
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
        maker = Maker(pictures, shards.media, engine, reward, self._choose_prompt)
        items, began, done, fresh = iter(pictures), time.monotonic(), 0, 0
        for number in range(-(-total // self.shard_size)):
            chunk = list(islice(items, self.shard_size))
            done += len(chunk)
            if shards.has(number) or number % processes.world != processes.rank:
                continue
            shards.write(number, maker.pairs(chunk))
            fresh += len(chunk)
            _tell(done, total, fresh * processes.world / (time.monotonic() - began))

    def _choose_prompt(self, item: Item) -> str:
        """Take the prompt of a row, or draw one."""
        if item.prompt:
            return item.prompt
        generator = self.stream.fixed("prompt", item.place)
        return self.prompts[int(torch.randint(len(self.prompts), (), generator=generator))]

    # ---- deciding and writing

    def _assemble(self, pictures: Pictures, shards: Shards, numbers: range, output: Path) -> dict[str, Any]:
        shards.tidy()
        pairs = lambda: (pair for number in numbers for pair in shards.read(number))
        gaps = [pair.gap for pair, reason in decidable(self.rule, pairs()) if not reason]
        verdicts = Verdicts(self.rule, self.rule.thresholds(gaps), self.stream)
        # Which side a coin falls on changes no count.
        count = sum(self.rule.judge(gap, verdicts.thresholds, 0.0) in (KEPT, FLIPPED) for gap in gaps)
        if not count:
            found = [f"{pair.place}: {pair.what or reason or 'small gap'}" for pair, reason in
                     islice(decidable(self.rule, pairs()), 3)]  # fmt: skip
            raise RowError(f"no picture of '{self.source}' gave a pair: {'; '.join(found)}")
        write_data_set(output, self._rows(pictures, shards, pairs(), verdicts), count, self.file_rows)
        manifest = {
            **shards.told("plan"),
            **shards.told("hashes"),
            "rule": vars(self.rule),
            "thresholds": dict(zip(("tau_keep", "tau_flip"), verdicts.thresholds, strict=True)),
            "counts": verdicts.told,
            "answers_longer_than_the_encoder_reads": verdicts.split,
            **verdicts.means,
            "dropped": verdicts.dropped,
        }
        write_whole(output / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        return verdicts.told | ({"dropped": len(verdicts.dropped)} if verdicts.dropped else {})

    def _rows(
        self, pictures: Pictures, shards: Shards, pairs: Iterator[Pair], verdicts: Verdicts
    ) -> Iterator[dict[str, Any]]:
        """Decide pair after pair, and put the pictures in."""
        for pair, reason in decidable(self.rule, pairs):
            verdict = verdicts.decide(pair, reason)
            if verdict not in (KEPT, FLIPPED):
                continue
            try:
                data = _stored(pair, pictures, shards)
            except MediaError as error:
                verdicts.take_back(pair, verdict, str(error))
            else:
                yield as_row(pair, verdict, data)


def _files_of(piece: Piece) -> str:
    """Hash the files and folders that a piece names: a finished build loads no weights to compare."""
    named = [Path(value) for value in piece.options.values() if type(value) is str and Path(value).exists()]
    return content_of(named) if named else ""


def _stored(pair: Pair, pictures: Pictures, shards: Shards) -> bytes:
    """Read a picture again, which must be the one that was described."""
    kept = shards.media / pair.image
    data = kept.read_bytes() if kept.is_file() else pictures.bytes_of(MediaRef("image", pair.image))
    if digest_of(data) != pair.digest:
        raise MediaError(f"'{pair.image}' is another picture than the one that was described")
    return data


def _tell(done: int, total: int, rate: float) -> None:
    left = time.strftime("%H:%M:%S", time.gmtime((total - done) / max(rate, 1e-9)))
    print(f"{done} of {total} pictures, {rate:.2f} a second, {left} left", file=sys.stderr, flush=True)
