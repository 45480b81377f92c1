"""Pages from constructed records: numbers, reproducible bytes, and missing records."""

import json
from pathlib import Path

import numpy as np
import pytest
from constructed_records import POCKET_GRIDS, SEEDS, fill, page, pictures_of, tables_of, with_probes, write_record

from anechoic.sweeps.evaluation import packed, unpacked
from anechoic_lab.cli.reproduce import reproduce
from anechoic_lab.paper import full, pocket
from anechoic_lab.records.markdown_tables import difference_table, measured_table, signed
from anechoic_lab.records.pages import write_index
from anechoic_lab.records.statistics import Records, estimate
from anechoic_lab.studies import emoji_styles


@pytest.mark.usefixtures("unrendered")
def test_page_of_reconstructions_reports_that_decay_predicts_hidden_patches_worse(tmp_path):
    results = Path(__file__).resolve().parents[2] / "results" / "evidence"
    text = page(POCKET_GRIDS["fig6"], results, tmp_path / "out")
    assert "With decay hidden patches are predicted worse (loss 1.37 against 1.18)." in text


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", POCKET_GRIDS)
def test_page_has_complete_tables_and_its_pictures(name, tmp_path):
    grid = POCKET_GRIDS[name]
    fill(tmp_path / "results", grid)
    text = page(grid, tmp_path / "results", tmp_path / "out")
    assert text.startswith(f"# {grid.title}\n")
    assert "not run" not in text
    assert "nan" not in text
    assert all(row.label in text for row in grid.rows)
    for table in tables_of(text):
        assert {len(row) for row in table} == {len(table[0])}
    shown = pictures_of(text)
    assert shown
    assert all((tmp_path / "out" / picture).exists() for picture in shown)
    count = len(grid.needed()) * len(SEEDS)
    assert f"{count} records" in text
    assert "96,000 samples each" in text
    assert f"{count} CPU" in text  # a minute each
    assert "commit fedcba987654; abacus, torch 2.0" in text


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", POCKET_GRIDS)
def test_page_without_records_names_the_command(name, tmp_path):
    grid = POCKET_GRIDS[name]
    text = page(grid, tmp_path / "results", tmp_path / "out")
    assert f"No trial of this page has a record yet. Run `anechoic reproduce {name}`." in text
    assert "not run" in text
    assert all((tmp_path / "out" / picture).exists() for picture in pictures_of(text))


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", POCKET_GRIDS)
def test_page_of_some_records_keeps_its_columns(name, tmp_path):
    grid = POCKET_GRIDS[name]
    for names, seeds in (([grid.rows[-1].variant], (0,)), (grid.needed()[1:], (0, 1))):
        fill(tmp_path / "results", grid, names=names, seeds=seeds)
        text = page(grid, tmp_path / "results", tmp_path / "out")
        for table in tables_of(text):
            assert {len(row) for row in table} == {len(table[0])}
        assert "nan" not in text


@pytest.mark.slow
def test_pages_are_reproduced_byte_for_byte(tmp_path):
    """Of one grid of every kind, pictures and list of pages included."""
    smallest_last = sorted(POCKET_GRIDS.values(), key=lambda grid: -len(grid.metrics) * len(grid.rows))
    kinds = {grid.kind: grid for grid in smallest_last}
    for grid in kinds.values():
        fill(tmp_path / "results", grid)

    def written(out):
        for grid in kinds.values():
            page(grid, tmp_path / "results", out)
        write_index(list(kinds.values()), tmp_path / "results", out)
        return {path.name: path.read_bytes() for path in sorted(out.iterdir())}

    first, second = written(tmp_path / "one"), written(tmp_path / "two")
    assert {path.rpartition(".")[2] for path in first} == {"md", "png", "svg"}
    assert first == second
    pictures = [picture for path in (tmp_path / "one").glob("*.md") for picture in pictures_of(path.read_text())]
    assert len(pictures) >= len(kinds)
    assert all(data.startswith(b"\x89PNG") for name, data in first.items() if name.endswith(".png"))
    assert all(picture in first for picture in pictures)


# ---- the numbers


def test_table_has_means_intervals_and_numbers_of_the_paper(tmp_path):
    grid = pocket.TABLE2
    values = {"alpha1": [40.0, 42.0, 41.0], "alpha0.6": [44.0, 46.5, 44.5]}
    records = with_probes(tmp_path, grid, values)
    write_record(tmp_path / grid.group, "alpha0.6", 7, {"diverged": True})
    records = Records(tmp_path / grid.group)

    measured = {row[0]: row[1:] for row in tables_of("\n".join(measured_table(grid, records)))[0]}
    column = list(grid.metrics).index("probe_mean")
    assert measured[""][column] == "linear probe, mean token (paper)"
    assert measured["alpha_min 1"][column] == f"{estimate(values['alpha1'])} (76.5)"
    assert measured["alpha_min 1"][column].startswith("41.00 ± 2.48")
    assert measured["alpha_min 0.6"][column] == f"{estimate(values['alpha0.6'])} (83.6)"
    assert measured["alpha_min 0.9"][column] == "not run (79.2)"
    assert measured["alpha_min 1"][-1] == "3"
    assert measured["alpha_min 0.6"][-1] == "4, 1 diverged"

    differences = {row[0]: row[1:] for row in tables_of("\n".join(difference_table(grid, records)))[0]}
    paired = estimate(b - a for a, b in zip(values["alpha1"], values["alpha0.6"], strict=True))
    assert differences["alpha_min 0.6"][column] == f"{signed(paired)}, agrees (paper +7.1)"
    assert differences["alpha_min 0.6"][column].startswith("+4.00 ± 1.24")
    assert differences["alpha_min 0.9"][column] == "not run (paper +2.7)"
    assert "alpha_min 1" not in differences


