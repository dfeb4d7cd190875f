"""How the engine runs a model: how many sequences, how much cache, which step shapes."""

import dataclasses
import functools
from typing import Any, ClassVar

from configs import cache, heads, precision
from configs.cache import BLOCK_TOKENS, PageGroup
from configs.errors import InputError
from configs.mesh import ONE_CHIP, Mesh
from configs.model import ModelConfig
from configs.prefill import TOGETHER, Prefill, check_budgets
from configs.settings.kernels import KernelConfig
from configs.settings.requests import RequestConfig
from configs.settings.scheduling import SchedulingConfig
from configs.settings.section import Section, paths
from configs.settings.shapes import MIN_DETERMINISTIC_ROWS, MOST_ROWS, ShapeConfig

PREEMPTIONS = ("auto", "recompute", "swap")
PROPOSERS = ("ngram", "draft", "medusa", "eagle")
ACCEPTANCES = ("coupled", "rejection", "typical")
WEIGHTS = ("bfloat16", "float32", "file", *precision.OURS)

PAGE_TOKENS = {"cpu": 16, "gpu": 64, "tpu": 128}  # the default, by platform
TPU_LANES = 128  # a row of a TPU's memory has so many elements, or several times as many

OBSERVED_TOKENS = 32  # at a prompt's end, whose attention decides which of its pages stay


