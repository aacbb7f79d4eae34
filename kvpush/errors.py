# SPDX-License-Identifier: Apache-2.0
"""Every error that kvpush raises or hands over as a value.

Transfer errors cross threads as values inside outcomes; everything else is raised where it happens.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvPushError(Exception):
    """Base of all kvpush errors.

    Args:
        message: What happened and what to do about it, in one sentence or two.
        story: The bounded log of the transfer that failed, oldest line first; empty where there is none.
    """

    def __init__(self, message: str, *, story: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.story: tuple[str, ...] = tuple(story)


class ConfigError(KvPushError):
    """A setting is wrong; raised at start-up."""


class MeasurementFailed(KvPushError):
    """A benchmark or a storm ran and could not tell what it was to tell; says what was missing."""


class BackendError(KvPushError):
    """A backend plugin can't be used."""


class BackendNotFound(BackendError):
    """No backend of that name, or none that can run here."""


class BackendIncompatible(BackendError):
    """The plugin was written for another version of the backend API, or breaks its contract."""


class LayoutError(KvPushError):
    """The caches of two sides can't be mapped onto each other; names both layouts."""


class MemoryRegistrationError(KvPushError):
    """The device or the transport refused a memory region."""


class ProtocolError(KvPushError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """Our own engine or code sent an event that the state doesn't allow. Nothing was changed."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes or a message that can't be right."""


class TransferError(KvPushError):
    """A transfer did not succeed. Base of the ones below; a value, not raised through the engine."""


class LeaseExpired(TransferError):
    """A deadline or a lease ran out before the transfer was complete."""


class TransferCancelled(TransferError):
    """Our side gave the transfer up."""


class TransferRejected(TransferError):
    """The peer refused the transfer (unknown, another prompt, another layout) or gave it up."""


class PeerLost(TransferError):
    """The peer can't be reached, has gone, or has been restarted."""


class WriteFailed(TransferError):
    """The transport reported an error for a posted write."""


class IntegrityError(TransferError):
    """What arrived is not what was sent."""


class TransportError(KvPushError):
    """A transport call failed; ``__cause__`` is the library's or system's own error."""


class SubmitterClosed(KvPushError):
    """``submit()`` was called after ``close()``, or the submitter has stopped on an error."""


class InternalError(KvPushError):
    """An invariant broke: a bug in kvpush. Carries the story; stops the submitter."""
