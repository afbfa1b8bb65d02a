# ruff: noqa: B023
"""Ranks on one card: sums through symmetric memory, checked bit by bit and timed. Under two minutes.

    python bench/cuda_ranks.py                     # 2, 4 and 8 processes on one GPU, with the MPS daemon
    python bench/cuda_ranks.py --device cpu        # the same program over gloo, without a GPU
    python bench/cuda_ranks.py --engine            # whole engines instead: a Llama of 7B's width with random weights

Microseconds of one sum inside a captured graph, bf16, rows of 8,192 values; the slowest rank's. One card shows what the
kernels and their signals cost, not what a link between cards does. Kernels of ranks that share a card wait for each
other: without MPS they would take turns by time slice, milliseconds each.
"""

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

HIDDEN, EPS = 8192, 1e-5
SIZES = tuple(16 << 10 << power for power in range(7))  # bytes: 16 KiB to 1 MiB
CALLS, REPLAYS = 32, 12
HBM_BYTES_PER_US = 4.8e6


# -- the processes -----------------------------------------------------------------------------------------------------


@contextmanager
def mps(folder: Path, wanted: bool) -> Any:
    """The CUDA MPS daemon with folders of its own. Yields the environment of its clients."""
    tool = shutil.which("nvidia-cuda-mps-control")
    if not wanted or tool is None:
        print("MPS: not used" if not wanted else "MPS: nvidia-cuda-mps-control is not there; kernels will take turns")
        yield {}
        return
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in own.values():
        Path(path).mkdir()
    said = subprocess.run([tool, "-d"], env={**os.environ, **own}, capture_output=True, text=True, timeout=20)
    print(f"MPS: started (exit {said.returncode}) {said.stdout.strip()} {said.stderr.strip()}", flush=True)
    try:
        yield own if said.returncode == 0 else {}
    finally:
        try:
            subprocess.run([tool], input="quit\n", env={**os.environ, **own}, text=True, timeout=20, check=False)
            print("MPS: ended", flush=True)
        except subprocess.TimeoutExpired:
            print("MPS: does not end by itself", flush=True)
            for log in (folder / "log").glob("*.log"):
                print(log.name, log.read_text()[-500:])


def run_ranks(world: int, folder: Path, extra: list[str], environment: dict[str, str], limit_s: float) -> bool:
    """Whether all ranks came through. Any rank's failure ends all of them at once."""
    meeting = folder / f"meeting-{world}-{time.monotonic_ns()}"
    asked = [sys.executable, __file__, "--world", str(world), "--meeting", str(meeting), *extra]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    errors = [folder / f"rank-{world}-{rank}.txt" for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + limit_s
    try:
        for rank in range(world):
            with errors[rank].open("wb") as file:
                ranks.append(subprocess.Popen([*asked, "--rank", str(rank)], env=environment, stderr=file))
        while any(rank.poll() is None for rank in ranks):
            failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                time.sleep(0.5)  # the first to fail may not be the first to be seen
                failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
                print(f"FAILED at {world} ranks: {failed or f'not done within {limit_s:.0f} s'}", flush=True)
                for number in failed or range(world):
                    print(f"-- rank {number}, exit {ranks[number].poll()}:\n{errors[number].read_text()[-1500:]}")
                return False
            time.sleep(0.05)
        if any(rank.returncode for rank in ranks):
            print(f"FAILED at {world} ranks: exits {[rank.returncode for rank in ranks]}")
            for number, rank in enumerate(ranks):
                if rank.returncode:
                    print(f"-- rank {number}:\n{errors[number].read_text()[-1500:]}")
            return False
        return True
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in ranks:
            rank.wait()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--ranks", default="2,4,8")
    options.add_argument("--seconds", type=float, default=110, help="for everything")
    options.add_argument("--no-mps", action="store_true")
    options.add_argument("--check", action="store_true", help="and no more: nothing is timed")
    options.add_argument("--engine", action="store_true")
    options.add_argument("--dtypes", default="float32,bfloat16", help="of engines")
    options.add_argument("--folder", help="a model, for one engine")
    options.add_argument("--rank", type=int)
    options.add_argument("--world", type=int)
    options.add_argument("--meeting")
    asked = options.parse_args()
    if asked.rank is not None:
        run_rank(asked)
        return
    if asked.folder is not None:
        try:
            run_engine(asked)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # what the end of the interpreter has to say would hide it
    begin, ok = time.monotonic(), True
    with tempfile.TemporaryDirectory() as name, mps(Path(name), asked.device == "cuda" and not asked.no_mps) as clients:
        if asked.engine:
            ok = run_engines(asked, Path(name), clients, begin)
        for world in map(int, asked.ranks.split(",") if not asked.engine else ()):
            left = asked.seconds - (time.monotonic() - begin)
            if left < 5:
                print(f"{world} ranks: no time left")
                ok = False
                break
            more = ["--device", asked.device, *(["--check"] if asked.check else [])]
            ok = run_ranks(world, Path(name), more, clients, min(left, 60)) and ok
    print(f"{'all passed' if ok else 'SOMETHING FAILED'}, {time.monotonic() - begin:.0f} s")
    sys.exit(not ok)


# -- one rank ----------------------------------------------------------------------------------------------------------


def run_rank(asked: argparse.Namespace) -> None:
    import faulthandler

    faulthandler.dump_traceback_later(55, exit=True)  # says where it hangs before it is killed
    begin = time.monotonic()
    import torch

    from text_generation_inference.parallel.collectives import Meeting, _open_store

    torch.set_num_threads(1)
    store = _open_store(asked.rank, asked.world, f"file://{asked.meeting}", 40)
    meeting = Meeting(asked.rank, asked.world, store, 40)
    with torch.inference_mode():
        if asked.device == "cuda":
            on_card(meeting, begin, asked.check)
        else:
            over_gloo(meeting, begin)
    os._exit(0)  # without taking down what others may still use


def exact_sum(parts: list[Any], dtype: Any) -> Any:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)


