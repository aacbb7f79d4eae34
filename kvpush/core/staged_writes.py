# SPDX-License-Identifier: Apache-2.0
"""The producer's half of staging (:mod:`kvpush.core.staging`): which writes go through slots, and each one's way through them.

A write is cut into pieces that fit a slot. Each is packed, written, announced and acknowledged on its own, several at a time::

    QUEUED -> COPYING -> READY -> WRITING -> AWAITING -> free
              pack       posted   landed     unpacked there

The machine knows nothing of this: to it the write is in flight until its last piece has been unpacked, and a piece is posted
only when the machine would post a write (:meth:`~kvpush.core.producer.ProducerMachine.may_post`).
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from kvpush.core import wire
from kvpush.core.effects import PostWrite
from kvpush.core.ids import SessionId, WriteId
from kvpush.core.layout import CacheLayout
from kvpush.core.staging import Frames, Packer, StagingArea
from kvpush.core.transport import Descriptors, Transport, WriteStatus
from kvpush.errors import KvPushError

logger = logging.getLogger(__name__)

CopyDone = Callable[[], bool]
StartCopy = Callable[[Descriptors, Descriptors], CopyDone]
"""Begins a copy within this process, row by row; returns what says that it has ended. See ``Backend.start_copy``."""
Mode = Literal["auto", "on", "off"]

MIN_ROWS = 16
MAX_ROW_BYTES = 32 << 10
"""Fewer or longer rows cost next to nothing beside their bytes, whatever the transport."""
RETRY_S = 1.0
"""A message that is not answered for so long may have got lost: it is said again."""
_FIRST_TOKEN = 1 << 62
"""Numbers of pieces at the transport: beyond those of the machine's writes."""


class EndedWrite(NamedTuple):
    """A staged write has ended; ``error`` is None where all of it is in the consumer's blocks."""

    write_id: WriteId
    error: str | None
    may_land: bool


class WayEstimate:
    """Which way is faster to one peer, by what was measured: seconds per byte of scattered writes, direct and staged.

    Samples are taken over windows in which all writes went one way. Direct is measured first. Staging is tried when the two
    copies that it takes could pay at all, and the way that is slower is tried again now and then, as links change.
    """

    WINDOW_S = 0.1
    SMALLEST_SAMPLE = 64 << 10
    COPY_S_PER_BYTE = 1 / 8e9
    """Of memory that is copied slab by slab: what staging costs at least, twice."""
    MARGIN = 0.9
    """The other way has to be faster by so much to be taken."""
    AGAIN_AFTER = 64
    """Windows after which the way that is not taken is tried again."""
    LONGEST_TRIAL = 4
    """Windows: others may be in the way of a sample."""

    def __init__(self) -> None:
        self.cost: dict[bool, float] = {}
        """Seconds per byte, by ``staged``."""
        self._staged = False
        self._windows = 0
        self._inflight = 0
        self._since = 0.0
        self._bytes = 0
        self._trial = False
        self._trial_left = 0
        self._void = False
        self._mixed = 0
        """Bytes that were in flight when the way was changed: until they have landed nothing is measured."""
        self._due = True
        """A window has ended since the last choice: on a busy link there is no other time to choose anew."""

    def choose(self, now: float) -> bool:
        """Whether the next scattered write is to be staged."""
        before = self._staged ^ self._trial
        if self._inflight and not self._due:
            return before
        self._due = False
        self._decide()
        chosen = self._staged ^ self._trial
        if chosen != before:
            self._mixed = self._inflight
        return chosen

    def _decide(self) -> None:
        if self._trial_left:
            self._trial_left -= not self._mixed
            return
        direct, staged = self.cost.get(False), self.cost.get(True)
        self._trial = False
        if direct is None:
            self._staged = False
        elif staged is None:
            self._staged, self._trial = False, direct > 2 * self.COPY_S_PER_BYTE
        else:
            other = staged if not self._staged else direct
            taken = direct if not self._staged else staged
            if other < self.MARGIN * taken:
                self._staged = not self._staged
                self._windows = 0
            elif self._windows >= self.AGAIN_AFTER:
                self._windows = 0
                self._trial = True
                self._trial_left = self.LONGEST_TRIAL - 1

    def started(self, num_bytes: int, now: float, *, staged: bool | None) -> None:
        """A write begins.

        Args:
            staged: None: it is not scattered, and says nothing of either way.
        """
        if not self._inflight:
            self._open(now)
        if staged is None or staged != self._staged ^ self._trial:
            self._void = True
        self._inflight += num_bytes

    def ended(self, num_bytes: int, now: float, *, ok: bool) -> None:
        """A write has ended."""
        self._inflight -= num_bytes
        self._bytes += num_bytes
        self._void |= not ok or self._mixed > 0
        self._mixed = max(0, min(self._mixed - num_bytes, self._inflight))
        took_s = now - self._since
        if self._inflight and took_s < self.WINDOW_S:
            return
        if not self._void and self._bytes >= self.SMALLEST_SAMPLE and took_s > 0:
            way, sample = self._staged ^ self._trial, took_s / self._bytes
            known = self.cost.get(way)
            self.cost[way] = sample if known is None or self._trial else 0.7 * known + 0.3 * sample
            self._windows += 1
            self._trial_left = 0
        self._open(now)
        self._due = True

    def _open(self, now: float) -> None:
        self._since, self._bytes, self._void = now, 0, False


