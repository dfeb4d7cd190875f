"""What a server does when things go wrong: faults, brought about at a real one, and what came of
each as a line.

python docs/make_drills.py [--drills=kill_engine,...] [--quick] [--json=FILE] [serve's own flags]

Without flags of `scripts.serve`, it serves smollm2-135m. A drill starts a server of its own; all
traffic stays on this machine and is bounded in number and time.
"""

import argparse
import json
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import drill_server
from compare import processor
from drill_server import Clients, ask, resident_mb, started

Found = dict[str, Any]


class Drill:
    """What the drills share: the server's flags, how large they are, and prompts."""

    def __init__(self, flags: Sequence[str], quick: bool, minutes: float, tokens: int):
        self.flags, self.quick, self.minutes, self.tokens = list(flags), quick, minutes, tokens
        self.dice = random.Random(0)

    def size(self, whole: int, quick: int) -> int:
        """Of one kind or the other."""
        return quick if self.quick else whole

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
    with started(drill.flags) as server:
        ask(server, requests, 600)  # whatever is compiled late
        expected = ask(server, requests, 600)
        clients = Clients(server.port, requests, 900)
        time.sleep(expected["seconds"] / 2)
        drill_server.kill(server.engine)
        time.sleep(0.1)
        ready_s = server.wait_ready()
        found = clients.wait()["answers"]
    pairs = list(zip(found, expected["answers"], strict=True))
    num_whole = sum(a["reasons"] == ["length"] and not a["error"] for a, _ in pairs)
    num_same = sum(a["text"] == b["text"] for a, b in pairs)
    return _line(
        num_same == num, f"{num_whole}/{num} streams ended, {num_same}/{num} with the same text",
        streams=num, whole=num_whole, same=num_same, ready_s=ready_s,
        longest_gap_s=max(gap for a in found for gap in a["gaps"]),
    )  # fmt: skip


def disconnects(drill: Drill) -> Found:
    """Clients that leave at any time: pages and descriptors are as before."""
    num = drill.size(1000, 60)
    with started(drill.flags) as server:
        ask(server, [drill.request() for _ in range(8)], 600)
        server.wait_idle()
        before = server.held()
        requests = []
        for n in range(num):
            one = drill.request(prompt=drill.prompt(drill.dice.randint(1, 60)))
            leave = (
                ["after_s", 0.001], ["after_s", drill.dice.uniform(0.002, 0.2)],
                ["after_tokens", drill.dice.randint(1, drill.tokens - 1)],
                ["after_tokens", drill.tokens],
            )[n % 4]  # fmt: skip
            requests.append(one | {"leave": leave})
        found = ask(server, requests, drill.size(3600, 600), workers=16)
        server.wait_idle()
        after = server.held()
        restarts = server.metric("ridgeline:engine_restarts_total")
        answer = ask(server, [drill.request()], 60)["answers"][0]
    return _line(
        before == after and not restarts and answer["status"] == 200,
        f"{num} clients left in {found['seconds']:.0f} s: pages {before['pages']:.2%} before, "
        f"{after['pages']:.2%} after; descriptors {before['http_fds']:.0f} + "
        f"{before['engine_fds']:.0f} before, {after['http_fds']:.0f} + {after['engine_fds']:.0f} "
        "after", clients=num, before=before, after=after, restarts=restarts,
    )  # fmt: skip


