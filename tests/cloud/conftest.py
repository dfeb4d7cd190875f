"""Emulated stores, and a process that starts with nothing kept of them."""

import pytest

from inference.files import object_store, range_cache


@pytest.fixture(scope="module", params=["S3", "GCS"])
def store(request, tmp_path_factory):
    yield from _running(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    yield from _running("S3", tmp_path_factory)


def _running(name, tmp_path_factory):
    from tests.cloud import servers  # which only `make test-cloud` can load

    store = getattr(servers, name)(tmp_path_factory.mktemp(name))
    yield store
    store.close()


@pytest.fixture
def reaches(tmp_path, monkeypatch):
    """Makes this process, with an empty cache, reach a store through a relay."""
    from tests.cloud import servers

    relays = []

    def reach(store, every=None):
        relay = servers.Relay(store.port, every)
        relays.append(relay)
        for name, value in servers.environment(store, relay, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        start_anew(monkeypatch)
        return relay

    yield reach
    for relay in relays:
        relay.close()
    object_store._store.cache_clear()


def start_anew(monkeypatch):
    """As a process that starts: it has no connection yet, and no count of what is kept."""
    object_store._store.cache_clear()
    range_cache.bound.cache_clear()
    monkeypatch.setattr(range_cache, "_room", range_cache._Room())
