"""Command `mmrl generate`: answers one prompt, the rows of a file, or the lines of standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cli.command import OVERRIDES, argument, command, for_terminal
from mmrl.config.engine_checks import makes
from mmrl.config.loading import ConfigError
from mmrl.config.plain import as_list
from mmrl.core.modalities import MODALITIES, media_columns
from mmrl.core.plain_text import whole
from mmrl.core.types import Message, Outcome, Part, Prompt, PromptError
from mmrl.data.fields import RowError, plain, uid_of
from mmrl.runtime.folders import check_writable, written_whole

if TYPE_CHECKING:
    from mmrl.inference.session import Session
    from mmrl.inference.sources import ModelSource

MODEL = argument(
    "model", metavar="CONFIG_OR_MODEL", help="a YAML file, the folder of a run, or a model (folder, hub id)"
)
ENGINE = (
    argument("--max-completion-length", type=int, metavar="N", help="the most tokens of an answer"),
    argument("--temperature", type=float, metavar="T", help="0 takes the most likely token"),
    argument("--seed", type=int, metavar="N", help="of random draws"),
)
IMAGES = Path("images")  # default folder of generated images
ASKED = ("prompt", "messages", "question", "caption")  # columns of questions; a row's first one is used
ROWS = (".jsonl", ".json", ".parquet")  # suffixes of files with rows
IS_IMAGES = "this model makes images; name a folder for them as --output, not a file of rows"
IS_TEXT = "this model answers in words; name a file such as answers.jsonl as --output"


@dataclass(frozen=True)
class Asked:
    """A question with the columns of its data row; later also the turns of its answer."""

    prompt: Prompt
    columns: Mapping[str, Any]
    turns: tuple[Message, ...] = ()  # of the answer, if tools replied


@command(
    MODEL,
    OVERRIDES,
    argument("--prompt", help="the question, or the description of an image"),
    *(
        argument(
            f"--{kind}", action="append", default=[], metavar="PATH", help="of --prompt; may be repeated"
        )
        for kind in MODALITIES
    ),
    argument(
        "--input",
        type=Path,
        metavar="ROWS",
        help="rows (jsonl, json, parquet) with `prompt`, `messages` or `question`, and `image` or `video`",
    ),
    argument("--root", type=Path, help="folder of the media of --input (default: that of the rows)"),
    argument(
        "--output",
        type=Path,
        help="rows with `completion` (.jsonl); of a model that makes images a folder (default: images)",
    ),
    argument("--overwrite", action="store_true", help="replace the --output"),
    argument(
        "--batch-size", type=int, default=8, metavar="N", help="questions answered at once (default: 8)"
    ),
    *ENGINE,
    examples=(
        "mmrl generate runs/my_run --prompt 'What is this?' --image a.png",
        "mmrl generate Qwen/Qwen2.5-VL-3B-Instruct --input rows.jsonl --output answers.jsonl",
        "mmrl generate my_flow_model rollout.engine.0.height=256 --prompt 'a red cube' --output images",
    ),
)
def generate(given: argparse.Namespace) -> None:
    """Answer one prompt, the rows of a file, or the lines of the standard input.

    Answers go to the standard output, progress to the standard error. Generated images are written as
    PNG files with a `metadata.jsonl`, which `datasets` reads as an image folder.
    """
    from mmrl.build import check_source, open_source
    from mmrl.inference.sources import resolve

    check_arguments(given)
    source = resolve(given.model, given.overrides, options=engine_options(given))
    check_source(source)
    check_output(source, given.output)
    session = open_source(source)
    answered = answers(session, questions(given, session), given.batch_size)
    if given.output and given.output.suffix in ROWS:
        write_rows_of(answered, given.output)
    elif given.output:
        write_images(answered, given.output)
    else:
        for asked, answer in answered:
            show(asked, answer, as_row=bool(given.input))


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options among the flags; options that were not given are None."""
    return {name: vars(given)[name] for name in ("max_completion_length", "temperature", "seed")}


def check_arguments(given: argparse.Namespace) -> None:
    """Raise `ConfigError` for contradictory flags, and for unreadable image and video files."""
    if given.prompt is not None and given.input is not None:
        raise ConfigError("--prompt and --input both say what is asked; give one of them")
    media = {kind: vars(given).get(kind) or [] for kind in MODALITIES}
    if given.prompt is None and any(media.values()):
        flags = " and ".join(f"--{kind}" for kind in MODALITIES)
        raise ConfigError(f"{flags} belong to a --prompt; rows of --input name their own")
    if given.root is not None and given.input is None:
        raise ConfigError("--root is the folder of the media of --input, which is not given")
    if given.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, not {given.batch_size}")
    if given.input is not None and not given.input.exists():
        raise ConfigError(f"there is no file or folder '{given.input}' (--input)")
    for kind, paths in media.items():
        for path in paths:
            check_medium(kind, Path(path).expanduser())
    output = given.output
    if output is None:
        return
    check_writable(output.parent if output.suffix in ROWS else output)
    taken = any(output.iterdir()) if output.is_dir() else output.exists()
    if given.input is not None and output.resolve() == given.input.resolve():
        raise ConfigError(f"'{output}' is the --input; name another --output")
    if taken and not given.overwrite:
        raise ConfigError(f"'{output}' exists; name another --output, or give --overwrite")


