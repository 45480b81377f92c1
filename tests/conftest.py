"""What all tests share: one thread, a cache of their own, and the optional real images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decoded images of the tests stay out of the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["ANECHOIC_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real images: ANECHOIC_DATA, or shared/data beside the project."""
    folder = Path(os.environ.get("ANECHOIC_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real images: {folder} does not exist; set ANECHOIC_DATA to a folder that holds them")
    return folder
