"""--slo and --advise: what they say holds, and nothing smaller or better was overlooked."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from configs import presets
from configs.errors import InputError
from configs.hardware import catalog
from configs.mesh import Mesh
from inference.planner import advise, slo
from inference.planner.advise import Workload
from inference.planner.deployment import Deployment
from inference.planner.slo import Targets

_70B = Deployment(presets.get("llama2-70b").config, catalog.get("h100"))


def test_a_busy_replica_by_hand():
    """In a request's life: the prompts of all `batch`, and its steps, one less than its tokens."""
    placed = dataclasses.replace(_70B, mesh=Mesh(model=4))
    found = slo.steady(placed, 8, 1024, 100)
    prefill, step = placed.prefill_time(1, 1024).total_s, placed.step_seconds(8, 1074)
    life = 8 * prefill + 99 * step
    assert found.requests_s == pytest.approx(8 / life)
    assert found.output_tok_s == pytest.approx(800 / life)
    assert found.tpot_s == pytest.approx((life - prefill) / 99)
    assert found.ttft_s == pytest.approx(prefill + step)
    one = slo.steady(placed, 8, 1024, 1)
    assert one.requests_s == pytest.approx(1 / prefill)  # a prompt gives a token, no step follows


def test_prompts_on_chips_of_their_own_by_hand():
    placed = dataclasses.replace(_70B, mesh=Mesh(model=4))
    found = slo.disaggregated(placed, 8, 1024, 100)
    prefill, step = placed.prefill_time(1, 1024).total_s, placed.step_seconds(8, 1074)
    assert found.apart.tpot_s == step
    assert found.apart.requests_s == pytest.approx(8 / (found.apart.ttft_s + 99 * step))
    assert found.saved_s == pytest.approx(3 * prefill)  # three others on the same chips
    assert found.transfer_bytes == placed.cache_bytes(1024)
    assert found.transfer_s == pytest.approx(found.transfer_bytes / 4 / 450e9)
    assert found.apart.ttft_s == pytest.approx(prefill + found.transfer_s + 2 * step)
    assert found.prefill_load == pytest.approx(found.apart.requests_s * prefill)
    both = dataclasses.replace(placed, mesh=Mesh(data=2, model=4))
    assert found.together == slo.steady(both, 8, 1024, 100)
    halves = slo.steady(dataclasses.replace(placed, replicas=2), 4, 1024, 100)
    assert found.together.requests_s == pytest.approx(halves.requests_s)
    three = slo.disaggregated(dataclasses.replace(both, replicas=2), 16, 1024, 100)
    life = three.apart.ttft_s + 99 * both.step_seconds(16, 1074)
    assert three.apart.requests_s == pytest.approx(2 * 16 / life)
    assert three.saved_s == pytest.approx(5 * prefill)
    pays = {n: slo.disaggregated(placed, 64, 4000, n).pays for n in (2, 90)}
    assert pays == {2: "TPOT", 90: "TPOT"}
    assert slo.disaggregated(placed, 2, 64, 90).pays == "nothing"  # no one to wait for
    small = Deployment(presets.get("llama3-8b").config, catalog.get("h100"))
    assert slo.disaggregated(small, 16, 2048, 256).pays == "rate"


def test_answers_meet_the_targets_and_one_more_sequence_does_not():
    targets = Targets(ttft=0.5, tpot=0.03)
    found = slo.answers(_70B, targets, 1024, 256, rate=20)
    assert [answer.mesh.num_chips for answer in found] == [2, 4, 8]
    for answer in found:
        placed = dataclasses.replace(_70B, mesh=answer.mesh)
        assert targets.is_met(slo.steady(placed, answer.batch, 1024, 256))
        more = answer.batch + 1
        fits = more <= placed.largest_batch(1024, 256)
        assert not (fits and targets.is_met(slo.steady(placed, more, 1024, 256)))
        assert answer.num_chips == answer.replicas * answer.mesh.num_chips
        assert answer.load == pytest.approx(20 / (answer.replicas * answer.replica.requests_s))
        assert answer.load <= 0.8 < 20 / max(1, answer.replicas - 1) / answer.replica.requests_s
    unasked = slo.answers(_70B, Targets(), 1024, 256)[0]
    assert (unasked.limited_by, unasked.replicas, unasked.load) == ("memory", 1, None)


def test_meshes_are_valid_and_linked():
    sizes = (1, 2, 4, 8)
    dense = [sides for sides in itertools.product(sizes, repeat=2) if math.prod(sides) <= 8]
    shapes = [(mesh.model, mesh.context) for mesh in slo.meshes(_70B)]
    assert shapes == sorted(dense, key=lambda shape: (math.prod(shape), shape[1]))
    mixture = Deployment(presets.get("mixtral-8x7b").config, catalog.get("h100"))
    assert {(mesh.model, mesh.expert, mesh.context) for mesh in slo.meshes(mixture)} == {
        sides for sides in itertools.product(sizes, repeat=3) if math.prod(sides) <= 8
    }
    chosen = Deployment(presets.get("deepseek-v3.2").config, catalog.get("h100"))
    assert {mesh.context for mesh in slo.meshes(chosen)} == {1}  # an indexer reads whole sequences


