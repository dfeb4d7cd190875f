"""Engines that the calls of a file's tests share, and so what they compile."""

import pytest

from scripts import common
from tests import fakes


@pytest.fixture(scope="module")
def engines():
    """By configuration."""
    return {}


@pytest.fixture
def load_once(monkeypatch, engines):
    """Scripts load an engine of one configuration once a file."""
    load_engine = common.load_engine

    def load(checkpoint, config, *expected):
        if config not in engines:
            engines[config] = load_engine(checkpoint, config, *expected)
        return engines[config]

    monkeypatch.setattr(common, "load_engine", load)


@pytest.fixture
def no_draws():
    """Steps are compiled without sampling, half of their code."""
    with fakes.no_draws():
        yield
