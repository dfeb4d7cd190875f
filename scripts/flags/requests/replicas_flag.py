"""The flag of copies of a model, which are planned and served."""

from absl import flags

REPLICAS = flags.DEFINE_integer(
    "replicas", None, "Copies of the mesh, each with an engine; plan: 1, serve_ray: 2."
)
