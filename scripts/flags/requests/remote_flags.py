"""Flags of the apps that ask a server: `bench` and `batch`."""

from absl import flags

from scripts.flags.requests import key_flag

URL = flags.DEFINE_string(
    "url", None, "A server of OpenAI's interface, instead of a model here: http://HOST:PORT."
)
CONCURRENCY = flags.DEFINE_string(
    "concurrency", "1,8,32", "Requests at a time (`batch`: one number; default: what fits)."
)
flags.adopt_module_key_flags(key_flag)
