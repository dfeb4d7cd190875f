"""A child computes what its parent computes where what was removed is zero."""

import dataclasses

import numpy as np
import pytest

from configs.kinds.params import leaves
from tests.inference.prune import children
from tests.inference.prune.children import GOLDEN


def zero(values, path, columns):
    values[path][..., columns] = 0


def of_heads(heads, width):
    return np.concatenate([np.arange(head * width, (head + 1) * width) for head in heads])


def without(config, values, record):
    """The parent's configuration and values where nothing removed has an effect: results of removed
    units are zero, and norms over fewer elements are those of all times a factor.
    """
    removed = record["removed"]
    for axis, of_layers in removed.items():
        for layer, units in of_layers.items() if axis != "width" else ():
            mixer, prefix = config.layers[int(layer)].mixer, f"layers/{layer}"
            nested = next((p for p in mixer.parts if p.name == OWNER.get(axis)), mixer)
            home = f"{prefix}/mixer/{nested.name}" if len(mixer.parts) > 1 else f"{prefix}/mixer"
            if axis == "ffn_width":
                zero(values, f"{prefix}/ffn/down", units)
            elif axis == "shared_width":
                zero(values, f"{prefix}/ffn/shared/down", units)
            elif axis == "expert_width":
                for expert, channels in enumerate(units):
                    values[f"{prefix}/ffn/experts/down"][expert][:, channels] = 0
            elif axis == "kv_heads":
                queries = nested.num_heads // nested.num_kv_heads * nested.head_width
                zero(values, f"{home}/out", of_heads(units, queries))
            elif axis == "latent_heads":
                zero(values, f"{home}/out", of_heads(units, nested.value_width))
            elif axis == "state_channels":
                zero(values, f"{home}/out", units)
                zero(values, f"{home}/choice", units)
            elif axis == "kv_rank":
                scale(values, f"{home}/kv_norm", units, nested.rank, 0)
                values[f"{home}/kv_down"][units] = 0
            elif axis == "query_rank":
                scale(values, f"{home}/q_norm", units, nested.query_rank, 0)
                values[f"{home}/q_down"][units] = 0
            elif axis == "state_heads":
                elements = of_heads(units, nested.head_width)
                values[f"{home}/gates"][elements] = 0
                if f"{home}/gates_bias" in values:
                    values[f"{home}/gates_bias"][elements] = 0
                if f"{home}/out_norm" in values:
                    scale(values, f"{home}/out_norm", elements, nested.inner_width, 0)
            elif axis == "experts":
                values[f"{prefix}/ffn/router_bias"] = np.zeros(len(values[f"{prefix}/ffn/router"]))
                values[f"{prefix}/ffn/router_bias"][units] = -1e9
    if "experts" in removed:
        router = dataclasses.replace(config.layers[0].ffn.router, has_bias=True)
        config = config.with_kinds(router=router)
    if "width" in removed:
        for path, info in (("/".join(p), i) for p, i in leaves(config.parameters())):
            if info.logical_axes == ("embed",) and "norm" in path:
                scale(values, path, removed["width"], config.width, config.norm_offset)
                continue
            for dim, name in enumerate(info.logical_axes):
                if name == "embed":
                    np.moveaxis(values[path], dim, -1)[..., removed["width"]] = 0
    return config, values


pytestmark = pytest.mark.quick_code

OWNER = {"kv_heads": "attention", "state_heads": "mamba2"}


def scale(values, path, units, size, offset):
    """A norm's weights where the mean is over all `size` elements, those of `units` being zero."""
    factor = np.sqrt((size - len(units)) / size)
    values[path] = (values[path] + offset) * factor - offset


CASES = [
    ("llama-gqa-tied-rope3", {"ffn_width": 37, "kv_heads": 1, "layers": 2}),
    ("gemma-gqa-tied", {"width": 28, "ffn_width": 20, "kv_heads": 1}),
    ("mixtral-gqa-float32", {"experts": 3, "expert_width": 7, "width": 32}),
    ("mamba2-groups-bias-limit", {"state_heads": 3}),
    ("mamba-bias-tied", {"state_channels": 36}),
]
MORE = [
    ("llama-mha-tied-yarn-scales-float32", {"width": 28, "kv_heads": 2}),
    ("llama-gqa-yarn-bias", {"width": 40, "ffn_width": 20}),
    ("gemma3-gqa-linear-rope", {"width": 28, "layers": 4}),
    ("gemma-mha-bias-untied-float32", {"width": 24, "kv_heads": 2}),
    ("deepseek_v3-mha-groups-yarn",
     {"latent_heads": 3, "kv_rank": 12, "query_rank": 16, "expert_width": 8, "shared_width": 8}),
    ("falcon_h1-gqa-multipliers-gate-norm", {"kv_heads": 1, "state_heads": 2, "ffn_width": 20}),
]  # fmt: skip


ALL = (*CASES, *MORE)
QUICK = [case for case in CASES if not case[0].startswith("mamba2")]


@pytest.mark.parametrize(
    "case, widths",
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.long) for case in ALL if case not in QUICK),
    ],
)
def test_a_child_computes_what_its_parent_does_without_what_was_removed(case, widths, tmp_path):
    record = children.child_of(GOLDEN / case, tmp_path / "child", widths)
    config, values = children.loaded(tmp_path / "child")
    assert {path: value.shape for path, value in values.items()} == {
        "/".join(path): info.shape for path, info in leaves(config.parameters())
    }
    parent, before = children.loaded(GOLDEN / case)
    masked, remaining = without(parent, before, record)
    expected = children.logits(*of_layers(masked, remaining, record["layers"]))
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(children.logits(config, values), expected, atol=1e-4, rtol=1e-4)


def of_layers(config, values, layers):
    """The model of some layers of another."""
    pattern = tuple(config.layers[layer] for layer in layers)
    remaining = {path: value for path, value in values.items() if not path.startswith("layers/")}
    for number, layer in enumerate(layers):
        old, new = f"layers/{layer}/", f"layers/{number}/"
        remaining |= {
            path.replace(old, new, 1): value
            for path, value in values.items()
            if path.startswith(old)
        }
    return dataclasses.replace(config, num_layers=len(layers), pattern=pattern), remaining
