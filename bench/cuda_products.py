# ruff: noqa: B023, E501
"""Matrix products on a GPU: the libraries' and ours, for the shapes of one model and numbers of rows.

    python bench/cuda_products.py [--only vector,library,fp8,skinny] [--json FILE]

Times are medians over replays of captured calls that go through the weights of several layers, so that no weight is
still in the cache of the chip.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

TILES = [
    (1, 4096, 4), (2, 4096, 4), (4, 4096, 4), (4, 4096, 8), (8, 4096, 8), (4, 2048, 4), (8, 2048, 4), (8, 1024, 4),
    (16, 1024, 8), (4, 1024, 2), (2, 2048, 2), (16, 512, 4),
]  # fmt: skip
FEW_TILES = [(2, 4096, 4), (4, 1024, 4), (2, 2048, 4)]
MODELS = {"llama-3.1-8b": (4096, 14336, 6144, 128256), "llama-2-7b": (4096, 11008, 12288, 32000)}


def graph_ms(work, repeats: int = 12) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def weights(count: int, shape: tuple[int, int], fp8: bool) -> list:
    from tgi.kernels.fp8 import quantize_weight

    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    return [quantize_weight(w) for w in made] if fp8 else made


def skinny(results: list[dict], share: tuple[int, int] | None = None) -> None:
    """Products of some rows with each tiling; with `share`, only compiles its part of them."""
    from tgi.kernels import fp8
    from tgi.kernels.triton.skinny import SkinnyProduct, Tiling

    op = SkinnyProduct()
    number = 0
    for eight in (False, True):
        hidden, width, qkv, _ = MODELS["llama-2-7b" if eight else "llama-3.1-8b"]
        for name, n, k in (
            ("qkv", qkv, hidden),
            ("o", hidden, hidden),
            ("gate_up", 2 * width, hidden),
            ("down", hidden, width),
        ):
            stored = weights(1 if share else 5, (n, k), eight)
            for rows in (16, 64, 96) if eight else (16, 64, 128):
                x = torch.randn(rows, k, device="cuda").bfloat16()
                given = fp8.quantize_rows(x, stored[0]) if eight else x
                out = torch.full((rows, n), 7.0, device="cuda", dtype=torch.bfloat16)
                wanted = None if share else fp8.linear(given, stored[0], None, x.dtype) if eight else x @ stored[0].t()
                tried = []
                for bn, bk, stages, warps in (
                    (64, 64, 4, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8),
                    (128, 128, 3, 4), (64, 256, 3, 4), (128, 128, 4, 8),
                ):  # fmt: skip
                    if eight:
                        bk *= 2
                    row_bytes = max(16, 1 << (rows - 1).bit_length())
                    if (bn + row_bytes) * bk * (1 if eight else 2) * stages > 220_000:
                        continue
                    tiles = -(-n // bn)
                    choices = [s for s in (1, 2, 4, 8) if 100 <= tiles * s <= 700 and k // s >= 2 * bk][:3]
                    for splits in choices or [1]:
                        tiling = Tiling(bn, bk, splits, stages, warps)
                        number += 1
                        if share and number % share[1] != share[0]:
                            continue
                        try:
                            op(given, stored[0], out, None, tiling)
                            if share:
                                continue
                            wrong = error(out, wanted)
                            ms = graph_ms(lambda: [op(given, w, out, None, tiling) for w in stored], 8) / len(stored)
                        except Exception as failure:
                            print(name, rows, tiling, type(failure).__name__, str(failure)[:80])
                            continue
                        tried.append((1e3 * ms, bn, bk, splits, stages, warps, wrong))
                if share:
                    continue
                tried.sort()
                num_bytes = n * k * (1 if eight else 2)
                shown = "; ".join(f"{us:.1f} us {num_bytes / us / 1e6:.2f} TB/s {t}" for us, *t, _ in tried[:4])
                print(
                    f"skinny {'fp8' if eight else 'bf16'} {name} rows {rows}: {shown}; worst err {max(t[-1] for t in tried):.4f}",
                    flush=True,
                )
                results.append({"skinny": name, "fp8": eight, "rows": rows, "tried": tried})


def vector(results: list[dict]) -> None:
    """Products of few rows: each shape of launch, then whole chains of layers."""
    from tgi.kernels import fp8, reference
    from tgi.kernels.triton import overlap
    from tgi.kernels.triton.vector import vector_product

    for eight in (False, True):
        hidden, width, qkv, _ = MODELS["llama-2-7b" if eight else "llama-3.1-8b"]
        for name, n, k, norm, gate in (
            ("qkv", qkv, hidden, True, None),
            ("o", hidden, hidden, False, None),
            ("gate_up", width, hidden, True, "silu"),
            ("down", hidden, width, False, None),
        ):
            stored = weights(6, (n * (2 if gate else 1), k), eight)
            gain = torch.rand(k, device="cuda").bfloat16() + 0.5
            for rows in (1,):
                x = torch.randn(rows, k, device="cuda").bfloat16()
                y = reference.rms_norm(x, gain, 1e-5) if norm else x
                w = stored[0]
                y = fp8.linear(fp8.quantize_rows(y, w), w, None, x.dtype) if eight else y @ w.t()
                wanted = reference.silu_mul(y) if gate else y
                peaks = x.float().abs().amax(1) if name == "down" else None
                num_bytes = n * (2 if gate else 1) * k * (1 if eight else 2)
                tried = []
                for bn, bk, warps in TILES if rows == 1 else FEW_TILES:
                    out = torch.full((rows, n), 7.0, device="cuda", dtype=torch.bfloat16)

                    def work():
                        for w in stored:
                            vector_product(
                                x, w, out, None, (gain, 1e-5) if norm else None, gate, False, peaks, None,
                                (bn, bk, warps),
                            )  # fmt: skip

                    try:
                        vector_product(
                            x, stored[0], out, None, (gain, 1e-5) if norm else None, gate, False, peaks, None,
                            (bn, bk, warps),
                        )  # fmt: skip
                        wrong = error(out, wanted)
                        ms = graph_ms(work, 8) / len(stored)
                    except Exception as failure:
                        print(name, rows, bn, bk, warps, type(failure).__name__, str(failure)[:80])
                        continue
                    tried.append((num_bytes / ms / 1e9, bn, bk, warps, wrong))
                tried.sort(reverse=True)
                shown = "; ".join(f"{t:.2f} TB/s {bn}x{bk} w{w} err {e:.4f}" for t, bn, bk, w, e in tried[:4])
                print(
                    f"vector {'fp8' if eight else 'bf16'} {name} rows {rows}: {shown}; worst err {max(t[4] for t in tried):.4f}",
                    flush=True,
                )
                results.append({"vector": name, "fp8": eight, "rows": rows, "tried": tried})
        stored = None
        layers = [
            [
                weights(1, shape, eight)[0]
                for shape in ((qkv, hidden), (hidden, hidden), (2 * width, hidden), (hidden, width))
            ]
            for _ in range(16)
        ]
        gain = torch.rand(hidden, device="cuda").bfloat16() + 0.5
        h = torch.randn(1, hidden, device="cuda").bfloat16()
        a, b = torch.empty(1, qkv, device="cuda").bfloat16(), torch.empty(1, width, device="cuda").bfloat16()
        peaks = torch.ones(1, device="cuda")
        total = sum((w.data if eight else w).numel() * (1 if eight else 2) for layer in layers for w in layer)
        for on in (False, True):
            overlap.enabled = on

            def chain():
                for w1, w2, w3, w4 in layers:
                    vector_product(h, w1, a, None, (gain, 1e-5))
                    vector_product(a[:, :hidden], w2, h, add=True)
                    vector_product(h, w3, b, None, (gain, 1e-5), "silu", peaks_out=peaks if eight else None)
                    vector_product(b, w4, h, add=True, peaks_in=peaks)

            ms = graph_ms(chain)
            print(
                f"chain {'fp8' if eight else 'bf16'} overlap {on}: {ms / 16 * 32:.3f} ms for 32 layers, {total / ms / 1e9:.2f} TB/s",
                flush=True,
            )
            results.append({"chain": eight, "overlap": on, "ms32": ms * 2, "tb_s": total / ms / 1e9})
        layers = None
        torch.cuda.empty_cache()


def library(results: list[dict]) -> None:
    hidden, width, qkv, vocab = MODELS["llama-3.1-8b"]
    for name, n, k in (
        ("qkv", qkv, hidden),
        ("o", hidden, hidden),
        ("gate_up", 2 * width, hidden),
        ("down", hidden, width),
        ("head", vocab, hidden),
    ):
        stored = weights(2 if name == "head" else 4, (n, k), False)
        cells = []
        for rows in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 8192):
            if name == "head" and rows > 1024:
                continue
            x = torch.randn(rows, k, device="cuda").bfloat16()
            ms = graph_ms(lambda: [torch.nn.functional.linear(x, w) for w in stored]) / len(stored)
            cells.append(
                f"{rows}: {1e3 * ms:.0f} us {2 * n * k / ms / 1e9:.2f} TB/s {2 * rows * n * k / ms / 1e9:.0f} TF"
            )
            results.append({"library": name, "rows": rows, "us": 1e3 * ms})
        print("bf16", name, " | ".join(cells), flush=True)


def eight_bit(results: list[dict]) -> None:
    from tgi.kernels import fp8

    hidden, width, qkv, _ = MODELS["llama-2-7b"]
    one = torch.ones((), device="cuda")
    for name, n, k in (
        ("qkv", qkv, hidden),
        ("o", hidden, hidden),
        ("gate_up", 2 * width, hidden),
        ("down", hidden, width),
    ):
        stored = weights(4, (n, k), True)
        cells = []
        for rows in (1, 16, 64, 81, 96, 163, 176, 256, 1230, 1232, 8192, 16384):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            q = fp8.quantize_rows(x, stored[0])
            kinds = {
                "tensor": lambda: [
                    torch._scaled_mm(q.data, w.data.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
                    for w in stored
                ],
                "row": lambda: [
                    torch._scaled_mm(
                        q.data,
                        w.data.t(),
                        q.scale[:, None],
                        w.scale[None, :],
                        out_dtype=torch.bfloat16,
                        use_fast_accum=True,
                    )
                    for w in stored
                ],
                "row slow": lambda: [
                    torch._scaled_mm(q.data, w.data.t(), q.scale[:, None], w.scale[None, :], out_dtype=torch.bfloat16)
                    for w in stored
                ],
            }
            if rows in (64, 8192):
                a = torch.rand(-(-k // 128), rows, device="cuda").t()
                for label, b in (
                    ("square nk", torch.rand(n // 128, -(-k // 128), device="cuda").t()),
                    ("square kn", torch.rand(-(-k // 128), n // 128, device="cuda")),
                ):
                    kinds[label] = lambda b=b: [
                        torch._scaled_mm(q.data, w.data.t(), a, b, out_dtype=torch.bfloat16) for w in stored
                    ]
            for kind, work in kinds.items():
                try:
                    if kind == "row":
                        wrong = error(work()[0], fp8.linear(q, stored[0], None, torch.bfloat16)) if rows < 2000 else 0
                        if wrong > 0.01:
                            print("row", name, rows, "error", wrong)
                    ms = graph_ms(work, 8) / len(stored)
                except Exception as failure:
                    print(kind, name, rows, str(failure)[:300].replace("\n", " "))
                    continue
                cells.append(
                    f"{rows} {kind}: {1e3 * ms:.0f} us {n * k / ms / 1e9:.2f} TB/s {2 * rows * n * k / ms / 1e9:.0f} TF"
                )
                results.append({"fp8": name, "kind": kind, "rows": rows, "us": 1e3 * ms})
        print("fp8", name, "\n    ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="vector,library,fp8,skinny")
    parser.add_argument("--json")
    parser.add_argument("--share", help="N/M: only compile this share of the variants")
    options = parser.parse_args()
    if options.share:
        one, of = options.share.split("/")
        return skinny([], (int(one), int(of)))
    if "skinny" in options.only:
        others = [subprocess.Popen([sys.executable, __file__, "--share", f"{n}/12"]) for n in range(12)]
        for other in others:
            other.wait(150)
    results: list[dict] = []
    for name, part in (("library", library), ("fp8", eight_bit), ("vector", vector), ("skinny", skinny)):
        if name in options.only.split(","):
            part(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