def make_parts(world: int, shape: tuple[int, ...], dtype: Any, seed: int, kind: str, device: Any) -> list[Any]:
    """What each rank has. "hard": large values that cancel, so that order and width of the sum decide all bits."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    parts = []
    for rank in range(world):
        part = torch.randn(shape, generator=generator, device=device)
        if kind == "hard":
            big = torch.rand(shape, generator=generator, device=device) < 0.3
            part = torch.where(big, torch.full_like(part, 1e4 * (-1) ** rank), part)
        parts.append(part.to(dtype))
    return parts


def gather_numbers(value: float) -> list[float]:
    import torch
    import torch.distributed as dist

    mine = torch.tensor([value], dtype=torch.float64)
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [float(each) for each in found]


def checksum(x: Any) -> float:
    import torch

    words = x.contiguous().view(-1).view(torch.int16 if x.element_size() == 2 else torch.int32).double()
    return float(
        (words * torch.arange(1, words.numel() + 1, device=x.device, dtype=torch.float64).remainder(997)).sum()
    )


def check(collectives: Any, meeting: Any, device: Any) -> int:
    """Against sums in float32 in the order of ranks; all ranks the same bits. -> How many were compared."""
    import torch

    from text_generation_inference.kernels import reference
    from text_generation_inference.kernels.ops import Ops

    rank, world, done = meeting.rank, meeting.world, 0
    kernels = collectives.kernels
    shapes = {
        torch.bfloat16: [(1, 8192), (64, 8192), (7, 1000), (300, 4096)],
        torch.float32: [(3, 4096)],
        torch.float16: [(3, 4096)],
    }
    for dtype in shapes:
        for kind in ("random", "hard"):
            for shape in shapes[dtype]:
                parts = make_parts(world, shape, dtype, 31 * done, kind, device)
                expected = exact_sum(parts, dtype)
                for two_shot in (False, True):
                    found = kernels.all_reduce(parts[rank].clone(), two_shot)
                    assert torch.equal(found, expected), f"sum {dtype} {kind} {shape} two_shot={two_shot}"
                    done += 1
                gathered = kernels.all_gather(parts[rank])
                assert torch.equal(gathered, torch.stack(parts)), f"gather {dtype} {shape}"
                assert torch.equal(collectives.all_reduce(parts[rank].clone()), expected), "chosen by size"
                done += 2
                if not kernels.fits_norm(parts[rank]):
                    continue
                residual, weight = make_parts(2, shape, dtype, done, "random", device)
                weight = weight[0].contiguous()
                normed, total = reference.add_rms_norm(expected, residual, weight, EPS)
                tolerance = 2e-5 if dtype is torch.float32 else 2e-2
                bits = []
                for two_shot in (False, True):
                    found, sums = kernels.add_rms_norm(parts[rank], residual, weight, EPS, two_shot, None)
                    assert torch.equal(sums, total), f"residual {dtype} {kind} {shape} two_shot={two_shot}"
                    torch.testing.assert_close(found, normed, atol=tolerance, rtol=tolerance)
                    bits.append(checksum(found))
                    done += 2
                assert bits[0] == bits[1], "one shot and two differ"
                assert len(set(gather_numbers(bits[0]))) == 1, "ranks differ"
                chosen, _ = collectives.all_reduce_add_rms_norm(Ops(), parts[rank].clone(), residual, weight, EPS)
                torch.testing.assert_close(chosen, normed, atol=tolerance, rtol=tolerance)
    return done


def check_replays(collectives: Any, meeting: Any, device: Any) -> int:
    """A captured step of sums of several sizes, replayed with new numbers, ranks out of step with each other."""
    import torch

    rank, world, replays = meeting.rank, meeting.world, 24
    kernels, dtype = collectives.kernels, torch.bfloat16
    shapes = [(1, 8192), (64, 8192), (1, 8192), (5, 4096), (200, 2048)]
    inputs = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    residual = torch.ones(5, 4096, dtype=dtype, device=device)
    weight = torch.ones(4096, dtype=dtype, device=device)
    stream = torch.cuda.Stream()

    def step() -> list[Any]:
        outs = [kernels.all_reduce(x.clone(), two_shot=number % 2 == 1) for number, x in enumerate(inputs)]
        outs.append(kernels.add_rms_norm(inputs[3], residual, weight, EPS, False, None)[1])
        outs.append(kernels.all_gather(inputs[0]))
        return outs

    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        outs = step()
        graph.capture_end()
        for number in range(replays):
            every = [make_parts(world, shape, dtype, 1000 + number, "hard", device) for shape in shapes]
            for x, parts in zip(inputs, every, strict=True):
                x.copy_(parts[rank])
            if random.random() < 0.3:
                stream.synchronize()
                time.sleep(0.002 * random.random())
            graph.replay()
            if number % 4 == 0:
                graph.replay()  # twice in a row: buffers are used again at once
            expected = [exact_sum(parts, dtype) for parts in every]
            for found, wanted in zip(outs, expected, strict=False):
                assert torch.equal(found, wanted), f"replay {number} {tuple(wanted.shape)}"
            assert torch.equal(outs[5], expected[3] + residual), f"replay {number}: residual"
            assert torch.equal(outs[6], torch.stack(every[0])), f"replay {number}: gather"
    return replays


def graph_us(work: Callable[[], object]) -> float:
    """Of one of CALLS calls in a captured graph, the slowest rank's."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            work()
        graph.capture_end()
        graph.replay()
        stream.synchronize()
        gather_numbers(0)  # all begin together
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end))
    return max(gather_numbers(1e3 * statistics.median(times[2:]) / CALLS))


