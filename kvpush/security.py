# SPDX-License-Identifier: Apache-2.0
"""What the settings say about who may talk to this instance, decided once at start-up. The threat model: SECURITY.md."""

from __future__ import annotations

from dataclasses import dataclass

from kvpush.channels.auth import Credentials, read_secret_file
from kvpush.channels.policy import ProducerPolicy
from kvpush.errors import ConfigError
from kvpush.settings import Settings

__all__ = ["Protection"]


@dataclass(frozen=True, slots=True)
class Protection:
    """How the control channel is protected.

    Args:
        credentials: Keys made from the shared secret; None: no authentication.
        producers: Which producers may be connected to.
    """

    credentials: Credentials | None
    producers: ProducerPolicy

    @classmethod
    def load(cls, settings: Settings, *, listens: bool) -> Protection:
        """Read the secret and check that nothing is exposed without one.

        Args:
            listens: This instance serves consumers, so it binds the control endpoint.

        Raises:
            ConfigError: the secret can't be used, is missing where one is needed, or is given twice. Never holds the secret.
        """
        secret = None if settings.auth == "off" else _secret(settings)
        if secret is None and settings.auth == "on":
            raise ConfigError('auth is "on", but there is no secret: set auth_secret_file or KVPUSH_AUTH_SECRET')
        exposed = settings.exposed_hosts
        if secret is None and settings.auth != "off" and listens and exposed:
            raise ConfigError(
                f"the control endpoint on {exposed[0]} would let everybody there write into KV caches: give this instance and "
                "its peers the same secret with auth_secret_file or KVPUSH_AUTH_SECRET (make one: `openssl rand -base64 32`), "
                'bind control_host to the loopback, or set auth to "off" where the whole network is trusted'
            )
        rules = ProducerPolicy.parse(settings.allowed_producers) if settings.allowed_producers is not None else None
        return cls(
            Credentials.derive(secret) if secret is not None else None,
            ProducerPolicy(authenticated=secret is not None, switched_off=settings.auth == "off", rules=rules),
        )

    def describe(self) -> str:
        """A few words for the log."""
        if self.credentials is not None:
            return "authentication on"
        return "authentication switched off" if self.producers.switched_off else "no authentication, loopback only"


def _secret(settings: Settings) -> bytes | None:
    given = settings.auth_secret.get_secret_value() if settings.auth_secret is not None else None
    if given is not None and settings.auth_secret_file is not None:
        raise ConfigError("the secret is given twice: by auth_secret_file and by KVPUSH_AUTH_SECRET; keep one of them")
    if settings.auth_secret_file is not None:
        return read_secret_file(settings.auth_secret_file)
    return given.strip().encode() if given is not None else None
