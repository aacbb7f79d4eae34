#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What a GPU has to pass, in a few minutes: tests/cuda/run.sh [arguments for pytest]. Needs kvpush with nixl, torch's CUDA build, and pytest.
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHON="${PYTHON:-python}"
status=0
"$PYTHON" -m kvpush doctor --backend cuda || status=1
"$PYTHON" -m pytest tests/cuda -q -s -p no:cacheprovider "$@" || status=1
"$PYTHON" -m kvpush backends check cuda || status=1
exit $status
