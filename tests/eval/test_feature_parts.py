"""Embedding by several ranks: parts whose union is the single file bit by bit, whichever rank was killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tiny_pages import picture
from tiny_runs import write_run

from anechoic.cli.main import main
from anechoic.data import files, open_source
from anechoic.data.shards import write_shards
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder, open_encoder
from anechoic.eval.export_features import embed_source
from anechoic.eval.feature_parts import embed_parts
from anechoic.storage.safe_io import read_regular

pq = pytest.importorskip("pyarrow.parquet", reason="parts are parquet files")
pytestmark = pytest.mark.usefixtures("own_cache", "small_batches")
BATCH, PART, IMAGES = 4, 8, 37


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(Encoder, "batch_size", BATCH)
    monkeypatch.setattr(Encoder, "batch_size_on_cores", BATCH)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture
def photos(tmp_path):
    """37 images: five parts, the last of five images; one is damaged."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(IMAGES - 1):
        picture(i).save(folder / f"{i:02d}.png")
    (folder / "20-torn.png").write_bytes(b"no image")
    return folder


def embed(run, data, out, rank=0, world_size=1, **options):
    source = open_source(data)
    given = {"device": "cpu", "part_size": PART, **options}
    return embed_parts(open_encoder(run), source, out, rank=rank, world_size=world_size, **given)


def rows_of(path):
    table = pq.read_table(path)
    return table.column("name").to_pylist(), table.column("features").combine_chunks().flatten().to_numpy()


def assert_same_rows(path, expected):
    for ours, theirs in zip(rows_of(path), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def single(run, photos, tmp_path):
    """The rows of the file that one process writes."""
    embed_source(open_encoder(run), open_source(photos), tmp_path / "single.parquet", device="cpu")
    return rows_of(tmp_path / "single.parquet")


def test_parts_have_the_rows_of_the_single_file_for_every_world_size(run, photos, tmp_path, single):
    assert len(single[0]) == IMAGES - 1
    for world_size in (1, 2, 7):
        out = tmp_path / f"by-{world_size}"
        found = [embed(run, photos, out, rank, world_size) for rank in reversed(range(world_size))][-1]
        assert (found["parts"], found["finished"], found["vectors"]) == (5, 5, IMAGES - 1)
        assert [item["name"] for item in found["skipped"]] == ["20-torn.png"]
        assert_same_rows(out, single)
        first, *others = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (tmp_path / "by-1", out))
        assert all(other == first for other in others)


def test_finished_parts_are_not_computed_again(run, photos, tmp_path, single, computed):
    out = tmp_path / "parts"
    computed.clear()
    embed(run, photos, out, rank=0, world_size=2)
    assert sum(computed) == 8 + 7 + 5  # parts 0, 2 (with the damaged image) and 4
    computed.clear()
    assert embed(run, photos, out, rank=0, world_size=2)["computed"] == 0
    (out / "part-00002-of-00005.parquet").unlink()
    with open(out / "part-00004-of-00005.parquet", "r+b") as file:
        file.truncate(100)
    (out / ".new-12345678-part-00001-of-00005.parquet").write_bytes(b"left by a killed rank")
    assert embed(run, photos, out)["computed"] == 4  # now one process
    assert sum(computed) == 8 + 7 + 8 + 5
    assert_same_rows(out, single)
    assert sorted(path.name for path in out.iterdir()) == [f"part-{k:05d}-of-00005.parquet" for k in range(5)]


def test_part_of_a_changed_image_is_made_again(run, photos, tmp_path, caplog):
    out = tmp_path / "parts"
    embed(run, photos, out)
    picture(99).save(photos / "10.png")
    assert embed(run, photos, out)["computed"] == 1
    assert "part-00001-of-00005.parquet is made again: its images have changed" in caplog.text
    embed_source(open_encoder(run), open_source(photos), tmp_path / "single.parquet", device="cpu")
    assert_same_rows(out, rows_of(tmp_path / "single.parquet"))


def test_part_retries_temporarily_unreadable_images(run, photos, tmp_path, single, monkeypatch):
    def refuse(path, **how):
        if str(path).endswith("03.png"):
            raise OSError(112, "Host is down", path)
        return read_regular(path, **how)

    out = tmp_path / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(files, "read_regular", refuse)
        found = embed(run, photos, out)
        assert {item["name"]: item["reason"] for item in found["skipped"]}["03.png"] == "Host is down"
        assert embed(run, photos, out)["computed"] == 0
    assert embed(run, photos, out)["computed"] == 1
    assert_same_rows(out, single)