def on_card(meeting: Any, begin: float, only_check: bool) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    from text_generation_inference.devices import cuda_ranks
    from text_generation_inference.kernels.triton import norms_rotary
    from text_generation_inference.parallel.symmetric import measure_ways

    gc.disable()  # pinned memory that is freed during a capture would be part of it
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    collectives: Any = cuda_ranks.join_ranks(meeting, device, True)[0]
    kernels, world, say = collectives.kernels, meeting.world, meeting.rank == 0
    joined = time.monotonic() - begin
    checked = check(collectives, meeting, device)
    replays = check_replays(collectives, meeting, device)
    if say:
        print(f"\n{world} ranks: joined after {joined:.1f} s, {checked} sums and {replays} replays exact,"
              f" at most {kernels.num_programs} programs, {time.monotonic() - begin:.1f} s", flush=True)  # fmt: skip
    if only_check:
        gather_numbers(0)
        return
    start = time.monotonic()
    ways = measure_ways(kernels, None, cuda_ranks.microseconds, cuda_ranks.make_values(device))
    if say:
        print(f"measured in {1e3 * (time.monotonic() - start):.0f} ms: {ways.describe('')}", flush=True)
        print("    KiB   one   two | fused one  two | sum, norm apart | torch one  two | all ranks' bytes", flush=True)
    group: Any = dist.group.WORLD
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    theirs = symmetric_memory.empty(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(theirs, group)
    for size in SIZES:
        x = torch.zeros(size // 2 // HIDDEN, HIDDEN, dtype=torch.bfloat16, device=device)
        residual, part = torch.zeros_like(x), theirs[: size // 2].zero_()
        ways: list[Callable[[], object]] = [
            lambda: kernels.all_reduce(x, False),
            lambda: kernels.all_reduce(x, True),
            lambda: kernels.add_rms_norm(x, residual, weight, EPS, False, None),
            lambda: kernels.add_rms_norm(x, residual, weight, EPS, True, None),
            lambda: norms_rotary.add_rms_norm(kernels.all_reduce(x, size > 256 << 10), residual, weight, EPS),
            lambda: torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group.group_name),
            lambda: torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group.group_name),
        ]
        times = [graph_us(way) for way in ways]
        if say:
            floor = world * (world + 2) * size / HBM_BYTES_PER_US
            one, two, fused, fused_two, apart, torch_one, torch_two = times
            print(f"{size >> 10:>7}{one:>6.1f}{two:>6.1f} |{fused:>10.1f}{fused_two:>5.1f} |{apart:>16.1f} |"
                  f"{torch_one:>10.1f}{torch_two:>5.1f} |{floor:>8.2f}", flush=True)  # fmt: skip
    version = torch.cuda.nccl.version()
    if say and world == 2:
        shown = ".".join(map(str, version))
        print(
            f"NCCL {shown}: ranks that share a card need 2.30.3, left out" if version < (2, 30, 3) else f"NCCL {shown}"
        )
    gather_numbers(0)
    torch.cuda.synchronize()


def over_gloo(meeting: Any, begin: float) -> None:
    import torch

    collectives = meeting.connect("gloo")
    rank, world = meeting.rank, meeting.world
    for kind in ("random", "hard"):
        parts = make_parts(world, (3, 4096), torch.float32, 5, kind, "cpu")
        found = collectives.all_reduce(parts[rank].clone())
        torch.testing.assert_close(found, exact_sum(parts, torch.float32), atol=1e-2, rtol=1e-5)
        assert len(set(gather_numbers(checksum(found)))) == 1, "ranks differ"
        assert torch.equal(torch.stack(collectives.all_gather(parts[rank])), torch.stack(parts))
    rows = []
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16)
        times = []
        for _ in range(8):
            gather_numbers(0)
            start = time.perf_counter()
            collectives.all_reduce(x)
            times.append(time.perf_counter() - start)
        rows.append((size >> 10, round(1e6 * max(gather_numbers(statistics.median(times))))))
    if rank == 0:
        print(f"{world} ranks over gloo, {time.monotonic() - begin:.1f} s: (KiB, us) {json.dumps(rows)}", flush=True)
    gather_numbers(0)


