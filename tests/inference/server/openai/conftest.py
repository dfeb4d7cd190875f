"""OpenAI's own client, before a server with an engine that says what it is told to."""

import openai
import pytest

from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running


@pytest.fixture(scope="module")
def engine():
    return Parrot(TEMPLATES["qwen"])


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as one:
        yield one


@pytest.fixture(autouse=True)
def as_at_first(engine):
    engine.says = engine.breaks_at = None


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one
