"""How the engine runs a model: how many sequences, how much cache, which step shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

from configs import cache, heads, precision
from configs.cache import BLOCK_TOKENS, PageGroup
from configs.errors import InputError
from configs.mesh import ONE_CHIP, Mesh, check_context
from configs.model import ModelConfig
from configs.prefill import TOGETHER, Prefill, check_budgets
from configs.settings.adapters import AdapterConfig
from configs.settings.cache import LANES, PAGE_TOKENS, CacheConfig, padded_caches
from configs.settings.drafts import DraftConfig
from configs.settings.kernels import KernelConfig
from configs.settings.requests import OBSERVED_TOKENS, RequestConfig
from configs.settings.scheduling import SchedulingConfig
from configs.settings.section import Section, paths, setting
from configs.settings.shapes import MIN_DETERMINISTIC_ROWS, MOST_ROWS, ShapeConfig

WEIGHTS = ("bfloat16", "float32", "file", *precision.OURS)


@dataclasses.dataclass(frozen=True)
class EngineConfig(Section):
    """Settings of an engine, in groups by feature. Step shapes and all that is static in a step
    derive from these and the model. Where a mesh divides sequences, each data shard has these
    sizes: slots, pages, rectangles and prefill budget.
    """

    path: ClassVar[str] = "engine"

    max_seqs: int = setting(
        32, "Sequences that run at the same time (slots).", lower=1, upper=MOST_ROWS, host_only=True
    )
    max_context: int | None = setting(
        None, "Tokens of the longest sequence; None: the model's own limit.", host_only=True
    )
    weights: str | None = setting(
        None,
        "Format of all weights: 'bfloat16', 'float32', 'file' (each as the checkpoint stores it, "
        "blocks of a GGUF file as they are), or a format of few bits to which the numbers of "
        "matrices are rounded while weights are read. None: as a quantized directory stores them, "
        "else the model's dtype, to which a GGUF file is converted once.",
        one_of=WEIGHTS, host_only=True,
    )  # fmt: skip
    deterministic: bool = setting(
        False, "A token's bits depend on its own history only, not on other rows or on chunking."
    )
    seed: int | None = setting(
        None, "Base of the random streams of requests without a seed; None: a random one.",
        lower=0, upper=2**64 - 1, host_only=True,
    )  # fmt: skip
    adapters: AdapterConfig = AdapterConfig()
    drafts: DraftConfig = DraftConfig()
    cache: CacheConfig = CacheConfig()
    requests: RequestConfig = RequestConfig()
    shapes: ShapeConfig = ShapeConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    kernels: KernelConfig = KernelConfig()

    def __new__(cls, *sections: object, **settings: object) -> "EngineConfig":
        """Refuses a setting that a group has.

        Raises:
            InputError: the message has its path.
        """
        for name in settings:
            cls.check_name(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        chunk, budget = self.shapes.chunk_tokens, self.scheduling.prefill_budget
        if budget is not None and budget < chunk:
            raise InputError(
                f"engine.scheduling.prefill_budget={budget}: must be at least "
                f"engine.shapes.chunk_tokens ({chunk})"
            )
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        chunk, acceptance = self.shapes.chunk_tokens, self.drafts.acceptance
        if chunk < MIN_DETERMINISTIC_ROWS:
            raise InputError(
                f"engine.shapes.chunk_tokens={chunk}: must be at least {MIN_DETERMINISTIC_ROWS} "
                "with engine.deterministic"
            )
        if self.drafts.has_tree:
            raise InputError(
                "engine.deterministic: goes without a tree of drafts, because branches lie between "
                "a sequence's keys, and sums over them round differently"
            )
        if acceptance != "coupled":
            raise InputError(
                f"engine.drafts.acceptance={acceptance}: goes without engine.deterministic, "
                "because only coupled acceptance gives the tokens of plain decoding"
            )

    @classmethod
    def of(cls, **settings: object) -> "EngineConfig":
        """Returns the default engine with some settings changed (see `replace`)."""
        return cls().replace(**settings)

    def replace(self, **settings: object) -> "EngineConfig":
        """Returns the engine with some settings changed, each by its name, whatever its group.

        Raises:
            InputError: a name is unknown, or the settings are not valid together.
        """
        places, changes = paths(EngineConfig), dict[str, object]()
        groups: dict[str, dict[str, object]] = {}
        for name, value in settings.items():
            if name not in places:
                raise InputError(f"unknown setting {name!r}; valid: {', '.join(places)}")
            group = places[name].split(".")[1]
            (changes if group == name else groups.setdefault(group, {}))[name] = value
        for group, fields in groups.items():
            changes[group] = dataclasses.replace(getattr(self, group), **fields)
        replace: Callable[..., EngineConfig] = dataclasses.replace
        return replace(self, **changes)

    def without_drafts(self) -> "EngineConfig":
        return dataclasses.replace(self, drafts=DraftConfig())


@dataclasses.dataclass(frozen=True)
class Config:
    """A model, the engine that runs it, and the chips of one replica.

    Attributes:
        prefill: chips of their own for prompts, if any.
        draft: the model that drafts, if any.
    """

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    mesh: Mesh = ONE_CHIP
    prefill: Prefill = TOGETHER
    draft: ModelConfig | None = None

    def __post_init__(self) -> None:
        drafts, requests = self.engine.drafts, self.engine.requests
        self.mesh.check(self.model)
        if self.mesh.context > 1:
            check_context(self.mesh, drafts.has_tree, requests.prompt_budgets, self.prefill.chips)
        self.prefill.check(self.mesh, self.model, self.engine.scheduling.policy)
        heads.check_draft(
            self.draft, self.model, drafts.proposer, drafts.levels, self.max_context,
            self.mesh.num_chips > 1 or self.prefill.is_apart,
        )  # fmt: skip
        if drafts.has_tree:
            heads.check_branches(self.cached_model)
        if requests.prompt_budgets:
            check_budgets(self.model, drafts.proposer, self.num_chips, self.prefill.hosts)
        if self.engine.adapters.slots and self.prefill.is_apart:
            raise InputError(
                f"engine.adapters.slots={self.engine.adapters.slots}: adapters go with chips that "
                "do all, not with prefill apart; leave prefill.chips and prefill.hosts out"
            )
        limit, vocab = self.engine.max_context, self.model.vocab_size
        if limit is not None and not 1 <= limit <= self.model.max_context:
            raise InputError(
                f"engine.max_context={limit}: must be from 1 to the model's "
                f"{self.model.max_context}"
            )
        if requests.top_logprobs > vocab:
            raise InputError(
                f"engine.requests.top_logprobs={requests.top_logprobs}: must be at most the "
                f"vocabulary ({vocab})"
            )
        self._check_cache()
        if self.prefill.is_apart:
            try:
                self.for_prefill()
            except InputError as error:
                where = "chips" if self.prefill.chips else "processes"
                raise InputError(f"{where} of prefill: {error}") from None

    def _check_cache(self) -> None:
        limits, num_seqs = self.engine.cache, self.engine.max_seqs
        if self.device_page_tokens % (stride := self.cached_model.stride):
            raise InputError(
                f"engine.cache.page_tokens={self.page_tokens}: must be a multiple of {stride}, "
                f"because {self.model.name} or its draft model stores one entry for {stride} tokens"
            )
        if not limits.overcommit and num_seqs > self.most_seqs:
            raise InputError(
                f"engine.max_seqs={num_seqs}: must be at most {self.most_seqs} without "
                f"engine.cache.overcommit, because {num_seqs} sequences of {self.max_context} "
                f"tokens need {self.full_bytes(num_seqs)} bytes, and engine.cache.cache_bytes is "
                f"{limits.cache_bytes}"
            )
        used = sum((n - 1) * size for n, size in zip(self.num_pages, self._page_bytes, strict=True))
        if used > limits.cache_bytes:
            peaks = self.peak_pages(self.max_context)
            total = sum(n * size for n, size in zip(peaks, self._page_bytes, strict=True))
            raise InputError(
                f"engine.cache.cache_bytes={limits.cache_bytes}: must be at least "
                f"{-(-total // min(peaks))}, for one page of each page group"
            )

    def with_engine(self, **settings: object) -> "Config":
        """Returns the configuration with some settings of the engine changed, each by its name."""
        return dataclasses.replace(self, engine=self.engine.replace(**settings))

    @property
    def num_chips(self) -> int:
        """Chips from the first on that one replica needs."""
        if not self.prefill.chips:
            return self.mesh.num_chips
        return self.prefill.first(self.mesh) + self.prefill.chips

    def for_prefill(self) -> "Config":
        """Returns the configuration of the chips of `prefill`, in this process or another."""
        engine, prefill = self.engine, self.prefill
        engine = engine.without_drafts().replace(
            chunked_prefill=True, overcommit=True, penalties=False, grammars=False,
            free_padding=False,
            max_seqs=engine.max_seqs if prefill.max_seqs is None else prefill.max_seqs,
            cache_bytes=(
                engine.cache.cache_bytes if prefill.cache_bytes is None else prefill.cache_bytes
            ),
        )  # fmt: skip
        mesh = Mesh(model=prefill.chips or self.mesh.model)
        return dataclasses.replace(self, engine=engine, mesh=mesh, prefill=TOGETHER)

    @functools.cached_property
    def chip_model(self) -> ModelConfig:
        """The model as one chip of the mesh computes it."""
        return self.model.per_chip(self.mesh.model, self.mesh.expert, self.mesh.context)

    @functools.cached_property
    def cached_model(self) -> ModelConfig:
        """The layers of `chip_model`, then those of the model that drafts, for their caches alone:
        the parameters of the two may differ in more than one model's layers can.
        """
        model = self.chip_model
        if self.draft is None:
            return model
        layers = model.layers + self.draft.shifted(model.num_layers)
        return dataclasses.replace(
            model, pattern=layers, num_layers=len(layers), norm="rms", norm_offset=0.0,
            learned_positions=0, formats=(),
        )  # fmt: skip

    def for_draft(self) -> "Config":
        """Returns the configuration that loads the model that drafts."""
        assert self.draft is not None
        engine = self.engine.without_drafts().replace(max_context=None, weights=None)
        return dataclasses.replace(self, model=self.draft, engine=engine, draft=None)

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens."""
        return self.engine.max_context or self.model.max_context

    def for_platform(self, platform: str, pads_bytes: bool = False) -> "Config":
        """Returns the same with a platform's defaults of `page_tokens`, `greedy_steps` and
        `row_multiple`, where these are None; platforms are named as JAX does.

        Args:
            pads_bytes: as `padded_caches` takes it.
        """
        greedy, page = self.engine.shapes.greedy_steps, self.engine.cache.page_tokens
        page = page or max(PAGE_TOKENS.get(platform, PAGE_TOKENS["cpu"]), self.cached_model.stride)
        greedy = platform != "cpu" if greedy is None else greedy
        is_padded = self.model.cache_dtype in padded_caches(platform, pads_bytes)
        lanes = self.engine.cache.row_multiple or (LANES if is_padded else 1)
        return self.with_engine(page_tokens=page, greedy_steps=greedy, row_multiple=lanes)

    @property
    def page_tokens(self) -> int:
        """Tokens a page holds, on all chips along `context` together."""
        return self.chip_page_tokens * self.mesh.context

    @property
    def chip_page_tokens(self) -> int:
        """Tokens of a page that a chip holds; a CPU's default, unless `engine.cache.page_tokens` is
        set.
        """
        return self.engine.cache.page_tokens or max(PAGE_TOKENS["cpu"], self.cached_model.stride)

    @property
    def device_page_tokens(self) -> int:
        """Tokens of a page on the device, at most a block of attention."""
        return min(self.chip_page_tokens, BLOCK_TOKENS)

    @property
    def device_pages(self) -> int:
        """Device pages in a page, on each chip."""
        return self.chip_page_tokens // self.device_page_tokens

    @property
    def page_columns(self) -> int:
        """P, entries of a device page table: a chip's part of the longest sequence, in whole blocks
        of attention.
        """
        blocks = -(-self.max_context // (BLOCK_TOKENS * self.mesh.context))
        return blocks * (BLOCK_TOKENS // self.device_page_tokens)

    def peak_pages(self, num_tokens: int) -> tuple[int, ...]:
        """Most pages of each group that one sequence has at once until it has `num_tokens`."""
        shapes, drafts, page = self.engine.shapes, self.engine.drafts, self.page_tokens
        uncertain = drafts.num_drafts * (2 if drafts.proposer else 1)  # in flight, and next
        step = max(shapes.chunk_tokens * max(shapes.prefill_chunks), 1 + uncertain)
        step += OBSERVED_TOKENS * self.engine.requests.prompt_budgets
        return tuple(g.peak_pages(num_tokens, step, page) for g in self.cached_model.page_groups)

    @property
    def _page_bytes(self) -> list[int]:
        """Bytes of a page of each group on a chip."""
        lanes = self.engine.cache.row_multiple or 1
        return self.cached_model.page_bytes(self.chip_page_tokens, lanes)

    def full_bytes(self, num_seqs: int) -> int:
        """Bytes of pages and states for so many sequences at their longest, of snapshots, and of
        padding.
        """
        groups = zip(self.peak_pages(self.max_context), self._page_bytes, strict=True)
        paged = sum((1 + num_seqs * peak) * size for peak, size in groups)
        return paged + self.state_bytes(1 + num_seqs)

    def with_room(self, num_seqs: int) -> "Config":
        """Returns the configuration whose cache holds so many sequences at their longest."""
        return self.with_engine(cache_bytes=max(1, self.full_bytes(num_seqs)))

    @property
    def most_seqs(self) -> int:
        """Sequences that fit into `cache_bytes` at their longest; `engine.max_seqs` where the model
        caches nothing.
        """
        padding = self.full_bytes(0)
        if not padding:
            return self.engine.max_seqs
        return max(0, (self.engine.cache.cache_bytes - padding) // (self.full_bytes(1) - padding))

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each group in `cache_bytes` (`cache.share_out`), and page 0, the padding."""
        limits, longest = self.engine.cache, self.max_context
        expected = min(limits.expected_tokens or longest, longest)
        shared = cache.share_out(
            limits.cache_bytes, self._page_bytes, self.peak_pages(expected),
            self.peak_pages(longest), self.engine.max_seqs,
        )  # fmt: skip
        return tuple(1 + n for n in shared)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the cache that an engine allocates: the pages of every group, the states of all
        slots, both with one more for padding, and snapshots.
        """
        paged = sum(n * size for n, size in zip(self.num_pages, self._page_bytes, strict=True))
        return paged + self.state_bytes(1 + self.engine.max_seqs)

    def state_bytes(self, num_slots: int) -> int:
        """Bytes of the states of so many slots and of all snapshots."""
        copies = num_slots * (1 + self.engine.drafts.num_drafts) + self.num_snapshots
        return copies * self.cached_model.state_bytes

    @property
    def num_snapshots(self) -> int:
        """Copies of all layers' states that the prefix cache may hold; the first is padding."""
        limits = self.engine.cache
        if not self.model.has_states:
            return 0
        if not limits.prefix_cache and limits.preemption == "recompute":
            return 1  # no sequence would resume from another
        return 1 + (self.engine.max_seqs if limits.snapshots is None else limits.snapshots)

    @property
    def num_cached_pages(self) -> tuple[int, ...]:
        """Pages of each of `cached_groups` on the device."""
        return self.num_pages + ((self.num_snapshots,) if self.num_snapshots else ())

    @functools.cached_property
    def cached_groups(self) -> tuple[PageGroup, ...]:
        """Page groups, and as one more the snapshots of all layers with states."""
        specs = self.cached_model.cache_specs
        layers = tuple(layer for layer, spec in enumerate(specs) if spec.states)
        groups = self.cached_model.page_groups
        return (*groups, PageGroup(cache.SNAPSHOT, layers, cache.SNAPSHOTS)) if layers else groups

    @property
    def num_host_pages(self) -> tuple[int, ...]:
        """Pages of each of `cached_groups` in `swap_bytes`, in the proportions of the device's and
        at most four times as many; page 0 means no page.
        """
        pages, sizes = self.num_cached_pages, [*self._page_bytes, self.cached_model.state_bytes]
        total = sum((n - 1) * size for n, size in zip(pages, sizes, strict=False))
        if self.engine.cache.preemption == "recompute" or not total:
            return tuple(1 for _ in pages)
        times = min(4.0, self.engine.cache.swap_bytes / (total * self.mesh.num_chips))
        return tuple(1 + int((n - 1) * times) for n in pages)