@pytest.mark.usefixtures("unrendered")
def test_page_compares_the_order_of_rows_with_the_paper(tmp_path):
    grid = pocket.TABLE2
    falling = {f"alpha{alpha:g}": [50.0 + 10 * alpha, 50.1 + 10 * alpha] for alpha in pocket.ALPHAS}
    with_probes(tmp_path / "falling", grid, falling)
    text = page(grid, tmp_path / "falling", tmp_path / "out")
    assert "linear probe, mean token: the reverse of the paper's (Kendall's tau -0.87 over 6 rows)" in text
    papers = {row.variant: [row.paper["probe_mean"]] * 2 for row in grid.rows}
    with_probes(tmp_path / "same", grid, papers)
    text = page(grid, tmp_path / "same", tmp_path / "out")
    assert "linear probe, mean token: the paper's (Kendall's tau +1.00 over 6 rows)" in text


@pytest.mark.usefixtures("unrendered")
def test_smallest_loss_of_each_search_is_bold(tmp_path):
    grid = POCKET_GRIDS["emoji-styles-search"]
    losses = {}
    for i, row in enumerate(grid.rows):
        losses[row.label] = 0.5 + ((7 * i) % 11) / 1000
        metrics = {"diverged": False, "training": [{"seen": 1, "held_out_loss": losses[row.label]}]}
        write_record(tmp_path / "results" / grid.group, row.variant, 0, metrics)
    text = page(grid, tmp_path / "results", tmp_path / "out")
    for search in {label.rpartition(", peak")[0] for label in losses}:
        least = min((loss, label) for label, loss in losses.items() if label.startswith(search))
        assert f"| {least[1]} | **{least[0]:.4f}** | 1 |" in text
    assert text.count("**") == 2 * len(emoji_styles.LRS)


@pytest.mark.usefixtures("unrendered")
def test_resnet_page_compares_at_equal_depth(tmp_path):
    grid = pocket.FIG7
    for blocks in pocket.RESNET_BLOCKS:
        for alpha, accuracy in ((1.0, 10.0 * blocks), (0.6, 10.0 * blocks - blocks)):
            for seed in (0, 1):
                metrics = {"diverged": False, "accuracy": accuracy, "layers": {"mean": {"entropy": [1.0, 2.0]}}}
                write_record(tmp_path / grid.group, f"blocks{blocks}-alpha{alpha:g}", seed, metrics)
    _, against = tables_of(page(grid, tmp_path, tmp_path / "out"))
    rows = {row[0]: row[1] for row in against}
    for blocks in pocket.RESNET_BLOCKS:
        assert rows[f"{blocks} blocks, alpha_min 0.6"] == f"-{blocks}.00 ± 0.00, lower"


# ---- index and documentation


def test_index_counts_records_and_minutes(tmp_path):
    fill(tmp_path / "results", pocket.TABLE4, seeds=(0, 1))
    (tmp_path / "out").mkdir()
    text = write_index([pocket.TABLE4, pocket.FIG7], tmp_path / "results", tmp_path / "out").read_text()
    assert f"| [{pocket.TABLE4.title}](table4.md) | 8 | 8 min |" in text
    assert f"| [{pocket.FIG7.title}](fig7.md) | 0 | 0 min |" in text


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_documentation_pages_match_the_records(tmp_path):
    root = Path(__file__).parents[2]
    reproduce("all", results=root / "results" / "evidence", report=tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    assert written == {path.name: path.read_text() for path in (root / "docs" / "evidence").glob("*.md")}


@pytest.mark.usefixtures("unrendered")
def test_all_writes_the_pages_that_have_records(tmp_path):
    fill(tmp_path / "results", pocket.TABLE1)
    report = reproduce("all", results=tmp_path / "results", report=tmp_path / "out")
    pages = {Path(page).name for page in report.metrics["pages"]}
    assert pages > {"table1.md", "tally.md", "README.md"}
    assert "cifar.md" not in pages
    assert pages == {path.name for path in (tmp_path / "out").glob("*.md")}
    assert "cifar.md" not in (tmp_path / "out" / "README.md").read_text()


def test_full_scale_pages_use_the_same_kinds_of_records(tmp_path):
    for name in ("table2", "table4", "fig4"):
        grid = full.GRIDS[name]
        fill(tmp_path / "results", grid, seeds=(0, 1))
        text = page(grid, tmp_path / "results", tmp_path / "out")
        assert all(row.label in text for row in grid.rows)


def test_packed_array_round_trips():
    values = np.random.default_rng(0).random((2, 3, 4))
    again = unpacked(json.loads(json.dumps(packed(values))))
    assert again.shape == values.shape
    assert np.abs(again - values).max() <= 0.5 / 255 + 1e-9
    assert np.array_equal(unpacked(packed(np.array([-1.0, 2.0]))), [0.0, 1.0])
