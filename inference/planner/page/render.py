"""The planner as one HTML file that needs no network: sliders, memory, roofline, latency; or as
files that a server sends.

`assets/plan.js` computes the figures of `inference.planner.deployment` from what `describe` says of
a model; a test compares the two in a browser.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs import presets
from configs.errors import InputError
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.kinds.kind import Mixer
from configs.mesh import Mesh, columns
from configs.model import ModelConfig
from configs.precision import CACHE_FORMATS, FORMATS, PLANNED
from inference.planner import cost, weights
from inference.planner.parallel import collectives

# Programs that can show the page, for pictures and tests.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

ASSETS = Path(__file__).parent / "assets"
STYLES = ("base.css", "page.css")
SCRIPTS = ("plan.js", "format.js", "draw.js", "trade.js", "controls.js", "page.js")

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_PRESETS = presets.NAMES | presets.PLANNED
_START = {"model": "llama3-8b", "hardware": "h100"}


def render(
    models: Mapping[str, ModelConfig] | None = None,
    hardware: Mapping[str, HardwareSpec] | None = None,
    start: Mapping[str, str | float] = _START,
) -> str:
    """The page.

    Args:
        models: to choose from, by name; None offers every preset.
        hardware: likewise, chips.
        start: settings that the page opens with, by the names that its address gives them.
    """
    # '<' would end the element that the data stand in; no number or key needs it.
    data = json.dumps(catalog_of(models, hardware, start), separators=(",", ":"), allow_nan=False)
    head = [f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">']
    head += [
        '<link rel="icon" href="data:,">',
        *(f"<style>\n{_read(name)}</style>" for name in STYLES),
    ]
    scripts = [_catalog(data.replace("<", "\\u003c"))]
    scripts += [f"<script>\n{_read(name)}</script>" for name in SCRIPTS]
    return _page(head, scripts)


def shell(folder: str, icon: str, start: str) -> str:
    """The page without data: a script fetches them, and then the other files.

    Args:
        folder: address of the folder that serves `STYLES` and `SCRIPTS`.
        icon, start: addresses of a picture and of that script, a module.
    """
    links = [f'<link rel="stylesheet" href="{folder}/{name}">' for name in STYLES]
    module = f'<script type="module" src="{start}"></script>'
    return _page([f'<link rel="icon" href="{icon}">', *links], [_catalog(""), module])


def catalog_of(
    models: Mapping[str, ModelConfig] | None = None,
    hardware: Mapping[str, HardwareSpec] | None = None,
    start: Mapping[str, str | float] = _START,
) -> dict[str, object]:
    """The page's data, as `render` takes them."""
    if models is None:
        models = {name: preset.config for name, preset in _PRESETS.items()}
    if hardware is None:
        hardware = catalog.NAMES
    return {
        "models": {name: describe(config) for name, config in models.items()},
        "hardware": {name: describe_chip(spec) for name, spec in hardware.items()},
        "formats": {name: dataclasses.asdict(FORMATS[name]) for name in PLANNED},
        "cache_formats": {name: dataclasses.asdict(form) for name, form in CACHE_FORMATS.items()},
        "start": dict(start),
    }


def _page(head: Sequence[str], scripts: Sequence[str]) -> str:
    page = _read("page.html")
    for name, lines in (("head", head), ("scripts", scripts)):
        page = page.replace(f"{{{{ {name} }}}}", "\n".join(lines))
    return page


