"""Speculation changes no token: whatever is proposed, the answers are those of plain decoding."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.heads import DFlash, Eagle, Medusa
from configs.mesh import Mesh
from configs.model import ModelConfig
from configs.recipes import heads
from configs.settings.drafts import LOOKUPS
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import SamplingParams
from inference.scheduling import adaptive_drafts
from inference.speculation import draft_tree
from layers import decoder
from layers.backends.backend import Backend
from layers.backends.cpu import XlaCpu
from layers.params import init
from tests import compiling, fakes, newer_fakes

MODELS = {
    "llama": fakes.llama(),
    "gemma": fakes.gemma(),
    "fake": fakes.fake_model(),
    "deepseek": fakes.deepseek(),
    "gpt-oss": fakes.gpt_oss(),
    "every cache": fakes.every_cache(),
    "llama, int8": fakes.llama(cache_format="int8"),
    "indexer": newer_fakes.shared_indexer(),
    "pages": fakes.llama(token_budget=24),
    "compressed": newer_fakes.deepseek_v4(),
    "delta": fakes.delta(),
    "hybrid": fakes.hybrid(),
    "jamba": fakes.jamba(),
    "linear": fakes.linear(),
}
SIZES = dict(
    max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(4,),
    penalties=True, deterministic=True,
)  # fmt: skip
# What is done to the engine, and what it is built with.
DISTURBANCES = {
    "undisturbed": {},
    "no overlap": {"overlap": False},
    "preempted, chunked": {"preemption": "recompute", "prefill_budget": 16},
    "preempted, prompts first": {"preemption": "recompute", "chunked_prefill": False},
    "adaptive": {"adapt_drafts": True},
}
FEW = 5, 7, 9, 11, 60, 61, 62, 63  # of so few tokens n-grams repeat, drawn ones too


def requests(count, vocab):
    """Every third prompt repeats itself; kinds of sampling alternate, some of several answers."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 50, count)
    texts = [rng.integers(0, vocab, n).tolist() for n in lengths]
    prompts = [text if i % 3 else (text[:6] * 9)[: len(text) + 6] for i, text in enumerate(texts)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7, "allowed_token_ids": FEW[:4]},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.3, "allowed_token_ids": FEW[:2], "min_tokens": 3, "stop_token_ids": (7,)},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "allowed_token_ids": FEW},
        {"temperature": 0.7, "n": 3, "allowed_token_ids": FEW[:3]},
        {"temperature": 0.7, "allowed_token_ids": FEW[:2], "presence_penalty": 0.5},
    ]
    if vocab == fakes.VOCAB:  # whose logits are exact
        kinds = [{"temperature": 0.0}, {"allowed_token_ids": FEW[:3]}]
    return prompts, [
        SamplingParams(
            max_new_tokens=int(rng.integers(1, 40)),
            ignore_eos=True,
            seed=i,
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


def answers(completions):
    return [
        [(one.token_ids, one.logprobs) for one in (completion, *completion.others)]
        for completion in completions
    ]


def make(model, params=None, **settings):
    return fakes.engine(MODELS[model], params, draws=model != "fake", **(SIZES | settings))


def weak(params):
    """Whose layers add little to what they read: the last token says most of the next one."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0.005 if path[-1].key in ("out", "down") else leaf, params
    )


def plain(model, count, is_weak=False):
    """Answers without drafts, by code that is compiled as the test's is."""
    return _plain(model, count, is_weak, compiling.is_quick())


@functools.cache
def _plain(model, count, is_weak, _is_quick):
    params = weak(fakes.real_params(MODELS[model])) if is_weak else None
    engine = make(model, params, shapes="one")
    return answers(engine.generate(*requests(count, MODELS[model].vocab_size)))


def heads_of(model, kind, **more):
    own = {
        field.name: getattr(MODELS[model], field.name) for field in dataclasses.fields(ModelConfig)
    }
    if kind is Medusa:
        return Medusa(**own | {"num_layers": 0, "pattern": ()}, **more)
    return kind(**own | {"num_layers": 1, "pattern": own["pattern"][:1]}, **more)


FUSED = {"features": (1, 2), "proposed_ids": tuple(FEW)}
MTP = dataclasses.replace(
    heads_of("deepseek", Eagle), pattern=MODELS["deepseek"].layers[-1:], shares_head=True,
    skips_first=True,
)  # fmt: skip
APART = dataclasses.replace(MTP, skips_first=False, omits_first=True)
DRAFTS = {  # for which model, and whether both are weak
    "itself": ("llama", "draft", MODELS["llama"], False),
    "another": ("llama", "draft", fakes.gemma(max_context=256), False),
    "eagle": ("llama", "eagle", heads_of("llama", Eagle), False),
    "eagle, fused": ("llama", "eagle", heads_of("llama", Eagle, **FUSED), False),
    "medusa": ("llama", "medusa", heads_of("llama", Medusa, num_heads=5), False),
    "dflash": ("llama", "dflash", heads_of("llama", DFlash, features=(1, 2), mask_id=7), False),
    "mtp": ("deepseek", "eagle", MTP, False),
    "mtp, often right": ("deepseek", "eagle", MTP, True),
    "mtp, first omitted": ("deepseek", "eagle", APART, False),
}


def drafting_by(name, **settings):
    """An engine with what of `DRAFTS` drafts in it."""
    model, proposer, draft, is_weak = DRAFTS[name]
    params, own = fakes.real_params(MODELS[model]), fakes.real_params(draft)
    if is_weak:  # and reads tokens alone
        token_DD = jnp.eye(draft.width)
        own = own | {"input": jnp.concatenate([token_DD, jnp.zeros_like(token_DD)], axis=1)}
        params, own = weak(params), weak(own)
    settings = SIZES | {"proposer": proposer, "cache_bytes": 1 << 20} | settings
    return fakes.engine(MODELS[model], params | {"draft": own}, draft=draft, **settings)


# Bits of optimized code; what the host does otherwise, and other caches, in code that is not: the
# long cases look at the bits of these.
CASES = [("llama", "ngram", 3, 28, "preempted, chunked")]
CASES += [
    pytest.param(model, proposer, 3, count, name, marks=pytest.mark.quick_code)
    for model, proposer, count, name in (
        ("llama", "ngram", 28, "adaptive"), ("pages", "ngram", 10, "preempted, chunked"),
        ("llama", "suffix", 28, "preempted, chunked"),
    )
]  # fmt: skip
CASES += [
    pytest.param(model, proposer, k, 200, name, marks=[pytest.mark.long, pytest.mark.timeout(900)])
    for model, proposer in (
        *((model, "ngram") for model in MODELS), ("gemma", "suffix"),
        *((own[0], name) for name, own in DRAFTS.items()),
    )
    for k, name in (
        *((3, name) for name in DISTURBANCES),
        *((k, "preempted, chunked") for k in ((1, 2, 4) if "mtp" in proposer else (1, 5))),
    )
]  # fmt: skip


def disturbing(engine, name):
    """What is done after each step."""
    steps, rng = itertools.count(1), np.random.default_rng(0)

    def disturb():
        running = engine.scheduler.running
        if "preempted" in name and next(steps) % 3 == 0 and running:
            engine.scheduler.preempt(running[rng.integers(len(running))])

    return disturb


@pytest.mark.parametrize("model, proposer, num_drafts, count, name", CASES)
def test_no_bit_changes(model, proposer, num_drafts, count, name, monkeypatch):
    monkeypatch.setattr(adaptive_drafts, "_PATIENCE", 1)  # drafts do not pay, but are tried
    settings = {"num_drafts": num_drafts} | DISTURBANCES[name]
    if proposer in LOOKUPS:
        engine = make(model, proposer=proposer, **settings)
    else:
        engine = drafting_by(proposer, **settings)
    prompts, params = requests(count, MODELS[model].vocab_size)
    ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
    owners = [engine._requests[id].group for id in ids]
    fakes.drain(engine, disturbing(engine, name), 20_000)
    results = [[(s.output_tokens, s.results.logprobs) for s in owner.sequences] for owner in owners]
    assert results == plain(model, count, "often right" in proposer)
    counters = engine.scheduler.counters
    assert 0 < counters.num_accepted < counters.num_drafts <= num_drafts * counters.num_passes
    if "preempted" in name:
        assert counters.num_preemptions > count // 5


def test_cached_prefixes_and_forks_are_continued_with_drafts():
    """What was computed with drafts is found by later requests, and forked in the middle."""
    engine = make("llama", num_drafts=3, proposer="ngram")
    prompts, params = requests(14, 131)
    first = answers(engine.generate(prompts, params))
    again = answers(engine.generate(prompts, params))
    assert first == again == plain("llama", 14)
    assert engine.scheduler.counters.num_cached_tokens > 0
    id = engine.add_request(prompts[0], SamplingParams(max_new_tokens=40, ignore_eos=True))
    parent = fakes.sequence_of(engine, id)
    while parent.num_output_tokens < 10:
        engine.step()
    child = fakes.sequence_of(
        engine, engine.fork(id, SamplingParams(max_new_tokens=40, ignore_eos=True))
    )
    fakes.drain(engine)
    assert child.output_tokens == parent.output_tokens and len(child.output_tokens) == 40


def test_a_request_may_go_without():
    engine = make("llama", num_drafts=3, proposer="ngram")
    prompts, _ = requests(3, 131)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, speculate=False)
    engine.generate(prompts, [params] * 3)
    assert engine.scheduler.counters.num_drafts == 0
    alone = [record.shape.decode[1] for record in engine.records if not record.shape.prefill[0]]
    assert set(alone) == {1}  # steps without a prompt


BRIEF = ("itself", "eagle, fused", "dflash")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.quick_code if name in BRIEF else pytest.mark.long)
    for name in DRAFTS
])  # fmt: skip
def test_a_model_that_drafts_changes_no_bit(name, monkeypatch):
    """Itself is always right, whatever is drawn; others hardly ever, or, weak as their target,
    often; one here without a loop, as on accelerators.
    """
    if name == "another":
        monkeypatch.setattr(XlaCpu, "repeated", Backend.repeated)
    model, _, _, is_weak = DRAFTS[name]
    engine, expected = drafting_by(name, num_drafts=3), plain(model, 14, is_weak)
    prompts, asked = requests(14, 131)
    assert answers(engine.generate(prompts, asked)) == expected
    counters = engine.scheduler.counters
    if name == "itself":  # but where penalties, which drafts do not count towards, have their say
        assert counters.num_accepted > 0.9 * counters.num_drafts
    elif is_weak:
        assert 0.5 < counters.num_accepted / counters.num_drafts < 0.95
    else:
        assert 0 < counters.num_accepted < counters.num_drafts / 2
    assert answers(engine.generate(prompts, asked)) == expected
    assert counters.num_cached_tokens > 0
    weights = fakes.real_params(MODELS[model])
    engine.sleep(keeps_weights=False)  # but for what drafts
    engine.wake(weak(weights) if is_weak else weights)
    assert answers(engine.generate(prompts[:4], asked[:4])) == expected[:4]


