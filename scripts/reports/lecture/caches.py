"""Sections 5 to 7: smaller caches, states, fewer bits and fewer parameters."""

from scripts.reports.lecture.claims import Claim, Score, compared, shown
from scripts.reports.lecture.names import (
    DEEPSEEK_V2,
    DEEPSEEK_V32,
    FORMATS,
    GQA_13B,
    INDEXER,
    LATENT,
    LLAMA3_8B,
    LLAMA_13B,
    LLAMA_70B,
    MINITRON_4B,
    gigabytes,
    lecture,
    presets,
    speedup,
    weight_gb,
    weights,
    with_all,
    with_attention,
    with_heads,
    with_sharing,
    with_state,
    with_window,
)
from scripts.reports.pages.markdown import code, prose, table

SMALLER = (
    Claim("DeepSeek-V2, N x H", "A D E", "16,000", lambda: LATENT.num_heads * LATENT.nope_width),
    Claim("DeepSeek-V2, N x H", "C", "8192",
          lambda: LATENT.num_heads * LATENT.nope_width, "128 heads of 128, not 64"),
    Claim("DeepSeek-V2, elements cached a token, layer", "C", "576",
          lambda: DEEPSEEK_V2.cache_specs[0].elements_per_token),
    Claim("DeepSeek-V2, elements cached a token, layer", "A D E", "512",
          lambda: DEEPSEEK_V2.cache_specs[0].elements_per_token, "64 more for the rotary key"),
    Claim("DeepSeek-V2, reduction over MHA", "C", "14",
          lambda: gigabytes(with_attention(DEEPSEEK_V2, 128), 1) / gigabytes(DEEPSEEK_V2, 1),
          "MHA stores keys and values of 128 heads"),
    Claim("MQA over MHA, 64 heads", "C", "64",
          lambda: gigabytes(with_heads(LLAMA_70B, 64), 1) / gigabytes(with_heads(LLAMA_70B, 1), 1)),
    Claim("GQA, 1,024 elements of 8,192", "C", "8",
          lambda: gigabytes(with_heads(LLAMA_70B, 64), 1) / gigabytes(LLAMA_70B, 1)),
    Claim("GQA, 1:5, of Llama 2 13B", "A D", "5",
          lambda: gigabytes(LLAMA_13B, 1024) / gigabytes(GQA_13B, 1024)),
    Claim("CLA, two layers a cache", "C", "2",
          lambda: gigabytes(LLAMA_13B, 1024) / gigabytes(with_sharing(LLAMA_13B), 1024)),
    Claim("window W = 4,096 at S = 32,768: S / W", "C", "8",
          lambda: gigabytes(LLAMA_13B, 32_768) / gigabytes(with_window(LLAMA_13B, 4096), 32_768)),
    Claim("GQA's latency in proportion to K/N, B = 64", "C", "5",
          lambda: lecture(LLAMA_13B, 64).step_s / lecture(GQA_13B, 64).step_s,
          "only the cache shrinks so, the weights stay"),
)  # fmt: skip

BITS = (
    Claim("bytes of a bfloat16", "A D", "2", lambda: FORMATS["bfloat16"].bits / 8),
    Claim("bytes of an fp8 or int8", "A D", "1", lambda: FORMATS["int8"].bits / 8),
    Claim("bytes of an int4", "A D", "0.5", lambda: FORMATS["int4"].bits / 8),
    Claim("largest int8", "D", "127", lambda: 2 ** (FORMATS["int8"].bits - 1) - 1),
    Claim("largest int4", "D", "7", lambda: 2 ** (FORMATS["int4"].bits - 1) - 1),
    Claim("13B in int8 over bfloat16, memory", "C", "0.5",
          lambda: weight_gb(LLAMA_13B, "int8") / weight_gb(LLAMA_13B)),
    Claim("13B in int4 over bfloat16, memory", "C", "0.25",
          lambda: weight_gb(LLAMA_13B, "int4") / weight_gb(LLAMA_13B),
          "scales, and tables stay bfloat16"),
    Claim("16 bits over 3", "C D", "4", lambda: FORMATS["bfloat16"].bits / 3, "4x is int4's"),
    Claim("15B pruned to 8B, bytes left", "A D E", "0.53", lambda: 8 / 15),
    Claim("Minitron 4B over Llama 3.1 8B, size", "C", "0.5",
          lambda: weights.num_parameters(MINITRON_4B) / weights.num_parameters(LLAMA3_8B),
          "the name rounds 4.5 billion"),
)  # fmt: skip


def smaller(score: Score) -> list[str]:
    """Section 5."""
    kinds = (
        ("MHA", "2 N H S", LLAMA_13B),
        ("GQA, K = 8", "2 K H S", GQA_13B),
        ("MQA", "2 H S", with_heads(LLAMA_13B, 1)),
        ("CLA, pairs of layers", "N H S", with_sharing(LLAMA_13B)),
        ("window 4,096", "2 N H W", with_window(LLAMA_13B, 4096)),
        ("window 1,024, 1 layer in 6 global", "", with_window(LLAMA_13B, 1024, 6)),
        ("window 1,024, 6 local to 1 global", "", with_window(LLAMA_13B, 1024, 7)),
        ("MQA, pairs, 1,024, 1 cache in 6 global", "", with_all(LLAMA_13B)),
        ("Mamba-2 state, M = 128, float32", "2 D M", with_state(LLAMA_13B)),
    )
    whole = gigabytes(LLAMA_13B, 32_768)
    rows = []
    for name, elements, config in kinds:
        size = gigabytes(config, 32_768)
        rows.append((name, elements, shown(size), f"{whole / size:.1f} x"))
    sparse = DEEPSEEK_V32.cache_specs[0].elements_per_token
    return [
        "## 5. Smaller caches",
        *code("elements a token and layer:  2 N H (MHA)   2 K H (GQA)   2 H (MQA)   C + R (MLA)"),
        *compared(5, SMALLER, score),
        *prose(
            "One request of 32,768 tokens, with each technique in place of Llama 2 13B's attention",
            "(`gigabytes(config, 32_768)`):",
        ),
        *table(("cache", "elements a layer", "GB", "smaller by"), rows),
        *prose(
            '"1 global layer per 6 local" (A) and "every 6 layers" (D, and Character.AI\'s own',
            "page, whose recipe is the row with pairs) are different rows. Sparse attention (E)",
            f"saves reading, not memory: DeepSeek-V3.2 keeps all tokens, {sparse} elements a layer",
            f"with the indexer's keys, and reads {INDEXER.top_k:,} of them.",
        ),
        *_latent(),
    ]


