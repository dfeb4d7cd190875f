"""The flags of several processes that run one mesh."""

from absl import flags

HOSTS = flags.DEFINE_integer("hosts", 1, "Processes that run one mesh, each started like this one.")
HOST = flags.DEFINE_integer(
    "host_index", 0, "Which of --hosts this is; 0 serves, the others follow."
)
COORDINATOR = flags.DEFINE_string(
    "coordinator", "localhost:9100", "Address and port of host 0, which takes the next port, too."
)
