"""The scheduler of models with states beside a device that says what each of their copies holds."""

import collections
import itertools
import random

import pytest

from configs.engine import Config, EngineConfig
from configs.kinds.attention import Attention
from configs.kinds.recurrent.mamba import Mamba2
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from inference.request import SamplingParams
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import FinishReason, Prefix, Sequence, Status, cache_key
from tests.inference.scheduling.test_scheduler import fake_output

CONTEXT, PAGE = 64, 4
STATE, FULL = Mamba2(1, 1, 1), Attention(1, 1, 1, None)
WINDOW = Attention(1, 1, 1, None, window=6)


def model(*mixers):
    pattern = tuple(LayerSpec(mixer, None) for mixer in mixers)
    return ModelConfig(
        "host", "host", 10, width=1, num_layers=len(mixers), max_context=CONTEXT, dtype="float32",
        pattern=pattern,
    )  # fmt: skip


MODELS = {"alone": model(STATE), "hybrid": model(STATE, FULL), "windows": model(STATE, WINDOW)}


class Device:
    """States of one data shard, as the tokens that they are of.

    Attributes:
        slots: of running sequences.
        kept: snapshots, by their numbers.
        offloaded: snapshots on the host.
    """

    def __init__(self, group):
        self.group = group
        self.slots, self.kept, self.offloaded = {}, {}, {}
        self.counts = collections.Counter()

    def run(self, schedule, started):
        """A step, as `ModelRunner.launch` orders it; `started` are the tokens that admissions
        count as computed.
        """
        for transfer in schedule.transfers:
            if transfer.group != self.group:
                continue
            self.counts["to host" if transfer.to_host else "from host"] += 1
            if transfer.to_host:
                self.offloaded[transfer.host_page] = self.kept[transfer.page]
            else:
                self.kept[transfer.page] = self.offloaded[transfer.host_page]
        before = dict(self.slots)
        for admission, tokens in zip(schedule.admissions, started, strict=True):
            if admission.source is not None:
                found = before[admission.source]
                self.counts["forked"] += 1
            else:
                found = self.kept[admission.snapshot] if admission.snapshot else ()
                self.counts["resumed"] += bool(found)
            assert found == tokens
            self.slots[admission.slot] = found
        for row in (*schedule.decode, *schedule.prefill):
            owner, stop = row.sequence, row.start + row.length
            fed = tuple(owner.tokens[:stop])
            if owner.status is not Status.FINISHED:
                assert self.slots[row.slot] == fed[: row.start] and len(fed) == stop
            self.slots[row.slot] = fed
        for snapshot in schedule.snapshots:
            assert len(self.slots[snapshot.slot]) == snapshot.num_tokens
            self.kept[snapshot.number] = self.slots[snapshot.slot]
            self.counts["kept"] += 1


class Run:
    """Requests that share beginnings, and whatever is done to them, by one seed."""

    def __init__(self, name, seed):
        self.rng, own = random.Random(seed), MODELS[name]
        draw = self.rng.choice
        size, chunks = draw([(4, (1, 3)), (8, (2,)), (16, (1,))])
        settings = dict(
            max_seqs=3, page_tokens=PAGE, chunk_tokens=size, prefill_chunks=chunks,
            snapshots=draw([0, 1, 2, 4, None]), preemption=draw(["recompute", "swap", "swap"]),
            swap_bytes=draw([300, 5000]), prefix_cache=draw([True, True, False]), overcommit=True,
        )  # fmt: skip
        full = Config(own, EngineConfig.of(cache_bytes=1 << 20, **settings)).full_bytes(3)
        room = int(full * draw([0.7, 1.0, 2.0]))
        mesh = draw([Mesh(), Mesh(), Mesh(data=2)])
        self.config = Config(own, EngineConfig.of(cache_bytes=room, **settings), mesh)
        self.scheduler = Scheduler(self.config, snapshot_tokens=draw([0, 8, 16]))
        self.devices = self.new_devices()
        self.everyone, self.ids, self.in_flight = [], itertools.count(), []
        self.most = draw([0, 1])
        self.texts = [[self.rng.randrange(1, 4) for _ in range(CONTEXT)] for _ in range(2)]
        self.counts = collections.Counter()

    def new_devices(self):
        return [Device(len(self.config.num_pages)) for _ in self.scheduler.shards]

    def add(self):
        rng, id = self.rng, next(self.ids)
        shared = rng.choice(self.texts)[: rng.randrange(0, 50)]
        prompt = shared + [rng.randrange(1, 4) for _ in range(rng.randrange(1, 12))]
        params = SamplingParams(max_new_tokens=rng.randrange(1, 30))
        self.start(self.scheduler.add, params, prompt, len(prompt), id)

    def start(self, add, params, tokens, num_prompt_tokens, id):
        key = cache_key(self.config.engine.cache, id)
        new = Sequence(id, params, tokens, num_prompt_tokens, frozenset({0}), prefix=Prefix(key))
        add(new)
        self.everyone.append(new)

    def fork(self):
        parents = [s for s in self.scheduler.running if s.max_length - len(s.tokens) > 1]
        if not parents:
            return
        parent = self.rng.choice(parents)
        params = SamplingParams(max_new_tokens=parent.params.max_new_tokens)
        self.start(
            lambda child: self.scheduler.fork(parent, child),
            params, list(parent.tokens), parent.num_prompt_tokens, next(self.ids),
        )  # fmt: skip

    def step(self):
        schedule = self.scheduler.schedule()
        if schedule is not None:
            started = [
                [tuple(a.sequence.tokens[: a.sequence.num_computed_tokens]) for a in s.admissions]
                for s in schedule.shards
            ]
            self.in_flight.append((schedule, started))
        if self.in_flight and len(self.in_flight) > (self.most if schedule else 0):
            self.commit()
        self.scheduler.check_integrity()

    def commit(self):
        schedule, started = self.in_flight.pop(0)
        for device, shard, tokens in zip(self.devices, schedule.shards, started, strict=True):
            device.run(shard, tokens)
        self.scheduler.commit(
            schedule, fake_output(schedule, lambda *_: self.rng.choice([1, 2, 3, 1, 2, 3, 0]))
        )

    def disturb(self):
        running = self.scheduler.running
        match self.rng.randrange(12):
            case 0 if running:
                self.scheduler.preempt(self.rng.choice(running))
            case 1 if running:
                self.scheduler.finish(self.rng.choice(running), FinishReason.ABORT)
            case 2 | 3:
                self.fork()
            case 4 if self.rng.random() < 0.1:
                self.in_flight.clear()
                self.scheduler.start_over(self.everyone)
                self.counts += sum((d.counts for d in self.devices), collections.Counter())
                self.devices = self.new_devices()
            case 5 | 6 | 7 if len(self.everyone) < 40:
                self.add()

    def finish(self):
        for _ in range(60 * CONTEXT):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        for shard in self.scheduler.shards:
            shard.pages.check_integrity([])
        return self.counts + sum((d.counts for d in self.devices), collections.Counter())


@pytest.mark.parametrize("name", MODELS)
def test_each_sequence_starts_with_the_state_of_its_tokens(name):
    """Shared, forked, preempted, aborted, offloaded, evicted, and lost."""
    counts = collections.Counter()
    for seed in range(20):
        run = Run(name, seed)
        for _ in range(120):
            run.disturb()
            run.step()
        counts += run.finish()
    assert min(counts[of] for of in ("kept", "resumed", "forked", "to host", "from host")) > 10
