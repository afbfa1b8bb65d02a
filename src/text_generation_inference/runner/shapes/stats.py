"""Which shapes a bucketed runner has met, and how much of its work was padding.

A *key* is what graphs are found by: the shapes of all tensors of a pass. It knows every key that was
warmed up; whatever comes later and is not in it is a miss, counted and told once for each key.
"""

from collections import Counter

from text_generation_inference.kernels.block_lists import Key
from text_generation_inference.runner.shapes.buckets import Bucket, BucketPlan
from text_generation_inference.types import BucketStats


class ShapeStats:
    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.warmed: set[Key] = set()
        self.news: list[str] = []  # misses not told yet
        self.planned = frozenset(plan.shapes)
        self._missed: set[Key] = set()
        self._bypassed = 0
        self._computed: Counter[str] = Counter()  # tokens, by phase
        self._needed: Counter[str] = Counter()

    def on_pass(self, key: Key, bucket: Bucket, needed: int, bypassed: bool) -> None:
        """A pass with so many real tokens."""
        self._computed[bucket.phase] += bucket.num_tokens
        self._needed[bucket.phase] += needed
        self._bypassed += bypassed
        if key in self.warmed or key in self._missed:
            return
        self._missed.add(key)
        why = "was not warmed up" if bucket in self.planned else "is not in the bucket plan"
        self.news.append(f"a step of {bucket} {why}: it was prepared while requests waited")

    def take_news(self) -> list[str]:
        news, self.news = self.news, []
        return news

    def stats(self, num_captured: int) -> BucketStats:
        return BucketStats(
            num_planned=len(self.planned),
            num_warmed=len(self.warmed),
            num_captured=num_captured,
            num_bypassed=self._bypassed,
            num_unplanned=len(self._missed),
            prefill_computed=self._computed["prefill"],
            prefill_needed=self._needed["prefill"],
            decode_computed=self._computed["decode"],
            decode_needed=self._needed["decode"],
        )
