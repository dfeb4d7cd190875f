"""What an engine keeps on its devices: weights and pages, of those that decode and those that
prefill.
"""

from configs.errors import InputError
from inference.prefill.prefiller import Prefiller
from inference.prefill.worker import PrefillWorker
from inference.runtime.model_runner import Copies, ModelRunner
from layers.params import Params


class DeviceMemory:
    """Fills, frees and changes it on all devices at once."""

    def __init__(self, runner: ModelRunner, prefiller: Prefiller | None):
        """`runner` decodes; `prefiller` prefills for it, if that is not the same."""
        self._runner = runner
        self._worker = prefiller if isinstance(prefiller, PrefillWorker) else None
        self._runners = [runner, *(prefiller.runners if prefiller else ())]
        self._copies: list[Copies] | None = None  # of each runner, on the host while all is free

    @property
    def is_free(self) -> bool:
        return self._copies is not None

    def empty_pages(self) -> None:
        for runner in self._runners:
            runner.reset()

    def set_params(self, params: Params) -> None:
        """Other weights, packed for the runner; all devices get them, or none."""
        worker_params = self._worker.params_of(params) if self._worker else {}
        self._runner.params = self._runner.params | params  # the model that drafts stays
        if self._worker:
            self._worker.model_runner.params = worker_params

    def free(self, keeps_weights: bool, keeps_pages: bool) -> None:
        """Frees all of it, or, where what is kept finds no room in the host's memory, nothing;
        weights are kept once.
        """
        self._copies = [
            runner.copies(keeps_weights and runner is self._runner, keeps_pages)
            for runner in self._runners
        ]
        self._free()

    def restore(self, params: Params | None) -> bool:
        """Ends `free` with packed `params` (None: the kept ones), and the kept pages or empty ones;
        whatever fails, all of it stays free.

        Returns:
            Whether pages were kept.

        Raises:
            InputError: no weights were.
        """
        assert self._copies is not None
        weights, state = self._copies[0]
        if params is None and not weights.keys() - {"draft", "adapters"}:
            raise InputError("no weights were kept: give wake some, as update_params takes them")
        try:
            self._runner.restore(self._copies[0], params)
            if self._worker:
                sent = self._worker.params_of(self._runner.params)
                self._worker.model_runner.restore(self._copies[1], sent)
        except BaseException:
            self._free()
            raise
        self._copies = None
        return state is not None

    def _free(self) -> None:
        for runner in self._runners:
            runner.free()
