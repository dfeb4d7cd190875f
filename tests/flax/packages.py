"""Trees of the packages themselves: `python -m tests.flax.packages` records their shapes.

Run by the environment of `make test-flax`; nothing here is imported elsewhere.
"""

import json

import jax
import jax.numpy as jnp
from flax import nnx
from gemma.gm.nn import _config as linen_config
from gemma.gm.nn import _modules as linen_modules
from gemma.gm.nn import _transformer as linen_transformer
from tunix.models.gemma import model as nnx_gemma
from tunix.models.gemma3 import model as nnx_gemma3
from tunix.models.llama3 import model as nnx_llama
from tunix.models.qwen2 import model as nnx_qwen2
from tunix.models.qwen3 import model as nnx_qwen3

from tests.flax import models

TINY = 1e-5, 10_000  # epsilon of the norms, theta of the positions


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
    if config.family == "gemma2":
        made = nnx_gemma.ModelConfig(
            num_embed=config.vocab_size, final_logit_softcap=30.0, attn_logits_soft_cap=50.0,
            use_post_attn_norm=True, use_post_ffw_norm=True, sliding_window_size=mixer.window,
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
            attn_logits_soft_cap=mixer.score_cap, use_post_attn_norm=True, use_post_ffw_norm=True,
            attention_types=[
                kinds.GLOBAL if layer.mixer.window is None else kinds.LOCAL_SLIDING
                for layer in config.layers
            ],
            sliding_window_size=mixer.window, transpose_gating_einsum=is_third,
            use_qk_norm=is_third, global_base_frequency=1_000_000 if is_third else 10_000,
        ),
        dtype=jnp.float32,
    )  # fmt: skip


def init(name):
    """Parameters of a module of the `gemma` package's."""
    return linen(name).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))


def shapes(name):
    """The tree of a package, of shapes alone."""
    if name.startswith("tunix"):
        return nnx.state(nnx.eval_shape(lambda: module(name)), nnx.Param)
    return jax.eval_shape(lambda: init(name))


def record(tree):
    """Shapes by path, without an `nnx.Variable`'s last key."""
    return {
        "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path
                 if not isinstance(key, jax.tree_util.GetAttrKey)): list(leaf.shape)
        for path, leaf in jax.tree.flatten_with_path(tree)[0]
    }  # fmt: skip


if __name__ == "__main__":
    trees = {name: record(shapes(name)) for name in models.MODELS if "maxtext" not in name}
    models.TREES.write_text(json.dumps(trees, indent=1) + "\n")
