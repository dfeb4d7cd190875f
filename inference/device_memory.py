"""What an engine keeps on its devices: weights and pages, of those that decode and those that
prefill.
"""

from configs.errors import InputError
from inference.prefill_worker import PrefillWorker
from inference.runtime.model_runner import Copies, ModelRunner
from layers.params import Params


class DeviceMemory:
    """Fills, frees and changes it on all devices at once."""

    def __init__(self, runner: ModelRunner, worker: PrefillWorker | None):
        """`runner` decodes, `worker` prefills for it, if that is not the same."""
        self._runner, self._worker = runner, worker
        # On the host while all is free: of the runner, of the worker.
        self._copies: tuple[Copies, Copies | None] | None = None

    @property
    def is_free(self) -> bool:
        return self._copies is not None

    def empty_pages(self) -> None:
        """Starts with empty pages and slots."""
        self._runner.reset()
        if self._worker:
            self._worker.model_runner.reset()

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
        copies = self._runner.copies(keeps_weights, keeps_pages)
        worker_copies = (
            self._worker.model_runner.copies(False, keeps_pages) if self._worker else None
        )
        self._copies = copies, worker_copies
        self._free()

    def restore(self, params: Params | None) -> bool:
        """Ends `free`, with empty pages where none were kept; whatever fails, all of it stays free.

        Args:
            params: packed weights; None: those that were kept.

        Returns:
            Whether pages were kept.

        Raises:
            InputError: no weights were.
        """
        assert self._copies is not None
        copies, worker_copies = self._copies
        weights, state = copies
        if params is None and not weights.keys() - {"draft"}:
            raise InputError("no weights were kept: give wake some, as update_params takes them")
        try:
            self._runner.restore(copies, params)
            if self._worker and worker_copies:
                sent = self._worker.params_of(self._runner.params)
                self._worker.model_runner.restore(worker_copies, sent)
        except BaseException:
            self._free()
            raise
        self._copies = None
        return state is not None

    def _free(self) -> None:
        self._runner.free()
        if self._worker:
            self._worker.model_runner.free()