def _catalog(data: str) -> str:
    return f'<script type="application/json" id="catalog">{data}</script>'


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def describe(config: ModelConfig) -> dict[str, object]:
    """What the page is told of a model: its parameters, operations and caches as coefficients, of
    which it knows no more than how to add them up.

    A number that depends on the number of key/value heads is {"base", "per_head"}; none does where
    layers differ in it.
    """
    mixers = [mixer for mixer in config.mixers(Mixer) if hasattr(mixer, "num_kv_heads")]
    head_counts = {mixer.num_kv_heads for mixer in mixers}
    max_heads = math.gcd(*(mixer.num_heads for mixer in mixers)) if len(head_counts) == 1 else 1
    at_few, at_most = (
        _coefficients(config.with_kinds(num_kv_heads=n) if max_heads > 1 else config)
        for n in (1, max_heads)
    )
    return {
        "name": config.name,
        "dtype": config.dtype,
        "max_context": config.max_context,
        "width": config.width,
        "kv_heads": min(head_counts) if max_heads > 1 else 1,
        "most_kv_heads": max_heads,
        "divides_context": _divides_context(config),
        "columns": sorted(columns(config)),
        **_between(at_few, at_most, 1, max_heads),
    }


def _coefficients(config: ModelConfig) -> dict[str, object]:
    return {
        "operations": [
            dataclasses.asdict(operation) | {"layers": layers}
            for operation, layers in config.operations.items()
        ],
        "weights": [
            part._asdict() | {"count": count}
            for part, count in Counter(weights.weight_groups(config)).items()
        ],
        "caches": [
            {
                "layers": layers,
                "elements": cost.token_elements(spec),
                "row": spec.scaled_elements,
                "window": spec.sliding(),
                "row_parts": () if spec.is_pooled else spec.page_format("int8").parts,
                "values_in_keys": spec.values_in_keys,
                "state_bytes": spec.bytes_per_sequence(),
                "parts": parts,
            }
            for (spec, parts), layers in cost.caches(config).items()
        ],
        "divided": sorted(config.divided),
        "cached_heads": config.cached_heads,
        "exchanges": _exchanges(config),
        "num_experts": sorted({num_experts for num_experts, _ in config.experts}),
    }


def _divides_context(config: ModelConfig) -> bool:
    """Whether chips along `context` can divide what it caches."""
    try:
        Mesh(context=2).check(config)
    except InputError:
        return False
    return True


def _exchanges(config: ModelConfig) -> list[dict[str, object]]:
    """What chips exchange for each token on any mesh: bytes, and the powers of chips along axes
    that they are multiplied with.
    """
    # Of columns, which chips along `context` divide, too, the second mesh tells.
    divided = (
        (Mesh(model=2, expert=2), ("mixer", "experts")),
        (Mesh(context=2), ("embed", "mixer", "ffn")),
    )
    exchanges = []
    for mesh, places in divided:
        for collective in collectives.of_step(config, mesh):
            if collective.place not in places:
                continue
            powers: dict[str, int] = {}
            if collective.axis == "expert":  # each chip adds its own tokens
                powers = {"expert": 1}
            elif collective.axis == "context":  # its heads, and each chip's number for each
                powers = {"model": -1, "context": int(collective.kind == "all-gather")}
            whole = math.prod(mesh.along(axis) ** power for axis, power in powers.items())
            exchanges.append({
                "axes": collective.axis.split(","), "kind": collective.kind,
                "count": collective.count, "token_bytes": collective.token_bytes / whole,
                "powers": powers,
            })  # fmt: skip
    return exchanges


def _between(few: object, many: Any, start: int, stop: int) -> Any:
    """Two descriptions as one: what is `few` with `start` key/value heads and `many` with `stop`
    lies on a line between them.
    """
    if isinstance(few, dict):
        return {name: _between(few[name], many[name], start, stop) for name in few}
    if isinstance(few, list | tuple):
        return [_between(a, b, start, stop) for a, b in zip(few, many, strict=True)]
    if few == many:
        return few
    per_head = (many - few) // (stop - start)
    return {"base": few - per_head * start, "per_head": per_head}


def describe_chip(spec: HardwareSpec) -> dict[str, object]:
    """A chip, without what nobody knows or bounds."""
    rates = {name: rate for name, rate in spec.rates.items() if math.isfinite(rate)}
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    endless = {name: None for name, value in fields.items() if value == math.inf}
    return fields | endless | {"rates": rates}