class _State(enum.Enum):
    COPYING = enum.auto()
    READY = enum.auto()
    WRITING = enum.auto()
    AWAITING = enum.auto()


class _Write:
    """A write that goes through slots."""

    __slots__ = ("effect", "error", "frame_bytes", "into", "may_land", "next_block", "num_blocks", "peer", "running", "step")

    def __init__(self, effect: PostWrite, peer: _Peer, into: tuple[int, int]) -> None:
        self.effect = effect
        self.peer = peer
        self.into = into
        """The layers, by the consumer's indices."""
        self.frame_bytes = peer.frames.frame_bytes(*into)
        self.step = peer.slot_bytes // self.frame_bytes
        """Blocks that fit a slot."""
        self.num_blocks = max(len(ids) for ids in effect.src_blocks)
        self.next_block = 0
        self.running = 0
        self.error: str | None = None
        self.may_land = False

    @property
    def pieces_to_pack(self) -> int:
        """Pieces that no slot has been taken for yet."""
        return -(-(self.num_blocks - self.next_block) // self.step)


class _Piece:
    """Some blocks of a write in one slot."""

    __slots__ = ("copied", "local", "message", "num_bytes", "sent_at", "slot", "state", "tag", "write")

    def __init__(self, write: _Write, tag: int, slot: int, local: int, num_bytes: int, message: wire.Staged) -> None:
        self.write = write
        self.tag = tag
        self.slot = slot
        self.local = local
        self.num_bytes = num_bytes
        self.message = message
        self.state = _State.COPYING
        self.copied: CopyDone = lambda: True
        self.sent_at = 0.0


class _Peer:
    """A session whose consumer has offered slots."""

    __slots__ = ("area", "awaiting", "broken", "frames", "free", "packer", "queue", "session", "slot_bytes", "ways")

    def __init__(
        self, session: SessionId, offer: wire.StagingOffer, our_slot_bytes: int, src: CacheLayout, dst: CacheLayout
    ) -> None:
        self.session = session
        self.area = StagingArea(offer.address, offer.device_id, offer.slot_bytes, offer.num_slots)
        self.slot_bytes = min(offer.slot_bytes, our_slot_bytes)
        """What a piece may have: it lies in a slot of either side."""
        self.frames = Frames(dst)
        self.packer = Packer(src, self.frames)
        self.free = list(range(offer.num_slots))
        self.queue: deque[_Write] = deque()
        self.awaiting: dict[int, _Piece] = {}
        self.ways = WayEstimate()
        self.broken = False
        """Packing or unpacking has failed: where there is a choice, it is not tried again."""


class StagedWrites:
    """Writes on their way through slots. **Owner** the submitter thread.

    Args:
        layout: Our cache.
        area: Our own slots.
        transport: With the area registered.
        start_copy: The backend's.
        send: Queues a message to a consumer; it may get lost.
        may_post: The machine's: whether a write may be posted now (None: not now).
        mode: ``on``: whatever can be staged is; ``auto``: what is faster so.
    """

    def __init__(
        self,
        layout: CacheLayout,
        area: StagingArea,
        transport: Transport,
        start_copy: StartCopy,
        send: Callable[[wire.Message], None],
        may_post: Callable[[WriteId, float], bool | None],
        mode: Mode = "auto",
    ) -> None:
        self.num_writes = 0
        self.num_bytes = 0
        self._layout = layout
        self._area = area
        self._transport = transport
        self._start_copy = start_copy
        self._send = send
        self._may_post = may_post
        self._mode = mode
        self._peers: dict[SessionId, _Peer] = {}
        self._local = list(range(area.num_slots))
        self._copying: list[_Piece] = []
        self._writing: dict[int, _Piece] = {}
        self._tags = itertools.count(1)
        self._direct: dict[WriteId, tuple[_Peer, int]] = {}
        self._ended: list[EndedWrite] = []
        self._more = False
        """There is something to pack, and a slot to pack it into."""

    # --- the submitter's questions -------------------------------------------------------------------------------------

    @property
    def awaits_copy(self) -> bool:
        """A copy runs whose end has to be asked for."""
        return bool(self._copying)

    def next_deadline(self) -> float | None:
        """When :meth:`advance` wants to be called again, or there is something for :meth:`take_ended`."""
        if self._ended or self._more:
            return float("-inf")
        due = [piece.sent_at + RETRY_S for peer in self._peers.values() for piece in peer.awaiting.values()]
        return min(due, default=None)

    def take_ended(self) -> list[EndedWrite]:
        """Writes that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- events --------------------------------------------------------------------------------------------------------

    def take(self, effect: PostWrite, num_rows: int, now: float) -> bool:
        """Whether a write goes through slots. If not, the caller posts it, and says when it has ended (:meth:`direct_ended`).

        Args:
            num_rows: Descriptors that it would take without.
        """
        offer = effect.staging
        if offer is None or self._mode == "off":
            return False
        peer = self._peers.get(effect.session)
        if peer is None:
            peer = self._peers[effect.session] = _Peer(
                effect.session, offer, self._area.slot_bytes, self._layout, effect.plan.dst
            )
        into = self._into(peer, effect, num_rows)
        staged = into is not None and (self._mode == "on" or peer.ways.choose(now))
        peer.ways.started(effect.num_bytes, now, staged=None if into is None or self._mode == "on" else staged)
        if into is None or not staged:
            self._direct[effect.write_id] = peer, effect.num_bytes
            return False
        self.num_writes += 1
        self.num_bytes += effect.num_bytes
        peer.queue.append(_Write(effect, peer, into))
        self._more = True
        if self._mode == "auto" and True not in peer.ways.cost and len(peer.queue) == 1:
            # Whether it works at all isn't known: if it doesn't, what is posted behind this must not go the same way.
            self._pack_next(peer, now)
        return True

    def _into(self, peer: _Peer, effect: PostWrite, num_rows: int) -> tuple[int, int] | None:
        """The consumer's layers, where a write can be staged and, unless it has to, is scattered enough to gain by it."""
        few = num_rows < MIN_ROWS or effect.num_bytes > num_rows * MAX_ROW_BYTES
        # Without a slot to pack into, it would wait for peers that may be stalled.
        if self._mode == "auto" and (few or peer.broken or self._slots_spoken_for() >= self._area.num_slots):
            return None
        into = effect.plan.whole_layers(effect.layer_lo, effect.layer_hi)
        if into is None or peer.frames.frame_bytes(*into) > peer.slot_bytes:
            return None
        return into

    def _slots_spoken_for(self) -> int:
        """Our own slots that are in use, or will be as soon as all is packed that the peers have slots for."""
        count = self._area.num_slots - len(self._local)
        for peer in self._peers.values():
            count += min(sum(write.pieces_to_pack for write in peer.queue), len(peer.free))
        return count

    def direct_ended(self, write_id: WriteId, now: float, *, ok: bool) -> None:
        """A write that was not taken has ended."""
        entry = self._direct.pop(write_id, None)
        if entry is not None:
            entry[0].ways.ended(entry[1], now, ok=ok)

    def completed(self, token: int, status: WriteStatus, error: str, *, may_land: bool, now: float) -> bool:
        """The transport says that a write has ended. False: it is none of ours."""
        piece = self._writing.pop(token - _FIRST_TOKEN, None)
        if piece is None:
            return False
        self._local.append(piece.local)
        peer = piece.write.peer
        if status is not WriteStatus.DONE:
            if not may_land:
                peer.free.append(piece.slot)
            piece.write.may_land |= may_land
            self._piece_ended(piece, error or "the write failed", now)
        elif self._peers.get(peer.session) is not peer:
            self._piece_ended(piece, "its consumer has gone", now)
        else:
            piece.state, piece.sent_at = _State.AWAITING, now
            peer.awaiting[piece.tag] = piece
            self._send(piece.message)
        return True

    def unpacked(self, message: wire.Unpacked, now: float) -> None:
        """The consumer has unpacked a piece, or can't."""
        peer = self._peers.get(SessionId(message.session))
        piece = peer.awaiting.pop(message.tag, None) if peer is not None else None
        if peer is None or piece is None:
            return
        peer.free.append(piece.slot)
        peer.broken |= bool(message.error)
        self._piece_ended(piece, f"the consumer can't unpack it: {message.error}" if message.error else None, now)

    def close_session(self, session: SessionId, now: float) -> None:
        """A consumer is gone: nothing of it will be acknowledged. What the transport has stays its until it ends."""
        peer = self._peers.pop(session, None)
        if peer is None:
            return
        for write in peer.queue:
            self._fail(write, "its consumer has gone", now)
        peer.queue.clear()
        pieces, peer.awaiting = list(peer.awaiting.values()), {}
        for piece in pieces:
            self._piece_ended(piece, "its consumer has gone", now)
        for write_id in [write_id for write_id, (of, _) in self._direct.items() if of is peer]:
            del self._direct[write_id]

    def advance(self, now: float) -> int:
        """Do what can be done: pack, post, say again. One piece of each peer is packed at most: the pieces before it have
        moved on meanwhile, and whoever waits for them waits for the caller to look. Peers take turns.

        Returns:
            How many pieces have been packed, or are being.
        """
        for piece in list(self._copying):
            self._push(piece, now)
        self._more = False
        count = 0
        for session, peer in list(self._peers.items()):
            if self._pack_next(peer, now):
                count += 1
                self._peers[session] = self._peers.pop(session)
                self._more |= bool(peer.queue and peer.free and self._local)
            for piece in peer.awaiting.values():
                if now - piece.sent_at >= RETRY_S:
                    piece.sent_at = now
                    self._send(piece.message)
        return count

    # --- pieces --------------------------------------------------------------------------------------------------------

    def _pack_next(self, peer: _Peer, now: float) -> bool:
        """Begin with the next piece of a peer. False: there is none, no slot for it, or it may not be posted now."""
        while peer.queue and peer.free and self._local:
            write = peer.queue[0]
            allowed = write.error is None and self._may_post(write.effect.write_id, now)
            if allowed is None:
                return False
            if not allowed:
                peer.queue.popleft()
                self._fail(write, "not posted: its transfer has been given up", now)
                continue
            self._start(peer, write, now)
            if write.next_block >= write.num_blocks and peer.queue and peer.queue[0] is write:
                peer.queue.popleft()
            return True
        return False

    def _start(self, peer: _Peer, write: _Write, now: float) -> None:
        """Pack the next piece."""
        effect = write.effect
        lo = write.next_block
        hi = min(write.num_blocks, lo + write.step)
        write.next_block = hi
        tag, slot, local = next(self._tags), peer.free.pop(), self._local.pop()
        message = wire.Staged(
            peer.session,
            request_id=effect.request_id,
            epoch=effect.epoch,
            tag=tag,
            slot=slot,
            layer_lo=write.into[0],
            layer_hi=write.into[1],
            block_lo=effect.block_lo + lo,
            block_hi=effect.block_lo + hi,
        )
        piece = _Piece(write, tag, slot, local, (hi - lo) * write.frame_bytes, message)
        write.running += 1
        try:
            blocks = tuple(ids[lo:hi] for ids in effect.src_blocks)
            rows = peer.packer.rows((effect.layer_lo, effect.layer_hi), write.into, blocks, self._area, local)
            piece.copied = self._start_copy(*rows)
        except Exception as error:  # noqa: BLE001 - the backend's or the transport's: it ends this write only
            peer.broken = True
            self._give_back(piece, f"packing it failed: {_text(error)}", now)
            return
        self._copying.append(piece)
        self._push(piece, now)

    def _push(self, piece: _Piece, now: float) -> None:
        """Post what has been packed, once it may be."""
        write = piece.write
        peer = write.peer
        if piece.state is _State.COPYING:
            try:
                if not piece.copied():
                    return
            except Exception as error:  # noqa: BLE001 - likewise
                self._copying.remove(piece)
                peer.broken = True
                self._give_back(piece, f"packing it failed: {_text(error)}", now)
                return
            piece.state = _State.READY
        gone = self._peers.get(peer.session) is not peer
        allowed = write.error is None and not gone and self._may_post(write.effect.write_id, now)
        if allowed is None:
            return
        self._copying.remove(piece)
        if not allowed:
            self._give_back(piece, "not posted: its transfer has been given up", now)
            return
        src = _row(self._area.slot(piece.local), piece.num_bytes, self._area.device_id)
        dst = _row(peer.area.slot(piece.slot), piece.num_bytes, peer.area.device_id)
        try:
            self._transport.post_write(_FIRST_TOKEN + piece.tag, write.effect.agent_name, src, dst)
        except Exception as error:  # noqa: BLE001 - likewise
            self._give_back(piece, _text(error), now)
            return
        piece.state = _State.WRITING
        self._writing[piece.tag] = piece

    def _give_back(self, piece: _Piece, error: str, now: float) -> None:
        """A piece ends before anything of it was posted."""
        self._local.append(piece.local)
        piece.write.peer.free.append(piece.slot)
        self._piece_ended(piece, error, now)

    def _piece_ended(self, piece: _Piece, error: str | None, now: float) -> None:
        write = piece.write
        write.running -= 1
        if error is not None:
            write.error = write.error or error
            if write in write.peer.queue:
                write.peer.queue.remove(write)
            write.next_block = write.num_blocks
        if not write.running and write.next_block >= write.num_blocks:
            self._over(write, now)

    def _fail(self, write: _Write, error: str, now: float) -> None:
        """A write that is queued is given up; what of it runs goes on."""
        write.error = write.error or error
        write.next_block = write.num_blocks
        if not write.running:
            self._over(write, now)

    def _over(self, write: _Write, now: float) -> None:
        write.peer.ways.ended(write.effect.num_bytes, now, ok=write.error is None)
        self._ended.append(EndedWrite(write.effect.write_id, write.error, write.may_land))


def _row(address: int, num_bytes: int, device_id: int) -> Descriptors:
    return np.array([(address, num_bytes, device_id)], np.uint64)


def _text(error: Exception) -> str:
    if isinstance(error, KvPushError):
        return error.message
    logger.error("kvpush: staging failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
