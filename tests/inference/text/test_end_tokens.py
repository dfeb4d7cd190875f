"""Which tokens end a sequence: those that are listed, and those that nobody listed."""

import json
import shutil

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from inference.engine import Engine
from inference.text import end_tokens
from inference.text.end_tokens import EndTokens
from inference.text.tokenizer import Tokenizer, byte_alphabet
from tests.inference.server.parrot import TEMPLATES
from tests.inference.text.test_tokenizer import GOLDEN

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>",
           "<|return|>", "<|user|>", "<|assistant|>")  # fmt: skip
WORDS = ("<|plain|>", "###", "\n\n", "</answer>")  # added tokens that are not special


def tokenizer(template: str | None, vocab_size: int = 300, end: str = "</s>") -> Tokenizer:
    alphabet = byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, special=False) for name in WORDS])
    return Tokenizer(backend, vocab_size, {"bos_token": "<s>", "eos_token": end}, template)


def turns(behind: str, last: str | None = None) -> str:
    """A template that writes this behind a message, or behind the last."""
    closing = f"{{{{ {last!r} if loop.last else {behind!r} }}}}" if last is not None else behind
    return (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}"
        "{{ m.reasoning_content }}<|end|>{% endif %}{{ m.content }}" + closing + "{% endfor %}"
    )


@pytest.mark.parametrize("template, closing", [
    *((TEMPLATES[family], token) for family, token in {
        "smollm2": "<|im_end|>", "llama2": "</s>", "llama3": "<|eot_id|>", "qwen": "<|im_end|>",
        "gemma": "<end_of_turn>", "mistral": "</s>", "phi3": "<|end|>"}.items()),
    (turns("<|im_end|>\n"), "<|im_end|>"), (turns(" </s>"), "</s>"),
    (turns("<|plain|>"), "<|plain|>"), (turns("<|end|>", "<|return|>"), "<|return|>"),
    (turns("<|end|>"), None),  # which stands behind a thought, too
    (turns("<|user|>", "\n"), None), (turns("\n"), None), (turns("\n\n"), None),
    (turns("### "), None), (turns("</answer>"), None), (turns(". <|im_end|>"), None),
    (turns("", ""), None), ("{{ raise_exception('no') }}", None), 
    ("{{ messages[0].content }}", None), (None, None),
])  # fmt: skip
def test_the_token_that_closes_an_answer(template, closing):
    tokens = tokenizer(template)
    found = end_tokens.of_template(tokens)
    assert (found and tokens.token_bytes(found, False).decode()) == closing


def test_ends_are_all_that_anybody_names_and_what_joined_is_said_once(caplog):
    ids = {name: 256 + n for n, name in enumerate(SPECIAL)}
    both = tokenizer(turns("<|im_end|>"))
    assert list(EndTokens(both, [7, 3, 7])) == [7, 3, ids["</s>"], ids["<|im_end|>"]]
    assert caplog.messages == [
        "end tokens: the checkpoint lists 7, 3; joined by '</s>' (257), its tokenizer's end and "
        "'<|im_end|>' (259), the end of an answer in its chat template"
    ]
    caplog.clear()
    assert list(EndTokens(both, [259, 257])) == [259, 257]
    assert list(EndTokens(None, [1])) == [1] and list(EndTokens(None, [])) == []
    outside = tokenizer(turns("<|im_end|>"), vocab_size=257)  # which the model cannot generate
    assert list(EndTokens(outside, [1])) == [1] and not caplog.messages
    assert list(EndTokens(tokenizer(None, end="none"), [])) == []


def test_answers_of_an_engine_end_with_what_the_checkpoint_forgot(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": None}))
    engine = Engine.from_model(str(folder), max_seqs=1, decode_rows=(2,), prefill_chunks=(1,))
    tokens = engine.tokenizer
    assert tokens.encode("<|end_of_text|><|end_of_turn|>", add_special=False) == [1, 2]
    assert engine.eos_ids == {1, 2}
