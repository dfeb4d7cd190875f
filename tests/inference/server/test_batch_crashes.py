"""A crash at any write to the disk, and the start after it: no answer is lost or doubled, and no
file is cut off. Also a server that is killed.
"""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from configs.errors import InputError
from inference.http_client.connections import Answer
from inference.server.batches import batch_service, results, stored_batches
from inference.server.batches.batch_service import BatchService
from inference.server.batches.bodies import ENDED, BatchRequest, FileBody
from inference.server.batches.store import Store
from inference.server.batches.stored_files import USUAL, NewFile, StorageLimits, new_id
from tests.inference.server.openai.test_batches_client import TEXT, lines
from tests.inference.server.running import wait_until

OWNER = "owner"
IDS = [f"r{n}" for n in range(5)]
REFUSED = "r3"  # is answered with status 400
CALLS = ("write", "replace", "fsync", "unlink", "ftruncate")  # of the module os


class Disk:
    """Fails at a call, and from then on at all: what the process does later is not on disk."""

    def __init__(self, monkeypatch):
        self.num_calls, self.fails_at = 0, None
        self._lock = threading.Lock()
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    @property
    def has_failed(self) -> bool:
        return self.fails_at is not None and self.num_calls >= self.fails_at

    def repair(self) -> None:
        self.num_calls, self.fails_at = 0, None

    def _counted(self, name, call):
        def work(*arguments, **options):
            with self._lock:
                self.num_calls += 1
                is_first = self.num_calls == self.fails_at
                if is_first and name == "write":  # half of it is written
                    descriptor, data = arguments
                    call(descriptor, bytes(data)[: len(data) // 2])
                if self.has_failed:
                    raise OSError(5, "the disk is gone")
            return call(*arguments, **options)

        return work


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


class Server:
    """Answers requests, and after so many no more."""

    def __init__(self, num_answers: int = 1000):
        self.num_left = num_answers

    async def post(self, path: str, body: bytes) -> Answer:
        await asyncio.sleep(0)
        self.num_left -= 1
        if self.num_left < 0:
            await asyncio.Event().wait()
        prompt = json.loads(body)["prompt"]
        return Answer(400 if prompt == REFUSED else 200, {}, json.dumps({"to": prompt}).encode())


async def add_file(store: Store) -> str:
    file = NewFile(store.files, OWNER, new_id("file-"))
    for id in IDS:
        file.write(lines(id, prompt=id) + b"\n")
    body = FileBody(file.id, file.num_bytes, 0, 2**40, "requests.jsonl", "batch")
    return (await file.publish(body)).body.id


def served(folder: Path, work, server=None, disk=None, owner=OWNER, storage=USUAL):
    """Runs a service until `work` is done, or the disk has failed, and ends it like a crash."""

    async def main():
        store = Store("folder", folder, storage)
        try:
            service = BatchService(store)
            num_slots = asyncio.sleep
            running = asyncio.create_task(
                service.run([owner], lambda _, s: server or Server(), lambda: num_slots(0, 2))
            )
            working = asyncio.create_task(work(service))
            while not (working.done() or (disk and disk.has_failed)):
                await asyncio.sleep(0.001)
            for task in (working, running):
                task.cancel()
            await asyncio.gather(working, running, return_exceptions=True)
            return None if working.cancelled() or working.exception() else working.result()
        finally:
            store.close()

    return asyncio.run(main())


async def create(service: BatchService):
    id = await add_file(service.store)
    return (await service.create(OWNER, BatchRequest(id, TEXT, "24h"))).id


async def finish(service: BatchService):
    """The batch at its end; before, no file of results is listed."""
    store = service.store
    (body,) = store.batches.of(OWNER)
    while body.status not in ENDED:
        await asyncio.sleep(0.001)
    num_bytes = sum(file.bytes for file in store.files.of(OWNER))
    assert store.files._num_bytes[OWNER] == num_bytes, "each byte is counted once"
    return body, list(store.files.of(OWNER)), {
        file.id: store.files.path(file.id).read_text() for file in store.files.of(OWNER)
    }  # fmt: skip


async def cancel(service: BatchService):
    (body,) = service.store.batches.of(OWNER)
    await service.cancel(OWNER, body.id)
    return await finish(service)


def check_whole(outcome, status: str, num_answers: int | None):
    """Every request has one result, except those that a cancelled batch did not answer."""
    body, files, texts = outcome
    assert body.status == status
    assert {file.id for file in files} == {body.input_file_id} | (
        {body.output_file_id, body.error_file_id} - {None}
    )
    assert all(file.bytes == len(texts[file.id].encode()) for file in files)
    answered = [json.loads(line) for line in texts.get(body.output_file_id, "").splitlines()]
    failed = [json.loads(line) for line in texts.get(body.error_file_id, "").splitlines()]
    ids = sorted(record["custom_id"] for record in (*answered, *failed))
    assert len(ids) == len(set(ids)) and (status in ("cancelled", "failed") or ids == IDS)
    assert num_answers is None or len(answered) == num_answers
    counts = body.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, len(answered), len(failed))
    for record in answered:
        assert record["response"]["body"] == {"to": record["custom_id"]}


def every_crash(folder: Path, disk: Disk, begin, work, check, storage=USUAL):
    """Crashes at the first, the second, ... write of `work`, starts again, and checks the end."""
    for fails_at in range(1, 1000):
        place = folder / str(fails_at)
        begin(place)
        disk.repair()
        disk.fails_at = fails_at
        outcome = served(place, work, disk=disk, storage=storage)
        has_failed = disk.has_failed
        disk.repair()
        check(served(place, finish, storage=storage) if has_failed else outcome)
        if not has_failed:
            assert fails_at > 8, "nothing was written"
            return
    raise AssertionError("it never ends")


def test_a_crash_while_a_batch_is_answered(tmp_path, disk):
    every_crash(
        tmp_path, disk, lambda place: served(place, create, Server(0)), finish,
        lambda outcome: check_whole(outcome, "completed", 4),
    )  # fmt: skip


async def partly(service: BatchService):
    await create(service)
    (body,) = service.store.batches.of(OWNER)
    while body.request_counts.completed < 2:
        await asyncio.sleep(0.001)


def test_a_crash_while_a_batch_is_cancelled(tmp_path, disk):
    """The cancellation itself may be lost, and then the batch is completed."""

    def check(outcome):
        is_cancelled = outcome[0].status == "cancelled"
        check_whole(outcome, outcome[0].status, 2 if is_cancelled else 4)

    every_crash(tmp_path, disk, lambda place: served(place, partly, Server(2)), cancel, check)


def test_a_crash_while_a_batch_expires(tmp_path, disk, monkeypatch):
    clock = batch_service.time.time

    def begin(place):
        monkeypatch.setattr(batch_service.time, "time", clock)
        served(place, partly, Server(2))
        monkeypatch.setattr(batch_service.time, "time", lambda: clock() + 86401)

    every_crash(tmp_path, disk, begin, finish, lambda outcome: check_whole(outcome, "expired", 2))


def test_a_crash_while_a_batch_fails_for_want_of_room(tmp_path, disk):
    num_bytes = sum(len(lines(id, prompt=id)) + 1 for id in IDS)
    storage = StorageLimits(total_bytes=num_bytes + 400)

    def check(outcome):
        check_whole(outcome, "failed", 2)
        (error,) = outcome[0].errors.data
        assert error.code == "storage_full" and "delete files" in error.message

    every_crash(
        tmp_path, disk, lambda place: served(place, create, Server(0)), finish, check, storage
    )  # fmt: skip


def test_a_crash_while_a_file_is_uploaded_or_deleted(tmp_path, disk):
    """It exists with all of its content, or not at all, and nothing of it stays."""

    async def upload_and_delete(service):
        service.store.files.delete(await add_file(service.store))

    async def listed(service):
        return [(body.bytes, service.store.files.path(body.id).read_bytes())
                for body in service.store.files.of(OWNER)]  # fmt: skip

    is_whole = set()
    for fails_at in range(1, 100):
        place = tmp_path / str(fails_at)
        served(place, listed)
        disk.fails_at = fails_at
        served(place, upload_and_delete, disk=disk)
        has_failed = disk.has_failed
        disk.repair()
        files = served(place, listed)
        is_whole.add(len(files))
        assert all(size == len(content) and content.count(b"\n") == 5 for size, content in files)
        num_on_disk = sum(path.is_file() for path in place.rglob("*")) - 1  # the lock
        assert num_on_disk == 2 * len(files)
        if not has_failed:
            break
    assert is_whole == {0, 1} and not has_failed


def test_a_batch_ends_once_the_disk_works_again(tmp_path, monkeypatch):
    num_failures, write = iter(range(3)), stored_batches.write_state

    def work(path, data):
        if b'"outcome":"completed"' in data and next(num_failures, None) is not None:
            raise OSError(errno.ENOSPC, "the disk is full")
        write(path, data)

    monkeypatch.setattr(stored_batches, "write_state", work)
    monkeypatch.setattr(batch_service, "_SWEEP_S", 0)
    served(tmp_path, create, Server(0))
    check_whole(served(tmp_path, finish), "completed", 4)
    assert next(num_failures, None) is None


def test_a_damaged_end_of_results_is_answered_again(tmp_path):
    """As a power cut may leave it: zeros where a line was not yet on the disk."""
    served(tmp_path, partly, Server(2))
    (path,) = (tmp_path / "partial").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1] + b"\0" * 100 + b"\n" + whole)
    check_whole(served(tmp_path, finish), "completed", 4)


