"""OpenAI's own client, before a server with an engine that says what it is told to."""

import openai
import pytest


@pytest.fixture(scope="module")
def module_client(perch):
    with openai.OpenAI(base_url=f"{perch.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
def client(module_client, parrot):
    return module_client
