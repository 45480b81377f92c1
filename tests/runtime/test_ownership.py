"""Data that a run names are opened unasked only if this user started the run on this machine."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from serving import make_pictures, small_config

from anechoic.config import DataConfig, SaveConfig
from anechoic.errors import UserError
from anechoic.pages.runs import open_run, own_source
from anechoic.pages.summary import summarize
from anechoic.runtime import ownership
from anechoic.server import inference
from anechoic.server.control import Control
from anechoic.storage.files import sealed
from anechoic.training.loop import fit

pytestmark = pytest.mark.usefixtures("own_cache")


def start(source):
    return {"starts": [{"mark": ownership.mark_of(source)}]}


def test_a_start_is_recognized_by_its_user_and_source_alone(own_cache):
    environment = start("photos")
    assert ownership.started_by_this_user(environment, "photos")
    assert not ownership.started_by_this_user(environment, "ftp://server.example/photos")
    (key,) = own_cache.glob("*.key")
    assert key.stat().st_mode & 0o077 == 0
    key.unlink()  # as on another machine
    assert not ownership.started_by_this_user(environment, "photos")
    assert ownership.started_by_this_user(start("photos"), "photos")
    assert not ownership.started_by_this_user(environment, "photos")


def test_a_damaged_key_is_made_again(own_cache):
    start("photos")
    (key,) = own_cache.glob("*.key")
    key.write_bytes(b"short")
    assert ownership.started_by_this_user(start("photos"), "photos")


def test_starts_at_once_have_one_key():
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ownership.mark_of, ["photos"] * 32))) == 1


def test_key_of_another_process_is_kept():
    """It may be made between the look for a key and the decision to make one."""
    first = ownership._new_key()
    assert ownership._new_key() == first


def test_without_a_cache_every_run_counts_as_anothers(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path / "file" / "cache"))
    assert ownership.mark_of("photos") is None
    assert not ownership.started_by_this_user(start("photos"), "photos")


@pytest.mark.parametrize("starts", [None, 7, [], [{}], [{"mark": 5}], [{"mark": "\u00e9"}], ["mark"]])
def test_damaged_marks_are_none(starts):
    ownership.mark_of("photos")
    assert not ownership.started_by_this_user({"starts": starts}, "photos")


# ---- a run on a folder of pictures, its user's own and another person's


@pytest.fixture
def own_run(tmp_path):
    (tmp_path / "pictures").mkdir()
    pictures = make_pictures(tmp_path / "pictures")
    config = small_config(data=DataConfig(source=str(pictures), image_size=16, holdout=8), save=SaveConfig(every=32))
    fit(replace(config, optim=replace(config.optim, samples=32 * 2)), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def foreign_run(own_run, tmp_path):
    """The run as another person may have made it: it names a folder of this machine."""
    path = tmp_path / "foreign"
    shutil.copytree(own_run, path)
    environment = json.loads((path / "env.json").read_text())
    del environment["checksum"]
    for item in environment["starts"]:
        item["mark"] = "0" * 32
    (path / "env.json").write_text(json.dumps(sealed(environment)))
    return path


def refuse_to_open(monkeypatch):
    def opened(*args, **options):
        raise AssertionError(f"opened {args}")

    for module in ("anechoic.pages.runs.open_data", "anechoic.pages.runs.open_maybe_labeled"):
        monkeypatch.setattr(module, opened)
    monkeypatch.setattr(inference.Collection, "of", opened)


@pytest.mark.slow
def test_report_and_server_open_only_the_data_of_own_runs(own_run, foreign_run, tmp_path, monkeypatch):
    assert own_source(open_run(own_run)) == str(tmp_path / "pictures")
    whole = summarize(open_run(own_run), name="own")
    assert whole.verdict is not None
    named = summarize(open_run(foreign_run), name="named", data=str(tmp_path / "pictures"))
    assert (bool(named.layers), named.missing) == (True, [])
    refuse_to_open(monkeypatch)
    found = summarize(open_run(foreign_run), name="foreign")
    assert (found.verdict, found.layers) == (None, [])
    assert len(found.missing) == 2
    assert all("is not opened unasked: name the images with --data" in text for text in found.missing)
    with pytest.raises(UserError, match="not opened unasked"):
        own_source(open_run(foreign_run))
    gallery = inference.Gallery(foreign_run, data=None, device="cpu")
    gallery._build()
    assert "is not opened unasked" in gallery._build_problem


@pytest.mark.slow
def test_server_resumes_only_own_runs(own_run, foreign_run, monkeypatch):
    started = []
    for path in (own_run, foreign_run):
        os.unlink(path / "results.json")
        control = Control(path)
        monkeypatch.setattr(control.children, "start", lambda command, **_: started.append(command))
        if path is own_run:
            control.resume()
        else:
            with pytest.raises(UserError, match="resume it in a terminal if you trust it"):
                control.resume()
    assert len(started) == 1
