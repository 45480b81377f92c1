"""Names of clusters."""

from __future__ import annotations

import pytest

from anechoic.pages.cluster_names import cluster_names, folder_of, words_of


@pytest.mark.parametrize(
    ("clusters", "expected"),
    [
        ([["a/1.png", "a/2.png"], ["b/1.png", "b/2.png"]], ["a", "b"]),
        # Of nested folders the innermost that most of the cluster comes from.
        ([["x/a/1.png", "x/a/2.png", "x/b/1.png"], ["x/c/1.png", "x/c/2.png"]], ["x/a", "x/c"]),
        # No folders: the word that the names share, without those of cameras.
        ([["IMG_beach_1.png", "IMG beach-2.png"], ["IMG_dog.png", "DSC_dog2.png"]], ["beach", "dog"]),
        ([["IMG_1.png", "IMG_2.png"], ["IMG_3.png"]], ["", ""]),
        # A folder as frequent in the whole collection names nothing by itself.
        ([["a/x1.png", "b/y1.png"], ["a/x2.png", "b/z1.png"]], ["b and others (1)", "b and others (2)"]),
        ([["a/1.png", "a/2.png"], ["a/3.png", "b/1.png"], ["b/2.png", "b/3.png"]], ["a", "b and others", "b"]),
    ],
)
def test_clusters_are_named_by_their_most_frequent_folder_or_word(clusters, expected):
    names = [name for cluster in clusters for name in cluster]
    labels = [number for number, cluster in enumerate(clusters) for _ in cluster]
    assert cluster_names(names, labels, len(clusters)) == expected


def test_a_flat_collection_has_no_folder():
    assert (folder_of("a.png"), folder_of("x/y/a.png")) == ("", "x/y")


def test_words_are_those_of_the_file_without_frame_and_suffix():
    assert list(words_of("trip/Blue_Lake-0012.tiff#frame=3&xywh=0,0,4,4")) == ["blue", "lake"]
