"""Builder of a pool: an offline data set with several scored images or videos per prompt."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mmrl.config.binding import Bound, Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import builder
from mmrl.config.schema import as_piece, as_plain
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts
from mmrl.data.dataset_io import RowError
from mmrl.data.readable import checked_prompts, prompt_check
from mmrl.data.row_fields import NamedColumns
from mmrl.diffusion.image_io import save_image, save_video
from mmrl.runtime.content_hash import of_prompts, of_weights
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import locked, write_whole
from mmrl.runtime.reward_calls import call_all, checked
from mmrl.runtime.scoring import Scoring
from mmrl.runtime.shards import Shards, hash_of_files

Score = float | None | list[float | None]  # score of a result, or a list with a score per segment of a video
MEDIA = "media"  # folder of the images and videos inside the output


@builder
@dataclass(kw_only=True)
class Pool:
    """Build a pool of several images or videos per prompt, scored once by all rewards.

    Offline methods train on a pool: GDRO (arXiv 2601.02036) ranks 6 of 16 images, Diffusion-DPO takes the
    best and the worst, and a reward model learns from all. The data sets `diffusion.images` and
    `diffusion.videos` read pools. The reward `{name: precomputed, key: NAME}` returns stored raw values.

    With the engines `diffusion.partial_noise` and `diffusion.segment_preferences`, a pool of two holds the
    pairs of DenseDPO (arXiv 2506.03517): videos from one partly noised video, scored segment by segment.

    An image is left out if a reward returns None for it. A prompt is left out, and listed in the manifest, if
    fewer than `min_generations` images remain or all have equal values. A killed build resumes from its
    shards with the same result. The processes of one launch share the shards.

    Args:
        prompts: The data set of prompts.
        model: The policy that generates.
        engines: The engines that generate, innermost first; with any solver and guidance.
        rewards: The rewards, at least one.
        num_generations: Images or videos per prompt.
        min_generations: Smallest number of scored images of a prompt.
        shard_size: Number of prompts per shard.
        limit: Maximum number of prompts; 0: all prompts.
    """

    goes_on = True  # resumable: `mmrl build` passes the output folder, not a temporary one

    stream: Stream
    prompts: Mapping[str, Any]
    model: Mapping[str, Any]
    engines: Sequence[Any]
    rewards: Sequence[Any]
    num_generations: PositiveInt = 16
    min_generations: PositiveInt = 2
    shard_size: PositiveInt = 16
    limit: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not self.rewards or not self.engines:
            raise ConfigError("a pool needs at least one of `engines` and one of `rewards`")
        if self.min_generations > self.num_generations:
            raise ConfigError(
                f"`min_generations` {self.min_generations} is more than `num_generations` "
                f"{self.num_generations}"
            )
        self.prompts = as_piece(self.prompts, "build.prompts")
        self.model = as_piece(self.model, "build.model")
        self.engines = [as_piece(piece, f"build.engines[{i}]") for i, piece in enumerate(self.engines)]
        self.rewards = [as_piece(piece, f"build.rewards[{i}]") for i, piece in enumerate(self.rewards)]
        pieces = Pieces(Stream())
        pieces.check("policy", self.model, "build.model")
        for i, piece in enumerate(self.engines):
            pieces.check("engine", piece, f"build.engines[{i}]")
        names = [
            pieces.name("reward", piece, f"build.rewards[{i}]").name for i, piece in enumerate(self.rewards)
        ]
        if len({*names}) < len(names):
            raise ConfigError(f"two of the rewards {', '.join(names)} have one name; give one a `label`")

    def build(self, output: Path) -> dict[str, Any]:
        """Generate and score missing shards, and write the rows and the manifest."""
        pieces = Pieces(self.stream)
        check, every = prompt_check(self.model, self.engines), NamedColumns(frozenset(), True)
        prompts = checked_prompts(pieces, self.prompts, "build.prompts", every, check)[: self.limit or None]
        shards, processes = Shards(output), Processes()
        content = of_prompts(prompts)
        processes.assert_equal(content)
        with processes.watching(), locked(shards.folder, processes):
            numbers = range(math.ceil(len(prompts) / self.shard_size))
            generate = partial(self._generate, pieces, prompts, shards, output, processes)
            shards.fill(numbers, processes, lambda: self._plan(content), generate)
            return self._assemble(shards, numbers, output) if processes.main else {"prompts": len(prompts)}

    def _plan(self, content: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings and file hashes on which images and scores depend, to check resumed builds."""
        parts = {"prompts": self.prompts, "model": self.model}
        return {
            **{name: as_plain(piece) for name, piece in parts.items()},
            "engines": [as_plain(piece) for piece in self.engines],
            "rewards": [as_plain(piece) for piece in self.rewards],
            "seed": self.stream.seed,
            "num_generations": self.num_generations,
            "shard_size": self.shard_size,
            "prompts_hash": content["prompts"],
            "media_hash": content["media"],
            "model_files": hash_of_files(self.model),  # local files only; no weights are loaded yet
            "reward_files": [hash_of_files(piece) for piece in self.rewards],
        }

    def _generate(
        self,
        pieces: Pieces,
        prompts: Sequence[Prompt],
        shards: Shards,
        output: Path,
        processes: Processes,
        numbers: list[int],
    ) -> None:
        """Generate and score the images or videos of the shards with these numbers."""
        policy = pieces.make("policy", self.model, place="build.model")
        policy.module.to(processes.device)
        engine = policy
        for i, piece in enumerate(self.engines):
            engine = pieces.make("engine", piece, engine, place=f"build.engines[{i}]")
        places = [f"build.rewards[{i}]" for i in range(len(self.rewards))]
        rewards = [
            pieces.make("reward", piece, place=place)
            for piece, place in zip(self.rewards, places, strict=True)
        ]
        if processes.main:
            shards.agree("hashes", {"model_weights": of_weights(policy.module)})
        processes.wait()
        began = time.monotonic()
        for done, number in enumerate(numbers, 1):
            chunk = prompts[number * self.shard_size : (number + 1) * self.shard_size]
            group = [prompt for prompt in chunk for _ in range(self.num_generations)]
            rollouts = engine.rollout(group)
            values = scores_of(rewards, rollouts)
            shards.write_rows(number, self._rows(chunk, number, rollouts, values, output))
            left = (time.monotonic() - began) / done * (len(numbers) - done)
            clock = time.strftime("%H:%M:%S", time.gmtime(left))
            print(f"{done} of {len(numbers)} shards, {clock} left", file=sys.stderr, flush=True)

    def _rows(
        self,
        prompts: Sequence[Prompt],
        number: int,
        rollouts: Rollouts,
        values: Mapping[str, Sequence[Score]],
        output: Path,
    ) -> Iterator[dict[str, Any]]:
        """Write the results of a shard to files, and yield a row for each prompt."""
        folder = output / MEDIA / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for place, prompt in enumerate(prompts):
            first, names = place * self.num_generations, []
            for i in range(self.num_generations):
                names.append(
                    write_result(rollouts[first + i].outcomes, folder / f"{place:04d}_{i:02d}", prompt)
                )
            yield {
                "id": prompt.uid,
                "prompt": prompt.text,
                "files": [str(path.relative_to(output)) for path in names],
                "scores": {name: [*column[first : first + len(names)]] for name, column in values.items()},
                "columns": own_columns(prompt),
            }

    def _assemble(self, shards: Shards, numbers: range, output: Path) -> dict[str, Any]:
        """Write the rows of usable prompts, and the manifest."""
        shards.remove_unfinished()
        rows, dropped, unscored = [], [], 0
        for found in (row for number in numbers for row in shards.read_rows(number)):
            columns = found["scores"].values()
            scored = [i for i in range(len(found["files"])) if not any(None in parts(c[i]) for c in columns)]
            unscored += len(found["files"]) - len(scored)
            scores = {name: [column[i] for i in scored] for name, column in found["scores"].items()}
            if len(scored) < self.min_generations:
                dropped.append({"id": found["id"], "reason": f"{len(scored)} scored results"})
            elif all(min(column, key=parts) == max(column, key=parts) for column in scores.values()):
                dropped.append({"id": found["id"], "reason": "equal scores"})
            else:
                kind = "videos" if found["files"][0].endswith(".mp4") else "images"
                own = {name: value for name, value in found["columns"].items() if value is not None}
                files = {kind: [found["files"][i] for i in scored], "scores": scores}
                rows.append(own | {"id": found["id"], "prompt": found["prompt"]} | files)
        if not rows:
            raise RowError(f"no prompt has results of different scores: {dropped[:3]}")
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        write_whole(output / "train.jsonl", text)
        counts = {"prompts": len(rows), "dropped": len(dropped), "unscored_results": unscored}
        record = {
            **shards.recorded("plan"),
            **shards.recorded("hashes"),
            "counts": counts,
            "dropped": dropped,
        }
        write_whole(output / "manifest.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        return counts


def own_columns(prompt: Prompt) -> dict[str, Any]:
    """Return the columns and the target of a text prompt; raise `RowError` if a row cannot hold them."""
    if prompt.media:
        raise RowError(f"prompt '{prompt.uid}' has media, and a row of a pool holds text prompts only")
    columns = {**prompt.columns, "target": prompt.target}
    try:
        json.dumps(columns, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"a column of prompt '{prompt.uid}' is no JSON: {error}") from error
    return columns


def parts(score: Score) -> Sequence[float | None]:
    """Return a score as a sequence: one value, or one value per segment."""
    return score if isinstance(score, list) else [score]


def scores_of(rewards: Sequence[Bound], rollouts: Rollouts) -> dict[str, list[Score]]:
    """Return the values of every reward for all rollouts; None where a reward does not apply.

    The value of a rollout with several outcomes, such as the segments of a video, is a list.
    """
    outcomes = [outcome for row in rollouts for outcome in row.outcomes]
    prompts = [row.prompt for row in rollouts for _ in row.outcomes]
    rows = [i for i, row in enumerate(rollouts) for _ in row.outcomes]
    scoring = Scoring([None] * len(outcomes), rows=rows)
    results = call_all(rewards, prompts, outcomes, [True] * len(outcomes), scoring)
    columns: dict[str, list[Score]] = {}
    for bound, result in zip(rewards, results, strict=True):
        values, _ = checked(bound, result, prompts, outcomes)
        left = iter(None if math.isnan(value) else value for value in values.tolist())
        each: list[list[float | None]] = [[*islice(left, len(row.outcomes))] for row in rollouts]
        columns[bound.name] = [score if len(score) > 1 else score[0] for score in each]
    return columns


def write_result(outcomes: Sequence[Outcome], path: Path, prompt: Prompt) -> Path:
    """Write an image as PNG, or the segments of a video as one lossless mp4; return the path."""
    videos = [outcome.video for outcome in outcomes if outcome.video is not None]
    if videos:
        times = outcomes[0].times
        rate = 1 / float(times[1] - times[0]) if times is not None and len(times) > 1 else 1.0
        return save_video(torch.cat(videos), path.with_suffix(".mp4"), Fraction(rate).limit_denominator(1000))
    if len(outcomes) > 1 or outcomes[0].image is None:
        raise RowError(f"the engine made no image or video of prompt '{prompt.uid}'")
    return save_image(outcomes[0].image, path.with_suffix(".png"))
