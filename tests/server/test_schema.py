"""Requests of every kind, made up from the API's own description: none is answered with 500."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from serving import serving, small_config

from anechoic.training.loop import fit

EXAMPLES = 12


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "run"
    fit(small_config(), path)
    with serving(path) as client:
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{client.port}/openapi.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/", "/status", "/verdict")),
        *(("POST", path) for path in ("/embed", "/search", "/reconstruct", "/patches", "/sample", "/stop", "/resume")),
    ],
)
def test_no_request_is_answered_with_500(schema, method, path):
    operation = schema[path][method]
    statuses = set()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy())
    def ask(case):
        statuses.add(case.call().status_code)

    ask()
    assert statuses
    assert all(status < 500 or status == 503 for status in statuses), statuses
