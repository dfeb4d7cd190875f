"""Chips of their own for prompts: disaggregated prefill."""

import dataclasses

from configs.errors import InputError
from configs.mesh import Mesh
from configs.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Chips that compute prompts, whose pages then move to the chips that decode.

    Attributes:
        chips: how many divide the model there, as many as in each group that decodes; 0: prompts
            are computed beside decoding rows, on the same chips.
        first_chip: the first of them; None: the one behind those that decode.
        max_seqs: prompts there at a time, those that wait for room to decode among them; None is
            `engine.max_seqs`.
        cache_bytes: memory of each of these chips for pages; None is `engine.cache.cache_bytes`.
    """

    chips: int = 0
    first_chip: int | None = None
    max_seqs: int | None = None
    cache_bytes: int | None = None

    def first(self, mesh: Mesh) -> int:
        """The first chip, where those of `mesh` decode."""
        return mesh.num_chips if self.first_chip is None else self.first_chip

    def check(self, mesh: Mesh, model: ModelConfig, policy: str) -> None:
        """Whether these chips can compute prompts for those of a mesh.

        Raises:
            InputError: they cannot: the message says why.
        """
        if self.chips < 0:
            raise InputError(f"prefill.chips is at least 0, not {self.chips}")
        if not self.chips:
            return
        if self.chips != mesh.model:
            raise InputError(
                f"prefill.chips={self.chips}: each sends its pages to one that decodes, and a "
                f"model is divided over {mesh.model} there (mesh.model): take as many"
            )
        if self.first(mesh) < mesh.num_chips:
            raise InputError(
                f"prefill.first_chip={self.first_chip} is among those that decode, 0 to "
                f"{mesh.num_chips - 1}: chips do one or the other"
            )
        if model.has_states or not any(spec.elements_per_token for spec in model.cache_specs):
            raise InputError(
                f"prefill.chips={self.chips}: pages move between chips, and {model.name} keeps "
                "some of its context in none"
            )
        if policy != "continuous":
            raise InputError(
                f"prefill.chips goes with engine.scheduling.policy=continuous, not {policy}"
            )


TOGETHER = Prefill()


def check_budgets(model: ModelConfig, proposer: str | None, num_chips: int) -> None:
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
        f"it goes with engine.drafts.proposer=ngram or none, not with {proposer}": (
            proposer not in (None, "ngram")
        ),
        f"it goes with one chip, not with {num_chips}": num_chips > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"engine.requests.prompt_budgets: {reason}")
