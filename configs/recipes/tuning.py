"""Answers that a model learns: those of a file, or its own by their rewards.

python -m scripts.train --task=sft --model=smollm2-135m --data=conversations.jsonl
python -m scripts.train --task=dpo --model=smollm2-135m --data=preferences.jsonl
python -m scripts.train --task=grpo --model=smollm2-135m --data=prompts.jsonl \
    --set training.reward=exact
"""

from configs.engine import EngineConfig
from configs.recipes.training import PolicyTraining, TrainingConfig

# By task.
TRAINING = {
    "sft": TrainingConfig(
        steps=200, batch=8, window=1024, accumulate=8, learning_rate=2e-5, warmup_steps=10,
        weight_decay=0.0, beta2=0.999, checkpoint_every=50,
    ),
    "dpo": TrainingConfig(
        steps=200, batch=8, window=1024, accumulate=8, learning_rate=1e-6, warmup_steps=20,
        weight_decay=0.0, beta2=0.999, checkpoint_every=50,
    ),
}  # fmt: skip

POLICY = PolicyTraining(
    steps=200, batch=16, window=1024, accumulate=8, learning_rate=1e-6, last_learning_rate=1.0,
    weight_decay=0.0, beta2=0.999, checkpoint_every=50,
)  # fmt: skip
SAMPLING = EngineConfig.of(max_seqs=64, deterministic=True)  # where a device can be
