# SPDX-License-Identifier: Apache-2.0
"""The connector against the base class and the factory of the vLLM that is installed. No server is started.

A new vLLM that changes a hook, or adds one, fails here by the hook's name.
"""

from __future__ import annotations

import functools
import inspect
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    # torch and vLLM warn of themselves when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1 import kv_cache_interface as kv

    from kvpush.backends._host_layout import host_layout
    from kvpush.backends.manager import BackendManager
    from kvpush.backends.neuron import NeuronPlugin
    from kvpush.core.plan import PairPlan
    from kvpush.core.transport import MemoryKind, Region
    from kvpush.errors import ConfigError, KvPushError, LayoutError
    from kvpush.vllm import compat
    from kvpush.vllm.caches import describe_caches
    from kvpush.vllm.connector import KVPushConnector
    from kvpush.vllm.metadata import KVPushHandshakeMetadata, KVPushMetadata
    from kvpush.vllm.plugin import CONNECTOR_MODULE, CONNECTOR_NAME, register
    from kvpush.vllm.stats import COUNTERS, KVPushStats
    from kvpush.vllm.step_cost import StepCost

pytestmark = pytest.mark.vllm

LAYERS = 3
BASES = (base.KVConnectorBase_V1, base.SupportsHMA)

INHERITED = {
    "role": "a fact, not a hook",
    "has_connector_metadata": "vLLM's own book-keeping",
    "clear_connector_metadata": "vLLM's own book-keeping",
    "requires_kv_delivery": "true for producers, which is right: a preempted hand-off must be computed again",
    "supports_divergent_local_hybrid_hits": "for recurrent states, which are refused",
    "get_mem_pool_context": "the engine's default allocation is registered as it is",
    "set_host_xfer_buffer_ops": "no host buffer",
    "finish_forward": "wait_for_save follows, and draft layers are written in between",
    "reset_capture_state": "nothing is captured",
    "get_kv_connector_kv_cache_events": "no events",
    "bind_kv_cache_manager": "bind_gpu_block_pool is enough",
    "get_external_cache_hit_sources": "reads _cache_hit_source",
    "register_finished_partial_tail": "for recurrent states, which are refused",
    "take_events": "no events",
    "has_pending_block_frees": "preemption needs no waiting: what was read of a preempted source is void",
    "get_finished_count": "every rank reports",
    "set_xfer_handshake_metadata": "the pipeline-aware one is called",
    "unregister_kv_caches": "0.33, sleep mode only, which is refused",
    "restore_kv_caches": "0.33, sleep mode only, which is refused",
    "reset_cache": "there is no cache of our own",
}
"""Hooks of vLLM 0.29 to 0.33 that the connector leaves as they are, and why that is right."""


def public_hooks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in BASES:
        for name, member in vars(owner).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, classmethod | staticmethod | property)):
                found[name] = member
    return found


HOOKS = public_hooks()


def is_ours(name: str) -> bool:
    return any(name in vars(cls) for cls in KVPushConnector.__mro__ if cls.__module__.startswith("kvpush."))


