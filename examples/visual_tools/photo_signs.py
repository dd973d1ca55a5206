"""Builder of photographs with a small sign on them, and lessons of how to look at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from examples.preference_pairs.composited_scenes import BANDS
from mmrl.config.ranges import NonNegativeInt, PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import write_rows
from mmrl.data.media import read_image
from mmrl.vision.tools.images import crop as cropped
from mmrl.vision.tools.images import zoom as zoomed

LOOK, SEARCH = "crop zoom", "search"  # the tools, as the model's chat template names them
COLOURS = "what color is the heart?"
NAMED = "what color is {name}?"
FACTOR = 2.0  # of `zoom`
FRAME = (255, 0, 204)  # colour of a sign's frame
CONSONANTS, VOWELS = "BDFGKLMNPRST", "AEIOU"  # names of signs, such as KAMO


@builder
@dataclass(kw_only=True)
class PhotoSigns:
    """Composite photographs with a small heart on a framed sign, captions, and lessons for a small model.

    `{train,test}.jsonl` are rows for `vision.visual_qa` that ask which colour the heart has: a view of the
    whole photograph shows where the sign is, and only a part of it what is on it. `{train,test}_search.jsonl`
    ask about a sign by its name, half of them with that part in a frame as the image, the others with the
    whole in any light; `captions.jsonl` says it of every sign by name. `skills.jsonl`, `search_skills.jsonl`
    and `lessons.jsonl` are rows for `vision.conversations`: turns of conversations about the first `labelled`
    training photographs, which the other rows leave out. The skills are right, and those of search answer a
    heart that is shown both at once and after a call; in lessons often no tool is called, or a wrong place
    is looked at. `direct.jsonl` asks about the same photographs without any tool.

    A sign hangs near the middle of one of `cells` x `cells` cells; a box of `box` pixels there has the heart.

    Args:
        objects: Folder of RGBA hearts, named `<colour> heart.png`.
        photographs: Folder of photographs; the splits use different parts of them.
        num_train: Training photographs.
        num_test: Test photographs.
        labelled: Training photographs with lessons.
        side: Side of a photograph, in pixels.
        cells: Cells along a side.
        box: Side of what is looked at, in pixels.
        heart: Side of the heart, in pixels.
        look: Share of first turns that call a tool.
        slip: Share of calls that look at another cell.
        names: Names by which the skills of search ask about a photograph.
    """

    stream: Stream
    objects: str
    photographs: str
    num_train: PositiveInt = 800
    num_test: PositiveInt = 300
    labelled: NonNegativeInt = 500
    side: PositiveInt = 640
    cells: PositiveInt = 4
    box: PositiveInt = 32
    heart: PositiveInt = 13
    look: Probability = 0.5
    slip: Probability = 0.4
    names: PositiveInt = 4

    def __post_init__(self) -> None:
        if self.side % self.cells or 4 * self.box > self.side // self.cells or 2 * self.heart > self.box:
            raise ValueError(
                "wanted a side of whole cells, a box of at most a quarter of a cell and a heart of at most "
                f"half a box, got {self.side}, {self.cells}, {self.box} and {self.heart}"
            )

    def build(self, output: Path) -> dict[str, Any]:
        """Write images and rows; return the number of rows."""
        hearts = images(Path(self.objects), "RGBA")
        photographs = images(Path(self.photographs), "RGB")
        scenes = {}
        for split, count in (("train", self.num_train), ("test", self.num_test)):
            (output / split).mkdir(parents=True, exist_ok=True)
            scenes[split] = [self._scene(output, split, i, hearts, photographs) for i in range(count)]
        taught, scenes["train"] = scenes["train"][: self.labelled], scenes["train"][self.labelled :]
        rows = {
            **scenes,
            **{f"{split}_search": list(map(about_name, some)) for split, some in scenes.items()},
            "captions": [{"caption": row["caption"]} for some in (taught, *scenes.values()) for row in some],
            "direct": taught,
            "skills": numbered(taught, self._skills),
            "search_skills": numbered(taught, self._search_skills),
            "lessons": [lesson for row in taught for lesson in self._lessons(output, row)],
        }
        return {name: write_rows(output / f"{name}.jsonl", some) for name, some in rows.items()}

    def _scene(
        self, output: Path, split: str, number: int, hearts: Mapping[str, Any], photographs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the images of a sign; return the row."""
        from PIL import Image, ImageDraw, ImageEnhance

        generator = self.stream.fixed("sign", split, number)
        heart = sorted(hearts)[drawn(0, len(hearts) - 1, generator)]
        photograph = sorted(photographs)[drawn(0, len(photographs) - 1, generator)]
        places = [drawn(0, self.cells - 1, generator) for _ in range(2)]
        whole = part_of(photographs[photograph], BANDS[split], generator).resize((self.side, self.side))
        edge = drawn(3 * self.box, round(3.4 * self.box), generator)
        slack = (self.box - self.heart) // 4  # twice, so that the heart stays in the box
        corner = [
            round((place + 0.5) * self.side / self.cells) - edge // 2 + drawn(-slack, slack, generator)
            for place in places
        ]
        whole.paste(self._sign(edge, slack, hearts[heart], generator), corner)
        name = f"{split}/{number}"
        whole.save(output / f"{name}.jpg", quality=95, subsampling=0)
        with Image.open(output / f"{name}.jpg") as image:
            part = cropped(image, self._box(*places))
        part.save(output / f"{name}_crop.png")
        ImageDraw.Draw(part).rectangle((0, 0, self.box - 1, self.box - 1), outline=FRAME, width=2)
        part.save(output / f"{name}_close.png")
        light = math.exp(2 * float(torch.rand((), generator=self.stream.fixed("light", split, number))) - 1)
        small = whole.resize((self.side // 4, self.side // 4))
        ImageEnhance.Brightness(small).enhance(light).save(output / f"{name}_far.jpg", quality=95)
        colour, called = heart.split()[0], name_of(number + (split == "test") * self.num_train)
        return {
            "id": f"{split} {number}", "image": f"{name}.jpg", "crop": f"{name}_crop.png",
            "close": f"{name}_close.png", "far": f"{name}_far.jpg", "name": called,
            "question": COLOURS, "answer": colour, "places": places,
            "caption": f"{called} is a {colour} heart, seen at {photograph}",
        }  # fmt: skip

    def _sign(self, edge: int, slack: int, heart: Any, generator: Generator) -> Any:
        """Draw a framed sign in a light colour, with a heart near its middle."""
        from PIL import Image

        inside = edge - 2 * (edge // 6)
        light = tuple(drawn(192, 255, generator) for _ in range(3))
        board = Image.new("RGB", (edge, edge), FRAME)
        board.paste(Image.new("RGB", (inside, inside), light), (edge // 6, edge // 6))
        small = heart.resize((self.heart, self.heart))
        corner = [(edge - self.heart) // 2 + drawn(-slack, slack, generator) for _ in range(2)]
        board.paste(small, corner, small)
        return board

    def _box(self, column: int, row: int) -> list[int]:
        """Compute what is looked at in a cell: left, upper, right and lower edge in pixels."""
        left, upper = (round((at + 0.5) * self.side / self.cells) - self.box // 2 for at in (column, row))
        return [left, upper, left + self.box, upper + self.box]

    def _skills(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """List turns that are all right: calls, and answers to what tools show."""
        box = self._box(*row["places"])
        for at, tool in enumerate(("crop", "zoom")):
            call = look_call(tool, box)
            turns = conversation(
                row, LOOK, [row["image"], row["crop"]], row["question"], call, call, "<image>"
            )
            yield from list(turns)[: 2 - at]  # what `crop` shows is at hand
        yield next(conversation(row, LOOK, [row["crop"]], row["question"], "", row["answer"], ""))

    def _search_skills(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """List turns about a photograph's sign by its names; what is seen is answered at once, too."""
        number = int(row["id"].split()[1])
        for at in range(self.names):
            yield from self._by_name(row, number, at)

    def _by_name(self, row: Mapping[str, Any], number: int, at: int) -> Iterator[dict[str, Any]]:
        """List turns about a photograph's sign by one of its names."""
        # Names other than the first belong to no photograph, so that names are copied, not known by heart.
        unused = self.num_train + self.num_test + (self.names - 1) * number + at - 1
        name = name_of(unused) if at else row["name"]
        asked = about_name({**row, "name": name}, crop=(number + at) % 2 == 1)
        call, caption = search_call(name), row["caption"].replace(row["name"], name, 1)
        image, question = [asked["image"]], asked["question"]
        yield from conversation(asked, SEARCH, image, question, call, call, caption)
        if asked["seen"]:
            yield next(conversation(asked, SEARCH, image, question, call, row["answer"], caption))

    def _lessons(self, output: Path, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """List turns of conversations about a photograph; a first turn is a call or an answer."""
        generator = self.stream.fixed("lesson", row["id"])
        chance = lambda: float(torch.rand((), generator=generator))
        places = row["places"]
        if chance() < self.slip:
            places = [drawn(0, self.cells - 1, generator) for _ in places]
        tool = ("crop", "zoom")[drawn(0, 1, generator)]
        shown = f"{row['image'][:-4]}_{tool}_{places[0]}_{places[1]}.png"
        show(output, row["image"], tool, self._box(*places), shown)
        call = look_call(tool, self._box(*places))
        first = call if chance() < self.look else row["answer"]
        images = [row["image"], shown]
        yield from conversation(row, LOOK, images, row["question"], call, first, "<image>")


Row = Mapping[str, Any]


def numbered(rows: Iterable[Row], turns: Callable[[Row], Iterable[Row]]) -> list[dict[str, Any]]:
    """List the turns about every row; their ids end with their number."""
    return [{**turn, "id": f"{turn['id']} {at}"} for row in rows for at, turn in enumerate(turns(row))]


def about_name(row: Mapping[str, Any], crop: bool | None = None) -> dict[str, Any]:
    """Ask about a sign by its name; every other row shows the heart, if `crop` does not say."""
    crop = int(row["id"].split()[1]) % 2 == 1 if crop is None else crop
    asked = {"question": NAMED.format(name=row["name"]), "image": row["close" if crop else "far"]}
    return {**row, **asked, "id": f"{row['id']} search", "seen": crop}


def conversation(
    row: Mapping[str, Any], tools: str, images: list[str], question: str, call: str, first: str, reply: str
) -> Iterator[dict[str, Any]]:
    """List two rows of `vision.conversations`: a first turn, and the answer after a call and its reply."""
    begin = [{"role": "system", "content": tools}, {"role": "user", "content": f"<image>{question}"}]
    whole = [*begin, {"role": "assistant", "content": call}, {"role": "user", "content": reply}]
    for turn, (prompt, shown, text) in enumerate(
        ((begin, images[:1], first), (whole, images, row["answer"]))
    ):
        name = f"{row['id']} turn {turn}"
        yield {"id": name, "images": shown, "prompt": prompt, "completion": text, "answer": text}


def show(output: Path, image: str, tool: str, box: list[int], name: str) -> None:
    """Write what a tool shows of an image."""
    from PIL import Image

    with Image.open(output / image) as whole:
        (cropped(whole, box) if tool == "crop" else zoomed(whole, box, FACTOR)).save(output / name)


def look_call(tool: str, box: list[int]) -> str:
    """Write a call of `crop` or `zoom` as a model writes it."""
    more = f', "factor": {FACTOR}' if tool == "zoom" else ""
    return written(tool, f'{{"image": 0, "box": {box}{more}}}')


def search_call(query: str) -> str:
    """Write a call of `search` as a model writes it."""
    return written("search", f'{{"query": "{query}"}}')


def written(tool: str, arguments: str) -> str:
    """Write a call in Qwen's form."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


def name_of(number: int) -> str:
    """Name a sign by two syllables, other numbers by others."""
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    number = number * 7 % len(syllables) ** 2  # coprime, so that neighbours differ in both
    return syllables[number // len(syllables)] + syllables[number % len(syllables)]


def images(folder: Path, mode: str) -> dict[str, Any]:
    """Read the images of a folder by name, `_` as a blank; raises ValueError where there are none."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".png", ".jpg"))
    if not files:
        raise ValueError(f"the folder '{folder}' has no images")
    read = {
        path.stem: read_image(path, str(path), transparent=mode == "RGBA").convert(mode) for path in files
    }
    return {name.replace("_", " "): image for name, image in read.items()}


def part_of(photograph: Any, band: tuple[float, float], generator: Generator) -> Any:
    """Cut a random square of 0.6 to 1 times the largest out of a band of a photograph."""
    first, last = (round(share * photograph.width) for share in band)
    edge = round(
        min(last - first, photograph.height) * (0.6 + 0.4 * float(torch.rand((), generator=generator)))
    )
    left, upper = drawn(first, last - edge, generator), drawn(0, photograph.height - edge, generator)
    return photograph.crop((left, upper, left + edge, upper + edge))


def drawn(least: int, most: int, generator: Generator) -> int:
    """Draw a whole number, both ends included."""
    return int(torch.randint(least, most + 1, (), generator=generator))
