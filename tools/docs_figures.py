"""Draw figures of the docs: alpha over depth, objects in five styles, and the lead over the length of training.

Run by hand after a change or a new record: python tools/docs_figures.py
"""

from pathlib import Path

import numpy as np

from anechoic import linear
from anechoic.data.emoji import read_index, sheet
from anechoic.pages.figures import draw_decay, draw_estimates, draw_sheet
from anechoic_lab.records.map_pages import leads_of, leads_over_length
from anechoic_lab.records.scoreboard import records_of
from anechoic_lab.studies import cifar_length, emoji_styles

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
# Panel of the figure in the README -> the grid and its metric, both of the whitened mean token.
LEADS = {
    "CIFAR-100, k-NN": (cifar_length.LENGTH, "knn_whitened_mean"),
    "Emoji, same object in another style": (emoji_styles.LENGTH, "retrieval_whitened_mean"),
}
BRANCHES = 24  # of a ViT-B
OBJECTS = ("honeybee", "elephant", "sunflower", "strawberry", "rocket", "bicycle", "violin", "snowman")


def main() -> None:
    values = {f"alpha_min {alpha:g}": linear(BRANCHES, alpha_min=alpha) for alpha in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}
    draw_decay(values, FIGURES / "decay")
    index = read_index()
    chosen = [index["names"].index(name) for name in OBJECTS]
    styles = np.stack([sheet(style)[chosen] for style in index["styles"]]) / 255
    draw_sheet(styles, FIGURES / "emoji-styles", rows=index["styles"])
    curves = {}
    for panel, (grid, metric) in LEADS.items():
        leads = leads_of(grid, records_of(grid, ROOT / "results" / "evidence"), shared_spread=True)[metric]
        curves[panel] = {"lead of decayed shortcuts": list(*leads_over_length(grid, leads).values())}
    draw_estimates(curves, FIGURES / "lead", xlabel="samples seen", ylabel="percentage points", log=True)


if __name__ == "__main__":
    main()