def complaints(theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    """Ways in which vLLM may call ``theirs`` that ``ours`` doesn't accept."""
    found = []
    kinds = {parameter.kind for parameter in ours.parameters.values()}
    any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    mine = list(ours.parameters.values())
    for place, parameter in enumerate(theirs.parameters.values()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if not any_keyword:
                found.append(f"no **{parameter.name}")
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                found.append(f"no *{parameter.name}")
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if parameter.name not in ours.parameters and not any_keyword:
                found.append(f"no {parameter.name}")
        elif place >= len(mine) or mine[place].name != parameter.name:
            found.append(f"parameter {place} is not {parameter.name}")
        elif parameter.default is not parameter.empty and mine[place].default is parameter.empty:
            found.append(f"{parameter.name} has no default")
    for parameter in mine[len(theirs.parameters) :]:
        optional = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if not optional and parameter.default is parameter.empty and parameter.name not in theirs.parameters:
            found.append(f"{parameter.name} is wanted, and vLLM doesn't give it")
    return found


# --- the base class -----------------------------------------------------------------------------------------------------


def test_every_abstract_method_is_implemented() -> None:
    assert not inspect.isabstract(KVPushConnector), sorted(KVPushConnector.__abstractmethods__)


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hook_is_ours_or_was_looked_at(name: str) -> None:
    assert is_ours(name) or name in INHERITED, f"vLLM {compat.vllm_version()} has a hook {name} that nobody has looked at"


def test_nothing_is_both_ours_and_inherited() -> None:
    assert [name for name in INHERITED if is_ours(name)] == []


@pytest.mark.parametrize("name", sorted(name for name in HOOKS if is_ours(name)))
def test_hook_accepts_what_the_base_declares(name: str) -> None:
    theirs, ours = HOOKS[name], inspect.getattr_static(KVPushConnector, name)
    assert isinstance(ours, classmethod) == isinstance(theirs, classmethod)
    assert isinstance(ours, property) == isinstance(theirs, property)
    if isinstance(theirs, property):
        return
    if isinstance(theirs, classmethod):
        theirs, ours = theirs.__func__, ours.__func__
    assert complaints(inspect.signature(theirs), inspect.signature(ours)) == []


def test_constructor_accepts_what_the_base_declares() -> None:
    theirs, ours = base.KVConnectorBase_V1.__init__, KVPushConnector.__init__
    assert complaints(inspect.signature(theirs), inspect.signature(ours)) == []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param("lambda a, b: 0", "lambda a: 0", id="one-more"),
        pytest.param("lambda a, b: 0", "lambda b, a: 0", id="other-order"),
        pytest.param("lambda a, **kwargs: 0", "lambda a: 0", id="keywords"),
        pytest.param("lambda a, *, b: 0", "lambda a: 0", id="keyword-only"),
        pytest.param("lambda a, b=1: 0", "lambda a, b: 0", id="default"),
        pytest.param("lambda a: 0", "lambda a, b: 0", id="one-less"),
    ],
)
def test_the_comparison_finds_changes(theirs: str, ours: str) -> None:
    assert complaints(inspect.signature(eval(theirs)), inspect.signature(eval(ours)))


def test_hybrid_memory_allocation_is_supported() -> None:
    assert base.supports_hma(KVPushConnector)


def test_hits_are_labelled_as_those_of_a_peer() -> None:
    source = compat.cache_hit_source()
    assert source is None or source.name == "P2P"
    assert KVPushConnector._cache_hit_source is source


@pytest.mark.parametrize(("granularity", "wanted"), [(None, False), ("auto", False), ("chunk", False), ("layer", True)])
def test_full_graphs_are_given_up_for_layer_hooks_only(granularity: str | None, wanted: bool) -> None:
    extra = {"push_granularity": granularity} if granularity else {}
    assert KVPushConnector.requires_piecewise_for_cudagraph(extra) is wanted


def test_full_graphs_are_given_up_whatever_source_asks_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not KVPushConnector.requires_piecewise_for_cudagraph({"push_granularity": "no-such"}), "the constructor tells"
    monkeypatch.setenv("KVPUSH_PUSH_GRANULARITY", "layer")
    assert KVPushConnector.requires_piecewise_for_cudagraph({})
    monkeypatch.setenv("KVPUSH_PUSH_GRANULARITY", "chunk")
    assert not KVPushConnector.requires_piecewise_for_cudagraph({"push_granularity": "layer"}), "the environment goes before"


