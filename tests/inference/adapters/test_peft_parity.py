"""With an adapter that `peft` wrote, a model has `peft`'s logits."""

from pathlib import Path

import numpy as np
import pytest

from configs.settings.adapters import EXTRAS
from inference.checkpoints import resolve
from inference.engine import Engine
from tests import fakes

pytestmark = pytest.mark.quick_code

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
_QUICK = (
    "llama", "deepseek_v2", "deepseek_v3-mha-groups", "granitemoehybrid", "gpt_neox", "gemma-"
)  # fmt: skip
NAMES = [
    pytest.param(path.name, marks=() if path.name.startswith(_QUICK) else pytest.mark.long)
    for path in sorted((GOLDEN / "adapters").iterdir())
]
_SIZES = dict(max_seqs=2, decode_rows=(2,), page_tokens=8, chunk_tokens=32, prefill_chunks=(1,),
              cache_bytes=1 << 20, rank=40, slots=1, extras=EXTRAS)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_peft(name):
    resolved = resolve.resolve(str(GOLDEN / name))
    vocab_size = resolved.config.vocab_size
    with fakes.no_draws():
        engine = Engine.from_model(
            str(GOLDEN / name), dtype="float32", top_logprobs=min(20, vocab_size), **_SIZES
        )
        engine.scheduler.shapes = engine.scheduler.shapes[-1:]
        engine.adapters.load("tuned", GOLDEN / "adapters" / name)
        expected = np.load(GOLDEN / "adapters" / name / "expected.npz")
        for i in range(2):
            tokens, logits = expected[f"tokens_{i}"], expected[f"logits_{i}"].astype(float)
            logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            taken = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
            [plain], [found] = engine.score([tokens]), engine.score([tokens], "tuned")
            np.testing.assert_allclose(found.logprobs, taken, atol=1e-4)
            assert np.abs(np.array(plain.logprobs) - taken).max() > 1e-2
            for row, tops in enumerate(found.top_logprobs):
                np.testing.assert_allclose([*tops.values()], logprobs[row, [*tops]], atol=1e-4)