TREE = draft_tree.likeliest(13, 3)
TREES = {
    "eagle": {"proposer": "eagle", "num_drafts": 13, "tree_levels": 3, "tree_branches": 5},
    "eagle, fixed": {"proposer": "eagle", "num_drafts": len(TREE), "draft_tree": TREE},
    "medusa": {"proposer": "medusa", "num_drafts": len(TREE), "draft_tree": TREE},
}


@pytest.mark.parametrize("model, kind, count, name", [
    pytest.param("gemma", "eagle", 14, "preempted, chunked", marks=pytest.mark.quick_code),
    *(
        pytest.param(model, kind, 200, name, marks=[pytest.mark.long, pytest.mark.timeout(900)])
        for model in ("llama", "gemma", "deepseek", "llama, int8") for kind in TREES
        for name in DISTURBANCES if name != "adaptive" or model == "llama"
    ),
    pytest.param("deepseek", "mtp", 200, "preempted, chunked", marks=pytest.mark.long),
])  # fmt: skip
def test_a_tree_changes_no_token(model, kind, count, name, monkeypatch):
    """Branches are accepted, not only the first; what is cached after them is found again."""
    monkeypatch.setattr(adaptive_drafts, "_PATIENCE", 1)  # trees do not pay, but are tried
    own = (
        MTP if kind == "mtp" else
        heads_of(model, Medusa, num_heads=3) if kind == "medusa" else
        heads_of(model, Eagle, features=(1, 2))
    )  # fmt: skip
    params = fakes.real_params(MODELS[model]) | {"draft": fakes.real_params(own)}
    settings = SIZES | {"deterministic": False, "cache_bytes": 1 << 20} | DISTURBANCES[name]
    engine = fakes.engine(
        MODELS[model], params, draft=own, **TREES.get(kind, TREES["eagle"]), **settings
    )
    prompts, asked = requests(count, 131)
    expected = plain(model, count)
    for _ in range(2):
        ids = [engine.add_request(*each) for each in zip(prompts, asked, strict=True)]
        owners = [engine._requests[id].group for id in ids]

        fakes.drain(engine, disturbing(engine, name), 20_000)
        for owner, known in zip(owners, expected, strict=True):
            for sequence, (tokens, logprobs) in zip(owner.sequences, known, strict=True):
                assert sequence.output_tokens == tokens
                np.testing.assert_allclose(sequence.results.logprobs, logprobs, atol=1e-4)
    counters = engine.scheduler.counters
    longest = max(accepted for _, accepted in counters.verified)
    assert 1 < longest <= 3 and counters.num_accepted > 20
    assert len(counters.acceptance) <= 3  # levels, whatever the number of drafts


