"""Architectures that are known but not read, each with the part that it needs first."""

# By transformers' class, as "architectures" of `config.json` has it.
PARTS = {
    "AXK1ForCausalLM": "a norm behind mixtures and not behind dense layers",
    "AfmoeForCausalLM": "a gate on what attention returns",
    "DiffusionGemmaForBlockDiffusion": "text that is written in blocks, not from left to right",
    "KimiK3ForConditionalGeneration": "residuals that attend to the outputs of earlier layers",
    "LagunaForCausalLM": "a gate on what attention returns",
    "LongcatFlashForCausalLM": "experts that return their input, and two mixers in one layer",
    "MiMoV2FlashForCausalLM": "values of another width than keys",
    "OlmoForCausalLM": "a layer norm without weights",
    "PhiMoEForCausalLM": "routing that masks experts far below the best, and a bias of the head",
    "PhimoeForCausalLM": "routing that masks experts far below the best, and a bias of the head",
    "Qwen4ExpForConditionalGeneration": "queries that choose their keys in blocks",
    "RWKV7ForCausalLM": "the time mixing of RWKV",
    "RwkvForCausalLM": "the time mixing of RWKV",
}
