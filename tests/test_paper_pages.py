"""Pages from constructed records: right numbers, the same bytes every time, and honest gaps. Nothing is trained."""

import json
from pathlib import Path

import numpy as np
import pytest

import anechoic
from anechoic.paper import catalogue, crossover, full, hands, natural, pocket
from anechoic.paper.evaluation import BRANCH_RANKS, COMPONENT_SHARES, packed, unpacked
from anechoic.paper.map_pages import onset_words
from anechoic.paper.pages import write_index, write_page
from anechoic.paper.statistics import Records, estimate, paired_over_time
from anechoic.paper.tables import difference_table, measured_table, signed
from anechoic.paper.tally import write_tally
from anechoic.report import figures

POCKET_GRIDS = {grid.name: grid for grid in catalogue.choose("all", "pocket")}

SEEDS = (0, 1, 2)
CHECKPOINTS = (1000, 2000, 4000)


def fake_metrics(rng):
    """Everything any page asks for, random."""
    keys = [f"{kind}_{token}" for kind in ("knn", "knn_standardised") for token in ("mean", "class")]
    plain = [
        *natural.MEASURES,
        *(key for key in hands.MEASURES if "." not in key),
        "probe",
        "frechet",
        "precision",
        "recall",
        "accuracy",
    ]
    of_layers = ("entropy", "knn", "knn_whitened", "retrieval", "retrieval_whitened", "entropy_centred")
    images = rng.random((4, 8, 8, 3))
    return {
        "diverged": False,
        **{key: round(float(rng.uniform(20, 80)), 3) for key in plain},
        "layers": {
            token: {
                name: [round(float(x), 3) for x in rng.uniform(1, 5, 5)] for name in (*of_layers, *COMPONENT_SHARES)
            }
            for token in ("mean", "class")
        },
        "beside": {"flat tokens": {"retrieval_mean": round(float(rng.uniform(20, 80)), 3)}},
        "probe_layers": {str(layer): float(rng.uniform(20, 80)) for layer in range(5)},
        "over_time": [
            {
                "seen": seen,
                **{key: float(rng.uniform(20, 80)) for key in [*keys, "entropy_mean", "entropy_class"]},
                **{name: rng.uniform(1, 9, 8).tolist() for name in BRANCH_RANKS},
            }
            for seen in CHECKPOINTS
        ],
        **{name: rng.uniform(1, 9, 8).tolist() for name in BRANCH_RANKS},
        "training": [{"seen": seen, "token_norm": [1.0, 2.0 * seen], "held_out_loss": 0.5} for seen in (0, 1280)],
        "pictures": {
            "map": {"points": rng.normal(size=(12, 2)).tolist(), "labels": [0, 1] * 6, "names": ["nought", "one"]},
            "colours": {"images": packed(images), "colours": packed(rng.random((4, 4, 4, 3)))},
            "reconstructions": {
                "images": packed(images),
                "hidden": packed((rng.random((4, 8, 8)) > 0.5).astype(np.float32)),
                "predictions": packed(rng.random((4, 8, 8, 3))),
            },
        },
    }


