"""Sections 8 to 10: drafts; batches, pages and money; the question that the notes end with."""

from scripts.reports.lecture.claims import Claim, Score, compared, shown
from scripts.reports.lecture.names import (
    CACHE_FORMATS,
    FORMATS,
    H100,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA_70B,
    Deployment,
    Mesh,
    P,
    Precision,
    Q,
    Speculation,
    acceptance_of,
    best_drafts,
    chips_for,
    dataclasses,
    drafts_gain,
    expected_tokens,
    output_distribution,
    share_paged,
    share_static,
    weight_gb,
    with_heads,
)
from scripts.reports.pages.markdown import code, prose, table

DRAFTS = (
    Claim("draft A kept: min(1, q/p)", "C", "0.6", lambda: min(1, Q[0] / P[0])),
    Claim("draft B kept", "C", "1.0", lambda: min(1, Q[1] / P[1])),
    Claim("A leaves the step", "C", "0.3", lambda: output_distribution(Q, P)[0]),
    Claim("B leaves the step", "C", "0.7", lambda: output_distribution(Q, P)[1]),
    Claim("rejected and drawn again", "C", "0.2", lambda: 1 - acceptance_of(Q, P)),
    Claim("tokens a step, a = 0.9, k = 4", "C", "4.6",
          lambda: expected_tokens(0.9, 4), "a rejection ends the chain"),
    Claim("tokens a step, a = 0.8, k = 4", "C", "4.2", lambda: expected_tokens(0.8, 4), "likewise"),
    Claim("time of such a step, c = 0.11", "C", "1.44", lambda: 1 + 4 * 0.11),
    Claim("speedup", "C", "2.9", lambda: Speculation(4, 0.8, 0.11).speedup, "likewise"),
    Claim("tokens a step, a = 1, k = 4", "C", "5", lambda: expected_tokens(1, 4)),
    Claim("tokens a step, a = 0", "C", "1", lambda: expected_tokens(0, 4)),
    Claim("cost of an 8B draft to a 70B target", "C", "0.11",
          lambda: weight_gb(LLAMA3_8B) / weight_gb(LLAMA3_70B)),
)  # fmt: skip

BATCHES = (
    Claim("rows of 3, 9 and 5 tokens, concatenated", "D", "17", lambda: 3 + 9 + 5),
    Claim("H100s for 1,000 users of 70B, one each", "C", "1,000",
          lambda: chips_for(1000, chips=4), "requests share a step; one H100 holds none"),
    Claim("dollars an hour at 2 an H100", "C", "2,000",
          lambda: 2 * chips_for(1000, chips=4), "likewise"),
    Claim("days of 8.6e12 tokens that make 32e12", "E", "4", lambda: 32 / 8.6),
)  # fmt: skip


