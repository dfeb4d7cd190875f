"""What transformers makes of the special tokens that stand beside `tokenizer.json`."""

import json
import pathlib
import shutil
import tempfile

import transformers

TEXTS = (
    "The cat <|foo|> sat <|end|> x",
    "<|begin|> The <|img|>  b <|mask|>y",
    "Hello , world . <|end_of_turn|> The",
)
_CONFIG = "tokenizer_config.json"


def _as(**flags):
    return lambda token: {k: v for k, v in token.items() if k != "id"} | flags


def _cases(tokens: list[dict]) -> dict[str, dict]:
    """Changes of each file's keys, by the file; `tokens` are those that tokenizer.json adds."""

    def decoder(**flags) -> dict:
        return {_CONFIG: {"added_tokens_decoder": {t["id"]: _as(**flags)(t) for t in tokens}}}

    stripping = {"content": "<|begin|>", "lstrip": True, "rstrip": True, "__type": "AddedToken"}
    ordinary = [token | {"special": False} for token in tokens]
    return {
        "nothing": {},
        "additional": {_CONFIG: {"additional_special_tokens": ["<|foo|>", "The"]}},
        "extra": {_CONFIG: {"extra_special_tokens": ["<|foo|>"]}},
        "extra by name": {_CONFIG: {"extra_special_tokens": {"image_token": "<|img|>"}}},
        "additional in the map": {
            "special_tokens_map.json": {"additional_special_tokens": ["<|foo|>"]}
        },
        "extra in both": {
            _CONFIG: {"extra_special_tokens": ["<|img|>"]},
            "special_tokens_map.json": {"extra_special_tokens": [{"content": "<|foo|>"}]},
        },
        "map beside a list": {**decoder(), "special_tokens_map.json": {"mask_token": "<|mask|>"}},
        "added_tokens.json": {"added_tokens.json": {"<|foo|>": 320}},
        "mask": {_CONFIG: {"mask_token": "<|mask|>"}},
        "another name": {_CONFIG: {"think_token": "<|foo|>"}},
        "a word": {_CONFIG: {"eos_token": "The"}},
        "not special": {"tokenizer.json": {"added_tokens": ordinary}},
        "not added": {"tokenizer.json": {"added_tokens": []}},
        "split": {_CONFIG: {"split_special_tokens": True}},
        "listed with blanks": decoder(rstrip=True, lstrip=True),
        "listed as ordinary": decoder(special=False),
        "named with blanks": {_CONFIG: {"bos_token": stripping}},
    }


def write(root: pathlib.Path) -> None:
    """Writes special-tokens/expected.json: the changes, and ids and texts of each case."""
    source = root / "llama-tokenizer"
    tokens = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    cases = {}
    for name, changes in _cases(tokens).items():
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(shutil.copytree(source, folder, dirs_exist_ok=True))
            for file, keys in changes.items():
                before = json.loads((made / file).read_text()) if (made / file).exists() else {}
                (made / file).write_text(json.dumps(before | keys))
            tokenizer = transformers.AutoTokenizer.from_pretrained(made)
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        cases[name] = {
            "changes": changes,
            "ids": ids,
            "decoded": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
            "special": {k: v for k, v in tokenizer.special_tokens_map.items() if v},
        }
    folder = root / "special-tokens"
    folder.mkdir(exist_ok=True)
    text = json.dumps({"texts": TEXTS, "cases": cases}, indent=1) + "\n"
    (folder / "expected.json").write_text(text, encoding="utf-8")
