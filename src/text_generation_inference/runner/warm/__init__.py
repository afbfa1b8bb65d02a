"""Before the first request: kernels are compiled, steps measured, shapes met within the memory there is.

`long_prompts`: the slowest kernels, asked for early. `dry_run`: made-up steps. `measure`: what steps take. `warm_up`:
every shape of the plan. `record`: what is kept of it.
"""

from text_generation_inference.runner.warm.dry_run import SHORTEST
from text_generation_inference.runner.warm.long_prompts import attend_long_prompt
from text_generation_inference.runner.warm.measure import StepBytes, largest_step_fits, measure_steps
from text_generation_inference.runner.warm.warm_up import warm_up

__all__ = ["SHORTEST", "StepBytes", "attend_long_prompt", "largest_step_fits", "measure_steps", "warm_up"]
