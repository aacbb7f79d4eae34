# SPDX-License-Identifier: Apache-2.0
"""Who gets in, who doesn't, and that the secret stays one."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path
from typing import Any

import pytest
from hostile_rig import SECRET, Party, Transfer, parties
from typer.testing import CliRunner

from kvpush import cli, doctor
from kvpush.channels.auth import Credentials
from kvpush.core.events import ReceiveEnded, ReceiveStatus
from kvpush.core.ids import PeerAddress
from kvpush.errors import ConfigError, KvPushError, PeerLost
from kvpush.security import Protection
from kvpush.settings import Settings
from kvpush.testing.contract import wait_until

EVERYWHERE = {"control_host": "0.0.0.0", "advertise_host": "127.0.0.1"}
PATIENT = {"handshake_timeout_s": 120.0, "announce_timeout_s": 600.0}
"""What fails with these, fails because it was noticed, not because time was up."""


def refused(consumer: Party, address: PeerAddress) -> KvPushError:
    """A request that must end at once, its blocks safe, so that the engine can recompute it in them."""
    transfer = Transfer()
    transfer.register(consumer, address)
    wait_until(lambda: transfer.name in consumer.ended(ReceiveEnded), "the request ends")
    ended = consumer.ended(ReceiveEnded)[transfer.name]
    assert (ended.status, ended.blocks_safe) == (ReceiveStatus.FAILED, True)
    assert isinstance(ended.error, PeerLost)
    return ended.error


class TestStartUp:
    @pytest.mark.parametrize(
        "where", [EVERYWHERE, {"control_host": "10.0.0.1"}, {"advertise_host": "10.0.0.1"}, {"control_host": "prefill-0"}]
    )
    def test_a_producer_off_the_loopback_needs_a_secret(self, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError) as caught:
            Party(produce=True, consume=False, **where)
        for name in ("auth_secret_file", "KVPUSH_AUTH_SECRET", "openssl rand", 'auth to "off"'):
            assert name in caught.value.message
        # Without anything to listen on there is nothing to protect.
        Protection.load(Settings(**where), listens=False)
        Protection.load(Settings(**where, auth="off"), listens=True)
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        assert Protection.load(Settings(**where), listens=True).credentials is not None

    def test_everywhere_with_a_secret_or_with_open_eyes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with parties(**EVERYWHERE, auth="off") as (producer, consumer):
            Transfer().run(producer, consumer)
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        with parties(**EVERYWHERE) as (producer, consumer):
            Transfer().run(producer, consumer)
            assert "authentication on" in producer.endpoint.describe()

    def test_secrets_that_can_not_be_used(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match='auth is "on", but there is no secret'):
            Protection.load(Settings(auth="on"), listens=False)
        file = tmp_path / "secret"
        file.write_text(SECRET)
        with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
            Protection.load(Settings(auth_secret_file=str(file)), listens=False)
        file.chmod(0o600)
        read = Protection.load(Settings(auth_secret_file=str(file)), listens=False).credentials
        assert read == Credentials.derive(SECRET.encode())
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        with pytest.raises(ConfigError, match="given twice"):
            Protection.load(Settings(auth_secret_file=str(file)), listens=False)
        assert Protection.load(Settings(), listens=False).credentials == read
        assert Protection.load(Settings(auth="off"), listens=False).credentials is None


class TestRequests:
    def test_different_secrets(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        producer = Party(produce=True, consume=False)
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET + "!")
        consumer = Party(produce=False, consume=True, **PATIENT)
        try:
            error = refused(consumer, producer.address)
            assert "most likely the two sides have different secrets" in error.message
            wait_until(lambda: producer.channel.counters.failed_handshakes >= 1, "the producer has counted it")
            wait_until(lambda: "the two sides have different secrets" in caplog.text, "the producer says so")
            assert consumer.channel.counters.handshakes_refused_by_peer == 1
            assert producer.endpoint.submitter.counters.messages_in == 0
        finally:
            assert consumer.endpoint.close(30)
            assert producer.endpoint.close(30)

    def test_a_secret_on_one_side_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        producer = Party(produce=True, consume=False)
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        consumer = Party(produce=False, consume=True, **PATIENT)
        try:
            assert "authentication is" in refused(consumer, producer.address).message
        finally:
            assert consumer.endpoint.close(30)
            assert producer.endpoint.close(30)

    def test_off_the_loopback_without_a_secret(self) -> None:
        with parties(**PATIENT) as (producer, consumer):
            # Nothing is sent there: to an address of the network for documentation it would take until a timeout.
            assert "no secret is set here" in refused(consumer, PeerAddress("203.0.113.1", 14579)).message
            assert consumer.channel.counters.refused_producers == 1
            Transfer().run(producer, consumer)

    def test_producers_that_are_not_on_the_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        with parties(**PATIENT, allowed_producers=["127.0.0.0/8", "prefill-0:14579"]) as (producer, consumer):
            assert "not in allowed_producers" in refused(consumer, PeerAddress("203.0.113.1", 14579)).message
            assert "not in allowed_producers" in refused(consumer, PeerAddress("prefill-0", 22)).message
            assert "not in allowed_producers" in refused(consumer, PeerAddress("2130706433", producer.address.port)).message
            Transfer().run(producer, consumer)


class TestSecrecy:
    def test_nothing_shows_it(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        caplog.set_level(logging.DEBUG)
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET)
        shown: list[str] = []
        with parties() as (producer, consumer):
            Transfer().run(producer, consumer)
            protection = Protection.load(Settings.load(), listens=True)
            shown += [
                repr(protection),
                str(protection),
                producer.endpoint.describe(),
                repr(Settings.load()),
                str(Settings.load()),
            ]
            shown.append(Settings.load().model_dump_json())
        runner = CliRunner()
        for command in (["config"], ["config", "--json"], ["doctor", "--backend", "loopback", "--json"]):
            shown.append(runner.invoke(cli.app, command).output)
        auth = json.loads(shown[-2])["auth_secret"]
        assert (auth["value"], auth["source"]) == ("(set, not shown)", "environment")
        assert "authentication" in shown[-1]

        monkeypatch.setenv("KVPUSH_LEASE_S", "-1")
        shown.append(explained(lambda: Settings.load()))
        shown += [str(doctor.examine("loopback"))]
        monkeypatch.delenv("KVPUSH_LEASE_S")
        monkeypatch.setenv("KVPUSH_HEARTBEAT_S", "9")
        shown.append(explained(lambda: Settings.load()))
        monkeypatch.delenv("KVPUSH_HEARTBEAT_S")
        shown.append(explained(lambda: Settings.load({"auth_secret": SECRET})))
        assert "must not hold auth_secret" in shown[-1]
        file = tmp_path / "kvpush.toml"
        file.write_text(f'auth_secret = "{SECRET}"')
        monkeypatch.setenv("KVPUSH_CONFIG", str(file))
        shown.append(explained(lambda: Settings.load()))
        assert "must not hold auth_secret" in shown[-1]
        monkeypatch.delenv("KVPUSH_CONFIG")
        monkeypatch.setenv("KVPUSH_AUTH_SECRT", SECRET)
        shown.append(explained(lambda: Settings.load()))
        assert "did you mean KVPUSH_AUTH_SECRET" in shown[-1]
        monkeypatch.delenv("KVPUSH_AUTH_SECRT")
        monkeypatch.setenv("KVPUSH_AUTH_SECRET", SECRET[:10])
        shown.append(explained(lambda: Protection.load(Settings.load(), listens=False)))

        keys = Credentials.derive(SECRET.encode())
        private = [SECRET, SECRET[:10], keys.server_secret.decode(), keys.client_secret.decode(), keys.server_public.decode()]
        everything = "\n".join([*shown, caplog.text, *(str(record.__dict__) for record in caplog.records)])
        assert [text for text in private if text in everything] == []
        assert "authentication on" in everything


def explained(action: Any) -> str:
    """A failure with everything that a traceback prints."""
    with pytest.raises(ConfigError) as caught:
        action()
    return "".join(traceback.format_exception(caught.value))
