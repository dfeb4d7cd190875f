"""A server for the tests of a file, before an engine whose answers are known."""

import pytest

from tests import chromium
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as one:
        yield one


@pytest.fixture(scope="module")
def bird():
    return Parrot(TEMPLATES["qwen"])


@pytest.fixture(scope="module")
def perch(bird):
    """The server before an engine that says what it is told to."""
    with running(bird) as one:
        yield one


@pytest.fixture
def parrot(bird):
    """It, as it was at first."""
    bird.says, bird.breaks_at, bird.failure = None, None, ""
    return bird


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as running_browser:
        yield running_browser
