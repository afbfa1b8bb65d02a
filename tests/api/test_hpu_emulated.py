"""The product on a Gaudi card that is played by the stand-in of `tests/hpu_emulated`."""

import os
from pathlib import Path

import httpx2 as httpx
from serving import NUM_RANKS, Server

STAND_IN = Path(__file__).parents[1] / "hpu_emulated"
LIMITS = {"MAX_INPUT_TOKENS": "64", "MAX_TOTAL_TOKENS": "128", "MAX_BATCH_SIZE": "2", "MAX_BATCH_PREFILL_TOKENS": "64"}
PROMPTS = ["The capital of France is", "Once upon a time, there was a little"]
PARAMETERS = {"max_new_tokens": 8, "details": True}


def answers(client: httpx.Client) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        answer = client.post("/generate", json={"inputs": prompt, "parameters": PARAMETERS})
        assert answer.status_code == 200, answer.text
        found.append([token["id"] for token in answer.json()["details"]["tokens"]])
    return found


def test_the_product_on_an_emulated_card(http: httpx.Client, model_cache: Path) -> None:
    """Settings come from the environment, as in Gaudi's images."""
    running = Server(
        *("--model-id", "embedded", "--device", "hpu", "--dtype", "float32"),
        cache=model_cache,
        PYTHONPATH=os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]),
        BATCH_BUCKET_SIZE="2",
        PREFILL_BATCH_BUCKET_SIZE="1",
        PAD_SEQUENCE_TO_MULTIPLE_OF="64",
        **LIMITS,
    )
    try:
        assert "fused kernels on hpu (emulated): Gaudi2" in running.log
        with running.client() as client:
            assert answers(client) == answers(http), "the tokens of the CPU"
            assert client.get("/info").json()["model_device_type"] == "hpu (emulated)"
            streamed = client.post("/generate", json={"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 1}})
            assert streamed.headers["x-compute-type"] == f"{NUM_RANKS}-hpu (emulated)"
        metrics = running.metrics()
        assert metrics["tgi_bucket_unplanned"] == 0
        assert metrics['tgi_bucket_shapes{state="captured"}'] > 0
    finally:
        status = running.stop()
    assert status == 0, running.log[-3000:]
