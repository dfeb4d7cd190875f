"""The flag of `train` and `plan`, so that one process can load both."""

from absl import flags

TASK = flags.DEFINE_string(
    "task",
    "lm",
    "lm: the recipe's model from scratch, or --model trained on. mixture, based, s4, mamba2, "
    "hybrid: a small mixture of experts, linear attention beside windows, S4, Mamba-2, or Mamba-2 "
    "and attention from scratch, likewise. draft: a small model from scratch, with the tokenizer "
    "of --model, for which it is to draft. medusa, eagle: heads that draft for --model, by default "
    "on what it writes itself. distill: --model, on the distributions of --teacher. sft, dpo: "
    "--model, on the answers of --data, or on those that are chosen there over others. grpo: "
    "--model, by rewards of its own answers to the prompts of --data; `plan` says what an "
    "iteration costs.",
)
