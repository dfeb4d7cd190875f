"""Opens a model as an app does: its tokenizer, its weights as they are computed with, and a text as
training reads it.
"""

from collections.abc import Sequence

from absl import flags

from inference.checkpoints import resolve
from inference.engine import Engine
from inference.training import start, texts, token_file
from scripts import common
from scripts.flags import text_flag

flags.adopt_module_key_flags(text_flag)


def main(argv: Sequence[str]) -> None:
    """Raises what is wrong with it."""
    del argv
    checkpoint = resolve.resolve(common.model_name()).open(None)
    checkpoint.load_tokenizer()
    if text_flag.TEXT.value:
        vocabulary = start.vocabulary(checkpoint, (), checkpoint.config.vocab_size)
        token_file.of_texts(texts.of_file(text_flag.TEXT.value), vocabulary)
    else:
        Engine.from_model(common.model_name(), max_seqs=1)


if __name__ == "__main__":
    common.run(main)
