"""What an engine keeps on its devices: weights and pages, of those that decode and those that
prefill.
"""

from inference.prefill_worker import PrefillWorker
from inference.runtime.model_runner import ModelRunner
from layers.params import Params


class DeviceMemory:
    """Fills, frees and changes it on all devices at once."""

    def __init__(self, runner: ModelRunner, worker: PrefillWorker | None):
        """`runner` decodes, `worker` prefills for it, if that is not the same."""
        self._runner, self._worker = runner, worker

    @property
    def is_free(self) -> bool:
        """Whether the engine sleeps."""
        return self._runner.is_offloaded

    def empty_pages(self) -> None:
        """Starts with empty pages and slots."""
        self._runner.reset()
        if self._worker:
            self._worker.model_runner.reset()

    def set_params(self, params: Params) -> None:
        """Other weights, packed for the runner; all devices get them, or none."""
        own = self._worker and self._worker.params_of(params)
        self._runner.params = self._runner.params | params  # the model that drafts stays
        if self._worker:
            self._worker.model_runner.params = own

    def free(self, keeps_weights: bool, keeps_pages: bool) -> None:
        """Frees all of it; what is kept moves to the host's memory, weights once."""
        self._runner.offload(keeps_weights, keeps_pages)
        if self._worker:
            self._worker.model_runner.offload(False, keeps_pages)

    def restore(self, params: Params | None) -> bool:
        """As `ModelRunner.restore`."""
        has_pages = self._runner.restore(params)
        if self._worker:
            self._worker.model_runner.restore(self._worker.params_of(self._runner.params))
        return has_pages
