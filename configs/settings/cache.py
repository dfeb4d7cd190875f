"""The cache of an engine: its pages, its prefix cache, and where evicted pages go."""

import dataclasses
from typing import ClassVar

from configs.cache import BLOCK_TOKENS
from configs.errors import InputError
from configs.precision import CACHE_FORMATS
from configs.settings.section import Section, setting

PREEMPTIONS = ("auto", "recompute", "swap")

PAGE_TOKENS = {"cpu": 16, "gpu": 64, "tpu": 128}  # the default, by platform
# Elements of a row of a TPU's memory, or a divisor of them; bytes that a GPU's copy engine shuffles
# of a row with elements of eight bits.
LANES = 128
BYTE_CACHES = "int8", "fp8"


def padded_caches(platform: str, pads_bytes: bool) -> tuple[str, ...]:
    """Formats of caches whose rows in pages are padded to `LANES` (`PageGroup.bytes_per_page`).

    A TPU's memory has whole lanes, whatever lays out the pages.

    Args:
        pads_bytes: as `layers.kernels.attention.contract.Implementation` says of what does.
    """
    if platform == "tpu":
        return tuple(CACHE_FORMATS)
    return BYTE_CACHES if pads_bytes else ()


@dataclasses.dataclass(frozen=True)
class CacheConfig(Section):
    """Pages and states of sequences, on the device and in host memory."""

    path: ClassVar[str] = "engine.cache"

    page_tokens: int | None = setting(
        None,
        "Tokens of a page on a chip; None: the platform's default (`Config.for_platform`).",
        lower=1,
    )
    row_multiple: int | None = setting(
        None,
        "Multiple that the elements of a latent's row in a page, or the bytes of a quantized row, "
        "are padded to; None: the platform's.",
        host_only=True,
    )
    cache_bytes: int = setting(
        256 << 20,
        "Memory of a chip for pages, except page 0 of each group (padding), and without overcommit "
        "for recurrent states too. The engine never takes more than max_seqs full contexts need.",
        lower=1, host_only=True,
    )  # fmt: skip
    expected_tokens: int | None = setting(
        None,
        "Tokens of a typical sequence at its end: page groups share cache_bytes as sequences of "
        "that length need them. None: max_context.",
        lower=1, host_only=True,
    )  # fmt: skip
    prefix_cache: bool = setting(
        True, "Requests share the pages of equal prefixes, cached until room is needed.",
        host_only=True,
    )  # fmt: skip
    snapshots: int | None = setting(
        None,
        "Copies of all layers' recurrent states, from which prompts resume. The engine copies "
        "states at the end of a prompt's last page, where prompts diverged before, and every "
        "snapshot_tokens. None: max_seqs.",
        lower=0, host_only=True,
    )  # fmt: skip
    snapshot_tokens: int | None = setting(
        None,
        "Tokens between two snapshots of a prompt; None: by cost (`planner/cache_policy.py`).",
        lower=1, host_only=True,
    )  # fmt: skip
    swap_bytes: int = setting(
        256 << 20, "Host memory for evicted pages; at most four times the device's is used.",
        lower=0, host_only=True,
    )  # fmt: skip
    preemption: str = setting(
        "auto",
        "How evicted pages come back, those of preempted sequences among them. 'recompute': by "
        "prefill. 'swap': from host memory, if it had room. 'auto': by the cheaper way.",
        one_of=PREEMPTIONS, host_only=True,
    )  # fmt: skip
    overcommit: bool = setting(
        True,
        "The scheduler admits more sequences than fit at their longest, and preempts the youngest "
        "when pages run out. False: max_seqs sequences of max_context tokens must fit into "
        "cache_bytes.",
        host_only=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        page = self.page_tokens
        if page is not None and BLOCK_TOKENS % page and page % BLOCK_TOKENS:
            raise InputError(
                f"engine.cache.page_tokens={page}: must divide {BLOCK_TOKENS} or be a multiple of "
                "it"
            )
