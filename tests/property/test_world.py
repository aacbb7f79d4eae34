# SPDX-License-Identifier: Apache-2.0
"""Producer and consumer machines in a hostile world, driven by Hypothesis; the world checks I1 to I8 after every step.

In CI the examples are the same in every run. For a long random run::

    FUZZ_STEPS=100000 pytest tests/property/test_world.py
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpush.testing.simulation import DIRECTIONS, ConsumerNode, ProducerNode, SimulatedLink, ToyWrite, World, WorldConfig

FUZZ_STEPS = int(os.environ.get("FUZZ_STEPS", "0"))
STEPS_PER_EXAMPLE = 50


def without_digests_of_unlike_blocks(config: WorldConfig) -> WorldConfig:
    """They are refused, and nothing would happen."""
    return replace(config, verify="off") if config.consumer_block_tokens else config


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
    num_shares=st.sampled_from([0, 0, 1, 2]),
    slot_bytes=st.sampled_from([4096, 130]),
    verify=st.sampled_from(["off", "sample", "all", "all"]),
    clock_rates=st.sampled_from([(1.0,), (1.0, 1.001, 0.999), (0.999, 1.001)]),
    consumer_block_tokens=st.sampled_from([0, 0, 0, 2, 6]),
).map(without_digests_of_unlike_blocks)
IDX = st.integers(0, 7)
TRANSFERS = st.integers(0, 2)
"""One key, one request id, one source id; by default one prompt."""
PROMPTS = st.sampled_from([None, None, None, 0, 1, 2, 3])
TOKEN_LO = st.sampled_from([0, 0, 4, 8])
PAUSES = st.sampled_from([0.01, 0.3, 0.6, 1.1, 2.1, 3.1, 5.1, 9.0])


def names(transfer: int, prompt: int | None) -> tuple[str, str, str, int]:
    return f"t{transfer}", f"r{transfer}", f"s{transfer}", transfer + 1 if prompt is None else prompt


class HostileWorld(RuleBasedStateMachine):
    """Every rule is something that can happen to anybody at any time."""

    world: World

    @initialize(config=CONFIGS, prelude=st.booleans())
    def begin(self, config: WorldConfig, prelude: bool) -> None:
        self.world = World(config)
        if prelude:
            # A transfer that is under way: where most of what can go wrong begins.
            self.world.request(0, "r0", key="t0", prompt=1)
            self.world.announce(0, "s0", key="t0", prompt=1)
            self.world.settle()
            self.world.compute(0, "s0", tokens=4)

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

    @rule(idx=IDX, transfer=TRANSFERS, prompt=PROMPTS, token_lo=TOKEN_LO, producer=IDX)
    def request(self, idx: int, transfer: int, prompt: int | None, token_lo: int, producer: int) -> None:
        key, name, _, number = names(transfer, prompt)
        self.world.request(
            self.consumer(idx), name, key=key, prompt=number, token_lo=token_lo, producer=self.producer(producer)
        )

    @rule(idx=IDX, transfer=TRANSFERS, prompt=PROMPTS)
    def announce(self, idx: int, transfer: int, prompt: int | None) -> None:
        key, _, name, number = names(transfer, prompt)
        self.world.announce(self.producer(idx), name, key=key, prompt=number)

    @rule(idx=IDX, transfer=TRANSFERS, token_lo=TOKEN_LO, producer=IDX, request_first=st.booleans(), settle=st.booleans())
    def both(self, idx: int, transfer: int, token_lo: int, producer: int, request_first: bool, settle: bool) -> None:
        if request_first:
            self.request(idx, transfer, None, token_lo, producer)
        self.announce(producer, transfer, None)
        if not request_first:
            self.request(idx, transfer, None, token_lo, producer)
        if settle:
            self.world.settle()

    @rule(idx=IDX, transfer=TRANSFERS)
    def abort_receive(self, idx: int, transfer: int) -> None:
        self.world.abort_receive(self.consumer(idx), f"r{transfer}")

    @rule(idx=IDX, transfer=TRANSFERS, prompt=PROMPTS, producer=IDX)
    def decline(self, idx: int, transfer: int, prompt: int | None, producer: int) -> None:
        key, _, _, number = names(transfer, prompt)
        self.world.decline(self.consumer(idx), key=key, prompt=number, producer=self.producer(producer))

    @rule(idx=IDX, transfer=TRANSFERS, tokens=st.sampled_from([1, 4, 6, 17]), layers=st.sampled_from([None, 1, 2]))
    def compute(self, idx: int, transfer: int, tokens: int, layers: int | None) -> None:
        self.world.compute(self.producer(idx), f"s{transfer}", tokens=tokens, layers=layers)

    @rule(idx=IDX, transfer=TRANSFERS, finish=st.booleans())
    def complete(self, idx: int, transfer: int, finish: bool) -> None:
        producer = self.producer(idx)
        while self.world.compute(producer, f"s{transfer}"):
            pass
        if finish:
            self.world.finish(producer, f"s{transfer}")

    @rule(idx=IDX, transfer=TRANSFERS)
    def preempt(self, idx: int, transfer: int) -> None:
        self.world.preempt(self.producer(idx), f"s{transfer}")

    @rule(idx=IDX, transfer=TRANSFERS, early=st.sampled_from([False, False, True]))
    def finish(self, idx: int, transfer: int, early: bool) -> None:
        self.world.finish(self.producer(idx), f"s{transfer}", early=early)

    @rule(idx=IDX, transfer=TRANSFERS)
    def abort_source(self, idx: int, transfer: int) -> None:
        self.world.abort_source(self.producer(idx), f"s{transfer}")

    @rule(idx=IDX, ok=st.sampled_from([True, True, False]))
    def end_visibility_fence(self, idx: int, ok: bool) -> None:
        self.world.end_visibility_fence(self.consumer(idx), ok=ok)

    @rule(idx=IDX, ok=st.sampled_from([True, True, True, False]), which=st.integers(0, 3))
    def end_unpack(self, idx: int, ok: bool, which: int) -> None:
        self.world.end_unpack(self.consumer(idx), ok=ok, idx=which)

    @rule()
    def slow_fences(self) -> None:
        self.world.slow_fences = not self.world.slow_fences

    # --- messages ---

    @precondition(has_links)
    @rule(idx=IDX, direction=st.sampled_from(DIRECTIONS), count=st.sampled_from([1, 1, 3, 99]))
    def deliver(self, idx: int, direction: str, count: int) -> None:
        link = self.link(idx)
        for _ in range(count):
            if not self.world.deliver(link, direction):  # type: ignore[arg-type]
                break

    @precondition(has_links)
    @rule(
        idx=IDX,
        direction=st.sampled_from(DIRECTIONS),
        position=IDX,
        fault=st.sampled_from(["drop", "duplicate", "swap", "replay"]),
    )
    def disturb(self, idx: int, direction: str, position: int, fault: str) -> None:
        link = self.link(idx)
        queue = link.queues[direction]  # type: ignore[index]
        if fault == "replay":
            link.replay(direction)  # type: ignore[arg-type]
        elif queue:
            getattr(link, fault)(direction, position % len(queue))

    @precondition(has_links)
    @rule(direction=st.sampled_from([None, None, *DIRECTIONS]))
    def deliver_everything(self, direction: str | None) -> None:
        for link in list(self.world.links):
            for which in DIRECTIONS:
                while direction in (None, which) and self.world.deliver(link, which):
                    pass

    @precondition(has_links)
    @rule(idx=IDX, directions=st.sampled_from([DIRECTIONS, DIRECTIONS, DIRECTIONS[:1], DIRECTIONS[1:]]))
    def partition(self, idx: int, directions: tuple[str, ...]) -> None:
        self.link(idx).held ^= set(directions)  # type: ignore[arg-type]

    @rule(idx=IDX, seconds=st.sampled_from([0.6, 2.1, 3.1, 5.1, 9.0]))
    def partition_for_a_while(self, idx: int, seconds: float) -> None:
        """Everything between one node and the others; the writes under way go on."""
        node = self.node(idx)
        links = [link for link in self.world.links if node in (link.producer, link.consumer)]
        for link in links:
            link.partitioned = True
        self.world.run(seconds)
        for link in links:
            link.partitioned = False

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
    @rule(idx=IDX, how=st.sampled_from(["ok", "ok", "fails", "fails", "lingers"]), partly=st.integers(0, 3))
    def end_write(self, idx: int, how: str, partly: int) -> None:
        self.world.end_write(self.write(idx), ok=how == "ok", partly=partly, lingers=how == "lingers")

    @rule(count=st.sampled_from([1, 1, 2, 5]), skip=st.booleans())
    def fail_posts(self, count: int, skip: bool) -> None:
        self.world.failing_posts = 0 if skip else count

    @precondition(has_writes)
    @rule(idx=IDX, cell=IDX)
    def spoil(self, idx: int, cell: int) -> None:
        if self.world.config.verify == "all":
            self.world.spoil(self.write(idx), cell)

    @rule(idx=IDX, ok=st.sampled_from([True, True, True, False]), which=st.integers(0, 3))
    def end_digest(self, idx: int, ok: bool, which: int) -> None:
        self.world.end_digest(self.node(idx), ok=ok, idx=which)

    @precondition(lambda self: bool(self.world.zombies))
    @rule(idx=IDX)
    def land_zombie(self, idx: int) -> None:
        self.world.land(self.world.zombies[idx % len(self.world.zombies)])

    # --- time, and worse ---

    @rule(seconds=PAUSES)
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(newest_first=st.booleans())
    def end_all_writes(self, newest_first: bool) -> None:
        for write in self.world.writes[:: -1 if newest_first else 1]:
            self.world.end_write(write)

    @rule(idx=IDX, producer=IDX, transfer=TRANSFERS, newest_first=st.booleans())
    def preempt_and_go_on(self, idx: int, producer: int, transfer: int, newest_first: bool) -> None:
        self.both(idx, transfer, 0, producer, True, True)
        self.compute(producer, transfer, 4, None)
        self.preempt(producer, transfer)
        self.complete(producer, transfer, False)
        self.end_all_writes(newest_first)

    @rule(idx=IDX, producer=IDX, transfer=TRANSFERS, newest_first=st.booleans())
    def preempt_for_another(self, idx: int, producer: int, transfer: int, newest_first: bool) -> None:
        """Somebody else computes into the blocks that writes in flight still read."""
        self.both(idx, transfer, 0, producer, True, True)
        self.compute(producer, transfer, 4, None)
        self.preempt(producer, transfer)
        other = (transfer + 1) % 3
        self.announce(producer, other, None)
        self.compute(producer, other, 17, None)
        self.complete(producer, transfer, False)
        self.end_all_writes(newest_first)

    @rule(idx=IDX, producer=IDX, transfer=TRANSFERS, prompt=st.integers(0, 3), settle=st.booleans())
    def other_prompt_under_one_key(self, idx: int, producer: int, transfer: int, prompt: int, settle: bool) -> None:
        self.request(idx, transfer, prompt, 0, producer)
        if settle:
            self.world.settle()
        self.announce(producer, transfer, None)
        self.complete(producer, transfer, True)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(idx=IDX, producer=IDX, transfer=TRANSFERS, replay=st.booleans())
    def healthy_transfer(self, idx: int, producer: int, transfer: int, replay: bool) -> None:
        self.both(idx, transfer, 0, producer, True, True)
        self.complete(producer, transfer, True)
        self.world.settle()
        if replay:
            for link in self.world.links:
                for direction in DIRECTIONS:
                    link.replay(direction)

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

    @rule(idx=IDX)
    def stop_producer(self, idx: int) -> None:
        self.world.stop_producer(self.producer(idx))

    @rule(idx=IDX)
    def stop_consumer(self, idx: int) -> None:
        self.world.stop_consumer(self.consumer(idx))

    @rule(
        idx=IDX,
        transfer=TRANSFERS,
        seconds=st.sampled_from([1.1, 3.4, 3.7, 5.1, 9.0]),
        deaf=st.booleans(),
        then=st.sampled_from(["nothing", "time", "frozen again", "killed"]),
    )
    def freeze_and_go_on(self, idx: int, transfer: int, seconds: float, deaf: bool, then: str) -> None:
        """A long pause of a producer, which goes on as if no time had passed: what leases are for.

        Args:
            deaf: What was said to it meanwhile arrives later.
        """
        ranks = self.world.prefills[self.producer(idx)].ranks
        links = [link for link in self.world.links if deaf and link.producer in ranks]
        for link in links:
            link.held.add("to_producer")
        for rank in ranks:
            self.world.freeze(rank)
        self.world.run(seconds)
        for rank in ranks:
            self.world.thaw(rank)
        self.world.compute(self.producer(idx), f"s{transfer}", tokens=4)
        if then == "frozen again":
            for rank in ranks:
                self.world.freeze(rank)
            self.world.run(1.4)
            for rank in ranks:
                self.world.thaw(rank)
        elif then == "killed":
            self.world.restart_producer(self.producer(idx), "silent")
            self.world.run(1.4)
        elif then == "time":
            self.world.advance(1.4)
        for link in links:
            link.held.discard("to_producer")

    @rule(idx=IDX, links=st.sampled_from(["closed", "silent", "reconnected"]))
    def restart_producer(self, idx: int, links: str) -> None:
        self.world.restart_producer(self.producer(idx), links)  # type: ignore[arg-type]

    @rule(idx=IDX, links=st.sampled_from(["closed", "silent"]))
    def restart_consumer(self, idx: int, links: str) -> None:
        self.world.restart_consumer(self.consumer(idx), links)  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.broken:
            self.world.drain()


# Seconds on an idle machine; a crowded one must not make a failure of it, and a long run may be as long as it likes.
TestHostileWorld = pytest.mark.timeout(0 if FUZZ_STEPS else 600)(HostileWorld.TestCase)
TestHostileWorld.settings = settings(
    max_examples=max(1, FUZZ_STEPS // STEPS_PER_EXAMPLE) if FUZZ_STEPS else 300,
    stateful_step_count=STEPS_PER_EXAMPLE,
    derandomize=not FUZZ_STEPS,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.generate] if os.environ.get("FUZZ_NO_SHRINK") else [Phase.explicit, Phase.generate, Phase.shrink],
)
