"""The flag that `bench` shares with those that sample, so that one process can load all."""

from absl import flags

SEED = flags.DEFINE_integer(
    "seed", None, "64-bit seed of the random stream (`bench`: of the workload)."
)