@pytest.mark.parametrize(
    ("preferred", "asked"), [(None, None), ("BLHNC", "BLHNC"), ("LBHNC", "LBHNC"), ("a layout of the future", None)]
)
def test_vllm_is_asked_for_the_layout_that_the_backend_prefers(
    monkeypatch: pytest.MonkeyPatch, preferred: str | None, asked: str | None
) -> None:
    seen: list[tuple[str | None, str | None]] = []

    def prefer(self: BackendManager, name: str | None = None, device_type: str | None = None) -> str | None:
        seen.append((name, device_type))
        return preferred

    monkeypatch.setattr(BackendManager, "preferred_layout", prefer)
    transfer = transfer_config(kv_connector_extra_config={"backend": "mine"})
    assert KVPushConnector.get_required_kvcache_layout(engine_config(transfer)) == asked
    assert seen == [("mine", "cpu")]


def test_wrong_settings_are_left_to_the_constructor() -> None:
    transfer = transfer_config(kv_connector_extra_config={"lease_s": -1})
    assert KVPushConnector.get_required_kvcache_layout(engine_config(transfer)) is None


@pytest.mark.parametrize(("name", "rows"), [("BLHNC", 1), ("LBHNC", LAYERS)])
def test_blocks_of_all_layers_are_one_run_where_vllm_lays_them_out_so(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    """vLLM's own views over one allocation, whatever its CPU attention can use: described, paired, and copied."""
    monkeypatch.setattr("kvpush.vllm.caches._tp_rank", lambda: 0)
    spec, num_blocks = full_attention(), 8
    page, names = spec.page_size_bytes, [f"layers.{idx}.attn" for idx in range(LAYERS)]
    outermost = kv.KVCacheLayout[name].is_block_outermost
    tensor = kv.KVCacheTensor(
        size=LAYERS * num_blocks * page,
        layers=names,
        layer_stride=page if outermost else num_blocks * page,
        block_stride=LAYERS * page if outermost else page,
    )
    groups = [kv.KVCacheGroupSpec(names, spec)]
    config = kv.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, use_mla=False)
    sides, memory = [], []
    for _ in range(2):
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        memory.append(raw)
        views = kv.create_kv_cache_views(raw, spec, num_blocks, kv.KVCacheLayout[name], tensor)
        engine = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1), model_config=model)
        described = describe_caches(dict(zip(names, views, strict=True)), config, engine)
        assert len({(view.region.address, view.region.length) for view in described}) == 1, "one allocation, one registration"
        sides.append((host_layout(described), views))
    (src, src_views), (dst, dst_views) = sides
    for idx, view in enumerate(src_views):
        view.view(torch.int8).copy_(torch.randint(1, 100, view.view(torch.int8).shape, dtype=torch.int8) + idx)
    sources, targets = PairPlan(src, dst).descriptors(0, LAYERS, (np.array([1, 2, 5]),), (np.array([3, 4, 0]),))
    assert len(sources) == 2 * rows, "two runs of blocks"
    for (at, length, _), (to, _, _) in zip(sources.tolist(), targets.tolist(), strict=True):
        at, to = at - memory[0].data_ptr(), to - memory[1].data_ptr()
        memory[1][to : to + length] = memory[0][at : at + length]
    for ours, theirs in zip(src_views, dst_views, strict=True):
        assert torch.equal(ours[[1, 2, 5]], theirs[[3, 4, 0]])
        assert not theirs[[1, 2, 5, 6, 7]].any()


