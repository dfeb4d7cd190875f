"""What a server does when things go wrong: faults, brought about at a real one, and what came of
each as a line.

python docs/make_drills.py [--drills=kill_engine,...] [--quick] [--json=FILE] [serve's own flags]

Without flags of `scripts.serve`, it serves smollm2-135m. Drills that follow one another share a
server, as long as they need no other and it is as before; all traffic stays on this machine and is
bounded in number and time.
"""

import argparse
import contextlib
import itertools
import json
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import drill_server
from compare import processor
from drill_server import Clients, Server, Servers, ask, resident_mb

Found = dict[str, Any]


class Drill:
    """What the drills share: a server, how large they are, and prompts."""

    def __init__(self, servers: Servers, quick: bool, minutes: float, tokens: int):
        self.quick, self.minutes, self.tokens = quick, minutes, tokens
        self.servers = servers
        self.dice = random.Random(0)

    def size(self, whole: int, quick: int) -> int:
        """Of one kind or the other."""
        return quick if self.quick else whole

    def crowded(self) -> tuple[Server, int]:
        """A server of more slots than `never_read` has clients, where nobody waits long, and how
        many these clients are.
        """
        num = self.size(50, 10)
        return self.servers.get([f"--max_num_seqs={num + 8}", f"--max_queue_s={_QUEUE_S}"]), num

    def prompt(self, num_words: int | None = None) -> str:
        """Random words, a few of which are tokens."""
        num = self.dice.randint(5, 40) if num_words is None else num_words
        return " ".join(self.dice.choice(_WORDS) for _ in range(num))

    def request(self, **more: Any) -> dict[str, Any]:
        """One that is answered by a fixed number of tokens."""
        body = {"prompt": self.prompt(), "max_tokens": self.tokens, "ignore_eos": True}
        return {"body": body | {"temperature": 0} | more}

    def streams(self, num: int) -> list[dict[str, Any]]:
        """Greedy ones and seeded ones."""
        seeded = [{}, {"temperature": 0.8, "top_p": 0.95}]
        return [self.request(**seeded[n % 2], **({"seed": n} if n % 2 else {})) for n in range(num)]


def kill_engine(drill: Drill) -> Found:
    """kill -9 of the engine under streams: each goes on, with the text that it would have had."""
    num = drill.size(32, 8)
    requests = drill.streams(num)
    server = drill.servers.get(_PATIENT)
    ask(server, requests, 600)  # whatever is compiled late
    expected = ask(server, requests, 600)
    clients, killed = Clients(server.port, requests, 900), server.engine
    time.sleep(expected["seconds"] / 2)
    assert killed is not None
    drill_server.kill(killed)
    ready_s = server.wait_replaced(killed)
    found = clients.wait()["answers"]
    server.wait_idle()
    pairs = list(zip(found, expected["answers"], strict=True))
    num_same = sum(_is_whole(a) and a["text"] == b["text"] for a, b in pairs)
    num_whole = sum(_is_whole(a) and _is_whole(b) for a, b in pairs)
    num_open = sum(max(a["gaps"], default=0) > 0.9 * ready_s for a in found)
    return _line(
        num_same == num_whole == num and num_open > 0,
        f"{num_whole}/{num} streams ended, {num_open} of which were open at the kill and waited "
        f"for the next engine ({ready_s:.1f} s), {num_same}/{num} with the same text",
        streams=num, whole=num_whole, same=num_same, open=num_open, ready_s=ready_s,
        longest_gap_s=max((gap for a in found for gap in a["gaps"]), default=0),
    )  # fmt: skip


