"""The flag that five apps share, so that one process can load all."""

from absl import flags

OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "generate: one JSON result a line, and beside it the configuration. plan: --verify's page. "
    "convert, train, quantize: the directory, which must not exist yet.",
)
