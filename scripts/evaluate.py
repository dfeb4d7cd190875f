"""Perplexity of a text: python -m scripts.evaluate --model=smollm2-135m --max_tokens=4096.

With --against=MODEL also how far the model is from that one, such as the one it was quantized from;
with --task_file=FILE how many documents of a task it gets right.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from inference.benchmark.quality import perplexity
from inference.files import user_files
from scripts import common
from scripts.flags import chat_flag, deployment_flags, host_flags, output_flag, text_flag
from scripts.modes import evaluate_task

if TYPE_CHECKING:
    from inference.checkpoints.resolve import Resolved
    from inference.engine import Engine

_TEXT, _OUTPUT = text_flag.TEXT, output_flag.OUTPUT
_WINDOW = flags.DEFINE_integer("window", 512, "Tokens scored together; windows do not overlap.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Score only the first N tokens; with --task_file the most of an answer."
)
_AGAINST = flags.DEFINE_string(
    "against", None, "As --model: compares distributions with another model of the same tokens."
)
_TASK = flags.DEFINE_string(
    "task_file", None, "JSONL of choices, GSM8K, IFEval or exact matches: scores the model by it."
)
_shared = (common, chat_flag, text_flag, deployment_flags, host_flags, output_flag)
for _module in _shared:
    flags.adopt_module_key_flags(_module)

_MAX_BYTES = 16 << 20  # of a text: `tokenizers` takes some 300 bytes a token
_WINDOWS_AT_ONCE = 64  # keeps every sequence of the engine busy, and the bar moving


_OF_TEXTS = {"window", "text", "against"}
_OF_TASKS = {"task_file", "chat", "output"}
_KNOWN = {flag.name for flag in flags.FLAGS.get_key_flags_for_module(__name__)}
_READ = {"evaluate": _KNOWN - _OF_TASKS, "evaluate --task_file": _KNOWN - _OF_TEXTS}


def main(_: Sequence[str]) -> None:
    common.check_flags("evaluate" if _TASK.value is None else "evaluate --task_file", _READ)
    if _MAX_TOKENS.value is not None and _MAX_TOKENS.value < 2:
        raise InputError(f"--max_tokens is at least 2, not {_MAX_TOKENS.value}")
    if _TASK.value is not None:
        evaluate_task.run(_TASK.value, chat_flag.CHAT.value, _MAX_TOKENS.value, _OUTPUT.value)
        return
    if _WINDOW.value < 2:
        raise InputError(f"--window is at least 2 tokens, not {_WINDOW.value}")
    path = _TEXT.value
    text = perplexity.default_text() if path is None else user_files.read_text(path, _MAX_BYTES)
    resolved, config = common.resolve_config({"max_seqs": 8})
    if _WINDOW.value > config.max_context:
        raise InputError(
            f"--window is at most the context of {config.max_context}, not {_WINDOW.value}"
        )
    other = None if _AGAINST.value is None else _resolved_other(config)
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
    with common.bars() as progress, common.compile_progress(engine):
        for first in range(0, len(windows), _WINDOWS_AT_ONCE):
            for score in engine.score(windows[first : first + _WINDOWS_AT_ONCE]):
                logprobs += score.logprobs
            progress(len(logprobs), len(tokens), "scoring tokens")
    from layers import params

    result = {
        "perplexity": perplexity.of(logprobs),
        "tokens": len(logprobs),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "weight_bytes": params.num_bytes(engine.config.model.parameters()),
    }
    if other is not None:
        result |= _compared(engine, other, windows)
    if common.JSON.value:
        common.print_json(result, config)
    else:
        print(
            f"perplexity {result['perplexity']:.4f} over {result['tokens']} tokens "
            f"(text SHA-256 {result['text_sha256']})"
        )
        if other is not None:
            print(
                f"{result['kl']:.6f} nats a token from {_AGAINST.value}, the same likeliest token "
                f"for {result['agreement']:.2%}"
            )


def _resolved_other(config: Config) -> tuple["Resolved", Config]:
    from inference.checkpoints import resolve
    from layers.kernels.device import target_device

    common.check_one_chip(config, "--against")
    resolved = resolve.resolve(str(_AGAINST.value))
    if resolved.config.vocab_size != config.model.vocab_size:
        raise InputError(
            f"--against={_AGAINST.value} has {resolved.config.vocab_size} tokens, not the "
            f"{config.model.vocab_size} of {config.model.name}: name a model of the same tokens"
        )
    other = Config(resolved.config, EngineConfig(max_seqs=1))
    other = overrides.apply(other, common.settings_asked())
    return resolved, other.for_platform(target_device().platform)


def _compared(
    engine: "Engine", other: tuple["Resolved", Config], windows: list[list[int]]
) -> dict[str, float]:
    from inference.benchmark.quality import divergence

    resolved, config = other
    against = common.load_engine(common.open_checkpoint(resolved), config)
    near, far = (
        divergence.Model(served.config.model, served.model_runner.params)
        for served in (engine, against)
    )
    with common.bars() as progress:
        distance = divergence.distance(near, far, windows, progress)
    return {"kl": distance.kl, "agreement": distance.agreement}


if __name__ == "__main__":
    common.run(main)
