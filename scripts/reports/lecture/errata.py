"""The slips of the notes, and the figures that no configuration gives."""

from scripts.reports.lecture.claims import shown
from scripts.reports.lecture.names import (
    DEEPSEEK_V2,
    GQA_13B,
    H100,
    INDEXER,
    LATENT,
    LLAMA3_8B,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_70B,
    MINITRON_4B,
    Speculation,
    attention,
    chips_for,
    expected_tokens,
    gigabytes,
    lecture,
    product,
    speedup,
    tokens_to_ridge,
    weight_gb,
    weights,
)
from scripts.reports.pages.markdown import prose, table


def slips() -> list[str]:
    """The errata, by topic."""
    topics = (
        ("Arithmetic", _arithmetic()), ("Phases", _phases()), ("Cache and throughput", _caches()),
        ("Smaller caches", _architectures()), ("Drafts", _drafts()), ("Bits", _bits()),
        ("Systems and course", _systems()),
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    number = 0
    for topic, entries in topics:
        rows.append(("", "", f"**{topic}**", ""))
        for row in entries:
            number += 1
            rows.append((str(number), *row))
    return [
        "## Errata",
        *prose("L: the lecture's own text says so too."),
        *table(("", "note", "says", "it is"), rows),
    ]


def _arithmetic() -> list[tuple[str, str, str]]:
    mla = attention(DEEPSEEK_V2, 1, 4096).intensity
    return [
        ("A D L", "forward pass: 6 FLOPs a parameter and token",
         "2; backward takes the other 4"),
        ("A", "989 / 3.3 = 295", f"{shown(H100.rate('bfloat16') / 3.3e12)}; 295 is 989 / 3.35"),
        ("A", "feed-forward moves 2BTD + 6DF + 2BTF bytes",
         "4BTD + 6DF + 4BTF (lecture); the planner reads the last product's input too, 6BTF"),
        ("D", "feed-forward: 6BTD FLOPs, 4BTD + 6DF bytes", "6BTDF FLOPs; 4BTF bytes are missing"),
        ("A", "intensity is BT where DF >> BT",
         f"where BT << D, F: at BT = 4096 it is {shown(product(LLAMA_7B, 4096).intensity)}"),
        ("A", "attention moves B(ST + S + T)D bytes",
         "4BSD + 4BTD; scores stay on the chip and have no width D"),
        ("A", "attention's intensity 4ST/(S+T), S in prefill",
         "ST/(S+T), S/2; at T = 1 A's formula gives 4, its text 1"),
        ("C", "intensity(1, 4096, 4096, 11008) = 2731", shown(product(LLAMA_7B, 4096).intensity)),
        ("A C D E L", "bound by arithmetic from B = 295 on",
         f"{tokens_to_ridge(LLAMA_13B)} for 13B's matrices, {tokens_to_ridge(LLAMA_7B)} for 7B's"),
        ("A L", "decoding attention has intensity 1, \"always\" (A), \"impossible to improve\" (L)",
         f"MHA's, at any batch; up to N/K with GQA, {shown(mla)} with DeepSeek-V2's MLA"),
    ]  # fmt: skip


def _phases() -> list[tuple[str, str, str]]:
    alone = lecture(LLAMA_70B, 1, 100)
    naive = sum(range(4096, 4096 + 256))
    return [
        ("C", "a cached decode step costs constant FLOPs",
         "the products do; attention grows with S, hence C's own O(T²) in all"),
        ("C", "naive passes over 4,097 to 4,352 tokens", "its loop: 4,096 to 4,351"),
        ("C", "naive work is 4,000 times too much",
         f"{naive / 4351:.0f} times: {naive:,} tokens where a cache needs 4,351"),
        ("C", "70B on a single H100",
         f"{shown(weight_gb(LLAMA_70B))} GB do not fit 80; its times are bandwidth arithmetic"),
        ("C", "70B: first token of a short prompt in 30 ms",
         f"{shown(alone.ttft_s * 1e3)} at least: prefill reads all weights too"),
        ("C", "50 tokens take 5-10 times the first one's time",
         f"{1 + 49 * alone.step_s / alone.ttft_s:.0f} times after a prompt of 100"),
        ("D", "latency in tokens/second", "seconds a token"),
        ("D L", "bandwidth gives the maximum latency", "the minimum (and the maximum throughput)"),
    ]  # fmt: skip


def _caches() -> list[tuple[str, str, str]]:
    mha, gqa = lecture(LLAMA_13B, 16), lecture(GQA_13B, 16)
    wide, huge = lecture(GQA_13B, 256), lecture(LLAMA_13B, 256)
    steps = " / ".join(f"{lecture(LLAMA_13B, b).step_s * 1e3:.2f}" for b in (16, 64, 256))
    sizes = " / ".join(f"{lecture(LLAMA_13B, b).memory_bytes / 1e9:.1f}" for b in (16, 64, 256))
    return [
        ("A", "cache: 2 B S L **N** H 2 bytes", "K, not N: they are equal for MHA alone"),
        ("A", "13B, 1,000 tokens: 1.28 GB", f"{shown(gigabytes(LLAMA_13B, 1000))} GB"),
        ("A", "46.5 / 108.1 / 354.3 GB at B = 16 / 64 / 256", f"{sizes} GB"),
        ("A", "38.4 / 146.9 / 587.8 ms, throughput stops at 436",
         f"{steps} ms; {huge.output_tok_s:,.0f} tokens/s at B = 256"),
        ("A", "GQA at B = 16: 46.5 to 30.9 GB, 416 to 671 tokens/s",
         f"{mha.memory_bytes / 1e9:.1f} to {gqa.memory_bytes / 1e9:.1f} GB, "
         f"{mha.output_tok_s:,.0f} to {gqa.output_tok_s:,.0f}"),
        ("D", "GQA at B = 256: 130.6 GB, 16,584 tokens/s, \"fits\"",
         f"{wide.memory_bytes / 1e9:.2f} GB, {wide.output_tok_s:,.0f}; that fits"),
        ("D", "8.08 ms at B = 1, 70.07 ms at B = 256",
         f"{lecture(LLAMA_13B, 1).step_s * 1e3:.2f}, {huge.step_s * 1e3:.2f}"),
        ("C", "70B, 64 x 32k tokens: 172 GB, 1.2 times the weights",
         f"{gigabytes(LLAMA_70B, 32_768, 64):.1f} GB, "
         f"{gigabytes(LLAMA_70B, 32_768, 64) / weight_gb(LLAMA_70B):.1f} times"),
        ("E", "the cache holds keys and values of previous layers",
         "of previous tokens, in every layer"),
    ]  # fmt: skip


def _architectures() -> list[tuple[str, str, str]]:
    heads, latent = LATENT.num_heads, DEEPSEEK_V2.cache_specs[0].elements_per_token
    gain = lecture(LLAMA_13B, 64).step_s / lecture(GQA_13B, 64).step_s
    return [
        ("D", "G key/value heads; K = 40 query heads", "K key/value heads; G = N/K"),
        ("C", "DeepSeek-V2: 64 x 128 = 8192, MLA saves 14x",
         f"{heads} x 128 = {heads * 128:,}, twice (keys, values), over {latent}:"
         f" {2 * heads * 128 / latent:.1f}x"),
        ("A D E", "MLA: 16,000 to 512", f"2 x {heads * 128:,} to {latent}, with the rotary key"),
        ("D", "\"Local Attention (CLA)\"", "CLA is cross-layer attention"),
        ("A", "1 global layer per 6 local", "1 of every 6 (Character.AI's page, the lecture)"),
        ("C", "Mistral 7B interleaves global layers", "all its 32 layers have a window of 4,096"),
        ("C", "Character.AI combines CLA with GQA", "with MQA, says its page"),
        ("C", "GQA's paper trains from scratch",
         "its abstract: MHA checkpoints, uptrained with 5 % of the compute"),
        ("C", "GQA cuts decode latency by K/N",
         f"the cache's part: 5x fewer heads make a step {gain:.2f}x faster (13B, B = 64)"),
        ("E", "sparse attention selects what to keep in the cache",
         f"DeepSeek-V3.2 keeps all and {INDEXER.head_width} more a token; it selects what to read"),
    ]  # fmt: skip


def _drafts() -> list[tuple[str, str, str]]:
    return [
        ("C", "k a + 1 tokens a step: 4.6 at a = 0.9, 4.2 at 0.8; 2.9x",
         f"(1 - a^(k+1))/(1 - a): {expected_tokens(0.9, 4):.2f}, {expected_tokens(0.8, 4):.2f};"
         f" {Speculation(4, 0.8, 0.11).speedup:.2f}x"),
        ("C", "its sketch: at most k tokens; reads `draft_logits`",
         "k + 1: the target adds one when all are kept; the name is never set"),
        ("D", "a rejected draft is replaced from q - p", "from max(q - p, 0), normalized"),
        ("E", "the draft model proposes k tokens in parallel",
         "one after another (E says so later); the target checks them in parallel"),
    ]  # fmt: skip


def _bits() -> list[tuple[str, str, str]]:
    size = weights.num_parameters(MINITRON_4B) / weights.num_parameters(LLAMA3_8B)
    return [
        ("A", "LLM.int8 looks for outliers in weight matrices",
         "in features of activations; those columns stay in 16 bits"),
        ("C D E L", "AWQ keeps 0.1-1 % of the weights in fp16",
         "that experiment motivates it; the method scales channels and quantizes all"),
        ("C D L", "AWQ: INT3, 4x less memory, 3.2x faster",
         "16/3 is 5.3x, 4x is INT4; 3.2x was 4 bits on a Jetson Orin (the authors' README)"),
        ("C", "LLM.int8 1.2x faster (table), 15-23 % slower (text)",
         f"they exclude each other; bandwidth allows {speedup(LLAMA_13B, 'int8'):.2f}x"),
        ("D L", "less memory means higher latency", "lower latency, higher throughput"),
        ("C", "a smaller model against int4 \"of the same parameter count\"",
         "smaller means fewer parameters"),
        ("C", "Minitron 4B is half of Llama 3.1 8B",
         f"{size:.0%}: {weights.num_parameters(MINITRON_4B) / 1e9:.2f} of"
         f" {weights.num_parameters(LLAMA3_8B) / 1e9:.2f} billion"),
    ]  # fmt: skip


def _systems() -> list[tuple[str, str, str]]:
    chips = chips_for(1000, chips=4)
    return [
        ("B E", "paging eliminates fragmentation",
         "the external kind; inside, the end of each last page stays empty"),
        ("C", "1,000 users at 24 tokens/s take 1,000 H100s, $2,000 an hour",
         f"requests share steps: {chips} H100s in fours, ${2 * chips} an hour, and faster"),
        ("D", "the Cursor figure is of 28 April 2023", "2025, by the post's own id"),
        ("D", "timestamps up to 5:40:00", "the recording lasts 1:22:52"),
    ]  # fmt: skip


def claims() -> list[str]:
    """What is measured or reported, and not derived."""
    rows = [
        ("OpenAI generates 100 billion words a day, people 100 trillion", "A D", "Altman, 2024"),
        ("Cursor writes 1 billion accepted lines a day", "A D", "Sanger, 2025"),
        ("OpenAI generates 8.6e12 tokens a day; DeepSeek V4 saw 32e12", "E", "none given"),
        ("people read 4-5 words a second", "C", "none given"),
        ("test-time compute multiplies a query's cost by 100-1000", "C", "none given"),
        ("10 % faster inference saves billions of dollars a year", "E", "none given"),
        ("real engines reach 80 % of the roofline", "C", "none given"),
        ("Mamba matches transformers at 1B", "A D", "Gu & Dao 2023, arXiv 2312.00752"),
        ("Jamba: 52B, attention to Mamba 1:7", "A D", "Lieber et al. 2024, arXiv 2403.19887"),
        ("MiniMax-01: 456B, mostly linear attention", "A D", "MiniMax 2025, arXiv 2501.08313"),
        ("diffusion makes coding models 10 times faster", "A D", "Inception Labs, 2025"),
        ("GQA and CLA cost little accuracy, MLA gains some", "A C D",
         "arXiv 2305.13245, 2405.12981, 2405.04434"),
        ("LLM.int8 is 15-23 % slower than fp16; outliers are 0.1-1 %", "C D",
         "Dettmers et al. 2022, arXiv 2208.07339"),
        ("AWQ is 3 times faster", "A C D", "Lin et al. 2023, arXiv 2306.00978"),
        ("accuracy lost: int8 1 %, int4 2-5 %, pruning < 5 %", "C", "none given"),
        ("pruning 15B to 8B costs hardly any accuracy; 1,024 samples", "A C D E",
         "Muralidharan et al. 2024, arXiv 2407.14679"),
        ("drafts: 2 times (A), 2-4 times (E); best k 3-4 (E)", "A E",
         "compare section 8; Leviathan et al. 2023, arXiv 2211.17192"),
        ("continuous batching and paging: 2-3 times the throughput", "E",
         "compare section 9; Yu et al. 2022, Kwon et al. 2023"),
    ]  # fmt: skip
    return [
        "## Not derivable here",
        *prose("Measurements and reports, repeated without a mark:"),
        *table(("figure", "note", "source"), rows),
    ]
