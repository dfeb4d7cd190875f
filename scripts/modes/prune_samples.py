"""What a model reads so that its importance can be measured: windows of a text, or its own."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from configs.errors import InputError
from inference.files import user_files
from scripts.modes import train_heads

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.text.tokenizer import Tokenizer

_MAX_BYTES = 1 << 28  # of a text
_JSONL = ".jsonl"


def windows(checkpoint: "Checkpoint", text: str | None, count: int, size: int) -> np.ndarray:
    """Returns windows of ids, i32 [count, size], evenly spread over a file; `text` is None: those
    that the model writes by itself.

    Raises:
        InputError: the file cannot be read, or has too little text.
    """
    tokenizer = checkpoint.load_tokenizer()
    if text is None:
        from inference.checkpoints import provenance
        from inference.training import own_samples

        first = own_samples.opening(tokenizer)
        if size <= len(first):
            raise InputError(
                f"--sample_tokens={size}: must be above the {len(first)} tokens that open a sample "
                "of the model's own; give more, or --text"
            )
        digest = provenance.weights_digest(checkpoint)
        ids, _ = train_heads.own_tokens(checkpoint, digest, first, count, size)
        return ids.reshape(count, size).astype(np.int32)
    from inference.benchmark.quality import perplexity

    documents = list(_documents(text, tokenizer))
    if not any(document.strip() for document in documents):
        raise InputError(f"--text={text}: no text in it; give a file that has some")
    tokens = [id for document in documents for id in tokenizer.encode(document, add_special=False)]
    start = perplexity.start(tokenizer)
    all_windows = perplexity.windows(tokens, start, size) if size > len(start) else []
    whole = [window for window in all_windows if len(window) == size]
    if len(whole) < count:
        raise InputError(
            f"--text={text}: {len(tokens)} tokens are {len(whole)} windows of {size}, and "
            f"--samples={count} needs more; give more text, or fewer --samples or --sample_tokens"
        )
    places = np.linspace(0, len(whole) - 1, count).round().astype(int)
    return np.asarray([whole[place] for place in places], np.int32)


def _documents(name: str, tokenizer: "Tokenizer") -> Iterator[str]:
    """Yields the texts of a file."""
    from inference.training import answers

    whole = user_files.read_text(name, _MAX_BYTES)
    if not name.endswith(_JSONL):
        yield whole
        return
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict) and isinstance(fields.get("text"), str):
            yield fields["text"]
        elif isinstance(fields, dict) and isinstance(fields.get("messages"), list):
            try:
                messages = answers.checked_messages(fields["messages"])
                yield tokenizer.chat_text(messages, add_generation_prompt=False)
            except InputError as error:
                raise InputError(f"--text={name}: line {number}: {error}") from None
        else:
            raise InputError(f'--text={name}: line {number} is no object with "text" or "messages"')