@pytest.mark.long
def test_trees_are_whole_until_the_context_ends():
    """Where answers end before it, to their last tokens; where they fill it, nothing changes."""
    own = heads_of("llama", Eagle, features=(1, 2))
    params = fakes.real_params(MODELS["llama"]) | {"draft": fakes.real_params(own)}
    settings = SIZES | {"deterministic": False, "cache_bytes": 1 << 20, "max_context": 72}
    engine = fakes.engine(MODELS["llama"], params, draft=own, **TREES["eagle"], **settings)
    prompts, shapes = [prompt[:12] for prompt in requests(8, 131)[0]], []
    for length in (24, 72):
        asked = SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=0.0)
        expected = fakes.engine(MODELS["llama"], **settings).generate(prompts, asked)
        engine.records.clear()
        found = engine.generate(prompts, asked)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        shapes.append({
            queries for record in engine.records if not record.shape.prefill[0]
            for queries, _ in record.rows
        })  # fmt: skip
    assert shapes[0] == {1, 14} and shapes[1] > {1, 5, 14}


@pytest.mark.long
@pytest.mark.parametrize("tree", [(), TREE])
def test_typical_acceptance_keeps_greedy_answers(tree):
    """And is only another law: what is drawn is as long as before."""
    own = heads_of("llama", Medusa, num_heads=3)
    params = fakes.real_params(MODELS["llama"]) | {"draft": fakes.real_params(own)}
    settings = SIZES | {"deterministic": False, "cache_bytes": 1 << 20, "proposer": "medusa"}
    settings |= {"num_drafts": len(tree) or 3, "draft_tree": tree, "acceptance": "typical"}
    engine = fakes.engine(MODELS["llama"], params, draft=own, **settings)
    prompts, _ = requests(20, 131)
    greedy, drawn = (
        SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=t) for t in (0.0, 1.0)
    )
    expected = [each.token_ids for each in make("llama").generate(prompts, greedy)]
    assert [each.token_ids for each in engine.generate(prompts, greedy)] == expected
    before = engine.scheduler.counters.num_accepted
    assert all(len(each.token_ids) == 30 for each in engine.generate(prompts, drawn))
    assert engine.scheduler.counters.num_accepted > before


