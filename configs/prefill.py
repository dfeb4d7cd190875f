"""Disaggregated prefill: chips, or processes, of their own for prompts."""

import dataclasses
import math

from configs.addresses import is_name
from configs.errors import InputError
from configs.mesh import Mesh
from configs.model import ModelConfig
from configs.settings.drafts import LOOKUPS

_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Chips that compute prompts, whose pages then move to the chips that decode: of this process
    (`chips`), or of others (`hosts`).

    Attributes:
        chips: number of chips that divide the model, as many as in each group that decodes; 0: the
            chips that decode compute prompts too.
        hosts: 'host:port' of each process that computes prompts (`serve --role=prefill`), with
            commas in between; while none is connected, the chips that decode compute prompts.
        bandwidth: bytes a second of the connection to each of these, for the plan.
        first_chip: the first of them; None: the chip after the last that decodes.
        max_seqs: prompts on these chips at a time, including those that wait for room to decode;
            None: `engine.max_seqs`.
        cache_bytes: memory of each of these chips for pages; None: `engine.cache.cache_bytes`.
        host_bytes: with `hosts`, memory of the host that decodes for pages that have come and wait
            for room; None: as much as its chips along `model` have for pages.
    """

    chips: int = 0
    hosts: str | None = None
    bandwidth: float | None = None
    first_chip: int | None = None
    max_seqs: int | None = None
    cache_bytes: int | None = None
    host_bytes: int | None = None

    def first(self, mesh: Mesh) -> int:
        """Returns the first chip, where the chips of `mesh` decode."""
        return mesh.num_chips if self.first_chip is None else self.first_chip

    def check(self, mesh: Mesh, model: ModelConfig, policy: str) -> None:
        """Checks that these chips can compute prompts for the chips of a mesh.

        Raises:
            InputError: they cannot.
        """
        if self.chips < 0:
            raise InputError(f"prefill.chips={self.chips}: must be at least 0")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise InputError(
                f"prefill.bandwidth={self.bandwidth:g}: must be above 0, in bytes a second"
            )
        if self.host_bytes is not None and self.host_bytes < 0:
            raise InputError(f"prefill.host_bytes={self.host_bytes}: must be at least 0")
        if not self.is_apart:
            return
        if self.hosts is not None:
            name = f"prefill.hosts={self.hosts}"
            addresses(self.hosts)
            if self.chips:
                raise InputError(f"{name}: goes without prefill.chips, which are of this process")
            if mesh.context > 1:
                raise InputError(
                    f"{name}: goes without mesh.context ({mesh.context}), whose chips hold parts "
                    "of a page"
                )
        else:
            name = f"prefill.chips={self.chips}"
            self._check_chips(mesh)
        if model.has_states or not any(spec.elements_per_token for spec in model.cache_specs):
            raise InputError(
                f"{name}: needs a model whose whole context is in pages, which move between chips; "
                f"{model.name} keeps some of it elsewhere"
            )
        if policy != "continuous":
            raise InputError(
                f"engine.scheduling.policy={policy}: must be continuous where "
                f"{name.partition('=')[0]} are set"
            )

    @property
    def is_apart(self) -> bool:
        """Whether other chips compute prompts than decode."""
        return self.chips > 0 or self.hosts is not None

    def _check_chips(self, mesh: Mesh) -> None:
        if self.chips != mesh.model:
            raise InputError(
                f"prefill.chips={self.chips}: must equal mesh.model ({mesh.model}), because each "
                "prefill chip sends pages to one decode chip"
            )
        if self.first(mesh) < mesh.num_chips:
            raise InputError(
                f"prefill.first_chip={self.first_chip}: must be at least {mesh.num_chips}, because "
                f"chips 0 to {mesh.num_chips - 1} decode"
            )


TOGETHER = Prefill()


def addresses(hosts: str) -> tuple[tuple[str, int], ...]:
    """Addresses and ports of `Prefill.hosts`.

    Raises:
        InputError: one of them is none.
    """
    pairs = []
    for name in hosts.split(","):
        host, _, port = name.strip().rpartition(":")
        host = host.strip("[]")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= _MAX_PORT
        if not (is_name(host) and is_port):
            raise InputError(
                f"prefill.hosts={hosts[:200]}: {name.strip()[:80]!r} is no address; write "
                f"host:port, with a port from 1 to {_MAX_PORT}"
            )
        pairs.append((host, int(port)))
    if len(set(pairs)) < len(pairs):
        raise InputError(f"prefill.hosts={hosts}: names an address twice; name each once")
    return tuple(pairs)


def check_budgets(
    model: ModelConfig, proposer: str | None, num_chips: int, hosts: str | None
) -> None:
    """Whether prompts may give up pages of the layers that keep all of the past: what these cached
    is then at another index than its position, which is all that tells their pages.

    Raises:
        InputError: no layer does, or something else knows of positions: the message says what.
    """
    specs = [spec for spec in model.cache_specs if spec.owner is None]
    reasons = {
        f"{model.name} keeps states, which no page holds": model.has_states,
        f"the queries of {model.name} choose what they read": any(
            spec.index_width or spec.has_extremes for spec in specs
        ),
        f"entries of {model.name} are of several tokens": any(s.stride > 1 for s in specs),
        f"no layer of {model.name} keeps all of a prompt": not any(
            spec.elements_per_token and spec.window is None for spec in specs
        ),
        f"it goes with engine.drafts.proposer=ngram, suffix or none, not with {proposer}": (
            proposer not in (None, *LOOKUPS)
        ),
        f"it goes with one chip, not with {num_chips}": num_chips > 1,
        f"it goes without prefill.hosts ({hosts})": hosts is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"engine.requests.prompt_budgets: {reason}")
