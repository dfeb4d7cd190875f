"""What transformers makes of a directory that scripts.convert wrote, as one JSON object on stdout.

.venv-golden/bin/python tests/golden/read_export.py DIR "a text" 8
"""

import json
import sys

import torch
import transformers


def main(directory: str, text: str, num_tokens: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        greedy = model.generate(
            torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1
        )
    stored = transformers.AutoConfig.from_pretrained(directory)
    ends = model.generation_config.eos_token_id
    result = {
        "dtype": str(stored.dtype),
        "ids": ids,
        "chat": chat,
        "logits": logits[-1].tolist(),
        "greedy": greedy[0, len(ids) :].tolist(),
        "eos": ends if isinstance(ends, list) else [ends],
        "special": tokenizer.special_tokens_map,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
