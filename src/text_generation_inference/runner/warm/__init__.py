"""Before the first request: kernels are compiled, steps measured, shapes met within the memory there is.

`dry_run`: made-up steps. `measure`: what steps take. `warm_up`: every shape of the plan. `record`: what is kept of it.
"""

from text_generation_inference.runner.warm.measure import StepBytes, largest_step_fits, measure_steps
from text_generation_inference.runner.warm.warm_up import warm_up

__all__ = ["StepBytes", "largest_step_fits", "measure_steps", "warm_up"]
