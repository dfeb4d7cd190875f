"""Flags of the apps that listen: `serve` and `serve_ray`."""

from absl import flags

from scripts.flags.requests import key_flag

API_KEY_FILE = key_flag.API_KEY_FILE
CONTROL_KEY_FILE = flags.DEFINE_string(
    "control_key_file", None,
    "File of keys, one a line, of those that may pause the engine, let it sleep and change its "
    "weights; default: none may.",
)  # fmt: skip
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0 takes a free one.")
ALLOWED_HOSTS = flags.DEFINE_list(
    "allowed_hosts", [],
    "Names of the server in the header Host, beside this machine's: chat.example,*.example.org. "
    "Default: where others can reach --host, any.",
)  # fmt: skip
ALLOWED_ORIGINS = flags.DEFINE_list(
    "allowed_origins", [],
    "Origins of pages of other servers that may send requests (CORS): https://chat.example; * "
    "stands for all.",
)  # fmt: skip
ROOT_PATH = flags.DEFINE_string(
    "root_path", "", "Path under which a proxy shows the server, where it passes it on: /llm."
)
REQUEST_S = flags.DEFINE_float("request_timeout", 600.0, "Seconds that an answer may take.")
QUEUE_S = flags.DEFINE_float(
    "max_queue_s", 60.0, "Seconds that a request may be expected to wait; others are refused."
)
DRAIN_S = flags.DEFINE_float(
    "drain_timeout", 30.0, "Seconds that answers have at SIGTERM; a second one ends at once."
)
OTLP = flags.DEFINE_string(
    "otlp_endpoint",
    None,
    "Collector that gets a span of every request, by OTLP over HTTP: http://localhost:4318.",
)
flags.adopt_module_key_flags(key_flag)
