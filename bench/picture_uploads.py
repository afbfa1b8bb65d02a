"""How long `/health` takes while clients upload pictures as data in chats, one after another.

    python bench/picture_uploads.py [--clients 8] [--seconds 10]

The launcher as a user starts it, on a tiny random model that sees, so that the front end is what is measured. Every
client has a picture of its own, the same each time: decoded once, then found by its digest, as in a chat of many turns.
"""

import argparse
import base64
import io
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("api", "models")]

import numpy as np
from PIL import Image
from serving import Server
from vision_oracle import make_oracle

KINDS = {"none": (0, ""), "PNG of 0.36 megapixels": (600, "PNG"), "BMP of 4 megapixels": (2000, "BMP")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_oracle("llava_next", Path(folder))
        server = Server("--model-id", folder, "--max-total-tokens", "700", "--max-batch-total-tokens", "5600")
        try:
            print("| uploads | body, MB | requests/s | `/health` p50, ms | p99, ms | most, ms |")
            print("|---|---|---|---|---|---|")
            for name, (side, kind) in KINDS.items():
                bodies = [make_body(side, kind, seed) for seed in range(options.clients)] if side else []
                count, waits = measure(server, bodies, options.seconds)
                p50, p99, most = (1000 * waits[int(len(waits) * share)] for share in (0.5, 0.99, 1 - 1e-9))
                size = len(bodies[0]) / 1e6 if bodies else 0
                print(f"| {name} | {size:.1f} | {count / options.seconds:.0f} | {p50:.1f} | {p99:.1f} | {most:.1f} |")
        finally:
            server.stop()


def make_body(side: int, kind: str, seed: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2}).encode()


def measure(server: Server, bodies: list[bytes], seconds: float) -> tuple[int, list[float]]:
    """Requests that were answered, and the times that `/health` took, in order of their length."""
    end = time.monotonic() + seconds
    answered: list[int] = []

    def upload(body: bytes) -> None:
        with server.client(headers={"content-type": "application/json"}) as client:
            while time.monotonic() < end:
                answered.append(client.post("/v1/chat/completions", content=body).raise_for_status().status_code)

    threads = [threading.Thread(target=upload, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    waits: list[float] = []
    with server.client() as client:
        while time.monotonic() < end:
            start = time.monotonic()
            client.get("/health").raise_for_status()
            waits.append(time.monotonic() - start)
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    return len(answered), sorted(waits)


if __name__ == "__main__":
    main()
