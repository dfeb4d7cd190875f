"""Anthropic's own client, before a server with an engine that says what it is told to."""

import anthropic
import pytest

from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running


@pytest.fixture(scope="module")
def bird():
    return Parrot(TEMPLATES["qwen"])


@pytest.fixture(scope="module")
def perch(bird):
    """The server before it."""
    with running(bird) as server:
        yield server


@pytest.fixture
def parrot(bird):
    """It, as it was at first."""
    bird.says, bird.breaks_at, bird.failure = None, None, ""
    return bird


@pytest.fixture(scope="module")
def module_client(perch):
    with anthropic.Anthropic(base_url=perch.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(module_client, parrot):
    return module_client
