# SPDX-License-Identifier: Apache-2.0
"""The contract suite: what every channel, transport and backend must do, as pytest classes to subclass.

A plugin author writes::

    # conftest.py
    import pytest
    pytest.register_assert_rewrite("kvpush.testing.contract")

    # test_mydevice.py
    from kvpush.testing.contract import BackendContract, TransportContract

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def transport_pair(self):
            ...
            yield TransportPair(...)

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def plugin(self):
            return MyPlugin()

Needs pytest. Nothing here measures time; every wait has a deadline (:data:`DEADLINE_S`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvpush.core.ids import PeerAddress
from kvpush.core.transport import Channel, Link, LinkClosed, Received
from kvpush.core.wire import MAX_FRAME_BYTES
from kvpush.errors import TransportError

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
