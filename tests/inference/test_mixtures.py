"""What an engine says of a mixture's experts."""

import dataclasses

import chex
import numpy as np
import pytest

from configs.errors import InputError
from configs.mesh import Mesh
from inference.planner import cost
from inference.planner.cost import Work
from scripts.reports import costs
from tests import fakes

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20)  # fmt: skip


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, expert=2)], ids=str)
def test_visits_are_counted(mesh):
    """Each token that was fed visits as many experts as it may, in each mixture; the last token of
    an answer is not fed.
    """
    model = fakes.deepseek()
    engine = fakes.engine(model, None, "one", False, mesh, overlap=False, **_SIZES)
    prompts = fakes.prompts([5, 40, 17, 3], 131, seed=2)
    engine.generate(prompts, fakes.greedy(9))
    visits_LE = engine.model_runner.expert_visits()
    fed = sum(len(prompt) + 9 - 1 for prompt in prompts)
    chex.assert_shape(visits_LE, (2, 8))
    assert (visits_LE.sum(1) == 3 * fed).all()
    assert (visits_LE > 0).sum() > 8  # of 16, several
    shares = visits_LE.max(1) * 8 / visits_LE.sum(1)
    assert np.isclose(costs.busiest_expert(engine), shares.mean()) and shares.min() > 1


def test_a_model_without_experts_has_no_visits():
    engine = fakes.engine(fakes.llama(), None, "one", False, **_SIZES)
    with pytest.raises(InputError, match="tiny-llama has no experts"):
        engine.model_runner.expert_visits()
    assert costs.busiest_expert(engine) is None


def test_formats_of_experts_are_counted_and_visits_too():
    """Four-bit experts are read in four bits, and those alone that a token visits."""
    model = fakes.deepseek("bfloat16", width=256)
    model = model.with_kinds(width=256)
    paths = [
        f"layers/{layer}/ffn/experts/{name}" for layer in (1, 2) for name in ("gate_up", "down")
    ]
    stored = dataclasses.replace(model, formats=tuple((path, ("q4_k",)) for path in paths))
    work = Work(1, (), 1)
    plain, packed = (
        {o.name: o.weight_bytes for o in cost.step_operations(each, work)}
        for each in (model, stored)
    )
    for name in ("experts.gate_up", "experts.down"):
        assert np.isclose(packed[name] / plain[name], (4 + 20 / 32) / 16)
    assert packed["shared.gate_up"] == plain["shared.gate_up"]
