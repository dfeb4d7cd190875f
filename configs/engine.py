"""How the engine runs a model: how many sequences, how much cache, which step shapes."""

import dataclasses
import math

from configs.cache import BLOCK_TOKENS
from configs.errors import InputError
from configs.model import ModelConfig

POLICIES = ("continuous", "static", "dynamic")
PREEMPTIONS = ("auto", "recompute", "swap")
ATTENTIONS = ("reference", "pallas_gpu", "pallas_tpu", "jax_tpu")

PAGE_TOKENS = {"cpu": 16, "gpu": 64, "tpu": 128}  # what suits a platform

MOST_ROWS = 4096  # of a rectangle: no machine is faster with more

# Below, XLA's CPU backend sums a product's rows in another order.
MIN_DETERMINISTIC_ROWS = 8


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and switches of an engine. Everything static about a step derives from these and the
    model.

    Attributes:
        max_seqs: sequences that run at the same time (slots).
        max_context: longest sequence in tokens; None is the model's own.
        page_tokens: tokens a page holds; None is what suits the device (`Config.on`).
        cache_bytes: memory for pages, and without overcommit for recurrent states too; never more
            is taken than `max_seqs` full contexts need.
        decode_rows: sizes of the decode rectangle to compile; a step uses the smallest that fits.
        tile_tokens: query tokens of a prefill tile.
        prefill_tiles: sizes of the prefill rectangle to compile, in tiles.
        num_drafts: k, draft tokens a sequence may have verified in one step.
        top_logprobs: alternatives reported beside each sampled or scored token.
        penalties: count tokens, so that repetition, presence and frequency penalties can be asked
            for.
        policy: when waiting requests may start. 'continuous': as soon as a slot and pages are free;
            'static': when a full batch waits, which is then held to its end; 'dynamic': the same,
            or when the first of them has waited `max_wait_s`.
        max_wait_s: seconds that the dynamic policy waits for a full batch.
        chunked_prefill: prompts are computed in pieces beside decoding rows; without it prompts
            stop decoding and are computed to their end first.
        prefill_budget: prompt tokens a step may take while others decode; None is all tiles.
        max_prefill_seqs: sequences whose prompts a step may work on; None is `max_seqs`.
        prefix_cache: requests share the pages of equal beginnings, kept until room is needed.
        max_overtakes: later arrivals with longer cached prefixes that may be admitted before a
            request.
        preemption: what becomes of the pages of a preempted sequence. 'recompute': they are given
            up; 'swap': they are kept in host memory while there is room; 'auto': whichever is
            cheaper.
        swap_bytes: host memory for pages that the device has no room for; at most four times what
            the device has is used.
        overlap: the next step is planned while the device runs the current one.
        overcommit: more sequences than fit at their longest are taken on, and the youngest is
            preempted when pages run out; without it `max_seqs` sequences of `max_context` tokens
            fit into `cache_bytes`, or the configuration is refused.
        deterministic: a token's bits depend on its own history only, not on neighbours or chunking.
        attention: who computes attention over pages (`docs/kernels.md`): 'reference' anywhere, a
            kernel where it can or not at all; None is the kernel that was measured to be right and
            faster on this kind of device, else the reference.
        seed: base of the random streams of requests without a seed; None draws one.
    """

    max_seqs: int = 32
    max_context: int | None = None
    page_tokens: int | None = None
    cache_bytes: int = 256 << 20
    decode_rows: tuple[int, ...] = (2, 8, 16, 32)
    tile_tokens: int = 64
    prefill_tiles: tuple[int, ...] = (1, 2, 4, 8)
    num_drafts: int = 0
    top_logprobs: int = 0
    penalties: bool = False
    policy: str = "continuous"
    max_wait_s: float = 0.05
    chunked_prefill: bool = True
    prefill_budget: int | None = None
    max_prefill_seqs: int | None = None
    prefix_cache: bool = True
    max_overtakes: int = 16
    preemption: str = "auto"
    swap_bytes: int = 256 << 20
    overlap: bool = True
    overcommit: bool = True
    deterministic: bool = False
    attention: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_seqs", "tile_tokens", "cache_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"engine.{name} is at least 1, not {getattr(self, name)}")
        for name in ("max_seqs", "tile_tokens", "num_drafts", "top_logprobs"):
            if getattr(self, name) > MOST_ROWS:
                raise InputError(f"engine.{name} is at most {MOST_ROWS}, not {getattr(self, name)}")
        for name in ("num_drafts", "top_logprobs", "max_overtakes", "swap_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"engine.{name} is at least 0, not {getattr(self, name)}")
        if not 0 <= self.max_wait_s < math.inf:
            raise InputError(f"engine.max_wait_s is 0 or more seconds, not {self.max_wait_s}")
        for name, valid in (("policy", POLICIES), ("preemption", PREEMPTIONS)):
            if getattr(self, name) not in valid:
                raise InputError(
                    f"engine.{name} is one of {', '.join(valid)}, not {getattr(self, name)!r}"
                )
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise InputError(
                f"engine.attention is one of {', '.join(ATTENTIONS)} or None, not "
                f"{self.attention!r}"
            )
        for name, least in (
            ("prefill_budget", self.tile_tokens),
            ("max_prefill_seqs", 1),
            ("page_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"engine.{name} is at least {least}, not {value}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InputError(f"engine.seed is at least 0 and below 2**64, not {self.seed}")
        for name in ("decode_rows", "prefill_tiles"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1 or max(sizes) > MOST_ROWS:
                raise InputError(f"engine.{name} lists sizes from 1 to {MOST_ROWS}, not {sizes}")
        if self.deterministic and self.tile_tokens < MIN_DETERMINISTIC_ROWS:
            raise InputError(
                f"engine.tile_tokens is at least {MIN_DETERMINISTIC_ROWS} with deterministic, "
                f"not {self.tile_tokens}"
            )
        page = self.page_tokens
        if page is not None and BLOCK_TOKENS % page and page % BLOCK_TOKENS:
            raise InputError(
                f"engine.page_tokens divides {BLOCK_TOKENS} or is a multiple of it, {page} is "
                "neither"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run: what is run and how."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        limit = self.engine.max_context
        if limit is not None and not 1 <= limit <= self.model.max_context:
            raise InputError(
                f"engine.max_context is between 1 and the model's {self.model.max_context}, "
                f"not {limit}"
            )
        if self.engine.top_logprobs > self.model.vocab_size:
            raise InputError(
                f"engine.top_logprobs is at most the vocabulary of {self.model.vocab_size}, "
                f"not {self.engine.top_logprobs}"
            )
        if not self.engine.overcommit and self.engine.max_seqs > self.most_seqs:
            raise InputError(
                f"{self.engine.max_seqs} sequences of {self.max_context} tokens need "
                f"{self.full_bytes(self.engine.max_seqs)} bytes of cache, engine.cache_bytes is "
                f"{self.engine.cache_bytes}: engine.max_seqs is at most {self.most_seqs} without "
                "engine.overcommit"
            )

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens."""
        return self.engine.max_context or self.model.max_context

    def on(self, platform: str) -> "Config":
        """The same for a device, as JAX names its platform: pages are of the size that suits it,
        where none was asked for.
        """
        page = self.engine.page_tokens or PAGE_TOKENS.get(platform, PAGE_TOKENS["cpu"])
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, page_tokens=page))

    @property
    def page_tokens(self) -> int:
        """Tokens a page holds: a CPU's, where neither anybody nor a device says."""
        return self.engine.page_tokens or PAGE_TOKENS["cpu"]

    @property
    def device_page_tokens(self) -> int:
        """Tokens of a page on the device: a page larger than a block of attention is a run of
        blocks.
        """
        return min(self.page_tokens, BLOCK_TOKENS)

    @property
    def device_pages(self) -> int:
        """Pages of the device that a page is made of."""
        return self.page_tokens // self.device_page_tokens

    @property
    def page_columns(self) -> int:
        """P, entries of a device page table: the longest sequence, in whole blocks of attention."""
        blocks = -(-self.max_context // BLOCK_TOKENS)
        return blocks * (BLOCK_TOKENS // self.device_page_tokens)

    def peak_pages(self, num_tokens: int) -> tuple[int, ...]:
        """Pages a group, at most held at once by one sequence that grows to `num_tokens`."""
        engine, page = self.engine, self.page_tokens
        step = max(engine.tile_tokens * max(engine.prefill_tiles), 1 + engine.num_drafts)
        peaks = []
        for group in self.model.page_groups:
            window = group.spec.window
            live = num_tokens if window is None else min(num_tokens, window + step + 2 * page)
            peaks.append(-(-live // page))
        return tuple(peaks)

    def full_bytes(self, num_seqs: int) -> int:
        """Bytes of the pages and states of as many sequences at their longest, and of a sink of
        each.
        """
        page, dtype = self.page_tokens, self.model.dtype
        groups = zip(self.peak_pages(self.max_context), self.model.page_groups, strict=True)
        paged = sum(
            (1 + num_seqs * peak) * group.bytes_per_page(dtype, page) for peak, group in groups
        )
        drafts = self.engine.num_drafts
        state = sum(spec.bytes_per_sequence(drafts) for spec in self.model.cache_specs)
        return paged + (1 + num_seqs) * state

    @property
    def most_seqs(self) -> int:
        """Sequences that `cache_bytes` hold at their longest; as many as there may be, where the
        model keeps nothing.
        """
        sinks = self.full_bytes(0)
        if not sinks:
            return self.engine.max_seqs
        return max(0, (self.engine.cache_bytes - sinks) // (self.full_bytes(1) - sinks))

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages each group gets of `cache_bytes`, in the proportion of a full sequence; page 0 is
        the sink.
        """
        page, dtype = self.page_tokens, self.model.dtype
        peaks = self.peak_pages(self.max_context)
        sizes = [group.bytes_per_page(dtype, page) for group in self.model.page_groups]
        per_sequence = sum(n * size for n, size in zip(peaks, sizes, strict=True))
        if not per_sequence:
            return ()
        sequences = min(self.engine.cache_bytes / per_sequence, self.engine.max_seqs)
        return tuple(1 + max(1, int(sequences * n)) for n in peaks)

    @property
    def num_host_pages(self) -> tuple[int, ...]:
        """Pages each group gets of `swap_bytes`, in the proportion of the device's and at most four
        times as many; page 0 stands for none. Recurrent states are computed again instead.
        """
        page, dtype, model = self.page_tokens, self.model.dtype, self.model
        total = sum(
            (n - 1) * group.bytes_per_page(dtype, page)
            for n, group in zip(self.num_pages, model.page_groups, strict=True)
        )
        if self.engine.preemption == "recompute" or model.has_states or not total:
            return tuple(1 for _ in self.num_pages)
        times = min(4.0, self.engine.swap_bytes / total)
        return tuple(1 + int((n - 1) * times) for n in self.num_pages)


@dataclasses.dataclass(frozen=True)
class Run:
    """A file of `configs/runs`: a model by name (as `--model` takes it) and its engine."""

    model: str
    engine: EngineConfig = EngineConfig()
