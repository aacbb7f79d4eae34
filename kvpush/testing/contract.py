# SPDX-License-Identifier: Apache-2.0
"""The contract suite: what every channel, transport and backend must do, as pytest classes to subclass.

The author of a plugin writes::

    # conftest.py
    pytest_plugins = ["kvpush.testing.plugin"]

    # test_mydevice.py
    from kvpush.testing.contract import PluginContract

    class TestMyDevice(PluginContract):
        @pytest.fixture
        def plugin(self):
            return MyPlugin()

That runs all of :class:`BackendContract`, :class:`TransportContract` and :class:`EndpointContract`. A transport or a channel by
itself, or with other options, is a class of its own::

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def transport_pair(self):
            ...
            yield TransportPair(...)

A test of something that the backend's card doesn't promise is skipped, and says so.

Needs pytest. Nothing here measures time; every wait has a deadline (:data:`DEADLINE_S`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvpush.backends.base import BACKEND_API_VERSION, Backend, BackendInfo, BackendPlugin, CacheView, Capability
from kvpush.core.events import ReceiveAborted, ReceiveStatus
from kvpush.core.ids import AgentName, PeerAddress, RequestId
from kvpush.core.layout import LayerLayout
from kvpush.core.plan import PairPlan
from kvpush.core.transport import (
    Channel,
    Completion,
    Link,
    LinkClosed,
    MemoryKind,
    Received,
    Region,
    WriteStatus,
)
from kvpush.core.wire import MAX_FRAME_BYTES
from kvpush.errors import BackendError, ConfigError, KvPushError, LayoutError, MemoryRegistrationError, TransportError
from kvpush.testing.check import NOT_DECLARED
from kvpush.testing.endpoints import EndpointPair
from kvpush.testing.fabric import Device, Memory, Side, TransportPair, backend_pair, device_of

DEADLINE_S = 30.0
"""When a wait gives up. Far beyond anything that works."""

ChannelFactory = Callable[[bool], Channel]
"""Makes a channel; True: it listens. Whoever makes the factory closes its channels."""


def wait_until(condition: Callable[[], bool], what: str, *, pause_s: float = 0.0005) -> None:
    """Evaluate ``condition`` until it holds.

    Raises:
        AssertionError: not within :data:`DEADLINE_S`; names ``what``.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S} s: {what}")
        time.sleep(pause_s)


class Mailbox:
    """Everything that a channel has received, kept for looking at."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.items: list[Received | LinkClosed] = []

    def pump(self) -> None:
        """Receive until empty."""
        while new := self.channel.receive():
            self.items += new

    def messages(self, link: Link | None = None) -> list[bytes]:
        """Data received so far, on one link or all."""
        return [item.data for item in self.items if isinstance(item, Received) and link in (None, item.link)]

    def closed(self) -> list[Link]:
        """Links reported as closed so far."""
        return [item.link for item in self.items if isinstance(item, LinkClosed)]

    def until(self, condition: Callable[[Mailbox], bool], what: str) -> None:
        """Wait for and receive messages until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        self.pump()
        while not condition(self):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {DEADLINE_S} s: {what}; have {len(self.items)} items")
            self.channel.wait(0.1)
            self.pump()


