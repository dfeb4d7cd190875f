"""How a model is trained to have few bits (`scripts.quantize --method=qat`)."""

from configs.recipes.training import TrainingConfig

TRAINING = TrainingConfig(
    steps=300, batch=4, window=256, learning_rate=1.5e-4, warmup_steps=20, weight_decay=0.0,
    checkpoint_every=100,
)  # fmt: skip
