"""Takes a picture of the planner's page: python docs/screenshot.py docs/plan.png [SETTINGS]
[WIDTH] [HEIGHT] [light|dark].

SETTINGS are what follows # in the page's address, such as model=llama3-70b&hardware=h100&chips=4.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inference.planner.page import render  # noqa: E402

_SETTINGS = "model=llama3-70b&hardware=h100&batch=64&context=2048&new_tokens=256&chips=4&price=2.5"


def main(
    target: str, settings: str = _SETTINGS, width: str = "1280", height: str = "1030",
    scheme: str = "light",
) -> None:  # fmt: skip
    """Renders the page and writes what a browser shows of it to `target`."""
    browser = next(filter(None, map(shutil.which, render.BROWSERS)), None)
    if browser is None:
        sys.exit(f"error: no browser found; tried {', '.join(render.BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        file.write_text(render.render(), encoding="utf-8")
        scheme_flag = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--no-first-run", f"--user-data-dir={folder}/profile", scheme_flag,
             "--virtual-time-budget=2000", f"--window-size={width},{height}",
             f"--screenshot={Path(target).resolve()}", f"{file.as_uri()}#{settings}"],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"error: {browser}: {done.stderr.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
