"""Made-up steps before the first real one: they compile the kernels and show how much memory the largest step takes.

They go through a runner as real ones do, over a cache of one block that belongs to nobody: what is computed
means nothing, and nothing of it is left when the runner is dropped.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from text_generation_inference.runner.runner import Runner
from text_generation_inference.types import Admission, Chunk, GenerationRequest, SamplingParams, StepPlan, StepResult

SHORTEST = 256  # tokens that a request of a dry_run must be allowed
PLAIN = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, typical_p=0.9, min_p=0.01)
EVERYTHING = SamplingParams(
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias={0: 0.5},
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    typical_p=0.9,
    min_p=0.01,
    top_n_tokens=5,
)
_PROMPT = SamplingParams(decoder_input_details=True)
_PROMPT_LENGTHS = (1, 5, 16, 33, 128, 1000)
_SHORT = 128
_PREFIX = 16  # tokens that a prompt already has in the cache
_SIZES_AT_A_TIME = SHORTEST // 2  # requests get longer by a token with each


class DryRun:
    """Plans steps for a runner that nobody else uses."""

    def __init__(self, runner: Runner, num_slots: int, block_size: int) -> None:
        self.steps = runner.steps
        self._runner, self._num_slots, self._block_size = runner, num_slots, block_size
        self._step = 0
        self._slots: list[int] = []  # taken
        self._decoding: list[int] = []
        self._futures: list[Future[StepResult]] = []

    def prompts(
        self, lengths: Sequence[int], params: SamplingParams = PLAIN, num_decode: int = 0, start: int = 0
    ) -> None:
        """Requests of these lengths in one step from `start` on, beside some that decode; all other requests go."""
        kept = self._decoding[:num_decode]
        staying = set(kept)
        going = [slot for slot in self._slots if slot not in staying]
        free = [slot for slot in range(self._num_slots) if slot not in staying][: len(lengths)]
        admit = [self._admit(slot, length, params) for slot, length in zip(free, lengths, strict=True)]
        chunks = [Chunk(slot, start, length, True) for slot, length in zip(free, lengths, strict=True)]
        leave = self._decoding[num_decode:]
        self._slots, self._decoding = kept + free, kept
        self._launch(release=going, admit=admit, leave=leave, decode=bool(kept), chunks=chunks)

    def join(self, rows: int, params: SamplingParams) -> None:
        """So many requests of one token decode, without a pass for their prompts; all others are gone."""
        assert not self._slots
        self._slots = list(range(rows))
        self._decoding = list(self._slots)
        admit = [self._admit(slot, 1, params) for slot in self._slots]
        self._launch(admit=admit, join=self._slots, decode=True)

    def decode(self, rows: int) -> None:
        """One token for the first so many requests."""
        wanted = set(self._slots[:rows])
        leave = [slot for slot in self._decoding if slot not in wanted]
        join = sorted(wanted.difference(self._decoding))
        self._decoding = [slot for slot in self._decoding if slot in wanted] + join
        self._launch(leave=leave, join=join, decode=True)

    def release(self) -> None:
        """All requests go."""
        self._launch(release=self._slots, leave=self._decoding)
        self._slots, self._decoding = [], []
        self.wait()

    def wait(self) -> None:
        """Raises what a step raised."""
        for future in self._futures:
            future.result()
        self._futures = []

    def _admit(self, slot: int, length: int, params: SamplingParams) -> Admission:
        request = GenerationRequest(
            id=slot, token_ids=[0] * length, sampling=params, max_new_tokens=1, stop_token_ids=[], seed=0
        )
        return Admission(slot, request, [], [0] * (-(-length // self._block_size)))

    def _launch(self, **parts: object) -> None:
        self._step += 1
        fields: dict[str, object] = {
            "release": [], "admit": [], "leave": [], "join": [], "grow": [], "decode": False, "chunks": [], **parts
        }  # fmt: skip
        self._futures.append(self._runner.launch(StepPlan(self._step, **fields)))  # pyright: ignore


def run_choices(dry_run: DryRun, sizes: Sequence[int]) -> None:
    """Choices of tokens behind decode steps, for each number of rows."""
    for params in (PLAIN, SAMPLED, EVERYTHING):
        for rows in sizes:
            dry_run.join(rows, params)
            dry_run.decode(rows)
            dry_run.decode(1)
            dry_run.release()


def run_decode(dry_run: DryRun, sizes: Sequence[int], params: SamplingParams = PLAIN) -> None:
    """Steps without a prompt, for each number of rows."""
    for number, rows in enumerate(sorted(set(sizes), reverse=True)):
        if number % _SIZES_AT_A_TIME == 0:
            dry_run.prompts([1] * rows, params)
        dry_run.decode(rows)
    dry_run.wait()


def run_largest(dry_run: DryRun, rows: int, tokens: int, length: int, times: int = 2) -> None:
    """The largest permitted steps: of many requests with every option, and of one long prompt that is scored."""
    each, more = divmod(tokens, rows)
    lengths = [min(each + (row < more), length - 4) for row in range(rows)]
    for _ in range(times):  # the second is queued while the first one runs
        dry_run.prompts(lengths, EVERYTHING)
    dry_run.decode(rows)
    dry_run.decode(rows)
    dry_run.wait()
    dry_run.prompts([min(tokens, length - 1)], _PROMPT)
    dry_run.wait()


def run_prompts(dry_run: DryRun, rows: int, tokens: int, length: int) -> None:
    """Prompts of several lengths, alone and beside others that decode."""
    longest = min(tokens, length - 1)
    for prompt in (*(prompt for prompt in _PROMPT_LENGTHS if prompt < longest), longest):
        dry_run.prompts([prompt])
        for num_decode in (1, 15):
            if prompt <= _SHORT and num_decode < rows and num_decode + prompt <= tokens:
                dry_run.prompts([1] * num_decode)
                dry_run.decode(num_decode)
                dry_run.prompts([prompt], num_decode=num_decode)
        dry_run.wait()


def run_prefix(dry_run: DryRun, tokens: int, length: int) -> None:
    """Prompts whose first tokens are in the cache already."""
    longest = min(tokens, length - 1)
    if longest > _PREFIX:
        dry_run.prompts([longest], start=_PREFIX)
        dry_run.prompts([_PREFIX + 1], start=_PREFIX)
        dry_run.wait()


def run_captured(dry_run: DryRun, rows: int, tokens: int, length: int) -> None:
    """So many prompt tokens at once, of few prompts."""
    count = min(rows, -(-tokens // (length - 1)))
    each, more = divmod(tokens, count)
    dry_run.prompts([each + (number < more) for number in range(count)])
    dry_run.wait()
