"""What a smaller model learns from a larger one.

python -m scripts.train --task=distill --model=STUDENT --teacher=TEACHER --text=FILE
"""

from configs.recipes.training import Distillation

TRAINING = Distillation(
    steps=400, batch=4, window=256, learning_rate=3e-4, warmup_steps=20, weight_decay=0.0,
)  # fmt: skip
SAMPLES = 1024  # windows that the teacher writes where there is no text