def test_part_whose_images_are_all_unreadable_is_empty(run, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(84):
        picture(i).save(folder / f"{i:02d}.png")
    for i in range(8, 16):
        (folder / f"{i:02d}.png").write_bytes(b"no image")
    assert embed(run, folder, tmp_path / "parts")["vectors"] == 76
    assert pq.read_metadata(tmp_path / "parts" / "part-00001-of-00011.parquet").num_rows == 0
    assert embed(run, folder, tmp_path / "parts")["computed"] == 0


def test_parts_of_other_settings_are_refused(run, photos, tmp_path):
    out = tmp_path / "parts"
    embed(run, photos, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match=r"other --pooling \(class, now mean\): choose another folder"):
        embed(run, photos, out, pooling="mean")
    with pytest.raises(UserError, match="other weights"):
        embed(write_run(tmp_path / "other", seed=3), photos, out)
    with pytest.raises(UserError, match="is no part of these 37 images"):
        embed(run, photos, out, part_size=2 * PART)
    with pytest.raises(UserError, match="--part-size is a multiple of 4 images, not 6"):
        embed(run, photos, out, part_size=6)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_shards_and_remote_shards_are_embedded_like_files(run, tmp_path):
    folder, shards = tmp_path / "photos", tmp_path / "shards"
    folder.mkdir()
    for i in range(20):
        picture(i, side=100).save(folder / f"{i:02d}.png")
    write_shards(open_source(folder), shards, shard_bytes=1 << 16)
    tars = sorted(shards.glob("*.tar"))
    assert len(tars) > 2
    braces = f"{shards}/{tars[0].stem[:-1]}{{0..{len(tars) - 1}}}.tar"
    embed_source(open_encoder(run), open_source(folder), tmp_path / "single.parquet", device="cpu")
    _, expected = rows_of(tmp_path / "single.parquet")
    for number, data in enumerate((shards, braces, f"file://{shards}", f"file://{braces}")):
        out = tmp_path / f"parts-{number}"
        for rank in range(2):
            found = embed(run, str(data), out, rank, 2)
        assert found["vectors"] == 20
        np.testing.assert_array_equal(rows_of(out)[1], expected)
        assert embed(run, str(data), out)["computed"] == 0


def test_several_ranks_refuse_a_single_file(run, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("anechoic.runtime.distributed.end_with", lambda parent: None)
    assert main(["embed", str(run), str(photos), "-o", str(tmp_path / "all.parquet")]) == 2
    assert "2 ranks write a folder of parts: omit the ending" in capsys.readouterr().err


# Rank 1 is killed before its second part is written, once.
KILLED = f"""
import os, signal, sys
from pathlib import Path
from anechoic.cli.main import main
from anechoic.eval import feature_parts
from anechoic.eval.encoders import Encoder
Encoder.batch_size = Encoder.batch_size_on_cores = {BATCH}
real, flag = feature_parts.Parts.write, Path(sys.argv.pop(1))
def write(self, part, *rest, **more):
    if part == 3 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, part, *rest, **more)
feature_parts.Parts.write = write
sys.exit(main())
"""


@pytest.mark.slow
def test_killed_rank_resumes_to_the_rows_of_one_process(run, photos, tmp_path, single):
    script, flag, out = tmp_path / "killed.py", tmp_path / "flag", tmp_path / "parts"
    script.write_text(KILLED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    words = [str(script), str(flag), "embed", str(run), str(photos), "-o", str(out), "--part-size", str(PART)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run([*launcher, *words], env=environment, capture_output=True, text=True, check=False)
    assert first.returncode != 0
    assert flag.exists(), first.stderr
    assert f"Signal {signal.SIGKILL}" in first.stderr
    finished = {path: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert out / "part-00001-of-00005.parquet" in finished
    assert out / "part-00003-of-00005.parquet" not in finished
    again = subprocess.run([*launcher, *words], env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert_same_rows(out, single)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(list(out.iterdir())) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_job_of_two_tasks_embeds_like_one_process(run, photos, tmp_path):
    pytest.importorskip("submitit", reason="jobs are submitit's")
    out, how = tmp_path / "parts", ("--cluster", "local", "--wait", "--cpus-per-task", "1", "--tasks-per-node", "2")
    words = ("embed", str(run), str(photos), "-o", str(out), "--part-size", "256", "--device", "cpu")
    assert main(["tools", "slurm", *how, "--out", str(tmp_path / "jobs"), "--", *words]) == 0
    assert main([*words[:4], str(tmp_path / "single.parquet")]) == 0
    names, values = rows_of(tmp_path / "single.parquet")
    found_names, found = rows_of(out)
    assert found_names == names
    np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-5)  # batches of other sizes here