SURE = {"draft_tree": (), "tree_levels": 2, "tree_branches": 2}


@pytest.mark.parametrize("changes, expected", [
    ({"proposer": "ngram"}, "draft_tree: goes with .*proposer eagle or medusa, not with ngram"),
    ({"num_drafts": 2}, "the nodes that 3 drafts follow, but engine.drafts.num_drafts=2"),
    ({"num_drafts": 32, "draft_tree": tuple(range(32))}, "num_drafts=32: must be at most 31"),
    ({"tree_levels": 2}, "draft_tree: describes the whole tree"),
    (SURE | {"proposer": "medusa"}, "tree_levels: goes with .*proposer eagle, not with medusa"),
    (SURE | {"tree_branches": 4}, "from branches x"),
    (SURE | {"tree_branches": 0}, "must be at least 1"),
    (SURE | {"tree_levels": 0}, "must be at least 1"),
    ({"draft_tree": (0, 2, 1)}, "must rise from 0, level by level"),
    ({"draft_tree": (0, 1, 3)}, "must rise from 0, level by level"),
    ({"deterministic": True}, "engine.deterministic: goes without a tree"),
])  # fmt: skip
def test_a_tree_that_makes_no_sense_is_refused(changes, expected):
    settings = {"proposer": "eagle", "num_drafts": 3, "draft_tree": (0, 0, 1)}
    EngineConfig.of(**settings), EngineConfig.of(**settings | SURE)
    with pytest.raises(InputError, match=expected):
        EngineConfig.of(**settings | changes)


