# SPDX-License-Identifier: Apache-2.0
"""What a default for ``recompute_below_tokens`` has to weigh: the rest of a prompt pushed to decode, or computed there.

Decode holds a prefix of the prompt and lacks ``n`` tokens; prefill holds the prefix too. For each ``n``, in turns:

* ``ttft``: time to the first token, both legs sent at once, or the decode leg alone;
* ``stall``: while that happens another request is being decoded; its longest time between two tokens, less its median one.

A computed rest is never later (prefill computes the same tokens, and then they have to be moved); what it costs is the stall.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import random
import statistics
import time
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from kvpush.demo.connectors import SERVED_MODEL, Connector, InstanceOptions, plan
from kvpush.demo.supervisor import PortPicker, Supervisor, available_cores
from kvpush.tiny_model import write_tiny_model

PREFIX = 512
BLOCK = 32


async def stream(session: aiohttp.ClientSession, url: str, tokens: list[int], output: int, params: Any = None) -> list[float]:
    """Send a request; returns the times of its tokens."""
    body = {
        "model": SERVED_MODEL, "prompt": tokens, "max_tokens": output, "temperature": 0, "ignore_eos": True,
        "stream": True, "kv_transfer_params": params,
    }  # fmt: skip
    times = []
    data, headers = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=data, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


class Bench:
    """A pair of instances, and what is sent to it."""

    def __init__(self, session: aiohttp.ClientSession, urls: dict[str, str], control: tuple[str, int], seed: int) -> None:
        self.session, self.urls, self.control = session, urls, control
        self.rng = random.Random(seed)
        self.prefix = self.tokens(PREFIX)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randint(40, 200) for _ in range(count)]

    async def one(self, rest: int, *, push: bool) -> float:
        """Seconds to the first token of the prefix with a new rest."""
        tokens = self.prefix + self.tokens(rest)
        began = time.perf_counter()
        if not push:
            return (await stream(self.session, self.urls["decode"], tokens, 1))[0] - began
        transfer_id = uuid.uuid4().hex
        host, port = self.control
        receive = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": transfer_id}
        send = {"do_remote_decode": True, "transfer_id": transfer_id}
        _, times = await asyncio.gather(
            stream(self.session, self.urls["prefill"], tokens, 1, send),
            stream(self.session, self.urls["decode"], tokens, 1, receive),
        )
        return times[0] - began

    async def beside(self, rest: int, *, push: bool) -> float:
        """Seconds that another request's slowest token takes longer than its median one meanwhile."""
        other = asyncio.create_task(stream(self.session, self.urls["decode"], self.tokens(64), 96))
        await asyncio.sleep(0.25)
        began = time.perf_counter()
        await self.one(rest, push=push)
        ended = time.perf_counter()
        times = await other
        if times[-1] < ended:
            raise RuntimeError("the other request has ended too early: give it more tokens")
        gaps = [(late, late - early) for early, late in itertools.pairwise(times)]
        during = [gap for late, gap in gaps if late >= began and late - gap <= ended]
        return max(during) - statistics.median(gap for _, gap in gaps)


async def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Start the instances, measure, and stop them."""
    model = work / "model"
    write_tiny_model(model, layers=args.layers, hidden=args.hidden, heads=8, kv_heads=4, seed=0, dtype="float32",
                     max_position_embeddings=2048)  # fmt: skip
    options = InstanceOptions(
        model=model, dtype="float32", max_model_len=2048, kv_cache_bytes=512 << 20,
        extra_args=("--block-size", str(BLOCK), "--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
        env={"KVPUSH_RECOMPUTE_BELOW_TOKENS": "0"},
    )  # fmt: skip
    deployment = plan(Connector.KVPUSH, options, cores=available_cores(), pick_port=PortPicker())
    found: dict[str, Any] = {}
    with Supervisor(work / "logs") as supervisor:
        for spec in deployment.instances.values():
            supervisor.start(spec)
        await supervisor.wait_ready(supervisor.servers, timeout_s=300)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            bench = Bench(session, deployment.urls, deployment.controls["prefill"], seed=1)
            for _ in range(3):  # Caches the prefix on both sides, and pays for first times.
                await bench.one(64, push=True)
                await bench.one(64, push=False)
            for rest in args.rest:
                taken: dict[str, list[float]] = {"ttft_push": [], "ttft_compute": [], "stall_push": [], "stall_compute": []}
                for _ in range(args.times):
                    for push in (True, False):
                        name = "push" if push else "compute"
                        taken[f"ttft_{name}"].append(await bench.one(rest, push=push))
                        taken[f"stall_{name}"].append(await bench.beside(rest, push=push))
                found[str(rest)] = {name: round(1000 * statistics.median(values), 1) for name, values in taken.items()}
                print(rest, found[str(rest)], flush=True)
    return found


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rest", type=int, nargs="+", default=[16, 32, 64, 96, 128, 192, 256, 512], help="uncached tokens")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="kvpush-recompute-") as work:
        found = asyncio.run(measure(args, Path(work)))
    print("| uncached tokens | TTFT pushed | TTFT computed | stall pushed | stall computed |\n|---|---|---|---|---|")
    for rest, row in found.items():
        names = ("ttft_push", "ttft_compute", "stall_push", "stall_compute")
        print(f"| {rest} | " + " | ".join(f"{row[name]:.0f} ms" for name in names) + " |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
