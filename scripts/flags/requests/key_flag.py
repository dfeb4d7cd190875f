"""The flag of keys, which a server checks and its clients send."""

from absl import flags

API_KEY_FILE = flags.DEFINE_string(
    "api_key_file",
    None,
    "serve: file with a key a line, one of which every request has to bring. bench, batch: the "
    "first of a file's lines is sent to --url; else what OPENAI_API_KEY holds.",
)
