"""Sections 3 and 4: the size of the cache, latency and throughput."""

from scripts.reports.lecture.claims import Claim, Score, compared, shown
from scripts.reports.lecture.names import (
    GQA_13B,
    H100,
    LLAMA_13B,
    LLAMA_70B,
    Deployment,
    ModelConfig,
    cost,
    gigabytes,
    lecture,
    weight_gb,
    weights,
    with_heads,
)
from scripts.reports.pages.markdown import bullets, code, prose, table

CACHE = (
    Claim("70B, one request of 4,096 tokens, bytes", "C", "1,342,177,280",
          lambda: int(cost.cache_bytes(LLAMA_70B, 4096))),
    Claim("70B, the same, GB", "C", "1.34", lambda: gigabytes(LLAMA_70B, 4096)),
    Claim("70B, the same in % of the weights", "C", "1",
          lambda: 100 * gigabytes(LLAMA_70B, 4096) / weight_gb(LLAMA_70B)),
    Claim("70B, 64 requests of 32,768 tokens, GB", "C", "172",
          lambda: gigabytes(LLAMA_70B, 32_768, batch=64),
          "172 GB is 16 of them: 1.34 x 64 x 8 = 687"),
    Claim("70B, the same over the weights", "C", "1.2",
          lambda: gigabytes(LLAMA_70B, 32_768, batch=64) / weight_gb(LLAMA_70B),
          "from the line above"),
    Claim("70B, GQA over MHA", "C", "8",
          lambda: gigabytes(with_heads(LLAMA_70B, 64), 4096) / gigabytes(LLAMA_70B, 4096)),
    Claim("13B, weights, GB", "A C", "26", lambda: weight_gb(LLAMA_13B)),
    Claim("13B, one request of 1,000 tokens, GB", "A", "1.28",
          lambda: gigabytes(LLAMA_13B, 1000), "A's own product is 0.8192e9"),
    Claim("13B, one request of 1,024 tokens, MB", "C", "838",
          lambda: gigabytes(LLAMA_13B, 1024) * 1e3, "cut off, not rounded"),
    Claim("13B, 1 of them, GB", "C", "0.84", lambda: gigabytes(LLAMA_13B, 1024, batch=1)),
    Claim("13B, 64 of them, GB", "C", "53.6",
          lambda: gigabytes(LLAMA_13B, 1024, batch=64), "likewise"),
    Claim("13B, 256 of them, GB", "C", "214",
          lambda: gigabytes(LLAMA_13B, 1024, batch=256), "likewise"),
)  # fmt: skip

# Memory in GB, step in ms, tokens/s.
MHA = {
    1: {"A": ("27.3", "8.0", "124"), "C": ("26.84", "8.0", "125"), "D": ("26.8", "8.08", "124.6")},
    16: {"A": ("46.5", "38.4", "416")},
    64: {"A": ("108.1", "146.9", "436"), "C": ("79.6", "23.8", "2,690"),
         "D": ("79.7", "23.79", "2689.4")},
    256: {"A": ("354.3", "587.8", "436"), "C": ("240", "71.6", "3,575"),
          "D": ("240.7", "70.07", "3561.7")},
}  # fmt: skip
GQA = {
    16: {"A": ("30.9", "", "671")},
    64: {"D": ("33.4", "", "6416")},
    256: {"D": ("130.6", "", "16584")},
}

GAINS = (
    Claim("13B, B = 64 over B = 1, throughput", "C", "21",
          lambda: lecture(LLAMA_13B, 64).output_tok_s / lecture(LLAMA_13B, 1).output_tok_s,
          "cut off, not rounded"),
    Claim("13B, B = 256 over B = 64", "C", "1.3",
          lambda: lecture(LLAMA_13B, 256).output_tok_s / lecture(LLAMA_13B, 64).output_tok_s),
    Claim("two replicas over one", "A D", "2",
          lambda: (lecture(LLAMA_13B, 64, replicas=2).output_tok_s
                   / lecture(LLAMA_13B, 64).output_tok_s)),
)  # fmt: skip


