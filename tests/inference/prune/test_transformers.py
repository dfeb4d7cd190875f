"""Children as transformers loads them."""

import dataclasses
import json
import os
import subprocess

import numpy as np
import pytest

from layers import decoder, params
from tests.inference.checkpoints.test_convert import GOLDEN_PYTHON, ROOT
from tests.inference.prune import children
from tests.inference.prune.children import GOLDEN
from tests.inference.prune.test_parity import CASES, MORE

# Of further families.
FURTHER = [
    ("gemma2-gqa-tied", {"layers": 3, "width": 36}),
    ("qwen3_moe-gqa-float32", {"experts": 4, "layers": 1}),
    ("mamba-rank-untied-float32", {"width": 8, "layers": 1}),
    ("mamba2-one-group-tied-float32", {"width": 10}),
    ("jamba-gqa-experts-bias", {"ffn_width": 8, "expert_width": 8, "kv_heads": 1}),
    ("granite-gqa-scales", {"width": 24, "kv_heads": 1}),
]
ALL = (*CASES, *MORE, *FURTHER)


@pytest.mark.long
@pytest.mark.skipif(not GOLDEN_PYTHON.exists(), reason="needs torch and transformers")
def test_transformers_computes_our_logits_of_children(tmp_path):
    exports, ours = tmp_path / "exports", tmp_path / "ours"
    exports.mkdir()
    for case, widths in ALL:
        children.child_of(GOLDEN / case, exports / case, widths)
        for left in (exports / f"{case}.pruning").iterdir():
            left.unlink()
        (exports / f"{case}.pruning").rmdir()
        checkpoint = children.opened(exports / case)
        config = dataclasses.replace(checkpoint.config, dtype="float32")
        values = params.flatten(checkpoint.load_params(decoder.param_infos(config)))
        expected = {}
        for number, seed in enumerate((7, 8)):
            tokens_T = children.windows(config, 1, 12, seed)[0]
            expected[f"tokens_{number}"] = tokens_T
            expected[f"logits_{number}"] = children.logits(config, values, tokens_T)
        (ours / case).mkdir(parents=True)
        np.savez(ours / case / "expected.npz", **expected)
    command = [GOLDEN_PYTHON, "tests/golden/compare_exports.py", str(exports), str(ours)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    differences = json.loads(done.stdout)
    assert differences.keys() == {case for case, _ in ALL}
    assert max(differences.values()) <= 1e-4, differences
