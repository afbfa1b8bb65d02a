"""Each kind of harm once to a rank of two, under load. bench/rank_faults.py does each to both, again and again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_harms import HARMS, RankVictim, make_tiny


@pytest.fixture(scope="module")
def victim(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankVictim]:
    folder = tmp_path_factory.mktemp("ranks")
    found = RankVictim(folder, "--model-id", str(make_tiny(folder / "model")), cache=model_cache, slack_s=8.0)
    yield found
    found.stop()


@pytest.mark.parametrize(("kind", "rank"), [("kill", 0), ("stop", 1), ("raise", 1), ("memory", 0), ("hang", 1)])
def test_a_rank_is_harmed_under_load(victim: RankVictim, kind: str, rank: int) -> None:
    assert kind in HARMS
    victim.harm(kind, rank)
