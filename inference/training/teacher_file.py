"""What a teacher expects of a text, computed once and kept in the cache: the likeliest tokens of
each position with their log-probabilities.
"""

import hashlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from configs.errors import InputError, reason
from configs.model import ModelConfig
from configs.recipes.training import Distillation
from inference.checkpoints.load import Progress
from inference.files import cache_directory
from inference.layerwise.parts import Parts
from inference.training import divergences, losses
from inference.training.windows import Windows
from layers import decoder, ragged
from layers.params import Params

_PART = 32  # windows of a file
_FORMAT = 1  # of the files


class TeacherFile:
    """`loop.Data`: the windows of a text, with what `distillation.from_file` learns from. The cache
    has, or gets, files of all windows that the steps of a training read.

    Args:
        record: names the teacher and the tokens of the windows, plain JSON values.

    Raises:
        InputError: the cache cannot be read or written.
    """

    def __init__(self, windows: Windows, training: Distillation, record: dict[str, object]):
        self._windows, self._training = windows, training
        steps = range(min(training.steps, -(-windows.count // training.batch)))
        self._places = sorted({place for step in steps for place in windows.places(step)})
        self._row = {place: row for row, place in enumerate(self._places)}
        record = record | {
            "format": _FORMAT,
            "window": training.window,
            "temperature": training.temperature,
            "top_k": training.top_k,
            "places": hashlib.sha256(str(self._places).encode()).hexdigest(),
        }
        name = hashlib.sha256(str(sorted(record.items())).encode()).hexdigest()[:32]
        folder = cache_directory.path() / "teachers"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {folder}: {reason(error)}") from None
        self._parts = Parts(folder / name, record)

    def write(
        self,
        teacher: ModelConfig,
        load: Callable[[], Params],
        progress: Progress | None = None,
    ) -> None:
        """Computes what is not there yet, a part at a time; `load` returns the teacher's parameters
        as they are declared. Raises InputError if a part cannot be written.
        """
        starts = range(0, len(self._places), _PART)
        missing = [start for start in starts if not self._parts.has(_name(start))]
        if not missing:
            return
        values = load()
        run = jax.jit(lambda values, inputs_YW: self._likeliest(values, teacher, inputs_YW))
        for nth, start in enumerate(missing):
            inputs_YW = self._windows.rows(self._places[start : start + _PART])[:, :-1]
            ids, logprobs = map(np.asarray, run(values, inputs_YW))
            dtype = np.uint16 if teacher.vocab_size <= 1 << 16 else np.int32
            logprobs = np.maximum(logprobs, np.finfo(np.float16).min).astype(np.float16)
            arrays = {"ids": ids.astype(dtype), "logprobs": logprobs}
            self._parts.write(_name(start), arrays, {})
            if progress:
                progress(nth + 1, len(missing), "reading with the teacher")

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """{"tokens": i32[batch, W + 1], "ids": i32[batch, W, K], "logprobs": f16[batch, W, K + 1]};
        a function of seed and step alone.
        """
        places = self._windows.places(step)
        rows = [divmod(self._row[place], _PART) for place in places]
        numbers = {nth for nth, _ in rows}
        parts = {nth: self._parts.read(_name(nth * _PART)) for nth in numbers}
        ids = np.stack([parts[nth]["ids"][row] for nth, row in rows]).astype(np.int32)
        logprobs = np.stack([parts[nth]["logprobs"][row] for nth, row in rows])
        return {"tokens": self._windows.rows(places), "ids": ids, "logprobs": logprobs}

    def _likeliest(
        self, values: Params, teacher: ModelConfig, inputs_YW: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As `divergences.likeliest`, [Y, W, ...], of one window at a time."""
        training = self._training

        def of_window(inputs_W: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = ragged.contiguous(1, len(inputs_W))
            hidden_YWD, _ = losses.hidden_states(values, teacher, inputs_W[None], rows)
            logits_WV = decoder.logits(values, teacher, hidden_YWD[0]) / training.temperature
            return divergences.likeliest(logits_WV, training.top_k)

        outputs: tuple[jax.Array, jax.Array] = jax.lax.map(of_window, jnp.asarray(inputs_YW))
        return outputs


def _name(start: int) -> str:
    return f"windows-{start}"
