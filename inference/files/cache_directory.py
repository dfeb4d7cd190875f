"""Where downloads, conversions, compiled steps, CPU kernels and calibrations are kept."""

import os
from pathlib import Path


def path() -> Path:
    """RIDGELINE_CACHE, or ~/.cache/ridgeline."""
    return Path(os.environ.get("RIDGELINE_CACHE") or Path.home() / ".cache" / "ridgeline")
