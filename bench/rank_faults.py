"""Everything that can happen to a rank, to each of two ranks, again and again: what do clients see, what is left?

    python bench/rank_faults.py [--times 20] [--only kill,stop,raise,memory,hang] [--ranks 0,1] [--tiny] [--json FILE]

The launcher with `--num-shard 2` on the embedded model, on a CPU, one server for all of it: four streams and two whole
answers are under way each time. `error`: the last of them has ended with a typed error; `back`: a new request has the
answer from before. After each harm processes, files, /dev/shm and the launcher's and the api process's open files must
be as they were. Only the launcher's patience is changed: it would end after six failures in a row. Exits with 1 if
something was not as it should be.
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "faults"))

from rank_harms import HARMS, LIMIT_S, Outcome, RankVictim, make_tiny

MOST_GROWTH_KB = 8192  # of the launcher, over all harms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="each harm to each rank (%(default)s)")
    parser.add_argument("--only", default=",".join(HARMS), help="kinds of harm (%(default)s)")
    parser.add_argument("--ranks", default="0,1", help="who is harmed (%(default)s)")
    parser.add_argument("--slack", type=float, default=4.0, help="seconds that a busy machine may add (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers: restarts take less time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [(kind, int(rank)) for kind in options.only.split(",") for rank in options.ranks.split(",")]
    rows: dict[tuple[str, int], list[Outcome]] = {key: [] for key in chosen}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = ("--model-id", str(make_tiny(Path(folder) / "model"))) if options.tiny else ()
        victim = RankVictim(Path(folder), *model, slack_s=options.slack)
        try:
            victim.harm("kill", 1)  # what is allocated once is there now
            first_kb = victim.rss_kb()
            with suppress(KeyboardInterrupt):  # then the table says what was done
                for kind, rank in chosen * options.times:
                    try:
                        outcome = victim.harm(kind, rank)
                    except AssertionError as error:
                        failed.append(f"{kind}, rank {rank}: {error}")
                        print(failed[-1], file=sys.stderr, flush=True)
                        victim.recover()
                    else:
                        rows[kind, rank].append(outcome)
                        print(f"{kind} {rank}: {outcome}", file=sys.stderr, flush=True)
            last_kb = victim.rss_kb()
            victim.stop()
        finally:
            victim.server.process.kill()
    print(f"| --step-timeout-s {LIMIT_S:g} | rank | times | error, s: median, most | back, s: median, most |")
    print("|---|---|---|---|---|")
    for (kind, rank), outcomes in rows.items():
        error_s, back_s = [o.error_s for o in outcomes], [o.back_s for o in outcomes]
        spans = [f"{statistics.median(s):.2f}, {max(s):.2f}" if s else "-" for s in (error_s, back_s)]
        print(f"| {HARMS[kind].words} | {rank} | {len(outcomes)} | {spans[0]} | {spans[1]} |")
    print(f"{len(failed)} not as they should be; the launcher: {first_kb} KB at first, {last_kb} KB at last")
    if options.json:
        found = {f"{kind} {rank}": [[o.error_s, o.back_s, o.error] for o in rows[kind, rank]] for kind, rank in rows}
        options.json.write_text(json.dumps({"outcomes": found, "failed": failed, "rss_kb": [first_kb, last_kb]}))
    return 1 if failed or last_kb - first_kb > MOST_GROWTH_KB else 0


if __name__ == "__main__":
    sys.exit(main())
