"""Trees of the packages themselves: `python -m tests.flax.packages` records their shapes.

Run by the environment of `make test-flax`; nothing here is imported elsewhere.
"""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from gemma.gm.nn import _config as linen_config
from gemma.gm.nn import _modules as linen_modules
from gemma.gm.nn import _transformer as linen_transformer
from maxtext.configs import pyconfig
from maxtext.models import models as maxtext_models
from tunix.models.gemma import model as nnx_gemma
from tunix.models.gemma3 import model as nnx_gemma3
from tunix.models.llama3 import model as nnx_llama
from tunix.models.qwen2 import model as nnx_qwen2
from tunix.models.qwen3 import model as nnx_qwen3

from tests.flax import models

TOKENS = 16  # of the texts that are compared, which MaxText is compiled for


def module(name, seed=0):
    """A module of Tunix's with random weights."""
    config = models.MODELS[name]
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    heads = dict(num_heads=mixer.num_heads, num_kv_heads=mixer.num_kv_heads)
    sizes = dict(
        num_layers=config.num_layers, embed_dim=config.width, hidden_dim=ffn.width, **heads
    )
    sizes |= dict(head_dim=mixer.head_width)
    rngs = nnx.Rngs(seed)
    if config.family == "gemma3":
        sizes |= dict(sliding_window_size=mixer.window, global_base_frequency=1_000_000)
        made = nnx_gemma3.ModelConfig(num_embed=config.vocab_size, param_dtype=jnp.float32, **sizes)
        return nnx_gemma3.Gemma3(made, rngs=rngs)
    if config.family in ("gemma", "gemma2"):
        made = nnx_gemma.ModelConfig(
            num_embed=config.vocab_size, final_logit_softcap=config.logit_cap,
            attn_logits_soft_cap=mixer.score_cap, use_post_attn_norm=config.post_norms,
            use_post_ffw_norm=config.post_norms, sliding_window_size=mixer.window,
            attention_types=[
                nnx_gemma.AttentionType.GLOBAL if layer.mixer.window is None
                else nnx_gemma.AttentionType.LOCAL_SLIDING
                for layer in config.layers
            ],
            **sizes,
        )  # fmt: skip
        return nnx_gemma.Gemma(made, rngs=rngs)
    sizes |= dict(vocab_size=config.vocab_size, norm_eps=config.norm_eps)
    sizes |= dict(rope_theta=int(mixer.rope.theta))
    if config.family == "llama":
        return nnx_llama.Llama3(nnx_llama.ModelConfig(weight_tying=config.tied, **sizes), rngs=rngs)
    package = {"qwen2": nnx_qwen2, "qwen3": nnx_qwen3}[config.family]
    made = package.ModelConfig(use_tied_embedding=config.tied, **sizes)
    return getattr(package, config.family.capitalize())(made, rngs=rngs)


def drawn(tree):
    """A tree with other random values: in a new one some leaves are 0 and norms are alike."""
    numbers = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + np.asarray(0.1 * numbers.normal(size=leaf.shape), leaf.dtype), tree
    )


def linen(name):
    """A module of the `gemma` package's."""
    config = models.MODELS[name]
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    is_third = config.family == "gemma3"
    kinds = linen_modules.AttentionType
    return linen_transformer.Transformer(
        config=linen_config.TransformerConfig(
            num_embed=config.vocab_size, embed_dim=config.width, hidden_dim=ffn.width,
            num_heads=mixer.num_heads, head_dim=mixer.head_width,
            num_kv_heads=mixer.num_kv_heads, final_logit_softcap=config.logit_cap,
            attn_logits_soft_cap=mixer.score_cap, use_post_attn_norm=config.post_norms,
            use_post_ffw_norm=config.post_norms,
            attention_types=[
                kinds.GLOBAL if layer.mixer.window is None else kinds.LOCAL_SLIDING
                for layer in config.layers
            ],
            sliding_window_size=mixer.window, transpose_gating_einsum=is_third,
            use_qk_norm=is_third, global_base_frequency=1_000_000 if is_third else 10_000,
        ),
        dtype=jnp.float32,
    )  # fmt: skip


