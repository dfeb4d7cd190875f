"""What scores say of units without effect, and runs that go on."""

import dataclasses

import numpy as np
import pytest

from configs.errors import InputError
from configs.hardware import catalog
from configs.kinds.experts import Router
from configs.recipes import smaller_caches
from inference.checkpoints import convert, manifest
from inference.layerwise.reader import Reader
from inference.prune import export, importance, loss, search, selection, shapes, watch
from inference.prune.importance import LOSS, Method
from inference.prune.watch import Aggregate
from layers import params
from tests import compiling
from tests.inference.prune import children
from tests.inference.prune.children import GOLDEN
from tests.inference.quantize import models

pytestmark = pytest.mark.quick_code


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """A model of four layers, of which the third does nothing; in all others odd channels of the
    feed-forward and the first key/value head do nothing.
    """

    def change(values):
        flat = params.flatten(values)
        for layer in range(4):
            down, out = (
                np.array(flat[f"layers/{layer}/{name}"]) for name in ("ffn/down", "mixer/out")
            )
            gate_up, qkv = (
                np.array(flat[f"layers/{layer}/{name}"]) for name in ("ffn/gate_up", "mixer/qkv")
            )
            gate_up[96 + 1 :: 2] = 0  # of up
            qkv[64 + 32 : 64 + 32 + 16] = 0  # the first head's values
            if layer == 2:
                down[:], out[:] = 0, 0
            flat |= {
                f"layers/{layer}/ffn/down": down, f"layers/{layer}/mixer/out": out,
                f"layers/{layer}/ffn/gate_up": gate_up, f"layers/{layer}/mixer/qkv": qkv,
            }  # fmt: skip
        return params.unflatten(config.parameters(), flat)

    config = models.llama(num_layers=4)
    return models.written(config, tmp_path_factory.mktemp("idle") / "model", change)


WIDTHS = {"layers": 3, "ffn_width": 48, "kv_heads": 1}
METHODS = [Method(), Method(Aggregate("mean", "l2"))]


@pytest.mark.parametrize(
    "method",
    [METHODS[0], pytest.param(METHODS[1], marks=pytest.mark.long)],
    ids=["default", "mean"],
)
def test_what_does_nothing_is_removed(idle, tmp_path, method):
    record = children.child_of(idle, tmp_path / "child", WIDTHS, method=method)
    assert record["layers"] == [0, 1, 3]
    assert record["removed"]["kv_heads"] == {str(layer): [0] for layer in (0, 1, 3)}
    odd = list(range(1, 96, 2))
    assert record["removed"]["ffn_width"] == {str(layer): odd for layer in (0, 1, 3)}
    expected = children.logits(*children.loaded(idle))
    np.testing.assert_allclose(
        children.logits(*children.loaded(tmp_path / "child")), expected, atol=2e-5
    )


def test_random_scores_remove_others_and_depend_on_their_seed(idle, tmp_path):
    records = [
        children.child_of(idle, tmp_path / str(n), WIDTHS, method=Method(random_seed=seed))
        for n, seed in enumerate((1, 1, 2))
    ]
    assert records[0] == records[1] != records[2]
    assert records[0]["removed"]["ffn_width"] != {
        str(layer): list(range(1, 96, 2)) for layer in records[0]["layers"]
    }


def test_an_interrupted_run_goes_on_to_the_same_bytes(idle, tmp_path):
    def written(name):
        checkpoint, importance = children.scored(idle, tmp_path / f"{name}.pruning")
        layers = selection.layers(importance, 3, is_contiguous=False)
        stays = selection.select(importance, WIDTHS, layers)
        pruned = export.checkpoint(checkpoint, WIDTHS, stays, {})
        convert.convert(pruned, tmp_path / name, "hf")
        return (tmp_path / name / manifest.NAME).read_text()

    with pytest.raises(KeyboardInterrupt):
        children.scored(idle, tmp_path / "resumed.pruning", stop=2)
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "resumed.pruning").iterdir()}
    assert sum(path.name.startswith("layer-") for path in finished) == 2
    assert written("resumed") == written("straight")
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())