@dataclasses.dataclass(frozen=True)
class EngineConfig(Section):
    """Sizes and switches of an engine. All that is static in a step derives from these and the
    model. Of a mesh that divides sequences each data shard has these sizes: slots, pages,
    rectangles and prefill budget.

    Attributes:
        max_seqs: sequences that run at the same time (slots).
        max_context: longest sequence in tokens; None is the model's own.
        page_tokens: tokens a page holds; None is the platform's default (`Config.for_platform`).
        latent_lanes: what the elements of a latent's row in a page, or a quantized one's bytes, are
            a multiple of; None is the platform's.
        cache_bytes: memory of a chip for pages (but for page 0 of each group, the sink of padding),
            and without overcommit for recurrent states too; never more is taken than `max_seqs`
            full contexts need.
        expected_tokens: of a sequence at its end: page groups share `cache_bytes` as sequences of
            that length need them; None: as those of `max_context`.
        num_drafts: k, draft tokens a sequence may have verified in one step.
        adapt_drafts: steps verify 0 to k of them, whatever brings the most tokens a second.
        draft_tree: of a tree of drafts, the node that each of them follows: 0 is the newest token,
            n the n-th draft; (): each follows the one before it.
        tree_levels: of a tree that EAGLE heads shape by how sure they are: the most drafts that
            follow each other; 0: there is none.
        tree_branches: of each level of such a tree, how many nodes go on, with as many each.
        proposer: what proposes them on the device, one of `PROPOSERS`; None: whoever sets
            `Sequence.drafts`.
        acceptance: of drafts. 'coupled': those that equal what plain decoding draws there, so that
            answers do not depend on drafts; 'rejection': more of them, so that answers differ in
            all but their law; 'typical': whatever the model finds likely enough, which makes
            answers others than its own.
        prefix_cache: requests share the pages of equal prefixes, cached until room is needed.
        snapshots: of all layers' recurrent states, for prompts to go on from; None: `max_seqs`.
            They are made where a prompt's last page ends, where prompts were seen to part, and
            every `snapshot_tokens`; None: by cost (`planner/cache_policy.py`).
        preemption: how evicted pages, those of preempted sequences among them, come back.
            'recompute': they are computed again; 'swap': they are offloaded to host memory, while
            there is room, and copied back; 'auto': whichever is cheaper.
        swap_bytes: host memory for offloaded pages; at most four times the device's is used.
        overcommit: more sequences are admitted than fit at their longest, and the youngest is
            preempted when pages run out; without it `max_seqs` sequences of `max_context` tokens
            fit into `cache_bytes`, or the configuration is refused.
        deterministic: a token's bits depend on its own history only, not on neighbours or chunking.
        weights: the format of all weights: 'bfloat16', 'float32', or 'file': each as the checkpoint
            stores it, blocks of a GGUF file as they are; of the matrices also one of few bits
            (`precision.OURS`), to which each number is rounded while weights are read. None is what
            a quantized directory stores, and else `model.dtype`, to which a GGUF file is converted
            once.
        seed: base of the random streams of requests without a seed; None draws one.
    """

    path: ClassVar[str] = "engine"

    max_seqs: int = 32
    max_context: int | None = None
    page_tokens: int | None = None
    cache_bytes: int = 256 << 20
    expected_tokens: int | None = None
    num_drafts: int = 0
    adapt_drafts: bool = False
    draft_tree: tuple[int, ...] = ()
    tree_levels: int = 0
    tree_branches: int = 0
    proposer: str | None = None
    acceptance: str = "coupled"
    prefix_cache: bool = True
    snapshots: int | None = None
    snapshot_tokens: int | None = None
    preemption: str = "auto"
    swap_bytes: int = 256 << 20
    latent_lanes: int | None = None
    overcommit: bool = True
    deterministic: bool = False
    weights: str | None = None
    seed: int | None = None
    requests: RequestConfig = RequestConfig()
    shapes: ShapeConfig = ShapeConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    kernels: KernelConfig = KernelConfig()

    def __new__(cls, *sections: Any, **settings: Any) -> "EngineConfig":
        """Refuses a setting that a group has.

        Raises:
            InputError: the message has its path.
        """
        for name in settings:
            cls.check_name(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("max_seqs", "cache_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"engine.{name} is at least 1, not {getattr(self, name)}")
        for name in ("max_seqs", "num_drafts"):
            if getattr(self, name) > MOST_ROWS:
                raise InputError(f"engine.{name} is at most {MOST_ROWS}, not {getattr(self, name)}")
        for name in ("num_drafts", "swap_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"engine.{name} is at least 0, not {getattr(self, name)}")
        for name, valid in (
            ("preemption", PREEMPTIONS),
            ("acceptance", ACCEPTANCES),
        ):
            if getattr(self, name) not in valid:
                raise InputError(
                    f"engine.{name} is one of {', '.join(valid)}, not {getattr(self, name)!r}"
                )
        for name, known in (
            ("proposer", PROPOSERS),
            ("weights", WEIGHTS),
        ):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(
                    f"engine.{name} is one of {', '.join(known)} or None, not {value!r}"
                )
        for name, least in (
            ("page_tokens", 1), ("expected_tokens", 1), ("snapshots", 0), ("snapshot_tokens", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"engine.{name} is at least {least}, not {value}")
        if self.proposer and not self.num_drafts:
            raise InputError(
                f"engine.proposer={self.proposer} needs engine.num_drafts of at least 1"
            )
        if self.adapt_drafts and not self.proposer:
            raise InputError("engine.adapt_drafts needs engine.proposer")
        if self.has_trees or self.tree_branches:
            heads.check_tree(
                self.proposer, self.num_drafts, self.draft_tree, self.tree_levels,
                self.tree_branches,
            )  # fmt: skip
            if self.deterministic:
                raise InputError(
                    "a tree of drafts goes without engine.deterministic: branches lie between a "
                    "sequence's keys, and sums over them round differently"
                )
        if self.acceptance != "coupled" and (self.deterministic or not self.proposer):
            raise InputError(
                f"engine.acceptance={self.acceptance} goes with a proposer and without "
                "deterministic: only coupled acceptance gives plain decoding's tokens"
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InputError(f"engine.seed is at least 0 and below 2**64, not {self.seed}")
        chunk, budget = self.shapes.chunk_tokens, self.scheduling.prefill_budget
        if budget is not None and budget < chunk:
            raise InputError(
                f"engine.scheduling.prefill_budget={budget}: must be at least "
                f"engine.shapes.chunk_tokens ({chunk})"
            )
        if self.deterministic and chunk < MIN_DETERMINISTIC_ROWS:
            raise InputError(
                f"engine.shapes.chunk_tokens={chunk}: must be at least {MIN_DETERMINISTIC_ROWS} "
                "with engine.deterministic"
            )
        page = self.page_tokens
        if page is not None and BLOCK_TOKENS % page and page % BLOCK_TOKENS:
            raise InputError(
                f"engine.page_tokens divides {BLOCK_TOKENS} or is a multiple of it, {page} is "
                "neither"
            )

    @property
    def has_trees(self) -> bool:
        """Whether drafts branch."""
        return bool(self.draft_tree or self.tree_levels)

    @property
    def draft_levels(self) -> int:
        """The most drafts of a step that follow each other."""
        return len(self.level_sizes) or self.num_drafts

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of each level of a tree but its last, from the newest token on; (): no tree."""
        if self.tree_levels:
            return (1, *(self.tree_branches,) * (self.tree_levels - 1))
        depth = [0]
        for parent in self.draft_tree:
            depth.append(1 + depth[parent])
        return tuple(depth.count(level) for level in range(max(depth)))

    @classmethod
    def of(cls, **settings: Any) -> "EngineConfig":
        """Returns the default engine with some settings changed (see `replace`)."""
        return cls().replace(**settings)

    def replace(self, **settings: Any) -> "EngineConfig":
        """Returns the engine with some settings changed, each by its name, whatever its group.

        Raises:
            InputError: a name is unknown, or the settings are not valid together.
        """
        places, groups, changes = paths(EngineConfig), dict[str, dict[str, Any]](), dict[str, Any]()
        for name, value in settings.items():
            if name not in places:
                raise InputError(f"unknown setting {name!r}; valid: {', '.join(places)}")
            group = places[name].split(".")[1]
            (changes if group == name else groups.setdefault(group, {}))[name] = value
        for group, fields in groups.items():
            changes[group] = dataclasses.replace(getattr(self, group), **fields)
        return dataclasses.replace(self, **changes)

    def without_drafts(self) -> "EngineConfig":
        """The same where nothing is drafted."""
        return dataclasses.replace(
            self, num_drafts=0, draft_tree=(), tree_levels=0, tree_branches=0, proposer=None,
            adapt_drafts=False, acceptance="coupled",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """A model, the engine that runs it, the chips that one replica lies on, those that compute its
    prompts, if these are others, and the model that drafts, if one does.
    """

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    mesh: Mesh = ONE_CHIP
    prefill: Prefill = TOGETHER
    draft: ModelConfig | None = None

    def __post_init__(self) -> None:
        self.mesh.check(self.model)
        self.prefill.check(self.mesh, self.model, self.engine.scheduling.policy)
        heads.check_draft(
            self.draft, self.model, self.engine.proposer, self.engine.draft_levels,
            self.max_context, self.mesh.num_chips > 1 or self.prefill.chips > 0,
        )  # fmt: skip
        if self.engine.has_trees:
            heads.check_branches(self.cached_model)
        if self.device_page_tokens % (stride := self.cached_model.stride):
            raise InputError(
                f"engine.page_tokens={self.page_tokens}: {self.model.name}, or what drafts for it, "
                f"keeps one entry for {stride} tokens, and a page has a multiple of that"
            )
        if self.engine.requests.prompt_budgets:
            check_budgets(self.model, self.engine.proposer, self.num_chips)
        limit = self.engine.max_context
        if limit is not None and not 1 <= limit <= self.model.max_context:
            raise InputError(
                f"engine.max_context is between 1 and the model's {self.model.max_context}, "
                f"not {limit}"
            )
        if (num_tops := self.engine.requests.top_logprobs) > self.model.vocab_size:
            raise InputError(
                f"engine.requests.top_logprobs={num_tops}: must be at most the vocabulary "
                f"({self.model.vocab_size})"
            )
        if not self.engine.overcommit and self.engine.max_seqs > self.most_seqs:
            raise InputError(
                f"{self.engine.max_seqs} sequences of {self.max_context} tokens need "
                f"{self.full_bytes(self.engine.max_seqs)} bytes of cache, engine.cache_bytes is "
                f"{self.engine.cache_bytes}: engine.max_seqs is at most {self.most_seqs} without "
                "engine.overcommit"
            )
        used = sum((n - 1) * size for n, size in zip(self.num_pages, self._page_bytes, strict=True))
        if used > self.engine.cache_bytes:
            peaks = self.peak_pages(self.max_context)
            whole = sum(n * size for n, size in zip(peaks, self._page_bytes, strict=True))
            raise InputError(
                f"engine.cache_bytes is at least {-(-whole // min(peaks))}, for one page of each "
                f"page group, not {self.engine.cache_bytes}"
            )
        if self.prefill.chips:
            try:
                self.for_prefill()
            except InputError as error:
                raise InputError(f"chips of prefill: {error}") from None

    def with_engine(self, **settings: Any) -> "Config":
        """Returns the configuration with some settings of the engine changed, each by its name."""
        return dataclasses.replace(self, engine=self.engine.replace(**settings))

    @property
    def num_chips(self) -> int:
        """Chips from the first on that one replica needs."""
        if not self.prefill.chips:
            return self.mesh.num_chips
        return self.prefill.first(self.mesh) + self.prefill.chips

    def for_prefill(self) -> "Config":
        """What the chips of `prefill` run."""
        own = self.prefill
        engine = self.engine.without_drafts().replace(
            chunked_prefill=True, overcommit=True, penalties=False, grammars=False,
            free_padding=False,
            max_seqs=self.engine.max_seqs if own.max_seqs is None else own.max_seqs,
            cache_bytes=self.engine.cache_bytes if own.cache_bytes is None else own.cache_bytes,
        )  # fmt: skip
        mesh = Mesh(model=own.chips)
        return dataclasses.replace(self, engine=engine, mesh=mesh, prefill=TOGETHER)

    @functools.cached_property
    def chip_model(self) -> ModelConfig:
        """The model as one chip of the mesh computes it."""
        return self.model.per_chip(self.mesh.model, self.mesh.expert)

    @functools.cached_property
    def cached_model(self) -> ModelConfig:
        """All layers that cache something: `chip_model`'s, then those of the model that drafts, of
        which only what they cache counts: their parameters may differ in more than a model's can.
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
        """What loads the model that drafts."""
        assert self.draft is not None
        engine = self.engine.without_drafts().replace(max_context=None, weights=None)
        return dataclasses.replace(self, model=self.draft, engine=engine, draft=None)

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens."""
        return self.engine.max_context or self.model.max_context

    def for_platform(self, platform: str) -> "Config":
        """Returns the same with a platform's defaults of `page_tokens`, `greedy_steps` and
        `latent_lanes`, where these are None; platforms are named as JAX does.
        """
        greedy, page = self.engine.shapes.greedy_steps, self.engine.page_tokens
        page = page or max(PAGE_TOKENS.get(platform, PAGE_TOKENS["cpu"]), self.cached_model.stride)
        greedy = platform != "cpu" if greedy is None else greedy
        lanes = self.engine.latent_lanes or (TPU_LANES if platform == "tpu" else 1)
        return self.with_engine(page_tokens=page, greedy_steps=greedy, latent_lanes=lanes)

    @property
    def page_tokens(self) -> int:
        """Tokens a page holds; a CPU's default, unless `engine.page_tokens` is set."""
        return self.engine.page_tokens or max(PAGE_TOKENS["cpu"], self.cached_model.stride)

    @property
    def device_page_tokens(self) -> int:
        """Tokens of a page on the device, where a page larger than a block of attention is several
        pages of one block.
        """
        return min(self.page_tokens, BLOCK_TOKENS)

    @property
    def device_pages(self) -> int:
        """Device pages that a page consists of."""
        return self.page_tokens // self.device_page_tokens

    @property
    def page_columns(self) -> int:
        """P, entries of a device page table: the longest sequence, in whole blocks of attention."""
        return -(-self.max_context // BLOCK_TOKENS) * (BLOCK_TOKENS // self.device_page_tokens)

    def peak_pages(self, num_tokens: int) -> tuple[int, ...]:
        """Most pages of each group that one sequence has at once until it has `num_tokens`."""
        engine, shapes, page = self.engine, self.engine.shapes, self.page_tokens
        uncertain = engine.num_drafts * (2 if engine.proposer else 1)  # in flight, and next
        step = max(shapes.chunk_tokens * max(shapes.prefill_chunks), 1 + uncertain)
        step += OBSERVED_TOKENS * engine.requests.prompt_budgets
        return tuple(g.peak_pages(num_tokens, step, page) for g in self.cached_model.page_groups)

    @property
    def _page_bytes(self) -> list[int]:
        """Bytes of a page of each group on a chip."""
        return self.cached_model.page_bytes(self.page_tokens, self.engine.latent_lanes or 1)

    def full_bytes(self, num_seqs: int) -> int:
        """Bytes of pages and states for so many sequences at their longest, of what is kept of
        states, and of the sinks.
        """
        groups = zip(self.peak_pages(self.max_context), self._page_bytes, strict=True)
        paged = sum((1 + num_seqs * peak) * size for peak, size in groups)
        return paged + self.state_bytes(1 + num_seqs)

    @property
    def most_seqs(self) -> int:
        """Sequences that fit into `cache_bytes` at their longest; `engine.max_seqs` where the model
        caches nothing.
        """
        sinks = self.full_bytes(0)
        if not sinks:
            return self.engine.max_seqs
        return max(0, (self.engine.cache_bytes - sinks) // (self.full_bytes(1) - sinks))

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each group in `cache_bytes` (`cache.share_out`); page 0 is the sink."""
        engine, most = self.engine, self.max_context
        expected = self.peak_pages(min(engine.expected_tokens or most, most))
        longest, sizes = self.peak_pages(most), self._page_bytes
        shared = cache.share_out(engine.cache_bytes, sizes, expected, longest, engine.max_seqs)
        return tuple(1 + n for n in shared)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the cache that an engine allocates: the pages of every group, page 0 of each
        (the sink of padding) among them, the states of all slots, their sink included, and
        snapshots.
        """
        paged = sum(n * size for n, size in zip(self.num_pages, self._page_bytes, strict=True))
        return paged + self.state_bytes(1 + self.engine.max_seqs)

    def state_bytes(self, num_slots: int) -> int:
        """Bytes of the states of so many slots and of all snapshots."""
        copies = num_slots * (1 + self.engine.num_drafts) + self.num_snapshots
        return copies * self.cached_model.state_bytes

    @property
    def num_snapshots(self) -> int:
        """Copies of all layers' states that the prefix cache may hold; the first is a sink."""
        if not self.model.has_states:
            return 0
        engine = self.engine
        if not engine.prefix_cache and engine.preemption == "recompute":
            return 1  # nobody would look for another
        return 1 + (engine.max_seqs if engine.snapshots is None else engine.snapshots)

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
        at most four times as many; page 0 stands for none.
        """
        pages, sizes = self.num_cached_pages, [*self._page_bytes, self.cached_model.state_bytes]
        total = sum((n - 1) * size for n, size in zip(pages, sizes, strict=False))
        if self.engine.preemption == "recompute" or not total:
            return tuple(1 for _ in pages)
        times = min(4.0, self.engine.swap_bytes / (total * self.mesh.num_chips))
        return tuple(1 + int((n - 1) * times) for n in pages)
