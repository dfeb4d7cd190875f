"""What a run has finished, a file each, so that the same command goes on where it was ended."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from configs.errors import InputError, reason, shown
from inference.checkpoints import mapped, safetensors_file
from inference.files import atomic, digests, user_files

_RECORD = "run.json"
_FIGURES = "figures"


class Parts:
    """A folder of finished parts, made now: safetensors, whole or not there. `record` is what the
    run is, plain JSON values.

    Raises:
        InputError: it is something else or another run's, or cannot be written.
    """

    def __init__(self, folder: Path, record: Mapping[str, object]):
        self.folder = folder
        expected = json.loads(json.dumps(record))
        path = folder / _RECORD
        try:
            if path.exists():
                _check_same(folder, expected, mapped.read_json(path))
            elif folder.exists() and any(folder.iterdir()):
                raise InputError(f"{folder}: in the way of what is finished: move it elsewhere")
            else:
                folder.mkdir(exist_ok=True)
                user_files.write({path: (json.dumps(expected, indent=1) + "\n").encode()})
        except OSError as error:
            raise InputError(f"cannot write {folder}: {reason(error)}") from None

    def has(self, name: str) -> bool:
        return self._place(name).exists()

    def write(
        self, name: str, arrays: Mapping[str, np.ndarray], figures: Mapping[str, float]
    ) -> None:
        """Keeps a part's arrays and figures, by path; raises InputError if it cannot be written."""
        tensors = {path: (array.shape, array.dtype.name) for path, array in arrays.items()}
        try:
            with atomic.open_file(self._place(name)) as file:
                metadata = digests.UNSEALED | {_FIGURES: json.dumps(dict(figures))}
                safetensors_file.write_header(file, tensors, metadata)
                for array in arrays.values():
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                digests.seal(file)
        except OSError as error:
            raise InputError(f"cannot write {self._place(name)}: {reason(error)}") from None

    def read(self, name: str) -> dict[str, np.ndarray]:
        """A part's arrays, mapped; raises InputError if the file is damaged."""
        place = self._place(name)
        try:
            mapped.check_digest(place)
        except InputError as error:
            raise InputError(f"{error}; remove it, and what it holds is computed again") from None
        return safetensors_file.map_arrays(place)

    def figures(self, name: str) -> dict[str, float]:
        """A part's figures, by path; raises InputError if the file is unsound."""
        metadata = safetensors_file.read_metadata(self._place(name))
        figures: dict[str, float] = json.loads(metadata[_FIGURES])
        return figures

    def remove(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def _place(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _check_same(folder: Path, expected: dict[str, object], other: dict[str, object]) -> None:
    for name in expected:
        if expected[name] != other.get(name):
            raise InputError(
                f"{folder} holds what another run has finished: its {name} is "
                f"{shown(other.get(name))}, not {shown(expected[name])}; remove it, or name "
                "another --output"
            )
