"""The tokenizer of one tiny checkpoint, and what transformers makes of text with it.

A byte-level BPE with Llama 3's habits: encoding prepends <|begin|>, the chat template writes it
itself (so templated text is encoded without adding it again), and generation stops at either of two
tokens of generation_config.json.
"""

import json
import pathlib

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<|begin|>", "<|end_of_text|>", "<|end_of_turn|>")
BOS_ID, EOS_IDS = 0, [1, 2]
VOCAB_SIZE = 320
_MAX_NEW_TOKENS = 24
# A greedy token that leads by less could come out otherwise in another implementation.
_MIN_GAP = 0.002

_CORPUS = (
    "The ridge of a roofline plot is where a workload stops waiting for memory.",
    "Inference lives to the left of the ridge, where bytes and not operations are the limit.",
    "A cache holds the keys and the values of the tokens that were read before.",
    "def predict(bytes, bandwidth):\n    return bytes / bandwidth\n",
    "The quick brown fox jumps over the lazy dog, and the other dogs were waiting there.",
)
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '[' + message['role'] + ']\n' + message['content'] | trim + '<|end_of_turn|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
TEXTS = (
    "Where does the workload wait? It waits for memory: 3.5 GB a step; that is the limit of the "
    "left side.\n\n    return bytes / bandwidth  # caffè, 日本語, 🙂\n",
    "The lazy dog's cache",
    "A token",
    "Inference",
)
CHAT = (
    {"role": "system", "content": " Answer briefly. "},
    {"role": "user", "content": "What holds the keys?"},
)


def write(directory: pathlib.Path) -> None:
    """Trains the tokenizer and writes tokenizer.json and tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus makes {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BOS_ID)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    # Where most published checkpoints have it; transformers 5 would write chat_template.jinja.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": _CHAT_TEMPLATE}
    path.write_text(json.dumps(config, indent=2) + "\n")


def expected(directory: pathlib.Path, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """For text i `ids_i` and `greedy_i`, for the chat its rendering, its ids and `greedy_chat`.

    Greedy continuations end with one of the end tokens, or after 24 tokens.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rendered = tokenizer.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True)
    ids = {str(i): tokenizer(text)["input_ids"] for i, text in enumerate(TEXTS)}
    ids["chat"] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    arrays = {
        "texts": np.array(TEXTS),
        "chat_messages": np.array(json.dumps(CHAT)),
        "chat_text": np.array(rendered),
    }
    for name, prompt in ids.items():
        arrays[f"ids_{name}"] = np.array(prompt, np.int32)
        arrays[f"greedy_{name}"] = _greedy(model, prompt)
    ended = [arrays[f"greedy_{name}"][-1] in EOS_IDS for name in ids]
    if not any(ended) or all(ended):
        raise ValueError("some continuations should meet an end token and some should not")
    return arrays


def _greedy(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    """What `generate` adds, checked to have no near ties."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=_MAX_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=EOS_IDS[0],
    )
    for logits in output.logits:
        first, second = logits[0].topk(2).values
        if first - second < _MIN_GAP:
            raise ValueError(f"a greedy token leads by {first - second:.4f} only")
    return output.sequences[0, len(prompt) :].numpy().astype(np.int32)
