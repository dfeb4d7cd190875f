"""Directories as the `peft` package writes them, with random factors, and what they make of a
model's parameters.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from inference.adapters import modules as adapter_modules
from layers import params

_PREFIX = "base_model.model."


def write(directory, model, rank=4, seed=0, modules=None, size=0.3, tensors=(), **settings):
    """An adapter of all modules of a model, or of those whose names end like `modules`; `tensors`
    and `settings` replace some of it.
    """
    generator, factors = np.random.default_rng(seed), {}
    for name, module in adapter_modules.modules_of(model).items():
        if modules is None or name.endswith(modules):
            rows, columns = module.shape
            draw = lambda *shape: generator.standard_normal(shape).astype(np.float32)  # noqa: E731
            factors[f"{_PREFIX}{name}.lora_A.weight"] = draw(rank, columns) * size
            factors[f"{_PREFIX}{name}.lora_B.weight"] = draw(rows, rank) * size
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(factors | dict(tensors), directory / "adapter_model.safetensors")
    return directory


def merged(model, values, loaded):
    """A model's parameters with an adapter added to their matrices."""
    leaves = dict(params.flatten(values, lambda node: False))
    for place, factors in loaded.factors.items():
        matrix = np.array(leaves[place.path], np.float32)
        matrix[place.rows] += factors.up_FR @ factors.down_RD
        leaves[place.path] = jnp.asarray(matrix, leaves[place.path].dtype)
    tree = jax.tree.structure(values)
    return jax.tree.unflatten(
        tree, [leaves[path] for path in params.flatten(values, lambda n: False)]
    )
