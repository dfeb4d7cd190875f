"""Whether a model that learned to fill gaps uses the text after them.

    python -m scripts.reports.gaps

trains a small model on nine tenths of the standard library's files, half of whose windows have a
gap. Then the server fills in names in the other files, with and without `suffix`, and
docs/results/infill.md is written. A model that is there already is not trained again.
"""

import asyncio
import dataclasses
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from inference.checkpoints import resolve
from inference.files import cache_directory, local_machine, user_files
from inference.server.client.launch import Subprocess
from inference.server.service import Limits, Service
from inference.server.web import in_process
from inference.server.web.in_process import InProcess
from inference.training import texts
from layers import params
from scripts.reports.gaps import cases
from scripts.reports.gaps.cases import Case
from scripts.reports.pages.markdown import code, prose, table

Bodies = list[dict[str, object]]  # of requests

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "infill.md"
_HELD_OUT = 10  # each tenth file
_NUM, _SEED = 500, 0
_LINES = ((6, 5), (3, 3))  # before and after the line with the gap
_ROWS = 32
_WINDOW, _MAX_TOKENS = 244, 12  # together the window that the model was trained with
_SETTINGS = (
    *("training.fim_rate=0.5", "training.steps=5000", "training.checkpoint_every=500"),
    *("model.width=192", "model.num_layers=4", "model.pattern.ffn.width=512"),
)


def main() -> None:
    """Trains, asks and writes the page."""
    documents = texts.standard_library()
    held_out = documents[::_HELD_OUT]
    trained = [text for n, text in enumerate(documents) if n % _HELD_OUT]
    model = cache_directory.trained("small-infill")
    command = _trained(model, trained)
    rows = asyncio.run(_measured(model, _kinds(held_out)))
    size = params.num_bytes(resolve.resolve(str(model)).config.parameters()) / 4  # float32
    when = f"{datetime.date.today()}, {local_machine.name()}, Python {sys.version.split()[0]}"
    counts = f"{len(trained)} files of its standard library; {len(held_out)} were held out"
    page = _page(rows, when, f"{size / 1e6:.1f} million", counts, command)
    user_files.write({_PAGE: page.encode()})


def _trained(model: Path, documents: Sequence[str]) -> str:
    """Trains the model if it is missing; returns the command."""
    text = model.with_name("small-infill.txt")
    settings = [f"--set={setting}" for setting in _SETTINGS]
    if not model.is_dir():
        text.parent.mkdir(parents=True, exist_ok=True)
        user_files.write({text: "".join(documents).encode()})
        started = time.perf_counter()
        files = [f"--text={text}", f"--output={model}"]
        subprocess.run([sys.executable, "-m", "scripts.train", *files, *settings], check=True)
        print(f"trained in {(time.perf_counter() - started) / 60:.0f} minutes", flush=True)
    files = [f"--text={text.name}", f"--output={model.name}"]
    return " ".join(["python -m scripts.train", *files, *settings])


def _kinds(documents: Sequence[str]) -> dict[str, list[Case]]:
    """Returns cases by the name of their kind."""
    kinds = {}
    for before, after in _LINES:
        recurring, of_any = cases.chosen(documents, _NUM, before, after, _SEED)
        kinds[f"recur, {before} and {after} lines"] = recurring
        kinds[f"any, {before} and {after} lines"] = of_any
    return kinds


async def _measured(model: Path, kinds: dict[str, list[Case]]) -> list[list[str]]:
    """Fills in the names of each kind; returns rows of the page's table."""
    launcher = Subprocess([
        sys.executable, "-m", "scripts.serve", f"--model={model}", f"--max_num_seqs={_ROWS}",
        f"--set=engine.shapes.decode_rows=({_ROWS},)",
    ])  # fmt: skip
    limits = dataclasses.replace(Limits(), request_s=3600.0, queue_s=3600.0)
    rows = []
    async with in_process.serving(Service(launcher, limits)) as server:
        for name, chosen in kinds.items():
            without, infilled, *controls = [
                await _are_right(server, chosen, bodies) for bodies in _variants(chosen)
            ]
            gained, lost, chance = cases.mcnemar(infilled, without)
            rows.append([
                name, str(len(chosen)), *map(_share, (without, infilled, *controls)),
                f"{gained} / {lost}", f"{chance:.0e}",
            ])  # fmt: skip
            print(*rows[-1], sep="  ", flush=True)
    return rows


def _variants(chosen: Sequence[Case]) -> list[Bodies]:
    """Returns requests of the cases, for each column of the page's table."""
    rotated = [*chosen[1:], chosen[0]]
    return [
        [{"prompt": case.prefix} for case in chosen],
        [{"prompt": case.prefix, "suffix": case.suffix, "suffix_first": True} for case in chosen],
        [
            {"prompt": case.prefix, "suffix": other.suffix, "suffix_first": True}
            for case, other in zip(chosen, rotated, strict=True)
        ],
        [{"prompt": case.prefix, "suffix": case.suffix} for case in chosen],
    ]


async def _are_right(server: InProcess, chosen: Sequence[Case], bodies: Bodies) -> list[bool]:
    """Whether each greedy answer begins with the missing name, to the character."""
    places = asyncio.Semaphore(2 * _ROWS)
    common = {"temperature": 0, "max_tokens": _MAX_TOKENS, "truncate_prompt_tokens": _WINDOW}

    async def is_right(case: Case, body: dict[str, object]) -> bool:
        async with places:
            answer = await server.post("/v1/completions", json.dumps(body | common).encode())
        assert answer.status == 200, answer.body
        text: str = json.loads(answer.body)["choices"][0]["text"]
        return text.startswith(case.middle)

    return list(await asyncio.gather(*map(is_right, chosen, bodies)))


def _share(right: Sequence[bool]) -> str:
    return f"{sum(right)} ({sum(right) / len(right):.1%})"


def _page(rows: Sequence[Sequence[str]], when: str, size: str, counts: str, command: str) -> str:
    columns = (
        "names, lines before and after", "cases", "prefix alone", "suffix first",
        "another case's suffix first", "suffix last",
        "right only with the suffix first / only without", "by chance",
    )  # fmt: skip
    lines = [
        "# Filling gaps",
        *prose(
            f"{when}. Written by `python -m scripts.reports.gaps`, which trains a model of {size} "
            f"parameters on {counts}. Half of its windows have a gap (Bavarian et al. 2022, arXiv "
            "2207.14255), with the suffix first or last:"
        ),
        *code(command),
        *prose(
            "In the held-out files a name is missing, with the blank before it. The same model "
            "continues the prefix by `POST /v1/completions`, greedily, with and without `suffix`. "
            "An answer is right if it begins with the name, by the same rule for all columns. "
            "Names that recur are in the suffix, and not in the prefix. By chance: how likely a "
            "difference as large as that of prefix alone and suffix first is, if the suffix has no "
            "effect (McNemar, exact, two-sided). Names as gaps and the suffix first were chosen "
            "after a try with ends of lines and the suffix last, which failed: the "
            "[log](../log.md) has it, and the same table's figures on other files."
        ),
        *table(columns, rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
