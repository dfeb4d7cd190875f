"""Weights of few bits under all that an engine does."""

import dataclasses
import functools
import tracemalloc

import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.feed_forward import Gated
from configs.mesh import Mesh
from configs.model import LayerSpec
from configs.precision import FORMATS, OUTLIERS
from configs.recipes import few_bits
from inference.checkpoints import load, names, weight_formats
from inference.checkpoints.tensor_source import TensorSource
from inference.planner import cost, weights
from inference.planner.calibration import measure
from inference.request import SamplingParams
from layers import decoder, params, quantized
from layers.kernels.linear import api as linear
from tests import fakes
from tests.layers import native

pytestmark = pytest.mark.quick_code

_SIZES = dict(
    max_seqs=8, decode_rows=(8,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
    cache_bytes=4 << 20,
)  # fmt: skip
_FEATURES = np.arange(1, 2 * OUTLIERS, 2, dtype=np.int32)  # of both halves of a row
_PROMPTS = fakes.prompts([5, 40, 17, 3, 26, 9], 131, seed=2)


def model(format, make=fakes.llama, dtype="float32", **changes):
    """A tiny model whose rows are whole groups, its matrices in a format."""
    widths = (
        {"head_width": 16}
        if make is fakes.llama
        else {"value_width": 16, "query_rank": 32, "rank": 32, "nope_width": 32}
    )
    plain = make(dtype, **{"width": 64, "max_context": 256} | widths | changes)
    plain = plain.with_kinds(width=128, **({"shared_width": 64} if plain.mixtures else {}))
    return plain if format is None else in_format(plain, format)


def in_format(plain, format):
    skip = ["embed", "head"] if format == "llm_int8" else []
    found = few_bits.formats(plain, format, skip)
    return dataclasses.replace(plain, formats=tuple((path, (own,)) for path, own in found.items()))


@functools.cache
def values(own):
    """Random parameters, whatever their format; LLM.int8's outliers lie between others."""
    plain = fakes.real_params(dataclasses.replace(own, formats=()))
    infos, found = params.flatten(decoder.param_infos(own)), params.flatten(plain, lambda _: False)
    made = {}
    for path, info in infos.items():
        matrix, _, part = path.rpartition("/")
        if matrix not in found:
            made[path] = found[path]
        elif part == "features":
            made[path] = _FEATURES
        elif part == "outliers":
            made[path] = found[matrix][:, _FEATURES].astype(info.format)
        else:
            made[path] = found[matrix].at[:, _FEATURES].set(0)
    return params.unflatten(decoder.param_infos(own), made)


def engine(own, **settings):
    native.need()
    return fakes.engine(own, settings.pop("params", None) or values(own), "one", False,
                        **_SIZES | settings)  # fmt: skip


def scores(made):
    return np.concatenate([score.logprobs for score in made.score(_PROMPTS)])


def test_rounded_activations_are_said(caplog):
    for format, settings, is_said in (
        ("int4_g32", {"linear": "ffi_cpu"}, True), ("w8a8", {"linear": "ffi_cpu"}, False),
        ("int4_g32", {"linear": "ffi_cpu", "activations": "exact"}, False),
        ("int4_g32", {"linear": "reference"}, False), (None, {"linear": "ffi_cpu"}, False),
    ):  # fmt: skip
        caplog.clear()
        weight_formats.warn_of_rounding(Config(model(format), EngineConfig.of(**settings)))
        assert ("weights in int4_g32, int8; --activations=exact" in caplog.text) is is_said


_FORMATS = "int8", "w8a8", "fp8", "int4_g32", "int3_asym_g32", "mxfp4", "llm_int8"


@pytest.mark.parametrize("format", [
    pytest.param(name, marks=pytest.mark.long if name == "fp8" else ()) for name in _FORMATS
])  # fmt: skip
def test_answers_depend_on_no_neighbour_chunk_or_cached_prefix(format):
    made = engine(model(format, dtype="bfloat16"), deterministic=True)
    asked = SamplingParams(max_new_tokens=9, ignore_eos=True)
    alone = [made.generate([prompt], asked)[0] for prompt in _PROMPTS]
    together = made.generate(_PROMPTS, asked)  # of which prefixes are cached
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


@pytest.mark.parametrize("format", _FORMATS)
def test_scores_are_those_of_the_numbers_that_are_stored(format):
    """Up to what rounding activations to eight bits costs, whatever the weights have."""
    own, plain = model(format), model(None)
    full, few = scores(engine(plain)), scores(engine(own))
    stored = scores(engine(plain, params=_stored(own, values(own))))
    error, size = np.abs(few - stored).mean(), stored.std()
    assert error < (1e-5 if format == "fp8" else 0.03) * size
    if format == "int4_g32":
        exact = scores(engine(own, activations="exact"))
        assert np.abs(exact - stored).mean() < 1e-5 * size < error
    assert np.abs(few - full).mean() > (0.1 if FORMATS[format].bits < 8 else 0.01) * size


def _stored(own, tree):
    """The numbers that leaves of few bits stand for, where a model without formats has them."""
    found, declared = {}, params.flatten(decoder.param_infos(own))
    for path, leaf in params.flatten(tree, lambda _: False).items():
        info = declared[path]
        if FORMATS[info.format].is_quantized:
            blocks = quantized.quantize(info.format, np.asarray(leaf))
            leaf = quantized.dequantize(info.format, blocks, info.shape[-1])
        matrix, _, part = path.rpartition("/")
        if part == "int8":
            found[matrix] = leaf
        elif part == "outliers":
            found[matrix][:, _FEATURES] = np.asarray(leaf, np.float32)
        elif part != "features":
            found[path] = leaf
    return params.unflatten(decoder.param_infos(dataclasses.replace(own, formats=())), found)


@pytest.mark.parametrize("few", ["draft", "target"])
def test_speculation_is_exact_whoever_has_few_bits(few):
    plain, own = model(None), model("int4_g32")
    target, draft = (plain, own) if few == "draft" else (own, plain)
    asked = fakes.greedy(12)
    expected = [a.token_ids for a in engine(target).generate(_PROMPTS, asked)]
    tree = values(target) | {"draft": values(draft)}
    made = engine(target, params=tree, draft=draft, proposer="draft", num_drafts=3)
    assert [a.token_ids for a in made.generate(_PROMPTS, asked)] == expected
    assert 0 < made.scheduler.counters.num_accepted < made.scheduler.counters.num_drafts


@pytest.mark.parametrize(
    "format", ["int4_g32", "int8", pytest.param("fp8", marks=pytest.mark.long), "llm_int8"]
)
def test_two_chips_have_one_chips_scores(format):
    """Groups of 32 and their scales stay together; of a row that is one block, each chip has the
    scale; of LLM.int8's features, each multiplies its own, and rounds its part of a token's others.
    That holds for every score where activations stay as they are; beside a sum in another order one
    of them may be rounded to another integer, which moves the score of its token.
    """
    own = model(format)
    chips = (Mesh(model=1), Mesh(model=2))
    one, two = (scores(engine(own, mesh=mesh)) for mesh in chips)
    if format != "llm_int8":
        assert (np.abs(two - one) > 1e-4).sum() <= 1
        exact = [scores(engine(own, mesh=mesh, activations="exact")) for mesh in chips]
        np.testing.assert_allclose(*exact, atol=1e-4)
        return
    stored = scores(engine(model(None), params=_stored(own, values(own))))
    assert np.abs(two - stored).mean() < 0.03 * stored.std()


def test_chips_that_would_cut_a_group_are_refused():
    """A chip's columns may be whole groups and yet begin within one."""
    wide = {"num_heads": 14, "num_kv_heads": 2, "head_width": 64}
    own = in_format(fakes.llama("bfloat16", width=128, **wide).with_kinds(width=512), "int4")
    with pytest.raises(InputError, match="mesh.model=4 divides its rows of 896 within blocks"):
        engine(own, mesh=Mesh(model=4))


def test_experts_and_latents_of_few_bits():
    """Also where chips divide the experts. What rounding activations costs sends some tokens to
    other experts.
    """
    own = model("int4_g32", fakes.deepseek)
    assert any("experts/gate_up" in path for path, _ in own.formats)
    plain = model(None, fakes.deepseek)
    full, stored = scores(engine(plain)), scores(engine(plain, params=_stored(own, values(own))))
    found = scores(engine(own))
    assert np.abs(found - stored).mean() < 0.3 * np.abs(found - full).mean()
    np.testing.assert_allclose(scores(engine(own, mesh=Mesh(expert=2))), found, atol=1e-4)


def test_what_plans_a_step_knows_the_formats_of_products(monkeypatch):
    """LLM.int8() is none; where there are no kernels, XLA's products are timed."""
    assert cost.weight_formats(model("llm_int8")) == ("w8a8",)
    monkeypatch.setattr("layers.kernels.cpu.library.is_loaded", lambda: False)
    assert measure.matmul_rate("int4", repeats=1) > 0


def test_weights_are_exchanged_between_two_steps():
    """By a training loop's, which are rounded; other shapes are refused in one line."""
    own = model("int4_g32")
    made, others = engine(own), jax.tree.map(lambda leaf: leaf * 0.5, values(own))
    before = scores(made)
    made.update_params(others)
    after = scores(made)
    np.testing.assert_array_equal(after, scores(engine(own, params=others)))
    assert np.abs(after - before).max() > 1e-3
    wrong = jax.tree.map(lambda leaf: leaf[..., :32], values(own))
    with pytest.raises(InputError, match="not parameters of this model: embed/table is"):
        made.update_params(wrong)


@pytest.mark.parametrize("format", _FORMATS)
def test_bytes_are_the_planners(format):
    """Strips are padded to whole lines and 16 features, as this model's sizes are already."""
    own = model(format, vocab_size=128, dtype="bfloat16")
    made = engine(own)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(made.model_runner.params))
    declared = params.num_bytes(decoder.param_infos(own))
    assert declared == weights.weight_bytes(own)
    assert (
        declared
        <= held
        <= declared
        + 64 * sum(-(-info.rows // 16) for info in params.flatten(own.parameters()).values())
    )
    read = sum(o.weight_bytes for o in cost.step_operations(own, cost.Work.decode(1, 16)))
    table = FORMATS[own.parameters()["embed"]["table"].format] if format != "llm_int8" else None
    assert read <= declared and (table is None or read >= declared - table.bytes_for(128 * 64, 64))


def test_weights_are_never_there_in_more_bits():
    """Rounded while they are read, a matrix takes a third of its bfloat16's bytes at most, what is
    being packed included.
    """
    native.need()
    plain = fakes.llama("bfloat16", width=1024, num_heads=16, head_width=64, vocab_size=512)
    plain = dataclasses.replace(
        plain, num_layers=4, pattern=(LayerSpec(plain.pattern[0].mixer, Gated(4096)),)
    )
    rounded_model = in_format(plain, "int4")
    declared = params.flatten(decoder.param_infos(rounded_model))

    def read(name, start, stop, columns=slice(None)):
        made = np.zeros((stop - start, *declared[name].shape[1:]), ml_dtypes.bfloat16)
        return made[:, columns] if made.ndim > 1 else made

    shapes = {path: info.shape for path, info in declared.items()}
    source = TensorSource("made", shapes, read)
    place = linear.placement(Config(rounded_model, EngineConfig.of(linear="ffi_cpu")))
    tracemalloc.start()
    kept = load.load_params(decoder.param_infos(rounded_model), source, names.identity, None, place)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 0.35 * params.num_bytes(decoder.param_infos(plain))
    assert kept["layers"][0]["ffn"]["down"].format == "int4"


def test_random_weights_are_drawn_as_an_engine_holds_them():
    """Where XLA's products run; what is packed for kernels is rounded instead."""
    rounded_model, settings = (
        model("int4_g32", dtype="bfloat16"),
        EngineConfig.of(linear="reference"),
    )
    config, infos = Config(rounded_model, settings), decoder.param_infos(rounded_model)
    drawn = linear.random_params(config, infos)
    declared = linear.abstract(config, infos)
    chex.assert_trees_all_equal_shapes_and_dtypes(drawn, declared)
    made = fakes.engine(rounded_model, drawn, "one", False, linear="reference", **_SIZES)
    held = jax.tree.leaves(made.model_runner.params)
    assert all(a is b for a, b in zip(held, jax.tree.leaves(drawn), strict=True))
