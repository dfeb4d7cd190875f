"""Which shape `plan` names for a target, and which size for a draft."""

import json
import subprocess
import sys

import pytest

from configs import presets
from configs.errors import InputError
from configs.hardware import catalog
from configs.kinds.experts import Experts
from configs.model import LayerSpec
from inference.planner.deployment import Deployment
from inference.prune import advice, budget, shapes
from inference.prune.budget import Budget
from scripts import plan, prune
from tests.inference.quantize import models
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

CHIP = catalog.get("h100")
SMOLLM = presets.get("smollm2-135m").config


def within(config, size):
    return budget.within(
        config, size, {}, lambda count: tuple(range(count)), lambda *shape: True, most_axes=1
    )


def test_the_child_meets_a_latency_and_has_the_most_parameters():
    target = Budget(CHIP, latency_s=0.7 * Budget(CHIP, params=1).step_s(SMOLLM))
    result = advice.advise("smollm2-135m", SMOLLM, target)
    parent, child = result.options[:2]
    assert not parent.meets and child.meets and child.step_s <= target.latency_s
    matches = within(SMOLLM, target)
    assert child.parameters == max(shapes.num_parameters(match.config) for match in matches)
    by_weights = {option.weights: option for option in result.options if option.name == "parent"}
    assert by_weights["bfloat16"].step_s > by_weights["int8"].step_s
    equal = next(option for option in result.options if option.name == "child of int8 bytes")
    assert 0.9 * by_weights["int8"].weight_bytes < equal.weight_bytes
    assert equal.weight_bytes <= by_weights["int8"].weight_bytes
    assert result.is_quantizing_enough == any(
        option.meets for option in by_weights.values() if option.weights != "bfloat16"
    )


def test_the_command_makes_the_shape(monkeypatch, capfd, tmp_path):
    args = f"--model={apps.TINY}", "--advise", "--target_params=0.7"
    advised = apps.call(plan, monkeypatch, capfd, *args, "--json")
    assert advised.status == 0, advised.err
    result = json.loads(advised.out)["smaller"]
    command, child = result["command"].split(), result["options"][1]
    assert command[:3] == ["python", "-m", "scripts.prune"]
    text = tmp_path / "text.txt"
    text.write_text("Where does the workload wait? It waits for memory.\n" * 60)
    names = {"--text=FILE": f"--text={text}", command[-1]: f"--output={tmp_path / 'child'}"}
    command = [names.get(word, word) for word in command[3:]]
    sizes = "--samples=4", "--sample_tokens=32", "--json"
    pruned = apps.call(prune, monkeypatch, capfd, *command, *sizes)
    assert pruned.status == 0, pruned.err
    assert json.loads(pruned.out)["parameters"] == child["parameters"]
    shown = apps.call(plan, monkeypatch, capfd, *args).out
    assert result["command"] in shown and "--target_params=0.7: " in shown


def test_drafts_of_several_sizes_are_compared_without_jax():
    deployment = Deployment(SMOLLM, CHIP)
    drafts = advice.drafts("smollm2-135m", deployment, 1, 512, False)
    sizes = [draft.drafted.speculation.size for draft in drafts]
    assert len(drafts) >= 3 and sizes == sorted(sizes, reverse=True)
    best = max(drafts, key=lambda draft: draft.drafted.tok_s)
    step_s = deployment.decode_time(1, 512).total_s
    assert best.drafted.tok_s == pytest.approx(best.drafted.speedup / step_s)
    assert best.drafted.speedup > 1 and best.command.endswith("--native")
    code = (
        "import sys; sys.argv=['plan','--model=smollm2-135m','--speculate=auto']; from scripts "
        "import common, plan; sys.modules['jax'] = None; common.run(plan.main)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=apps.ROOT, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert best.command in ran.stdout and "ratio to no drafts" in ran.stdout


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v2-lite", "mamba2-2.7b"])
def test_the_best_draft_is_neither_the_largest_nor_the_smallest(name):
    """Larger drafts take longer, and smaller ones are rejected more often."""
    drafts = advice.drafts(name, Deployment(presets.get(name).config, CHIP), 1, 512, False)
    rates = [draft.drafted.tok_s for draft in drafts]
    assert len(rates) >= 6 and 0 < rates.index(max(rates)) < len(rates) - 1
    acceptances = [draft.drafted.speculation.acceptance for draft in drafts]
    assert acceptances == sorted(acceptances, reverse=True) and len(set(acceptances)) >= 4
    assert all(set(draft.widths) == set(drafts[0].widths) for draft in drafts)


def test_mixtures_of_few_sizes_get_the_nearest_shape_below_a_budget():
    config = models._of((LayerSpec(models._ATTENTION, Experts(2, 1, 4)),))
    parameters = shapes.num_parameters(config)
    for share in (0.95, 0.8, 0.6):
        matches = within(config, Budget(CHIP, params=share))
        assert matches
        for match in matches:
            assert shapes.num_parameters(match.config) <= share * parameters
    with pytest.raises(InputError, match=r"^--target_params=0\.01: .*smallest is --target_params="):
        within(config, Budget(CHIP, params=0.01))


def test_a_family_without_a_config_gets_no_advice():
    """Since transformers cannot say its shapes."""
    config = presets.get("character-ai").config
    message = r"^--target_params=0\.5: no config\.json says a smaller shape of character-ai; give "
    with pytest.raises(InputError, match=message):
        advice.advise("character-ai", config, Budget(CHIP, params=0.5))


def test_the_smallest_budget_that_an_error_names_is_met():
    with pytest.raises(InputError) as error:
        within(SMOLLM, Budget(CHIP, params=0.001))
    share = float(str(error.value).partition("smallest is --target_params=")[2].partition(",")[0])
    assert within(SMOLLM, Budget(CHIP, params=share))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--target_latency_ms=1"], "--target_latency_ms needs --advise"),
        (["--advise", "--target_params=2"], "--target_params=2.0: must be a share"),
        (["--advise", "--target_params=0.5", "--target_latency_ms=1"], "give one of them"),
        (["--advise", "--target_params=0.5", "--chips=2"], "--chips: the shape for a target"),
        (["--advise", "--target_params=0.5", "--weights=int8"], "--weights: the shape for a"),
        (["--advise", "--target_latency_ms=9e3"], "meets it as it is; give less"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(monkeypatch, capfd, args, message):
    ran = apps.call(plan, monkeypatch, capfd, "--model=smollm2-135m", *args)
    assert ran.status == 1 and ran.out == "" and message in ran.err.splitlines()[-1]
