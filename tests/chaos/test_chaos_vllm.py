# SPDX-License-Identifier: Apache-2.0
"""Short storms over real vLLM instances: `make chaos` is the long form."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PLANTED = Path(__file__).with_name("planted")


def chaos(tmp_path: Path, *arguments: str, **env: str) -> tuple[int, dict[str, Any], str]:
    """Run `kvpush chaos`. Returns its status, its report and its output."""
    report = tmp_path / "report.json"
    options = ["--json", str(report), "--work-dir", str(tmp_path / "work"), "--prompts", "24", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "kvpush", "chaos", *options],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=850,
    )
    assert report.exists(), done.stdout
    content = json.loads(report.read_text())
    # All there is to find the cause with, should the test fail where nobody can look at its folder.
    output = "\n".join([done.stdout, json.dumps(content["failures"], indent=1), json.dumps(content["storms"][0]["fault_log"])])
    return done.returncode, content, output


def test_a_short_storm_loses_nothing(tmp_path: Path) -> None:
    """Two prefill instances and a decode instance; in namespaces, as far as these can be made."""
    if os.environ.get("CI") and (os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nft") is None):
        pytest.fail("CI has root, iproute2 and nftables, and must not pass without cutting a link")
    status, report, output = chaos(tmp_path, "--topology", "2p1d", "--minutes", "0.6", "--seed", "4")
    assert status == 0, output
    assert report["passed"]
    assert report["faults"]["kill-prefill"] >= 1
    assert len(report["faults"]) >= 4
    assert report["received"] > 50
    assert report["recomputed"] > 0
    assert report["tokens_judged"] > 500
    assert report["storms"][0]["kvpush"]["decode"]["kvpush_verified_receives"] > 50


@pytest.mark.parametrize("verify", ["off", "all"])
def test_wrong_bytes_are_found(tmp_path: Path, verify: str) -> None:
    """The same oracle over a backend that now and then writes another block's bytes: in the answers where nothing is verified,
    and by digests, before anybody gets an answer from it, where all is."""
    path = os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ("--topology", "1p1d", "--network", "loopback", "--minutes", "0.12", "--fault", "none", "--verify", verify)
    status, report, output = chaos(tmp_path, *arguments, PYTHONPATH=path, KVPUSH_BACKEND="planted")
    assert status == 1, output
    assert (report["hung"], report["engine_deaths"], report["leaked_blocks"], report["errors"]) == (0, 0, 0, {}), output
    assert (report["wrong"] > 0, report["integrity_errors"] > 0) == (verify == "off", verify == "all"), output
    assert all(failure["differences"] for failure in report["failures"] if failure["kind"] == "wrong")
    if verify == "all":
        assert report["recomputed"] >= report["integrity_errors"]
