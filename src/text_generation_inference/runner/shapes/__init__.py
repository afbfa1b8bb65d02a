"""The shapes of passes: which there are, which one fits a pass, and what was met.

`plan`: from the settings to a `ShapePlan`. `buckets`: every pass is padded to a shape. `captured`: steps are padded to
captured sizes, or exact. `stats`: what was met, and how much was padding.
"""

from text_generation_inference.runner.shapes.buckets import Bucket, BucketPlan, PlanLimits
from text_generation_inference.runner.shapes.captured import EXACT, CapturedShapes
from text_generation_inference.runner.shapes.plan import (
    ShapePlan,
    describe_plan,
    guess_limits,
    limits_from,
    limits_graphs,
    plan_shapes,
    warms_up,
)
from text_generation_inference.runner.shapes.stats import ShapeStats

__all__ = [
    "EXACT",
    "Bucket",
    "BucketPlan",
    "CapturedShapes",
    "PlanLimits",
    "ShapePlan",
    "ShapeStats",
    "describe_plan",
    "guess_limits",
    "limits_from",
    "limits_graphs",
    "plan_shapes",
    "warms_up",
]
