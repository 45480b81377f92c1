"""Emoji: every thing in every hand, splits that share nothing, words that choose, and nothing that is misread."""

import pickle

import numpy as np
import pytest

from anechoic.data import open_source
from anechoic.data.emoji import SHEETS, read_index
from anechoic.errors import UserError

STYLES = ("noto", "noto-v1", "twemoji", "fluent-emoji-flat", "emojione")


def opened(spec, **options):
    return open_source(spec, **{"labels": True, **options})


def test_emoji_are_sorted_by_style():
    source = opened("emoji")
    assert len(source) == 5150
    assert read_index()["styles"] == STYLES
    assert np.array_equal(source.facets["object"], np.tile(np.arange(1030), 5))
    assert np.array_equal(source.facets["style"], np.repeat(np.arange(5), 1030))
    assert source.read(0).shape == (3, 48, 48)
    assert source.name(0) == "noto/1st-place-medal"
    assert source.name(1030) == "noto-v1/1st-place-medal"
    # Drawings on white: corners are mostly white, no tile is empty, hardly any is another one again.
    images = source.images
    assert (images[:, 0, 0] > 250).all(axis=1).mean() > 0.75
    assert (images.reshape(5150, -1).min(axis=1) < 240).all()
    assert len({image.tobytes() for image in images}) > 5100


def test_emoji_labels_are_groups_objects_or_styles():
    assert len(opened("emoji").classes) == 8
    assert opened("emoji").classes == tuple(sorted(opened("emoji:label=group").classes))
    by_thing, by_style = opened("emoji:label=object"), opened("emoji:label=style")
    assert np.array_equal(by_thing.labels, by_thing.facets["object"])
    assert len(set(by_thing.classes)) == 1030
    assert np.array_equal(by_style.labels, by_style.facets["style"])
    assert by_style.classes == STYLES
    assert opened("emoji", labels=False).labels is None


def test_emoji_splits_share_no_object_and_every_group():
    train, test = opened("emoji:train"), opened("emoji:test")
    assert set(train.facets["object"]).isdisjoint(test.facets["object"])
    assert len(train) + len(test) == 5150
    assert 0.15 < len(test) / 5150 < 0.2
    assert set(train.labels) == set(test.labels) == set(range(8))
    assert train.classes == test.classes


def test_emoji_styles_are_selected_and_excluded():
    one = opened("emoji:style=noto")
    assert set(one.facets["style"]) == {0}
    assert len(one) == 1030
    others = opened("emoji:without=noto:label=thing")
    assert set(others.facets["style"]) == {1, 2, 3, 4}
    assert np.array_equal(
        opened("emoji:style=twemoji+noto").images, opened("emoji:without=noto-v1+fluent-emoji-flat+emojione").images
    )
    assert len(opened("emoji:test:style=emojione+noto")) == 2 * 203
    # A drawing is the same by every spec, and a fingerprint depends on the drawings of a source.
    assert np.array_equal(one.images, opened("emoji").images[:1030])
    assert opened("emoji").fingerprint == opened("emoji:label=thing").fingerprint != one.fingerprint


def test_gray_and_other_processes():
    assert opened("emoji:style=noto", channels=1).read(3).shape == (1, 48, 48)
    source = opened("emoji:test")
    again = pickle.loads(pickle.dumps(source))
    assert np.array_equal(again.read(7), source.read(7))
    assert again.name(7) == source.name(7)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("emoji:valid", "say emoji, emoji:train or emoji:test"),
        ("emoji:style=apple", "no emoji style 'apple'; there are noto, noto-v1"),
        ("emoji:label=color", "label=object"),
        ("emoji:train:test", "has split twice"),
        ("emoji:style=noto:without=noto", "leaves no style"),
        ("emoij", "did you mean emoji"),
    ],
)
def test_emoji_refuses_unknown_words(spec, message):
    with pytest.raises(UserError, match=message):
        opened(spec)


def test_emoji_sheets_are_small_and_have_licenses():
    files = list(SHEETS.iterdir())
    assert sum(file.stat().st_size for file in files) < 3_500_000
    assert all(file.stat().st_size < 1_000_000 for file in files)
    attribution = (SHEETS / "ATTRIBUTION.md").read_text()
    assert all(f"| {style} |" in attribution for style in STYLES)
    assert "Twemoji by Twitter, CC-BY 4.0" in attribution
    assert "EmojiOne 2, CC-BY 4.0" in attribution
