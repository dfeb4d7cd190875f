"""The planner as one HTML file that needs no network: sliders, memory, roofline, latency.

`assets/plan.js` computes the figures of `inference.planner.deployment` from what `describe` says of
a model; a test compares the two in a browser.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import presets
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.kinds.kind import Mixer
from configs.mesh import Mesh
from configs.model import ModelConfig
from configs.precision import CACHE_FORMATS, FORMATS, PLANNED
from inference.planner import cost, weights
from inference.planner.parallel import collectives

# Programs that can show the page, for pictures and tests.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_ASSETS = Path(__file__).parent / "assets"
_INLINED = ("page.css", "plan.js", "format.js", "draw.js", "controls.js", "page.js")
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
    if models is None:
        models = {name: preset.config for name, preset in _PRESETS.items()}
    if hardware is None:
        hardware = catalog.NAMES
    data: dict[str, Any] = {
        "models": {name: describe(config) for name, config in models.items()},
        "hardware": {name: _describe_chip(spec) for name, spec in hardware.items()},
        "formats": {name: dataclasses.asdict(FORMATS[name]) for name in PLANNED},
        "cache_formats": {name: dataclasses.asdict(form) for name, form in CACHE_FORMATS.items()},
    }
    data["start"] = dict(start)
    page = (_ASSETS / "page.html").read_text(encoding="utf-8")
    for name in _INLINED:
        page = page.replace(f"{{{{ {name} }}}}", (_ASSETS / name).read_text(encoding="utf-8"))
    # '<' would end the element that the data stand in; no number or key needs it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace("{{ data }}", text)


def describe(config: ModelConfig) -> dict[str, Any]:
    """What the page is told of a model: its parameters, operations and caches as coefficients, of
    which it knows no more than how to add them up.

    A number that depends on the number of key/value heads is {"base", "per_head"}; none does where
    layers differ in it.
    """
    mixers = [mixer for mixer in config.mixers(Mixer) if hasattr(mixer, "num_kv_heads")]
    own = {mixer.num_kv_heads for mixer in mixers}
    most = math.gcd(*(mixer.num_heads for mixer in mixers)) if len(own) == 1 else 1
    at_few, at_most = (
        _coefficients(config.with_kinds(num_kv_heads=n) if most > 1 else config) for n in (1, most)
    )
    return {
        "name": config.name,
        "dtype": config.dtype,
        "max_context": config.max_context,
        "width": config.width,
        "kv_heads": min(own) if most > 1 else 1,
        "most_kv_heads": most,
        **_between(at_few, at_most, 1, most),
    }


def _coefficients(config: ModelConfig) -> dict[str, Any]:
    mixtures = {layer.ffn.experts for layer in config.layers if layer.ffn and layer.ffn.experts}
    two = Mesh(model=2, expert=2)
    return {
        "operations": [
            dataclasses.asdict(operation) | {"layers": layers}
            for operation, layers in config.operations.items()
        ],
        "weights": [
            part._asdict() | {"count": count}
            for part, count in Counter(weights.held(config)).items()
        ],
        "caches": [
            {
                "layers": layers,
                "elements": cost.token_elements(spec),
                "row": spec.scaled_elements,
                "window": spec.sliding(),
                "state_bytes": spec.bytes_per_sequence(),
                "parts": parts,
            }
            for (spec, parts), layers in cost.caches(config).items()
        ],
        "divided": sorted(config.divided),
        "cached_heads": config.cached_heads,
        "exchanges": [
            {
                "axis": each.axis,
                "kind": each.kind,
                "count": each.count,
                # along `expert` each chip adds its own
                "token_bytes": each.token_bytes / (two.expert if each.axis == "expert" else 1),
            }
            for each in collectives.of_step(config, two)
            if each.place != "sample"
        ],
        "num_experts": sorted({experts for experts, _ in mixtures}),
    }


def _between(few: Any, many: Any, start: int, stop: int) -> Any:
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


def _describe_chip(spec: HardwareSpec) -> dict[str, Any]:
    """A chip, without what nobody knows or bounds."""
    rates = {name: rate for name, rate in spec.rates.items() if math.isfinite(rate)}
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    endless = {name: None for name, value in fields.items() if value == math.inf}
    return fields | endless | {"rates": rates}
