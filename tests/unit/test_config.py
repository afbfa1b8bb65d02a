"""Settings: what is refused, what follows from what, and where it comes from."""

import msgspec
import pytest

from text_generation_inference.config import (
    LoraAdapter,
    ModelSize,
    Resolved,
    ServerConfig,
    cache_folder,
    child_environment,
    hub_token,
    least_blocks,
    parse_lora_adapters,
    read_environment,
    resolve,
)
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.types import Limits

LIMITS = Limits(
    block_size=16,
    dtypes=["float32"],
    max_batch_size=8,
    max_batch_prefill_tokens=512,
    memory_share=0.5,
)
SIZE = ModelSize(max_positions=2048, kv_bytes_per_token=1000)


def derive(free: int = 10**9, limits: Limits = LIMITS, **given: object):
    return resolve(ServerConfig(**given), SIZE, limits, free)


def test_defaults_follow_model_and_device() -> None:
    resolved = derive()
    assert (resolved.max_total_tokens, resolved.max_input_tokens) == (2048, 2047)
    assert resolved.num_blocks == 8 * (2048 // 16 + 1) + 1
    assert (resolved.max_batch_prefill_tokens, resolved.max_batch_size) == (512, 8)
    assert resolved.reasons["max_batch_total_tokens"] == "max_batch_size x max_total_tokens, in blocks"


def test_memory_limits_the_pool_and_then_the_request() -> None:
    resolved = derive(free=8_000_000)
    assert resolved.num_blocks == 4000 // 16 + 1
    assert resolved.reasons["max_batch_total_tokens"] == "50% of the 0.01 GB of memory free"
    resolved = derive(free=1_000_000)
    assert resolved.max_total_tokens == 500 // 16 * 16
    assert resolved.reasons["max_total_tokens"] == "tokens in the KV cache"


def test_memory_is_divided_where_some_layers_read_a_window() -> None:
    """Both have enough for the largest batch, or run out together for requests of four windows."""

    def shared(free: int = 10**9, window: int | None = 257, **given: object) -> Resolved:
        size = ModelSize(max_positions=4096, kv_bytes_per_token=1000, partial_window=window, window_bytes_per_token=800)
        config = ServerConfig(**{"max_batch_prefill_tokens": 512, "max_batch_size": 8, **given})
        return resolve(config, size, LIMITS, free)

    def taken(resolved: Resolved) -> int:
        assert resolved.block_size == 16
        return 16 * (200 * (resolved.num_blocks - 1) + 800 * (resolved.num_window_blocks - 1))

    each, chunk = least_blocks(257, 16) + 1, 512 // 16 + 1
    roomy = shared()
    assert (roomy.partial_window, roomy.window, roomy.max_total_tokens) == (257, None, 4096)
    assert roomy.num_blocks - 1 == 8 * 257  # all of each request, and one to spare
    assert roomy.num_window_blocks - 1 == 8 * each + chunk
    room = int(4_000_000 * LIMITS.memory_share)
    short = shared(free=4_000_000)
    alike = resolve(
        ServerConfig(max_batch_size=8), ModelSize(max_positions=4096, kv_bytes_per_token=1000), LIMITS, 4_000_000
    )
    assert room - 16_000 < taken(short) <= room
    assert short.num_blocks > 2 * alike.num_blocks
    assert (short.num_window_blocks - 1) * 4 * each >= (short.num_blocks - 1) * each
    # What was asked for can be used whatever the lengths are; one request can always be computed in whole chunks.
    for tokens, expected in ((640, 40), (16 * 2000, 8 * each + chunk), (1600, 100)):
        given = shared(max_batch_total_tokens=tokens)
        assert (given.num_blocks - 1, given.num_window_blocks - 1) == (tokens // 16, expected)
    least = shared(free=1_300_000, max_batch_size=64)
    assert least.num_window_blocks - 1 >= min(least.num_blocks - 1, each + chunk)
    with pytest.raises(ResourceError, match="At most 992 tokens fit"):
        shared(free=1_000_000, max_batch_total_tokens=3200)
    for window, given in ((None, {}), (4096, {}), (257, {"max_total_tokens": 300}), (257, {"bucketing": True})):
        other = shared(
            window=window, **{**given, **({"max_batch_prefill_tokens": 4096} if "bucketing" in given else {})}
        )
        assert (other.partial_window, other.num_window_blocks) == (None, 0)


def test_a_window_that_fits_does_not_limit_the_request() -> None:
    """Requests keep their window: only a cache that has no room for one makes them shorter."""

    def windowed(window: int | None, free: int = 10**9, **given: object) -> Resolved:
        size = ModelSize(max_positions=2048, kv_bytes_per_token=1000, window=window)
        return resolve(ServerConfig(**given), size, LIMITS, free)

    least = 256 // 16 + 2  # blocks
    for tokens in (16 * least, 16 * least - 1, 16 * (least - 1)):
        resolved = windowed(257, max_batch_total_tokens=tokens)
        fits = tokens > 16 * (least - 1)
        assert (resolved.window, resolved.max_total_tokens) == ((257, 2048) if fits else (None, 16 * (least - 1)))
        assert ("window" in resolved.reasons) == fits
    assert windowed(257, free=1_000_000).max_total_tokens == 2048
    for window, given in ((None, {}), (2048, {}), (257, {"max_total_tokens": 200}), (257, {"bucketing": True})):
        assert windowed(window, **given).window is None


def test_positions_without_a_table_are_a_default_alone() -> None:
    size = ModelSize(max_positions=2048, kv_bytes_per_token=1000, may_be_longer=True)
    assert resolve(ServerConfig(), size, LIMITS, 10**9).max_total_tokens == 2048
    longer = resolve(ServerConfig(max_total_tokens=5000), size, LIMITS, 10**9)
    assert (longer.max_total_tokens, longer.max_input_tokens) == (5000, 4999)
    with pytest.raises(StartError, match="`max_total_tokens` must be <= 2048, the positions of the model"):
        derive(max_total_tokens=5000)


def test_given_values_are_kept() -> None:
    resolved = derive(
        max_batch_total_tokens=4000, max_total_tokens=100, max_input_tokens=60, max_batch_prefill_tokens=7
    )
    assert resolved.num_blocks == 250 + 1
    assert (resolved.max_total_tokens, resolved.max_input_tokens, resolved.max_batch_prefill_tokens) == (100, 60, 7)
    assert set(resolved.reasons.values()) >= {"as given"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_batch_size": 0}, "`max_batch_size` must be > 0"),
        ({"max_total_tokens": 4096}, "`max_total_tokens` must be <= 2048"),
        (
            {"max_total_tokens": 100, "max_input_tokens": 100},
            "`max_input_tokens`(100) must be < `max_total_tokens`(100)",
        ),
        (
            {"max_total_tokens": 100, "max_batch_total_tokens": 50},
            "`max_total_tokens` must be <= `max_batch_total_tokens`",
        ),
        ({"dtype": "int3"}, "`dtype` must be one of float32, float16, bfloat16. Given: int3"),
        ({"load_format": "pickle"}, "`load_format` must be one of safetensors, dummy. Given: pickle"),
        ({"watermark_gamma": 1.5}, "`watermark_gamma` must be > 0 and < 1"),
        ({"waiting_served_ratio": -1.0}, "`waiting_served_ratio` must be >= 0"),
        ({"quantize": "exl2"}, "`quantize` is set to 'exl2', which is not supported"),
        ({"api_key": "naïve"}, "`api_key` must be printable ASCII"),
        ({"max_input_length": 0}, "`max_input_tokens` must be > 0"),
    ],
)
def test_nonsense_is_refused_by_name(given: dict, text: str) -> None:
    with pytest.raises(StartError) as caught:
        derive(**given)
    assert text in str(caught.value)


def test_too_little_memory_says_how_much_fits() -> None:
    with pytest.raises(ResourceError, match=r"At most 1000 tokens fit"):
        derive(free=1_000_000, max_batch_total_tokens=2000)
    with pytest.raises(ResourceError, match="Not enough memory for a KV cache"):
        derive(free=1000)
    with pytest.raises(ResourceError, match="Not enough memory to handle `max_total_tokens=1000`"):
        derive(free=1_000_000, max_total_tokens=1000)


def test_environment() -> None:
    given = read_environment(
        {
            "MODEL_ID": "x",
            "MAX_BATCH_SIZE": "12",
            "PREFIX_CACHING": "0",
            "HF_HUB_OFFLINE": "yes",
            "WAITING_SERVED_RATIO": "1.2",
        }
    )
    assert given == {
        "model_id": "x",
        "max_batch_size": 12,
        "prefix_caching": False,
        "offline": True,
        "waiting_served_ratio": 1.2,
    }
    with pytest.raises(StartError, match="MAX_BATCH_SIZE='many' is not valid"):
        read_environment({"MAX_BATCH_SIZE": "many"})


def test_environment_in_part() -> None:
    environment = {"MODEL_ID": "x", "PORT": "not a port"}
    assert read_environment(environment, only=["model_id"]) == {"model_id": "x"}
    with pytest.raises(StartError, match="PORT='not a port' is not valid: it must be a whole number"):
        read_environment(environment)


def test_older_name_of_max_input_tokens() -> None:
    config = ServerConfig(max_input_length=7)
    assert (config.max_input_tokens, config.max_input_length) == (7, None)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config


def test_every_setting_survives_the_way_to_a_child() -> None:
    config = ServerConfig(api_key="secret", cors_allow_origin=["http://a"], cuda_graphs=[1], sharded=False, port=1)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config


def test_secrets_are_not_printed() -> None:
    config = ServerConfig(api_key="geheim", ngrok_authtoken="heimlich", port=8080)
    assert repr(config) == str(config) == "ServerConfig(port=8080, api_key='***', ngrok_authtoken='***')"
    assert dict(config.__rich_repr__())["api_key"] == "***"


def test_lora_adapters() -> None:
    assert parse_lora_adapters("org/a, org/b@v2,c=/p,d=/q@v3,") == [
        LoraAdapter("org/a"),
        LoraAdapter("org/b", None, "v2"),
        LoraAdapter("c", "/p"),
        LoraAdapter("d", "/q", "v3"),
    ]
    for item in ("a=b=c", "a@b@c", "=x", "a="):
        with pytest.raises(StartError, match=f"^Invalid LoRA adapter format: {item}$"):
            parse_lora_adapters(f"org/a,{item}")


def test_environment_of_children() -> None:
    config = ServerConfig(offline=True, huggingface_hub_cache="/data", api_key="secret")
    child = child_environment(config, {"HF_API_TOKEN": "a", "HF_TOKEN": "b", "API_KEY": "secret", "X": "y"})
    assert child["HF_TOKEN"] == "a" and child["X"] == "y" and "API_KEY" not in child
    assert child["HF_HUB_OFFLINE"] == "1" and child["HF_HUB_CACHE"] == child["HUGGINGFACE_HUB_CACHE"] == "/data"
    assert child["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert child_environment(ServerConfig(), {"HUGGING_FACE_HUB_TOKEN": "c"})["HF_TOKEN"] == "c"
    assert "HF_TOKEN" not in child_environment(ServerConfig(), {})
    assert (hub_token({}), hub_token({"HF_TOKEN": "b", "HUGGING_FACE_HUB_TOKEN": "c"})) == (None, "b")


def test_cache_folder() -> None:
    assert str(cache_folder(ServerConfig(cache_dir="/a"), {})) == "/a"
    assert str(cache_folder(ServerConfig(), {"XDG_CACHE_HOME": "/x"})) == "/x/tgi"
