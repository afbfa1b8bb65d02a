"""The product on a Gaudi card that is played by the stand-in of `tests/hpu_emulated`."""

import base64
import io
import os
import re
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import NUM_RANKS, Server
from vision_oracle import draw, make_oracle

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


def likely(client: httpx.Client) -> list[dict[str, float] | None]:
    """The best ids in the places of a prompt."""
    body = {"model": "tgi", "prompt": PROMPTS[1], "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["top_logprobs"]


def test_llava_next_as_published(tmp_path: Path) -> None:
    """The variables of tgi-gaudi's command lines, with sizes of a tiny model: the tokens of `transformers`."""
    oracle = make_oracle("llava_next", tmp_path / "model")
    running = Server(
        *("--model-id", str(oracle.folder), "--device", "hpu", "--dtype", "float32"),
        *("--max-input-tokens", "384", "--max-total-tokens", "512"),
        *("--max-batch-prefill-tokens", "768", "--max-batch-total-tokens", "1024"),
        PYTHONPATH=os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]),
        PT_HPU_ENABLE_LAZY_COLLECTIVES="true",
        HF_HUB_ENABLE_HF_TRANSFER="1",
        PREFILL_BATCH_BUCKET_SIZE="1",
        BATCH_BUCKET_SIZE="1",
        PAD_SEQUENCE_TO_MULTIPLE_OF="64",
        BASE_IMAGE_TOKENS="256",
    )
    try:
        with running.client() as client:
            for width, height in ((90, 31), (33, 97), (56, 56)):
                picture = draw(width, height, seed=width)
                file = io.BytesIO()
                picture.save(file, "PNG")
                url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
                body = {"inputs": f"![]({url})What is this?\n\n", "parameters": {"max_new_tokens": 6, "details": True}}
                answer = client.post("/generate", json=body).json()
                expected = oracle.generate([picture, "What is this?\n\n"], 6)
                assert [token["id"] for token in answer["details"]["tokens"]] == expected.token_ids
                for token, logprob in zip(answer["details"]["tokens"], expected.logprobs, strict=True):
                    assert token["logprob"] == pytest.approx(logprob, abs=1e-3)
            client.post("/generate", json={"inputs": "No picture", "parameters": {"max_new_tokens": 1}}).json()
        computed = 'tgi_bucket_tokens_computed{method="prefill"}'
        # All prompts are shorter than BASE_IMAGE_TOKENS, texts too, and none is padded to less. Counts come a moment later.
        running.wait_for(lambda: running.metrics().get(computed, 0) >= 4 * 256, "the counts of four prompts")
        metrics = running.metrics()
        assert metrics[computed] % 256 == 0
        assert metrics["tgi_bucket_unplanned"] == 0  # neither a prompt's pass nor one of the tower
        assert metrics['tgi_bucket_shapes{state="captured"}'] > 0
        assert metrics['tgi_bucket_tokens_needed{method="prefill"}'] < metrics[computed] / 2
        assert re.search(r"shapes for prompts.*, 13 for pictures \(1 to 32 tiles or patches\)", running.log)
        assert "BASE_IMAGE_TOKENS has no effect" not in running.log
    finally:
        status = running.stop()
    assert status == 0, running.log[-3000:]


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
            for ours, theirs in zip(likely(client), likely(http), strict=True):
                assert (ours is None) == (theirs is None) and list(ours or {}) == list(theirs or {})
                assert list((ours or {}).values()) == pytest.approx(list((theirs or {}).values()), abs=1e-3)
            assert client.get("/info").json()["model_device_type"] == "hpu (emulated)"
            streamed = client.post("/generate", json={"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 1}})
            assert streamed.headers["x-compute-type"] == f"{NUM_RANKS}-hpu (emulated)"
        metrics = running.metrics()
        assert metrics["tgi_bucket_unplanned"] == 0
        assert metrics['tgi_bucket_shapes{state="captured"}'] > 0
    finally:
        status = running.stop()
    assert status == 0, running.log[-3000:]
