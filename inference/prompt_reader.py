"""What an engine computes of texts that it only reads: scores, vectors, labels, relevance."""

import dataclasses
import types
from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from configs.errors import InputError
from inference.classifier import Classifier, similarity
from inference.input_processor import InputProcessor
from inference.outputs import Score, alternatives
from inference.request import SamplingParams
from inference.request_batch import Prompt, RequestBatch, Runs, check_listed
from inference.text import pairs
from inference.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A document by its place in the list, and its score."""

    index: int
    score: float


class PromptReader(Runs):
    """Reads prompts by the requests of an engine.

    Attributes:
        tokenizer: None: it takes token ids only.
        classifier: head of the model, if it has one.
    """

    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    classifier: Classifier | None = None

    def score(self, texts: Items[Prompt], adapter: str | None = None) -> list[Score]:
        """Log-probability of every token of each text, computed in blocks: never all logits at
        once; of the model with an adapter, where one is named.

        Raises:
            InputError: as `add_request`, or the model gave non-finite logits.
        """
        params = SamplingParams(max_new_tokens=0, adapter=adapter)
        with RequestBatch(self, texts, [params] * len(texts)) as batch:
            return [
                Score(
                    list(s.tokens), s.results.prompt_logprobs,
                    alternatives(s.results.prompt_top_logprobs), s.history.params_versions,
                )
                for s in batch.read()
            ]  # fmt: skip

    def embed(self, texts: Items[Prompt], pooling: str = "last") -> list[np.ndarray]:
        """A vector of each text, f32[D]: the hidden states behind the last norm of its 'last'
        token, or their 'mean' over all its tokens, of whatever length.

        Raises:
            InputError: as `add_request` (the engine is built with `embeddings`), or the model gave
                non-finite logits.
        """
        params = SamplingParams(max_new_tokens=0, pooling=pooling)
        with RequestBatch(self, texts, [params] * len(texts)) as batch:
            return [sequence.embedding for sequence in batch.read()]

    def classify(self, texts: Items[Prompt], use_activation: bool = True) -> list[np.ndarray]:
        """Probabilities of the labels of each text, f32[L], in the order of `classifier.labels`;
        logits without the activation.

        Raises:
            InputError: as `embed`, or the model is no classifier.
        """
        if self.classifier is None:
            raise InputError(
                "this model has no labels: give a sequence classifier, or name the tokens that it "
                "answers with in engine.requests.classifier_tokens"
            )
        check_listed(texts)
        logits = self._logits(self.classifier, texts)
        return list(map(self.classifier.probabilities, logits)) if use_activation else logits

    def rerank(
        self,
        query: str,
        documents: Items[str],
        use_activation: bool = True,
        variables: Mapping[str, object] = types.MappingProxyType({}),
    ) -> list[Ranked]:
        """Documents by their relevance to a query, best first: the score of a classifier of one
        label, or without a classifier the cosine similarity of vectors.

        Args:
            use_activation: scores of a classifier are probabilities, not logits.
            variables: of the chat template for pairs, such as an instruction.

        Raises:
            InputError: as `embed`, or the model has several labels, no tokenizer or no template.
        """
        classifier = self.classifier
        check_listed(documents)
        if self.tokenizer is None:
            raise InputError("queries and documents are texts, and this engine has no tokenizer")
        pairs.check(self.tokenizer.template, classifier)
        if classifier is None:
            query_D, *vectors = self.embed([query, *documents])
            scores = [similarity(query_D, vector_D) for vector_D in vectors]
        else:
            prompts = [pairs.encode(self.tokenizer, query, text, variables) for text in documents]
            logits = self._logits(classifier, prompts)
            scores = [classifier.score(logits_L, use_activation) for logits_L in logits]
        ranked = map(Ranked, range(len(scores)), scores)
        return sorted(ranked, key=lambda document: document.score, reverse=True)

    def _logits(self, classifier: Classifier, texts: Items[Prompt]) -> list[np.ndarray]:
        prompts = [classifier.read_part(self.input_processor.encode(text)) for text in texts]
        return [classifier.logits(hidden_D) for hidden_D in self.embed(prompts)]