def check_output(source: ModelSource, output: Path | None) -> None:
    """Raise `ConfigError` if --output does not fit the type of answers of the policy (text or images)."""
    if output is None:
        return
    kind = makes(source.config.policy, source.engines)
    if kind == "images" and output.suffix in ROWS:
        raise ConfigError(IS_IMAGES)
    if kind == "text" and output.suffix not in ROWS:
        raise ConfigError(IS_TEXT)


def check_medium(kind: str, path: Path) -> None:
    """Raise `ConfigError` if a file is missing, or cannot be read as an image, video or other `kind`."""
    from mmrl.data.media import MediaError

    if not path.is_file():
        raise ConfigError(f"there is no file '{path}' (--{kind})")
    try:
        MODALITIES[kind].check_file(path)
    except MediaError as error:
        raise ConfigError(f"--{kind}: {error}") from error


# ---- reading of questions


def questions(given: argparse.Namespace, session: Session) -> Iterable[Asked]:
    """Return the questions: from --prompt, from the rows of --input, or from the lines of stdin."""
    from mmrl.data.messages import prompt_of

    if given.input is not None:
        binary = given.output is not None and given.output.suffix == ".parquet"
        return list(rows_of(given.input, given.root, session, binary=binary))
    if given.prompt is None:
        lines = (line.rstrip("\r\n") for line in sys.stdin)
        texts = (line for line in lines if line.strip())
        return (Asked(prompt_of(f"p{i}", text), {"prompt": text}) for i, text in enumerate(texts))
    media = {kind: paths for kind in MODALITIES if (paths := vars(given).get(kind))}
    prompt = prompt_of("p0", given.prompt, media, read=session.media_reader())
    named = {MODALITIES[kind].columns[1]: paths for kind, paths in media.items()}
    return [Asked(prompt, {"prompt": given.prompt, **named})]


def rows_of(path: Path, root: Path | None, session: Session, *, binary: bool = False) -> Iterator[Asked]:
    """Read questions from the rows of a file; raise one error for all unusable rows.

    Columns must be JSON values, because they are written next to the answers; `binary` lifts this limit.
    """
    from mmrl.data.dataset_io import DataRow, Rows, read_each
    from mmrl.data.messages import prompt_of
    from mmrl.data.row_fields import ASKING, has_content
    from mmrl.data.row_sizes import row_size

    root = root or (path if path.is_dir() else path.parent)
    read = session.media_reader(root)
    sized = getattr(session.policy, "makes", "") == "images"

    def make(row: DataRow, number: int) -> Asked:
        columns = row.columns
        if (name := next((name for name in ASKED if columns.get(name) is not None), None)) is None:
            raise RowError(f"wanted one of {', '.join(ASKED)}, got the columns {', '.join(columns)}")
        if "completion" in columns:
            raise RowError("the row has a `completion`, where its answer would go; rename that column")
        for column in columns:
            if not binary:
                plain(columns[column], column)
        media = {
            kind: [medium for column in modality.columns for medium in as_list(columns.get(column))]
            for kind, modality in MODALITIES.items()  # a column has one file or a list
        }
        read_here = (name, "id", "split", *media_columns())
        if unread := [key for key in ASKING if key not in read_here and has_content(columns.get(key))]:
            raise RowError(f"nothing reads the column `{unread[0]}`: {ASKING[unread[0]]}, or leave it out")
        prompt = prompt_of(uid_of(columns, f"p{number}"), columns[name], media, read=read)
        prompt = replace(prompt, size=row_size(columns, source=True) if sized else None)
        session.check(prompt)
        return Asked(prompt, columns)

    yield from read_each(path, Rows(path, root), make)


# ---- writing of answers


