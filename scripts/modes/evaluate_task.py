"""`evaluate --task_file`: scores a model on the documents of a file."""

import hashlib
from pathlib import Path

from configs.errors import InputError
from inference.benchmark.quality.tasks import documents, scored
from inference.files import user_files
from scripts import common


def run(path: str, chat: bool, max_tokens: int | None, output: str | None) -> None:
    """Scores a task's documents, prints the metrics, and writes each outcome as a line of `output`.

    The engine is deterministic, so that a document's scores and answers do not depend on the other
    sequences of a step.
    """
    target: Path | None = None
    if output is not None:
        target = user_files.check_target(f"--output={output}", output)
    task_documents, left_out = documents.read(path)
    if chat:
        from inference.text import chat_template

        chat_template.prepare()
    resolved, config = common.resolve_config({"max_seqs": 8}, {"deterministic": True})
    checkpoint = common.open_checkpoint(resolved)
    tokenizer = checkpoint.load_tokenizer()
    if chat and tokenizer.template is None:
        raise InputError(f"--chat: {config.model.name} has no chat template; leave it out")
    prompts = scored.Prompts(tokenizer, chat)
    engine = common.load_engine(checkpoint, config, greedy=True)
    outcomes = []
    with common.bars() as progress, common.compile_progress(engine):
        for outcome in scored.run(engine, task_documents, prompts, max_tokens):
            outcomes.append(outcome)
            progress(len(outcomes), len(task_documents), "documents")
    lines = "".join(f"{outcome.to_json()}\n" for outcome in outcomes)
    if target is not None:
        user_files.write({target: lines.encode()})
    metrics = scored.metrics(outcomes)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    if common.JSON.value:
        result = {
            "task": path,
            "documents": len(task_documents),
            "left_out": left_out,
            "metrics": {name: metric._asdict() for name, metric in metrics.items()},
            "sha256": digest,
        }
        common.print_json(result, config)
        return
    for name, metric in metrics.items():
        error = "" if metric.error is None else f" ± {metric.error:.4f}"
        print(f"{name} {metric.mean:.4f}{error}")
    note = f", {left_out} left out that no check here can judge" if left_out else ""
    print(f"{len(task_documents)} documents{note} (SHA-256 of all answers and scores {digest})")
