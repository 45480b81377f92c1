"""Emoji: 1,030 things, each drawn by five hands, embedded in the package. The hand changes the pixels, not the thing.

`emoji` is all 5,150 drawings of 48 x 48. Words after it choose: `train` and `test` split the things, `style=` and
`without=` the hands, `label=` what a label is. Licenses are in emoji_sheets/ATTRIBUTION.md.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data.arrays import Array
from anechoic.data.source import digest
from anechoic.errors import UserError

SHEETS = Path(__file__).with_name("emoji_sheets")
LABELS = ("group", "object", "style")
# Of the things of each group, every so many is for testing.
TEST_EVERY = 5
HELP = (
    "say emoji, emoji:train or emoji:test, each with :style=A or :without=A (several as A+B) and :label=group, "
    ":label=object or :label=style, such as emoji:without=noto:label=object"
)


class Emoji(Array):
    """facets: the numbers of each image's thing, group and style, whatever its label is."""

    def __init__(self, images: np.ndarray, *, facets: dict[str, np.ndarray], **options: Any) -> None:
        super().__init__(images, where="emoji", **options)
        self.facets = facets

    def name(self, index: int) -> str:
        catalog = read_index()
        return f"{catalog['styles'][self.facets['style'][index]]}/{catalog['names'][self.facets['object'][index]]}"


def open_emoji(rest: list[str], *, labels: bool, channels: int) -> Emoji:
    """`emoji[:train|:test][:style=A+B][:without=A+B][:label=group|object|style]`: hand by hand, things in order."""
    index = read_index()
    split, styles, label = _read_words(rest, index["styles"])
    groups, group_names = index["groups"], index["group_names"]
    before = np.array([np.count_nonzero(groups[:k] == group) for k, group in enumerate(groups)])
    tested = before % TEST_EVERY == TEST_EVERY - 1
    chosen = np.flatnonzero({"": tested | ~tested, "train": ~tested, "test": tested}[split])
    images = np.concatenate([sheet(index["styles"][style])[chosen] for style in styles])
    things, hands = np.tile(chosen, len(styles)), np.repeat(np.array(styles), len(chosen))
    facets = {"group": groups[things], "object": things, "style": hands}
    names = {"group": group_names, "object": index["names"], "style": index["styles"]}
    return Emoji(
        images,
        facets=facets,
        channels=channels,
        labels=facets[label].astype(np.int64) if labels else None,
        classes=names[label] if labels else None,
        fingerprint=digest("emoji", images),
    )


def _read_words(words: list[str], known: tuple[str, ...]) -> tuple[str, list[int], str]:
    """(split, style numbers, label) of what follows `emoji:`."""
    split, label, styles = "", LABELS[0], set(range(len(known)))
    seen: set[str] = set()
    for word in words:
        key, equals, value = word.partition("=")
        key = key if equals else "split"
        if key in seen:
            raise UserError(f"'emoji:{':'.join(words)}' says {key} twice; {HELP}.")
        seen.add(key)
        if key == "split" and value == "" and word in ("train", "test"):
            split = word
        elif key == "label" and value in (*LABELS, "thing"):
            label = "object" if value == "thing" else value  # its name in earlier versions
        elif key in ("style", "without"):
            named = set(value.split("+"))
            if not named <= set(known):
                raise UserError(
                    f"There is no emoji style {min(named - set(known))!r}; there are {', '.join(known)} (A+B for two)."
                )
            numbers = {known.index(name) for name in named}
            styles &= numbers if key == "style" else styles - numbers
        else:
            raise UserError(f"There is no 'emoji:{':'.join(words)}'; {HELP}.")
    if not styles:
        raise UserError(f"'emoji:{':'.join(words)}' leaves no style; {HELP}.")
    return split, sorted(styles), label


@cache
def read_index() -> dict[str, Any]:
    """styles, names of things, and the group of each as a number into group_names."""
    index = json.loads((SHEETS / "index.json").read_text(encoding="utf-8"))
    things = [dict(zip(index["fields"], thing, strict=True)) for thing in index["things"]]
    group_names = tuple(sorted({thing["group"] for thing in things}))
    return {
        "tile": index["tile"],
        "columns": index["columns"],
        "styles": tuple(index["styles"]),
        "names": tuple(thing["name"] for thing in things),
        "groups": np.array([group_names.index(thing["group"]) for thing in things]),
        "group_names": group_names,
    }


@cache
def sheet(style: str) -> np.ndarray:
    """(things, tile, tile, 3) uint8."""
    from PIL import Image

    index = read_index()
    side, columns = index["tile"], index["columns"]
    with Image.open(SHEETS / f"{style}.webp") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    rows = pixels.shape[0] // side
    tiles = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, side, side, 3)
    return np.ascontiguousarray(tiles[: len(index["names"])])
