"""Directories as the `peft` package writes them, with random factors, and what they make of a
model's parameters.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from configs.adapters import EMBEDDING
from inference.adapters import modules as adapter_modules
from layers import params

_PREFIX = "base_model.model."


def write(
    directory, model, rank=4, seed=0, modules=None, size=0.3, tensors=(), extras=(), **settings
):
    """An adapter of all modules of a model, or of those whose names end like `modules`; `tensors`
    and `settings` replace some of it.
    """
    generator, factors = np.random.default_rng(seed), {}
    for name, module in adapter_modules.modules_of(model, extras).items():
        if modules is None or name.endswith(modules):
            rows, columns = module.shape
            draw = lambda *shape: generator.standard_normal(shape).astype(np.float32)  # noqa: E731
            is_table = any(place.path == EMBEDDING for place, _ in module.places)
            endings = ("embedding_A", "embedding_B") if is_table else ("A.weight", "B.weight")
            for ending, shape in zip(endings, ((rank, columns), (rows, rank)), strict=True):
                factors[f"{_PREFIX}{name}.lora_{ending}"] = draw(*shape) * size
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(factors | dict(tensors), directory / "adapter_model.safetensors")
    return directory


def merged(model, values, loaded):
    """A model's parameters with an adapter added to their matrices; the model is not tied."""
    leaves = dict(params.flatten(values, lambda node: False))
    for place, factors in loaded.factors.items():
        leaf = leaves[place.path]
        matrix = np.array(leaf, np.float32).reshape(-1, leaf.shape[-1])
        matrix[place.rows] += factors.up_FR @ factors.down_RD
        leaves[place.path] = jnp.asarray(matrix.reshape(leaf.shape), leaf.dtype)
    tree = jax.tree.structure(values)
    return jax.tree.unflatten(
        tree, [leaves[path] for path in params.flatten(values, lambda n: False)]
    )
