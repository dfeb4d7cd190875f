"""A `.gguf` file as a checkpoint."""

import dataclasses
import functools
import logging

from configs.kinds.params import Declared
from configs.model import ModelConfig
from inference.checkpoints import converted, end_tokens, load, names, packed_file
from inference.checkpoints.checkpoint import Checkpoint, Contents
from inference.checkpoints.gguf import gguf_file, gguf_fused
from inference.checkpoints.gguf.gguf_scan import Header
from inference.checkpoints.load import Place, Progress
from inference.checkpoints.tensor_source import TensorSource
from inference.text.tokenizer import Tokenizer
from layers import params
from layers.params import Params


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GgufFile(Checkpoint):
    """A `.gguf` file.

    Attributes:
        header: of the file, with an entry for each part of a stack.
        is_exact: numbers are not rounded to bfloat16 first.
    """

    header: Header
    is_exact: bool = False

    def exact(self) -> "GgufFile":
        return dataclasses.replace(self, is_exact=True)

    @classmethod
    def open(cls, header: Header, config: ModelConfig) -> "GgufFile":
        """Opens a file whose header has been scanned.

        Raises:
            InputError: an end token is not a valid id, or experts are missing.
        """
        header = gguf_fused.split(header, config)
        keys = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
        ids = [header.metadata[key] for key in keys if key in header.metadata]
        eos_ids = end_tokens.check_ids(ids, config.vocab_size, str(header.path))
        if projectors := sorted(path.name for path in header.path.parent.glob("mmproj*.gguf")):
            logging.warning(
                "%s: images and sounds are not served: %s is left out", header.path,
                ", ".join(projectors),
            )  # fmt: skip
        return cls(config=config, eos_ids=eos_ids, header=header)

    def contents(self) -> Contents:
        return Contents(self.tensors("bfloat16"), names.gguf(self.config), self._read_files)

    def build_tokenizer(self) -> Tokenizer:
        from inference.checkpoints.gguf import gguf_tokenizer

        return gguf_tokenizer.load_tokenizer(self.header, self.config.vocab_size)

    def load_params(
        self,
        infos: Declared,
        progress: Progress | None = None,
        place: Place = load.on_device,
        packed: Params | None = None,
        in_part: bool = False,
    ) -> Params:
        """Loads values as `Checkpoint.load_params`. Numbers are rounded to bfloat16 before they get
        their formats, unless `is_exact`; what was rounded is cached.
        """
        dtype = "float32" if self.is_exact else "bfloat16"
        folder = converted.place(self.header.path, *self.header.fingerprints)
        source, name_map = self.tensors(dtype), names.gguf(self.config)
        read = functools.partial(load.load_params, infos, source, name_map, progress, place)
        if packed is not None:
            return packed_file.load(folder / dtype, packed, read)
        if self.is_exact or in_part:
            return read()
        rounded = params.unflatten(
            infos,
            {
                path: dataclasses.replace(info, format=_rounded(name_map(path).names))
                for path, info in params.flatten(infos).items()
            },
        )
        target = folder / "weights.safetensors"
        try:
            cached = converted.open_or_convert(target, rounded, source, name_map, progress)
        except OSError as error:
            logging.warning("converted weights are not cached: %s: %s", target, error.strerror)
            return read()
        return load.load_params(infos, cached, names.identity, progress, place)

    def formats(self) -> dict[str, tuple[str, ...]]:
        name_map = names.gguf(self.config)
        infos = params.flatten(self.config.parameters())
        load.check(infos, self.tensors("bfloat16"), name_map)
        return gguf_file.formats(self.header, self.config, name_map)

    def tensors(self, dtype: str) -> TensorSource:
        """Returns the source of the file's numbers, rounded to a type."""
        source = gguf_file.tensors(self.header, self.config, dtype)
        load.check_parts(self.config, source, names.gguf(self.config))
        return source

    def _read_files(self) -> dict[str, bytes]:
        from inference.checkpoints.gguf import gguf_tokenizer

        return gguf_tokenizer.text_files(self.header, self.config, self.eos_ids)


def _rounded(tensors_of: tuple[str, ...]) -> str:
    """The type of a parameter in a copy of a `.gguf` file: decays of states stay as they are."""
    return "float32" if all(map(gguf_fused.is_exact, tensors_of)) else "bfloat16"