def test_layers_leave_as_one_span(idle, tmp_path):
    _, importance = children.scored(idle, tmp_path / "work")
    scores = importance.depth()
    layers = selection.layers(importance, 2, is_contiguous=True)
    assert layers in [(0, 1), (0, 3), (2, 3)] and 2 not in layers
    spans = [scores[first : first + 2].sum() for first in range(3)]
    assert set(range(4)) - set(layers) == {(first := int(np.argmin(spans))), first + 1}


@pytest.mark.parametrize("visits", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_expert_without_tokens_is_removed(tmp_path, visits):
    config = dataclasses.replace(models.mixture(), family="mixtral")
    experts = dataclasses.replace(
        config.layers[0].ffn, shared_width=0, router=Router(has_bias=True)
    )
    layer = dataclasses.replace(config.pattern[0], ffn=experts)
    config = dataclasses.replace(config, pattern=(layer,))

    def change(values):
        for layer in values["layers"]:
            layer["ffn"]["router_bias"] = np.array([0, -1e9, 0, 0], np.float32)
        return values

    folder = models.written(config, tmp_path / "model", change)
    method = Method(counts_visits=visits)
    record = children.child_of(folder, tmp_path / "child", {"experts": 3}, "orbax", method)
    assert record["removed"]["experts"] == {"0": [1], "1": [1]}
    with pytest.raises(InputError, match="experts=1: experts layers need at least 2 experts"):
        shapes.check(config, {"experts": 1})


def test_layers_that_others_read_stay(tmp_path):
    config = smaller_caches.shared_by(models.llama(num_layers=4), 2)
    folder = models.written(config, tmp_path / "model")
    _, importance = children.scored(folder, tmp_path / "work", Method(depth=LOSS))
    assert np.isinf(importance.depth()).tolist() == [True, False, True, False]
    assert selection.layers(importance, 2, is_contiguous=False) == (0, 2)
    model = shapes.pruned(config, {"layers": 3}, (0, 2, 3))
    assert [spec.owner for spec in model.cache_specs] == [None, None, 1]
    with pytest.raises(InputError, match="layers=1: layers of tiny that others read must stay"):
        selection.layers(importance, 1, is_contiguous=False)
    with pytest.raises(InputError, match="layer 3 reads what layer 2 made"):
        shapes.pruned(config, {"layers": 2}, (0, 3))
    widths = {"kv_heads": 1}
    units = selection.select(importance, widths, (0, 1, 2, 3)).units
    assert all((units[0, "kv_heads"] == units[1, "kv_heads"]).tolist())
    gemma = children.opened(GOLDEN / "gemma4-gqa-inputs-sharing").config
    for widths in ({"width": 20}, {"layers": 5}):
        with pytest.raises(InputError, match="layers of .* read inputs of their own"):
            shapes.check(gemma, widths)


def test_a_layers_loss_is_that_of_the_model_without_it(idle, tmp_path):
    checkpoint, importance = children.scored(idle, tmp_path / "work", Method(depth=LOSS))
    rises = importance.depth()
    assert rises[2] == pytest.approx(0, abs=1e-6) and np.abs(rises[[0, 1, 3]]).min() > 1e-4
    tokens = loss.spread(children.windows(checkpoint.config))
    whole = loss.of_model(Reader(checkpoint.contents(), checkpoint.config), tokens)
    config, values = children.loaded(idle)
    logits = children.logits(dataclasses.replace(config, norm_eps=1e-5), values, tokens[0])
    log_p = logits - np.logaddexp.reduce(logits.astype(np.float64), -1, keepdims=True)
    expected = -log_p[np.arange(len(tokens[0]) - 1), tokens[0, 1:]].mean()
    assert loss.of_model(
        Reader(checkpoint.contents(), checkpoint.config), tokens[:1]
    ) == pytest.approx(expected, abs=1e-4)
    widths, layers = {"layers": 3}, (0, 1, 2)
    stays = selection.select(importance, widths, layers)
    pruned = export.checkpoint(checkpoint, widths, stays, {})
    without = loss.of_model(Reader(pruned.contents(), pruned.config), tokens)
    assert without - whole == pytest.approx(rises[3], abs=1e-5)


def test_losses_of_a_group_of_layers_are_those_of_all(idle, tmp_path, monkeypatch):
    _, together = children.scored(idle, tmp_path / "together", Method(depth=LOSS))
    monkeypatch.setattr(importance, "_BRANCH_BYTES", 1)  # one layer at a time
    _, apart = children.scored(idle, tmp_path / "apart", Method(depth=LOSS))
    assert together.depth().tobytes() == apart.depth().tobytes()


def test_an_experts_results_are_those_of_its_tokens():
    rng = np.random.default_rng(0)
    x_XF = rng.normal(size=(40, 6)).astype(np.float32)
    weight_EDF = rng.normal(size=(3, 5, 6)).astype(np.float32)
    sizes_E = np.array([30, 0, 8], np.int32)  # the last two rows are of no expert
    norms = compiling.call(watch._result_norms, x_XF, weight_EDF, sizes_E)
    expert_X = np.repeat(np.arange(3), sizes_E)
    expected = [np.linalg.norm(weight_EDF[e] @ x) for e, x in zip(expert_X, x_XF[:38], strict=True)]
    np.testing.assert_allclose(norms[:38, 0], expected, rtol=1e-5)
    assert not np.any(norms[38:])


def test_a_shape_that_no_file_of_the_family_says_is_named_with_those_that_are():
    config = children.opened(GOLDEN / "deepseek_v3-mha-groups-yarn").config
    layers = range(config.num_layers)
    with pytest.raises(InputError, match="has no place in a config.json") as caught:
        shapes.check_transformers(config, {"expert_width": 7}, layers)
    assert "widths=expert_width=7" in str(caught.value)
    assert "; it can say " in str(caught.value) and "--to=" not in str(caught.value)
    shapes.check_transformers(config, {"expert_width": 6, "shared_width": 6}, layers)


def test_units_lie_in_groups():
    stays = selection.highest(np.array([5.0, 4, 3, 1, 2, 9]), 4, groups=2)
    assert stays.tolist() == [True, True, False, False, True, True]
    ties = selection.highest(np.ones((2, 3)), 1)
    assert ties.tolist() == [[True, False, False]] * 2


def test_candidates_are_of_the_same_size(idle, tmp_path):
    checkpoint, importance = children.scored(idle, tmp_path / "work")
    budget = search.Budget(catalog.get("h100"), params=0.7)
    matches = search.candidates(
        importance, checkpoint.config, budget, {"kv_heads": 2}, False, lambda *shape: True
    )
    assert len(matches) > 2
    assert all(match.widths.get("kv_heads", 2) == 2 for match in matches)
    for match in matches:
        model = shapes.pruned(checkpoint.config, match.widths, match.layers)
        assert 0.98 <= budget.excess(model, checkpoint.config) <= 1
    with pytest.raises(InputError, match="target_latency_ms=1e-06: no shape that"):
        search.candidates(
            importance, checkpoint.config,
            search.Budget(budget.hardware, latency_s=1e-9), {}, False, lambda *shape: True,
        )  # fmt: skip


def test_heads_of_states_that_are_no_multiple_of_the_width_are_named():
    config = children.opened(GOLDEN / "mamba2-one-group-tied-float32").config
    with pytest.raises(InputError, match="state_heads=3: the 30 elements .* it can say 2, or"):
        shapes.check_transformers(config, {"state_heads": 3}, range(2))
