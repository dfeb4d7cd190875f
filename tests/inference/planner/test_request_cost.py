"""Samples and thoughts of a request: predicted as long as the scheduler's steps."""

import dataclasses

import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware import catalog
from configs.mesh import Mesh
from inference.planner import request_cost, roofline, slo
from inference.planner.deployment import Deployment
from inference.planner.simulate import Simulator
from inference.request import SamplingParams
from inference.scheduling.scheduler import Scheduler
from tests import fakes

_CHIP = dataclasses.replace(catalog.get("h100"), overhead_s=1e-4, gamma=0.3)
_8B = presets.get("llama3-8b").config
_ENGINE = EngineConfig.of(
    max_seqs=256, max_context=4096, chunk_tokens=512, prefill_chunks=(1, 4), linear="ffi_cpu",
    overlap=False,
)  # fmt: skip


def simulated(batch, context, new_tokens, samples):
    """Requests with prompts of their own, all of them in the first step."""
    config = Config(_8B, _ENGINE)
    simulator = Simulator(config, Scheduler(config), _CHIP)
    for n in range(batch):
        prompt = range(1 + n * context, 1 + (n + 1) * context)
        params = SamplingParams(n=samples, max_new_tokens=new_tokens)
        simulator.add_request(prompt, params)
    outputs = []
    while simulator.scheduler.has_work:
        outputs += simulator.step()
    return simulator, outputs


@pytest.mark.parametrize("batch, samples, thinking_tokens, answer_tokens", [
    (1, 1, 0, 40), (1, 8, 0, 41), (1, 64, 0, 41), (3, 8, 100, 41), (3, 1, 100, 40),
])  # fmt: skip
def test_a_request_takes_as_long_as_its_simulated_steps(
    batch, samples, thinking_tokens, answer_tokens
):
    """Exactly: steps grow evenly, so the middle one stands for all."""
    new_tokens = thinking_tokens + answer_tokens
    simulator, outputs = simulated(batch, 300, new_tokens, samples)
    plan = Deployment(_8B, _CHIP, samples=samples)
    cost = request_cost.request_cost(plan, batch, 300, new_tokens, thinking_tokens)
    assert cost.seconds == pytest.approx(sum(step.seconds for step in simulator.records), rel=1e-9)
    assert cost.chip_s == pytest.approx(cost.seconds / batch)
    assert batch * cost.tokens == sum(len(output.token_ids) for output in outputs)
    finished = {(output.id, output.index) for output in outputs if output.finish_reason}
    assert len(finished) == batch * samples
    steps = [step.seconds for step in simulator.records]
    first_answer = 1 + (samples > 1) + thinking_tokens
    assert cost.answer_s == pytest.approx(sum(steps[:first_answer]), rel=2e-2)


def test_the_cache_holds_a_prompt_once_and_states_of_each_sample():
    for model in (fakes.llama(), fakes.gemma(), fakes.hybrid()):
        alone, four = (Deployment(model, _CHIP, samples=n) for n in (1, 4))
        tokens = [alone.cache_bytes(length) for length in (0, 20, 50)]
        assert four.request_bytes(30, 20) == pytest.approx(tokens[2] + 3 * tokens[1])
        assert alone.request_bytes(30, 20) == tokens[2]
        if model.has_states:
            assert tokens[0] > 0
    row = Deployment(_8B, _CHIP, samples=8).row(2, 2048, 256)
    per_token = 131_072
    assert row.cache_bytes == 2 * (2048 + 8 * 256) * per_token
    plan = Deployment(_8B, _CHIP, samples=8)
    most = plan.largest_batch(2048, 256)
    assert plan.row(most, 2048, 256).fits and not plan.row(most + 1, 2048, 256).fits


def test_samples_of_a_request_stay_on_one_chip_along_expert():
    mixture = presets.get("mixtral-8x7b").config
    divided = Deployment(mixture, _CHIP, mesh=Mesh(expert=4), samples=8)
    (attend,) = [o for o in divided.decode_operations(1, 1000) if o.name == "attend"]
    assert roofline.per_chip(attend, divided.mesh).cache_bytes == attend.cache_bytes
    many = dataclasses.replace(divided, samples=1)
    (attend,) = [o for o in many.decode_operations(8, 1000) if o.name == "attend"]
    assert roofline.per_chip(attend, many.mesh).cache_bytes == attend.cache_bytes / 4


def test_samples_are_nearly_free_until_steps_read_caches():
    plan = Deployment(_8B, _CHIP, samples=3)
    costs = {cost.samples: cost for cost in request_cost.trade(plan, 1, 2048, 1280, 1024)}
    assert sorted(costs) == [1, 2, 3, 4, 8, 16, 32, 64]
    assert costs[1].equal_thinking_tokens == 1024
    few, many = costs[4].seconds / costs[1].seconds, costs[64].seconds / costs[32].seconds
    assert few < 1.1 and costs[4].cache_share < 0.1
    assert many > 1.4 and costs[64].cache_share > 0.5
    single = dataclasses.replace(plan, samples=1)
    for cost in costs.values():  # the longest thought of one sample that is no slower
        length = 256 + cost.equal_thinking_tokens
        assert single.request_seconds(1, 2048, length) <= cost.seconds * (1 + 1e-9)
        assert single.request_seconds(1, 2048, length + 1) > cost.seconds


def test_a_busy_replica_counts_all_samples():
    one, eight = (Deployment(_8B, _CHIP, samples=n) for n in (1, 8))
    alone, together = slo.steady(one, 32, 1024, 256), slo.steady(eight, 4, 1024, 256)
    assert together.output_tok_s == pytest.approx(together.requests_s * 8 * 256)
    assert alone.output_tok_s < together.output_tok_s < 2 * alone.output_tok_s  # fewer prompts


@pytest.mark.parametrize("samples", [0, 4097])
def test_samples_out_of_range(samples):
    with pytest.raises(InputError, match="--samples is from 1 to 4096"):
        Deployment(_8B, _CHIP, samples=samples)