def answers(session: Session, asked: Iterable[Asked], size: int) -> Iterator[tuple[Asked, Outcome]]:
    """Answer questions in batches of `size`; on a terminal, show the progress."""
    from rich.console import Console
    from rich.progress import track

    total = len(asked) if isinstance(asked, list) else None
    # Lines of standard input are answered one at a time, as soon as they are read.
    size, left = (size, iter(asked)) if total else (1, iter(asked))
    quiet = not sys.stderr.isatty() or total in (None, 1)
    console = Console(stderr=True)
    batches = iter(lambda: list(islice(left, size)), [])
    steps = -(-total // size) if total else None
    for batch in track(batches, "answering", steps, console=console, disable=quiet):
        try:
            rows = session.one_each([item.prompt for item in batch])
        except PromptError as error:  # the user's prompt is wrong: no traceback
            raise ConfigError(str(error)) from error
        for item, row in zip(batch, rows, strict=True):
            yield replace(item, turns=row.turns if len(row.turns) > 1 else ()), row.outcomes[-1]


def show(asked: Asked, answer: Outcome, *, as_row: bool) -> None:
    """Print an answer or the name of its image file; with `as_row`, print JSON that includes the columns."""
    import json

    if as_row and answer.text is not None:
        shown = json.dumps(row_with(asked, answer, IMAGES), ensure_ascii=False)
    elif as_row:
        shown = json.dumps({"file_name": printed(answer, IMAGES), **asked.columns}, ensure_ascii=False)
    else:
        shown = for_terminal(spoken(asked.turns, IMAGES) if asked.turns else printed(answer, IMAGES))
    print(whole(shown), flush=True)


def row_with(asked: Asked, answer: Outcome, images: Path, root: Path | None = None) -> dict[str, Any]:
    """Return a row's columns plus the answer as `completion` and, with tools, its turns as `conversation`.

    Images from tools are written to the folder `images`, and named by paths relative to `root`.
    """
    if answer.text is None:
        raise ConfigError(IS_IMAGES)
    more = {"conversation": written(asked.turns, images, root)} if asked.turns else {}
    return {**asked.columns, "completion": answer.text, **more}


def written(turns: Sequence[Message], images: Path, root: Path | None = None) -> list[dict[str, Any]]:
    """Convert messages to the format of transformers; images are written to files in `images`."""
    from mmrl.core.chat import to_pil

    def block(part: Part) -> dict[str, str]:
        if part.media is None:
            return {"type": "text", "text": part.text}
        path = free_name(images)
        save_frames(list(map(to_pil, part.media.load().pixels)), path)
        return {"type": part.media.kind, "path": str(path.relative_to(root) if root else path)}

    return [{"role": turn.role, "content": [block(part) for part in turn.parts]} for turn in turns]


def spoken(turns: Sequence[Message], images: Path) -> str:
    """Format messages as readable text, with file names in place of images."""
    lines = []
    for message in written(turns, images):
        words = " ".join(block.get("path") or block["text"] for block in message["content"])
        lines.append(f"tool: {words}" if message["role"] == "tool" else words)
    return "\n".join(lines)


def write_rows_of(answered: Iterable[tuple[Asked, Outcome]], path: Path) -> None:
    """Write the rows of the questions, extended by the answers, to a file."""
    from mmrl.data.dataset_io import write_rows

    with written_whole(path) as new:
        images = new.parent / f"{path.stem}_images"
        number = write_rows(new, (row_with(*both, images, new.parent) for both in answered))
    print(f"{path}: {number} rows", file=sys.stderr)


def write_images(answered: Iterable[tuple[Asked, Outcome]], folder: Path) -> None:
    """Write images as PNG files (videos as animated PNG) and the prompts to `metadata.jsonl`."""
    from mmrl.data.dataset_io import write_rows

    def rows(folder: Path) -> Iterator[dict[str, Any]]:
        for number, (asked, answer) in enumerate(answered):
            name = f"{number:05d}.png"
            save_image(answer, folder / name)
            yield {"file_name": name, **asked.columns}

    with written_whole(folder) as new:
        number = write_rows(new / "metadata.jsonl", rows(new))
    print(f"{folder}: {number} images", file=sys.stderr)


def printed(answer: Outcome, folder: Path) -> str:
    """Return the text of an answer, or save its image under an unused name and return the path."""
    if answer.text is not None:
        return answer.text
    path = free_name(folder)
    save_image(answer, path)
    return str(path)


def free_name(folder: Path) -> Path:
    """Return the first free path of `00000.png`, `00001.png`, ... in a folder; create the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return next(path for n in count() if not (path := folder / f"{n:05d}.png").exists())


def save_image(answer: Outcome, path: Path) -> None:
    """Write the image of an answer as PNG, or the frames of a video as animated PNG."""
    from mmrl.inference.session import images_of

    if answer.text is not None:
        raise ConfigError(IS_TEXT)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_frames(images_of(answer), path)


def save_frames(images: Sequence[Any], path: Path) -> None:
    """Write a PIL image as PNG, or several images as animated PNG."""
    first, *frames = images
    first.save(path, **({"save_all": True, "append_images": frames, "duration": 62} if frames else {}))
