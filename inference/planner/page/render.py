"""The planner as one HTML file that needs no network: sliders, memory, roofline, latency.

`assets/plan.js` computes the figures of `inference.planner.deployment` from what `describe` says of
a model; a test compares the two in a browser.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from configs import presets
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.planner import cost, weights

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
        "formats": {name: dataclasses.asdict(format) for name, format in FORMATS.items()},
    }
    data["start"] = dict(start)
    page = (_ASSETS / "page.html").read_text(encoding="utf-8")
    for name in _INLINED:
        page = page.replace(f"{{{{ {name} }}}}", (_ASSETS / name).read_text(encoding="utf-8"))
    # '<' would end the element that the data stand in; no number or key needs it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace("{{ data }}", text)


def describe(config: ModelConfig) -> dict[str, Any]:
    """What `plan.js` needs to know of a model. A size that depends on the number of key/value heads
    is [constant, per head].
    """
    ends = _Ends.of(config)
    few, many = (weights.matrices(end) for end in (ends.few, ends.many))
    mixtures = Counter(
        (layer.experts.num_experts, layer.experts.top_k) for layer in config.layers if layer.experts
    )
    states = {layer.recurrent.num_heads for layer in config.pattern if layer.recurrent}
    hidden = {
        layer.experts.width if layer.experts else config.ffn_width
        for layer in config.pattern
        if layer.ffn != "none"
    }
    return {
        **{name: getattr(config, name) for name in _PLAIN},
        "kv_heads": config.num_kv_heads,
        "vector_elements": ends.sized(*map(weights.vector_elements, (ends.few, ends.many))),
        "position_elements": weights.position_elements(config),
        "has_kv_heads": any(not p.latent and not p.recurrent for p in config.pattern),
        "divided": sorted({config.num_heads} | states | hidden),
        "exchanges": sum(1 if layer.ffn == "none" else 2 for layer in config.layers),
        "mixtures": [
            {"num_experts": count, "top_k": top_k, "layers": layers}
            for (count, top_k), layers in mixtures.items()
        ],
        "matrices": [
            {
                "name": matrix.name,
                "layers": layers,
                "rows": ends.sized(matrix.rows, other.rows),
                "width": matrix.width,
                "split": matrix.split is not None,
                "experts": _fields(matrix.experts, "num_experts", "top_k"),
                "copied": ends.sized(matrix.copied_rows, other.copied_rows),
            }
            for (matrix, layers), other in zip(few.items(), many, strict=True)
        ],
        "mixing": ends.counted(_mixing),
        "caches": ends.counted(_cached),
    }


_PLAIN = ("name", "dtype", "vocab_size", "width", "num_layers", "num_heads", "head_width", "tied",
          "max_context")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Ends:
    """A model with one key/value head, and with as many as query heads: every size between lies on
    a line through both.
    """

    few: ModelConfig
    many: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig) -> "_Ends":
        few = dataclasses.replace(config, num_kv_heads=1)
        return cls(few, dataclasses.replace(config, num_kv_heads=config.num_heads))

    def sized(self, few: int, many: int) -> tuple[int, int]:
        """[constant, per head] of a size that is `few` and `many` at the ends."""
        per_head = (many - few) // max(1, self.many.num_kv_heads - 1)
        return few - per_head, per_head

    def counted(self, kind: Callable[[ModelConfig, int], dict[str, Any]]) -> list[dict[str, Any]]:
        """Kinds of layers and how many there are of each, 'elements' and 'parts' with both ends."""
        found: Counter[str] = Counter()
        for layer in range(self.few.num_layers):
            few, many = kind(self.few, layer), kind(self.many, layer)
            sizes = {name: self.sized(few[name], many[name]) for name in ("elements", "parts")}
            found[json.dumps(few | sizes)] += 1
        return [json.loads(text) | {"layers": layers} for text, layers in found.items()]


def _mixing(config: ModelConfig, layer: int) -> dict[str, Any]:
    """What one layer's tokens exchange."""
    spec, cache = config.layers[layer], config.cache_specs[layer]
    stored = cache if cache.owner is None else config.cache_specs[cache.owner]
    shared = {
        "elements": stored.elements_per_token,
        "parts": cost.cache_parts(config, spec),
    }
    if spec.recurrent is not None:
        sizes = _fields(spec.recurrent, "inner_width", "state_width", "conv_width",
                        "conv_channels", "state_elements")  # fmt: skip
        return {"name": "recur", "recurrent": sizes, **shared}
    name = "attend" if spec.latent is None else "attend.latent"
    return {
        "name": name if stored.window is None else f"{name}.window{stored.window}",
        "shares": cache.owner is not None,
        "window": stored.window,
        "latent": _fields(spec.latent, "rank", "rope_width", "nope_width", "value_width"),
        "indexer": _fields(spec.indexer, "num_heads", "head_width", "top_k"),
        **shared,
    }


def _cached(config: ModelConfig, layer: int) -> dict[str, Any]:
    """What one layer keeps of a sequence."""
    spec, cache = config.layers[layer], config.cache_specs[layer]
    row = config.head_width
    if spec.latent is not None:
        row = spec.latent.rank + spec.latent.rope_width
    return {
        "elements": cache.elements_per_token,
        "parts": cost.cache_parts(config, spec),
        "row": row,
        "window": cache.window,
        "state_elements": cache.elements_per_sequence,
    }


def _fields(sizes: object | None, *names: str) -> dict[str, Any] | None:
    return None if sizes is None else {name: getattr(sizes, name) for name in names}


def _describe_chip(spec: HardwareSpec) -> dict[str, Any]:
    """A chip, without what nobody knows or bounds."""
    rates = {name: rate for name, rate in spec.rates.items() if math.isfinite(rate)}
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    endless = {name: None for name, value in fields.items() if value == math.inf}
    return fields | endless | {"rates": rates}
