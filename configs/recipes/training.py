"""How a model is trained: `inference/training/loop.py` runs it, `--set training.steps=100`
overrides a field.
"""

import dataclasses

from configs.engine import EngineConfig
from configs.errors import InputError, check_positive
from configs.mesh import ONE_CHIP, Mesh
from configs.model import ModelConfig
from configs.recipes.policy import Iteration
from configs.settings.adapters import MOST_RANKS

DIVERGENCES = "forward", "reverse", "jensen_shannon"

_MOST = 1 << 31  # of steps and tokens: what positions are counted in


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101), its rate warmed up linearly, then along a
    cosine (arXiv 1608.03983).

    Attributes:
        steps: updates of the parameters.
        batch: windows of an update.
        window: tokens of a window that are predicted.
        accumulate: parts that a batch is computed in, one after the other; their gradients add up.
        learning_rate: at the end of the warm-up.
        last_learning_rate: at the last step, as a part of `learning_rate`.
        warmup_steps: over which the rate rises from 0.
        weight_decay: of matrices; norms and biases have none.
        beta1, beta2: of the moments of the gradients.
        clip_norm: the gradients of all parameters together are scaled down to this norm.
        checkpoint_every: steps between checkpoints; there is one at the end, too.
        seed: of the parameters and of the order of the windows.
        fim_rate: share of the windows that have a gap, which the model learns to fill.
        lora_rank: of an adapter that is trained in place of the weights; 0: these.
        lora_alpha: its products are scaled by lora_alpha / lora_rank.
        lora_modules: the last words of the names of the modules that it changes; (): all.
        dpo_beta: what direct preference optimization multiplies log-probabilities with: the higher,
            the closer the model stays to its start.
    """

    steps: int
    batch: int
    window: int
    accumulate: int = 1
    learning_rate: float = 1e-3
    last_learning_rate: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    checkpoint_every: int = 100
    seed: int = 0
    fim_rate: float = 0.0
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_modules: tuple[str, ...] = ()
    dpo_beta: float = 0.1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "window", "accumulate", "checkpoint_every"):
            self._check(name, 1, _MOST)
        for name in ("warmup_steps", "seed"):
            self._check(name, 0, _MOST)
        self._check("lora_rank", 0, MOST_RANKS + 1)
        if self.batch % self.accumulate:
            raise InputError(
                f"training.batch={self.batch} is not {self.accumulate} equal parts, which "
                "training.accumulate asks for"
            )
        if self.warmup_steps >= self.steps:
            raise InputError(
                f"training.warmup_steps={self.warmup_steps} is below training.steps={self.steps}"
            )
        check_positive(self, "training.", "learning_rate", "clip_norm", "dpo_beta", "lora_alpha")
        for name in ("last_learning_rate", "weight_decay", "beta1", "beta2", "fim_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"training.{name} is from 0 to 1, not {getattr(self, name)}")

    def _check(self, name: str, lower: int, upper: int) -> None:
        if not lower <= getattr(self, name) < upper:
            raise InputError(
                f"training.{name} is at least {lower} and below {upper}, not {getattr(self, name)}"
            )


@dataclasses.dataclass(frozen=True)
class PolicyTraining(TrainingConfig):
    """Group-relative policy optimization (GRPO, Shao et al. 2024, arXiv 2402.03300): an iteration
    samples a group of answers to each of `batch` prompts, and its updates each learn from an equal
    part of the prompts.

    Attributes:
        reward: of answers: 'exact', 'regex', 'json_schema' or 'module:function'.
        batch: prompts of an iteration.
        window: inputs of a row, which several answers with their prompts share.
        group_size: answers to a prompt, whose rewards are compared.
        max_new_tokens: of an answer.
        updates: of the parameters in an iteration.
        staleness: iterations by which the weights that sample are older than those that learn; an
            iteration's answers are sampled while those before it train.
        clip_ratio: by how much a token's probability may grow or fall in an iteration before its
            gradient is 0.
        kl_coefficient: weight of the divergence from the model at the start; 0: no copy of it
            stays in memory.
        importance_cap: the largest weight of a token for having been likelier under the weights
            that learn than under those that sampled it.
    """

    reward: str = ""
    group_size: int = Iteration.group_size
    max_new_tokens: int = Iteration.max_new_tokens
    updates: int = Iteration.updates
    staleness: int = Iteration.staleness
    clip_ratio: float = 0.2
    kl_coefficient: float = Iteration.kl_coefficient
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        cost = (field.name for field in dataclasses.fields(Iteration))
        Iteration(**{name: getattr(self, name) for name in cost})  # checks them
        check_positive(self, "training.", "clip_ratio", "importance_cap")
        if self.max_new_tokens > self.window:
            raise InputError(
                f"training.max_new_tokens={self.max_new_tokens}: must be at most "
                f"training.window={self.window}, which holds the prompt as well"
            )

    @property
    def iterations(self) -> int:
        return -(-self.steps // self.updates)


@dataclasses.dataclass(frozen=True)
class Distillation(TrainingConfig):
    """A student learns a teacher's distributions of the next token.

    Attributes:
        divergence: of the student from the teacher: 'forward', 'reverse' or 'jensen_shannon'.
        temperature: what both models' logits are divided by.
        top_k: tokens of a position whose probabilities by the teacher are computed once and kept in
            a file; 0: all are computed in each step, with the teacher in memory.
        hidden_weight: of the distance between the models' hidden states; 0: they may differ.
        on_policy: probability that the student continues a window behind its first half.
    """

    divergence: str = "forward"
    temperature: float = 1.0
    top_k: int = 0
    hidden_weight: float = 0.0
    on_policy: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence not in DIVERGENCES:
            raise InputError(
                f"training.divergence={self.divergence}: must be one of {', '.join(DIVERGENCES)}"
            )
        check_positive(self, "training.", "temperature")
        self._check("top_k", 0, _MOST)
        if not 0 <= self.hidden_weight < float("inf"):
            raise InputError(
                f"training.hidden_weight={self.hidden_weight}: must be finite, and at least 0"
            )
        if not 0 <= self.on_policy <= 1:
            raise InputError(f"training.on_policy={self.on_policy}: must be from 0 to 1")
        for name, lacks in (
            ("hidden_weight", "no hidden states"),
            ("on_policy", "nothing of what a student writes"),
        ):
            if self.top_k and getattr(self, name):
                raise InputError(
                    f"training.top_k={self.top_k}: the file has {lacks}, which "
                    f"training.{name} needs; leave one of them out"
                )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, how it is trained, and the chips that do."""

    model: ModelConfig
    training: TrainingConfig
    mesh: Mesh = ONE_CHIP

    def __post_init__(self) -> None:
        training, groups = self.training, self.mesh.num_groups
        if training.window > self.model.max_context:
            raise InputError(
                f"training.window={training.window} is at most the context of "
                f"{self.model.max_context}"
            )
        self.mesh.check(self.model)
        if self.mesh.context > 1:
            raise InputError(
                f"mesh.context={self.mesh.context}: divides cached tokens, and training caches "
                "none; leave mesh.context=1"
            )
        if training.batch // training.accumulate % groups:
            raise InputError(
                f"mesh {self.mesh}: {training.batch // training.accumulate} windows at a time "
                f"(training.batch / training.accumulate) are not equal parts of {groups} groups"
            )


@dataclasses.dataclass(frozen=True)
class DistillationRecipe(Recipe):
    """A recipe whose model learns another's distributions."""

    training: Distillation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.on_policy and self.mesh.num_chips > 1:
            raise InputError(
                f"mesh {self.mesh}: with training.on_policy a student writes and learns on one "
                "chip; leave one of them out"
            )


@dataclasses.dataclass(frozen=True)
class PolicyRecipe(Recipe):
    """A recipe whose answers are sampled by an engine."""

    training: PolicyTraining
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh.num_chips > 1:
            raise InputError(
                f"mesh {self.mesh}: --task=grpo trains and samples on one chip; leave the mesh out"
            )
        if self.training.group_size > self.engine.max_seqs:
            raise InputError(
                f"training.group_size={self.training.group_size}: must be at most "
                f"engine.max_seqs={self.engine.max_seqs}"
            )
