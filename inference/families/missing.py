"""Architectures that are known but not read, each with the part that it needs first."""

# By transformers' class, as "architectures" of `config.json` has it.
PARTS = {
    "BailingHybridForCausalLM": "gates of latent heads, and a bounded decay of KDA",
    "DiffusionGemmaForBlockDiffusion": "text that is written in blocks, not from left to right",
    "Gemma3TextModel": "attention to later tokens",
    "KimiK3ForConditionalGeneration": "residuals that attend to the outputs of earlier layers",
    "LongcatFlashForCausalLM": "experts that return their input, and two mixers in one layer",
    "Qwen4ExpForConditionalGeneration": "queries that choose their keys in blocks",
    "RWKV7ForCausalLM": "the time mixing of RWKV",
    "RwkvForCausalLM": "the time mixing of RWKV",
}
