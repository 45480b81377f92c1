"""Emoji: 1,030 objects, each drawn in five styles, embedded in the package.

`emoji` is all 5,150 drawings of 48 x 48. Words after it choose: `train` and `test` split the objects, `style=` and
`without=` select styles, `label=` is the kind of label. Licenses are in emoji_sheets/ATTRIBUTION.md.
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
# Every fifth object of each group is in the test split.
TEST_EVERY = 5
HELP = (
    "say emoji, emoji:train or emoji:test, each with :style=A or :without=A (several as A+B) and :label=group, "
    ":label=object or :label=style, such as emoji:without=noto:label=object"
)


class Emoji(Array):
    """facets: the number of each image's object, group and style, independent of its label."""

    def __init__(self, images: np.ndarray, *, facets: dict[str, np.ndarray], **options: Any) -> None:
        super().__init__(images, where="emoji", **options)
        self.facets = facets

    def name(self, index: int) -> str:
        catalog = read_index()
        return f"{catalog['styles'][self.facets['style'][index]]}/{catalog['names'][self.facets['object'][index]]}"


def open_emoji(rest: list[str], *, labels: bool, channels: int) -> Emoji:
    """Open `emoji[:train|:test][:style=A+B][:without=A+B][:label=group|object|style]`, by style, then object."""
    index = read_index()
    split, styles, label = _read_words(rest, index["styles"])
    groups, group_names = index["groups"], index["group_names"]
    before = np.array([np.count_nonzero(groups[:k] == group) for k, group in enumerate(groups)])
    tested = before % TEST_EVERY == TEST_EVERY - 1
    chosen = np.flatnonzero({"": tested | ~tested, "train": ~tested, "test": tested}[split])
    images = np.concatenate([sheet(index["styles"][style])[chosen] for style in styles])
    objects = np.tile(chosen, len(styles))
    facets = {"group": groups[objects], "object": objects, "style": np.repeat(np.array(styles), len(chosen))}
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
    """Return (split, style numbers, label) for the words after `emoji:`."""
    split, label, styles = "", LABELS[0], set(range(len(known)))
    seen: set[str] = set()
    for word in words:
        key, equals, value = word.partition("=")
        key = key if equals else "split"
        if key in seen:
            raise UserError(f"'emoji:{':'.join(words)}' has {key} twice; {HELP}.")
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
    """Return styles, names of objects, and the group of each as an index of group_names."""
    index = json.loads((SHEETS / "index.json").read_text(encoding="utf-8"))
    objects = [dict(zip(index["fields"], row, strict=True)) for row in index["things"]]
    group_names = tuple(sorted({item["group"] for item in objects}))
    return {
        "tile": index["tile"],
        "columns": index["columns"],
        "styles": tuple(index["styles"]),
        "names": tuple(item["name"] for item in objects),
        "groups": np.array([group_names.index(item["group"]) for item in objects]),
        "group_names": group_names,
    }


@cache
def sheet(style: str) -> np.ndarray:
    """Return the drawings of a style, uint8 (objects, tile, tile, 3)."""
    from PIL import Image

    index = read_index()
    side, columns = index["tile"], index["columns"]
    with Image.open(SHEETS / f"{style}.webp") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    rows = pixels.shape[0] // side
    tiles = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, side, side, 3)
    return np.ascontiguousarray(tiles[: len(index["names"])])
