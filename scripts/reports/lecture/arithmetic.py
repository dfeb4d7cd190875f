"""Sections 1 and 2: arithmetic intensity, the two phases."""

from scripts.reports.lecture.claims import Claim, Score, compared, shown
from scripts.reports.lecture.names import (
    DEEPSEEK_V2,
    GQA_13B,
    H100,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_70B,
    Deployment,
    Work,
    attention,
    flops,
    lecture,
    product,
    tokens_to_ridge,
    unmasked,
    weight_gb,
    weights,
    with_heads,
)
from scripts.reports.pages.markdown import code, prose, table

INTENSITY = (
    Claim("ridge of an H100, FLOPs/byte", "C D E", "295", lambda: H100.ridge()),
    Claim("the same at 3.3 TB/s", "A", "295",
          lambda: H100.rate("bfloat16") / 3.3e12, "295 belongs to 3.35 TB/s"),
    Claim("FLOPs a parameter and token, forward", "A D", "6",
          lambda: flops(LLAMA_13B, 1) / weights.num_active_parameters(LLAMA_13B),
          "6 is forward and backward"),
    Claim("product, T = 1, D = 4096, F = 11008", "A C D", "1.0",
          lambda: product(LLAMA_7B, 1).intensity),
    Claim("product, T = 295", "C", "270", lambda: product(LLAMA_7B, 295).intensity),
    Claim("product, T = 4096", "C", "2731",
          lambda: product(LLAMA_7B, 4096).intensity, "the code beside it returns ours"),
    Claim("product, T = 64 (a question of C)", "C", "64",
          lambda: product(LLAMA_7B, 64).intensity, "activations count too"),
    Claim("fewest tokens to reach the ridge, 13B", "A C D E", "295",
          lambda: tokens_to_ridge(LLAMA_13B), "activations count too"),
    Claim("attention, T = S = 4096, no mask", "C D", "2048", lambda: unmasked(4096, 4096)),
    Claim("attention, T = S = 4096, no mask", "A", "4096",
          lambda: unmasked(queries=4096, keys=4096), 'S / 2; A has 4ST/(S+T), then "≈ S"'),
    Claim("attention, T = 1, S = 4096, MHA", "A C D E", "1",
          lambda: attention(LLAMA_13B, 1, 4096).intensity),
)  # fmt: skip

PHASES = (
    Claim("tokens in the first naive pass after 4096", "C", "4097",
          lambda: Work.prefill(batch=1, context=4096).num_tokens,
          "its loop feeds the prompt as it is"),
    Claim("tokens in the 256th", "C", "4352",
          lambda: Work.prefill(batch=1, context=4096 + 255).num_tokens, "likewise"),
    Claim("tokens a naive pass, mean", "C", "4200", lambda: sum(range(4096, 4096 + 256)) / 256),
    Claim("naive tokens in all, millions", "C", "1", lambda: sum(range(4096, 4096 + 256)) / 1e6),
    Claim("naive work over cached work, tokens", "C", "4000",
          lambda: sum(range(4096, 4096 + 256)) / (4096 + 255),
          "the prompt must be read once in any case"),
    Claim("tokens a cached pass, the 200th of an answer", "C", "1",
          lambda: Work.decode(batch=1, context=500 + 199).num_tokens),
    Claim("70B, weights, GB", "C", "140", lambda: weight_gb(LLAMA_70B)),
    Claim("70B, time to read them once, ms", "C", "42",
          lambda: Deployment(LLAMA_70B, H100, accounting="lecture").decode_time(1, 1).total_s * 1e3,
          f'"70B" is {weights.num_parameters(LLAMA_70B) / 1e9:.2f} billion'),
    Claim("70B, tokens/s of one user", "C", "24", lambda: lecture(LLAMA_70B, 1, 1).output_tok_s),
    Claim("70B, first token after 100, ms", "C", "30",
          lambda: lecture(LLAMA_70B, 1, 100).ttft_s * 1e3, "prefill reads all weights as well"),
    Claim("70B, 50-token answer over first token", "C", "10",
          lambda: 1 + 49 * lecture(LLAMA_70B, 1, 100).step_s / lecture(LLAMA_70B, 1, 100).ttft_s,
          '"5-10x" needs far longer prompts'),
)  # fmt: skip


def intensity(score: Score) -> list[str]:
    """Section 1."""
    kinds = (
        ("MHA", LLAMA_13B),
        ("GQA, K = 8 of 40", GQA_13B),
        ("GQA, K = 8 of 64", LLAMA_70B),
        ("MQA, 64 heads", with_heads(LLAMA_70B, 1)),
        ("MLA, 128 heads", DEEPSEEK_V2),
    )
    rows = [
        (name, config.name, shown(attention(config, 1, 4096).intensity)) for name, config in kinds
    ]
    masked = shown(attention(LLAMA_13B, 4096, 4096).intensity)
    return [
        "## 1. Arithmetic intensity",
        *prose(
            "FLOPs a byte. A product of T tokens with a matrix D x F, and attention of T queries",
            "over S keys where each query head has its own (MHA), at 2 bytes an element:",
        ),
        *code(
            "product    2 T D F / (2 T D + 2 D F + 2 T F)              -> T, where T << D, F",
            "attention  4 S T D / (4 S D + 4 T D)  =  S T / (S + T)    -> S/2 (T = S), 1 (T = 1)",
        ),
        *compared(1, INTENSITY, score),
        *prose(
            "No batch lifts decoding attention above 1 (A, C, D, E), but another head layout does:",
            "query heads that share keys share their bytes. With GQA the limit is G = N/K; with",
            "MLA, whose 128 heads all read one latent vector, the ridge is near. A decode step at",
            "S = 4096, every byte counted (`attention(config, 1, 4096).intensity`):",
        ),
        *table(("attention", "model", "FLOPs/byte"), rows),
        *prose(
            f"In prefill the planner counts {masked} where the formula says 2048: a causal mask",
            "halves the pairs, and new keys and values are written before they are read.",
        ),
    ]


def phases(score: Score) -> list[str]:
    """Section 2."""
    return [
        "## 2. Prefill and decode",
        *code(
            "prefill = max(weights / bandwidth, 2 x parameters x T / rate)",
            "decode  = (weights + cache) / bandwidth        a step, whatever the prompt was",
        ),
        *compared(2, PHASES, score),
        *code(
            "python -m scripts.plan --accounting=lecture --model=llama2-70b --hardware=h100 \\",
            "    --batch=1 --context=100 --new_tokens=50",
        ),
    ]