def _latent() -> list[str]:
    """DeepSeek-V2's heads with each cache that they could have."""
    latent = DEEPSEEK_V2.cache_specs[0].elements_per_token
    heads, width = LATENT.num_heads, LATENT.value_width
    rows = []
    for name, config in (
        ("MHA, K = 128", with_attention(DEEPSEEK_V2, heads)),
        ("GQA, K = 8", with_attention(DEEPSEEK_V2, 8)),
        ("GQA, K = 2", with_attention(DEEPSEEK_V2, 2)),
        ("MQA", with_attention(DEEPSEEK_V2, 1)),
        ("MLA, 512 + 64", DEEPSEEK_V2),
    ):
        elements = config.cache_specs[0].elements_per_token
        size = shown(gigabytes(config, 32_768))
        rows.append((name, f"{elements:,}", size, f"{elements / latent:.2f} x"))
    expanded = heads * (LATENT.nope_width + LATENT.rope_width + width)
    return [
        *prose(
            f"C's 14 x of MLA divides 64 x 128 by {latent}: half of DeepSeek-V2's heads, and keys",
            "without values. One request of 32,768 tokens of DeepSeek-V2, with other attention of",
            "the same heads (`gigabytes(with_attention(DEEPSEEK_V2, 8), 32_768)`):",
        ),
        *table(("cache", "elements a token, layer", "GB", "beside MLA"), rows),
        *prose(
            f"MLA caches as much as GQA with K = {latent / 2 / width:.2f}. Its paper (arXiv",
            "2405.04434, table 1) finds it stronger than MHA, and GQA and MQA weaker, so MHA is",
            "what compares at equal quality. MHA over the keys and values that MLA's heads see,",
            f"whose keys have {LATENT.rope_width} rotary elements more, would cache {expanded:,},",
            f"{expanded / latent:.1f} x as many. Its prefill and steps:",
        ),
        *code(
            "python -m scripts.plan --accounting=lecture --model=deepseek-v2 --hardware=h200 \\",
            "    --mesh=model=8 --batch=1,32 --context=32768",
        ),
    ]


def states() -> list[str]:
    """Section 6."""
    names = ("llama2-13b", "llama2-70b", "hunyuan-large", "deepseek-v2", "granite4-h-small",
             "mamba2-2.7b")  # fmt: skip
    kinds = ("MHA", "GQA", "GQA, CLA", "MLA", "1 of 10 GQA, states", "states")
    rows = []
    for name, kind in zip(names, kinds, strict=True):
        config = presets.get(name).config
        sizes = (gigabytes(config, length) * 1e3 for length in (1024, 32_768, 131_072))
        rows.append((name, kind, *(f"{megabytes:,.1f}" for megabytes in sizes)))
    tokens = gigabytes(with_state(LLAMA_13B), 1) / gigabytes(LLAMA_13B, 1)
    return [
        "## 6. States instead of caches",
        *code(
            "bytes = L x (inner width x M + tail of the convolution) x 4 (float32), at any length"
        ),
        *prose(
            "The notes say O(1) for O(T) and give no figure. MB of one request, by its length,",
            "whether or not the model was trained on as many (`gigabytes(config, length)`):",
        ),
        *table(("model", "layers", "1,024", "32,768", "131,072"), rows),
        *prose(
            f"The state of section 5's last row is as large as {tokens:.0f} tokens of the keys and",
            "values it replaces: a shorter request has a smaller cache than state. A state is also",
            "written in every step, so that its traffic is twice its size.",
        ),
    ]


def bits(score: Score) -> list[str]:
    """Section 7."""
    rows = [
        (name, says, shown(speedup(LLAMA_13B, name)))
        for name, says in (
            ("fp8", "1.8 (C)"),
            ("int8", "1.2 (C)"),
            ("int4", "3 (A, C), 3.2 (C, D)"),
        )
    ]
    return [
        "## 7. Fewer bits, fewer parameters",
        *code("bytes = parameters x (bits + scale bits / group) / 8, the layers' matrices only"),
        *compared(7, BITS, score),
        *prose(
            "The speedups in the notes are measurements. A limit can be derived: a step reads",
            "fewer bytes and gains nothing else (Llama 2 13B, B = 1, `speedup(LLAMA_13B,",
            '"int4")`):',
        ),
        *table(("weights", "notes say", "limit"), rows),
        *code(
            "python -m scripts.plan --accounting=lecture --model=llama2-13b --hardware=h100 \\",
            "    --batch=1 --context=1024 --weights=int4",
        ),
    ]
