"""A tiny SentencePiece vocabulary as transformers turns it into a tokenizer.json.

Laid out as SentencePiece's BPE trainer does: control tokens, bytes, merged pieces in the order in
which they were found, single characters. Scores fall with the id. The merges, every way to make a
piece of two others, are those of transformers' converter; the normalizer is that of the published
Llama 2 files.
"""

import pathlib

import tiny_tokenizer
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import generate_merges

VOCAB_SIZE = 640
_CONTROL = ("<unk>", "<s>", "</s>")
_MORE = (
    "Äpfel, Öl und Übermut: größer als früher, naïve façades, señor, Ελλάδα и Россия.",
    "日本語のテキストと中文的文字，以及한국어 문장입니다。",
    "for i in range(10):    \n        print(i,  2 ** i)\n\n\n    return None  # 1234 and 5678",
)


def write(root: pathlib.Path) -> None:
    """Writes sentencepiece-tokenizer/tokenizer.json."""
    trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False)
    trained = tokenizers.Tokenizer(models.BPE())
    # Pieces begin with their space, and runs of spaces are pieces.
    trained.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"▁+[^▁]*|[^▁]+"), "isolated")
    corpus = [*tiny_tokenizer._CORPUS, *_MORE]
    trained.train_from_iterator(["▁" + text.replace(" ", "▁") for text in corpus], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.token_to_id)
    single = [piece for piece in pieces if len(piece) == 1]
    before = [*_CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = [piece for piece in pieces if len(piece) > 1]
    merged = merged[: VOCAB_SIZE - len(before) - len(single)]
    tokens = [*before, *merged, *single]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = {token: -float(index) for token, index in vocab.items() if token not in before}
    made = transformers.LlamaTokenizer(
        vocab=vocab, merges=generate_merges(vocab, scores), add_bos_token=True
    )
    backend = made.backend_tokenizer
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    folder = root / "sentencepiece-tokenizer"
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
