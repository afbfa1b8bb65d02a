"""The Prometheus text, read back with prometheus_client's parser."""

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from text_generation_inference.api.control import Restarts
from text_generation_inference.api.metrics import CONTENT_TYPE, DURATION_BOUNDS, Metrics, Timings
from text_generation_inference.types import DeviceMemory, EngineLoad, ModelFacts, StepStats

FACTS = ModelFacts(
    model_id="m",
    dtype="float32",
    vocab_size=10,
    max_input_tokens=1000,
    max_total_tokens=2048,
    num_blocks=101,
    block_size=16,
    device="cpu",
)
STEP = StepStats(
    prefill=False,
    num_admitted=0,
    joined=False,
    num_running=3,
    num_waiting=2,
    num_waiting_tokens=40,
    max_tokens=300,
    inference_ns=4_000_000,
    forward_ns=3_000_000,
    decode_ns=50_000,
    filter_ns=200_000,
    num_decoded=3,
)
PREFILL = StepStats(True, 2, True, 5, 0, 0, 500, 9_000_000, 8_000_000, 60_000, 300_000, False, 12, 3)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(max_input_tokens=1000, max_total_tokens=2048)


def record_everything(metrics: Metrics) -> None:
    metrics.engine_ready(FACTS)
    metrics.heartbeat_age(0.1)
    metrics.count_request()
    for err in ("validation", "overloaded", "template", "generation", "incomplete", "dropped"):
        metrics.fail_request(err)
    metrics.validated(12, 100)
    metrics.succeed(Timings(total_s=1.0, validation_s=0.001, queue_s=0.002, inference_s=0.9, generated_tokens=90))
    metrics.first_token(0.02)
    metrics.inter_token(0.004)
    metrics.tokens(1)
    metrics.step(STEP)
    metrics.step(PREFILL)
    metrics.fail_step(prefill=True)
    metrics.drop_message()
    metrics.loop_lag(0.001)
    metrics.fail_step(prefill=False)
    metrics.in_flight(4)
    metrics.load(EngineLoad(1, 2, 60, 7, 1000, 400, memory=DeviceMemory(3, 4)))


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value."""
    text = metrics.render().decode()
    return {
        (_printed_name(family, sample), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _printed_name(family, sample) -> str:
    """The parser appends `_total` to the counters it reads."""
    return sample.name.removesuffix("_total") if family.type == "counter" else sample.name


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


# Names and types of the reference; True: it has a HELP line.
REFERENCE = {
    "tgi_request_count": ("counter", True),
    "tgi_request_success": ("counter", True),
    "tgi_request_failure": ("counter", False),
    "tgi_request_duration": ("histogram", True),
    "tgi_request_validation_duration": ("histogram", True),
    "tgi_request_queue_duration": ("histogram", True),
    "tgi_request_inference_duration": ("histogram", True),
    "tgi_request_mean_time_per_token_duration": ("histogram", True),
    "tgi_request_generated_tokens": ("histogram", True),
    "tgi_request_input_length": ("histogram", True),
    "tgi_request_max_new_tokens": ("histogram", True),
    "tgi_request_skipped_tokens": ("summary", True),
    "tgi_queue_size": ("gauge", True),
    "tgi_batch_current_size": ("gauge", True),
    "tgi_batch_current_max_tokens": ("gauge", True),
    "tgi_batch_next_size": ("histogram", True),
    "tgi_batch_inference_count": ("counter", True),
    "tgi_batch_inference_success": ("counter", True),
    "tgi_batch_inference_failure": ("counter", False),
    "tgi_batch_inference_duration": ("histogram", True),
    "tgi_batch_forward_duration": ("histogram", True),
    "tgi_batch_decode_duration": ("histogram", True),
    "tgi_batch_filter_duration": ("histogram", True),
    "tgi_batch_concat": ("counter", False),
    "tgi_batch_concat_duration": ("histogram", False),
}
OURS = {
    "tgi_requests_in_flight": "gauge",
    "tgi_batch_tokens": "counter",
    "tgi_device_memory_used_bytes": "gauge",
    "tgi_device_memory_limit_bytes": "gauge",
    "tgi_time_to_first_token_duration": "histogram",
    "tgi_inter_token_duration": "histogram",
    "tgi_queue_tokens": "gauge",
    "tgi_kv_blocks_used": "gauge",
    "tgi_kv_blocks_total": "gauge",
    "tgi_kv_block_tokens": "gauge",
    "tgi_kv_usage_ratio": "gauge",
    "tgi_preemptions": "counter",
    "tgi_prompt_tokens": "counter",
    "tgi_cached_prompt_tokens": "counter",
    "tgi_engine_restarts": "counter",
    "tgi_malformed_messages": "counter",
    "tgi_api_loop_lag_seconds": "histogram",
    "tgi_engine_hangs": "counter",
    "tgi_api_restarts": "counter",
    "tgi_api_hangs": "counter",
    "tgi_engine_heartbeat_age_seconds": "gauge",
    "tgi_log_lines_dropped": "counter",
    "process_start_time_seconds": "gauge",
}


def test_every_metric_of_the_reference_with_its_type_and_help(metrics):
    record_everything(metrics)
    text = metrics.render().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    assert types == {name: kind for name, (kind, _) in REFERENCE.items()} | OURS
    assert set(helps) == {name for name, (_, described) in REFERENCE.items() if described} | set(OURS)
    assert helps["tgi_request_skipped_tokens"] == "Speculated tokens per request"
    assert helps["tgi_batch_inference_success"] == (
        "Number of successful inference calls per method (prefill or decode)"
    )


def test_the_page_lists_every_metric(metrics):
    record_everything(metrics)
    names = re.findall(r"^# TYPE (\S+)", metrics.render().decode(), re.M)
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)`", page, re.M))
    assert set(names) <= rows


def test_nothing_of_the_reference_appears_before_it_is_recorded(metrics):
    names = set(re.findall(r"^# TYPE (\S+)", metrics.render().decode(), re.M))
    assert names == {
        "tgi_engine_restarts",
        "tgi_engine_hangs",
        "tgi_api_restarts",
        "tgi_api_hangs",
        "tgi_log_lines_dropped",
        "process_start_time_seconds",
    }
    metrics.count_request()
    assert "\ntgi_request_count 1\n" in "\n" + metrics.render().decode()
    assert "tgi_request_success" not in metrics.render().decode()


def test_counters_have_no_suffix_and_their_labels(metrics):
    record_everything(metrics)
    text = metrics.render().decode()
    assert "_total" not in text.replace("tgi_kv_blocks_total", "")
    assert '\ntgi_request_failure{err="overloaded"} 1\n' in text
    assert '\ntgi_batch_concat{reason="chunking"} 1\n' in text
    assert '\ntgi_batch_inference_count{method="prefill"} 2\n' in text
    assert '\ntgi_batch_inference_success{method="prefill"} 1\n' in text
    assert '\ntgi_batch_inference_failure{method="decode"} 1\n' in text


def test_failed_steps_are_counted_by_what_they_were(metrics):
    metrics.step(STEP)
    metrics.step(msgspec.structs.replace(PREFILL, failed=True))
    metrics.step(msgspec.structs.replace(STEP, failed=True))
    metrics.fail_step(prefill=True)
    found = samples(metrics)
    for method, count, failed in (("prefill", 2, 2), ("decode", 2, 1)):
        labels = (("method", method),)
        assert found["tgi_batch_inference_count", labels] == count
        assert found["tgi_batch_inference_failure", labels] == failed
        assert found.get(("tgi_batch_inference_success", labels), 0) == count - failed
        assert found.get(("tgi_batch_inference_duration_count", labels), 0) == count - failed


def test_duration_bounds_carry_the_noise_of_the_reference(metrics):
    metrics.inter_token(0.0002)
    text = metrics.render().decode()
    bounds = re.findall(r'tgi_inter_token_duration_bucket\{le="(.+?)"\}', text)
    assert bounds[:6] == [
        "0.00015000000000000001",
        "0.00022500000000000002",
        "0.0003375",
        "0.00050625",
        "0.000759375",
        "0.0011390624999999999",
    ]
    assert len(bounds) == 36 and bounds[-1] == "+Inf"
    assert 145 < float(bounds[-2]) < 146 and len(DURATION_BOUNDS) == 35
    assert 'tgi_inter_token_duration_bucket{le="0.00015000000000000001"} 0\n' in text
    assert 'tgi_inter_token_duration_bucket{le="0.00022500000000000002"} 1\n' in text


def test_token_bounds_follow_the_limits(metrics):
    metrics.validated(10, 1024)
    text = metrics.render().decode()
    inputs = re.findall(r'tgi_request_input_length_bucket\{le="(.+?)"\} (\d+)', text)
    assert [bound for bound, _ in inputs[:3]] == ["10", "20", "30"]  # 1000 / 100 * i
    assert inputs[0][1] == "1"  # a bound counts what equals it
    assert inputs[99][0] == "1000" and len(inputs) == 101
    new = re.findall(r'tgi_request_max_new_tokens_bucket\{le="(.+?)"\}', text)
    assert new[0] == "20.48" and new[99] == "2048"
    assert value(metrics, "tgi_request_max_new_tokens_sum") == 1024


def test_batch_sizes(metrics):
    metrics.step(PREFILL)
    text = metrics.render().decode()
    bounds = re.findall(r'tgi_batch_next_size_bucket\{le="(.+?)"\}', text)
    assert bounds == [str(size) for size in range(1, 1025)] + ["+Inf"]
    assert value(metrics, "tgi_batch_next_size_bucket", le="1") == 0
    assert value(metrics, "tgi_batch_next_size_bucket", le="2") == 1


def test_histograms_are_cumulative_and_sum_up(metrics):
    for seconds in (0.0001, 0.001, 0.001, 1.0, 1000.0):
        metrics.first_token(seconds)
    name = "tgi_time_to_first_token_duration"
    found = samples(metrics)
    counts = [count for (sample, _), count in found.items() if sample == f"{name}_bucket"]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-2] == 4 and counts[-1] == 5
    assert found[f"{name}_count", ()] == 5
    assert found[f"{name}_sum", ()] == pytest.approx(1001.0021)


def test_labelled_histogram_has_its_label_before_le(metrics):
    metrics.step(STEP)
    text = metrics.render().decode()
    assert 'tgi_batch_forward_duration_bucket{method="decode",le="0.00015000000000000001"} 0\n' in text
    assert 'tgi_batch_forward_duration_count{method="decode"} 1\n' in text
    assert value(metrics, "tgi_batch_forward_duration_sum", method="decode") == pytest.approx(0.003)
    assert "prefill" not in text.replace("(prefill or decode)", "")


def test_success_records_durations_and_tokens(metrics):
    metrics.succeed(Timings(total_s=1.0, validation_s=0.1, queue_s=0.2, inference_s=0.6, generated_tokens=3))
    assert value(metrics, "tgi_request_success") == 1
    assert value(metrics, "tgi_request_duration_sum") == 1.0
    assert value(metrics, "tgi_request_validation_duration_sum") == 0.1
    assert value(metrics, "tgi_request_queue_duration_sum") == 0.2
    assert value(metrics, "tgi_request_inference_duration_sum") == 0.6
    assert value(metrics, "tgi_request_mean_time_per_token_duration_sum") == pytest.approx(0.2)
    assert value(metrics, "tgi_request_generated_tokens_sum") == 3


def test_a_generation_without_tokens_divides_nothing_by_zero(metrics):
    metrics.succeed(Timings(total_s=1.0, validation_s=0.1, queue_s=0.2, inference_s=0.6, generated_tokens=0))
    assert value(metrics, "tgi_request_mean_time_per_token_duration_count") == 1


def test_skipped_tokens_are_a_summary(metrics):
    metrics.tokens(1, deliveries=90)
    for _ in range(9):
        metrics.tokens(3)
    metrics.tokens(6)
    text = metrics.render().decode()
    quantiles = dict(re.findall(r'tgi_request_skipped_tokens\{quantile="(.+?)"\} (\S+)', text))
    assert quantiles == {"0": "0", "0.5": "0", "0.9": "0", "0.95": "2", "0.99": "2", "0.999": "5", "1": "5"}
    assert value(metrics, "tgi_request_skipped_tokens_count") == 100
    assert value(metrics, "tgi_request_skipped_tokens_sum") == 23
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert families["tgi_request_skipped_tokens"] == "summary"


def test_gauges_follow_the_engine(metrics):
    metrics.engine_ready(FACTS)
    metrics.step(STEP)
    assert value(metrics, "tgi_queue_size") == 2
    assert value(metrics, "tgi_queue_tokens") == 40
    assert value(metrics, "tgi_batch_current_size") == 3
    assert value(metrics, "tgi_batch_current_max_tokens") == 300
    metrics.load(EngineLoad(0, 0, 75, 0, 0, 0))
    assert value(metrics, "tgi_queue_size") == 0
    assert value(metrics, "tgi_queue_tokens") == 0
    assert value(metrics, "tgi_batch_current_size") == 0
    assert value(metrics, "tgi_batch_current_max_tokens") == 0
    assert value(metrics, "tgi_kv_blocks_total") == 100
    assert value(metrics, "tgi_kv_blocks_used") == 25
    assert value(metrics, "tgi_kv_usage_ratio") == 0.25


def test_counters_go_on_when_the_engine_starts_again(metrics):
    metrics.engine_ready(FACTS)
    metrics.load(EngineLoad(0, 1, 60, 2, 100, 10))
    metrics.load(EngineLoad(0, 1, 60, 3, 150, 60))
    metrics.restarts(Restarts(engine=1, engine_hangs=1))
    metrics.engine_ready(FACTS)
    assert value(metrics, "tgi_kv_blocks_used") == 0
    metrics.load(EngineLoad(0, 1, 60, 4, 200, 0))
    assert value(metrics, "tgi_preemptions") == 7
    assert value(metrics, "tgi_prompt_tokens") == 350
    assert value(metrics, "tgi_cached_prompt_tokens") == 60
    assert value(metrics, "tgi_engine_restarts") == 1


def test_several_engines_are_summed_and_told_apart():
    metrics = Metrics(1000, 2000, num_replicas=2)
    for replica in (0, 1):
        metrics.engine_ready(FACTS, replica)
        metrics.step(STEP, replica)
        metrics.load(EngineLoad(2, 3, 75 - 25 * replica, 1, 100, 10 + replica), replica)
    metrics.route(1, "prefix")
    metrics.restarts(Restarts(engine=3, by_replica=[1, 2]))
    metrics.heartbeat_age(0.1, 0)
    metrics.heartbeat_age(0.3, 1)
    sums = {
        "tgi_queue_size": 4,
        "tgi_queue_tokens": 80,
        "tgi_batch_current_size": 6,
        "tgi_batch_current_max_tokens": 600,
    }
    sums |= {
        "tgi_kv_blocks_total": 200,
        "tgi_kv_blocks_used": 75,
        "tgi_kv_usage_ratio": 0.375,
        "tgi_prompt_tokens": 200,
    }
    sums |= {"tgi_cached_prompt_tokens": 21, "tgi_engine_heartbeat_age_seconds": 0.3, "tgi_engine_restarts": 3}
    assert {name: value(metrics, name) for name in sums} == sums
    found = samples(metrics)
    for name, expected in {
        "kv_usage_ratio": 0.5,
        "cached_prompt_tokens": 11,
        "queue_tokens": 40,
        "restarts": 2,
        "up": 1,
    }.items():
        assert found[f"tgi_replica_{name}", (("replica", "1"),)] == expected, name
    assert found["tgi_replica_requests", (("reason", "prefix"), ("replica", "1"))] == 1

    metrics.engine_lost(1)  # what it had is nowhere any more; what it counted stays
    assert (value(metrics, "tgi_queue_size"), value(metrics, "tgi_kv_blocks_total")) == (2, 100)
    assert samples(metrics)["tgi_replica_up", (("replica", "1"),)] == 0
    metrics.engine_ready(FACTS, 1)
    metrics.load(EngineLoad(0, 0, 100, 0, 5, 0), 1)
    assert value(metrics, "tgi_prompt_tokens") == 205
    assert value(metrics, "tgi_cached_prompt_tokens") == 21


def test_one_engine_has_no_replicas(metrics):
    metrics.engine_ready(FACTS)
    metrics.step(STEP)
    metrics.engine_lost(0)
    assert "replica" not in metrics.render().decode()
    assert value(metrics, "tgi_queue_size") == 2


def test_label_values_are_escaped(metrics):
    metrics.fail_request('a "b"\\\n')
    assert samples(metrics)["tgi_request_failure", (("err", 'a "b"\\\n'),)] == 1


def test_content_type():
    assert CONTENT_TYPE.startswith("text/plain")


def test_numbers_are_those_of_the_text(metrics):
    record_everything(metrics)
    printed = {
        line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in metrics.render().decode().splitlines() if line
    }
    numbers = metrics.numbers()
    assert len(numbers) > 60 and {name: float(printed[name]) for name in numbers} == numbers
    assert {name for name in printed if not re.search(r"^#|_bucket\{|quantile=", name)} == set(numbers)
    assert sum(metrics.counts("tgi_inter_token_duration")) == numbers["tgi_inter_token_duration_count"] == 1


def test_tokens_of_steps_and_memory_of_devices(metrics):
    record_everything(metrics)
    assert value(metrics, "tgi_batch_tokens", method="prefill") == 12
    assert value(metrics, "tgi_batch_tokens", method="decode") == 6
    assert value(metrics, "tgi_device_memory_used_bytes", replica="0") == 3
    metrics.load(EngineLoad(1, 2, 60, 7, 1000, 400))  # looked at seldom: what was said last stays
    assert value(metrics, "tgi_device_memory_limit_bytes", replica="0") == 4