def overload(drill: Drill) -> Found:
    """Five times as many requests as can be served: those that are, are served as fast as ever, and
    the others are told at once.
    """
    seconds = drill.size(60, 10)
    with started(drill.flags) as server:
        requests = [drill.request() for _ in range(64)]
        closed = {"workers": 32, "seconds": seconds}
        ask(server, requests, 600, workers=8)
        idle = ask(server, requests[:1], 60)["answers"][0]["first_s"]
        peak = ask(server, requests, seconds + 120, **closed)
        num_done = sum(one["reasons"] == ["length"] for one in peak["answers"])
        capacity = num_done / peak["seconds"]
        open_loop, at = [], 0.0
        while at < seconds:
            at += drill.dice.expovariate(5 * capacity)
            open_loop.append(drill.request() | {"at": at})
        found = ask(server, open_loop, seconds + 300)
        start = time.monotonic()
        for _ in range(200):
            one = ask(server, requests[:1], 60)["answers"][0]
            if one["status"] == 200 and one["first_s"] < max(2 * idle, 0.2):
                break
        recovery_s = time.monotonic() - start
    served = [one for one in found["answers"] if one["reasons"] == ["length"]]
    refused = [one for one in found["answers"] if one["status"] in (429, 503)]
    others = len(found["answers"]) - len(served) - len(refused)
    goodput = len(served) / found["seconds"] / capacity
    refusal = _percentile([one["took_s"] for one in refused], 0.99)
    retries = sorted({one["retry_after"] for one in refused if one["retry_after"]}, key=float)
    return _line(
        goodput >= 0.9 and refusal <= 0.05 and not others,
        f"capacity {capacity:.2f} requests/s, {len(open_loop)} sent in {seconds} s: goodput "
        f"{goodput:.1%} of it, {len(refused)} refused in {1e3 * refusal:.1f} ms (p99), {others} "
        f"failed, first token {_percentile([one['first_s'] for one in served], 0.99):.2f} s (p99), "
        f"recovered in {recovery_s:.1f} s",
        capacity=capacity, sent=len(open_loop), goodput=goodput, refused=len(refused),
        refusal_p99_s=refusal, failed=others, recovery_s=recovery_s, retry_after=retries[-1:],
        first_p99_s=_percentile([one["first_s"] for one in served], 0.99),
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
    with started(drill.flags) as server:
        ask(server, requests[:70], 1200, workers=8)
        server.wait_idle()
        before, compiled = server.held(), server.metric("ridgeline:late_compiles_total")
        samples: list[tuple[float, float, float]] = []
        clients = Clients(
            server.port, requests, 60 * drill.minutes + 300, workers=12, seconds=60 * drill.minutes
        )
        start = time.monotonic()
        while (passed := time.monotonic() - start) < 60 * drill.minutes:
            samples.append((passed / 60, resident_mb(server.pid), resident_mb(server.engine)))
            time.sleep(min(5.0, 60 * drill.minutes / 20))
        answers = clients.wait()["answers"]
        server.wait_idle()
        after = server.held()
        compiles = server.metric("ridgeline:late_compiles_total") - compiled
    late = samples[len(samples) // 4 :]
    slopes = [statistics.linear_regression([s[0] for s in late], [s[i] for s in late]).slope
              for i in (1, 2)]  # fmt: skip
    num_failed = sum(one["status"] != 200 or bool(one["error"]) for one in answers)
    return _line(
        max(slopes) < 1 and not compiles and before == after and not num_failed,
        f"{len(answers)} requests in {drill.minutes:g} min, {num_failed} failed: memory "
        f"{slopes[0]:+.2f} MB/min (HTTP, {late[-1][1]:.0f} MB) and {slopes[1]:+.2f} MB/min "
        f"(engine, {late[-1][2]:.0f} MB), {compiles:.0f} compilations, pages and descriptors "
        + ("as before" if before == after else f"{before} before, {after} after"),
        requests=len(answers), failed=num_failed, minutes=drill.minutes, http_mb_min=slopes[0],
        engine_mb_min=slopes[1], compiles=compiles, before=before, after=after, samples=samples,
    )  # fmt: skip


def drain(drill: Drill) -> Found:
    """SIGTERM under streams: all of them end, new ones are refused, and nothing is left."""
    num = drill.size(32, 8)
    requests = drill.streams(num)
    with started([*drill.flags, "--drain_timeout=300"]) as server:
        ask(server, requests, 600)
        expected = ask(server, requests, 600)
        clients = Clients(server.port, requests, 600)
        time.sleep(expected["seconds"] / 3)
        pids = drill_server.descendants(server.pid)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        refused, retry_after = server.refusal(drill.request()["body"])
        found = clients.wait()["answers"]
        status = server.process.wait(60)
        left = sum(map(drill_server.is_running, pids))
    num_whole = sum(one["reasons"] == ["length"] for one in found)
    return _line(
        num_whole == num and status == 0 and not left and refused == 503,
        f"{num_whole}/{num} streams ended, a new one got {refused} (Retry-After "
        f"{retry_after}), status {status}, {left} of {len(pids)} processes left",
        streams=num, whole=num_whole, refused=refused, status=status, left=left,
    )  # fmt: skip


def kill_http(drill: Drill) -> Found:
    """kill -9 of the process that speaks HTTP: the others end, and the port is free."""
    with started(drill.flags) as server:
        clients = Clients(server.port, drill.streams(8), 120)
        time.sleep(1)
        pids = drill_server.descendants(server.pid)
        drill_server.kill(server.pid)
        ended_s = drill_server.wait_ended(pids, 10)
        clients.wait()
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))
    return _line(
        ended_s is not None and ended_s <= 2,
        f"{len(pids)} processes ended in {ended_s or float('nan'):.2f} s, the port is free",
        processes=len(pids), ended_s=ended_s,
    )  # fmt: skip