@pytest.mark.parametrize("device_type", ["neuron", "privateuseone"])
def test_tensors_of_another_device_become_device_regions(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    """As vllm-neuron's: K and V apart. A stand-in, as torch has no such device without a backend in C++."""
    monkeypatch.setattr("kvpush.vllm.caches._tp_rank", lambda: 1)
    spec, num_blocks = full_attention(), 8
    shape = (2, num_blocks, 2, spec.block_size, spec.head_size)
    real = torch.zeros(shape, dtype=torch.bfloat16)
    tensor = SimpleNamespace(
        shape=real.shape,
        dtype=real.dtype,
        device=SimpleNamespace(type=device_type, index=3),
        element_size=real.element_size,
        stride=real.stride,
        data_ptr=real.data_ptr,
        untyped_storage=real.untyped_storage,
    )
    config = kv.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[kv.KVCacheGroupSpec(["layers.0.attn"], spec)]
    )
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4, use_mla=False)
    engine = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2), model_config=model)
    monkeypatch.setattr(compat, "attention_tag", lambda config, spec: "")
    (view,) = describe_caches({"layers.0.attn": tensor}, config, engine)
    assert view.region == Region(real.data_ptr(), real.untyped_storage().nbytes(), 3, MemoryKind.DEVICE)
    (layer,) = host_layout([view], NeuronPlugin().info.device_types).layers
    assert [(plane.content, plane.device_id) for plane in layer.planes] == [("k", 3), ("v", 3)]
    assert layer.planes[1].base - layer.planes[0].base == real.stride(0) * 2
    assert (layer.head_lo, layer.num_heads, layer.format) == (2, 2, "HNC")


def test_sleep_mode_is_refused_by_the_class() -> None:
    """vLLM 0.33 asks the class; older ones don't ask anybody."""
    assert KVPushConnector.supports_sleep_mode(transfer_config()) is False


def test_every_counter_survives_the_way_to_the_front_end() -> None:
    stats = KVPushStats(data=dict.fromkeys(COUNTERS, 1))
    stats.aggregate(KVPushStats(data=dict.fromkeys(COUNTERS, 2)))
    sent = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    assert KVPushConnector.build_kv_connector_stats(sent).reduce() == dict.fromkeys(COUNTERS, 3)
    assert KVPushConnector.build_kv_connector_stats().is_empty()


def test_the_cost_of_steps_survives_the_way_to_the_metrics() -> None:
    """Bucket by bucket, whatever adds up on the way: ranks, steps, the scheduler's part."""
    first, second = StepCost("worker"), StepCost("scheduler")
    for cost in (first, second):
        for _ in range(3):
            with cost:
                pass
            cost.end_step(computes=True)
    first._spent_ns = 12_000_000
    first.end_step(computes=False)
    stats = KVPushStats(data=first.take()).aggregate(KVPushStats(data=second.take()))
    assert not stats.is_empty()
    sent = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    seconds = sum(value for name, value in sent.items() if name.endswith("_s"))
    assert set(KVPushConnector.build_kv_connector_stats(sent).reduce()) == {"worker_step_p99_us", "scheduler_step_p99_us"}
    registry = CollectorRegistry()
    types = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = KVPushConnector.build_prom_metrics(engine_config(), types, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe(sent, 0)
    metrics.observe(sent, 7)  # An engine that was never registered is nobody's.

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvpush_engine_step_seconds{name}", {"model_name": "m", "engine": "0", **labels})

    assert value("_count", side="worker", step="forward") == 3
    assert value("_count", side="scheduler", step="forward") == 3
    assert value("_count", side="worker", step="empty") == 1
    assert value("_bucket", side="worker", step="empty", le="0.01") == 0
    assert value("_bucket", side="worker", step="empty", le="+Inf") == 1
    total = sum(value("_sum", side=side, step=step) or 0 for side in ("worker", "scheduler") for step in ("forward", "empty"))
    assert total == pytest.approx(seconds)
    assert total >= 0.012


def test_stats_start_and_reset_empty() -> None:
    stats = KVPushStats(data={"writes": 2.0})
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


# --- found by name and by module path -----------------------------------------------------------------------------------


def transfer_config(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "kv_connector": CONNECTOR_NAME, "kv_role": "kv_both", "engine_id": "engine-1", "kv_load_failure_policy": "recompute",
    }  # fmt: skip
    return KVTransferConfig(**given | changes)


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: loader for name, loader in KVConnectorFactory._registry.items() if name != CONNECTOR_NAME}
    monkeypatch.setattr(KVConnectorFactory, "_registry", others)


