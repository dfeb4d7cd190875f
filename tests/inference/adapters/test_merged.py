"""A model with an adapter added to its weights is the model with its adapter."""

from pathlib import Path

import numpy as np
import pytest

from configs.errors import InputError
from configs.settings.adapters import EXTRAS, AdapterConfig
from inference.adapters import merged, peft_directory
from inference.checkpoints import convert, resolve
from inference.engine import Engine
from tests import fakes
from tests.inference.adapters import peft_files

_ROOM = AdapterConfig(rank=64, extras=EXTRAS)

pytestmark = pytest.mark.quick_code

_GOLDEN = Path(__file__).resolve().parents[2] / "golden"
_SIZES = dict(max_seqs=2, decode_rows=(2,), page_tokens=8, chunk_tokens=32, prefill_chunks=(1,),
              cache_bytes=1 << 20)  # fmt: skip


@pytest.mark.parametrize("name, to", [
    ("gpt_neox-mha-untied", "orbax"), ("gpt2-mha-untied-inner-float32", "hf"),
    ("deepseek_v2-mha-lite", "hf"), ("gemma-mha-bias-untied-float32", "hf"),
    pytest.param("jamba-gqa-experts-bias", "hf", marks=pytest.mark.long),
])  # fmt: skip
def test_what_is_written_has_the_logits_of_peft(tmp_path, name, to):
    checkpoint = resolve.resolve(str(_GOLDEN / name)).open(None)
    adapter = peft_directory.read(_GOLDEN / "adapters" / name, checkpoint.config, _ROOM)
    convert.convert(merged.checkpoint(checkpoint, adapter), tmp_path / "new", to, "float32")
    expected = np.load(_GOLDEN / "adapters" / name / "expected.npz")
    tokens, logits = expected["tokens_0"], expected["logits_0"].astype(float)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    with fakes.no_draws():
        engine = Engine.from_model(str(tmp_path / "new"), dtype="float32", **_SIZES)
        engine.scheduler.shapes = engine.scheduler.shapes[-1:]
        [score] = engine.score([tokens])
    taken = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(score.logprobs, taken, atol=1e-4)


def test_one_use_of_a_table_that_has_two_is_not_merged(tmp_path):
    checkpoint = resolve.resolve(str(_GOLDEN / "llama-gqa-tied-rope3")).open(None)
    where = peft_files.write(tmp_path, checkpoint.config, modules="lm_head", extras=["vocab"])
    adapter = peft_directory.read(where, checkpoint.config, _ROOM)
    with pytest.raises(InputError, match="are one table: no merged model has both; serve the"):
        merged.checkpoint(checkpoint, adapter)
