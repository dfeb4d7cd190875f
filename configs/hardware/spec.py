"""What a step runs on: rates and sizes of one chip and its links."""

import dataclasses
import math
from collections.abc import Mapping

from configs.settings.cache import LANES


@dataclasses.dataclass(frozen=True)
class HardwareSpec:
    """One chip.

    Attributes:
        memory_bytes: memory that holds weights and cache.
        read_bandwidth: bytes a second from that memory.
        rates: FLOPs a second of dense matrix products, by type.
        link_bandwidth: bytes a second that a chip sends to its peers, all links together and one
            direction; 0 where it has none.
        host_bandwidth: bytes a second of copies between that memory and the host's, one direction;
            None: they are the same memory.
        link_axes: axes of the torus that those links make; a ring along one of them has its share.
            1: a switch, through which every link reaches every peer.
        link_latency_s: seconds before the first byte of a collective's step arrives.
        linked_chips: chips that such links join, itself included.
        overhead_s: seconds of a step that are neither reading nor computing.
        gamma: share of the shorter of reading and computing that does not hide behind the longer.
        bandwidth_share, rate_share: of the rates above that steps were seen to reach.
        half_rows: rows at which a product with weights reaches half of its rate: T rows take the
            time of T + half_rows.
        attention_share, cache_share: of those shares, what attention's arithmetic reaches, which
            prompts wait for, and its reading of the cache, which decoding waits for.
        price_per_hour: dollars, for costs; None where nobody names one.
        implementations: of the engine whose steps showed these shares
            (`ModelRunner.implementations`); None: none did.
        padded_caches: formats of caches whose rows its attention pads (`padded_caches`), that of
            bfloat16 models whose heads its kernel reads.
    """

    name: str
    memory_bytes: float
    read_bandwidth: float
    rates: Mapping[str, float]
    link_bandwidth: float = 0.0
    link_latency_s: float = 0.0
    linked_chips: float = 1
    overhead_s: float = 0.0
    gamma: float = 0.0
    bandwidth_share: float = 1.0
    rate_share: float = 1.0
    half_rows: float = 0.0
    attention_share: float = 1.0
    cache_share: float = 1.0
    price_per_hour: float | None = None
    link_axes: int = 1
    host_bandwidth: float | None = None
    implementations: str | None = None
    padded_caches: tuple[str, ...] = ()

    def rate(self, compute: str) -> float:
        """FLOPs a second in a type; in bfloat16 where the chip has no faster path for it.

        A machine of which no rate is known computes for nothing: what remains is reading.
        """
        return self.rates.get(compute, self.rates.get("bfloat16", math.inf))

    def lanes(self, cache_format: str) -> int:
        """Multiple that rows of pages of a cache are padded to: elements of latents, or bytes."""
        return LANES if cache_format in self.padded_caches else 1

    @property
    def is_calibrated(self) -> bool:
        """Whether steps were timed on it: its predictions are more than a roofline."""
        return self.gamma > 0 or self.bandwidth_share != 1 or self.rate_share != 1

    def ridge(self, compute: str = "bfloat16") -> float:
        """FLOPs a byte above which a workload stops waiting for memory (Williams et al. 2009), at
        the rates that steps reach.
        """
        rate, bandwidth = self.rate(compute), self.read_bandwidth
        return rate * self.rate_share / (bandwidth * self.bandwidth_share)
