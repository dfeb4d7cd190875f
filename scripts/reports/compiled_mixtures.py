"""Steps of mixtures and of latent attention, compiled for absent chips, next to the planner's
prediction.

    .venv-aot-tpu-py311/bin/python -m scripts.reports.compiled_mixtures

writes the tables of docs/compiled_mixtures.md. The environments with compilers are those of
`make test-aot`; it takes most of an hour on two cores.
"""

from pathlib import Path

from configs import presets
from configs.mesh import Mesh
from scripts.reports.pages.markdown import fill, table
from scripts.reports.pages.results import Row
from scripts.reports.scaling import (
    Case,
    arguments_table,
    compile_case,
    predicted,
    provenance,
    steps_table,
)
from scripts.reports.tables import yes

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
    """Compiles, and writes the page's tables."""
    compiled = [compile_case(case) | {"model": _label(case)} for case in _CASES]
    columns = (
        "model", "chips", "mesh", "sequences", "memory", "predicted", "fits",
        "compiled, largest step", "fits", "seconds",
    )  # fmt: skip
    blocks = {
        "what fits": [provenance(), *table(columns, list(map(_fit_row, _CASES, compiled)))],
        "weights and cache": arguments_table(compiled),
        "temporaries and exchange": steps_table(compiled),
    }
    page = Path("docs/compiled_mixtures.md")
    page.write_text(fill(page.read_text("utf-8"), blocks), "utf-8")


def _label(case: Case) -> str:
    """Returns the model's name, and how much of it is compiled."""
    whole = presets.get(case.model).config.num_layers
    return case.model + (f", {case.num_layers} of {whole} layers" if case.num_layers else "")


def _fit_row(case: Case, compiled: Row) -> tuple[str, ...]:
    whole = predicted(case, presets.get(case.model).config.num_layers)
    largest = compiled["bytes_per_chip"]
    return (
        compiled["model"], case.target, f"{case.mesh}", f"{case.sequences}",
        f"{whole.memory_bytes:,}", f"{whole.total_bytes:,}", yes(whole.fits),
        f"{largest:,}" if largest else "refused", yes(compiled["fits"]),
        f"{compiled['compile_s']:.0f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