def never_read(drill: Drill) -> Found:
    """Clients that never read, beside others: these notice nothing, compared with as many that do
    read, and memory stays bounded.
    """
    num = drill.size(50, 10)
    big = {"max_tokens": 4 * drill.tokens, "logprobs": 20}
    with started([*drill.flags, f"--max_num_seqs={num + 8}"]) as server:
        watched = [drill.request() for _ in range(8)]
        heavy = [drill.request(**big) for _ in range(num)]
        ask(server, watched + heavy, 900)
        found_s: dict[bool, list[float]] = {True: [], False: []}
        most_mb = start_mb = resident_mb(server.pid)
        for reads in (True, False) * 2:
            others = Clients(
                server.port, [one | {"reads": reads} for one in heavy], drill.size(90, 45)
            )
            time.sleep(0.5)
            clients, stop = Clients(server.port, watched, 300), threading.Event()
            while not stop.is_set():
                most_mb = max(most_mb, resident_mb(server.pid))
                stop.wait(0.1)
                if clients.is_done:
                    stop.set()
            found = clients.wait()["answers"]
            gaps = [gap for one in found for gap in one["gaps"]]
            found_s[reads].append(_percentile(gaps, 0.99))
            others.wait()
            server.wait_idle()
        left = server.metric("vllm:num_requests_running")
    p99s = min(found_s[True]), min(found_s[False])
    ratio = p99s[1] / p99s[0]
    return _line(
        ratio <= 1.1 and most_mb - start_mb <= 64 and not left,
        f"{len(heavy)} clients: between two tokens of others {1e3 * p99s[0]:.1f} ms (p99) where "
        f"they read, {1e3 * p99s[1]:.1f} ms where they never do ({ratio:.2f}x); memory "
        f"{most_mb - start_mb:+.0f} MB",
        clients=len(heavy), reading_p99_s=p99s[0], never_p99_s=p99s[1], ratio=ratio,
        more_mb=most_mb - start_mb,
    )  # fmt: skip


def half_open(drill: Drill) -> Found:
    """Connections that never finish their head: closed, and others notice nothing."""
    num = drill.size(500, 100)
    with started(drill.flags) as server:
        watched = [drill.request() for _ in range(8)]
        ask(server, watched, 600)
        before = ask(server, watched * drill.size(8, 2), 600, workers=8)["answers"]
        slow = Clients(server.port, [{"body": {}, "sends_head": False}] * num, 60)
        time.sleep(0.5)
        during = ask(server, watched * drill.size(8, 2), 600, workers=8)["answers"]
        ended = slow.wait()["answers"]
        server.wait_idle()
    p99s = [_percentile([gap for one in each for gap in one["gaps"]], 0.99)
            for each in (before, during)]  # fmt: skip
    longest = max(one["took_s"] for one in ended)
    return _line(
        longest <= 12 and p99s[1] <= 1.1 * p99s[0],
        f"{num} connections closed within {longest:.1f} s; between two tokens of others "
        f"{1e3 * p99s[0]:.1f} ms (p99) before, {1e3 * p99s[1]:.1f} ms meanwhile",
        connections=num, closed_s=longest, before_p99_s=p99s[0], during_p99_s=p99s[1],
    )  # fmt: skip


DRILLS: dict[str, Callable[[Drill], Found]] = {
    each.__name__: each
    for each in (kill_engine, disconnects, overload, soak, drain, kill_http, never_read, half_open)
}
_WORDS = ["the", "a", "of", "ridge", "line", "water", "stone", "over", "under", "light", "runs"]


def _line(holds: bool, text: str, **figures: Any) -> Found:
    return {"holds": holds, "text": text, **figures}


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
    for name in given.drills.split(","):
        start = time.monotonic()
        drill = Drill(flags, given.quick, given.minutes, given.tokens)
        found[name] = DRILLS[name](drill) | {"took_s": time.monotonic() - start}
        mark = "holds" if found[name]["holds"] else "FAILS"
        print(f"{name:<12} {mark} {found[name]['text']}", flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": processor(), "flags": flags, "drills": found}, file, indent=1)
    sys.exit(not all(one["holds"] for one in found.values()))


if __name__ == "__main__":
    main()