@pytest.fixture
def no_log_handlers() -> Iterator[None]:
    """Handlers that registering gives to our logger are taken away again."""
    ours = logging.getLogger("kvpush")
    before = list(ours.handlers), ours.level, ours.propagate
    ours.handlers = []
    yield
    ours.handlers, ours.level, ours.propagate = before


@pytest.mark.usefixtures("empty_registry", "no_log_handlers")
def test_entry_point_registers_the_class_and_may_be_called_again() -> None:
    with pytest.raises(ValueError, match=CONNECTOR_NAME):
        KVConnectorFactory.get_connector_class(transfer_config())
    (point,) = [point for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "kvpush"]
    for _ in range(3):
        point.load()()
    assert KVConnectorFactory.get_connector_class(transfer_config()) is KVPushConnector
    assert KVConnectorFactory.supports_hma_config(transfer_config()) is True


@pytest.mark.usefixtures("empty_registry")
def test_module_path_finds_the_class() -> None:
    given = transfer_config(kv_connector_module_path=CONNECTOR_MODULE)
    assert KVConnectorFactory.get_connector_class(given) is KVPushConnector


def test_registering_imports_nothing_heavy() -> None:
    """The entry point runs in every process of vLLM, the API server too."""
    code = (
        "import sys, kvpush.vllm.plugin as plugin\n"
        "assert not {'torch', 'vllm', 'nixl', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
        "plugin.register()\n"
        "assert 'nixl' not in sys.modules and 'kvpush.vllm.connector' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


# --- what is refused at construction ------------------------------------------------------------------------------------


def full_attention(**changes: Any) -> Any:
    return kv.FullAttentionSpec(**{"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32} | changes)


def sliding_window() -> Any:
    return kv.SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)


def cache_config(*specs: Any) -> Any:
    groups = [kv.KVCacheGroupSpec([f"layers.{idx}.attn"], spec) for idx, spec in enumerate(specs)]
    return kv.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(transfer: Any = None, *, sleep: bool = False, **parallel: Any) -> Any:
    given = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1, "data_parallel_rank": 0, "world_size": 1, "rank": 0,
    }  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer or transfer_config(),
        parallel_config=SimpleNamespace(**given | parallel),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(enable_sleep_mode=sleep),
    )


@pytest.fixture(params=["SCHEDULER", "WORKER"])
def role(request: pytest.FixtureRequest) -> Any:
    return base.KVConnectorRole[request.param]


@pytest.fixture(autouse=True)
def _registered(no_log_handlers: None) -> None:
    register()


def test_both_roles_are_made_by_the_factory(role: Any) -> None:
    made = KVConnectorFactory.create_connector(engine_config(), role, cache_config(full_attention()))
    assert type(made) is KVPushConnector
    assert made.role is role
    assert made.has_pending_push_work() is False
    made.shutdown()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        pytest.param(
            lambda: (full_attention(), sliding_window()),
            r"2 KV-cache groups .*--disable-hybrid-kv-cache-manager",
            id="two-groups",
        ),
        pytest.param(lambda: (sliding_window(),), r"SlidingWindowSpec", id="sliding-window"),
        pytest.param(
            lambda: (kv.MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)),),
            r"MambaSpec",
            id="recurrent-state",
        ),
        pytest.param(
            lambda: (kv.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layers.0.attn": sliding_window()}),),
            r"SlidingWindowSpec",
            id="sliding-window-among-equals",
        ),
        pytest.param(lambda: (), r"0 KV-cache groups", id="no-cache-at-all"),
    ],
)  # fmt: skip
def test_caches_that_cannot_be_transferred_are_refused(role: Any, specs: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KVPushConnector(engine_config(), role, cache_config(*specs()))


def test_equal_groups_of_full_attention_are_accepted(role: Any) -> None:
    spec = kv.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layers.0.attn": full_attention()})
    KVPushConnector(engine_config(), role, cache_config(spec))


@pytest.mark.parametrize("option", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(role: Any, option: str) -> None:
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        KVPushConnector(engine_config(**{option: 2}), role, cache_config(full_attention()))


def test_sleep_mode_is_refused(role: Any) -> None:
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        KVPushConnector(engine_config(sleep=True), role, cache_config(full_attention()))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        pytest.param({"lease": 3}, r"lease.*did you mean lease_s", id="unknown-name"),
        pytest.param({"lease_s": -1.0}, r"lease_s", id="out-of-range"),
        pytest.param({"control_port": "x"}, r"control_port", id="wrong-type"),
        pytest.param({"control_host": "0.0.0.0"}, r"advertise_host", id="wildcard"),
    ],
)
def test_wrong_settings_are_refused(role: Any, extra: dict[str, Any], message: str) -> None:
    given = engine_config(transfer_config(kv_connector_extra_config=extra))
    with pytest.raises(ConfigError, match=message):
        KVPushConnector(given, role, cache_config(full_attention()))


