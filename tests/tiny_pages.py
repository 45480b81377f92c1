"""A picture from a seed, and one of everything a page can hold: shared by tests of pages and of the index."""

from __future__ import annotations

import numpy as np
from PIL import Image

from anechoic.pages.charts import histogram, line_chart
from anechoic.pages.html import Grouping, Section, Thumbnail, download, figure, grid, note, point_map, selectable, table
from anechoic.pages.thumbnails import sheet, thumbnail


def picture(seed, *, side=20):
    """A smooth image that is nobody else's."""
    values = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((side, side), Image.Resampling.BICUBIC)


def everything():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 20, 30, 3), dtype=np.uint8)
    picture = thumbnail(pixels[0])
    spot = point_map(
        np.arange(10.0).reshape(5, 2),
        names=[f"{i}.png" for i in range(5)],
        groupings=[Grouping("Folder", ["a", "b"], [0, 0, 1, 1, 1]), Grouping("Size", ["c"], [0] * 5)],
        ids=range(5),
        sheet=sheet(pixels),
        caption="A map.",
        neighbors=[[1], [0], [3], [2], [3]],
    )
    return [
        Section("Numbers", ["Plain <text>.", table(["name", "x"], [["a", 1.5], ["b", None]], caption="Two rows")]),
        Section("Pictures", [figure("One.", [picture]), grid([Thumbnail(picture, ("a", "0.5"), True, "a.png", 0)])]),
        Section("A map", [spot, download("list.csv", ["name", "x"], [["a", 1]])]),
        Section("Selection", [selectable({i: f"{i}.png" for i in range(5)}, root="/photos", files={0: "a.png"})]),
        Section("Curves", [line_chart({"loss": ([1, 2, 3], [3.0, None, 1.0])}, title="Loss", xlabel="step")]),
        Section("Words", [note("It went well.", kind="good"), histogram([0, 1, 2], [3, 4], title="Counts")]),
    ]