def maxtext_linen(name, folder):
    """A module of MaxText's, and its mesh of one device; its files go to a folder."""
    config = models.MODELS[name]
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    file = Path(maxtext.__file__).parent / "configs" / "base.yml"
    options = pyconfig.initialize(
        ["", str(file)], run_name="tiny", base_output_directory=str(folder), hardware="cpu",
        enable_checkpointing=False, skip_jax_distributed_system=True, attention="dot_product",
        per_device_batch_size=1, max_target_length=TOKENS, dtype="float32", weight_dtype="float32",
        matmul_precision="highest", decoder_block="llama2" if config.family == "llama" else
        config.family, scan_layers=name.endswith("scanned"), vocab_size=config.vocab_size,
        base_emb_dim=config.width, base_num_query_heads=mixer.num_heads,
        base_num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_width, base_mlp_dim=ffn.width,
        base_num_decoder_layers=config.num_layers, mlp_activations=["silu", "linear"],
        normalization_layer_epsilon=config.norm_eps, rope_max_timescale=int(mixer.rope.theta),
        rope_type="default" if mixer.rope.scaling is None else "llama3.1",
        use_qk_norm=mixer.qk_norm is not None, attention_bias=bool(mixer.biases),
        logits_via_embedding=config.tied, normalize_embedding_logits=False, enable_dropout=False,
    )  # fmt: skip
    devices = np.array(jax.devices()[:1]).reshape([1] * len(options.mesh_axes))
    mesh = jax.sharding.Mesh(devices, options.mesh_axes)
    module = maxtext_models.transformer_as_linen(options, mesh, quant=None, model_mode="train")
    return module, mesh


def init(name, folder, evaluate=lambda work: work()):
    """Parameters of a Linen module, drawn or (`evaluate` is `jax.eval_shape`) their shapes."""
    keys = jax.random.split(jax.random.key(0), 3)
    zeros = jnp.zeros((1, TOKENS), jnp.int32)
    if name.startswith("gemma"):
        return evaluate(lambda: linen(name).init(keys[0], zeros))
    module, mesh = maxtext_linen(name, folder)
    streams = dict(zip(("params", "dropout", "aqt"), keys, strict=True))
    with jax.set_mesh(mesh):
        return evaluate(lambda: module.init(streams, zeros, zeros, zeros, enable_dropout=False))


def shapes(name, folder):
    """The tree of a package, of shapes alone."""
    if name.startswith("tunix"):
        return nnx.state(nnx.eval_shape(lambda: module(name)), nnx.Param)
    return init(name, folder, jax.eval_shape)


def logits(name, tree, tokens_T, folder):
    """What a package computes with a tree: f32[T, V]."""
    tokens_BT = jnp.asarray(tokens_T, jnp.int32)[None]
    positions_BT = jnp.arange(len(tokens_T))[None]
    mask = jnp.tril(jnp.ones((1, len(tokens_T), len(tokens_T)), bool))
    if name.startswith("tunix"):
        made = module(name)
        nnx.update(made, tree)
        return np.asarray(made(tokens_BT, positions_BT, None, mask)[0][0])
    if name.startswith("gemma"):
        return np.asarray(linen(name).apply(tree, tokens_BT).logits[0])
    made, mesh = maxtext_linen(name, folder)
    with jax.set_mesh(mesh):
        segments = jnp.ones_like(tokens_BT)
        return np.asarray(
            made.apply(tree, tokens_BT, positions_BT, segments, enable_dropout=False)[0]
        )


def record(tree):
    """Shapes by path, without an `nnx.Variable`'s last key."""
    return {
        "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path
                 if not isinstance(key, jax.tree_util.GetAttrKey)): list(leaf.shape)
        for path, leaf in jax.tree.flatten_with_path(tree)[0]
    }  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        trees = {name: record(shapes(name, output)) for name in models.MODELS}
    models.TREES.write_text(json.dumps(trees, indent=1) + "\n")