def test_no_cache_configuration_is_refused(role: Any) -> None:
    with pytest.raises(ConfigError, match="no KV-cache configuration"):
        KVPushConnector(engine_config(), role, None)


@pytest.mark.parametrize("version", ["0.26.0", "0.28.1"])
def test_old_versions_are_refused(role: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    with pytest.raises(ConfigError, match=version):
        KVPushConnector(engine_config(), role, cache_config(full_attention()))


@pytest.mark.parametrize(
    ("version", "warns"),
    [("0.29.0", False), ("0.33.1+cu130", False), ("0.34.0", True), ("1.0.0", True), ("0.1.dev1", False), ("dev", False)],
)
def test_new_versions_are_warned_of(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    with caplog.at_level(logging.WARNING, "kvpush"):
        compat.check_version()
    assert ("was tested up to" in caplog.text) is warns


def test_ports_are_counted_over_data_parallel_instances() -> None:
    transfer = transfer_config(kv_connector_extra_config={"control_port": 7000})
    given = engine_config(transfer, data_parallel_rank=3, world_size=2)
    made = KVPushConnector(given, base.KVConnectorRole.SCHEDULER, cache_config(full_attention()))
    assert made._sched.address.port == 7006


def test_routers_are_told_the_first_rank() -> None:
    made = KVPushConnector(engine_config(), base.KVConnectorRole.SCHEDULER, cache_config(full_attention()))
    ranks = {
        (0, 1): KVPushHandshakeMetadata(1, "127.0.0.1", 9001),
        (0, 0): KVPushHandshakeMetadata(0, "127.0.0.1", 9000),
        (1, 0): KVPushHandshakeMetadata(2, "127.0.0.1", 9002),
    }
    made.set_xfer_handshake_metadata_pp_aware(ranks)
    assert made._sched.address.port == 9000
    made.set_xfer_handshake_metadata_pp_aware({})
    assert made._sched.address.port == 9000


def test_a_worker_without_a_cache_does_nothing() -> None:
    """Hooks that come before ``register_kv_caches``, or in a dummy run."""
    made = KVPushConnector(engine_config(), base.KVConnectorRole.WORKER, cache_config(full_attention()))
    meta = KVPushMetadata()
    made.handle_preemptions(meta)
    made.bind_connector_metadata(meta)
    made.start_load_kv(None, scheduler_output=None, request_ids=[])
    made.wait_for_layer_load("layers.0.attn")
    made.save_kv_layer("layers.0.attn", None, None)
    made.wait_for_save()
    assert made.get_finished(set()) == (None, None)
    assert made.get_block_ids_with_load_errors() == set()
    assert made.get_kv_connector_stats() is None
    assert made.build_connector_worker_meta() is None
    assert made.get_handshake_metadata() is None
    made.clear_connector_metadata()
    made.shutdown()


def test_errors_are_kvpush_errors() -> None:
    assert issubclass(ConfigError, KvPushError)
    assert issubclass(LayoutError, KvPushError)
