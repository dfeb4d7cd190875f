"""A tokenizer trained from scratch: byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909; of
bytes, Radford et al. 2019), in the files of a Hugging Face directory.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints import manifest, text_files
from inference.files import cache_directory, user_files

END = "<|endoftext|>"
FIM_MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")  # StarCoder's

_BYTES = 256


def directory(texts: Sequence[str], vocab_size: int, marks: Sequence[str] = ()) -> Path:
    """The directory of a tokenizer trained on texts, kept in the cache: `tokenizer.json` and
    `tokenizer_config.json`. Its first token ends a document; special tokens `marks` follow. Equal
    texts give equal tokens, fewer than `vocab_size` where they are short.

    Raises:
        InputError: the vocabulary has no room for the bytes, or the cache cannot be written.
    """
    specials = (END, *marks)
    if vocab_size < _BYTES + len(specials):
        raise InputError(
            f"model.vocab_size={vocab_size}: must be at least {_BYTES + len(specials)}, for the "
            f"{_BYTES} bytes, an end token and {len(marks)} marks"
        )
    digest = hashlib.sha256("".join([str(vocab_size), *marks]).encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    folder = cache_directory.path() / "tokenizers" / digest.hexdigest()[:32]
    if not _is_whole(folder):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        contents = {
            text_files.TOKENIZER_CONFIG: (json.dumps(config) + "\n").encode(),
            text_files.TOKENIZER: _trained(texts, vocab_size, specials).encode(),
        }
        for files in (contents, {manifest.NAME: manifest.of_contents(contents)}):  # that one last
            user_files.write({folder / name: content for name, content in files.items()})
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        listed = manifest.read(folder, (".json",))  # not what a killed process left
        listed.verify(listed.digests)
    except InputError:
        return False
    return True


def _trained(texts: Sequence[str], vocab_size: int, specials: Sequence[str]) -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(texts, trainer)
    text: str = backend.to_str()
    return text
