"""Requests in which the engine's own code fails, among others: they end alone."""

import collections
import contextlib
import statistics
from pathlib import Path
from typing import Any

from tests.drills.harness import TINY_FLAGS, Drill, Outcome, Setting
from tests.drills.server_faults import is_whole, percentile, request
from tests.drills.server_process import Servers, ask

_HOOK = Path(__file__).with_name("poisoned")
_FIRST_SEED = 66_600
_PLACES = ("mask", "accept", "commit", "build", "proposer", "detokenizer")
_TURNS = 3
_FLAGS = (*TINY_FLAGS, "--max_num_seqs=8", "--speculate=ngram")


def marked(place: str) -> dict[str, Any]:
    """Fields of a request that fails in a place of the engine, as the hook reads them."""
    if place in ("mask", "accept"):
        return {"structured_outputs": {"regex": f"poison-{place}|[a-z ]+"}, "ignore_eos": False}
    if place == "detokenizer":
        return {"stop": ["poison-detokenizer"]}
    return {"seed": _FIRST_SEED + _PLACES.index(place)}


def poison(setting: Setting) -> Outcome:
    """The same requests again and again, a tenth of them poisoned in every other turn."""
    num = setting.size(70, 60)
    repeated = " ".join(["the ridge of a line"] * 8)  # drafts are found in it
    clean = [request(setting, prompt=f"{n} {repeated}", max_tokens=48) for n in range(num)]
    places = {n: _PLACES[n // 10 % len(_PLACES)] for n in range(0, num, 10)}
    poisoned = [
        {"body": one["body"] | marked(places[n])} if n in places else one
        for n, one in enumerate(clean)
    ]
    ended: collections.Counter[str] = collections.Counter()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_other = num_poisoned = 0
    servers = Servers(_FLAGS, {"PYTHONPATH": str(_HOOK)})
    with contextlib.closing(servers):
        server = servers.get([])
        expected = ask(server, clean, 600, workers=8)["answers"]  # and what is compiled late
        for is_poisoned in (False, True) * _TURNS:
            requests = poisoned if is_poisoned else clean
            answers = ask(server, requests, 600, workers=8)["answers"]
            others = [n for n in range(num) if n not in places]
            num_other += sum(
                not is_whole(answers[n]) or answers[n]["text"] != expected[n]["text"]
                for n in others
            )
            seconds[is_poisoned].append(percentile([answers[n]["took_s"] for n in others], 0.99))
            if is_poisoned:
                num_poisoned += len(places)
                ended.update(place for n, place in places.items() if not is_whole(answers[n]))
        restarts = server.metric("ridgeline:engine_restarts_total")
    ratio = statistics.median(
        with_faults / without
        for without, with_faults in zip(seconds[False], seconds[True], strict=True)
    )
    missed = [place for place in places.values() if not ended[place]]
    return Outcome(
        not (num_other or restarts or missed) and ratio <= 1.2,
        f"{num_poisoned} poisoned of {_TURNS * num} requests ({dict(ended)} ended with an error): "
        f"{restarts:.0f} restarts, {num_other} others changed; p99 of others "
        f"{1e3 * statistics.median(seconds[False]):.0f} ms without, "
        f"{1e3 * statistics.median(seconds[True]):.0f} ms with ({ratio:.2f}x, median of {_TURNS})",
        {"restarts": restarts, "changed": num_other, "ratio": ratio, "seconds": seconds},
    )


DRILLS = (
    Drill(
        "poison",
        "21 of 210 requests fail in grammar mask or accept, commit, build, proposer, detokenizer "
        "(every other a panic): 0 restarts, no other text changed, p99 of others <= 1.2x",
        poison, limit_s=70, is_timed=True,
    ),
)  # fmt: skip
