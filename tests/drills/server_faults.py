"""A server when its processes die, its clients misbehave, or more comes than it can serve."""

import itertools
import signal
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.drills import server_process
from tests.drills.harness import Drill, Outcome, Setting
from tests.drills.server_process import Clients, Server, ask, resident_mb

_PATIENT = ["--drain_timeout=300"]
_QUEUE_S, _FIRST_S = 2, 5  # what a request may wait for a slot, and for its first token (p99)
_RECOVERED_FIRST_S = 1.0
_TURNS = 3
_WORDS = ["the", "a", "of", "ridge", "line", "water", "stone", "over", "under", "light", "runs"]


def outcome(holds: bool, text: str, **figures: Any) -> Outcome:
    """What a drill gave, its figures by name."""
    return Outcome(holds, text, figures)


def crowded(setting: Setting) -> tuple[Server, int]:
    """A server of more slots than `never_read` has clients, where no request waits long, and how
    many these clients are.
    """
    num = setting.size(50, 10)
    return setting.servers.get([f"--max_num_seqs={num + 8}", f"--max_queue_s={_QUEUE_S}"]), num


def prompt(setting: Setting, num_words: int | None = None) -> str:
    """Random words, a few of which are tokens."""
    num = setting.dice.randint(5, 40) if num_words is None else num_words
    return " ".join(setting.dice.choice(_WORDS) for _ in range(num))


def request(setting: Setting, **more: Any) -> dict[str, Any]:
    """One that is answered by a fixed number of tokens."""
    body = {"prompt": prompt(setting), "max_tokens": setting.tokens, "ignore_eos": True}
    return {"body": body | {"temperature": 0} | more}


