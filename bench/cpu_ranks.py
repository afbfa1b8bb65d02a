"""What ranks cost on a CPU: a decode step of the embedded model at 1, 2 and 4 ranks over gloo, from one run.

    python bench/cpu_ranks.py [--ranks 1,2,4] [--rows 1,8] [--steps 60]

Ranks on one CPU share its cores, so there is nothing to win: the figures say what the plan, the sums (two a layer) and
the gathers cost. Each engine runs in a process of its own, one after the other. Ranks have a core's thread each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def run_engine(world: int, rows: list[int], steps: int) -> None:
    from text_generation_inference.config import ServerConfig
    from text_generation_inference.engine.build import start_engine
    from text_generation_inference.types import GenerationRequest, SamplingParams

    engine = start_engine(
        ServerConfig(device="cpu", num_shard=world, num_threads=1, max_total_tokens=512, prefix_caching=False)
    )
    loop = engine.loop
    for count in rows:
        for number in range(count):
            ids = [(31 * number + 7 * place) % 40000 + 100 for place in range(16)]
            loop.add(
                GenerationRequest(
                    id=number,
                    token_ids=ids,
                    sampling=SamplingParams(),
                    max_new_tokens=3 * steps,
                    stop_token_ids=[],
                    seed=0,
                )
            )
        for _ in range(10):
            loop.step()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            loop.step()
            times.append(1e3 * (time.perf_counter() - begin))
        for number in range(count):
            loop.abort(number)
        while loop.has_work:
            loop.step()
        found = {"world": world, "rows": count, "ms": statistics.median(times), "best": min(times)}
        print(json.dumps(found), flush=True)
    begun = getattr(engine.rank, "_rank", engine.rank).num_collectives
    print(json.dumps({"world": world, "collectives": begun}), flush=True)
    engine.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", default="1,2,4")
    options.add_argument("--rows", default="1,8")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--world", type=int, help="one engine, in this process")
    asked = options.parse_args()
    rows = [int(text) for text in asked.rows.split(",")]
    if asked.world is not None:
        run_engine(asked.world, rows, asked.steps)
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    print("ranks  rows   ms/step (median)   best   over one rank")
    alone: dict[int, float] = {}
    for world in map(int, asked.ranks.split(",")):
        command = [sys.executable, __file__, "--world", str(world), "--rows", asked.rows, "--steps", str(asked.steps)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        for found in map(json.loads, done.stdout.splitlines()):
            if "rows" in found:
                one = alone.setdefault(found["rows"], found["ms"])
                shown = f"{found['ms']:>15.2f}{found['best']:>10.2f}{found['ms'] - one:>+14.2f} ms"
                print(f"{world:>5}{found['rows']:>6}{shown}", flush=True)
            else:
                print(f"{world:>5}: {found['collectives']} sums and gathers in all", flush=True)


if __name__ == "__main__":
    main()
