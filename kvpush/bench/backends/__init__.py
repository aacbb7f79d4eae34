# SPDX-License-Identifier: Apache-2.0
"""`kvpush bench backends`: every backend that can run here, by one measure.

What is measured is in :mod:`kvpush.bench.backends.benches`. The command runs it in processes of its own, one pair for each way
of each backend (:mod:`kvpush.bench.backends.runner`); ``benches/bench_backends.py`` runs the same cases under pytest-benchmark.
"""