# -- whole engines -----------------------------------------------------------------------------------------------------


def write_model(folder: Path, small: bool) -> None:
    """The config of eight layers as wide as Llama 7B's; `small`: for a CPU."""
    hidden, width, heads, vocab, layers = (256, 704, 8, 512, 2) if small else (4096, 11008, 32, 32000, 8)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": width,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers, "vocab_size": vocab,
        "max_position_embeddings": 2048, "rms_norm_eps": EPS, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def run_engine(asked: argparse.Namespace) -> None:
    """One engine with its ranks: tokens, greedy and drawn, and the milliseconds of a step, as a line of JSON."""
    from text_generation_inference.config import ServerConfig
    from text_generation_inference.drive import run_requests
    from text_generation_inference.engine.build import start_engine
    from text_generation_inference.types import GenerationRequest, SamplingParams

    begin = time.monotonic()
    engine = start_engine(
        ServerConfig(
            model_id=asked.folder, device=asked.device, dtype=asked.dtypes, num_shard=asked.world, max_batch_size=4,
            max_input_tokens=64, max_total_tokens=128, max_batch_prefill_tokens=128, max_batch_total_tokens=1024,
            prefix_caching=False, load_format="dummy",
        )
    )  # fmt: skip
    started = time.monotonic() - begin

    ways: list[dict[str, Any]] = [  # joined from parts, gathered, adjusted
        {"do_sample": True}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
        {"do_sample": True, "watermark": True, "frequency_penalty": 0.5}, {"logit_bias": {300: 2.0}, "top_n_tokens": 3},
    ]  # fmt: skip

    def generate(
        count: int, new: int, first: int, ways: list[dict[str, Any]] | None = None
    ) -> tuple[list[list[int]], float]:
        requests = [
            GenerationRequest(
                id=first + number, token_ids=[(7 * number + 13 * place) % 500 + 3 for place in range(9 + 11 * number)],
                sampling=SamplingParams(**(ways[number] if ways else {})), max_new_tokens=new, stop_token_ids=[],
                seed=number,
            )
            for number in range(count)
        ]  # fmt: skip
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        times = [time.perf_counter()]
        for out in run_requests(engine.loop, requests):
            for number, token in zip(out.request_ids, out.token_ids, strict=True):
                tokens[number].append(token)
            times.append(time.perf_counter())
        steps = [after - before for before, after in pairwise(times)]
        return list(tokens.values()), 1e3 * statistics.median(steps[4:])

    generate(4, 12, 0)
    several, several_ms = generate(4, 40, 100)
    one, one_ms = generate(1, 60, 200)
    mixed, _ = generate(4, 24, 300, ways)
    drawn, _ = generate(4, 24, 400, ways[:1] * 4)
    steps = engine.rank.runner.steps
    found = {
        "tokens": [*several, *one, *mixed, *drawn], "ms": [one_ms, several_ms], "started": started,
        "captured": steps.num_captured,
        "notes": [note for note in engine.notes if "rank" in note or "sums" in note],
    }  # fmt: skip
    engine.close()
    print(json.dumps(found), flush=True)
    os._exit(0)


