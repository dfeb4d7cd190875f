"""What chips exchange in one step: the planner's own list, which compiled programs are held to.

Along `data` nothing is exchanged. Along `model` a sum follows each product whose columns are
divided, and sampling combines what each chip finds in its part of the vocabulary
(`sharding/collectives.py`). Chips along `context` divide columns and the vocabulary with those
along `model`; their attention gathers a log-sum-exp a head, and sums what each chip's tokens give,
in the model's precision.
Along `expert` each mixture gathers the tokens of all chips, with their
experts and weights, and each chip gets the sums for its own.
"""

import dataclasses
from collections import Counter

from configs.kinds.kind import Mixer
from configs.mesh import Mesh
from configs.model import ModelConfig
from configs.precision import FORMATS

_WORD = 4  # bytes of a float32 and of an id: sums travel as they were made
_DIGIT_PASSES, _DIGIT_SUMS = 8, 15  # of a search for a threshold, four bits at a time


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind and size in a step. Its bytes are a chip's: of the operand or of the
    result, whichever is larger.

    Attributes:
        place: part of the step: 'embed', 'mixer', 'ffn', 'experts' or 'sample'.
        axis: of the mesh, or axes ('model,context').
        kind: 'all-reduce', 'all-gather' or 'reduce-scatter'.
        count: how many there are, over all layers.
        token_bytes, row_bytes: of one of them, for each token that the chip feeds and for each row
            of logits.
        exposed: the next operation needs what it brings, so that it hides behind nothing.
    """

    place: str
    axis: str
    kind: str
    count: int
    token_bytes: float = 0.0
    row_bytes: float = 0.0
    exposed: bool = True

    def num_bytes(self, num_tokens: float, num_logits: float) -> float:
        """Bytes of one of them in a step of so many tokens and rows of logits."""
        return self.token_bytes * num_tokens + self.row_bytes * num_logits


def of_step(
    config: ModelConfig, mesh: Mesh, greedy: bool = True, top_logprobs: int = 0, stored: str = "",
    summed: str = "",
) -> tuple[Collective, ...]:  # fmt: skip
    """Everything that the chips of one data-parallel group exchange in a step.

    Args:
        greedy: no row is drawn; drawing is counted as accelerators do it, without branches.
        top_logprobs: alternatives that are reported for each sampled token.
        stored: format of the tokens that travel to experts; '' is the model's dtype.
        summed: and of what chips along `context` sum.
    """
    exchanges: Counter[Collective] = Counter()

    def add(
        place: str, axis: str, elements: int, kind: str = "all-reduce", size: float = _WORD
    ) -> None:
        """Adds an exchange of so many elements a token, each of so many bytes."""
        exchanges[Collective(place, axis, kind, 1, size * elements)] += 1

    columns = "model" if mesh.context == 1 else "model,context"
    summed_bytes = FORMATS[summed or config.dtype].bytes_for(1, 1)
    if mesh.group_chips > 1:
        inputs = config.num_layers * config.layer_inputs.width if config.layer_inputs else 0
        add("embed", columns, config.width + inputs)  # rows of both tables travel together
        for index, layer in enumerate(config.layers):
            # The sums of norms travel together, and compilers join those of outputs.
            mixer, num_sums = layer.mixer, layer.mixer.num_sums
            for elements in (mixer.num_divided_norms, mixer.num_chosen, num_sums * config.width):
                if elements and mesh.model > 1:
                    add("mixer", "model", elements)
            if layer.ffn is not None:
                add("ffn", columns, layer.ffn.num_sums * config.width)
            heads = _chip_heads(mixer, mesh.model) if mesh.context > 1 else 0
            if heads:
                add("mixer", "context", mesh.context * heads, "all-gather")
                width = config.stored_by(index).value_width
                add("mixer", "context", heads * width, size=summed_bytes)
        exchanges.update(_sampling(config, mesh.group_chips, columns, greedy, top_logprobs))
    if mesh.expert > 1:
        format = FORMATS[stored or config.dtype]
        for layer in config.layers:
            if layer.ffn is not None and layer.ffn.experts is not None:
                width = layer.ffn.met_width(config)
                token = mesh.expert * format.bytes_for(width, width)
                back = mesh.expert * _WORD * width
                chosen = mesh.expert * 2 * _WORD * layer.ffn.experts[1]  # ids and weights
                exchanges[Collective("experts", "expert", "all-gather", 1, token)] += 1
                exchanges[Collective("experts", "expert", "all-gather", 1, chosen)] += 1
                exchanges[Collective("experts", "expert", "reduce-scatter", 1, back)] += 1
    return tuple(
        dataclasses.replace(collective, count=n) for collective, n in exchanges.items() if n
    )


def _chip_heads(mixer: Mixer, chips: int) -> int:
    """Query heads that attend on a chip along `model`."""
    chip_mixer = mixer.per_chip(chips) if chips > 1 else mixer
    return sum(part.query_heads for part in chip_mixer.parts)


def _sampling(
    config: ModelConfig, chips: int, axis: str, greedy: bool, top_logprobs: int
) -> Counter[Collective]:
    """What combines the chips' parts of a row of logits."""

    def gathered(words: int) -> Collective:
        return Collective("sample", axis, "all-gather", 1, row_bytes=chips * words * _WORD)

    def summed(words: int) -> Collective:
        return Collective("sample", axis, "all-reduce", 1, row_bytes=words * _WORD)

    exchanges = Counter((gathered(3), summed(1)))  # best value, its id and log-sum-exp; its logit
    if top_logprobs:
        part = -(-config.vocab_size // chips)
        exchanges[gathered(2 * min(top_logprobs, part))] += 1
    if not greedy:
        # The largest logit, that of the drawn token, and the mass that epsilon cuts a share of.
        exchanges[summed(1)] += 3
        exchanges[summed(_DIGIT_SUMS)] += 2 * _DIGIT_PASSES - 1  # of top-k, and of top-p:
        exchanges[summed(_DIGIT_SUMS + 1)] += 1  # its first pass brings the whole mass, too
        exchanges[gathered(2)] += 1  # the best noisy value and its id
    return exchanges


def totals(
    exchanged: tuple[Collective, ...], num_tokens: int, num_logits: int
) -> dict[str, tuple[int, int]]:
    """(count, bytes) by kind of a step of so many tokens and rows of logits."""
    by_kind: dict[str, tuple[int, int]] = {}
    for collective in exchanged:
        count, num_bytes = by_kind.get(collective.kind, (0, 0))
        added_bytes = collective.count * round(collective.num_bytes(num_tokens, num_logits))
        by_kind[collective.kind] = count + collective.count, num_bytes + added_bytes
    return by_kind
