"""A server for the tests of a file, before an engine whose answers are known."""

import pytest

from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.running import running


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as one:
        yield one
