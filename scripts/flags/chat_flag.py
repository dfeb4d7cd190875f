"""The flag that two apps share, so that one process can load both."""

from absl import flags

CHAT = flags.DEFINE_bool(
    "chat",
    False,
    "A prompt is a user's message: apply the chat template (evaluate: of --task_file).",
)
