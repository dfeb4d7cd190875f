"""The flag that seven apps share, so that one process can load all."""

from absl import flags

OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "generate: one JSON result a line, and beside it the configuration. plan: --verify's page. "
    "evaluate: what the model made of each document of --task_file, a JSON line each. convert, "
    "train, quantize, prune: the directory, which must not exist yet.",
)
