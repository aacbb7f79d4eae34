# SPDX-License-Identifier: Apache-2.0
"""Producer and consumer machines in a hostile world, driven by Hypothesis; the world checks I1 to I8 after every step.

In CI the examples are the same in every run. For a long random run::

    KVPUSH_FUZZ_STEPS=100000 pytest tests/property/test_world.py
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpush.testing.simulation import DIRECTIONS, ConsumerNode, ProducerNode, SimulatedLink, ToyWrite, World, WorldConfig

FUZZ_STEPS = int(os.environ.get("KVPUSH_FUZZ_STEPS", "0"))
STEPS_PER_EXAMPLE = 60

CONFIGS = st.builds(
    WorldConfig,
    num_producers=st.sampled_from([1, 1, 2]),
    num_ranks=st.sampled_from([1, 1, 2]),
    num_consumers=st.sampled_from([1, 1, 2]),
    num_layers=st.sampled_from([2, 3, 4]),
    blocks_outermost=st.booleans(),
    granularity=st.sampled_from(["layer", "auto", "chunk", "request"]),
    max_write_bytes=st.sampled_from([8 << 20, 32, 100]),
    max_inflight_bytes=st.sampled_from([256 << 20, 200]),
    needs_visibility_fence=st.booleans(),
)
IDX = st.integers(0, 7)
KEYS = st.sampled_from(["t0", "t1", "t2"])
REQUESTS = st.sampled_from(["r0", "r1", "r2"])
SOURCES = st.sampled_from(["s0", "s1", "s2"])
PROMPTS = st.integers(0, 3)
PAUSES = st.sampled_from([0.01, 0.3, 0.6, 1.1, 2.1, 3.1, 5.1, 9.0])


class HostileWorld(RuleBasedStateMachine):
    """Every rule is something that can happen to anybody at any time."""

    world: World

    @initialize(config=CONFIGS, prelude=st.booleans())
    def begin(self, config: WorldConfig, prelude: bool) -> None:
        self.world = World(config)
        if prelude:
            # A transfer that is under way: where most of what can go wrong begins.
            self.world.request(0, "r0", key="t0", prompt=2)
            self.world.announce(0, "s0", key="t0", prompt=2)
            self.world.settle()
            self.world.compute(0, "s0", tokens=8)

    # --- picking ---

    def consumer(self, idx: int) -> int:
        return idx % len(self.world.decodes)

    def producer(self, idx: int) -> int:
        return idx % len(self.world.prefills)

    def node(self, idx: int) -> ProducerNode | ConsumerNode:
        return self.world.nodes[idx % len(self.world.nodes)]

    def link(self, idx: int) -> SimulatedLink:
        return self.world.links[idx % len(self.world.links)]

    def write(self, idx: int) -> ToyWrite:
        return self.world.writes[idx % len(self.world.writes)]

    def has_links(self) -> bool:
        return bool(self.world.links)

    def has_writes(self) -> bool:
        return bool(self.world.writes)

    # --- engines ---

    @rule(idx=IDX, name=REQUESTS, key=KEYS, prompt=PROMPTS, token_lo=st.sampled_from([0, 0, 4, 8]), producer=IDX)
    def request(self, idx: int, name: str, key: str, prompt: int, token_lo: int, producer: int) -> None:
        self.world.request(
            self.consumer(idx), name, key=key, prompt=prompt, token_lo=token_lo, producer=self.producer(producer)
        )

    @rule(idx=IDX, name=REQUESTS)
    def abort_receive(self, idx: int, name: str) -> None:
        self.world.abort_receive(self.consumer(idx), name)

    @rule(idx=IDX, key=KEYS, prompt=PROMPTS, producer=IDX)
    def decline(self, idx: int, key: str, prompt: int, producer: int) -> None:
        self.world.decline(self.consumer(idx), key=key, prompt=prompt, producer=self.producer(producer))

    @rule(idx=IDX, name=SOURCES, key=KEYS, prompt=PROMPTS)
    def announce(self, idx: int, name: str, key: str, prompt: int) -> None:
        self.world.announce(self.producer(idx), name, key=key, prompt=prompt)

    @rule(idx=IDX, name=SOURCES, tokens=st.sampled_from([1, 4, 6, 17]), layers=st.sampled_from([None, 1, 2]))
    def compute(self, idx: int, name: str, tokens: int, layers: int | None) -> None:
        self.world.compute(self.producer(idx), name, tokens=tokens, layers=layers)

    @rule(idx=IDX, name=SOURCES)
    def complete(self, idx: int, name: str) -> None:
        producer = self.producer(idx)
        while self.world.compute(producer, name):
            pass
        self.world.finish(producer, name)

    @rule(idx=IDX, name=SOURCES)
    def preempt(self, idx: int, name: str) -> None:
        self.world.preempt(self.producer(idx), name)

    @rule(idx=IDX, name=SOURCES, early=st.booleans())
    def finish(self, idx: int, name: str, early: bool) -> None:
        self.world.finish(self.producer(idx), name, early=early)

    @rule(idx=IDX, name=SOURCES)
    def abort_source(self, idx: int, name: str) -> None:
        self.world.abort_source(self.producer(idx), name)

    @rule(idx=IDX)
    def end_visibility_fence(self, idx: int) -> None:
        self.world.end_visibility_fence(self.consumer(idx))

    # --- messages ---

    @precondition(has_links)
    @rule(idx=IDX, direction=st.sampled_from(DIRECTIONS), count=st.sampled_from([1, 1, 3, 99]))
    def deliver(self, idx: int, direction: str, count: int) -> None:
        link = self.link(idx)
        for _ in range(count):
            if not self.world.deliver(link, direction):  # type: ignore[arg-type]
                break

    @precondition(has_links)
    @rule(idx=IDX, direction=st.sampled_from(DIRECTIONS), position=IDX, fault=st.sampled_from(["drop", "duplicate", "swap"]))
    def disturb(self, idx: int, direction: str, position: int, fault: str) -> None:
        link = self.link(idx)
        queue = link.queues[direction]  # type: ignore[index]
        if queue:
            getattr(link, fault)(direction, position % len(queue))

    @precondition(has_links)
    @rule(idx=IDX)
    def partition(self, idx: int) -> None:
        link = self.link(idx)
        link.partitioned = not link.partitioned

    @precondition(has_links)
    @rule(idx=IDX, heard_by=st.sampled_from([(), DIRECTIONS[:1], DIRECTIONS[1:], DIRECTIONS]))
    def break_link(self, idx: int, heard_by: tuple[str, ...]) -> None:
        self.world.break_link(self.link(idx), heard_by)  # type: ignore[arg-type]

    @rule(idx=IDX, ok=st.sampled_from([True, True, True, False]))
    def answer_add_peer(self, idx: int, ok: bool) -> None:
        node = self.node(idx)
        if isinstance(node, ProducerNode):
            self.world.answer_add_peer(node, ok=ok)

    # --- writes ---

    @precondition(has_writes)
    @rule(idx=IDX)
    def land(self, idx: int) -> None:
        self.world.land(self.write(idx))

    @precondition(has_writes)
    @rule(idx=IDX, ok=st.sampled_from([True, True, False]), partly=st.integers(0, 3))
    def end_write(self, idx: int, ok: bool, partly: int) -> None:
        self.world.end_write(self.write(idx), ok=ok, partly=partly)

    @precondition(lambda self: bool(self.world.zombies))
    @rule(idx=IDX)
    def land_zombie(self, idx: int) -> None:
        self.world.land(self.world.zombies[idx % len(self.world.zombies)])

    # --- time, and worse ---

    @rule(seconds=PAUSES)
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(seconds=PAUSES)
    def run_healthy(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(idx=IDX)
    def freeze_or_thaw(self, idx: int) -> None:
        node = self.node(idx)
        if node.frozen:
            self.world.thaw(node)
        else:
            self.world.freeze(node)

    @rule(idx=IDX, links=st.sampled_from(["closed", "silent", "reconnected"]))
    def restart_producer(self, idx: int, links: str) -> None:
        self.world.restart_producer(self.producer(idx), links)  # type: ignore[arg-type]

    @rule(idx=IDX, links=st.sampled_from(["closed", "silent"]))
    def restart_consumer(self, idx: int, links: str) -> None:
        self.world.restart_consumer(self.consumer(idx), links)  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestHostileWorld = HostileWorld.TestCase
TestHostileWorld.settings = settings(
    max_examples=max(1, FUZZ_STEPS // STEPS_PER_EXAMPLE) if FUZZ_STEPS else 150,
    stateful_step_count=STEPS_PER_EXAMPLE,
    derandomize=not FUZZ_STEPS,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
