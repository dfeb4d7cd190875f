"""The flag that names the chip of predictions, which two apps share."""

from absl import flags

from configs.hardware import catalog

HARDWARE = flags.DEFINE_string(
    "hardware",
    "h100",
    f"{', '.join(catalog.NAMES)} or cpu; with --config: its target's chip. prune: of the steps "
    "that shapes are ranked by; default there: cpu.",
)
