"""Shared fixtures: one thread, a private cache, a browser, and the optional real images."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import launch

torch.set_num_threads(1)
# A background shell may ignore SIGINT, which the subprocesses of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Freeze what was imported: scanning it for garbage took a fifth of the time of tests that train."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep decoded images of the tests out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["ANECHOIC_CACHE"] = str(folder)
    # Code that torch.compile generated for another instruction set must not be reused.
    kind = torch.backends.cpu.get_cpu_capability()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"anechoic-inductor-{os.getuid()}-{kind}")
    return folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: other tests have images of the same content."""
    monkeypatch.setenv("ANECHOIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of images that passed through a network, by batch."""
    from anechoic.eval import feature_cache

    sizes: list[int] = []
    extract = feature_cache.extract_batches

    def counting(model: Any, batches: Any, **options: Any) -> Any:
        def passed() -> Iterator[Any]:
            for batch in batches:
                sizes.append(len(batch))
                yield batch

        return extract(model, passed(), **options)

    monkeypatch.setattr(feature_cache, "extract_batches", counting)
    return sizes


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start one browser for all tests of pages."""
    yield from launch()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real images: ANECHOIC_DATA, or shared/data beside the project."""
    folder = Path(os.environ.get("ANECHOIC_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real images: {folder} does not exist; set ANECHOIC_DATA to a folder that holds them")
    return folder


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay out figures without rendering them, which takes most of the time."""
    from anechoic.pages import figures

    def save(figure: Any, path: Path) -> list[Path]:
        files = [path.parent / f"{path.name}.{kind}" for kind in ("png", "svg")]
        for file in files:
            file.write_text("a picture")
        return files

    monkeypatch.setattr(figures, "save", save)
