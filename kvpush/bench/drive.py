# SPDX-License-Identifier: Apache-2.0
"""Sends the two legs of a request as `kvpush router` does, and times each.

The bench is its own router: so the end of the prefill leg and the first token are seen by the same clock, request by
request, for every connector and mode, and no router's process shares the cores.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp
import psutil  # type: ignore[import-untyped]
from multidict import CIMultiDict

from kvpush.bench.arms import Arm
from kvpush.demo.client import RequestResult, RequestSpec, request_body, send_request
from kvpush.demo.connectors import SERVED_MODEL, Connector, Deployment
from kvpush.demo.supervisor import Server, process_cpu_seconds
from kvpush.router import Mode, PrefillTarget
from kvpush.router.call import Call, decode_params, prefill_body

__all__ = ["Driver", "EngineCpu", "Measured"]

_NAN: Final = float("nan")
_PATH: Final = "/v1/completions"
#: What vLLM calls the process of its engine core.
_ENGINE_TITLE: Final = "VLLM::EngineCore"


class EngineCpu:
    """CPU time of the engine core's process of an instance. Owner: one thread.

    Args:
        server: a healthy vLLM instance.
    """

    def __init__(self, server: Server) -> None:
        self._pid: int | None = None
        for process in server.processes():
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if title.startswith(_ENGINE_TITLE):
                self._pid = process.pid

    def seconds(self) -> float:
        """All its threads' CPU time so far; NaN if the process was not found. Takes about a millisecond."""
        return _NAN if self._pid is None else process_cpu_seconds(self._pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen of one request.

    Args:
        result: times count from the sending of the first leg.
        prefill_s: from then to the end of the prefill leg's answer; NaN if there is no prefill leg.
        cpu_before_s: decode's engine's CPU time between then and the first token; NaN if not asked for.
        cpu_after_s: the same from the first token to the end.
    """

    result: RequestResult
    prefill_s: float = _NAN
    cpu_before_s: float = _NAN
    cpu_after_s: float = _NAN

    @property
    def gap_s(self) -> float:
        """From the end of the prefill leg to the first token."""
        return self.result.ttft_s - self.prefill_s

    @property
    def connector_cpu_s(self) -> float:
        """Decode's engine's CPU time before the first token that decoding itself does not explain: one step's is taken off."""
        steps = len(self.result.token_ids) - 1
        return self.cpu_before_s - self.cpu_after_s / steps if steps > 0 else _NAN


@dataclass(slots=True)
class _Prefill:
    """The end of a prefill leg."""

    params: dict[str, Any] | None = None
    error: str | None = None


class Driver:
    """Sends requests of one arm.

    Owner: the event loop's thread.

    Args:
        arm: the connector and the mode.
        deployment: its instances, up.
        session: has a timeout and no limit of connections.
    """

    def __init__(self, arm: Arm, deployment: Deployment, session: aiohttp.ClientSession) -> None:
        self.arm = arm
        self._deployment = deployment
        self._session = session
        #: Of the prefill instance, in NIXL's terms; learned from the answer of a sequential request.
        self._coordinates: dict[str, Any] | None = None

    async def send(self, request: RequestSpec, *, cpu: EngineCpu | None = None) -> Measured:
        """Send a request and read its answer to the end.

        Args:
            request: what to ask.
            cpu: counts decode's CPU time; only makes sense when nothing else is running.

        Returns:
            What was seen; failures are in it, not raised.
        """
        marks: list[float] = []

        def mark() -> None:
            if cpu is not None:
                marks.append(cpu.seconds())

        mark()
        if self.arm.connector is Connector.NONE:
            result = await send_request(
                self._session, self._deployment.urls["single"], SERVED_MODEL, request, on_first_token=mark
            )
            measured = Measured(result=result)
        elif self.arm.mode is Mode.CONCURRENT and self._knows_prefill:
            measured = await self._concurrent(request, mark)
        else:
            measured = await self._sequential(request, mark)
        mark()
        if len(marks) == 3:
            measured = replace(measured, cpu_before_s=marks[1] - marks[0], cpu_after_s=marks[2] - marks[1])
        return measured

    @property
    def _knows_prefill(self) -> bool:
        return self.arm.connector is Connector.KVPUSH or self._coordinates is not None

    async def _sequential(self, request: RequestSpec, mark: Any) -> Measured:
        transfer_id = uuid.uuid4().hex
        started = time.perf_counter()
        prefill = await self._prefill(request, transfer_id, Mode.SEQUENTIAL)
        prefill_s = time.perf_counter() - started
        if prefill.params is None:
            error = prefill.error or "prefill's answer has no kv_transfer_params"
            return Measured(result=_failed(request, error, prefill_s), prefill_s=prefill_s)
        self._learn(prefill.params)
        offset = time.perf_counter() - started
        result = await self._decode(request, transfer_id, prefill.params, mark)
        return Measured(result=replace(result, ttft_s=result.ttft_s + offset, e2e_s=result.e2e_s + offset), prefill_s=prefill_s)

    async def _concurrent(self, request: RequestSpec, mark: Any) -> Measured:
        transfer_id = uuid.uuid4().hex
        started = time.perf_counter()
        # Prefill first: nothing of decode's leg can be of use before prefill computes.
        prefilling = asyncio.ensure_future(self._prefill(request, transfer_id, Mode.CONCURRENT))
        prefill_s = _NAN

        def prefilled(_: object) -> None:
            nonlocal prefill_s
            prefill_s = time.perf_counter() - started

        prefilling.add_done_callback(prefilled)
        decoding = asyncio.ensure_future(self._decode(request, transfer_id, self._decode_params(transfer_id), mark))
        try:
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            prefill = await prefilling
            if prefill.error is not None:
                return Measured(result=_failed(request, prefill.error, time.perf_counter() - started), prefill_s=prefill_s)
            return Measured(result=await decoding, prefill_s=prefill_s)
        finally:
            for task in (prefilling, decoding):
                task.cancel()
            await asyncio.gather(prefilling, decoding, return_exceptions=True)

    def _decode_params(self, transfer_id: str) -> dict[str, Any]:
        if self.arm.connector is Connector.KVPUSH:
            host, port = self._deployment.controls["prefill"]
            return decode_params(transfer_id, PrefillTarget(self._deployment.urls["prefill"], host, port))
        # vLLM's push pairs the legs by the request id, and wants the name of prefill's request for its heartbeats.
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **(self._coordinates or {}),
            "remote_request_id": f"cmpl-{transfer_id}-0",
        }

    def _learn(self, params: Mapping[str, Any]) -> None:
        names = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
        if self.arm.connector is Connector.NIXL_PUSH and all(params.get(name) is not None for name in names):
            optional = ("pp_size", "dcp_size")
            self._coordinates = {name: params[name] for name in (*names, *optional) if name in params}

    async def _prefill(self, request: RequestSpec, transfer_id: str, mode: Mode) -> _Prefill:
        call = Call(
            endpoint="completions",
            path=_PATH,
            body=request_body(SERVED_MODEL, request),
            raw=b"",
            headers=CIMultiDict(),
            request_id=transfer_id,
            arrived_at=0.0,
            steered=False,
        )
        url = self._deployment.urls["prefill"] + _PATH
        headers = {"X-Request-Id": transfer_id, "Content-Type": "application/json"}
        try:
            async with self._session.post(url, data=prefill_body(call, transfer_id, mode), headers=headers) as response:
                if response.status != 200:
                    return _Prefill(error=f"prefill: HTTP {response.status}: {(await response.text())[:500]}")
                answer = await response.json()
        except TimeoutError:
            return _Prefill(error="prefill: timed out")
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            return _Prefill(error=f"prefill: {type(failure).__name__}: {failure}")
        return _Prefill(params=answer.get("kv_transfer_params"))

    async def _decode(self, request: RequestSpec, transfer_id: str, params: Mapping[str, Any], mark: Any) -> RequestResult:
        return await send_request(
            self._session,
            self._deployment.urls["decode"],
            SERVED_MODEL,
            request,
            more={"kv_transfer_params": dict(params)},
            headers={"X-Request-Id": transfer_id},
            on_first_token=mark,
        )


def _failed(request: RequestSpec, error: str, after_s: float) -> RequestResult:
    return RequestResult(index=request.index, token_ids=(), error=error, ttft_s=math.nan, tpot_s=math.nan, e2e_s=after_s)