def streams(setting: Setting, num: int) -> list[dict[str, Any]]:
    """Greedy ones and seeded ones."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.95}]
    return [request(setting, **kinds[n % 2], **({"seed": n} if n % 2 else {})) for n in range(num)]


def kill_engine(setting: Setting) -> Outcome:
    """kill -9 of the engine under streams: each goes on, with the text that it would have had."""
    num = setting.size(32, 8)
    requests = streams(setting, num)
    server = setting.servers.get(_PATIENT)
    ask(server, requests, 600)  # whatever is compiled late
    expected = ask(server, requests, 600)
    clients, killed = Clients(server.port, requests, 900), server.engine
    time.sleep(expected["seconds"] / 2)
    assert killed is not None
    server_process.kill(killed)
    ready_s = server.wait_replaced(killed)
    found = clients.wait()["answers"]
    server.wait_idle()
    pairs = list(zip(found, expected["answers"], strict=True))
    num_same = sum(is_whole(a) and a["text"] == b["text"] for a, b in pairs)
    num_whole = sum(is_whole(a) and is_whole(b) for a, b in pairs)
    num_open = sum(max(a["gaps"], default=0) > 0.9 * ready_s for a in found)
    return outcome(
        num_same == num_whole == num and num_open > 0,
        f"{num_whole}/{num} streams ended, {num_open} of which were open at the kill and waited "
        f"for the next engine ({ready_s:.1f} s), {num_same}/{num} with the same text",
        streams=num, whole=num_whole, same=num_same, open=num_open, ready_s=ready_s,
        longest_gap_s=max((gap for a in found for gap in a["gaps"]), default=0),
    )  # fmt: skip


def disconnects(setting: Setting) -> Outcome:
    """Clients that leave at any time: pages and descriptors are as before."""
    num, most = setting.size(1000, 60), max(2, setting.tokens // 2)
    server, _ = crowded(setting)
    ask(server, [request(setting) for _ in range(8)], 600)
    server.wait_idle()
    before, restarts = server.held(), server.metric("ridgeline:engine_restarts_total")
    requests = []
    for n in range(num):
        one = request(setting, prompt=prompt(setting, setting.dice.randint(1, 60)), max_tokens=most)
        leave = (
            ["after_s", 0.001], ["after_s", setting.dice.uniform(0.002, 0.2)],
            ["after_tokens", setting.dice.randint(1, most - 1)], ["after_tokens", most],
        )[n % 4]  # fmt: skip
        requests.append(one | {"leave": leave})
    found = ask(server, requests, setting.size(3600, 600), workers=16)
    server.wait_idle()
    after = server.held()
    restarts = server.metric("ridgeline:engine_restarts_total") - restarts
    answer = ask(server, [request(setting)], 60)["answers"][0]
    num_unserved = sum(n % 4 > 1 and not a["num_tokens"] for n, a in enumerate(found["answers"]))
    return outcome(
        before == after and not restarts and is_whole(answer) and not num_unserved,
        f"{num} clients left in {found['seconds']:.0f} s: pages {before['pages']:.2%} before, "
        f"{after['pages']:.2%} after; descriptors {before['http_fds']:.0f} + "
        f"{before['engine_fds']:.0f} before, {after['http_fds']:.0f} + {after['engine_fds']:.0f} "
        f"after; {num_unserved} had no token, but should have",
        clients=num, before=before, after=after, restarts=restarts, unserved=num_unserved,
    )  # fmt: skip


def overload(setting: Setting) -> Outcome:
    """Five times as many requests as can be served: those that are, are served as fast as ever, and
    the others are told at once. What can be served is measured before and after: a machine's speed
    drifts.
    """
    seconds, capacity_s = setting.size(40, 10), setting.size(30, 10)
    server, num = crowded(setting)

    def of_some_length() -> dict[str, Any]:
        """Their lengths differ, or all would end at the same time."""
        most = setting.dice.randint(setting.tokens // 2, setting.tokens)
        return request(setting, max_tokens=most)

    # A few more than the num + 8 slots.
    closed = {"workers": num + 16, "seconds": capacity_s}
    ask(server, [of_some_length() for _ in range(64)], 600, workers=8)

    def capacity() -> float:
        new = [of_some_length() for _ in range(50 * capacity_s)]  # else prefixes are shared
        peak = ask(server, new, capacity_s + 120, **closed)
        server.wait_idle()
        return _rate(peak["answers"], capacity_s)

    before = capacity()
    open_loop, at = [], 0.0
    while (at := at + setting.dice.expovariate(5 * before)) < seconds:
        open_loop.append(of_some_length() | {"at": at})
    clients = Clients(server.port, open_loop, seconds + 300)
    time.sleep(seconds)
    start = time.monotonic()
    while (recovery_s := time.monotonic() - start) < 60:
        (one,) = ask(server, [request(setting, max_tokens=1)], 60)["answers"]
        if is_whole(one) and one["first_s"] < _RECOVERED_FIRST_S:
            break
        time.sleep(0.2)
    found = clients.wait()["answers"]
    server.wait_idle()
    served = [one for one in found if is_whole(one)]
    refused = [one for one in found if one["status"] in (429, 503)]
    others = len(found) - len(served) - len(refused)
    capacities = before, capacity()
    goodput = _rate(found, seconds) / statistics.mean(capacities)
    refusal = percentile([one["took_s"] for one in refused], 0.99)
    first = percentile([one["first_s"] for one in served], 0.99)
    retries = sorted({one["retry_after"] for one in refused if one["retry_after"]}, key=float)
    return outcome(
        goodput >= 0.9 and bool(refused) and refusal <= 0.05 and not others
        and first <= _FIRST_S and recovery_s <= 5,
        f"capacity {before:.2f} requests/s before, {capacities[1]:.2f} after, {len(open_loop)} "
        f"sent in {seconds} s: goodput {goodput:.1%} of their mean, {len(refused)} refused in "
        f"{1e3 * refusal:.1f} ms (p99), {others} failed, first token {first:.2f} s (p99), a new "
        f"request's within {_RECOVERED_FIRST_S:g} s again after {recovery_s:.1f} s",
        capacities=capacities, sent=len(open_loop), goodput=goodput, refused=len(refused),
        refusal_p99_s=refusal, failed=others, recovery_s=recovery_s, retry_after=retries[-1:],
        first_p99_s=first,
    )  # fmt: skip


def soak(setting: Setting) -> Outcome:
    """Minutes of all kinds of requests: memory stays flat, and nothing is compiled."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1, "seed": 1}, {"n": 2, "temperature": 1}, {"logprobs": 5},
        {"structured_outputs": {"json": schema}, "ignore_eos": False}, {"stop": ["the"]},
        {"presence_penalty": 0.5},
    ]  # fmt: skip
    requests: list[dict[str, Any]] = [request(setting, **kinds[n % len(kinds)]) for n in range(700)]
    for one in requests[::10]:
        one["leave"] = ["after_tokens", setting.dice.randint(1, setting.tokens)]
    server, seconds = setting.servers.get(_PATIENT), 60 * setting.minutes
    ask(server, requests[:70], 1200, workers=8)
    server.wait_idle()
    before, compiled = server.held(), server.metric("ridgeline:late_compiles_total")
    samples: list[tuple[float, float, float]] = []
    clients = Clients(server.port, requests, seconds + 300, workers=12, seconds=seconds)
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        samples.append((passed / 60, resident_mb(server.pid), resident_mb(server.engine)))
        time.sleep(min(5.0, seconds / 20))
    answers = clients.wait()["answers"]
    server.wait_idle()
    after = server.held()
    compiles = server.metric("ridgeline:late_compiles_total") - compiled
    late = samples[len(samples) // 4 :]  # before, caches fill
    minutes = [sample[0] for sample in late]
    lines = [statistics.linear_regression(minutes, [s[i] for s in late]) for i in (1, 2)]
    slopes = [line.slope for line in lines]
    ends = [[line.intercept + line.slope * minutes[n] for n in (0, -1)] for line in lines]
    num_failed = sum(one["status"] != 200 or bool(one["error"]) for one in answers)
    return outcome(
        max(slopes) < 1 and not compiles and before == after and not num_failed,
        f"{len(answers)} requests in {setting.minutes:g} min, {num_failed} failed: memory from "
        f"minute {minutes[0]:.1f} to {minutes[-1]:.1f}, by a line through {len(late)} samples, "
        f"{ends[0][0]:.1f} to {ends[0][1]:.1f} MB (HTTP, {slopes[0]:+.2f} MB/min) and "
        f"{ends[1][0]:.1f} to {ends[1][1]:.1f} MB (engine, {slopes[1]:+.2f} MB/min), "
        f"{compiles:.0f} compilations, pages and descriptors "
        + ("as before" if before == after else f"{before} before, {after} after"),
        requests=len(answers), failed=num_failed, minutes=setting.minutes, http_mb_min=slopes[0],
        engine_mb_min=slopes[1], compiles=compiles, before=before, after=after, samples=samples,
    )  # fmt: skip


def drain(setting: Setting) -> Outcome:
    """SIGTERM under streams: all of them end, new ones are refused, and nothing is left."""
    num = setting.size(32, 8)
    requests = streams(setting, num)
    server = setting.servers.get(_PATIENT)
    expected = ask(server, requests, 600)
    clients = Clients(server.port, requests, 600)
    time.sleep(expected["seconds"] / 3)
    pids = server_process.descendants(server.pid)
    num_running = server.metric("vllm:num_requests_running")
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    refused, retry_after = server.refusal(request(setting)["body"])
    found = clients.wait()["answers"]
    status = server.process.wait(60)
    ended_s = server_process.wait_ended(pids, 10)
    num_whole = sum(map(is_whole, found))
    return outcome(
        num_whole == num and status == 0 and refused == 503 and num_running > 0
        and ended_s is not None and ended_s <= 2,
        f"{num_whole}/{num} streams ended, {num_running:.0f} of which ran at the signal, a new one "
        f"got {refused} (Retry-After {retry_after}), status {status}; its "
        f"{len(pids)} processes ended {ended_s or float('nan'):.2f} s after it",
        streams=num, whole=num_whole, running=num_running, refused=refused, status=status,
        ended_s=ended_s,
    )  # fmt: skip


def kill_http(setting: Setting) -> Outcome:
    """kill -9 of the process that speaks HTTP: the others end, and the port is free."""
    server = setting.servers.get(None)
    clients = Clients(server.port, streams(setting, 8), 120)
    time.sleep(1)
    pids = server_process.descendants(server.pid)
    server_process.kill(server.pid)
    ended_s = server_process.wait_ended(pids, 10)
    server.process.wait()
    num_broken = sum(bool(one["error"]) for one in clients.wait()["answers"])
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))
    return outcome(
        ended_s is not None and ended_s <= 2 and len(pids) > 1 and num_broken > 0,
        f"{len(pids)} processes ended in {ended_s or float('nan'):.2f} s under {num_broken} "
        "streams, the port is free",
        processes=len(pids), ended_s=ended_s, broken=num_broken,
    )  # fmt: skip