def test_any_number_of_drafts_makes_a_tree():
    for n in range(1, 32):
        EngineConfig.of(proposer="eagle", num_drafts=n, **draft_tree.sizes(n))
        tree = draft_tree.DraftTree(draft_tree.likeliest(n, 4))
        EngineConfig.of(proposer="medusa", num_drafts=n, draft_tree=tree.parents)
        assert tree.levels <= 4 and tree.num_nodes == 1 + n


def test_a_tree_on_what_cannot_branch_is_refused():
    engine = EngineConfig.of(proposer="medusa", num_drafts=3, draft_tree=(0, 0, 1))
    Config(MODELS["llama"], engine, draft=heads_of("llama", Medusa, num_heads=2))
    with pytest.raises(InputError, match="has 1 heads: so many drafts follow each other at most"):
        Config(MODELS["llama"], engine, draft=heads_of("llama", Medusa, num_heads=1))
    branching = EngineConfig.of(proposer="eagle", num_drafts=6, tree_levels=2, tree_branches=2)
    for name in ("jamba", "delta"):
        cause = f"tiny-{name} keeps states, which cannot branch: draft chains, without tree="
        with pytest.raises(InputError, match=cause):
            Config(MODELS[name], engine, draft=heads_of(name, Medusa, num_heads=2))
        with pytest.raises(InputError, match=cause):
            Config(MODELS[name], branching, draft=heads_of("llama", Eagle))


