"""Sequence classifiers and rerankers: their logits are transformers', whatever they run beside."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from inference.checkpoints import convert, mapped, resolve
from inference.classifier import Classifier, similarity
from inference.engine import Engine
from inference.server import frames
from inference.server.engine_process.served_engine import ServedEngine
from inference.text import chat_template, pairs
from tests import fakes

pytestmark = pytest.mark.quick_code

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
NAMES = sorted(path.name for path in (GOLDEN / "classifiers").iterdir())
REWARD, LABELS = (GOLDEN / "classifiers" / name for name in (NAMES[3], NAMES[5]))
LANGUAGE_MODEL = GOLDEN / "llama-tokenizer"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}"
    "{% elif m.role == 'document' %} D: {{ m.content }}{% endif %}{% endfor %}"
    "{{ instruction or '' }} Yes or no?"
)


def engine(path: Path, **settings: object) -> Engine:
    """Compiles one step, which draws nothing."""
    sizes = {"max_seqs": 2, "decode_rows": (2,), "chunk_tokens": 16, "prefill_chunks": (2,)}
    how = {"dtype": "float32", "embeddings": True} | sizes | settings
    made = Engine.from_model(str(path), **how)
    reading = [s for s in made.scheduler.shapes if s.prefill[0] and not s.scored]
    made.scheduler.shapes = tuple(reading[-1:])
    return made


@pytest.fixture(autouse=True)
def no_draws():
    with fakes.no_draws():
        yield


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path / "expected.npz") as file:
        return dict(file)


def changed(folder: Path, source: Path, tensors=lambda tensors: tensors, **keys: object) -> Path:
    folder = Path(shutil.copytree(source, folder))
    save_file(
        tensors(load_file(source / "model.safetensors")), folder / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    raw = mapped.read_json(source / "config.json") | keys
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    """Of every prompt, those that end with padding included."""
    path = GOLDEN / "classifiers" / name
    expected, model = arrays(path), engine(path)
    count = sum(key.startswith("tokens") for key in expected)
    assert count == (3 if model.classifier.pad_id is None else 7)
    found = model.classify([expected[f"tokens_{i}"] for i in range(count)], use_activation=False)
    for i, logits_L in enumerate(found):
        np.testing.assert_allclose(logits_L, expected[f"logits_{i}"], atol=1e-4)
    assert len(model.classifier.labels) == len(found[0])


def test_pairs_are_joined_and_scored_as_transformers_does():
    expected, model = arrays(REWARD), engine(REWARD)
    query, document = map(str, expected["pair"])
    assert pairs.encode(model.tokenizer, query, document) == expected["pair_ids"].tolist()
    others = ["Something else.", document, "A token"]
    ranked = model.rerank(query, others, use_activation=False)
    score = {document.index: document.score for document in ranked}
    assert [r.score for r in ranked] == sorted(score.values(), reverse=True) and len(score) == 3
    assert score[1] == pytest.approx(expected["pair_logits"][0], abs=1e-4)
    (first, *_) = model.rerank(query, [document])
    assert first.score == pytest.approx(1 / (1 + np.exp(-expected["pair_logits"][0])), abs=1e-5)


@pytest.mark.parametrize("tokens", ["The,A", "A"])
def test_a_language_model_scores_by_the_logits_of_its_tokens(tokens):
    expected, model = arrays(LANGUAGE_MODEL), engine(LANGUAGE_MODEL, classifier_tokens=tokens)
    *other, relevant = (model.tokenizer.token_id(name) for name in tokens.split(","))
    prompts = [expected[f"tokens_{i}"] for i in (0, 1)]
    logits = [expected[f"logits_{i}"][-1] for i in (0, 1)]
    wanted = [row[relevant] - (row[other[0]] if other else 0) for row in logits]
    found = model.classify(prompts, use_activation=False)
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-4)
    assert model.classifier.labels == ("A",)
    probabilities = np.concatenate(model.classify(prompts))
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-np.array(wanted))), atol=1e-5)


def test_a_template_for_pairs_writes_the_prompt():
    model = engine(LANGUAGE_MODEL, classifier_tokens="The,A")
    with pytest.raises(InputError, match='roles "query" and "document"'):
        model.rerank("q", ["d"])
    model.tokenizer = model.tokenizer.with_template_text(TEMPLATE)
    tokens = pairs.encode(model.tokenizer, "a <|end_of_text|>", "b", {"instruction": "!"})
    assert tokens[0] == model.tokenizer.bos_id and model.tokenizer.eos_id not in tokens
    assert model.tokenizer.decode(tokens) == "Q: a <|end_of_text|> D: b! Yes or no?"
    (logit,) = model.classify([tokens], use_activation=False)
    (ranked,) = model.rerank("a <|end_of_text|>", ["b"], False, {"instruction": "!"})
    assert ranked.score == pytest.approx(float(logit[0]), abs=1e-5)


def test_vectors_score_by_their_angle():
    model = engine(LANGUAGE_MODEL)
    texts = ["The lazy dog", "The lazy dog's cache", "Inference"]
    first_D, *others = model.embed([texts[0], *texts[1:]])
    cosines = [first_D @ d_D / np.linalg.norm(first_D) / np.linalg.norm(d_D) for d_D in others]
    found = {document.index: document.score for document in model.rerank(texts[0], texts[1:])}
    assert found == pytest.approx(dict(enumerate(cosines)), abs=1e-6)
    assert similarity(first_D, 0 * first_D) == 0
    with pytest.raises(InputError, match="this model has no labels"):
        model.classify(["a"])


@pytest.mark.quick_code(False)
def test_company_changes_no_bit():
    expected, model = arrays(LABELS), engine(LABELS, deterministic=True, prefix_cache=False)
    prompts = [expected[f"tokens_{i}"] for i in range(7)]
    together = model.classify(prompts)
    assert [model.classify([p])[0].tobytes() for p in prompts] == [a.tobytes() for a in together]


def head(activation: str, *logits: float) -> list[float]:
    labels = tuple(map(str, range(len(logits))))
    bias = np.asarray(logits, "<f4").tobytes()
    one = Classifier(bytes(4 * len(logits)), bias, labels, activation)
    return one.probabilities(one.logits(np.ones(1, np.float32))).tolist()


def test_activations():
    assert head("identity", -3, 2) == [-3, 2]
    assert head("sigmoid", -1000, 0, 1000) == [0, 0.5, 1]
    assert head("softmax", 1000, 1000, -1000) == [0.5, 0.5, 0]
    multi, regression, two = (
        resolve.resolve(str(GOLDEN / "classifiers" / name)).open(None).classifier
        for name in (LABELS.name, "mistral-regression", "gemma2-two-labels")
    )
    assert (multi.activation, regression.activation, two.activation) == (
        "sigmoid", "identity", "softmax",
    )  # fmt: skip
    assert multi.labels == ("calm", "glad", "sad", "angry", "other")
    assert two.labels == ("LABEL_0", "LABEL_1") and two.pad_id == 3


def test_a_bias_is_added_and_scores_may_stay_logits(tmp_path):
    bias = {"score.bias": np.full(1, 2.5, np.float32)}
    keys = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    folder = changed(tmp_path / "made", REWARD, lambda tensors: tensors | bias, **keys)
    query, document = map(str, arrays(REWARD)["pair"])
    (ranked,) = engine(folder).rerank(query, [document])
    assert ranked.score == pytest.approx(arrays(REWARD)["pair_logits"][0] + 2.5, abs=1e-4)


@pytest.mark.parametrize("keys, tensors, cause", [
    ({"id2label": {"0": "a", "1": "b"}}, {}, "id2label names 2 labels; score.weight has 5"),
    ({"id2label": dict.fromkeys("01234", 1)}, {}, "id2label: 1 is no name of a label"),
    ({"problem_type": "guess"}, {}, "problem_type='guess' is not supported; valid: regression"),
    ({"pad_token_id": "x"}, {}, "pad_token_id must be a token id"),
    ({"sentence_transformers": {"activation_fn": "os.system"}}, {}, "valid: torch.nn.modules"),
    ({}, {"score.weight": None}, "'score.weight' is missing"),
    ({}, {"score.weight": np.zeros((5, 7), np.float32)}, r"'score.weight' is \[5, 7\]; expected"),
    ({}, {"score.bias": np.zeros(3, np.float32)}, r"'score.bias' is \[3\]; expected \[5\]"),
    ({"architectures": ["NewForSequenceClassification"]}, {}, "is not supported"),
    ({"text_config": {}}, {}, "text_config: classifiers of images and texts are not served"),
])  # fmt: skip
def test_unsound_heads_are_named(keys, tensors, cause, tmp_path):
    def make(stored):
        return {name: t for name, t in (stored | tensors).items() if t is not None}

    with pytest.raises(InputError, match=cause):
        resolve.resolve(str(changed(tmp_path / "made", LABELS, make, **keys))).open(None)


@pytest.mark.parametrize("path, tokens, cause", [
    (LANGUAGE_MODEL, "no,maybe,yes", "must be one token, or two"),
    (LANGUAGE_MODEL, "The,absent", "'absent' is no token of this model"),
    (REWARD, "The,A", "is a classifier already"),
    (GOLDEN / "qwen3-mha-untied-float32", "a", "has no tokenizer"),
])  # fmt: skip
def test_tokens_that_are_no_labels_are_named(path, tokens, cause):
    with pytest.raises(InputError, match=f"engine.requests.classifier_tokens={tokens}: .*{cause}"):
        engine(path, classifier_tokens=tokens)


def test_a_server_gets_the_head():
    model = engine(REWARD)
    facts = ServedEngine(model, "tiny", lambda: None).facts()
    received = frames.FROM_ENGINE.decode(frames.encode(facts)[frames.HEADER_BYTES :])
    assert received.classifier == model.classifier is not None


def test_what_several_labels_or_copies_would_lose_is_refused(tmp_path):
    with pytest.raises(InputError, match="head of a sequence classifier has no place"):
        convert.convert(resolve.resolve(str(LABELS)).open(None), tmp_path / "copy", "hf")
    model = engine(LABELS)
    for call in (lambda: model.classify("a"), lambda: model.rerank("q", "d")):
        with pytest.raises(InputError, match="one text is given where a list"):
            call()
    with pytest.raises(InputError, match="has no tokenizer"):
        model.rerank("q", ["d"])
    with pytest.raises(InputError, match="has 5 \\(calm, glad, sad, ...\\): classify"):
        model.classifier.check_scores(has_pairs=False)


def test_new_weights_bring_their_head(tmp_path):
    model, tokens = engine(REWARD), arrays(REWARD)["tokens_0"]
    (before,) = model.classify([tokens], use_activation=False)
    other = changed(
        tmp_path / "other", REWARD, lambda t: t | {"score.weight": -t["score.weight"]}
    )  # fmt: skip
    assert model.update_params(other) == 1
    np.testing.assert_allclose(model.classify([tokens], use_activation=False)[0], -before)
    with pytest.raises(InputError, match="name a directory"):
        model.update_params(model.model_runner.params)


def test_published_prompts_are_those_of_their_cards():
    messages = [{"role": "query", "content": "Q"}, {"role": "document", "content": "D"}]
    texts = {}
    for path in (ROOT / "docs" / "rerankers").iterdir():
        template = path.read_text("utf-8")
        assert pairs.has_pairs(template)
        how = {"add_generation_prompt": False, "variables": {"instruction": "I"}}
        texts[path.stem] = chat_template.render(template, messages, **how)
    assert texts["qwen3_reranker"] == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: I\n<Query>: Q\n<Document>: D<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert texts["bge_reranker_v2_gemma"] == "A: Q\nB: D\nI"
