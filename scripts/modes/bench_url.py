"""`bench --url`: a server of OpenAI's interface, measured as a client sees it."""

import dataclasses
import random
from typing import Any

from configs.errors import InputError
from configs.workload import Workload
from scripts import common, failures, interrupts
from scripts.flags import seed_flag, workload_flags
from scripts.flags.requests import key_flag


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Flags besides the workload.

    Attributes:
        model: as the server names it; None: the first that it lists.
        endpoint: path of completions or of chats.
        concurrency: requests at a time, of a closed workload; None: all.
        goodput: limits of a good answer, or None.
    """

    url: str
    model: str | None
    endpoint: str
    dataset: str
    dataset_path: str | None
    as_text: bool
    vocab_size: int
    concurrency: int | None
    goodput: str | None


def run(options: BenchOptions) -> None:
    failures.check_packages("--url", "serve", "httptools", "msgspec", "uvloop")
    from inference.http_client import until

    workload = _workload(options)
    with interrupts.Deferred() as interrupt:
        if not until.run(_run(options, workload), lambda: interrupt.requested):
            raise KeyboardInterrupt


async def _run(options: BenchOptions, workload: Workload) -> None:
    from inference.benchmark.remote import load, results
    from inference.http_client.address import Address, read_key
    from inference.http_client.connections import Connections
    from scripts.reports import url_text

    goodput = None if options.goodput is None else results.Goodput.parse(options.goodput)
    key = read_key(key_flag.API_KEY_FILE.value)
    connections = Connections(Address.parse(f"--url={options.url}", options.url, key))
    model = options.model or await load.first_model(connections)
    requests = await _requests(options, workload, connections, model)
    await load.check(connections, requests[0], model, options.endpoint)
    with common.bars() as progress:
        sent = await load.send(
            connections, requests, model, options.endpoint, workload.concurrency,
            lambda done: progress(done, len(requests), "answers"),
        )  # fmt: skip
    connections.close()
    result = results.requested(model, options.endpoint, len(requests), workload.rate)
    result |= {"burstiness": workload.burstiness, "max_concurrency": workload.concurrency}
    result |= {"dataset": options.dataset, "seed": workload.seed}
    result |= results.figures(sent, goodput)
    if not result["completed"]:
        raise InputError(f"no request was answered: {next(iter(result['failures']))}")
    if common.JSON.value:
        common.print_plain(result)
    else:
        url_text.show(result)
    _warn(result, workload, len(requests) - len({request.prompt for request in requests}))


def _workload(options: BenchOptions) -> Workload:
    """Without --seed a new one each time, since a server may have cached an earlier run's."""
    if workload_flags.named_kind() == "agents":
        raise InputError("--workload=agents goes with an engine of its own: leave --url out")
    if options.concurrency is not None and workload_flags.named_kind() != "closed":
        raise InputError("--concurrency goes with --workload=closed")
    if (options.dataset in ("sharegpt", "custom")) != (options.dataset_path is not None):
        raise InputError("--dataset_path goes with --dataset=sharegpt or custom, which need it")
    defaults: dict[str, Any] = {}
    if options.dataset == "prefix_repetition":
        defaults = {"prefix_tokens": 256, "prefix_share": 1.0, "num_prefixes": 10}
    workload = workload_flags.read(None, **defaults)
    if workload.kind == "trace" and options.dataset != "random":
        raise InputError("a trace has its own prompts: leave --dataset out")
    if workload.kind == "closed":
        size = options.concurrency or workload.num_requests
        workload = dataclasses.replace(workload, concurrency=size)
    if seed_flag.SEED.value is None:
        workload = dataclasses.replace(workload, seed=random.SystemRandom().randrange(1 << 32))
    return workload


async def _requests(
    options: BenchOptions, workload: Workload, connections: Any, model: str
) -> list[Any]:
    from inference.benchmark.remote import load, prompts

    if workload.trace is not None:
        remote_requests = prompts.from_trace(
            workload.trace, workload.num_requests, workload.seed, options.vocab_size
        )
    elif options.dataset_path is None:
        as_text = options.as_text or options.endpoint == load.CHAT
        remote_requests = prompts.drawn(workload, options.vocab_size, as_text)
    else:
        pairs: object
        if options.dataset == "custom":
            pairs = prompts.read_custom(options.dataset_path)
        else:
            counting = prompts.counting(connections, model)
            limit = workload.num_requests or 0
            pairs = await prompts.read_sharegpt(
                options.dataset_path, counting, limit, workload.seed
            )
        remote_requests = prompts.at_times_of(workload, pairs)
    if options.endpoint == load.CHAT and not all(
        isinstance(request.prompt, str) for request in remote_requests
    ):
        raise InputError(f"{load.CHAT} takes texts: leave token ids and lengths out")
    return remote_requests


def _warn(figures: dict[str, Any], workload: Workload, num_repeated: int) -> None:
    """Of what makes figures mean something else: the same prompt twice."""
    if num_repeated:
        common.say(f"{num_repeated} of {figures['num_prompts']} prompts are those of others again")
    cached, total = figures["cached_tokens"], figures["total_input_tokens"]
    if cached:
        common.say(
            f"the server had {cached / max(1, total):.0%} of the prompts' tokens in a cache: "
            "prompts that it has seen, or that share their beginnings"
        )
    elif seed_flag.SEED.value is not None and workload.trace is None:
        common.say(
            f"--seed={workload.seed} asks the same again: a server that keeps prefixes answers a "
            "second run sooner"
        )
