"""Search and explore: the index that grows, exact neighbors, thresholds that fit the collection, and the two pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip_a_bit
from tiny_pages import picture
from tiny_runs import write_run
from zoo import make

import anechoic
from anechoic.cli.main import main
from anechoic.data import files, open_source
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval import feature_cache
from anechoic.eval.encoders import flat, open_encoder
from anechoic.eval.feature_cache import features_of
from anechoic.eval.feature_scaling import fit_scaling, rescaled, unit_vectors
from anechoic.eval.metrics.knn import nearest
from anechoic.index import collection as exploring
from anechoic.index import index
from anechoic.index.index import Searchable, nearest_others, open_index
from anechoic.index.queries import resolve
from anechoic.pages import collection_pages
from anechoic.runtime.checkpoint import model_card, write_model
from anechoic.storage.cache import cache_dir, open_entry
from anechoic.storage.safe_io import read_regular

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "mine")


@pytest.fixture
def photos(tmp_path):
    """36 images in three folders; b/copy.png is a/00.png again, and c/near.jpg is a/01.png compressed."""
    folder = tmp_path / "photos"
    for i in range(34):
        place = folder / "abc"[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        picture(i).save(place / f"{i:02d}.png")
    picture(0).save(folder / "b" / "copy.png")
    picture(1).save(folder / "c" / "near.jpg", quality=92)
    return folder


def metrics_of(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["metrics"]


def data_of(page):
    text = page.read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


# ---- the index


def index_of(run, photos, vector="mean"):
    encoder = open_encoder(run)
    return open_index(
        encoder, open_source(photos), encoder_name=str(run), place=str(photos), vector=vector, device="cpu"
    )


def test_index_is_read_extended_and_shrunk(run, photos, computed):
    first = index_of(run, photos)
    assert (first.added, first.removed, len(first.ids)) == (36, 0, 36)
    computed.clear()
    again = index_of(run, photos)
    assert (again.added, again.removed, computed) == (0, 0, [])
    np.testing.assert_array_equal(again.vectors, first.vectors)
    picture(99).save(photos / "a" / "000.png")
    (photos / "b" / "copy.png").unlink()
    grown = index_of(run, photos)
    assert (grown.added, grown.removed, sum(computed)) == (1, 1, 1)
    names, before = grown.names(), dict(zip(first.names(), first.vectors, strict=True))
    assert names == sorted(names)
    assert "a/000.png" in names
    for name, vector in zip(names, grown.vectors, strict=True):
        if name in before:
            np.testing.assert_array_equal(vector, before[name])
    fresh = anechoic.load(run).embed(str(photos), pooling="mean")
    np.testing.assert_allclose(grown.vectors, fresh, atol=1e-5)


def test_index_embeds_a_changed_file_again(run, photos):
    before = index_of(run, photos)
    picture(77).save(photos / "a" / "00.png")
    os.utime(photos / "a" / "00.png", (1, 1))
    after = index_of(run, photos)
    assert (after.added, after.removed) == (1, 1)
    changed = [i for i in range(36) if not np.array_equal(after.vectors[i], before.vectors[i])]
    assert [after.names()[i] for i in changed] == ["a/00.png"]


def test_index_of_other_weights_is_made_again(run, photos, caplog):
    before = np.array(index_of(run, photos).vectors)
    write_run(run, seed=5)
    after = index_of(run, photos)
    assert after.added == 36
    assert "weights, how images are prepared, or the libraries have changed" in caplog.text
    assert not np.allclose(before, after.vectors)


def test_index_of_unreadable_images_is_refused(run, photos):
    (photos / "a" / "torn.png").write_bytes(b"no image")
    assert index_of(run, photos).added == 36
    for path in photos.rglob("*.*g"):
        if path.name != "torn.png":
            path.unlink()
    with pytest.raises(UserError, match=r"None of 1 image can be read; the first is a/torn.png"):
        index_of(run, photos)


@pytest.mark.parametrize("broken", ["a row too few", "another type", "an archive", "one dimension"])
def test_index_whose_parts_do_not_fit_is_not_believed_though_its_hashes_are_right(broken):
    rows, vectors = np.arange(5), np.ones((5, 8), np.float32)
    notes = {"bad": {}, "temporary": [], "decoders": "", "encoder": "this one"}
    with open_entry("index", "b" * 32, about="") as entry:
        part = index.Part(vectors, rows, rows)
        index.write(entry, rows, [part], [bytes([row]) * 16 for row in rows], **notes)
        assert index.read(entry, "this one")[0] is not None
        other = {"a row too few": vectors[1:], "another type": vectors.astype(str), "one dimension": vectors[:, 0]}
        with open(entry.path / index.VECTORS, "wb") as file:
            if broken in other:
                np.save(file, other[broken])
            else:
                np.savez(file, vectors=vectors)
        entry.commit(entry.hashes([index.VECTORS, index.KEYS]), **notes)
        assert index.read(entry, "this one") == (None, "its file is damaged")
        entry.discard()


def test_damaged_index_is_made_again(run, photos, caplog):
    before = np.array(index_of(run, photos).vectors)
    newest = max((cache_dir() / "index").glob("*/"), key=lambda folder: folder.stat().st_mtime)
    file = newest / "vectors.npy"
    flip_a_bit(file, -3)
    after = index_of(run, photos)
    assert "damaged" in caplog.text
    np.testing.assert_array_equal(after.vectors, before)


def test_index_that_cannot_grow_stays_as_it_was(run, photos, caplog, monkeypatch):
    """On a full disk a memory map without allocated space would kill the process."""
    before = np.array(index_of(run, photos).vectors)
    picture(99).save(photos / "a" / "000.png")
    features_of(open_encoder(run), open_source(photos), device="cpu")

    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        patch.setattr("anechoic.index.index.features_of", without_reserving)
        grown = index_of(run, photos)
    assert len(grown.ids) == 37
    assert "cannot be cached (No space left on device)" in caplog.text
    (photos / "a" / "000.png").unlink()
    again = index_of(run, photos)
    assert (again.added, again.removed, again.reason) == (0, 0, "")
    np.testing.assert_array_equal(again.vectors, before)


def test_index_whose_card_cannot_be_written_stays_as_it_was(run, photos, caplog, monkeypatch):
    """The card is the last file written, when a full disk has no room left for it."""
    before = np.array(index_of(run, photos).vectors)
    picture(99).save(photos / "a" / "000.png")
    write_text = Path.write_text

    def full(path, *content, **options):
        if path.name.endswith("entry.json"):
            raise OSError(28, "No space left on device")
        return write_text(path, *content, **options)

    with monkeypatch.context() as patch:
        patch.setattr("anechoic.index.index.features_of", without_reserving)
        patch.setattr(Path, "write_text", full)
        assert len(index_of(run, photos).ids) == 37
    assert "cannot be cached (No space left on device)" in caplog.text
    (photos / "a" / "000.png").unlink()
    again = index_of(run, photos)
    assert (again.added, again.removed, again.reason) == (0, 0, "")
    np.testing.assert_array_equal(again.vectors, before)


def without_reserving(*args, **options):
    return features_of(*args, **{**options, "cached": False})


def test_index_of_names_that_are_not_utf8(run, photos):
    os.rename(photos / "a" / "00.png", os.fsencode(photos / "a") + b"/\xff.png")
    (photos / "b" / os.fsdecode(b"\xfe.png")).write_bytes(b"no image")
    first, again = index_of(run, photos), index_of(run, photos)
    assert again.names() == first.names()
    assert os.fsdecode(b"a/\xff.png") in again.names()
    assert again.skipped == first.skipped == ((os.fsdecode(b"b/\xfe.png"), "not an image of a known format"),)


def test_index_reports_unreadable_images_and_tries_them_once(run, photos, monkeypatch):
    (photos / "a" / "broken.png").write_bytes(b"no image")
    first = index_of(run, photos)
    assert [name for name, _ in first.skipped] == ["a/broken.png"]
    again = index_of(run, photos)
    assert again.skipped == first.skipped
    assert again.added == 0
    assert "a/broken.png" not in again.names()


def test_cached_features_know_why_images_were_skipped(run, photos):
    (photos / "a" / "broken.png").write_bytes(b"no image")
    first, again = (features_of(open_encoder(run), open_source(photos)).skipped for _ in range(2))
    assert first == again == (("a/broken.png", "not an image of a known format"),)


def test_a_resumed_pass_knows_why_images_were_skipped(run, photos, monkeypatch):
    monkeypatch.setattr("anechoic.eval.encoders.Encoder.batch_size_on_cores", 4)
    monkeypatch.setattr(feature_cache, "MARK_EVERY", 0.0)
    (photos / "a" / "000.png").write_bytes(b"no image")
    add, batches = feature_cache.Unfinished.add, []

    def interrupted(self, ids):
        add(self, ids)
        batches.append(ids)
        if len(batches) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache.Unfinished, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            features_of(open_encoder(run), open_source(photos), keep_pixels=False)
    found = features_of(open_encoder(run), open_source(photos), keep_pixels=False)
    assert found.skipped == (("a/000.png", "not an image of a known format"),)
    assert len(found.ids) == len(open_source(photos)) - 1


def test_index_grows_by_an_unreadable_image_alone(run, photos):
    before = index_of(run, photos)
    (photos / "a" / "broken.png").write_bytes(b"no image")
    after = index_of(run, photos)
    assert after.skipped == (("a/broken.png", "not an image of a known format"),)
    assert (after.names(), after.added) == (before.names(), 0)
    assert np.array_equal(after.vectors, before.vectors)


@contextmanager
def away(monkeypatch, name):
    """One file cannot be fetched, as on a disk that is away; its name, size and time stay as they are."""

    def refuse(path, **how):
        if str(path).endswith(name):
            raise OSError(112, "Host is down", path)
        return read_regular(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_regular", refuse)
        yield


def test_index_retries_temporarily_unreadable_images(run, photos, monkeypatch):
    with away(monkeypatch, "a/00.png"):
        first, again = index_of(run, photos), index_of(run, photos)
        assert first.skipped == again.skipped == (("a/00.png", "Host is down"),)
    after = index_of(run, photos)
    assert (after.added, after.skipped, len(after.ids)) == (1, (), 36)


def test_features_retry_temporarily_unreadable_images(run, photos, monkeypatch, computed):
    encoder, source = open_encoder(run), open_source(photos)
    with away(monkeypatch, "a/00.png"):
        assert len(features_of(encoder, source, layers="all", device="cpu").ids) == 35
    computed.clear()
    source = open_source(photos)
    whole = features_of(encoder, source, layers=(0,), device="cpu")
    assert all(len(rows) == len(whole.ids) == 36 for rows in whole.sets.values())
    # The other layers were kept without that image, so they do not fit any more.
    assert all(len(rows) == 36 for rows in features_of(encoder, source, layers="all", device="cpu").sets.values())
    assert len(computed) == 2
    features_of(encoder, source, layers="all", device="cpu")
    assert len(computed) == 2


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 64])
def test_flat_vectors_concatenate_patches(run, photos, width):
    """All of them as they are, or summed into fewer channels, which keeps cosines but for noise."""
    encoder = open_encoder(run)
    whole, folded = (
        features_of(flat(encoder, width=w), open_source(photos), device="cpu", cached=False) for w in (None, width)
    )
    (x,), (y,) = whole.sets.values(), folded.sets.values()
    assert x.shape == (36, 16 * 48)
    cosines = [
        unit_vectors(z, fit_scaling(z, "centered")) @ unit_vectors(z, fit_scaling(z, "centered")).T for z in (x, y)
    ]
    assert y.shape[1] == (width or 16 * 48)
    assert (cosines[0] - cosines[1]).abs().mean() < (0.15 if width else 1e-6)
    assert flat(encoder, width=width).fingerprint == flat(open_encoder(run), width=width).fingerprint
    assert index_of(run, photos, vector="flat").vectors.shape == (36, 512)
    with pytest.raises(UserError, match="encoder's output"):
        open_index(encoder, open_source(photos), encoder_name="x", place="y", vector="flat", layer=1)


# ---- a pass that is killed

KILLED = """
import os, signal, sys
from anechoic.cli.main import main
from anechoic.eval import feature_cache
feature_cache.MARK_EVERY = 0.0
real, seen = feature_cache.Unfinished.add, []
def add(self, ids):
    real(self, ids)
    seen.append(len(ids))
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
feature_cache.Unfinished.add = add
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["", "rows", "journal"])
def test_killed_embed_resumes_to_an_equal_file(run, photos, tmp_path, monkeypatch, damage, computed):
    monkeypatch.setattr("anechoic.eval.encoders.Encoder.batch_size_on_cores", 4)
    (photos / "a" / "broken.png").write_bytes(b"no image")
    words = ["embed", str(run), str(photos), "-o"]
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path / "whole"))
    assert main([*words, str(tmp_path / "whole.npz")]) == 0
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path / "killed"))
    script = "from anechoic.eval.encoders import Encoder\nEncoder.batch_size_on_cores = 4\n" + KILLED
    ended = subprocess.run([sys.executable, "-c", script, *words, str(tmp_path / "again.npz")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "again.npz").exists()
    (unfinished,) = (tmp_path / "killed" / "features").glob("*/unfinished")
    if damage:
        file = unfinished / ("journal.json" if damage == "journal" else "004-class.npy")
        flip_a_bit(file, -100 if damage == "journal" else 200)
    computed.clear()
    assert main([*words, str(tmp_path / "again.npz")]) == 0
    assert sum(computed) == (36 if damage else 24)  # three batches of four were safe
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not unfinished.exists()


# ---- search


@pytest.mark.slow
def test_neighbors_are_exact_and_never_the_query_itself(run, photos, capsys):
    found = metrics_of(
        capsys, "search", run, photos, photos / "a" / "00.png", "-k", "5", "--scaling", "raw", "--vector", "mean"
    )
    assert [row["rank"] for row in found["rows"]] == [1, 2, 3, 4, 5]
    assert found["rows"][0]["image"] == "b/copy.png"
    assert found["rows"][0]["similarity"] == pytest.approx(1, abs=1e-5)
    index = index_of(run, photos)
    vectors = np.array(index.vectors, dtype=np.float64)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = sorted(((units[0] @ unit, name) for unit, name in zip(units[1:], index.names()[1:], strict=True)))[::-1]
    assert [row["image"] for row in found["rows"][1:]] == [name for _, name in expected[1:5]]
    np.testing.assert_allclose([row["similarity"] for row in found["rows"]], [s for s, _ in expected[:5]], atol=1e-5)


def test_search_by_the_number_of_an_unreadable_image_names_the_image_and_the_reason(run, photos, capsys):
    (photos / "a" / "000.png").write_bytes(b"no image")
    assert main(["search", str(run), str(photos), "1"]) == 2
    said = capsys.readouterr().err
    assert "'a/000.png' cannot be searched for (not an image of a known format): choose another query." in said


@pytest.mark.slow
def test_both_engines_find_the_same(run, photos, capsys):
    pytest.importorskip("faiss")
    words = ("search", run, photos, "3", "7", "-k", "4", "--scaling", "centered")
    by_torch, by_faiss = (metrics_of(capsys, *words, "--engine", engine)["rows"] for engine in ("torch", "faiss"))
    assert [row["image"] for row in by_torch] == [row["image"] for row in by_faiss]


@pytest.mark.slow
def test_search_finds_an_image_outside_the_collection(run, photos, capsys, tmp_path):
    picture(5).save(tmp_path / "mine.png")
    found = metrics_of(capsys, "search", run, photos, tmp_path / "mine.png", "-k", "1")
    assert found["rows"][0]["image"] == "c/05.png"


def test_queries_are_paths_names_suffixes_and_numbers(photos):
    source = open_source(photos)
    words = [str(photos / "a" / "03.png"), "b/copy.png", "copy.png", "0"]
    assert [query.own for query in resolve(words, source)] == [1, 23, 23, 0]
    assert len(resolve([str(photos / "c")], source)) == 12
    with pytest.raises(UserError, match=r"no image 'cpoy.png'.*did you mean copy.png"):
        resolve(["cpoy.png"], source)
    with pytest.raises(UserError, match="Nothing is searched for"):
        resolve([], source)


@pytest.mark.slow
def test_search_page_shows_the_json_result(run, photos, capsys, tmp_path):
    page = tmp_path / "near.html"
    found = metrics_of(capsys, "search", run, photos, "0", "1", "-o", page)
    assert data_of(page)["metrics"] == found
    assert page.read_text().count("data:image/jpeg;base64,") == 2 * 13
    assert main(["search", str(run), str(photos), "0", "-o", str(tmp_path / "near.pdf")]) == 2
    assert "does not end in .html" in capsys.readouterr().err


# ---- whitening


def test_whitened_vectors_have_unit_covariance():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(500, 12, generator=generator).double() @ torch.randn(12, 12, generator=generator).double()
    white = rescaled(mixed, "whitened").double()
    covariance = torch.cov(white.T, correction=0)
    np.testing.assert_allclose(covariance, torch.eye(12), atol=1e-3)
    in_pieces = unit_vectors(mixed.numpy(), fit_scaling(mixed, "whitened"))
    np.testing.assert_allclose(in_pieces, torch.nn.functional.normalize(white, dim=1), atol=1e-5)


def test_scalings_do_not_depend_on_chunks(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32) * np.arange(1, 9)
    whole = [rescaled(vectors, scaling) for scaling in ("centered", "standardized", "whitened")]
    monkeypatch.setattr("anechoic.eval.feature_scaling.CHUNK", 37)
    for scaling, expected in zip(("centered", "standardized", "whitened"), whole, strict=True):
        np.testing.assert_allclose(rescaled(vectors, scaling).abs(), expected.abs(), rtol=1e-4, atol=1e-5)


# ---- exploring


def units_of(count, width=16, *, seed=0):
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(values, dim=1)


def test_all_neighbors_exclude_the_image_itself(monkeypatch):
    units = torch.cat([units_of(50), units_of(50)[:3], units_of(50)[:3]])  # three images three times
    monkeypatch.setattr(exploring, "ROWS_AT_ONCE", 7)
    found = exploring.all_neighbors(units, k=4)
    whole = (units @ units.T).fill_diagonal_(-2)
    np.testing.assert_allclose(found.similarities, whole.topk(4).values, atol=1e-6)
    assert (found.indices != torch.arange(56)[:, None]).all()
    assert all(len(set(row)) == 4 for row in found.indices.tolist())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square_of_the_collection():
    """All similarities of 20,000 images would take 1.6 GB; in a process of its own, whose peak is nobody else's."""
    script = """
import resource, torch
from anechoic.index import collection as exploring
units = torch.nn.functional.normalize(torch.randn(20_000, 16), dim=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
exploring.duplicate_pairs(near := exploring.all_neighbors(units), exploring.duplicate_limit(near))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 500


def test_neighbors_exclude_an_image_among_its_copies():
    same = torch.ones(6, 1)
    found = nearest_others(same, np.arange(6), k=3)
    assert all(i not in row for i, row in enumerate(found.indices.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("width", [6, 12, 48])
def test_planted_duplicates_are_found_without_false_ones(width):
    """Ten collections without a duplicate: the limit was chosen for a tenth of an image in each."""
    alarms = 0
    for seed in range(10):
        units = units_of(400, width, seed=seed)
        near = exploring.all_neighbors(units)
        alarms += len(exploring.duplicate_pairs(near, exploring.duplicate_limit(near)))
    assert alarms <= 3
    noise = 0.003 * torch.randn(100, width, generator=torch.Generator().manual_seed(1))
    copies = torch.nn.functional.normalize(units[:100] + noise, dim=1)  # of a quarter of all
    near = exploring.all_neighbors(torch.cat([units, copies]))
    pairs = {(i, j) for i, j, _ in exploring.duplicate_pairs(near, exploring.duplicate_limit(near))}
    assert {(i, 400 + i) for i in range(100)} <= pairs
    assert len(pairs) <= 103


def test_dense_cluster_is_no_duplicate_and_many_copies_are():
    """Ten crowds, each a twentieth as wide as all: their members are alike, but no more than by chance."""
    crowds = units_of(10, 12)[torch.arange(300) % 10] + 0.05 * units_of(300, 12, seed=1)
    near = exploring.all_neighbors(torch.nn.functional.normalize(crowds, dim=1))
    assert len(exploring.duplicate_pairs(near, exploring.duplicate_limit(near))) <= 1
    copies = units_of(1, 12, seed=2).expand(40, -1) + 1e-5 * units_of(40, 12, seed=3)
    near = exploring.all_neighbors(torch.nn.functional.normalize(torch.cat([units_of(300, 12), copies]), dim=1))
    (group,) = exploring.groups_of(exploring.duplicate_pairs(near, exploring.duplicate_limit(near)), 340)
    assert group == list(range(300, 340))


def test_groups_connect_pairs():
    assert exploring.groups_of([(0, 1, 1.0), (1, 2, 0.9), (5, 6, 0.8)], 8) == [[0, 1, 2], [5, 6]]
    assert exploring.groups_of([], 8) == []


def test_clusters_are_found_and_counted():
    centers = torch.nn.functional.normalize(torch.eye(8)[:4] + 0.01, dim=1)
    noise = 0.05 * torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    label = torch.arange(120) % 4
    units = torch.nn.functional.normalize(centers[label] + noise, dim=1)
    found = exploring.cluster(units)
    assert found.sizes == [30, 30, 30, 30]
    for number, examples in enumerate(found.examples):
        assert len({int(label[i]) for i in examples}) == 1
        assert all(found.label[i] == number for i in examples)
    assert exploring.cluster(units, count=2).sizes[0] >= 60
    with pytest.raises(UserError, match="1 to 120 clusters, not 500"):
        exploring.cluster(units, count=500)


@pytest.mark.slow
def test_explore_reports_duplicates_clusters_and_outliers(run, photos, capsys, tmp_path):
    page = tmp_path / "all.html"
    found = metrics_of(capsys, "explore", run, photos, "-o", page, "--scaling", "whitened")
    assert found["images"] == 36
    assert found["folders"] == 3
    groups = [{item["image"] for item in group["images"]} for group in found["duplicates"]]
    assert {"a/00.png", "b/copy.png"} in groups
    assert sum(cluster["size"] for cluster in found["clusters"]) == 36
    assert len(found["outliers"]) == 36
    assert data_of(page)["metrics"] == found
    text = page.read_text()
    assert all(f'data-name="{name}.csv"' in text for name in ("duplicates", "outliers", "clusters"))


@pytest.mark.slow
def test_page_reports_that_its_files_lack_rows(run, photos, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(collection_pages, "MAX_ROWS", 5)
    page = tmp_path / "all.html"
    metrics_of(capsys, "explore", run, photos, "-o", page)
    text = page.read_text()
    assert text.count("The file has the first 5 rows of 36.") == 2
    assert "Save outliers.csv (5 rows)" in text


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["raw", "centered", "standardized", "whitened"])
def test_explore_of_identical_images_lists_them_as_duplicates(run, tmp_path, capsys, scaling):
    """Without their mean, only rounding would be left of their vectors."""
    (tmp_path / "same").mkdir()
    for i in range(40):
        picture(0).save(tmp_path / "same" / f"{i:02d}.png")
    with pytest.warns(UserWarning, match="are the same for all 40 images") as warned:
        found = metrics_of(
            capsys, "explore", run, tmp_path / "same", "-o", tmp_path / "page.html", "--scaling", scaling
        )
    assert len(warned) == 1
    assert [len(group["images"]) for group in found["duplicates"]] == [40]
    assert [cluster["size"] for cluster in found["clusters"]] == [40]


@pytest.mark.slow
def test_explore_of_zero_features_warns_and_finds_no_duplicates(photos, tmp_path, capsys):
    model = make("mae")
    for parameter in model.parameters():
        parameter.data.zero_()
    zero = write_model(
        tmp_path / "zero", model.state_dict(), model_card(model, Preprocess((0.5,) * 3, (0.25,) * 3, 16, 3))
    )
    with pytest.warns(UserWarning, match="are the same for all 36 images"):
        found = metrics_of(capsys, "explore", zero, photos, "-o", tmp_path / "page.html", "--vector", "class")
    assert found["duplicates"] == []


@pytest.mark.slow
def test_explore_of_few_images_is_json(run, photos, capsys, tmp_path):
    for path in sorted((photos / "a").iterdir())[4:]:
        path.unlink()
    page = tmp_path / "page.html"
    found = metrics_of(capsys, "explore", run, photos / "a", "-o", page)
    assert found["limit"]["dimension"] is None
    assert "only equal ones count" in page.read_text()


@pytest.mark.slow
def test_explore_refuses_one_image(run, tmp_path, capsys):
    (tmp_path / "one").mkdir()
    picture(0).save(tmp_path / "one" / "a.png")
    assert main(["explore", str(run), str(tmp_path / "one"), "-o", str(tmp_path / "x.html")]) == 2
    assert "Neighbors need two images, and here is one" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.slow
def test_search_equals_nearest():
    vectors = np.random.default_rng(0).normal(size=(300, 24)).astype(np.float32)
    found = Searchable.of(vectors, "raw").nearest(vectors[:20], k=6)
    expected = nearest(vectors, vectors[:20], k=6)
    assert torch.equal(found.indices, expected.indices)