def tell(stderr: str) -> str:
    """Its beginning and its end, and what looks like a reason between them."""
    lines = stderr.splitlines()
    if len(lines) <= 60:
        return stderr[-6000:]
    reasons = [line for line in lines[20:-20] if "rror" in line][:20]
    return "\n".join([*lines[:20], "...", *reasons, "...", *lines[-20:]])[-6000:]


def run_engines(asked: argparse.Namespace, folder: Path, environment: dict[str, str], begin: float) -> bool:
    """One rank, then several: the same tokens."""
    write_model(folder / "model", asked.device == "cpu")
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", **environment}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    print("dtype     ranks  ms/step: 1 row, 4 rows   tokens as one rank's  captured  start s", flush=True)
    ok = True
    for dtype in asked.dtypes.split(","):
        alone: list[list[int]] = []
        for world in (1, *map(int, asked.ranks.split(","))):
            left = asked.seconds - (time.monotonic() - begin)
            command = [sys.executable, __file__, "--folder", str(folder / "model"), "--device", asked.device]
            command += ["--world", str(world), "--dtypes", dtype]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=max(1, left), check=False
                )
            except subprocess.TimeoutExpired as error:
                said = (error.stderr or b"").decode() if isinstance(error.stderr, bytes) else error.stderr or ""
                print(f"{dtype:<10}{world:>5}  not done within {left:.0f} s\n{tell(said)}", flush=True)
                return False
            if done.returncode or not done.stdout.strip():
                print(f"{dtype:<10}{world:>5}  FAILED, exit {done.returncode}\n{tell(done.stderr)}", flush=True)
                for log in (folder / "log").glob("*.log"):
                    print(f"-- MPS {log.name}:\n{log.read_text()[-800:]}", flush=True)
                ok = False
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            alone = alone or found["tokens"]
            pairs = [a == b for x, y in zip(alone, found["tokens"], strict=True) for a, b in zip(x, y, strict=True)]
            same = sum(pairs) / len(pairs)
            ok = ok and (dtype != "float32" or same == 1)
            (one, four), notes = found["ms"], "; ".join(found["notes"])
            row = f"{dtype:<10}{world:>5}{one:>13.2f}{four:>9.2f}{same:>21.1%}{found['captured']:>13}"
            print(f"{row}{found['started']:>9.1f}  {notes}", flush=True)
    return ok


if __name__ == "__main__":
    main()