def cache(score: Score) -> list[str]:
    """Section 3."""
    return [
        "## 3. The cache",
        *code("bytes = 2 (keys, values) x L x K x H x S x B x 2 (bfloat16)"),
        *compared(3, CACHE, score),
        *code(
            "python -m scripts.plan --accounting=lecture --model=llama2-70b --hardware=h100 \\",
            "    --batch=64 --context=32768 --set model.max_context=32768",
        ),
    ]


def _grid(
    config: ModelConfig, figures: dict[int, dict[str, tuple[str, str, str]]], score: Score
) -> list[str]:
    """Formats a line for each batch and quantity, with a cell for each note."""
    notes = sorted({note for claims in figures.values() for note in claims})
    rows = []
    for batch, claims in figures.items():
        row = lecture(config, batch)
        values = (row.memory_bytes / 1e9, row.step_s * 1e3, row.output_tok_s)
        names = ("memory, GB", "step, ms", "tokens/s")
        for index, (name, value) in enumerate(zip(names, values, strict=True)):
            claimed = [claims[note][index] if note in claims else "" for note in notes]
            cells = (f"{says} {score.mark(says, value)}" if says else "" for says in claimed)
            rows.append(("" if index else str(batch), name, shown(value), *cells))
    return table(("B", "", "ours", *notes), rows)


def latency(score: Score) -> list[str]:
    """Section 4."""
    largest = Deployment(LLAMA_13B, H100, accounting="lecture").largest_batch(1024)
    largest_gqa = Deployment(GQA_13B, H100, accounting="lecture").largest_batch(1024)
    even = next(b for b in range(1, 999) if gigabytes(LLAMA_13B, 1024, b) > weight_gb(LLAMA_13B))
    start = gigabytes(LLAMA_13B, 2048, 32) + weight_gb(LLAMA_13B)
    peak, wide = lecture(LLAMA_13B, 256).output_tok_s, lecture(GQA_13B, 256).memory_bytes / 1e9
    return [
        "## 4. Latency and throughput: Llama 2 13B on one H100",
        *code("step = (weights + B x cache) / 3.35 TB/s        throughput = B / step"),
        *prose(
            "S = 1,024 (A: 1,000, which moves no figure by more than 3 %). As the model is, K = 40:"
        ),
        *_grid(LLAMA_13B, MHA, score),
        *bullets(
            "A's memory takes its 1.28 GB a request. Its steps follow from no bandwidth: its own"
            " bytes over its own times are 3.4, 1.2, 0.7 and 0.6 TB/s. So its throughput stops at"
            f" 436 tokens/s, where the formula goes on to {peak:,.0f}.",
            "C takes 26.00 GB of weights and cuts digits off.",
            "D cuts digits off too; its 8.08 and 70.07 ms contradict the throughput beside them.",
        ),
        *prose(
            "With GQA, K = 8. The key and value projections shrink too, to",
            f"{weights.num_parameters(GQA_13B) / 1e9:.2f} billion parameters in all:",
        ),
        *_grid(GQA_13B, GQA, score),
        *bullets(
            f"D says of its 130.6 GB that they fit in 80; ours, {wide:.2f}, do. Its 16,584 tokens/s"
            " belong to neither: they take a step of 15.4 ms, which reads 51.7 GB."
        ),
        *compared(4, GAINS, score),
        *prose(
            f"An H100 holds {largest} requests of 1,024 tokens with K = 40, {largest_gqa} with",
            "K = 8; C's own configurator starts at B = 32, S = 2,048, which takes",
            f"{start:.2f}. The cache outweighs the weights from B = {even} on: that it",
            '"dominates" (A, C) is a matter of batch and length.',
        ),
        *code(
            "python -m scripts.plan --accounting=lecture --model=llama2-13b --hardware=h100 \\",
            "    --batch=1,16,64,256 --context=1024",
            "python -m scripts.plan --accounting=lecture --model=llama2-13b --hardware=h100 \\",
            "    --batch=16,64,256 --context=1024 --set model.pattern.mixer.num_kv_heads=8",
        ),
    ]
