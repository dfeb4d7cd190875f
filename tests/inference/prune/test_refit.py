"""Matrices behind removed units return what they returned before, as far as that can be."""

import numpy as np
import pytest

from inference.checkpoints import convert, manifest
from inference.layerwise import input_statistics
from inference.layerwise.parts import Parts
from inference.layerwise.reader import Reader
from inference.prune import export, refit, selection
from inference.prune.importance import start
from layers import params
from tests.inference.prune import children
from tests.inference.prune.children import GOLDEN
from tests.inference.quantize import models

pytestmark = pytest.mark.quick_code


def fitted(folder, work, widths):
    """A parent, what stays, and its matrices fitted to the windows of `children`."""
    checkpoint, importance = children.scored(folder, work)
    layers = tuple(range(checkpoint.config.num_layers))
    stays = selection.select(importance, widths, layers)
    reader, tokens = Reader(checkpoint.contents(), checkpoint.config), windows(checkpoint)
    parts = Parts(work, {"model": str(folder)})
    return checkpoint, stays, refit.run(reader, stays, tokens, parts)


def windows(checkpoint):
    return children.windows(checkpoint.config, count=24)


@pytest.mark.parametrize(("case", "widths"), [
    ("llama-gqa-tied-rope3", {"ffn_width": 37}),
    ("mixtral-gqa-float32", {"expert_width": 7}),
    ("mamba-bias-tied", {"state_channels": 36}),
    ("llama-gqa-tied-rope3", {"kv_heads": 1}),
])  # fmt: skip
def test_results_are_nearer_to_the_parents(case, widths, tmp_path):
    checkpoint, stays, matrices = fitted(GOLDEN / case, tmp_path / "work", widths)
    assert matrices
    reader = Reader(checkpoint.contents(), checkpoint.config)
    stream = start(reader, windows(checkpoint))
    values = reader.layer(0)
    path = next(path for path in matrices if path.startswith("layers/0/")).removeprefix("layers/0/")
    products = input_statistics.observed(stream, 0, values, [path], True)[path].products_DD
    before = values[path]
    after = np.zeros_like(before)
    columns = refit._targets(reader, stays, 0)[path]
    plain = np.where(columns[..., None, :], before, 0)
    columns = np.broadcast_to(columns[..., None, :], before.shape)
    after[columns] = matrices[f"layers/0/{path}"]().reshape(-1)

    def error(matrix):
        difference = matrix - before
        return (difference @ products * difference).sum()

    assert 0 < error(after) < error(plain)


def test_what_follows_from_others_is_given_back(tmp_path):
    """Each odd channel of the feed-forwards is a copy of the even one before it, a hundredth as
    large, which the way down makes up for.
    """

    def change(values):
        flat = params.flatten(values)
        for layer in range(2):
            paths = f"layers/{layer}/ffn/gate_up", f"layers/{layer}/ffn/down"
            gate_up, down = (np.array(flat[path]) for path in paths)
            gate_up[1:96:2] = gate_up[0:96:2]
            gate_up[97::2] = gate_up[96::2] / 100  # of up
            down[:, 1::2] *= 100
            flat |= dict(zip(paths, (gate_up, down), strict=True))
        return params.unflatten(config.parameters(), flat)

    config = models.llama(num_layers=2)
    folder = models.written(config, tmp_path / "model", change)
    widths = {"ffn_width": 48}
    checkpoint, stays, matrices = fitted(folder, tmp_path / "work", widths)
    expected = children.logits(*children.loaded(folder))
    errors = []
    for name, refitted in (("plain", {}), ("fitted", matrices)):
        pruned = export.checkpoint(checkpoint, widths, stays, {}, refitted)
        convert.convert(pruned, tmp_path / name, "hf", "float32")
        logits = children.logits(*children.loaded(tmp_path / name))
        errors.append(np.abs(logits - expected).max())
    assert errors[1] < 0.05 * errors[0]


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path):
    case, widths = GOLDEN / "llama-gqa-tied-rope3", {"ffn_width": 37}

    def written(name):
        checkpoint, stays, matrices = fitted(case, tmp_path / f"{name}.work", widths)
        pruned = export.checkpoint(checkpoint, widths, stays, {}, matrices)
        convert.convert(pruned, tmp_path / name, "hf")
        return (tmp_path / name / manifest.NAME).read_text()

    straight = written("straight")
    written("resumed")
    last = sorted((tmp_path / "resumed.work").glob("refit-*"))[-1]
    last.unlink()
    (tmp_path / "resumed").rename(tmp_path / "first")
    assert written("resumed") == straight