class ChannelContract:
    """What a :class:`kvpush.core.transport.Channel` must do. Override :meth:`channel_factory`."""

    reports_lost_peer = True
    """The dialling side gets ``LinkClosed`` when the listener goes away."""

    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        """A factory of channels that can reach one another; a generator fixture that closes them at the end."""
        raise NotImplementedError("override the channel_factory fixture")

    @staticmethod
    def _address(channel: Channel) -> PeerAddress:
        assert channel.address is not None
        return channel.address

    def test_address_is_known_only_to_a_listener(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        assert 1 <= self._address(listener).port <= 65535
        assert dialler.address is None

    def test_messages_arrive_in_order_both_ways(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        there, back = Mailbox(listener), Mailbox(dialler)
        sent = [f"{i}".encode() * (i % 7) for i in range(100)]
        assert all(dialler.send(link, data) for data in sent)
        there.until(lambda box: len(box.messages()) >= 100, "100 messages")
        assert there.messages() == sent
        (answer_link,) = {item.link for item in there.items}
        assert all(listener.send(answer_link, data[::-1]) for data in sent)
        back.until(lambda box: len(box.messages()) >= 100, "100 answers")
        assert back.messages(link) == [data[::-1] for data in sent]

    def test_large_and_binary_messages_survive(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        data = bytes(range(256)) * (MAX_FRAME_BYTES // 256)
        assert dialler.send(link, data)
        assert dialler.send(link, b"")
        there = Mailbox(listener)
        there.until(lambda box: len(box.messages()) >= 2, "the large and the empty message")
        assert there.messages() == [data, b""]

    def test_longer_than_a_frame_is_refused(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        assert not dialler.send(link, bytes(MAX_FRAME_BYTES + 1))
        assert dialler.send(link, b"next")
        there = Mailbox(listener)
        there.until(lambda box: bool(box.messages()), "the message after it")
        assert there.messages() == [b"next"]

    def test_links_are_apart(self, channel_factory: ChannelFactory) -> None:
        listener, first, second = channel_factory(True), channel_factory(False), channel_factory(False)
        address = self._address(listener)
        links = [first.connect(address), first.connect(address)]
        other = second.connect(address)
        assert len(set(links)) == 2
        assert first.send(links[0], b"a")
        assert first.send(links[1], b"b")
        assert second.send(other, b"c")
        there = Mailbox(listener)
        there.until(lambda box: len(box.messages()) >= 3, "one message per link")
        by_data = {item.data: item.link for item in there.items if isinstance(item, Received)}
        assert set(by_data) == {b"a", b"b", b"c"}
        assert len(set(by_data.values())) == 3
        assert listener.send(by_data[b"b"], b"B")
        back = Mailbox(first)
        back.until(lambda box: bool(box.messages()), "the answer")
        assert back.messages(links[1]) == [b"B"]

    def test_a_listener_can_also_dial(self, channel_factory: ChannelFactory) -> None:
        one, two = channel_factory(True), channel_factory(True)
        link = one.connect(self._address(two))
        assert one.send(link, b"hello")
        there = Mailbox(two)
        there.until(lambda box: bool(box.messages()), "the message")
        assert there.messages() == [b"hello"]

    def test_unknown_links_take_nothing(self, channel_factory: ChannelFactory) -> None:
        listener = channel_factory(True)
        assert not listener.send(Link(123456), b"x")
        listener.close_link(Link(123456))
        assert listener.receive() == []

    def test_a_closed_link_is_unknown(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        assert dialler.send(link, b"x")
        there = Mailbox(listener)
        there.until(lambda box: bool(box.messages()), "the message")
        dialler.close_link(link)
        dialler.close_link(link)
        assert not dialler.send(link, b"y")
        assert Mailbox(dialler).closed() == []
        inbound = there.items[0].link
        listener.close_link(inbound)
        listener.close_link(inbound)
        assert not listener.send(inbound, b"z")

    def test_a_full_queue_says_so(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        data = bytes(1024)
        deadline = time.monotonic() + DEADLINE_S
        while dialler.send(link, data):
            assert time.monotonic() < deadline, "sending to a peer that doesn't receive never ends"

    def test_connecting_before_the_peer_listens(self, channel_factory: ChannelFactory) -> None:
        """A peer that is not there yet is no error: what was sent arrives, or the link is reported as closed."""
        gone = channel_factory(True)
        address = self._address(gone)
        gone.close()
        dialler = channel_factory(False)
        link = dialler.connect(address)
        assert dialler.send(link, b"x")
        assert [item for item in dialler.receive() if isinstance(item, Received)] == []

    def test_lost_listener_is_reported_once(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        assert dialler.send(link, b"x")
        there, back = Mailbox(listener), Mailbox(dialler)
        there.until(lambda box: bool(box.messages()), "the message")
        assert listener.send(there.items[0].link, b"last words")
        back.until(lambda box: bool(box.messages()), "the answer")
        listener.close()
        if self.reports_lost_peer:
            back.until(lambda box: bool(box.closed()), "LinkClosed")
            back.pump()
            assert back.closed() == [link]
            assert not dialler.send(link, b"y")

    @pytest.mark.parametrize(
        ("host", "port"),
        [
            ("", 1),
            ("h" * 256, 1),
            ("a b", 1),
            ("a\n", 1),
            ("a;b", 1),
            ("*", 1),
            ("a\0", 1),
            ("h/../x", 1),
            ("[::1]", 1),
            ("h\u00e9", 1),
            ("localhost", 0),
            ("localhost", -1),
            ("localhost", 65536),
        ],
    )
    def test_malformed_addresses_are_refused(self, channel_factory: ChannelFactory, host: str, port: int) -> None:
        with pytest.raises(TransportError):
            channel_factory(False).connect(PeerAddress(host, port))

    def test_wake_ends_a_wait(self, channel_factory: ChannelFactory) -> None:
        channel = channel_factory(True)
        ended = threading.Event()

        def sleep() -> None:
            channel.wait(None)
            ended.set()

        thread = threading.Thread(target=sleep, daemon=True)
        thread.start()
        channel.wake()
        assert ended.wait(DEADLINE_S), "wake() did not end wait()"
        thread.join(DEADLINE_S)

    def test_a_wake_is_not_lost_between_waits(self, channel_factory: ChannelFactory) -> None:
        """wake() before wait(), with a receive() between: the wait must end at once."""
        channel = channel_factory(True)
        channel.wake()
        channel.wake()
        assert channel.receive() == []
        self._must_return(channel)

    def test_a_message_ends_a_wait(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        assert dialler.send(dialler.connect(self._address(listener)), b"x")
        there = Mailbox(listener)
        self._must_return(listener)
        there.until(lambda box: bool(box.messages()), "the message")

    @staticmethod
    def _must_return(channel: Channel) -> None:
        """``wait(None)``, ended from outside (a failure) when it doesn't end by itself."""
        late = threading.Event()

        def rescue() -> None:
            late.set()
            channel.wake()

        timer = threading.Timer(DEADLINE_S, rescue)
        timer.start()
        channel.wait(None)
        timer.cancel()
        timer.join(DEADLINE_S)
        assert not late.is_set(), "wait() slept through a wake-up or a message"

    def test_wait_honours_its_timeout(self, channel_factory: ChannelFactory) -> None:
        channel = channel_factory(True)
        for timeout_s in (0.0, 0.0001, 0.01):
            channel.wait(timeout_s)
        assert channel.receive() == []

    def test_close_is_idempotent_and_final(self, channel_factory: ChannelFactory) -> None:
        listener, dialler = channel_factory(True), channel_factory(False)
        link = dialler.connect(self._address(listener))
        for channel in (dialler, listener):
            channel.close()
            channel.close()
            channel.wake()
            channel.wait(0.0)
            assert channel.receive() == []
        assert not dialler.send(link, b"x")
        dialler.close_link(link)
        with pytest.raises(TransportError):
            dialler.connect(PeerAddress("localhost", 1))


def drain(pair: TransportPair, num: int, *, target_progresses: bool = True) -> list[Completion]:
    """Poll the source, and let the target progress, until ``num`` completions are there; then make the bytes readable."""
    done: list[Completion] = []

    def step() -> bool:
        pair.advance()
        if target_progresses:
            pair.target.transport.progress()
        done.extend(pair.source.transport.poll())
        return len(done) >= num

    wait_until(step, f"{num} completions")
    pair.settle()
    return done


class TransportContract:
    """What a :class:`kvpush.core.transport.Transport` must do. Override :meth:`transport_pair`.

    The pair's memories are at least 1 MiB each. Tests fill them; writes go from ``source`` to ``target``.
    """

    refuses_foreign_memory = True
    """``post_write`` raises for rows outside the registered regions of either side."""

    @pytest.fixture
    def transport_pair(self) -> TransportPair:
        """Two connected transports with registered memory; a generator fixture that closes them at the end."""
        raise NotImplementedError("override the transport_pair fixture")

    def _write(self, pair: TransportPair, token: int, spans: list[tuple[int, int, int]]) -> None:
        """Post rows of (source offset, target offset, length)."""
        src = pair.source.rows(*((src, length) for src, _, length in spans))
        dst = pair.target.rows(*((dst, length) for _, dst, length in spans))
        pair.source.transport.post_write(token, pair.peer, src, dst)

    def _check(self, pair: TransportPair, spans: list[tuple[int, int, int]]) -> None:
        """Write random bytes and compare the whole target memory: the spans copied, everything else untouched."""
        rng = np.random.default_rng(len(spans))
        pair.source.memory[:] = rng.integers(0, 256, pair.source.memory.size, np.uint8)
        pair.target.memory[:] = rng.integers(0, 256, pair.target.memory.size, np.uint8)
        expected = pair.target.memory[:].copy()
        for src, dst, length in spans:
            expected[dst : dst + length] = pair.source.memory[src : src + length]
        self._write(pair, 7, spans)
        assert drain(pair, 1) == [Completion(7, WriteStatus.DONE, "")]
        np.testing.assert_array_equal(pair.target.memory[:], expected)

    def test_has_names_and_capabilities(self, transport_pair: TransportPair) -> None:
        source, target = transport_pair.source.transport, transport_pair.target.transport
        assert source.name == target.name != ""
        assert source.agent_name != target.agent_name == transport_pair.peer
        assert source.capabilities.retry_window_s >= 0

    def test_one_descriptor(self, transport_pair: TransportPair) -> None:
        self._check(transport_pair, [(100, 333, 4096)])

    def test_one_byte(self, transport_pair: TransportPair) -> None:
        self._check(transport_pair, [(0, transport_pair.target.memory.size - 1, 1)])

    def test_the_whole_region(self, transport_pair: TransportPair) -> None:
        size = min(transport_pair.source.memory.size, transport_pair.target.memory.size)
        self._check(transport_pair, [(0, 0, size)])

    def test_many_descriptors_of_many_lengths(self, transport_pair: TransportPair) -> None:
        self._check(transport_pair, [(i * 3001, i * 2003, 1 + i * 7) for i in range(200)])

    def test_adjacent_descriptors(self, transport_pair: TransportPair) -> None:
        """Rows that continue one another on both sides, which a transport may join."""
        self._check(transport_pair, [(i * 4096, 8192 + i * 4096, 4096) for i in range(64)])

    def test_shuffled_blocks(self, transport_pair: TransportPair) -> None:
        places = np.random.default_rng(1).permutation(256).tolist()
        self._check(transport_pair, [(i * 4096, places[i] * 4096, 4096) for i in range(256)])

    def test_no_descriptors(self, transport_pair: TransportPair) -> None:
        before = transport_pair.target.memory[:].copy()
        self._write(transport_pair, 3, [])
        assert drain(transport_pair, 1) == [Completion(3, WriteStatus.DONE, "")]
        np.testing.assert_array_equal(transport_pair.target.memory[:], before)

    def test_a_view_of_the_rows_is_enough(self, transport_pair: TransportPair) -> None:
        """The caller may hand over slices and may reuse its arrays afterwards."""
        pair = transport_pair
        pair.source.memory[:8192] = 9
        src, dst = pair.source.rows((0, 64), (1, 1), (4096, 64)), pair.target.rows((0, 64), (1, 1), (4096, 64))
        pair.source.transport.post_write(1, pair.peer, src[::2], dst[::2])
        src[:] = dst[:] = 0
        assert drain(pair, 1) == [Completion(1, WriteStatus.DONE, "")]
        assert int(pair.target.memory[:].astype(np.int64).sum()) == 9 * 128

    def test_many_in_flight_each_ends_once(self, transport_pair: TransportPair) -> None:
        pair, num = transport_pair, 100
        pair.source.memory[:] = np.random.default_rng(2).integers(0, 256, pair.source.memory.size, np.uint8)
        for i in range(num):
            self._write(pair, 1000 + i, [(i * 5000, i * 6000, 3000)])
        assert pair.source.transport.num_in_flight == num
        done = drain(pair, num)
        assert sorted(completion.token for completion in done) == [1000 + i for i in range(num)]
        assert {completion.status for completion in done} == {WriteStatus.DONE}
        assert pair.source.transport.num_in_flight == 0
        for _ in range(20):
            pair.advance()
            pair.target.transport.progress()
            assert pair.source.transport.poll() == []
        for i in range(num):
            src, dst = pair.source.memory[i * 5000 : i * 5000 + 3000], pair.target.memory[i * 6000 : i * 6000 + 3000]
            np.testing.assert_array_equal(src, dst)

    def test_num_in_flight_counts_until_polled(self, transport_pair: TransportPair) -> None:
        transport = transport_pair.source.transport
        assert transport.num_in_flight == 0
        self._write(transport_pair, 1, [(0, 0, 10)])
        assert transport.num_in_flight == 1
        drain(transport_pair, 1)
        assert transport.num_in_flight == 0

    def test_a_token_can_be_used_again_but_not_twice_at_once(self, transport_pair: TransportPair) -> None:
        for _ in range(3):
            self._write(transport_pair, 5, [(0, 0, 10)])
            with pytest.raises(TransportError):
                self._write(transport_pair, 5, [(0, 0, 10)])
            assert drain(transport_pair, 1) == [Completion(5, WriteStatus.DONE, "")]

    def test_both_directions(self, transport_pair: TransportPair) -> None:
        pair = transport_pair
        peer = pair.target.transport.add_peer(pair.source.transport.metadata())
        back = replace(pair, source=pair.target, target=pair.source, peer=peer)
        pair.source.memory[:] = 1
        self._write(pair, 1, [(0, 0, 1000)])
        drain(pair, 1)
        assert pair.target.memory[:1000].all()
        pair.target.memory[5000:6000] = 2
        self._write(back, 1, [(5000, 0, 1000)])
        drain(back, 1)
        assert (pair.source.memory[:1000] == 2).all()

    def test_rows_that_do_not_pair_are_refused(self, transport_pair: TransportPair) -> None:
        source, target = transport_pair.source, transport_pair.target
        for src, dst in (
            (source.rows((0, 10)), target.rows((0, 11))),
            (source.rows((0, 10)), target.rows((0, 10), (20, 10))),
            (source.rows((0, 10))[:, :2], target.rows((0, 10))[:, :2]),
        ):
            with pytest.raises(TransportError):
                source.transport.post_write(1, transport_pair.peer, src, dst)
        assert source.transport.num_in_flight == 0

    def test_memory_outside_the_regions_is_refused(self, transport_pair: TransportPair) -> None:
        if not self.refuses_foreign_memory:
            return
        pair = transport_pair
        own, foreign = (Side(side.transport, *pair.device.allocate(4096)) for side in (pair.source, pair.target))
        size = pair.target.memory.size
        inside = [(0, 4096)]
        cases = [
            (pair.source.rows(*inside), foreign.rows(*inside)),
            (own.rows(*inside), pair.target.rows(*inside)),
            (pair.source.rows(*inside), pair.target.rows((size - 4095, 4096))),
            (pair.source.rows(*inside), pair.target.rows((-1, 4096))),
            (
                pair.source.rows((0, 1), (1, 1)),
                np.concatenate([pair.target.rows((0, 1)), foreign.rows((0, 1))]),
            ),
        ]
        for src, dst in cases:
            with pytest.raises(TransportError):
                pair.source.transport.post_write(1, pair.peer, src, dst)
        assert pair.source.transport.num_in_flight == 0
        assert not foreign.memory[:].any()
        self._check(pair, [(0, 0, 4096)])

    def test_unknown_peers(self, transport_pair: TransportPair) -> None:
        pair = transport_pair
        nobody = AgentName("nobody-of-that-name")
        with pytest.raises(TransportError):
            pair.source.transport.post_write(1, nobody, pair.source.rows((0, 1)), pair.target.rows((0, 1)))
        pair.source.transport.remove_peer(nobody)
        assert pair.source.transport.num_in_flight == 0

    def test_adding_a_peer_again_is_harmless(self, transport_pair: TransportPair) -> None:
        pair = transport_pair
        assert pair.source.transport.add_peer(pair.target.transport.metadata()) == pair.peer
        self._check(pair, [(0, 0, 4096)])

    def test_a_removed_peer_is_unknown_until_added_again(self, transport_pair: TransportPair) -> None:
        pair = transport_pair
        self._check(pair, [(0, 0, 4096)])
        pair.source.transport.remove_peer(pair.peer)
        pair.source.transport.remove_peer(pair.peer)
        with pytest.raises(TransportError):
            self._write(pair, 1, [(0, 0, 10)])
        assert pair.source.transport.add_peer(pair.target.transport.metadata()) == pair.peer
        self._check(pair, [(0, 0, 4096)])

    def test_removal_ends_what_is_in_flight(self, transport_pair: TransportPair) -> None:
        """Each write ends once, as DONE or FAILED, after its peer was removed."""
        pair = transport_pair
        for token in range(5):
            self._write(pair, token, [(0, 0, 100_000)])
        pair.source.transport.remove_peer(pair.peer)
        done = drain(pair, 5)
        assert sorted(completion.token for completion in done) == list(range(5))
        assert all(completion.error for completion in done if completion.status is WriteStatus.FAILED)
        assert pair.source.transport.num_in_flight == 0

    def test_garbage_metadata_is_refused(self, transport_pair: TransportPair) -> None:
        pair = transport_pair
        good = pair.target.transport.metadata()
        broken = [b"", b"\0", b"garbage", bytes(range(256)), good[:-1], good[1:], good[: len(good) // 2], good + b"\0"]
        rng = np.random.default_rng(3)
        for _ in range(50):
            copy = bytearray(good)
            copy[int(rng.integers(len(copy)))] ^= int(rng.integers(1, 256))
            broken.append(bytes(copy))
        for metadata in broken:
            try:
                pair.source.transport.add_peer(metadata)
            except TransportError:
                continue
            raise AssertionError(f"broken metadata was taken: {metadata!r}")
        self._check(pair, [(0, 0, 4096)])

    def test_bad_regions_are_refused(self, transport_pair: TransportPair) -> None:
        """Address 0, and no length."""
        source = transport_pair.source
        good = source.region or Region(source.address, source.memory.size)
        for region in (replace(good, address=0), replace(good, length=0)):
            with pytest.raises(MemoryRegistrationError):
                transport_pair.source.transport.register_memory([region])

    def test_close_is_idempotent_and_final(self, transport_pair: TransportPair) -> None:
        pair = transport_pair
        metadata = pair.target.transport.metadata()
        self._write(pair, 1, [(0, 0, 1000)])
        for _ in range(2):
            pair.source.transport.close()
        assert pair.source.transport.poll() == []
        assert pair.source.transport.num_in_flight == 0
        pair.source.transport.progress()
        pair.source.transport.remove_peer(pair.peer)
        with pytest.raises(TransportError):
            self._write(pair, 2, [(0, 0, 1000)])
        with pytest.raises(TransportError):
            pair.source.transport.add_peer(metadata)


class BackendContract:
    """What a backend plugin must do. Override :meth:`plugin`; for other memory than the host's, :meth:`device` too."""

    @pytest.fixture
    def plugin(self) -> BackendPlugin:
        """The light half."""
        raise NotImplementedError("override the plugin fixture")

    @pytest.fixture
    def options(self) -> dict[str, object]:
        """``backend_options`` for :meth:`BackendPlugin.create`."""
        return {}

    @pytest.fixture
    def device(self, plugin: BackendPlugin) -> Device:
        """Where tests get memory from: what the plugin's own ``test_device()`` gives, or the host's."""
        device = device_of(plugin)
        assert device is not None, f"{plugin.info.name} serves no host memory: override the device fixture"
        return device

    @pytest.fixture
    def backend(self, plugin: BackendPlugin, options: dict[str, object]) -> Iterator[Backend]:
        """A working half, closed at the end."""
        backend = plugin.create("contract-backend", options)
        yield backend
        backend.close()

    def test_the_card_is_complete(self, plugin: BackendPlugin) -> None:
        info = plugin.info
        assert isinstance(plugin, BackendPlugin)
        assert info == plugin.info
        assert info.api_version == BACKEND_API_VERSION
        assert info.name == info.name.lower().strip() != ""
        assert info.device_types
        assert info.transports
        assert all(isinstance(flag, Capability) for flag in info.capabilities)
        assert info.summary

    def test_probing_is_honest_and_repeatable(self, plugin: BackendPlugin) -> None:
        first, second = plugin.probe(), plugin.probe()
        assert first == second
        assert first.ok == (not first.reasons)
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in first.details.items())

    def test_unknown_options_are_refused_by_name(self, plugin: BackendPlugin) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            plugin.create("contract-options", {"no_such_option": 1})

    def test_the_working_half_matches_the_card(self, plugin: BackendPlugin, backend: Backend) -> None:
        assert backend.info == plugin.info
        assert backend.transport.name in plugin.info.transports
        assert backend.transport.agent_name == "contract-backend"
        in_process = Capability.IN_PROCESS in plugin.info.capabilities
        assert backend.transport.capabilities.in_process_only == in_process

    def test_describe_gives_a_layout_that_maps_to_itself(self, backend: Backend, device: Device) -> None:
        views, keep = zip(*(device.view(f"layer.{i}") for i in range(3)), strict=True)
        layout = backend.describe(views)
        layout.check()
        assert [layer.name for layer in layout.layers] == ["layer.0", "layer.1", "layer.2"]
        for layer, view in zip(layout.layers, views, strict=True):
            assert (layer.num_blocks, layer.block_tokens, layer.num_heads) == (
                view.num_blocks,
                view.block_tokens,
                view.num_heads,
            )
            lows = [plane.base for plane in layer.planes]
            highs = [plane.base + plane.block_stride * (layer.num_blocks - 1) + plane.block_bytes for plane in layer.planes]
            assert min(lows) >= view.region.address
            assert max(highs) <= view.region.address + view.region.length
        ids = (np.arange(8, dtype=np.int32),)
        src, dst = PairPlan(layout, layout).descriptors(0, 3, ids, ids)
        np.testing.assert_array_equal(src, dst)
        del keep

    def test_foreign_memory_is_refused(self, backend: Backend, device: Device) -> None:
        view, _keep = device.view()
        with pytest.raises(LayoutError, match=r"layer\.0"):
            backend.describe([replace(view, device_type="no-such-device")])

    def test_fences_end(self, backend: Backend, device: Device) -> None:
        token = backend.device_fence()
        if token is not None:
            wait_until(lambda: backend.fence_done(token), "the device fence")
        view, _keep = device.view()
        fence = backend.start_visibility_fence([view.region])
        if fence is not None:
            assert Capability.VISIBILITY_FENCE in backend.info.capabilities
            wait_until(fence.done, "the visibility fence")

    @staticmethod
    def digest(backend: Backend, layers: Sequence[LayerLayout], ids: Sequence[int]) -> tuple[bytes, ...]:
        """A digest, waited for."""
        running = backend.start_digest(layers, (np.array(ids, np.int32),))
        found: list[tuple[bytes, ...]] = []

        def ended() -> bool:
            digests = running.poll()
            if digests is not None:
                found.append(digests)
            return digests is not None

        wait_until(ended, "the digest")
        assert len(found[0]) == len(layers)
        assert all(1 <= len(digest) <= 64 for digest in found[0])
        return found[0]

    def test_digests_follow_the_content_and_nothing_else(self, backend: Backend, device: Device) -> None:
        _promised(backend.info, Capability.DIGEST)
        assert backend.digest_scheme == backend.digest_scheme.strip() != ""
        rng = np.random.default_rng(8)
        (one, one_memory), (other, other_memory) = device.view("layer.0"), device.view("layer.1")
        layout = backend.describe([one, other])
        first, second = layout.layers
        here, there = [5, 0, 3], [2, 7, 1]
        for view, memory in ((one, one_memory), (other, other_memory)):
            _overwrite(memory, 0, rng.bytes(view.region.length))
        spans = [
            (
                a.base - one.region.address + i * a.block_stride,
                b.base - other.region.address + j * b.block_stride,
                a.block_bytes,
            )
            for a, b in zip(first.planes, second.planes, strict=True)
            for i, j in zip(here, there, strict=True)
        ]
        places: list[tuple[int, bytes]] = []
        for src, dst, length in spans:
            data = rng.bytes(length)
            _overwrite(one_memory, src, data)
            _overwrite(other_memory, dst, data)
            places.append((dst, data))
        want = self.digest(backend, [first], here)
        assert self.digest(backend, [second], there) == want
        assert self.digest(backend, [first, second, first], here)[::2] == want * 2
        assert self.digest(backend, [second], there[::-1]) != want
        assert self.digest(backend, [second], there[:2]) != want
        assert self.digest(backend, [second], []) == self.digest(backend, [first], [])
        # Every slab, and the first, the last and some byte of it.
        for dst, data in places:
            for at in (0, len(data) - 1, len(data) // 3):
                _overwrite(other_memory, dst + at, bytes([data[at] ^ 0x10]))
                assert self.digest(backend, [second], there) != want, f"byte {at} of a slab has changed unseen"
                _overwrite(other_memory, dst + at, data[at : at + 1])
        assert self.digest(backend, [second], there) == want

    def test_rows_go_into_slots_and_out_again(self, backend: Backend, device: Device) -> None:
        """Blocks in any order, into a slot and from there into other blocks; nothing else is touched."""
        _promised(backend.info, Capability.STAGING)
        assert Capability.VISIBILITY_FENCE not in backend.info.capabilities, "what lands in a slot is unpacked at once"
        (first, source), (second, target) = (device.view(f"layer.{idx}") for idx in range(2))
        rng = np.random.default_rng(5)
        for memory in (source, target):
            memory[:] = rng.integers(0, 256, memory.size, np.uint8)
        slot = backend.staging_region(1 << 16)
        assert slot.length == 1 << 16
        layouts = backend.describe([first, second]).layers
        expected = target[:].copy()
        rows: list[tuple[int, int, int]] = []
        packed: list[tuple[int, int, int]] = []
        at = slot.address
        for one, other in zip(layouts[0].planes, layouts[1].planes, strict=True):
            for block, into in ((6, 1), (0, 7), (3, 3)):
                src, dst = one.base + block * one.block_stride, other.base + into * other.block_stride
                rows.append((src, dst, one.block_bytes))
                packed.append((at, one.block_bytes, slot.device_id))
                at += one.block_bytes
                here, there = src - first.region.address, dst - second.region.address
                expected[there : there + one.block_bytes] = source[here : here + one.block_bytes]
        for sources, targets in (
            ([(src, length, first.device_id) for src, _, length in rows], packed),
            (packed, [(dst, length, second.device_id) for _, dst, length in rows]),
        ):
            copy = backend.start_copy(np.array(sources, np.uint64), np.array(targets, np.uint64))
            wait_until(copy.done, "a copy")
        assert np.array_equal(target[:], expected)
        with pytest.raises(BackendError):
            backend.start_copy(np.array(packed, np.uint64), np.array(packed[:1], np.uint64))

    def test_a_closed_backend_reads_nothing_more(self, backend: Backend, device: Device) -> None:
        _promised(backend.info, Capability.DIGEST)
        view, _keep = device.view(num_blocks=4096)
        layout = backend.describe([view])
        ids = (np.arange(4096, dtype=np.int32),)
        running = [backend.start_digest(layout.layers * 20, ids) for _ in range(5)]
        backend.close()
        for one in running:
            try:
                assert one.poll() is not None, "a digest is running after close()"
            except BackendError:
                continue
        with pytest.raises(BackendError):
            backend.start_digest(layout.layers * 20, ids)

    def test_close_is_idempotent_and_closes_the_transport(self, backend: Backend) -> None:
        backend.close()
        backend.close()
        with pytest.raises(KvPushError):
            backend.transport.add_peer(b"")


def _promised(info: BackendInfo, capability: Capability) -> None:
    """End a test of something that a backend needn't do and doesn't say it does."""
    if capability not in info.capabilities:
        pytest.skip(f"{info.name} {NOT_DECLARED} {capability}")


def _overwrite(memory: Memory, offset: int, data: bytes) -> None:
    """Change bytes, as the device would."""
    assert 0 <= offset <= memory.size - len(data)
    memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


class EndpointContract:
    """What two endpoints over a backend must do: whole requests, from announcement to report. Override :meth:`plugin`, and
    :meth:`device` as for :class:`BackendContract`."""

    plugin = BackendContract.plugin
    options = BackendContract.options
    device = BackendContract.device

    @pytest.fixture
    def endpoints(self, plugin: BackendPlugin, device: Device, options: dict[str, object]) -> Iterator[EndpointPair]:
        """A producer and a consumer with three layers of 8 blocks each, closed at the end."""
        pair = EndpointPair(plugin, device, options, wait_until=wait_until)
        yield pair
        pair.close()

    def test_a_request_that_waits_for_its_prefill_arrives_whole(self, endpoints: EndpointPair) -> None:
        """Blocks are registered first, computed in three chunks, and land in other blocks than they come from; nothing else of
        the cache is touched."""
        endpoints.register("early", [6, 1, 0, 7, 2])
        for token_hi, new_blocks in ((8, [3, 0]), (16, [4, 7]), (20, [5])):
            endpoints.compute("early", 20, token_hi, new_blocks)
        endpoints.finish("early")
        endpoints.check("early", [3, 0, 4, 7, 5], [6, 1, 0, 7, 2])

    def test_a_request_that_comes_after_its_prefill_arrives_whole(self, endpoints: EndpointPair) -> None:
        endpoints.compute("late", 16, 16, [1, 2, 3, 6])
        endpoints.finish("late")
        endpoints.register("late", [0, 1, 2, 3])
        endpoints.check("late", [1, 2, 3, 6], [0, 1, 2, 3])

    def test_one_request_after_the_other(self, endpoints: EndpointPair) -> None:
        """The same destination blocks, again and again: each request finds its own bytes."""
        for number in range(10):
            name, source = f"r{number}", [(number + k) % 8 for k in range(4)]
            endpoints.register(name, [5, 4, 3, 2])
            endpoints.compute(name, 16, 16, source)
            endpoints.finish(name)
            endpoints.check(name, source, [5, 4, 3, 2])

    def test_packed_blocks_arrive_whole(self, plugin: BackendPlugin, device: Device, options: dict[str, object]) -> None:
        """As above, with every write through the staging area."""
        _promised(plugin.info, Capability.STAGING)
        pair = EndpointPair(plugin, device, options, wait_until=wait_until, staging="on")
        try:
            for number in range(3):
                name, source = f"packed {number}", [(number + k) % 8 for k in (3, 0, 4, 7, 5)]
                pair.register(name, [6, 1, 0, 7, 2])
                pair.compute(name, 20, 8, source[:2])
                pair.compute(name, 20, 20, source[2:])
                pair.finish(name)
                pair.check(name, source, [6, 1, 0, 7, 2])
            assert pair.producer.submitter.staged is not None
            assert pair.producer.submitter.staged.num_writes >= 3
        finally:
            pair.close()

    def test_an_aborted_request_gives_its_blocks_back(self, endpoints: EndpointPair) -> None:
        endpoints.register("gone", [0, 1])
        endpoints.consumer.submit(ReceiveAborted(RequestId("gone")))
        assert endpoints.received("gone").status is not ReceiveStatus.RECEIVED
        endpoints.register("next", [0, 1])
        endpoints.compute("next", 8, 8, [4, 2])
        endpoints.finish("next")
        endpoints.check("next", [4, 2], [0, 1])


class PluginContract(BackendContract, TransportContract, EndpointContract):
    """All that a backend plugin must do, on its own transport: override :meth:`plugin`, and that is it."""

    @pytest.fixture
    def transport_pair(self, plugin: BackendPlugin, device: Device, options: dict[str, object]) -> Iterator[TransportPair]:
        """The transports of two working halves."""
        pair = backend_pair(plugin, device, options, wait_until=wait_until)
        yield pair
        pair.close()


def host_view(
    shape: tuple[int, ...],
    order: str,
    *,
    name: str = "layer.0",
    group: int = 0,
    num_blocks: int,
    block_tokens: int,
    num_heads: int,
    memory_order: str | None = None,
    padding: int = 0,
    tag: str = "",
    head_lo: int = 0,
) -> tuple[CacheView, np.ndarray[tuple[int, ...], np.dtype[np.uint16]]]:
    """A cache of two-byte elements in fresh host memory.

    Args:
        shape: Extents, in ``order``.
        order: Letters, such as ``BHNC``.
        memory_order: The same letters from the outermost in memory; ``order`` by default.
        padding: Elements left free after each step of the outermost dimension.

    Returns:
        The view, and the array it describes, with dimensions in ``order``.
    """
    memory_order = memory_order or order
    extents = [shape[order.index(dim)] for dim in memory_order]
    inner = int(np.prod(extents[1:]))
    flat = np.zeros((extents[0], inner + padding), np.uint16)
    steps = [flat.strides[0]]
    for extent in extents[1:]:
        steps.append((steps[-1] if len(steps) > 1 else inner * 2) // extent)
    strides = tuple(steps[memory_order.index(dim)] for dim in order)
    array = np.lib.stride_tricks.as_strided(flat, shape, strides)
    view = CacheView(
        name=name,
        group=group,
        address=flat.ctypes.data,
        shape=shape,
        strides=strides,
        itemsize=2,
        dtype="bfloat16",
        device_type="cpu",
        device_id=0,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        head_lo=head_lo,
        num_heads=num_heads,
        order=order,
        region=Region(flat.ctypes.data, flat.nbytes, 0, MemoryKind.HOST, flat),
        tag=tag,
    )
    return view, array
