"""What llama.cpp's own converter makes of directories: .gguf files without a tokenizer.

PYTHON tests/golden/convert_gguf.py LLAMA_CPP DIRECTORY FILE [DIRECTORY FILE ...]

LLAMA_CPP is its source; PYTHON's environment is that of `make golden`.
"""

import json
import sys
from pathlib import Path


def main(source: str, *paths: str) -> None:
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import gguf
    from conversion import get_model_class

    for directory, file in zip(paths[::2], paths[1::2], strict=True):
        # The file itself: transformers would spell layer types as the converter does not know them.
        hparams = json.loads((Path(directory) / "config.json").read_text())
        hparams.setdefault("max_position_embeddings", 1 << 20)
        if "mamba_head_dim" in hparams:  # else it takes 64 for the width of a head
            hparams["mamba_d_head"] = hparams["mamba_head_dim"]
        model = get_model_class(hparams["architectures"][0])(
            Path(directory), gguf.LlamaFileType.ALL_F32, Path(file), hparams=hparams, eager=True
        )
        model.set_vocab = lambda: None
        model.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
