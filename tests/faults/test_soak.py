"""A short soak; bench/soak.py runs the same for as long as you like."""

import asyncio
from pathlib import Path

from soaking import Soak
from traffic import running

SECONDS = 15


def test_nothing_goes_wrong_for_a_while(model_cache: Path) -> None:
    with running("--max-total-tokens", "1024", "--max-batch-total-tokens", "16384", cache=model_cache) as server:
        soak = Soak(server, SECONDS, kills=["engine", "api"])
        asyncio.run(soak.run())
        assert not soak.wrong, soak.wrong[:3]
        assert not soak.unexpected, soak.unexpected[:5]
        assert soak.compared > 3, soak.answers
        assert [role for role, _ in soak.recoveries_s] == ["engine", "api"]
        assert all(seconds < 60 for _, seconds in soak.recoveries_s), soak.recoveries_s
        # Seconds tell of a descriptor or a thread per request, not of memory: that is what the long run is for.
        for role in ("engine", "api", "launcher"):
            first, last = soak.samples[role][0], soak.samples[role][-1]
            assert last.descriptors <= first.descriptors + 40, role
            assert last.threads <= first.threads + 20, role
        assert server.stop() == 0, server.log[-3000:]
