"""Faults brought about at real processes, and what came of each: python -m tests.drills.

--only=poison,soak    some of them, by name
--quick               fewer requests, trials and seconds: minutes for all
--page=FILE           the page of results; `make drills` writes docs/results/drills.md
Further flags are those of `scripts.serve`, for the drills of a server with a real model; without
any it serves smollm2-135m. All traffic stays on this machine and is bounded in number and time.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from tests.drills import catalog, harness


def main() -> None:
    """Prints drill, bar and figure; status 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.drills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--suite", action="store_true", help="the suites of `make drills SUITE=1`")
    parser.add_argument("--quick", action="store_true", help="fewer requests, trials and seconds")
    parser.add_argument("--minutes", type=float, help="of the soak; 20, or 1 of a quick run")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--page", type=Path, help="file for the table")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options, flags = parser.parse_known_args()
    available = {drill.name: drill for drill in (*catalog.DRILLS, *catalog.SUITES)}
    names = [name for name in options.only.split(",") if name]
    if unknown := [name for name in names if name not in available]:
        parser.error(f"--only={unknown[0]}: no such drill; valid: {', '.join(available)}")
    drills = [available[name] for name in names]
    if not names:
        drills = [*catalog.DRILLS, *(catalog.SUITES if options.suite else ())]
    if not any(flag.startswith("--model") for flag in flags):
        flags = ["--model=smollm2-135m", *flags]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the servers, too
    print(f"{harness.machine()}; {len(drills)} drills", flush=True)
    minutes = options.minutes or (1.0 if options.quick else 20.0)
    start = time.monotonic()
    try:
        rows = harness.Harness(flags, options.quick, minutes, options.tokens).run(drills)
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
    page = harness.page(rows, time.monotonic() - start)
    print(f"\n{page}", end="")
    if options.page:
        options.page.write_text(page, encoding="utf-8")
    if options.json:
        figures = {row.drill.name: row.outcome and row.outcome.figures for row in rows}
        options.json.write_text(json.dumps(figures, indent=1, default=str), encoding="utf-8")
    sys.exit(any(row.mark == "FAILS" for row in rows))


if __name__ == "__main__":
    main()