def drafts(score: Score) -> list[str]:
    """Section 8."""
    ks = (1, 2, 3, 4, 6, 8)
    rows = [
        (str(a), *(f"{Speculation(k, a, 0.11).speedup:.2f}" for k in ks), str(best_drafts(a, 0.11)))
        for a in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    batches = (1, 16, 64, 128, 256)
    gains = [f"{drafts_gain(batch, Speculation(4, 0.8, 0.11)):.2f}" for batch in batches]
    return [
        "## 8. Drafts",
        *code(
            "tokens a step = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)",
            "speedup       = tokens a step / (1 + k c)",
        ),
        *prose("Two tokens {A, B}, target q = (0.3, 0.7), draft p = (0.5, 0.5); then chains:"),
        *compared(8, DRAFTS, score),
        *prose(
            "`k a + 1` (C) counts drafts that stand behind a rejected one. Speedup by k at c =",
            '0.11, and the best k: "3-4" (E) is right near a = 0.7, and rarely costs much:',
        ),
        *table(("a", *(f"k = {k}" for k in ks), "best k"), rows),
        *prose(
            "A verified draft is free only while the step waits for memory. Llama 2 70B on two",
            "H100s at S = 1,024, k = 4, a = 0.8, c = 0.11, every byte and FLOP counted",
            "(`drafts_gain`):",
        ),
        *table(("batch", *map(str, batches)), [("speedup", *gains)]),
        *code(
            "python -m scripts.plan --accounting=lecture --model=llama2-70b --hardware=h100 \\",
            "    --batch=1 --context=1024 --speculate=4,0.8,0.11",
        ),
    ]


def batches(score: Score) -> list[str]:
    """Sections 9 and 10."""
    lengths = (50, 500)
    reserved, paged = share_paged(lengths, 4096), share_paged(lengths, 16)
    rows = [_served(chips) for chips in (2, 4, 8)]
    priced = dataclasses.replace(H100, price_per_hour=2.0)
    alone = Deployment(LLAMA_70B, priced, accounting="lecture").row(1, 4096)
    shared = Deployment(LLAMA_70B, priced, mesh=Mesh(model=4), accounting="lecture")
    full = shared.row(shared.largest_batch(4096), 4096)
    return [
        "## 9. Batches, pages, money",
        *code(
            "share in use = tokens / (requests x longest)       static batch, or reserved room",
            "             = tokens / (pages x page tokens)      paged",
        ),
        *compared(9, BATCHES, score),
        *prose(
            "Two requests of C, which make 50 and 500 tokens. In a static batch",
            f"{share_static(lengths):.0%} of the row steps make a token; with continuous batching",
            "all do. Where each has room for 4,096 tokens reserved, tokens lie in",
            f"{reserved:.1%} of it; in pages of 16, in {paged:.1%}. What is lost then is the end",
            "of each last page: paging bounds internal fragmentation, and eliminates external (B",
            "and E say both). Padded to the longest, D's rows of 3, 9 and 5 tokens would be 27.",
        ),
        *prose(
            "Llama 2 70B for 1,000 users with 4,096 tokens each, by the H100s that share a copy:"
        ),
        *table(
            ("H100s a copy", "H100s in all", "users a copy", "step, ms", "tokens/s a user"), rows
        ),
        *prose(
            f"At $2 an hour a million tokens cost ${alone.dollars_per_million:.2f} for a user",
            "alone on a chip (were there one that holds the model), and",
            f"${full.dollars_per_million:.2f} in a full batch on four.",
        ),
    ]


def _served(chips: int) -> tuple[str, ...]:
    replica = Deployment(LLAMA_70B, H100, mesh=Mesh(model=chips), accounting="lecture")
    users = replica.largest_batch(4096)
    step_s = replica.row(users, 4096).step_s
    all_chips = str(chips_for(1000, chips))
    return str(chips), all_chips, str(users), shown(step_s * 1e3), f"{1 / step_s:.0f}"


def question() -> list[str]:
    """Section 10."""
    full, int8, int4 = FORMATS["bfloat16"], FORMATS["int8"], FORMATS["int4"]
    narrow = CACHE_FORMATS["int8"]
    drafting = Speculation(4, 0.8, 0.11, size=0.11)
    kinds = (
        ("MHA, bfloat16", with_heads(LLAMA_70B, 64), Precision(full, full, full), None),
        ("GQA, bfloat16", LLAMA_70B, Precision(full, full, full), None),
        ("+ int8 weights", LLAMA_70B, Precision(int8, full, full), None),
        ("+ int4 weights", LLAMA_70B, Precision(int4, full, full), None),
        ("int4 weights, int8 cache", LLAMA_70B, Precision(int4, narrow, full), None),
        ("the same with drafts", LLAMA_70B, Precision(int4, narrow, full), drafting),
    )
    rows = []
    for name, config, precision, speculation in kinds:
        deployment = Deployment(config, H100, precision, Mesh(model=2), speculation=speculation)
        batch = deployment.largest_batch(1024, 1024)
        row = deployment.row(batch, 1024, 1024)
        figures = (str(batch), shown(row.step_s * 1e3), f"{row.output_tok_s:,.0f}", row.bound)
        rows.append((name, *figures))
    return [
        "## 10. The question that C ends with",
        *prose(
            "A 70B model, two H100s, throughput alone: which techniques? Prompts and answers of",
            "1,024 tokens, the largest batch that fits, `exact` accounting, tensor parallel:",
        ),
        *table(("", "batch", "step, ms", "tokens/s", "bound"), rows),
        *prose(
            "Everything that makes room for requests pays, until arithmetic takes longest;",
            "continuous batching keeps the room filled. Drafts shorten one user's wait, and cost",
            "throughput where the batch fills the step already.",
        ),
        *code(
            "python -m scripts.plan --model=llama2-70b --hardware=h100 --mesh=model=2 \\",
            "    --weights=int4 --cache=int8 --batch=1,64,256 --context=1024 --new_tokens=1024",
        ),
    ]
