"""A model on disk, or about to be, whatever its format."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from configs.errors import InputError
from configs.kinds.params import Declared, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.checkpoints import end_tokens, load, text_files
from inference.checkpoints.load import Place, Progress
from inference.checkpoints.names import NameMap
from inference.checkpoints.tensor_source import TensorSource
from inference.classifier import Classifier
from inference.text.tokenizer import Tokenizer
from layers.params import Params


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a conversion copies.

    Attributes:
        source, name_map: the parameters.
        read_files: reads the small files beside them, by name.
        raw_config: transformers' own configuration, where the checkpoint has one.
    """

    source: TensorSource
    name_map: NameMap
    read_files: Callable[[], dict[str, bytes]]
    raw_config: dict[str, object] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A model whose headers have been checked; weights are read when called for.

    Attributes:
        tokenizer: the one that `load_tokenizer` returns; None: that of the files.
        classifier: the head that labels texts, of a model that has one.
    """

    config: ModelConfig
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    classifier: Classifier | None = None
    _built: list[Tokenizer] = dataclasses.field(default_factory=list, repr=False)  # copies share it

    def exact(self) -> "Checkpoint":
        """Returns the checkpoint whose numbers `load_params` rounds to their formats alone."""
        return self

    def contents(self) -> Contents:
        """Returns what a conversion to another format copies."""
        raise NotImplementedError

    def check_no_classifier(self) -> None:
        """Raises an `InputError` if a conversion would lose a head that labels texts."""
        if self.classifier is not None:
            raise InputError(
                f"{self.config.name}: the head of a sequence classifier has no place in what would "
                "be written; serve the directory as it is"
            )

    def load_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, built once; raises an `InputError` if its files are unsound."""
        if self.tokenizer is not None:
            return self.tokenizer
        if not self._built:
            self._built.append(self.build_tokenizer())
        return self._built[0]

    def build_tokenizer(self) -> Tokenizer:
        """Builds the tokenizer of the files, as `load_tokenizer`."""
        raise NotImplementedError

    def load_params(
        self,
        infos: Declared,
        progress: Progress | None = None,
        place: Place = load.on_device,
        packed: Params | None = None,
        in_part: bool = False,
    ) -> Params:
        """Loads values for a declaration.

        Args:
            infos: tree of `ParamInfo`, as the configuration declares it, overrides included.
            place: what becomes of a parameter's values (`load.load_params`).
            packed: shapes and dtypes of what `place` makes, if that is worth being kept.
            in_part: `place` reads no whole parameters, so nothing is worth being kept.

        Raises:
            InputError: a tensor is missing or unsound.
        """
        del packed  # another copy of the user's files: they are packed within a second
        contents = self.contents()
        source = contents.source if in_part else contents.source.verified()
        return load.load_params(infos, source, contents.name_map, progress, place)

    def formats(self) -> dict[str, tuple[str, ...]]:
        """Returns the formats of the stored numbers by path, of each part of a stack where they
        differ: those of blocks, else the type of the numbers, and float32 where a parameter always
        has it.
        """
        contents, config = self.contents(), self.config
        stored = load.stored_dtype(config, contents.source, contents.name_map)
        dtype = "bfloat16" if stored == "bfloat16" else "float32"
        model = dataclasses.replace(config, dtype=dtype, formats=())
        plain = {"/".join(path): (info.format,) for path, info in leaves(model.parameters())}
        blocks = {
            path: tuple(name if FORMATS[name].is_quantized else plain[path][0] for name in formats)
            for path, formats in config.formats
        }
        return plain | blocks


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NewCheckpoint(Checkpoint):
    """A model that is not on disk yet, to be converted."""

    new_contents: Contents

    def contents(self) -> Contents:
        return self.new_contents


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredDirectory(Checkpoint):
    """A directory of weights, and of the small files beside them."""

    path: Path
    stored: Contents

    @classmethod
    def of(
        cls,
        path: Path,
        config: ModelConfig,
        source: TensorSource,
        name_map: NameMap,
        raw_config: dict[str, object] | None,
    ) -> "StoredDirectory":
        """Returns the directory with its end tokens; raises an `InputError` if they are unsound."""
        eos_ids = end_tokens.read_eos_ids(path, config.vocab_size)
        stored = Contents(source, name_map, functools.partial(text_files.read, path), raw_config)
        return cls(config=config, eos_ids=eos_ids, path=path, stored=stored)

    def contents(self) -> Contents:
        return self.stored

    def build_tokenizer(self) -> Tokenizer:
        from inference.checkpoints import tokenizer_files  # loads `tokenizers`

        return tokenizer_files.load_tokenizer(self.path, self.config.vocab_size)


def check_kept(config: ModelConfig, read_back: ModelConfig, file: str, *others: str) -> None:
    """Raises an `InputError` with the first field, except `others`, that a written file changes."""
    for field in dataclasses.fields(ModelConfig):
        name = "layers" if field.name == "pattern" else field.name
        if name not in others and getattr(config, name) != getattr(read_back, name):
            raise InputError(
                f"{config.name}: model.{field.name} has no place in {file} of the family "
                f"{config.family}; --to=orbax keeps it"
            )
