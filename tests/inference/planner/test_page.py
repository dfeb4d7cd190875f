"""The page in a real browser: its figures are the planner's, its controls move them, it asks no
network.
"""

import dataclasses
import html
import itertools
import json
import math
import random
import re
import shutil
import subprocess

import pytest

from configs import presets
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.compressed import Compressed
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import Mixer
from configs.kinds.latent import Indexer, Latent
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from configs.precision import CACHE_FORMATS, FORMATS, PLANNED
from inference.planner import cost, request_cost, weights
from inference.planner.cost import Precision
from inference.planner.deployment import Deployment
from inference.planner.page import render
from inference.planner.speculation import Speculation

BROWSER = next(filter(None, map(shutil.which, render.BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser: none of {', '.join(render.BROWSERS)} is installed"
)

_PRESETS = {name: preset.config for name, preset in (presets.NAMES | presets.PLANNED).items()}
# What no preset combines: float32, windows beside an indexer without latent queries, head norms,
# first tokens, chunks, entries of several tokens.
_HEADS = Attention(num_heads=12, num_kv_heads=4, head_width=40, qk_norm="head")
_SPARSE = Latent(12, 64, 8, 32, 40, indexer=Indexer(3, 24, 100))
_ENTRIES = Compressed(
    12, 40, 32, 8, groups=4, group_rank=24, window=200, stride=4, overlaps=True,
    indexer=Indexer(3, 24, 100),
)  # fmt: skip
_ODD = ModelConfig(
    "odd", "llama", 999, width=96, num_layers=9, max_context=5000, dtype="float32",
    post_norms=True, tied=True, pattern=tuple(
        LayerSpec(mixer, Gated(160))
        for mixer in (
            dataclasses.replace(_HEADS, window=300), _SPARSE, _HEADS,
            dataclasses.replace(_HEADS, window=400, first_tokens=8),
            dataclasses.replace(_HEADS, window=500, chunked=True), _ENTRIES,
            dataclasses.replace(_ENTRIES, stride=128, overlaps=False, indexer=None),
        )
    ),
)  # fmt: skip
_MIXED = (
    dataclasses.replace(  # as many key/value heads as a layer has: the page cannot ask for others
        _ODD, pattern=(_ODD.pattern[0], LayerSpec(Attention(12, 6, 20), Gated(144)))
    )
)
MODELS = _PRESETS | {"odd": _ODD, "mixed": _MIXED}
# What no data sheet says: a machine as it was measured, and one of which no rate is known.
_MEASURED = HardwareSpec(
    "measured", 9e10, 7e11, {"bfloat16": 5e13, "float32": 2e13}, link_bandwidth=1e11,
    link_latency_s=2e-6, overhead_s=3e-4, gamma=0.3, bandwidth_share=0.8, rate_share=0.6,
    half_rows=5.0, attention_share=0.5, cache_share=0.4, price_per_hour=1.75, link_axes=3,
)  # fmt: skip
HARDWARE = catalog.NAMES | {
    "measured": _MEASURED,
    "unknown": HardwareSpec("unknown", 2e10, 3e10, {}),
}


def browse(folder, script, settings="", *, width=1280):
    """What `script`, run at the end of the page, leaves in `results`."""
    text = render.render(MODELS, HARDWARE)
    ending = (
        "<script>const results = [];\n"
        "addEventListener('securitypolicyviolation', (e) => results.push(e.violatedDirective));\n"
        "addEventListener('error', (e) => results.push(`error: ${e.message}`));\n"
        "const finish = () => { const pre = document.createElement('pre'); pre.id = 'results';\n"
        "pre.textContent = JSON.stringify(results, (key, value) => key === 'deployment' ? undefined"
        " : value === Infinity ? 'inf' : value); document.body.append(pre); };\n"
        f"{script}</script></body>"
    )
    file = folder / "page.html"
    file.write_text(text.replace("</body>", ending), encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
         f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom",
         f"{file.as_uri()}#{settings}"],
        capture_output=True, text=True, timeout=120, encoding="utf-8",
    )  # fmt: skip
    found = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page left no results\n{done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


def close(found, expected):
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        number = math.inf if found == "inf" else found
        return number == pytest.approx(expected, rel=1e-6)
    return found == expected


# --- the planner's side ---------------------------------------------------------------------------


def deployment(point):
    config = MODELS[point["model"]]
    if len({getattr(mixer, "num_kv_heads", None) for mixer in config.mixers(Mixer)} - {None}) == 1:
        config = config.with_kinds(num_kv_heads=point["kv_heads"])
    hardware = HARDWARE[point["hardware"]]
    if point["price"] is not None:
        hardware = dataclasses.replace(hardware, price_per_hour=point["price"])
    weights, cache = FORMATS[point["weights"]], CACHE_FORMATS[point["cache"]]
    drafts = [point[name] for name in ("drafts", "acceptance", "draft_cost")]
    drafts.append(point.get("draft_size", 0))  # which no control sets
    return Deployment(
        config, hardware, Precision(weights, cache, FORMATS[config.dtype]),
        Mesh(point.get("data", 1), point["chips"], point["expert"], point["context_chips"]),
        point["replicas"],
        Speculation(*drafts) if drafts[0] else None, point["accounting"], snapshots=None,
        samples=point["samples"],
    )  # fmt: skip


def figures(point):
    """All that the planner says of a point, under the page's names."""
    plan, (batch, context, answer, thinking) = deployment(point), map(point.get, LENGTHS)
    new = answer + thinking
    middle = plan.mean_length(context, new)
    found = dataclasses.asdict(plan.row(batch, context, new))
    mixtures = [
        layer.ffn.experts for layer in plan.config.layers if layer.ffn and layer.ffn.experts
    ]
    tokens = plan.decode_work(batch, middle).num_tokens
    found |= {
        "active_parameters": weights.num_active_parameters(plan.config),
        "visited_experts": cost.num_visited(*max(mixtures), tokens) if mixtures else None,
        "largest_batch": plan.largest_batch(context, new),
        "chip_weight_bytes": plan.chip_weight_bytes,
        "chip_sequence_bytes": plan.chip_cache_bytes(context + new),
        "memory_room": plan.memory_room,
        "tokens_per_step": plan.tokens_per_step,
        "ridge": plan.hardware.ridge(plan.formats.weights.compute),
    }
    if new:
        request = request_cost.request_cost(plan, batch, context, new, thinking)
        found |= {f"request.{name}": value for name, value in dataclasses.asdict(request).items()}
    prompt = max(1, context - (point["samples"] > 1))
    phases = {
        "decode": (plan.decode_time(batch, middle), plan.decode_operations(batch, middle)),
        "prefill": (
            plan.prefill_time(batch, prompt),
            cost.step_operations(plan.config, plan.prefill_work(batch, prompt), plan.formats),
        ),
    }
    for phase, (time, operations) in phases.items():
        found |= {f"{phase}.{name}": value for name, value in dataclasses.asdict(time).items()}
        found[f"{phase}.bound"] = time.bound
        found |= by_name(phase, map(dataclasses.asdict, operations))
    return found


def by_name(phase, operations):
    """Costs of a step's operations, those of one name together."""
    found = {}
    for operation, part in itertools.product(operations, PARTS):
        key = f"{phase}.{operation['name']}.{part}"
        found[key] = found.get(key, 0) + operation[part]
    return found


PLAN_SCRIPT = """const planned = (p) => ({...plan(CATALOG, p),
  request: newTokensOf(p) ? {...requestCost(CATALOG, p), thinking_tokens: p.thinking_tokens,
    equal_thinking_tokens: equalThinkingTokens(CATALOG, p)} : null});"""


def flat(found):
    """A plan of the page under the same names."""
    flat = {name: value for name, value in found.items() if not isinstance(value, dict | list)}
    flat |= {f"request.{name}": value for name, value in (found["request"] or {}).items()}
    for phase in ("decode", "prefill"):
        flat |= {f"{phase}.{name}": value for name, value in found[phase].items()}
        flat |= by_name(phase, found[f"{phase}_operations"])
    return flat


LENGTHS = ("batch", "context", "new_tokens", "thinking_tokens")
PARTS = ("layers", "flops", "weight_bytes", "cache_bytes", "activation_bytes")


def points(count, seed):
    """Random points, each model and each chip among them."""
    rng = random.Random(seed)
    models, chips = itertools.cycle(MODELS), itertools.cycle(HARDWARE)
    found = []
    while len(found) < count:
        config, hardware = MODELS[next(models)], next(chips)
        longest = min(config.max_context, 1 << 18)
        new = rng.choice((0, 1, 37, int(longest ** rng.uniform(0.1, 0.8))))
        thinking = rng.choice((0, int((longest - new) ** rng.uniform(0, 0.8))))
        told = render.describe(config)
        least = min(told["divided"], default=1)
        heads = [n for n in range(1, least + 1) if least % n == 0]
        kv_heads = [n for n in heads if told["most_kv_heads"] % n == 0]
        linked = HARDWARE[hardware].link_bandwidth > 0
        experts = [n for n in (1, 2, 4, 8) if all(e % n == 0 for e in told["num_experts"])]
        point = {
            "model": next(name for name, other in MODELS.items() if other is config),
            "hardware": hardware,
            "batch": int(4000 ** rng.random()),
            "context": int((longest - new - thinking) ** rng.random()),
            "new_tokens": new,
            "thinking_tokens": thinking,
            "samples": rng.choice((1, 1, 2, 7, 64)),
            "kv_heads": rng.choice([told["kv_heads"], rng.choice(kv_heads)]),
            "weights": rng.choice(PLANNED),
            "cache": rng.choice(list(CACHE_FORMATS)),
            "data": rng.choice((1, 1, 2, 3)),
            "chips": rng.choice((1, *heads)) if linked else 1,
            "expert": rng.choice(experts) if linked and told["num_experts"] else 1,
            "context_chips": rng.choice((1, 2, 4)) if linked and told["divides_context"] else 1,
            "replicas": rng.choice((1, 3)),
            "price": rng.choice((None, 2.5)),
            "drafts": rng.choice((0, 0, 1, 4, 7)),
            "acceptance": rng.random(),
            "draft_cost": rng.random() / 4,
            "draft_size": rng.choice((0, 0.1)),
            "accounting": rng.choice(("exact", "exact", "lecture")),
        }
        while not is_possible(point):
            if point["chips"] == 1:
                point["context_chips"] //= 2
                continue
            point["chips"] = rng.choice([n for n in (1, *heads) if n < point["chips"]])
        found.append(point)
    return found


def is_possible(point):
    try:
        deployment(point)
    except ValueError:
        return False
    return True


# --- the same figures -----------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize("rounds, seed", [(3, 3), pytest.param(12, 4, marks=pytest.mark.long)])
def test_the_pages_figures_are_the_planners(rounds, seed, tmp_path):
    asked = points(rounds * len(MODELS), seed)
    script = (
        f"{PLAN_SCRIPT} for (const p of {json.dumps(asked)}) results.push(planned(p)); finish();"
    )
    answers = browse(tmp_path, script)
    assert len(answers) == len(asked)
    wrong = [
        f"{point}: {name} is {found.get(name)}, the planner's {expected}"
        for point, found in zip(asked, map(flat, answers), strict=True)
        for name, expected in figures(point).items()
        if not close(found.get(name), expected)
    ]
    assert not wrong, "\n".join(wrong[:8])
    assert {p["model"] for p in asked} == set(MODELS), "every model is asked"
    assert {found["bound"] for found in answers} >= {"memory", "compute", "collectives"}
    assert {found["fits"] for found in answers} == {True, False}
    kept = {p["model"] for p, found in zip(asked, answers, strict=True) if found["snapshot_bytes"]}
    assert kept == {name for name, config in MODELS.items() if config.has_states} != set()


@pytest.mark.long
@needs_browser
def test_what_may_be_chosen_is_what_the_mesh_allows(tmp_path):
    script = """
    for (const [name, model] of Object.entries(CATALOG.models))
      for (const kv of divisors(model.most_kv_heads)) results.push([name, kv,
        validChips(model, CATALOG.hardware.h200, kv), validExperts(model, CATALOG.hardware.h200),
        (kv === model.kv_heads ? [1, 2] : []).map((chips) =>
          [chips, validContexts(model, CATALOG.hardware.h200, chips)])]);
    finish();"""
    base = {**points(1, 0)[0], "hardware": "h200", "price": None}
    for name, kv_heads, chips, experts, contexts in browse(tmp_path, script):
        config = MODELS[name]
        point = {**base, "model": name, "kv_heads": kv_heads, "expert": 1}
        valid = [n for n in range(1, 257) if is_possible({**point, "chips": n})]
        assert chips == valid, (name, kv_heads)
        most = max(
            (layer.ffn.experts[0] for layer in config.layers if layer.ffn and layer.ffn.experts),
            default=1,
        )
        point["chips"] = 1
        assert experts == [n for n in range(1, most + 1) if is_possible({**point, "expert": n})]
        for point["chips"], found in contexts:
            valid = [n for n in range(1, 65) if is_possible({**point, "context_chips": n})]
            assert found == valid or point["chips"] not in chips, (name, point["chips"])


# --- what is shown --------------------------------------------------------------------------------

_LOOK = """
const box = (query) => { const found = document.querySelector(query);
  return found && Object.fromEntries([...found.attributes].map((a) => [a.name, a.value])); };
const look = (step) => results.push({ step, state: { ...state },
  figures: Object.fromEntries([...document.querySelectorAll('data')].map((d) =>
    [d.id, [d.value, d.textContent]])),
  weights: box('#memory [data-part=weights]'), cache: box('#memory [data-part=cache]'),
  capacity: box('#memory .rule'), prefill: box('#timeline [data-part=prefill]'),
  decode: box('#timeline [data-part=decode]'), curve: box('[data-curve=output_tok_s]')?.d,
  points: ['output_tok_s', 'step_s'].map((key) => box(`[data-point=${key}]`)),
  ticks: [...document.querySelectorAll('.tick')].map((tick) => { const l = tick.firstChild;
    return [tick.dataset.axis, Number(tick.dataset.value), +l.getAttribute('x1'),
            +l.getAttribute('y1')]; }),
  dots: document.querySelectorAll('#roofline .dot').length,
  hidden: ['expert', 'context_chips'].map((name) =>
    document.querySelector(`[data-control=${name}]`).hidden),
  request: document.getElementById('request_note').textContent,
  command: document.getElementById('command').textContent });
const slide = (id, stop) => { const range = document.getElementById(id);
  range.value = stop; range.dispatchEvent(new Event('input', { bubbles: true })); };
const write = (id, text) => { const field = document.getElementById(id); field.value = text;
  field.dispatchEvent(new Event('input', { bubbles: true })); };
const pick = (name, value) =>
  document.querySelector(`input[name=${name}][value=${value}]`).click();
"""
_MOVES = {
    "start": "",
    "batch": "slide('batch', 11);",
    "context": "slide('context', 12);",
    "typed": "write('context-typed', '1777'); write('batch-typed', '77');",
    "new tokens": "slide('new_tokens', 9);",
    "kv heads": "slide('kv_heads', 2);",
    "weights": "write('weights', 'int4');",
    "cache": "pick('cache', 'int8');",
    "chips": "slide('chips', 2);",
    "context chips": "slide('context_chips', 2);",
    "hardware": "write('hardware', 'h200');",
    "replicas": "write('replicas-typed', '3');",
    "price": "write('price', '3.25');",
    "samples": "slide('samples', 5);",
    "thinking": "write('thinking_tokens-typed', '1000');",
    "drafts": "slide('drafts', 4); slide('acceptance', 70); slide('draft_cost', 5);",
    "lecture": "pick('accounting', 'lecture');",
    "too large": "pick('accounting', 'exact'); write('batch-typed', '4000');",
    "mixture": "write('model', 'deepseek-v3.2'); slide('expert', 4);",
    "states": "write('model', 'mamba2-2.7b');",
}


# Figures of the page that only one request has.
_OF_REQUEST = {
    name: f"request.{name}"
    for name in ("answer_s", "chip_s", "dollars", "tokens", "cache_share", "equal_thinking_tokens")
} | {"request_bytes": "request.cache_bytes"}


def position(ticks, axis, value, side):
    """Where a value lies on a logarithmic axis, told from two of its ticks."""
    marks = [(math.log(tick[1]), tick[side]) for tick in ticks if tick[0] == axis]
    (low, start), (high, end) = marks[0], marks[-1]
    return start + (math.log(value) - low) / (high - low) * (end - start)


@needs_browser
def test_controls_move_figures_bars_and_curves(tmp_path):
    script = _LOOK + "".join(f"{move} look('{step}');" for step, move in _MOVES.items())
    looks = browse(tmp_path, script + "finish();", "model=llama3-8b&hardware=h100")
    assert [look["step"] for look in looks] == list(_MOVES)
    for look in looks:
        expected = figures(look["state"])
        for name, (value, shown) in look["figures"].items():
            check_figure(look, name, value, shown, expected)
        check_pictures(look, expected)
    for before, after in itertools.pairwise(looks):
        assert before["state"] != after["state"], after["step"]
        assert before["figures"] != after["figures"], after["step"]
        drawn = [[look["curve"], look["points"], look["ticks"]] for look in (before, after)]
        assert drawn[0] != drawn[1] or after["step"] == "price", after["step"]


def check_figure(look, name, value, shown, expected):
    """The exact figure, and its first digits as text."""
    if name == "chip_cache_bytes":
        wanted = expected["chip_bytes"] - expected["chip_weight_bytes"]
    elif name == "capacity_bytes":
        wanted = HARDWARE[look["state"]["hardware"]].memory_bytes
    else:
        wanted = expected[_OF_REQUEST.get(name, name)]
    where = f"{name} after {look['step']}: {shown}"
    if name == "bound":
        assert value == wanted, where
    elif wanted is None:
        assert (value, shown) == ("", "–"), where
    else:
        assert float(value) == pytest.approx(wanted, rel=1e-6), where
        number, unit = re.fullmatch(r"\$?([\d.,]+) ?(.*)", shown).groups()
        factor = {"s": 1, "ms": 1e-3, "µs": 1e-6, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
        factor["%"] = 1e-2
        amount = float(number.replace(",", "")) * factor.get(unit, 1)
        assert amount == pytest.approx(wanted, rel=5.1e-3), where


def check_pictures(look, expected):
    """Bars as long as their figures, points where the axes say."""
    weights, cache = (float(look[name]["width"]) for name in ("weights", "cache"))
    chip = expected["chip_weight_bytes"]
    capacity = HARDWARE[look["state"]["hardware"]].memory_bytes
    assert cache / weights == pytest.approx(expected["chip_bytes"] / chip - 1, rel=1e-3)
    assert float(look["capacity"]["x1"]) / weights == pytest.approx(capacity / chip, rel=1e-3)
    whole = expected["request_s"] or expected["ttft_s"]
    first, rest = (float(look[name]["width"]) for name in ("prefill", "decode"))
    assert first / (first + rest + 2) == pytest.approx(expected["ttft_s"] / whole, abs=0.01)
    batch = look["state"]["batch"]
    for point, axis in zip(look["points"], ("output_tok_s", "step_s"), strict=True):
        assert float(point["cx"]) == pytest.approx(
            position(look["ticks"], "batch", batch, 2), abs=1
        )
        marks = [tick for tick in look["ticks"] if tick[0] == axis]
        if len(marks) > 1:
            at = position(look["ticks"], axis, expected[axis], 3)
            assert float(point["cy"]) == pytest.approx(at, abs=1), (look["step"], axis)
    state = look["state"]
    decoded = state["new_tokens"] + state["thinking_tokens"] - (state["samples"] == 1)
    steps = math.ceil(decoded / expected["tokens_per_step"])
    assert look["request"].startswith(f"{steps:,} steps after the prefill"), look["step"]
    computing = [name for name, value in expected.items() if name.endswith(".flops") and value]
    assert look["dots"] == len(computing), look["step"]
    described = render.describe(MODELS[look["state"]["model"]])
    assert look["hidden"] == [not described["num_experts"], not described["divides_context"]]


# --- the address, and what else a page owes -------------------------------------------------------


@needs_browser
def test_the_address_holds_the_state(tmp_path):
    script = (
        _LOOK
        + """
    look('opened'); slide('batch', 5); slide('drafts', 3); pick('cache', 'fp8');
    setTimeout(() => {
      results.push([state, readAddress(), location.hash]);
      addEventListener('hashchange', () => { look('followed'); finish(); });
      location.hash = '#model=llama2-13b&batch=3';
    }, 500);"""
    )
    given = "model=mixtral-8x7b&hardware=a100&batch=9&context=700&new_tokens=33&chips=2&expert=4"
    given += "&context_chips=7&accounting=lecture"
    opened, (state, read, address), followed = browse(tmp_path, script, given)
    for setting in given.split("&"):
        key, value = setting.split("=")
        assert str(opened["state"][key]) == value
    assert "--mesh=model=2,expert=4,context=7" in opened["command"]
    assert state == read
    assert "drafts=3" in address and "cache=fp8" in address
    assert (followed["state"]["model"], followed["state"]["batch"]) == ("llama2-13b", 3)
    step_s = float(followed["figures"]["step_s"][0])
    assert step_s == pytest.approx(figures(followed["state"])["step_s"], rel=1e-6)


@needs_browser
@pytest.mark.parametrize(
    "settings",
    ["model=nope&hardware=<b>&batch=-5&context=1e99&chips=7&expert=9&weights=float7&price=-1",
     "batch=NaN&context=&new_tokens=1e9&kv_heads=3&drafts=99&acceptance=7&accounting=__proto__",
     "model=constructor&hardware=unknown&chips=8&batch=2.6", "%%%=&&="],
)  # fmt: skip
def test_an_impossible_address_becomes_a_possible_plan(tmp_path, settings):
    (look,) = browse(tmp_path, _LOOK + "look('opened'); finish();", settings)
    state = look["state"]
    assert state["model"] in MODELS and state["hardware"] in HARDWARE
    assert float(look["figures"]["step_s"][0]) == pytest.approx(figures(state)["step_s"], rel=1e-6)


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_every_control_has_a_name_and_nothing_is_loaded(tmp_path, width):
    script = """
    for (const control of document.querySelectorAll('input, select'))
      if (!control.labels.length && !control.ariaLabel) results.push(control.outerHTML);
    for (const entry of performance.getEntriesByType('resource')) results.push(entry.name);
    document.querySelector('details').open = true;
    refresh();
    for (const part of document.querySelectorAll('main > *, .charts > *'))
      if (part.getBoundingClientRect().right > innerWidth) results.push(part.className);
    if (document.documentElement.scrollWidth > innerWidth) results.push('too wide');
    setTimeout(finish, 300);"""
    assert browse(tmp_path, script, width=width) == []


@needs_browser
def test_no_label_lies_over_another(tmp_path):
    """Of any model, in a window where there is little room."""
    script = """
    for (const model of Object.keys(CATALOG.models)) for (const batch of [256]) {
      state = settled({ ...CATALOG.start, model, batch });
      refresh();
      const texts = [...document.querySelectorAll("svg text")].filter((text) => text.textContent);
      const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
      for (const [n, [name, a]] of boxes.entries()) for (const [other, b] of boxes.slice(n + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 3) results.push([model, batch, name, other]);
      }
    }
    finish();
    """
    assert browse(tmp_path, script, width=900) == []


def test_the_page_asks_no_network():
    text = render.render()
    assert not re.search(r"https?:|//[a-z]+\.|@import|\burl\(|\bfetch\(|XMLHttp|WebSocket", text)
    assert not re.search(r'<(?:script|img|iframe)[^>]*\ssrc=|<link[^>]*href="(?!data:,")', text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy and policy[1].startswith("default-src 'none'; script-src 'unsafe-inline';")
    assert "connect-src" not in policy[1]


def test_names_cannot_end_the_data_they_stand_in():
    config = dataclasses.replace(_ODD, name="</script><script>alert(1)")
    text = render.render({config.name: config}, HARDWARE)
    assert "<script>alert" not in text
    data = re.search(r'<script type="application/json" id="catalog">(.*?)</script>', text)
    assert list(json.loads(data[1])["models"]) == [config.name]
