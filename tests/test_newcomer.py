"""A mixer, a feed-forward and a family of checkpoints that nobody else has heard of: written here,
registered, and run by everything. docs/add_a_mixer.md tells this file in prose.
"""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.cache import CacheSpec, recurrent
from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.kinds.attention import Attention
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.operations import Move, Operation
from configs.kinds.params import Declared, ParamInfo, Widths
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import names, resolve
from inference.engine import Engine
from inference.families import families
from inference.families.family import Family, ModelFields
from inference.families.shared.config_keys import Keys
from inference.planner import cost, weights
from inference.planner.cost import Work
from inference.planner.deployment import Deployment
from inference.planner.page import render
from inference.request import SamplingParams
from layers import decoder, registry
from layers import params as parameters
from layers.kv_cache import Recurrent, with_states
from layers.linear import linear
from layers.params import Params
from layers.ragged import contiguous
from layers.registry import StepContext
from tests import compiling
from tests.inference.planner import test_page

# --- what the kinds declare -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MinGru(Mixer, name="min_gru"):
    """minGRU (Feng et al. 2024, arXiv 2410.01201): h = (1 - z) h + z c, where the gate z and the
    candidate c are projections of the token alone.

    Attributes:
        width: elements of the state.
    """

    width: int

    def parameters(self, model: Widths) -> Declared:
        """Fused projections [2 width, D] in the order gate, candidate; the way out [D, width]."""
        W, D = self.width, model.width
        return {
            "in": ParamInfo((2 * W, D), model.dtype, ("heads", "embed"), stacked=(W, W)),
            "out": ParamInfo((D, W), model.dtype, ("embed", "heads")),
        }

    def cache(self, model: Widths) -> CacheSpec:
        """A state of fixed size."""
        return recurrent((self.width,))

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the state: read and written once a step, and once more a draft."""
        W = self.width
        moved = ((2 * W, ("sequences",)), (W, ("drafts",)))
        scan = Operation(
            "scan", "other", flops=((4 * W, ("queries",)),),
            moves=(Move("cache", moved, W, "float32"),),
        )  # fmt: skip
        return (*super().operations(model, stored), scan)


@dataclasses.dataclass(frozen=True)
class Maxout(FeedForward, name="maxout"):
    """Maxout (Goodfellow et al. 2013, arXiv 1302.4389): down(max(one x, other x)).

    Attributes:
        width: F.
    """

    width: int

    def parameters(self, model: Widths) -> Declared:
        """Two projections up in one matrix [2F, D], and the way down [D, F]."""
        F, D = self.width, model.width
        return {
            "up": ParamInfo((2 * F, D), model.dtype, ("ffn", "embed"), stacked=(F, F)),
            "down": ParamInfo((D, F), model.dtype, ("embed", "ffn")),
        }


# --- what applies them ----------------------------------------------------------------------------


def apply_min_gru(
    params: Params,
    config: ModelConfig,
    kind: MinGru,
    x_TD: jax.Array,
    leaf: Recurrent | None,
    context: StepContext,
) -> tuple[jax.Array, Recurrent | None]:
    """One layer: float32 [T, D], and the states; without a cache rows begin at zero."""
    ragged = context.ragged
    gate_TX, candidate_TX = jnp.split(linear(x_TD, params["in"]), 2, axis=1)
    slots = [jnp.broadcast_to(r.slot_Y[:, None], r.position_YW.shape) for r in ragged.rectangles]
    slot_T = ragged.pack(slots)
    states = jnp.zeros((x_TD.shape[0], 1, kind.width)) if leaf is None else leaf.states[0]

    def feed(states: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        slot, position, is_valid, z_X, c_X = token
        before_X = states[slot, (position - 1) % states.shape[1]]
        after_X = (1 - z_X) * before_X + z_X * c_X
        at = slot, position % states.shape[1]
        return states.at[at].set(jnp.where(is_valid, after_X, states[at])), after_X

    tokens = slot_T, ragged.position_T, ragged.valid_T, jax.nn.sigmoid(gate_TX), candidate_TX
    states, h_TX = jax.lax.scan(feed, states, tokens)
    out_TD = linear(h_TX.astype(config.dtype), params["out"])
    return out_TD, with_states(leaf, states)


def apply_maxout(
    params: Params, config: ModelConfig, kind: Maxout, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, None]:
    """The larger of two projections of each element: float32 [T, D]; it is no mixture."""
    one_TF, other_TF = jnp.split(linear(x_TD, params["up"]), 2, axis=1)
    return linear(jnp.maximum(one_TF, other_TF).astype(config.dtype), params["down"]), None


registry.register(MinGru, apply_min_gru)
registry.register(Maxout, apply_maxout)


# --- its checkpoints ------------------------------------------------------------------------------


def build(keys: Keys) -> ModelFields:
    """Every other layer keeps a state, the others attend."""
    attention = Attention(num_heads=4, num_kv_heads=2, head_width=8)
    ffn = Maxout(keys.integer("intermediate_size"))
    return {
        "vocab_size": keys.integer("vocab_size"),
        "width": keys.integer("hidden_size"),
        "num_layers": keys.integer("num_hidden_layers"),
        "max_context": keys.integer("max_position_embeddings"),
        "pattern": (LayerSpec(MinGru(keys.integer("state_size")), ffn), LayerSpec(attention, ffn)),
    }


NAMES = {
    "embed/table": ("model.embed.weight",),
    "final_norm": ("model.norm.weight",),
    "head/table": ("head.weight",),
    "mixer_norm": ("norm_1.weight",),
    "mixer/in": ("gru.gate.weight", "gru.candidate.weight"),
    "mixer/qkv": ("attn.q.weight", "attn.k.weight", "attn.v.weight"),
    "mixer/out": ("mix.out.weight",),
    "ffn_norm": ("norm_2.weight",),
    "ffn/up": ("mlp.one.weight", "mlp.other.weight"),
    "ffn/down": ("mlp.down.weight",),
}
FAMILY = Family(
    name="newcomer",
    architecture="NewcomerForCausalLM",
    read=build,
    write=lambda config: {},
    mixers=(MinGru, Attention),
    tensors=NAMES,
)

# --- and everything runs them ---------------------------------------------------------------------

_KEYS = {
    "architectures": ["NewcomerForCausalLM"], "vocab_size": 61, "hidden_size": 16,
    "intermediate_size": 24, "state_size": 20, "num_hidden_layers": 4,
    "max_position_embeddings": 128, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _family(monkeypatch):
    monkeypatch.setitem(families.ALL, "newcomer", FAMILY)


@pytest.fixture(scope="module")
def values():
    """Of the tiny model, under our own paths."""
    config = FAMILY.model(Keys(_KEYS), "tiny")
    config = dataclasses.replace(config, dtype="float32")
    return config, parameters.init(config.parameters(), seed=1)


@pytest.fixture
def checkpoint(values, tmp_path):
    """A directory as somebody else would write it: stacked parameters apart."""
    config, params = values
    declared, tensors = parameters.flatten(config.parameters()), {}
    for path, leaf in parameters.flatten(params).items():
        found = names.huggingface(config)(path).names
        cuts = np.cumsum(declared[path].stacked)[:-1] if len(found) > 1 else []
        tensors |= dict(zip(found, np.split(np.asarray(leaf), cuts), strict=True))
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(_KEYS))
    return tmp_path


def test_the_state_by_hand(values):
    config, _ = values
    kind = MinGru(20)
    weights_ = parameters.init(kind.parameters(config))
    x_TD = np.random.default_rng(0).normal(size=(9, 16)).astype(np.float32)
    gate_TX, candidate_TX = np.split(x_TD @ np.asarray(weights_["in"]).T, 2, axis=1)
    h_X, expected = np.zeros(20), []
    for gate_X, c_X in zip(gate_TX, candidate_TX, strict=True):
        z_X = 1 / (1 + np.exp(-gate_X))
        h_X = (1 - z_X) * h_X + z_X * c_X
        expected.append(np.asarray(weights_["out"]) @ h_X)
    context = StepContext(contiguous(1, 9), None, kind.cache(config), 0, True, False)
    out_TD, _ = apply_min_gru(weights_, config, kind, jnp.asarray(x_TD), None, context)
    np.testing.assert_allclose(out_TD, expected, atol=1e-5)


@pytest.mark.quick_code
def test_the_engine_gives_what_the_model_gives_without_a_cache(values, checkpoint):
    """Read from the checkpoint: prompts in chunks, neighbours, more sequences than slots."""
    config, params = values
    sizes = dict(max_seqs=3, chunk_tokens=8, prefill_chunks=(2,), decode_rows=(4,))
    found = resolve.resolve(str(checkpoint))
    model = dataclasses.replace(found.config, dtype="float32")
    assert model == dataclasses.replace(config, name=checkpoint.name)
    read = found.open(None).load_params(decoder.param_infos(model), None)
    engine = Engine(Config(model, EngineConfig.of(**sizes)), read)
    prompts = [[7 * n % 61 for n in range(length)] for length in (1, 40, 7, 16, 23)]

    @compiling.jit
    def greedy(tokens_T):
        hidden_TD, _ = decoder.forward(params, config, tokens_T, contiguous(1, 64))
        return decoder.logits(params, config, hidden_TD).argmax(axis=1)

    for answer in engine.generate(prompts, SamplingParams(max_new_tokens=12)):
        first, tokens = len(answer.prompt_token_ids), answer.prompt_token_ids + answer.token_ids
        expected_T = greedy(np.pad(tokens, (0, 64 - len(tokens))))
        assert answer.token_ids == expected_T[first - 1 : len(tokens) - 1].tolist()
    leaves = jax.tree.leaves(engine.model_runner.cache)
    assert engine.config.pool_bytes == sum(leaf.nbytes for leaf in leaves)
    # A CPU's strips would pad widths as odd as these.
    plain = Engine(Config(model, EngineConfig.of(linear="reference", **sizes)), read).model_runner
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(plain.params))
    assert weights.weight_bytes(config) == held


def test_the_planner_prices_it(values):
    config, _ = values
    found = {o.name: o for o in cost.step_operations(config, Work.decode(3, 100, drafts=2))}
    tokens, layers = 3 * 3, 2
    assert found["min_gru.in"].flops == layers * 2 * tokens * 2 * 20 * 16
    assert found["maxout.up"].weight_bytes == 4 * (2 * 24) * 16 * 4
    assert found["scan"].cache_bytes == layers * 3 * (2 + 2) * 20 * 4
    row = Deployment(config, catalog.get("h100")).row(3, 100)
    assert row.fits and row.parameters == weights.num_parameters(config)
    state, page = 2 * 20 * 4, 2 * (2 * 2 * 8) * 4
    assert row.cache_bytes == 3 * (state + 100 * page)
    assert Config(config).model.has_states


@test_page.needs_browser
def test_the_planners_page_shows_the_planners_figures(values, tmp_path, monkeypatch):
    config, _ = values
    monkeypatch.setitem(test_page.MODELS, "newcomer", config)
    states = dataclasses.replace(
        config, pattern=config.pattern[:1]
    )  # nothing that chips must divide
    monkeypatch.setitem(test_page.MODELS, "states", states)
    asked = [p for p in test_page.points(60, seed=5) if p["model"] in ("newcomer", "states")]
    script = (
        f"{test_page.PLAN_SCRIPT} for (const p of {json.dumps(asked)}) results.push(planned(p));"
    )
    script += "change({ model: 'states', hardware: 'h200' }); results.push(state.chips); finish();"
    *answers, chips = test_page.browse(tmp_path, script)
    assert chips == 1
    assert len(answers) == len(asked) > 1
    for point, found in zip(asked, map(test_page.flat, answers), strict=True):
        for name, expected in test_page.figures(point).items():
            assert test_page.close(found.get(name), expected), (point, name)
    assert math.isfinite(answers[0]["step_s"])
    assert "newcomer" in render.render({"newcomer": config}, start={"model": "newcomer"})
