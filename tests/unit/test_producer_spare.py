# SPDX-License-Identifier: Apache-2.0
"""Sources that nobody needs any more don't pin their blocks for the whole timeout."""

from __future__ import annotations

from machines import Producer, ids, posted, reports

from kvpush.core import wire
from kvpush.core.events import SourceFinished, SourceReleased
from kvpush.core.ids import RequestId


def test_the_unclaimed_samples_of_a_served_prompt_are_released_soon() -> None:
    producer = Producer(source_timeout_s=120.0, spare_timeout_s=5.0)
    producer.connect()
    for sample in ("s0", "s1"):
        producer.announce(sample)
    # Parallel samples: two registrations, both joined to the first source that has come.
    producer.register("r0")
    writes = posted(producer.progress(source="s0", blocks=ids(1, 2)))
    producer.progress(source="s1", blocks=ids(1, 3))
    assert not reports(producer.do(SourceFinished(RequestId("s1"))))
    producer.complete(writes)
    assert [o.source_id for o in reports(producer.do(SourceFinished(RequestId("s0"))))] == ["s0"]
    assert not reports(producer.wait(4.9))
    outcomes = reports(producer.wait(0.2))
    assert [(type(o), o.source_id) for o in outcomes] == [(SourceReleased, "s1")]


def test_a_source_that_was_declined_before_it_was_announced_is_released_soon() -> None:
    producer = Producer(source_timeout_s=120.0, spare_timeout_s=5.0)
    producer.connect()
    producer.say(wire.Decline(1, keys=("t",), prompt_digest=b"d"))
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    assert not reports(producer.do(SourceFinished(RequestId("s"))))
    assert len(reports(producer.wait(5.1))) == 1


def test_a_decline_without_a_digest_is_for_any_prompt() -> None:
    producer = Producer()
    producer.connect()
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    producer.do(SourceFinished(RequestId("s")))
    outcomes = reports(producer.say(wire.Decline(1, keys=("t",), prompt_digest=b"")))
    assert [o.source_id for o in outcomes] == ["s"]


def test_another_prompt_under_the_same_key_is_kept() -> None:
    producer = Producer(source_timeout_s=120.0, spare_timeout_s=5.0)
    producer.connect()
    producer.say(wire.Decline(1, keys=("t",), prompt_digest=b"other"))
    producer.announce()
    producer.progress(blocks=ids(1, 2))
    producer.do(SourceFinished(RequestId("s")))
    assert not reports(producer.wait(5.1))
