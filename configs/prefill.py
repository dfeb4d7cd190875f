"""Disaggregated prefill: chips of their own for prompts."""

import dataclasses

from configs.errors import InputError
from configs.mesh import Mesh
from configs.model import ModelConfig
from configs.settings.drafts import LOOKUPS


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Chips that compute prompts, whose pages then move to the chips that decode.

    Attributes:
        chips: number of chips that divide the model, as many as in each group that decodes; 0: the
            chips that decode compute prompts too.
        first_chip: the first of them; None: the chip after the last that decodes.
        max_seqs: prompts on these chips at a time, including those that wait for room to decode;
            None: `engine.max_seqs`.
        cache_bytes: memory of each of these chips for pages; None: `engine.cache.cache_bytes`.
    """

    chips: int = 0
    first_chip: int | None = None
    max_seqs: int | None = None
    cache_bytes: int | None = None

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
        if not self.chips:
            return
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
        if model.has_states or not any(spec.elements_per_token for spec in model.cache_specs):
            raise InputError(
                f"prefill.chips={self.chips}: needs a model whose whole context is in pages, which "
                f"move between chips; {model.name} keeps some of it elsewhere"
            )
        if policy != "continuous":
            raise InputError(
                f"engine.scheduling.policy={policy}: must be continuous where prefill.chips are set"
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
        f"it goes with engine.drafts.proposer=ngram, suffix or none, not with {proposer}": (
            proposer not in (None, *LOOKUPS)
        ),
        f"it goes with one chip, not with {num_chips}": num_chips > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"engine.requests.prompt_budgets: {reason}")
