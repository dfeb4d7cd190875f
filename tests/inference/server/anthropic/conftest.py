"""Anthropic's own client, before a server with an engine that says what it is told to."""

import anthropic
import pytest


@pytest.fixture(scope="module")
def module_client(perch):
    with anthropic.Anthropic(base_url=perch.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(module_client, parrot):
    return module_client