def test_a_reader_that_nothing_awaits_drops_nothing(tmp_path, monkeypatch):
    """Its batch was cancelled meanwhile, or expired, and got more results."""
    served(tmp_path, partly, Server(2))
    (path,) = (tmp_path / "partial").iterdir()
    line, read = b'{"custom_id": "r4"}\n', results._ids

    def late(path):
        earlier = read(path)
        path.write_bytes(path.read_bytes() + line)
        return earlier

    monkeypatch.setattr(results, "_ids", late)
    store = Store("folder", tmp_path)
    results.read(store.files, *store.batches.open())
    store.close()
    assert path.read_bytes().endswith(line)


def test_batches_of_a_key_that_is_gone_wait_for_it(tmp_path):
    async def create_and_wait(service):
        gone = await create(service)
        new = BatchRequest(await add_file(service.store), TEXT, "24h")
        service.store.files.get(OWNER, new.input_file_id).owner = "another"
        later = await service.create("another", new)
        while later.status != "completed":
            await asyncio.sleep(0.001)
        return service.store.batches.get(OWNER, gone).body.status

    assert served(tmp_path, create_and_wait, owner="another") == "validating"
    body, *_ = served(tmp_path, finish)
    assert body.status == "completed" and body.request_counts.completed == 4


def test_a_directory_has_one_server(tmp_path):
    store = Store("--batch_dir=x", tmp_path)
    with pytest.raises(InputError, match="^--batch_dir=x: another server uses it"):
        Store("--batch_dir=x", tmp_path)
    store.close()
    Store("--batch_dir=x", tmp_path).close()
    (tmp_path / "batches" / "b.json").write_text("{")
    with pytest.raises(InputError, match="b.json: is damaged"):
        Store("--batch_dir=x", tmp_path)


def test_a_batch_dir_that_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="^--batch_dir=x: .*; give a directory to write to"):
        Store("--batch_dir=x", tmp_path / "file" / "below")


@pytest.mark.long
def test_a_server_that_is_killed_continues(tmp_path):
    def start():
        command = [sys.executable, "-m", "tests.inference.server.fake_process",
                   f"--serve={tmp_path}"]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        port, _ = process.stdout.readline().split()
        return process, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    ids = [f"r{n}" for n in range(20)]
    process, http = start()
    with http:
        form = {"files": {"file": ("x", lines(*ids, max_tokens=20))}, "data": {"purpose": "batch"}}
        file_id = http.post("/v1/files", **form).json()["id"]
        fields = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
        batch_id = http.post("/v1/batches", json=fields).json()["id"]

        def batch(http):
            return http.get(f"/v1/batches/{batch_id}").json()

        wait_until(lambda: batch(http)["request_counts"]["completed"] >= 6)
        process.kill()
        process.communicate()
    process, http = start()
    try:
        with http:
            wait_until(lambda: batch(http)["status"] == "completed")
            text = http.get(f"/v1/files/{batch(http)['output_file_id']}/content").text
            assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == sorted(
                ids
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
