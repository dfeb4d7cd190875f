"""The picture that two apps draw, and files as apps write them."""

import importlib.util
from pathlib import Path

from absl import flags

from configs.errors import InputError
from inference.files import user_files
from scripts import common

PLOT = flags.DEFINE_string("plot", None, "PNG file: a picture of the result.")


def check_plot() -> None:
    """Raises InputError if --plot cannot be written, or matplotlib is not installed."""
    if PLOT.value is None:
        return
    user_files.check_target(f"--plot={PLOT.value}", PLOT.value, ".png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install '.[plots]'")


def write(name: str, content: bytes) -> None:
    """Writes the file whole and says so on stderr. Raises InputError if it cannot be written."""
    user_files.write({Path(name): content})
    common.say(f"wrote {name}")
