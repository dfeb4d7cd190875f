"""Perplexity of a text: python -m scripts.evaluate --model=smollm2-135m --max_tokens=4096."""

from scripts import interrupts  # noqa: F401

# isort: split
import hashlib
from collections.abc import Sequence

from absl import flags

from configs.errors import InputError
from inference.benchmark.quality import perplexity
from inference.files import user_files
from scripts import common
from scripts.flags import deployment_flags, host_flags, text_flag

_TEXT = text_flag.TEXT
_WINDOW = flags.DEFINE_integer("window", 512, "Tokens scored together; windows do not overlap.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Score only the first N tokens.")
flags.adopt_module_key_flags(text_flag)
flags.adopt_module_key_flags(deployment_flags)
flags.adopt_module_key_flags(host_flags)

_MAX_BYTES = 16 << 20  # of a text: `tokenizers` takes some 300 bytes a token
_WINDOWS_AT_ONCE = 64  # keeps every sequence of the engine busy, and the bar moving


def main(argv: Sequence[str]) -> None:
    del argv
    if _WINDOW.value < 2:
        raise InputError(f"--window is at least 2 tokens, not {_WINDOW.value}")
    if _MAX_TOKENS.value is not None and _MAX_TOKENS.value < 2:
        raise InputError(f"--max_tokens is at least 2, not {_MAX_TOKENS.value}")
    text = _read_text()
    resolved, config = common.resolve_config({"max_seqs": 8})
    if _WINDOW.value > config.max_context:
        raise InputError(
            f"--window is at most the context of {config.max_context}, not {_WINDOW.value}"
        )
    checkpoint = common.open_checkpoint(resolved)
    tokenizer = checkpoint.load_tokenizer()
    tokens = tokenizer.encode(text, add_special=False)[: _MAX_TOKENS.value]
    start = perplexity.start(tokenizer)
    if _WINDOW.value <= len(start):
        raise InputError(
            f"--window is above the {len(start)} tokens before each text, not {_WINDOW.value}"
        )
    windows = perplexity.windows(tokens, start, _WINDOW.value)
    if not windows:
        raise InputError("the text has fewer than 2 tokens: nothing to predict")
    engine = common.load_engine(checkpoint, config)
    logprobs: list[float] = []
    with common.bars() as progress:
        for first in range(0, len(windows), _WINDOWS_AT_ONCE):
            for score in engine.score(windows[first : first + _WINDOWS_AT_ONCE]):
                logprobs += score.logprobs
            progress(len(logprobs), len(tokens), "scoring tokens")
    result = {
        "perplexity": perplexity.of(logprobs),
        "tokens": len(logprobs),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    if common.JSON.value:
        common.print_json(result, config)
    else:
        print(
            f"perplexity {result['perplexity']:.4f} over {result['tokens']} tokens "
            f"(text SHA-256 {result['text_sha256']})"
        )


def _read_text() -> str:
    if _TEXT.value is None:
        return perplexity.default_text()
    return user_files.read_text(_TEXT.value, _MAX_BYTES)


if __name__ == "__main__":
    common.run(main)
