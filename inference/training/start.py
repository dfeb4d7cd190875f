"""What a model starts training with: its tokenizer, and parameters where they lie."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from configs.errors import InputError
from configs.kinds.kind import Mixer
from configs.kinds.params import ParamInfo
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.model import ModelConfig
from configs.recipes.training import Recipe
from inference.checkpoints import text_files, tokenizer_files
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.text.tokenizer import Tokenizer
from inference.training import bpe
from layers import decoder, params
from layers.params import Params
from sharding import mesh as meshes
from sharding import rules

if TYPE_CHECKING:
    from inference.training.loop import Data, Loss, PolicyData  # brings optax

_STEPS = 1e-3, 1e-1  # the least and the largest step, of Mamba and what goes by its parametrization
_MOST_RATE = 16  # of the decay of a head; the least is 1


class Vocabulary(NamedTuple):
    """How text becomes ids.

    Attributes:
        tokenizer: does it.
        files: that it is made of, by name.
        eos_ids: end a sequence.
    """

    tokenizer: Tokenizer
    files: Mapping[str, bytes]
    eos_ids: tuple[int, ...]

    @property
    def identity(self) -> bytes:
        """Its files, for digests."""
        return self.files.get(text_files.TOKENIZER) or self.files[text_files.TEKKEN]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is trained, whatever the task: a recipe with all that it needs.

    Attributes:
        data: batches by step.
        size: of what they are made of, for people.
        text: a digest that names it.
        step_tokens: inputs of an update; 0: their number differs.
        starts_from: the checkpoint that training goes on from, if any.
        loss: what is made small.
        start: (progress) -> parameters, and what the loss needs beside them.
        measure: (parameters, that) -> figures of what came of it, by name.
        write: (parameters, new directory) -> what is served; None: a checkpoint.
        draw: title -> a PNG of how it went; None: of the losses.
        teacher: a digest of the weights that are learned from, if any are.
        served: (parameters) -> those of them that are served.
    """

    recipe: Recipe
    vocabulary: Vocabulary
    data: "Data | PolicyData"
    size: str
    text: str
    step_tokens: int
    starts_from: Checkpoint | None
    loss: "Loss"
    start: Callable[[Progress | None], tuple[Params, Params | None]]
    measure: Callable[[Params, Params | None], dict[str, float]] = lambda values, frozen: {}
    write: Callable[[Params, Path], None] | None = None
    draw: Callable[[str], bytes] | None = None
    teacher: str | None = None
    served: Callable[[Params], Params] = lambda values: values


def vocabulary(
    checkpoint: Checkpoint | None, texts: Sequence[str], vocab_size: int, fills_gaps: bool = False
) -> Vocabulary:
    """The vocabulary of a checkpoint; without one, a vocabulary trained on texts, with marks around
    gaps if it `fills_gaps`.

    Raises:
        InputError: as `bpe.directory`; or the checkpoint's tokenizer is missing, unsound, or of
            another size.
    """
    if checkpoint is None:
        folder = bpe.directory(texts, vocab_size, bpe.FIM_MARKS if fills_gaps else ())
        tokenizer = tokenizer_files.load_tokenizer(folder, vocab_size)
        assert tokenizer.eos_id is not None
        return Vocabulary(tokenizer, text_files.read(folder), (tokenizer.eos_id,))
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer.vocab_size != vocab_size:
        raise InputError(
            f"model.vocab_size={vocab_size}: what is trained with the tokenizer of "
            f"{checkpoint.config.name} has its {tokenizer.vocab_size} tokens"
        )
    return Vocabulary(tokenizer, checkpoint.contents().read_files(), checkpoint.eos_ids)


def masters(
    recipe: Recipe, checkpoint: Checkpoint | None = None, progress: Progress | None = None
) -> Params:
    """Float32 parameters on the chips of the recipe's mesh: a checkpoint's, or random ones; raises
    InputError if there are not as many chips, or the checkpoint has other parameters.
    """
    mesh = meshes.of(recipe.mesh)
    infos = jax.tree.map(
        lambda info: dataclasses.replace(info, format="float32"),
        decoder.param_infos(dataclasses.replace(recipe.model, formats=())),
        is_leaf=params.is_info,
    )

    def place(path: str, info: ParamInfo, values: object) -> jax.Array:
        where = rules.layout(path, info, mesh) if mesh else None
        # a copy: what is trained is overwritten
        return jax.device_put(np.array(values, np.float32), where, may_alias=False)

    if checkpoint is not None:
        return checkpoint.exact().load_params(infos, progress, place)
    values = params.flatten(params.init(infos, recipe.training.seed), lambda node: False)
    declared, begun = params.flatten(infos), _dynamics(recipe.model)
    assert begun.keys() <= declared.keys(), begun.keys() - declared.keys()
    values |= begun
    return params.unflatten(
        infos, {path: place(path, declared[path], values[path]) for path in declared}
    )


def _dynamics(model: ModelConfig) -> dict[str, np.ndarray]:
    """What the states' decays begin with, by path: as Mamba (arXiv 2312.00752), Mamba-2
    (2405.21060) and gated DeltaNet (2412.06464) do, but spread evenly in place of drawn. Zeros
    would halve a state at each token, and what is forgotten at once has no gradient to learn from.
    """
    parameters = {}
    for index, layer in enumerate(model.layers):
        mixer = layer.mixer
        for part in mixer.parts:
            nested = "" if part is mixer else f"{part.name}/"
            for name, values in _decays(part).items():
                parameters[f"layers/{index}/mixer/{nested}{name}"] = values
    return parameters


def _decays(mixer: Mixer) -> dict[str, np.ndarray]:
    match mixer:
        case Mamba(channels=count, state_width=M):
            rates = np.tile(np.log(np.arange(1, M + 1)), (count, 1))
            return {"decay": rates, "step_bias": _steps(count)}
        case Mamba2(num_heads=count):
            return {"decay": _rates(count), "step_bias": _steps(count)}
        case DeltaNet(num_heads=count, decay_rank=rank, key_width=M):
            steps = _steps(count if rank is None else count * M)
            return {"rate": _rates(count), "step_bias": steps}
    return {}


def _steps(count: int) -> np.ndarray:
    """Of which softplus makes steps that are even in their logarithms."""
    least, largest = np.log(_STEPS)
    return np.log(np.expm1(np.exp(least + (largest - least) * _shares(count))))


def _rates(count: int) -> np.ndarray:
    """Logarithms of even rates."""
    return np.log(1 + (_MOST_RATE - 1) * _shares(count))


def _shares(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count