def write_record(folder, variant, seed, metrics):
    record = {
        "schema": 1,
        "name": f"{variant}-seed{seed}",
        "variant": variant,
        "config": {"optim": {"samples": 96_000}},
        "seed": seed,
        "commit": "fedcba9876543210",
        "machine": {"processor": "abacus", "torch": "2.0"},
        "metrics": metrics,
        "seconds": 70.0,
        "processor_seconds": 60.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{variant}-seed{seed}.json").write_text(json.dumps(record))


def fill(results, grid, *, names=None, seeds=SEEDS):
    rng = np.random.default_rng(sum(map(ord, grid.name)))
    for variant in names if names is not None else grid.needed():
        for seed in seeds:
            write_record(results / grid.group, variant, seed, fake_metrics(rng))


def page(grid, results, out):
    return write_page(grid, results, out, command=f"anechoic reproduce {grid.name}").read_text()


def tables_of(text):
    """Lists of rows of equal width: a Markdown table with a trial missing would shift its columns."""
    tables, current = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("| "):
            current.append(line.removeprefix("| ").removesuffix(" |").split(" | "))
        elif current:
            tables.append(current)
            current = []
    return tables


def pictures_of(text):
    return [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]


@pytest.fixture
def unrendered(monkeypatch):
    """Pictures are laid out but not rendered, which is what takes the time."""

    def save(figure, path):
        files = [path.parent / f"{path.name}.{kind}" for kind in ("png", "svg")]
        for file in files:
            file.write_text("a picture")
        return files

    monkeypatch.setattr(figures, "save", save)


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", POCKET_GRIDS)
def test_every_page_has_whole_tables_and_its_pictures(name, tmp_path):
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
    assert f"{count} processor" in text  # a minute each
    assert "commit fedcba987654; abacus, torch 2.0" in text


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", POCKET_GRIDS)
def test_a_page_without_records_says_so(name, tmp_path):
    grid = POCKET_GRIDS[name]
    text = page(grid, tmp_path / "results", tmp_path / "out")
    assert f"No trial of this page has a record yet. Run `anechoic reproduce {name}`." in text
    assert "not run" in text
    assert all((tmp_path / "out" / picture).exists() for picture in pictures_of(text))


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", POCKET_GRIDS)
def test_a_page_of_part_of_the_records_keeps_its_columns(name, tmp_path):
    grid = POCKET_GRIDS[name]
    for names, seeds in (([grid.rows[-1].variant], (0,)), (grid.needed()[1:], (0, 1))):
        fill(tmp_path / "results", grid, names=names, seeds=seeds)
        text = page(grid, tmp_path / "results", tmp_path / "out")
        for table in tables_of(text):
            assert {len(row) for row in table} == {len(table[0])}
        assert "nan" not in text


def test_pages_are_the_same_bytes_again(tmp_path):
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


def with_probes(results, grid, table):
    """table: variant -> one probe accuracy per seed"""
    for variant, values in table.items():
        for seed, value in enumerate(values):
            write_record(results / grid.group, variant, seed, {"diverged": False, "probe_mean": value})
    return Records(results / grid.group)


def test_the_table_has_means_intervals_and_the_papers_numbers(tmp_path):
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
def test_the_order_of_rows_is_said_beside_the_papers(tmp_path):
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
def test_each_axis_is_compared_with_its_own_baseline(tmp_path):
    grid = crossover.AXES_GRID
    base = {"base": 30.0, "depth12": 10.0}
    for name, value in base.items():
        with_probes(tmp_path, grid, {f"{name}-alpha1": [value, value + 1], f"{name}-alpha0.6": [value + 3, value + 4]})
    with_probes(tmp_path, grid, {"depth12-equal": [15.0, 16.0]})
    rows = {row[0]: row[1:] for row in tables_of(page(grid, tmp_path, tmp_path / "out"))[0]}
    assert rows["the pocket setting, alpha_min 0.6"][0] == "+3.00 ± 0.00, higher"
    assert rows["depth 12, alpha_min 0.6"][0] == "+3.00 ± 0.00, higher"
    assert rows["depth 12, alpha_min for the same effective decay as depth 6"][0] == "+5.00 ± 0.00, higher"
    assert rows["depth 3, alpha_min 0.6"][0] == "not run"


def test_each_length_is_compared_with_its_own_baseline_and_drawn_over_its_samples(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "draw_estimates", lambda curves, path, **options: drawn.update(curves))
    leads = {"96k": (1.0, 30.0), "512k": (3.0, 50.0)}
    for length, (lead, value) in leads.items():
        pairs = {
            f"muon-{length}-alpha1": [value, value + 1],
            f"muon-{length}-alpha0.6": [value + lead, value + 1 + lead],
        }
        with_probes(tmp_path, natural.LENGTH, pairs)
    differences, measured = tables_of(page(natural.LENGTH, tmp_path, tmp_path / "out"))
    assert [row[:2] for row in measured[2:4]] == [
        ["Muon, alpha_min 0.6, 96,000 samples", "31.50 ± 6.35"],
        ["its residual baseline", "30.50 ± 6.35"],
    ]
    rows = {row[0]: row[1:] for row in differences}
    assert rows["Muon, alpha_min 0.6, 96,000 samples"][0] == "+1.00 ± 0.00, higher"
    assert rows["Muon, alpha_min 0.6, 512,000 samples"][0] == "+3.00 ± 0.00, higher"
    assert rows["Muon, alpha_min 0.6, 2,048,000 samples"][0] == "not run"
    line = drawn["linear probe, mean token: lead"]["Muon, alpha_min 0.6"]
    assert [(samples, lead) for samples, lead, _ in line] == [(96_000, 1.0), (512_000, 3.0)]


def test_a_page_over_length_has_the_seeds_of_other_groups_and_lends_their_spread_to_single_ones(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "draw_estimates", lambda curves, path, **options: drawn.update(curves))
    grid = natural.LENGTH
    leads = {
        ("natural", "96k"): {10: 1.0, 11: 3.0},
        ("natural-probe", "96k"): {20: 5.0},
        ("natural", "512k"): {10: 2.0},
    }
    for (group, length), by_seed in leads.items():
        for seed, lead in by_seed.items():
            for alpha, value in (("1", 30.0), ("0.6", 30.0 + lead)):
                metrics = {"diverged": False, **dict.fromkeys(grid.metrics, value)}
                write_record(tmp_path / group, f"muon-{length}-alpha{alpha}", seed, metrics)
    text = page(grid, tmp_path, tmp_path / "out")
    rows = {row[0]: row[1:] for row in tables_of(text)[0]}
    assert rows["Muon, alpha_min 0.6, 96,000 samples"][0] == "+3.00 ± 4.97, undecided"
    assert rows["Muon, alpha_min 0.6, 96,000 samples"][-1] == "3"
    # The spread of the three others is 2, and t with 2 degrees of freedom is 4.303.
    assert rows["Muon, alpha_min 0.6, 512,000 samples"][0] == "+2.00 ± 8.61, undecided"
    assert drawn["linear probe, mean token: lead"]["Muon, alpha_min 0.6"][1] == (
        512_000,
        2.0,
        pytest.approx(8.605, abs=1e-3),
    )
    assert "the spread of the differences at all lengths together" in text
    assert "8 records in `results/evidence/natural`, `results/evidence/natural-probe`" in text


@pytest.mark.usefixtures("unrendered")
def test_resnets_are_compared_at_equal_depth(tmp_path):
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


# ---- the onset in words


def words(differences, *, spread=0.0, lengths=(1000, 2000, 4000)):
    per_seed = [[d - spread for d in differences], [d + spread for d in differences]]
    found = [estimate(values) for values in zip(*per_seed, strict=True)]
    return onset_words(lengths, per_seed, found)


@pytest.mark.usefixtures("unrendered")
def test_the_smallest_loss_of_each_search_is_bold(tmp_path):
    grid = POCKET_GRIDS["hands-search"]
    losses = {}
    for i, row in enumerate(grid.rows):
        losses[row.label] = 0.5 + ((7 * i) % 11) / 1000
        metrics = {"diverged": False, "training": [{"seen": 1, "held_out_loss": losses[row.label]}]}
        write_record(tmp_path / "results" / grid.group, row.variant, 0, metrics)
    text = page(grid, tmp_path / "results", tmp_path / "out")
    for search in {label.rpartition(", peak")[0] for label in losses}:
        least = min((loss, label) for label, loss in losses.items() if label.startswith(search))
        assert f"| {least[1]} | **{least[0]:.4f}** | 1 |" in text
    assert text.count("**") == 2 * len(hands.RATES)


def test_the_onset_is_told_in_words():
    assert words([1.0, 2.0, 3.0]) == "decay is ahead at every length measured."
    assert words([-2.0, -1.0, 1.0]).startswith("the mean difference turns positive at about 2,828 samples")
    assert words([-3.0, -2.0, -1.0]).startswith(
        "still behind; +1.00 points per doubling of the length put the onset at"
    )
    assert "at about 8,000 samples" in words([-3.0, -2.0, -1.0])
    assert words([-1.0, -2.0, -3.0]).startswith("no onset in sight: the difference changes by -1.00 points")


def test_an_undecided_lead_is_not_called_behind():
    said = words([0.1, 0.2, 0.3], spread=5.0)
    assert "behind" not in said
    assert "ahead on average" in said


def test_checkpoints_are_paired_by_seed_and_samples_seen(tmp_path):
    def over_time(offset, seen):
        return [{"seen": x, "knn_mean": offset + x / 1000} for x in seen]

    for seed, offset in ((0, 10.0), (1, 60.0)):
        write_record(tmp_path, "alpha1", seed, {"diverged": False, "over_time": over_time(offset, (1000, 2000, 3000))})
        write_record(tmp_path, "alpha0.6", seed, {"diverged": False, "over_time": over_time(offset + 2, (1000, 3000))})
    write_record(tmp_path, "alpha1", 2, {"diverged": False, "over_time": over_time(0, (1000, 3000))})
    seeds, per_seed, seen = paired_over_time(Records(tmp_path), "alpha0.6", "alpha1", "knn_mean")
    assert (seeds, seen) == ([0, 1], [1000, 3000])
    assert np.allclose(per_seed, 2.0)


# ---- what goes with the pages


def test_the_list_counts_records_and_minutes(tmp_path):
    fill(tmp_path / "results", pocket.TABLE4, seeds=(0, 1))
    (tmp_path / "out").mkdir()
    text = write_index([pocket.TABLE4, pocket.FIG7], tmp_path / "results", tmp_path / "out").read_text()
    assert f"| [{pocket.TABLE4.title}](table4.md) | 8 | 8 min |" in text
    assert f"| [{pocket.FIG7.title}](fig7.md) | 0 | 0 min |" in text


@pytest.mark.usefixtures("unrendered")
def test_the_pages_of_the_documentation_are_those_of_the_records(tmp_path):
    root = Path(__file__).parents[1]
    anechoic.reproduce("all", results=root / "results" / "evidence", report=tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    assert written == {path.name: path.read_text() for path in (root / "docs" / "evidence").glob("*.md")}


@pytest.mark.usefixtures("unrendered")
def test_all_pages_are_those_with_records(tmp_path):
    fill(tmp_path / "results", pocket.TABLE1)
    report = anechoic.reproduce("all", results=tmp_path / "results", report=tmp_path / "out")
    pages = {Path(page).name for page in report.metrics["pages"]}
    assert pages > {"table1.md", "tally.md", "README.md"}
    assert "natural.md" not in pages
    assert pages == {path.name for path in (tmp_path / "out").glob("*.md")}
    assert "natural.md" not in (tmp_path / "out" / "README.md").read_text()


def test_full_scale_pages_are_written_from_the_same_kinds_of_records(tmp_path):
    for name in ("table2", "table4", "fig4"):
        grid = full.GRIDS[name]
        fill(tmp_path / "results", grid, seeds=(0, 1))
        text = page(grid, tmp_path / "results", tmp_path / "out")
        assert all(row.label in text for row in grid.rows)


def test_packed_arrays_come_back():
    values = np.random.default_rng(0).random((2, 3, 4))
    again = unpacked(json.loads(json.dumps(packed(values))))
    assert again.shape == values.shape
    assert np.abs(again - values).max() <= 0.5 / 255 + 1e-9
    assert np.array_equal(unpacked(packed(np.array([-1.0, 2.0]))), [0.0, 1.0])


# ---- the tally of all pairs


def pair_metrics(accuracy):
    keys = [f"{kind}_{token}" for kind in ("knn", "probe") for token in ("mean", "class")]
    return {"diverged": False, **dict.fromkeys(keys, accuracy), "layers": {"mean": {"knn": [1.0, 2.0, accuracy]}}}


def test_the_tally_has_every_pair_once_and_calls_only_sure_leads_leads(tmp_path):
    for variant, start, seeds in (
        ("alpha1", 20.0, 3),
        ("alpha0.8", 22.0, 3),
        ("alpha0.7", 18.0, 3),
        ("alpha0.6", 90.0, 1),
    ):
        for seed in range(seeds):
            write_record(tmp_path / "results" / "mae", variant, seed, pair_metrics(start + seed + 0.1 * seed**2))
    for variant in ("branch", "both"):
        write_record(tmp_path / "results" / "mae", variant, 0, pair_metrics(99.0))
    text = write_tally(
        [pocket.TABLE2, pocket.TABLE3B, pocket.TABLE4], tmp_path / "results", tmp_path / "out"
    ).read_text()
    rows = [row for row in tables_of(text)[0] if row[0].startswith("alpha")]
    assert [row[:3] for row in rows] == [
        ["alpha_min 0.8", "[table2](table2.md)", "3"],
        ["alpha_min 0.7", "[table2](table2.md)", "3"],
        ["alpha_min 0.6", "[table2](table2.md)", "1"],
    ]
    assert rows[0][3] == "+2.00 ± 0.00"
    assert rows[0][-2:] == ["block 2 of 2: +2.00 ± 0.00", "6"]
    leads = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(leads) == 4
    assert all("alpha_min 0.8" in lead for lead in leads)
    assert "of 10 comparisons" in text
    assert "10 networks" in text


def test_the_tally_of_nothing_says_so(tmp_path):
    text = write_tally([pocket.TABLE2], tmp_path / "results", tmp_path / "out").read_text()
    assert "- none" in text
    assert "0 networks" in text
