"""The models that are compared, each made by one command; what is there is not made again."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs.recipes.training import Recipe, TrainingConfig
from inference.checkpoints import resolve
from inference.files import user_files
from inference.training import export, start
from scripts.reports.compression import docstrings

TEACHER = "smollm2-135m"
PRUNED, HEALED, SCRATCH, RANDOM = "pruned", "healed", "scratch", "random"

_SHARE = "0.7"  # of the parameters without embeddings
_SAMPLES = "256"  # that importance is measured on
_BATCH, _WINDOW = 2, 128
STEPS, STEP_TOKENS = 400, _BATCH * _WINDOW
_SETTINGS = (
    f"training.steps={STEPS}", f"training.batch={_BATCH}", f"training.window={_WINDOW}",
    "training.learning_rate=5e-4", "training.top_k=64",
)  # fmt: skip


class Models:
    """Directories of models in a folder, and what the commands printed that made them."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.text = folder / "docstrings.txt"
        if not self.text.exists():
            user_files.write({self.text: docstrings.of_packages().encode()})

    def pruned(self, name: str = PRUNED, *arguments: str) -> dict[str, Any]:
        """The teacher with the least important of its units removed."""
        size = arguments or (f"--target_params={_SHARE}",)
        return self._made(
            name, "scripts.prune", f"--model={TEACHER}", f"--samples={_SAMPLES}", *size
        )

    def healed(self, student: str, name: str) -> dict[str, Any]:
        """A student, trained on the teacher's distributions."""
        return self._made(
            name, "scripts.train", "--task=distill", f"--model={self.path(student)}",
            f"--teacher={TEACHER}", *(f"--set={setting}" for setting in _SETTINGS),
        )  # fmt: skip

    def random(self, like: str, name: str) -> None:
        """A model of the same shape with random weights."""
        if self.path(name).is_dir():
            return
        checkpoint = resolve.resolve(str(self.path(like))).open(None)
        recipe = Recipe(checkpoint.config, TrainingConfig(steps=1, batch=1, window=1))
        vocabulary = start.vocabulary(checkpoint, (), checkpoint.config.vocab_size)
        export.write(
            start.masters(recipe), recipe.model, vocabulary.eos_ids, vocabulary.files,
            self.path(name),
        )  # fmt: skip

    def path(self, name: str) -> Path:
        return self._folder / name

    def _made(self, name: str, module: str, *arguments: str) -> dict[str, Any]:
        """What a command printed that made a model, with its seconds."""
        record = self._folder / f"{name}.json"
        command = [
            *(sys.executable, "-m", module, *arguments),
            *(f"--text={self.text}", f"--output={self.path(name)}", "--json"),
        ]
        shown = [argument.replace(f"{self._folder}/", "") for argument in command[1:]]
        if not record.exists() or json.loads(record.read_text("utf-8"))["command"] != shown:
            shutil.rmtree(self.path(name), ignore_errors=True)
            print(*command, file=sys.stderr, flush=True)
            begin = time.perf_counter()
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            seconds = time.perf_counter() - begin
            printed = {"command": shown, "minutes": seconds / 60, **json.loads(ran.stdout)}
            user_files.write({record: json.dumps(printed).encode()})
        figures: dict[str, Any] = json.loads(record.read_text("utf-8"))
        return figures
