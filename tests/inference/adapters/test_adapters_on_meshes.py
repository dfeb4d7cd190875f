"""Adapters on several chips change a model as on one."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from configs.mesh import Mesh
from configs.settings.adapters import EXTRAS
from tests import fakes
from tests.inference.adapters import peft_files

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20)  # fmt: skip
_MODELS = {
    "llama": fakes.llama(), "llama, 3 KV heads": fakes.of_kind("full", 24, 3),
    "deepseek": fakes.deepseek(), "gpt-oss": fakes.gpt_oss(), "jamba": fakes.jamba(),
    "llama, int8": fakes.llama(),
}  # fmt: skip
_QUICK = [
    ("llama", Mesh(model=2)), ("deepseek", Mesh(model=2, expert=2)),
    ("llama", Mesh(data=2, context=2)),
]  # fmt: skip
_LONG = [
    ("llama", Mesh(data=2)), ("llama, 3 KV heads", Mesh(model=8)), ("llama", Mesh(model=3)),
    ("deepseek", Mesh(context=2)), ("jamba", Mesh(data=2, model=2)), ("gpt-oss", Mesh(model=2)),
    ("llama, int8", Mesh(model=2)),
]  # fmt: skip
_NAMES = None, "one", "other", "one", "third", None


@functools.cache
def _run(name, mesh):
    """Answers of requests with more adapters than slots, and without one."""
    more = {"weights": "int8"} if name.endswith("int8") else {}
    engine = fakes.engine(
        _MODELS[name], None, "one", False, mesh, slots=2, rank=5, extras=EXTRAS, **_SIZES, **more
    )
    with tempfile.TemporaryDirectory() as folder:
        for seed, adapter in enumerate(("one", "other", "third")):
            where = peft_files.write(
                Path(folder) / adapter, _MODELS[name], 3 + seed, seed, size=0.1, extras=EXTRAS
            )
            engine.adapters.load(adapter, where)
    prompts = fakes.prompts([5, 40, 17, 3, 26, 9], _MODELS[name].vocab_size, seed=2)
    return engine.generate(prompts, [fakes.greedy(9, adapter=adapter) for adapter in _NAMES])


@pytest.mark.parametrize(
    "name, mesh", [*_QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in _LONG)],
    ids=lambda it: str(it).replace(",", " "),
)  # fmt: skip
def test_answers_are_those_of_one_chip(name, mesh):
    expected, answers = _run(name, Mesh()), _run(name, mesh)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    for answer, one in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer.logprobs, one.logprobs, rtol=1e-5, atol=1e-5)
