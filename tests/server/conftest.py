"""A trained run, a client of its server and a folder of images, one of each per test module."""

import pytest
from serving import make_pictures, serving, small_config

from anechoic.training.loop import fit


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "run"
    fit(small_config(), path)
    return path


@pytest.fixture(scope="module")
def client(run):
    with serving(run) as found:
        yield found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"))
