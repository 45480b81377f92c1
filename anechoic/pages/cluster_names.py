"""Names of clusters: the folder that most of a cluster comes from, or the word that its file names share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from posixpath import basename, dirname, splitext

# A folder names a cluster that comes to this share from it, a word one in which this share of the names has it; both
# must be this much more frequent than in the whole collection.
FOLDER_SHARE, WORD_SHARE, LIFT = 0.5, 0.25, 1.2
WORD = re.compile(r"[^\W\d_]{3,}")
# Words that cameras and programs put into file names.
CAMERA = frozenset(
    ["img", "dsc", "dscn", "image", "photo", "picture", "scan", "frame", "tile", "copy", "untitled", "xywh"]
)


def folder_of(name: str) -> str:
    """The folder an image lies in; empty if it lies in no folder of the collection."""
    return dirname(name)


def cluster_names(names: Sequence[str], labels: Sequence[int], count: int) -> list[str]:
    """Return a name for each of `count` clusters, an empty one without folders and shared words.

    Without a folder or word of its own it is named after its most frequent folder "and others"; equal names are
    numbered.
    """
    folders: list[Counter[str]] = [Counter() for _ in range(count)]
    words: list[Counter[str]] = [Counter() for _ in range(count)]
    sizes = Counter(labels)
    for name, label in zip(names, labels, strict=True):
        folders[label].update(parents(name))
        words[label].update(set(words_of(name)))
    found: list[str] = []
    for label in range(count):
        size = sizes[label]
        # Of nested folders the innermost.
        common = typical(folders[label], sum(folders, Counter()), FOLDER_SHARE, size / len(names), size)
        shared = typical(words[label], sum(words, Counter()), WORD_SHARE, size / len(names), size)
        found.append(max(common, key=lambda one: (one.count("/"), folders[label][one], one), default=""))
        found[-1] = found[-1] or max(shared, key=lambda one: (words[label][one], one), default="")
        if not found[-1] and folders[label]:
            found[-1] = f"{max(folders[label], key=lambda one: (folders[label][one], one.count('/'), one))} and others"
    return [
        f"{name} ({found[: i + 1].count(name)})" if name and found.count(name) > 1 else name
        for i, name in enumerate(found)
    ]


def typical(own: Counter[str], every: Counter[str], least: float, share: float, size: int) -> list[str]:
    """What occurs in `least` of a cluster or more, and relatively more often than in the collection."""
    return [one for one, times in own.items() if times >= max(2, least * size) and times >= LIFT * share * every[one]]


def parents(name: str) -> Iterator[str]:
    """The folder of an image and all those around it."""
    folder = folder_of(name)
    while folder not in ("", "/"):
        yield folder
        folder = dirname(folder)


def words_of(name: str) -> Iterator[str]:
    """The words of a file's name, in lower case, without those of cameras."""
    stem = splitext(basename(name.partition("#")[0]))[0]
    return (word for word in map(str.lower, WORD.findall(stem)) if word not in CAMERA)