@pytest.mark.parametrize("changes, expected", [
    ({"draft": None}, "engine.drafts.proposer=draft: goes with a draft model"),
    ({"draft": fakes.llama(vocab_size=130)}, "a vocabulary of 130 tokens, tiny-llama one of 131"),
    ({"draft": fakes.llama(max_context=100)}, "tiny-llama drafts up to 100 tokens"),
    ({"draft": fakes.llama("bfloat16")}, "tiny-llama cannot draft"),
    ({"draft": fakes.llama(), "mesh": Mesh(model=2)}, "with a draft model there is one chip"),
])  # fmt: skip
def test_a_model_that_cannot_draft_is_refused(changes, expected):
    engine = EngineConfig.of(num_drafts=2, proposer="draft")
    with pytest.raises(InputError, match=expected):
        Config(fakes.llama(), engine, **changes)
    with pytest.raises(InputError, match="needs engine.drafts.num_drafts of at least 1"):
        EngineConfig.of(proposer="ngram")


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(model=2), Mesh(data=2), Mesh(data=2, model=2)], ids=str)
def test_over_chips_the_tokens_are_the_same(mesh):
    sizes = SIZES | {"deterministic": False}
    prompts, params = requests(14, 131)

    def tokens(engine):
        return [[ids for ids, _ in each] for each in answers(engine.generate(prompts, params))]

    expected = tokens(fakes.engine(MODELS["llama"], **sizes))
    engine = fakes.engine(MODELS["llama"], mesh=mesh, num_drafts=3, proposer="ngram", **sizes)
    assert tokens(engine) == expected
    assert engine.scheduler.counters.num_accepted > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("proposer", ["ngram", "draft", "eagle", "medusa"])
def test_smollm2_says_the_same(proposer, num_drafts):
    """50 prompts, of which some repeat themselves, in bfloat16; in tens, so that later ones find
    the pages of their common beginning. It drafts for itself, or random heads do, of the tokens of
    the prompts.
    """
    checkpoint = resolve.resolve("smollm2-135m").open(None)
    target, tokenizer = checkpoint.config, checkpoint.load_tokenizer()
    sizes = dict(
        max_seqs=8, max_context=256, decode_rows=(8,), page_tokens=16, deterministic=True
    )  # fmt: skip
    rng = np.random.default_rng(3)
    texts = [[str(rng.integers(0, 30)) for _ in range(12)] for _ in range(25)]
    first = "These are numbers, said once and then once more, each of them in the same place. "
    asked = [f"{first}Once: {', '.join(words)}. Again: {', '.join(words[:4])}," for words in texts]
    asked += [f"{first}Number {words[0]} is" for words in texts]
    params = [
        SamplingParams(max_new_tokens=24, temperature=(0.0, 0.7, 1.3)[n % 3], seed=n)
        for n in range(len(asked))
    ]

    def said(engine):
        found = []
        for n in range(0, len(asked), 10):
            found += answers(engine.generate(asked[n : n + 10], params[n : n + 10]))
        return found

    plainly = Engine.from_checkpoint(Config(target, EngineConfig.of(**sizes)), checkpoint)
    settings = EngineConfig.of(**sizes, proposer=proposer, num_drafts=num_drafts)
    if proposer in ("eagle", "medusa"):
        proposed = tuple(sorted({id for text in asked for id in tokenizer.encode(text)}))
        draft = getattr(heads, proposer)(target, "", proposed)
        draft = dataclasses.replace(draft, dtype=target.dtype)
        weights = checkpoint.load_params(decoder.param_infos(target))
        weights |= {"draft": init(decoder.param_infos(draft), seed=3)}
        config = Config(target, settings, draft=draft)
        engine = Engine(config, weights, tokenizer, checkpoint.eos_ids)
    else:
        draft = target if proposer == "draft" else None
        config = Config(target, settings, draft=draft)
        engine = Engine.from_checkpoint(config, checkpoint, draft=draft and checkpoint)
    assert said(engine) == said(plainly)
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens > 0
    if proposer == "draft":
        assert 20 < counters.num_accepted == counters.num_drafts
    else:
        assert 20 < counters.num_accepted < counters.num_drafts