def test_cached_tokens_are_divided_where_that_serves_more():
    """Beyond 8 key/value heads chips along `model` hold copies."""
    small = Deployment(presets.get("llama3-8b").config, catalog.get("v5e"))
    answers = slo.answers(small, Targets(), 7000, 512)
    divided = {answer.mesh.num_chips: answer for answer in answers if answer.mesh.context > 1}
    assert len(divided) == sum(answer.mesh.context > 1 for answer in answers)
    assert set(divided) == {16, 32, 64}
    for chips, answer in divided.items():
        *others, last = (other for other in answers if other.mesh.num_chips == chips)
        assert last is answer and bool(others) == (chips < 64)  # more than there are heads
        assert all(other.replica.requests_s < answer.replica.requests_s for other in others)


def test_targets_that_no_mesh_meets():
    with pytest.raises(InputError, match=r"no mesh of h100 meets tpot=1e-06: the fastest is model"):
        slo.answers(_70B, Targets(tpot=1e-6), 1024, 256)
    small = dataclasses.replace(_70B, hardware=catalog.get("l4"))
    with pytest.raises(InputError, match="fits no mesh of l4: fewer bits or larger chips"):
        slo.answers(dataclasses.replace(small, config=presets.get("deepseek-v2").config),
                    Targets(tpot=1), 1024, 256)  # fmt: skip


@pytest.mark.parametrize("goal", advise.GOALS)
def test_advice_is_ranked_and_fits(goal):
    workload = Workload(1024, 256, goal)
    found = advise.advise(_70B, workload, 2)
    scores = [choice.score for choice in found.choices]
    assert scores == sorted(scores, reverse=True) and found.plain in [
        dataclasses.replace(choice, parts=()) for choice in found.choices
    ]
    for choice in found.choices:
        assert choice.deployment.row(choice.batch, 1024, 256).fits
        assert choice.deployment.mesh.num_chips * choice.deployment.replicas == 2
        for part in choice.parts:
            assert part.costs and (part.gain is None or part.gain > 0)
    assert found.choices[0].score > 2 * found.plain.score
    # Of bfloat16 one chip does not hold 70 B parameters.
    assert {reason.split(" weights")[0] for reason in found.excluded} == {"bfloat16"}
    assert all("138.0 GB of weights" in reason for reason in found.excluded)


def test_what_a_part_gains_is_what_its_absence_costs():
    found = advise.advise(_70B, Workload(1024, 256, "latency"), 2)
    best = found.choices[0]
    placed, formats = best.deployment, best.deployment.formats
    (without,) = (
        choice for choice in found.choices
        if choice.deployment.formats.weights.name == "bfloat16"
        and choice.deployment.formats.cache == formats.cache
        and choice.deployment.mesh == placed.mesh
        and bool(choice.deployment.speculation) == bool(placed.speculation)
    )  # fmt: skip
    (part,) = (part for part in best.parts if part.technique.endswith("weights"))
    assert part.gain == pytest.approx(best.score / without.score)


def test_given_formats_are_kept():
    fixed = _70B.formats
    found = advise.advise(_70B, Workload(1024, 256), 4, fixed)
    assert {choice.deployment.formats.weights.name for choice in found.choices} == {"bfloat16"}


def test_chips_that_only_decode_need_something_to_decode():
    with pytest.raises(InputError, match="at least 1, not 0"):
        slo.disaggregated(_70B, 8, 1024, 0)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_processes_leave_the_least_idle(seed):
    prefill_rate, decode_rate = np.random.default_rng(seed).uniform(0.1, 10, 2)
    best = slo.balance(prefill_rate, decode_rate)
    assert best.requests_s == min(best.prefill * prefill_rate, best.decode * decode_rate)
    for prefill in range(1, 9):
        for decode in range(1, 9):
            rate = min(prefill * prefill_rate, decode * decode_rate) / (prefill + decode)
            assert rate <= best.requests_s / (best.prefill + best.decode) + 1e-6
    swapped = slo.balance(decode_rate, prefill_rate)
    assert (swapped.prefill, swapped.decode) == (best.decode, best.prefill)


def test_a_connection_takes_once_what_several_chips_keep():
    deployment = Deployment(
        presets.get("deepseek-v3").config, catalog.get("h200"), mesh=Mesh(model=8)
    )
    once = deployment.cache_bytes(4096)
    assert deployment.chip_cache_bytes(4096) == once  # latents
    plans = [slo.disaggregated(deployment, 8, 4096, 100, rate) for rate in (None, 1e9)]
    assert [plan.transfer_bytes for plan in plans] == pytest.approx([8 * once, once])
    assert plans[1].transfer_s == pytest.approx(once / 1e9)


def test_a_slow_connection_takes_more_processes_for_prompts():
    deployment = Deployment(presets.get("llama3-8b").config, catalog.get("h100"))
    fast, slow = (slo.disaggregated(deployment, 64, 4096, 256, rate) for rate in (1e11, 1e8))
    assert slow.transfer_s == pytest.approx(1000 * fast.transfer_s)
    assert slow.transfer_s == pytest.approx(slow.transfer_bytes / 1e8)
    assert slow.apart.ttft_s > fast.apart.ttft_s and slow.apart.tpot_s == fast.apart.tpot_s
    assert slow.balanced.prefill / slow.balanced.decode > (
        fast.balanced.prefill / fast.balanced.decode
    )
    assert slo.balance(2.0, 1.0) == slo.Balance(1, 2, 2.0)