def never_read(setting: Setting) -> Outcome:
    """Clients that never read, beside others: these notice nothing, compared with as many that do
    read, and memory stays bounded. By turns, each as long as the others take.
    """
    server, num = crowded(setting)
    big = {"max_tokens": 4 * setting.tokens, "logprobs": 20}
    watched = [request(setting) for _ in range(8)]
    heavy = [request(setting, **big) for _ in range(num)]
    ask(server, watched, 900)
    found_s: dict[bool, list[float]] = {True: [], False: []}
    most_mb = start_mb = resident_mb(server.pid)
    num_whole = 0
    for reads in (True, False) * _TURNS:
        others = Clients(server.port, [one | {"reads": reads} for one in heavy], 300)
        time.sleep(1)
        clients = Clients(server.port, watched, 300)
        while not clients.is_done:
            most_mb = max(most_mb, resident_mb(server.pid))
            time.sleep(0.1)
        others.stop()
        found = clients.wait()["answers"]
        num_whole += sum(map(is_whole, found))
        found_s[reads].append(percentile([gap for one in found for gap in one["gaps"]], 0.99))
        server.wait_idle()
    left = server.metric("vllm:num_requests_running")
    ratio = statistics.median(never / read for read, never in zip(*found_s.values(), strict=True))
    p99s = statistics.median(found_s[True]), statistics.median(found_s[False])
    return outcome(
        ratio <= 1.1 and most_mb - start_mb <= 64 and not left and num_whole == 16 * _TURNS,
        f"{len(heavy)} clients: between two tokens of others {1e3 * p99s[0]:.1f} ms (p99) where "
        f"they read, {1e3 * p99s[1]:.1f} ms where they never do ({ratio:.2f}x; medians of "
        f"{_TURNS} turns); memory {most_mb - start_mb:+.0f} MB",
        clients=len(heavy), reading_p99_s=found_s[True], never_p99_s=found_s[False], ratio=ratio,
        more_mb=most_mb - start_mb,
    )  # fmt: skip


