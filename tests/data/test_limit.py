"""limit:N:SOURCE and --limit, and kinds of data that a program adds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anechoic import register_source
from anechoic.cli.main import common_flags, limit_data
from anechoic.config import Config, DataConfig
from anechoic.data import FILE_READERS, NAMED, Source, described, limited, open_source, split_limit
from anechoic.data.split import draw
from anechoic.errors import UserError


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_draw_takes_the_same_share_of_every_label(labels, data):
    labels = np.array(labels)
    count = data.draw(st.integers(1, len(labels)))
    rows = draw(len(labels), count, labels=labels)
    assert len(rows) == count == len(set(rows.tolist()))
    assert (np.diff(rows) > 0).all()
    for label in np.unique(labels):
        assert abs((labels[rows] == label).sum() - count * (labels == label).mean()) < 1
    assert np.array_equal(rows, draw(len(labels), count, labels=labels))


def test_limited_data_is_named_in_words():
    assert described("limit:1000:photos") == "1,000 images of photos"
    assert described("photos") == "photos"


def test_limited_source_is_the_same_part_every_time():
    whole, part = open_source("digits:test", labels=True, channels=1), open_source("limit:50:digits:test", channels=1)
    assert len(part) == 50
    assert part.where == "limit:50:digits:test"
    assert part.fingerprint == open_source("limit:50:digits:test", channels=1).fingerprint
    assert part.fingerprint != open_source("limit:49:digits:test", channels=1).fingerprint
    labeled = open_source("limit:100:digits:test", labels=True, channels=1)
    assert np.abs(np.bincount(labeled.labels) / 100 - np.bincount(whole.labels) / len(whole)).max() < 0.01
    assert open_source("limit:999999:digits:test", channels=1).fingerprint == whole.fingerprint


def test_limit_is_replaced_and_split_off():
    assert limited("limit:5:photos", 9) == "limit:9:photos"
    assert split_limit("limit:9:hf:name:train") == ("limit:9:", "hf:name:train")
    assert split_limit("limit:") == ("", "limit:")
    with pytest.raises(UserError, match="at least 1, not 0"):
        limited("photos", 0)


def test_limit_option_reaches_data_test_and_recipe():
    found = limit_data({"run": "r", "data": "photos", "test": "more", "seed": 3}, 7)
    assert found == {"data": "limit:7:photos", "test": "limit:7:more"}
    config = limit_data({"recipe": Config(data=DataConfig(source="digits"))}, 7)["recipe"]
    assert config.data.source == "limit:7:digits"
    with pytest.raises(UserError, match="commands that are given data"):
        limit_data({"data": None}, 7)


def test_every_command_that_reads_data_has_the_limit():
    import inspect

    from anechoic.cli import command_names, find_command

    limits = set()
    for name in command_names():
        signature = inspect.signature(find_command(name), eval_str=True)
        if "limit" in common_flags(signature):
            limits.add(name)
    assert {"embed", "evaluate", "search", "explore", "pretrain", "train", "finetune", "report", "sweep"} <= limits
    assert "tools doctor" not in limits


# ---- kinds of data that a program adds


class Squares(Source):
    """Gray squares, brighter and brighter."""

    def __init__(self, count, channels):
        super().__init__()
        self.count, self.channels, self.fingerprint = count, channels, f"squares-{count}-{channels}"

    def __len__(self):
        return self.count

    def name(self, index):
        return f"square {index}"

    def read(self, index, *, min_side=None):
        return torch.full((self.channels, 8, 8), index, dtype=torch.uint8)


def open_squares(words, *, channels):
    return Squares(int(words[0]), channels)


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr("anechoic.data.NAMED", dict(NAMED))
    monkeypatch.setattr("anechoic.data.FILE_READERS", dict(FILE_READERS))


def test_registered_sources_are_opened_by_name_and_by_suffix(tables, tmp_path):
    register_source("squares", open_squares)
    source = open_source("squares:5", channels=1)
    assert (len(source), source.name(3), source.where) == (5, "square 3", "squares:5")
    assert len(open_source("limit:2:squares:5", channels=1)) == 2
    register_source(".Squares", lambda path, *, labels, channels: Squares(int(path.read_text()), channels))
    (tmp_path / "few.squares").write_text("4")
    assert len(open_source(tmp_path / "few.squares")) == 4


@pytest.mark.parametrize("name", ["digits", ".zip", ".parquet", ".png"])
def test_registered_source_replaces_none(tables, name):
    with pytest.raises(UserError, match="already a kind of data"):
        register_source(name, open_squares)


@pytest.mark.parametrize("name", ["", ".", "a:b", "a/b"])
def test_registered_source_needs_a_name(tables, name):
    with pytest.raises(UserError, match="cannot name a kind of data"):
        register_source(name, open_squares)
