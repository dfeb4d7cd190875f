"""Records a command as a picture.

python -m scripts.reports.record docs/demo.svg COMMAND [ARG ...]
"""

import subprocess
import sys

from rich.console import Console
from rich.text import Text


def main(target: str, *command: str) -> None:
    """Runs the command and writes what it printed to `target`."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(
        Text("$ " + " ".join(command[:1] + tuple(map(_quote, command[1:]))), style="bold")
    )
    console.print(Text(done.stdout.strip()))
    console.print(Text(done.stderr.strip(), style="dim"))
    console.save_svg(target, title="Ridgeline")


def _quote(word: str) -> str:
    return word if " " not in word else f'"{word}"'


if __name__ == "__main__":
    main(*sys.argv[1:])