def disconnects(drill: Drill) -> Found:
    """Clients that leave at any time: pages and descriptors are as before."""
    num, most = drill.size(1000, 60), max(2, drill.tokens // 2)
    server, _ = drill.crowded()
    ask(server, [drill.request() for _ in range(8)], 600)
    server.wait_idle()
    before, restarts = server.held(), server.metric("ridgeline:engine_restarts_total")
    requests = []
    for n in range(num):
        one = drill.request(prompt=drill.prompt(drill.dice.randint(1, 60)), max_tokens=most)
        leave = (
            ["after_s", 0.001], ["after_s", drill.dice.uniform(0.002, 0.2)],
            ["after_tokens", drill.dice.randint(1, most - 1)], ["after_tokens", most],
        )[n % 4]  # fmt: skip
        requests.append(one | {"leave": leave})
    found = ask(server, requests, drill.size(3600, 600), workers=16)
    server.wait_idle()
    after = server.held()
    restarts = server.metric("ridgeline:engine_restarts_total") - restarts
    answer = ask(server, [drill.request()], 60)["answers"][0]
    num_unserved = sum(n % 4 > 1 and not a["num_tokens"] for n, a in enumerate(found["answers"]))
    return _line(
        before == after and not restarts and _is_whole(answer) and not num_unserved,
        f"{num} clients left in {found['seconds']:.0f} s: pages {before['pages']:.2%} before, "
        f"{after['pages']:.2%} after; descriptors {before['http_fds']:.0f} + "
        f"{before['engine_fds']:.0f} before, {after['http_fds']:.0f} + {after['engine_fds']:.0f} "
        f"after; {num_unserved} had no token, but should have",
        clients=num, before=before, after=after, restarts=restarts, unserved=num_unserved,
    )  # fmt: skip


def overload(drill: Drill) -> Found:
    """Five times as many requests as can be served: those that are, are served as fast as ever, and
    the others are told at once.
    """
    seconds = drill.size(60, 10)
    server, num = drill.crowded()

    def request() -> dict[str, Any]:
        """Their lengths differ, or all would end at the same time."""
        return drill.request(max_tokens=drill.dice.randint(drill.tokens // 2, drill.tokens))

    requests = [request() for _ in range(50 * seconds)]  # few come twice, as prefixes are shared
    # A few more than the num + 8 slots.
    closed = {"workers": num + 16, "seconds": seconds}
    ask(server, requests[:64], 600, workers=8)
    peak = ask(server, requests, seconds + 120, **closed)
    server.wait_idle()
    capacity = _rate(peak["answers"], seconds)
    open_loop, at = [], 0.0
    while (at := at + drill.dice.expovariate(5 * capacity)) < seconds:
        open_loop.append(request() | {"at": at})
    clients = Clients(server.port, open_loop, seconds + 300)
    time.sleep(seconds)
    start = time.monotonic()
    while (recovery_s := time.monotonic() - start) < 60:
        (one,) = ask(server, [drill.request(max_tokens=1)], 60)["answers"]
        if _is_whole(one) and one["first_s"] < _RECOVERED_FIRST_S:
            break
        time.sleep(0.2)
    found = clients.wait()["answers"]
    server.wait_idle()
    served = [one for one in found if _is_whole(one)]
    refused = [one for one in found if one["status"] in (429, 503)]
    others = len(found) - len(served) - len(refused)
    goodput = _rate(found, seconds) / capacity
    refusal = _percentile([one["took_s"] for one in refused], 0.99)
    first = _percentile([one["first_s"] for one in served], 0.99)
    retries = sorted({one["retry_after"] for one in refused if one["retry_after"]}, key=float)
    return _line(
        goodput >= 0.9 and bool(refused) and refusal <= 0.05 and not others
        and first <= _FIRST_S and recovery_s <= 5,
        f"capacity {capacity:.2f} requests/s, {len(open_loop)} sent in {seconds} s: goodput "
        f"{goodput:.1%} of it, {len(refused)} refused in {1e3 * refusal:.1f} ms (p99), {others} "
        f"failed, first token {first:.2f} s (p99), a new request's within {_RECOVERED_FIRST_S:g} s "
        f"again after {recovery_s:.1f} s",
        capacity=capacity, sent=len(open_loop), goodput=goodput, refused=len(refused),
        refusal_p99_s=refusal, failed=others, recovery_s=recovery_s, retry_after=retries[-1:],
        first_p99_s=first,
    )  # fmt: skip


def soak(drill: Drill) -> Found:
    """Minutes of all kinds of requests: memory stays flat, and nothing is compiled."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1, "seed": 1}, {"n": 2, "temperature": 1}, {"logprobs": 5},
        {"structured_outputs": {"json": schema}, "ignore_eos": False}, {"stop": ["the"]},
        {"presence_penalty": 0.5},
    ]  # fmt: skip
    requests: list[dict[str, Any]] = [drill.request(**kinds[n % len(kinds)]) for n in range(700)]
    for one in requests[::10]:
        one["leave"] = ["after_tokens", drill.dice.randint(1, drill.tokens)]
    server, seconds = drill.servers.get(_PATIENT), 60 * drill.minutes
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
    return _line(
        max(slopes) < 1 and not compiles and before == after and not num_failed,
        f"{len(answers)} requests in {drill.minutes:g} min, {num_failed} failed: memory from "
        f"minute {minutes[0]:.1f} to {minutes[-1]:.1f}, by a line through {len(late)} samples, "
        f"{ends[0][0]:.1f} to {ends[0][1]:.1f} MB (HTTP, {slopes[0]:+.2f} MB/min) and "
        f"{ends[1][0]:.1f} to {ends[1][1]:.1f} MB (engine, {slopes[1]:+.2f} MB/min), "
        f"{compiles:.0f} compilations, pages and descriptors "
        + ("as before" if before == after else f"{before} before, {after} after"),
        requests=len(answers), failed=num_failed, minutes=drill.minutes, http_mb_min=slopes[0],
        engine_mb_min=slopes[1], compiles=compiles, before=before, after=after, samples=samples,
    )  # fmt: skip


def drain(drill: Drill) -> Found:
    """SIGTERM under streams: all of them end, new ones are refused, and nothing is left."""
    num = drill.size(32, 8)
    requests = drill.streams(num)
    server = drill.servers.get(_PATIENT)
    expected = ask(server, requests, 600)
    clients = Clients(server.port, requests, 600)
    time.sleep(expected["seconds"] / 3)
    pids = drill_server.descendants(server.pid)
    num_running = server.metric("vllm:num_requests_running")
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    refused, retry_after = server.refusal(drill.request()["body"])
    found = clients.wait()["answers"]
    status = server.process.wait(60)
    left = sum(map(drill_server.is_running, pids))
    num_whole = sum(map(_is_whole, found))
    return _line(
        num_whole == num and status == 0 and not left and refused == 503 and num_running > 0,
        f"{num_whole}/{num} streams ended, {num_running:.0f} of which ran at the signal, a new one "
        f"got {refused} (Retry-After {retry_after}), status {status}, {left} of {len(pids)} "
        "processes left",
        streams=num, whole=num_whole, running=num_running, refused=refused, status=status,
        left=left,
    )  # fmt: skip


def kill_http(drill: Drill) -> Found:
    """kill -9 of the process that speaks HTTP: the others end, and the port is free."""
    server = drill.servers.get(None)
    clients = Clients(server.port, drill.streams(8), 120)
    time.sleep(1)
    pids = drill_server.descendants(server.pid)
    drill_server.kill(server.pid)
    ended_s = drill_server.wait_ended(pids, 10)
    server.process.wait()
    num_broken = sum(bool(one["error"]) for one in clients.wait()["answers"])
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))
    return _line(
        ended_s is not None and ended_s <= 2 and len(pids) > 1 and num_broken > 0,
        f"{len(pids)} processes ended in {ended_s or float('nan'):.2f} s under {num_broken} "
        "streams, the port is free",
        processes=len(pids), ended_s=ended_s, broken=num_broken,
    )  # fmt: skip


def never_read(drill: Drill) -> Found:
    """Clients that never read, beside others: these notice nothing, compared with as many that do
    read, and memory stays bounded. By turns, each as long as the others take.
    """
    server, num = drill.crowded()
    big = {"max_tokens": 4 * drill.tokens, "logprobs": 20}
    watched = [drill.request() for _ in range(8)]
    heavy = [drill.request(**big) for _ in range(num)]
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
        num_whole += sum(map(_is_whole, found))
        found_s[reads].append(_percentile([gap for one in found for gap in one["gaps"]], 0.99))
        server.wait_idle()
    left = server.metric("vllm:num_requests_running")
    ratio = statistics.median(never / read for read, never in zip(*found_s.values(), strict=True))
    p99s = statistics.median(found_s[True]), statistics.median(found_s[False])
    return _line(
        ratio <= 1.1 and most_mb - start_mb <= 64 and not left and num_whole == 16 * _TURNS,
        f"{len(heavy)} clients: between two tokens of others {1e3 * p99s[0]:.1f} ms (p99) where "
        f"they read, {1e3 * p99s[1]:.1f} ms where they never do ({ratio:.2f}x; medians of "
        f"{_TURNS} turns); memory {most_mb - start_mb:+.0f} MB",
        clients=len(heavy), reading_p99_s=found_s[True], never_p99_s=found_s[False], ratio=ratio,
        more_mb=most_mb - start_mb,
    )  # fmt: skip


def half_open(drill: Drill) -> Found:
    """Connections that never finish their head: closed, and others notice nothing."""
    num, size = drill.size(500, 100), drill.size(4, 2)
    server = drill.servers.get(_PATIENT)
    watched = [drill.request() for _ in range(8)]
    ask(server, watched, 600)
    before = ask(server, watched * size, 600, workers=8)["answers"]
    slow = Clients(server.port, [{"body": {}, "sends_head": False}] * num, 60)
    time.sleep(0.5)
    during = ask(server, watched * size, 600, workers=8)["answers"]
    ended = slow.wait()["answers"]
    server.wait_idle()
    p99s = [_percentile([gap for one in each for gap in one["gaps"]], 0.99)
            for each in (before, during)]  # fmt: skip
    shortest, longest = (of(one["took_s"] for one in ended) for of in (min, max))
    return _line(
        1 <= shortest <= longest <= 12 and p99s[1] <= 1.1 * p99s[0]
        and all(map(_is_whole, before + during)),
        f"{num} connections closed after {shortest:.1f} to {longest:.1f} s; between two tokens of "
        f"others {1e3 * p99s[0]:.1f} ms (p99) before, {1e3 * p99s[1]:.1f} ms meanwhile",
        connections=num, closed_s=longest, before_p99_s=p99s[0], during_p99_s=p99s[1],
    )  # fmt: skip


DRILLS: dict[str, Callable[[Drill], Found]] = {
    each.__name__: each
    for each in (half_open, kill_engine, drain, disconnects, overload, never_read, kill_http, soak)
}
_PATIENT = ["--drain_timeout=300"]
_QUEUE_S, _FIRST_S = 2, 5  # what a request may wait for a slot, and for its first token (p99)
_RECOVERED_FIRST_S = 1.0
_TURNS = 3
_WORDS = ["the", "a", "of", "ridge", "line", "water", "stone", "over", "under", "light", "runs"]


def _line(holds: bool, text: str, **figures: Any) -> Found:
    return {"holds": holds, "text": text, **figures}


def _is_whole(answer: dict[str, Any]) -> bool:
    return answer["reasons"] == ["length"] and not answer["error"]


def _rate(answers: Sequence[dict[str, Any]], seconds: float) -> float:
    """Requests a second that are served once all slots are taken, a quarter of the time after the
    start: of each whole answer, the share that came until `seconds`.
    """
    begin, found = seconds / 4, 0.0
    for one in filter(_is_whole, answers):
        times = list(itertools.accumulate(one["gaps"], initial=one["at_s"] + one["first_s"]))
        found += sum(begin <= at < seconds for at in times) / len(times)
    return found / (seconds - begin)


def _percentile(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Prints a line for each drill; status 1 where one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--drills", default=",".join(DRILLS), help="names, with commas between")
    parser.add_argument("--quick", action="store_true", help="fewer requests and seconds")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the soak")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--json", help="file for all figures")
    given, flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the server, too
    if not any(flag.startswith("--model") for flag in flags):
        flags = ["--model=smollm2-135m", *flags]
    print(f"{processor()}; scripts.serve {' '.join(flags)}", flush=True)
    found = {}
    with contextlib.closing(Servers(flags)) as servers:
        for name in given.drills.split(","):
            start = time.monotonic()
            drill = Drill(servers, given.quick, given.minutes, given.tokens)
            found[name] = DRILLS[name](drill) | {"took_s": time.monotonic() - start}
            mark = "holds" if found[name]["holds"] else "FAILS"
            print(f"{name:<12} {mark} {found[name]['text']}", flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": processor(), "flags": flags, "drills": found}, file, indent=1)
    sys.exit(not all(one["holds"] for one in found.values()))


if __name__ == "__main__":
    main()