def half_open(setting: Setting) -> Outcome:
    """Connections that never finish their head, in every other turn: closed, and others notice
    nothing.
    """
    num, size = setting.size(500, 100), setting.size(3, 1)
    server = setting.servers.get(_PATIENT)
    watched = [request(setting) for _ in range(8)]
    ask(server, watched, 600)
    took: list[float] = []
    p99s: list[tuple[float, float]] = []
    are_whole = True
    for _ in range(_TURNS):
        before = ask(server, watched * size, 600, workers=8)["answers"]
        slow = Clients(server.port, [{"body": {}, "sends_head": False}] * num, 60)
        time.sleep(0.5)
        during = ask(server, watched * size, 600, workers=8)["answers"]
        took += [one["took_s"] for one in slow.wait()["answers"]]
        server.wait_idle()
        p99s.append((_gap_p99(before), _gap_p99(during)))
        are_whole &= all(map(is_whole, before + during))
    ratio = statistics.median(with_them / without for without, with_them in p99s)
    without, with_them = (1e3 * statistics.median(times) for times in zip(*p99s, strict=True))
    return outcome(
        1 <= min(took) <= max(took) <= 12 and ratio <= 1.1 and are_whole,
        f"{_TURNS} times {num} connections closed after {min(took):.1f} to {max(took):.1f} s; "
        f"between two tokens of others {without:.1f} ms (p99) before, {with_them:.1f} ms meanwhile "
        f"({ratio:.2f}x, median of {_TURNS})",
        connections=num, closed_s=max(took), ratio=ratio, gap_p99_s=p99s,
    )  # fmt: skip


def _gap_p99(answers: Sequence[dict[str, Any]]) -> float:
    return percentile([gap for one in answers for gap in one["gaps"]], 0.99)


def is_whole(answer: dict[str, Any]) -> bool:
    """Whether it has all tokens that were requested."""
    return answer["reasons"] == ["length"] and not answer["error"]


def _rate(answers: Sequence[dict[str, Any]], seconds: float) -> float:
    """Requests a second that are served once all slots are taken, a quarter of the time after the
    start: of each whole answer, the share that came until `seconds`.
    """
    begin, found = seconds / 4, 0.0
    for one in filter(is_whole, answers):
        times = list(itertools.accumulate(one["gaps"], initial=one["at_s"] + one["first_s"]))
        found += sum(begin <= at < seconds for at in times) / len(times)
    return found / (seconds - begin)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


TIMED = (
    Drill(
        "half_open", "500 connections with half a head close within 12 s; gaps of others <= 1.1x",
        half_open, limit_s=80, is_timed=True,
    ),
    Drill(
        "overload",
        "5 x the capacity: >= 90 % of it served, first token <= 5 s and refusals <= 50 ms (p99), "
        "5 s after it a first token within 1 s",
        overload, limit_s=180, is_timed=True,
    ),
    Drill(
        "never_read",
        "50 clients that never read: gaps of others <= 1.1x (p99), memory within 64 MB",
        never_read, limit_s=90, is_timed=True,
    ),
    Drill(
        "kill_http", "kill -9 of the process that speaks HTTP: all others end within 2 s",
        kill_http, limit_s=5, is_timed=True,
    ),
)  # fmt: skip
OTHERS = (
    Drill(
        "kill_engine", "kill -9 under 32 streams: all whole, with the same text", kill_engine,
        limit_s=105,
    ),
    Drill(
        "drain", "SIGTERM under 32 streams: all whole, new ones 503, status 0", drain, limit_s=30
    ),
    Drill(
        "disconnects", "1,000 clients leave: pages and descriptors as before", disconnects,
        limit_s=230,
    ),
)  # fmt: skip
SOAK = Drill(
    "soak",
    "20 minutes of mixed load: < 1 MB/min, 0 compilations, 0 failed, pages and descriptors as "
    "before",
    soak, limit_s=30, is_long=True,
)  # fmt: skip
