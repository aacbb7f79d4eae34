# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvpush.core import rendezvous as module
from kvpush.core.rendezvous import Rendezvous


def anything(source: str) -> bool:
    return True


def test_either_order_and_any_shared_key() -> None:
    meeting: Rendezvous[str, str] = Rendezvous()
    assert meeting.find_source(["a"], anything) == (None, None)
    meeting.add_waiter("w1", ["b", "c"])
    meeting.add_waiter("w2", ["c"])
    assert meeting.add_source("s", ["x", "c", "b"]) == ["w1", "w2"]
    assert meeting.find_source(["nothing", "x"], anything) == ("s", None)
    meeting.remove_waiter("w1", ["b", "c"])
    meeting.remove_waiter("w1", ["b", "c"])
    assert meeting.add_source("t", ["c", "b"]) == ["w2"]


def test_the_prompt_decides_among_sources_of_one_key_and_idle_ones_are_preferred() -> None:
    meeting: Rendezvous[str, str] = Rendezvous()
    meeting.add_source("one", ["k"])
    meeting.add_source("two", ["k"])
    assert meeting.find_source(["k"], lambda s: s == "two") == ("two", None)
    assert meeting.find_source(["k"], anything) == ("one", None)
    assert meeting.find_source(["k"], anything, idle=lambda s: s == "two") == ("two", None)
    source, fate = meeting.find_source(["k"], lambda s: False)
    assert source is None
    assert fate is not None
    assert "prompt differs" in fate
    assert meeting.sources(["k", "k", "unknown"]) == ["one", "two"]


def test_fates() -> None:
    meeting: Rendezvous[str, str] = Rendezvous()
    meeting.add_source("one", ["k"])
    meeting.add_source("two", ["k"])
    meeting.remove_source("one", ["k"], "first")
    assert meeting.find_source(["k"], anything) == ("two", None)
    meeting.remove_source("two", ["k"], "second")
    meeting.remove_source("two", ["k"], "again")
    assert meeting.find_source(["k"], anything) == (None, "second")
    meeting.add_source("three", ["k"])
    meeting.remove_source("three", ["k"], "third")
    assert meeting.find_source(["k"], anything) == (None, "third")


def test_memory_is_bounded_and_nothing_is_left() -> None:
    meeting: Rendezvous[int, int] = Rendezvous()
    for number in range(module.FATES + 100):
        meeting.add_source(number, [f"k{number}"])
        meeting.add_waiter(number, [f"w{number}"])
        meeting.remove_source(number, [f"k{number}"], "gone")
        meeting.remove_waiter(number, [f"w{number}"])
    assert len(meeting._fates) == module.FATES
    assert not meeting._sources
    assert not meeting._waiters
