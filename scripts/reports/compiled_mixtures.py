"""Steps of mixtures and of latent attention, compiled for chips that are not there, beside the
planner's word.

    .venv-aot-tpu-py311/bin/python -m scripts.reports.compiled_mixtures

writes docs/compiled_mixtures.md. The environments with compilers are those of `make test-aot`; it
takes most of an hour on two cores.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import presets
from configs.mesh import Mesh
from inference.files import local_machine
from scripts.reports.scaling import (
    ARGUMENT_HEAD,
    CONTEXT,
    STEP_HEAD,
    Case,
    argument_row,
    compiled,
    jax_version,
    predicted,
    step_rows,
)

_CASES = (
    Case("deepseek-v2-lite", "h200"),
    Case("gpt-oss-20b", "h200"),
    Case("deepseek-v2-lite", "v5e:2x4", Mesh(expert=8)),
    Case("gpt-oss-20b", "v5e:2x4", Mesh(expert=4, model=2)),
    Case("mixtral-8x7b", "v5e:2x4", Mesh(expert=4, model=2)),
    Case("mixtral-8x7b", "v5e:2x4", Mesh(expert=4, model=2), sequences=4),
    Case("deepseek-v3", "v5p:4x4x4", Mesh(expert=16, model=4), num_layers=5),
)


def main() -> None:
    """Compiles, and writes the page."""
    found = [compiled(case) | {"model": _label(case)} for case in _CASES]
    Path("docs/compiled_mixtures.md").write_text(_page(found), encoding="utf-8")


def _page(found: Sequence[dict[str, Any]]) -> str:
    versions = "; ".join(map(jax_version, ("cuda", "tpu")))
    lines = [
        "# Experts and latent attention, compiled", "",
        f"{datetime.date.today()}, on {local_machine.name()}; "
        f"{versions}. Written by", "",
        "    .venv-aot-tpu-py311/bin/python -m scripts.reports.compiled_mixtures", "",
        f"What `scripts.compile` says of steps of sequences of {CONTEXT:,} tokens, so many on each "
        "data shard and on each chip along `expert`: decoding, greedy and drawn, and a prefill of "
        "8 x 64 tokens. Bytes are a chip's; seconds are of compiling on the machine above, which "
        "did other work, too.", "",
        "## What fits", "",
        "Predicted of the whole model, compiled of as many layers as are named.", "",
        "| model | chips | mesh | sequences | memory | predicted | fits | compiled, largest step "
        "| fits | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_fit_row, _CASES, found), "",
        "## Weights and cache", "",
        "Weights, cache, slots and inputs are the planner's and the engine's declarations, and the "
        "compiled programs': 'agree' says to the byte. A TPU pads rows to 128 elements.", "",
        *ARGUMENT_HEAD, *map(argument_row, found), "",
        "## Temporaries and exchange", "",
        "Collectives agree in kinds, numbers and bytes; where only bytes do, the compiler has "
        "joined independent ones.", "",
        *STEP_HEAD, *(row for each in found for row in step_rows(each)), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _label(case: Case) -> str:
    """The model, and how much of it."""
    whole = presets.get(case.model).config.num_layers
    return case.model + (f", {case.num_layers} of {whole} layers" if case.num_layers else "")


def _fit_row(case: Case, found: dict[str, Any]) -> str:
    said = predicted(case, presets.get(case.model).config.num_layers)
    held, fits = found["bytes_per_chip"], "yes" if found["fits"] else "no"
    largest = f"{held:,}" if held else "refused"
    return (
        f"| {found['model']} | {case.target} | {case.mesh} | {case.sequences} | "
        f"{said.memory_bytes:,} | {said.total_bytes:,} | {'yes' if said.fits else 'no'} | "
        f"{largest} | {fits} | {found['compile_s']:.0f} |"
    )


if __name__ == "__main__":
    main()
