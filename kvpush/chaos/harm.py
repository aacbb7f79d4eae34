# SPDX-License-Identifier: Apache-2.0
"""Does faults to a cluster, and heals them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from kvpush.chaos.cluster import Cluster, Condition, Instance
from kvpush.chaos.faults import Card, Kind
from kvpush.chaos.record import Record
from kvpush.demo.supervisor import ServerFailed

__all__ = ["Harm"]

_ENGINE_GONE_S: Final = 30.0
#: How often an instance is started again when the link was down while it started.
_STARTS: Final = 4
#: After an instance is up again: the router's longest pause between two looks at it, and a moment.
_ROUTER_NOTICES_S: Final = 3.0


class Harm:
    """Does faults to a cluster, and heals them. Owner: the event loop.

    Args:
        cluster: whom.
        record: is told of each.
        start_timeout_s: for an instance that is started again.
    """

    def __init__(self, cluster: Cluster, record: Record, *, start_timeout_s: float) -> None:
        self._cluster = cluster
        self._record = record
        self._start_timeout_s = start_timeout_s
        self._busy_routes: set[str] = set()

    def possible(self, kinds: Sequence[Kind]) -> list[Kind]:
        """Which kinds can be done here; the result says why the others can't.

        Args:
            kinds: those that are asked for.

        Returns:
            Some of them.
        """
        possible = []
        for kind in kinds:
            if kind.needs_link and self._cluster.link is None:
                self._record.result.not_possible.append(f"{kind}: prefill and decode share the loopback, there is no link")
            elif kind in (Kind.LINK_LOSS, Kind.LINK_HOLE) and self._cluster.dropper is None:
                self._record.result.not_possible.append(f"{kind}: neither tc's netem nor nft nor iptables works here")
            else:
                possible.append(kind)
        return possible

    def work_of(self, card: Card) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """What a card asks for, as far as that can be done now.

        Args:
            card: a kind that is possible here.

        Returns:
            Does it and heals it; None if it can't be done now.
        """
        kind = card.kind
        if kind in (Kind.KILL_PREFILL, Kind.KILL_DECODE, Kind.FREEZE_PREFILL, Kind.FREEZE_DECODE):
            of = self._cluster.decodes if kind in (Kind.KILL_DECODE, Kind.FREEZE_DECODE) else self._cluster.prefills
            up = [one for one in of if one.condition is Condition.UP]
            if not up:
                return None
            target: Instance = card.choose(up)
            if kind in (Kind.KILL_PREFILL, Kind.KILL_DECODE):
                return lambda: self._kill(target, kind, engine_only=card.choose([False, False, True], 1))
            return lambda: self._freeze(target, kind, card.lasts_s)
        if kind is Kind.ROLLING_RESTART:
            if any(one.condition is not Condition.UP for one in self._cluster.instances.values()):
                return None
            return self._rolling_restart
        name = "link" if kind.needs_link else f"control of {self._cluster.prefills[self._route(card)].role}"
        if name in self._busy_routes:
            return None
        if kind.needs_link:
            return lambda: self._disturb_link(card, name)
        return lambda: self._disturb_control(card, name)

    def _route(self, card: Card) -> int:
        return int(card.choose(range(len(self._cluster.prefills)), 2))

    async def _kill(self, instance: Instance, kind: str, *, engine_only: bool = False) -> None:
        instance.condition = Condition.DOWN
        detail = {"part": "engine core" if engine_only else "all", "pinned_engine_id": instance.pinned}
        self._record.totals[instance.role].seen(await self._record.metrics(instance.url))
        fault = self._record.log.add(kind, instance.role, **detail)
        instance.outages.append((self._record.now(), None))
        self._cluster.kill(instance, engine_only=engine_only)
        if engine_only and not await self._cluster.bury(instance, timeout_s=_ENGINE_GONE_S):
            # vLLM's own affair, and noted as such.
            fault.detail["http_server_outlived_engine"] = True
        await self.revive(instance)
        self._record.log.heal(fault)

    async def revive(self, instance: Instance) -> None:
        """Start an instance again on its address, and wait until it is up.

        Args:
            instance: one that is down. If it does not come up again, that is a failure.
        """
        self._record.totals[instance.role].died()
        for _ in range(_STARTS):
            self._record.result.restarts += 1
            began = self._record.now()
            server = self._cluster.start(instance)
            try:
                await self._cluster.wait_up(instance, timeout_s=self._start_timeout_s)
            except ServerFailed as error:
                await asyncio.to_thread(self._cluster.supervisor.stop, [server])
                if self._record.log.any_since(began, Kind.LINK_DOWN):
                    # No network device, no transport: it says so and ends, and whoever runs it starts it again.
                    self._record.log.add("start-without-link", instance.role)
                    continue
                self._record.result.engine_deaths += 1
                what = f"{instance.role} did not start again"
                self._record.fail("engine death", what, logs=[instance.role], detail={"log": str(error)})
                return
            begin, _ = instance.outages[-1]
            instance.outages[-1] = (begin, self._record.now() + _ROUTER_NOTICES_S)
            return
        self._record.result.engine_deaths += 1
        self._record.fail("engine death", f"{instance.role} did not start again in {_STARTS} tries", logs=[instance.role])

    async def _rolling_restart(self) -> None:
        """Every instance in turn: each is up again before the next one goes."""
        fault = self._record.log.add(Kind.ROLLING_RESTART, "all")
        for instance in self._cluster.instances.values():
            while instance.condition is Condition.FROZEN:  # noqa: ASYNC110 - seconds, and nobody is kept waiting
                await asyncio.sleep(0.1)
            if instance.condition is Condition.UP:
                await self._kill(instance, "rolling-kill")
        self._record.log.heal(fault)

    async def _freeze(self, instance: Instance, kind: Kind, lasts_s: float) -> None:
        fault = self._record.log.add(kind, instance.role, lasts_s=round(lasts_s, 2))
        self._cluster.freeze(instance)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._cluster.thaw(instance)
        self._record.log.heal(fault)

    async def _disturb_link(self, card: Card, name: str) -> None:
        link, dropper = self._cluster.link, self._cluster.dropper
        assert link is not None
        detail: dict[str, Any] = {"lasts_s": round(card.lasts_s, 2)}
        heal: Callable[[], None]
        if card.kind is Kind.LINK_DOWN:
            link.cut()
            heal = link.join
        elif card.kind is Kind.LINK_SQUEEZE:
            rate = card.choose([500_000, 2_000_000, 8_000_000], 3)
            detail["rate_bits"] = rate
            link.squeeze(rate)
            heal = link.relax
        else:
            assert dropper is not None
            percent = 100 if card.kind is Kind.LINK_HOLE else card.choose([2, 10, 30], 3)
            detail |= {"percent": percent, "by": str(dropper)}
            link.lose(percent, dropper)

            def heal() -> None:
                link.lose_no_more(dropper, percent)

        fault = self._record.log.add(card.kind, name, **detail)
        self._busy_routes.add(name)
        try:
            await asyncio.sleep(card.lasts_s)
        finally:
            heal()
            self._busy_routes.discard(name)
        self._record.log.heal(fault)

    async def _disturb_control(self, card: Card, name: str) -> None:
        relays, route = self._cluster.relays, self._route(card)
        assert relays is not None
        how: dict[str, Any] = {}
        mode = "pass"
        if card.kind is Kind.CONTROL_HOLD:
            mode, how = "hold", {"way": card.choose(["both", "to", "from"], 3)}
        elif card.kind is Kind.CONTROL_CUT:
            mode = "cut"
        else:
            how = {"delay_s": card.choose([0.02, 0.2, 1.0], 3)}
        fault = self._record.log.add(card.kind, name, lasts_s=round(card.lasts_s, 2), **how)
        self._busy_routes.add(name)
        relays.command(route, mode, **how)
        try:
            await asyncio.sleep(card.lasts_s)
        finally:
            relays.command(route, "pass")
            self._busy_routes.discard(name)
        self._record.log.heal(fault)
