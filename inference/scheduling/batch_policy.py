"""The policies 'static' and 'dynamic': baselines that continuous batching is compared with."""

from configs.engine import Config
from inference.scheduling.queue import WaitingQueue


class WholeBatches:
    """A batch starts when it is full (or, with the policy 'dynamic', when the first has waited long
    enough), and no other starts before all of it have ended; ended sequences keep their rows.
    """

    def __init__(self, config: Config, num_usable_pages: tuple[int, ...]):
        """`num_usable_pages` of each data shard."""
        self._config = config
        self._num_usable_pages = num_usable_pages
        self._num_rows = 0  # that the running batch keeps to its end

    def may_start(self, waiting: WaitingQueue, is_running: bool, now: float, is_open: bool) -> bool:
        """Whether a batch starts in this step; `now` and `is_open` as `Scheduler.schedule` takes
        them.
        """
        if is_running or not waiting:
            return False
        self._num_rows = 0
        if not is_open or self._is_full(waiting):
            return True
        waited_s = now - min(sequence.history.arrival_s for sequence in waiting)
        scheduling = self._config.engine.scheduling
        return scheduling.policy == "dynamic" and waited_s >= scheduling.max_wait_s

    def num_decode_rows(self, num_decoding: int, num_running: int) -> int:
        """Rows that the decode rectangle has, those of ended sequences included; both numbers are
        those of the data shard with the most.
        """
        self._num_rows = max(self._num_rows, num_running)
        return self._num_rows if num_decoding else 0

    def _is_full(self, waiting: WaitingQueue) -> bool:
        """Whether they fill all slots, or need more pages at their longest than there are."""
        num_shards = self._config.mesh.num_groups
        if len(waiting) >= num_shards * self._config.engine.max_seqs:
            return True
        peaks = [self._config.peak_pages(sequence.max_positions) for sequence in waiting]
        totals = map(sum, zip(*peaks, strict=True))
        return any(n > num_shards * m for n, m in zip(totals, self._num_usable_pages, strict=True))
