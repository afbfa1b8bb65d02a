"""Made-up steps before the first real one: they compile the kernels and show how much memory the largest step takes.

They go through a runner as real ones do, over a cache of one block that belongs to nobody: what is computed
means nothing, and nothing of it is left when the runner is dropped.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from text_generation_inference.devices.device import MeasuredDevice
from text_generation_inference.engine.loop import StepRunner
from text_generation_inference.types import Admission, Chunk, GenerationRequest, SamplingParams, StepPlan, StepResult

SHORTEST = 256  # tokens that a request of a rehearsal must be allowed
_PLAIN = SamplingParams()
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
_FEW = 32
_FEW_SIZES = (1, 2, 8, 16)  # kernels differ where a number is 1 or divisible by 16
_SIZES_AT_A_TIME = SHORTEST // 2  # requests get longer by a token with each


class Rehearsal:
    """Plans steps for a runner that nobody else uses."""

    def __init__(self, runner: StepRunner, num_slots: int, block_size: int) -> None:
        self._runner, self._num_slots, self._block_size = runner, num_slots, block_size
        self._step = 0
        self._slots: list[int] = []  # taken
        self._decoding: list[int] = []
        self._futures: list[Future[StepResult]] = []

    def prompts(
        self, lengths: Sequence[int], params: SamplingParams = _PLAIN, num_decode: int = 0, start: int = 0
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

    def decode(self, rows: int) -> None:
        """One token for the first so many requests."""
        wanted = set(self._slots[:rows])
        leave = [slot for slot in self._decoding if slot not in wanted]
        join = sorted(wanted.difference(self._decoding))
        self._decoding = [slot for slot in self._decoding if slot in wanted] + join
        self._launch(leave=leave, join=join, decode=True)

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


def play_decode(rehearsal: Rehearsal, sizes: Sequence[int], params: SamplingParams = _PLAIN) -> None:
    """Steps without a prompt, for each number of rows."""
    for number, rows in enumerate(sorted(set(sizes), reverse=True)):
        if number % _SIZES_AT_A_TIME == 0:
            rehearsal.prompts([1] * rows, params)
        rehearsal.decode(rows)
    rehearsal.wait()


def play_largest(rehearsal: Rehearsal, rows: int, tokens: int, length: int) -> None:
    """The largest permitted steps: of many requests with every option, and of one long prompt that is scored."""
    each, more = divmod(tokens, rows)
    lengths = [min(each + (row < more), length - 4) for row in range(rows)]
    for _ in range(2):  # the second is queued while the first one runs
        rehearsal.prompts(lengths, EVERYTHING)
    rehearsal.decode(rows)
    rehearsal.decode(rows)
    rehearsal.wait()
    rehearsal.prompts([min(tokens, length - 1)], _PROMPT)
    rehearsal.wait()


def play_prompts(rehearsal: Rehearsal, rows: int, tokens: int, length: int) -> None:
    """Prompts of several lengths, alone and beside others that decode."""
    longest = min(tokens, length - 1)
    for prompt in (*(prompt for prompt in _PROMPT_LENGTHS if prompt < longest), longest):
        rehearsal.prompts([prompt])
        for num_decode in (1, 15):
            if prompt <= _SHORT and num_decode < rows and num_decode + prompt <= tokens:
                rehearsal.prompts([1] * num_decode)
                rehearsal.decode(num_decode)
                rehearsal.prompts([prompt], num_decode=num_decode)
        rehearsal.wait()


def play_prefix(rehearsal: Rehearsal, tokens: int, length: int) -> None:
    """Prompts whose first tokens are in the cache already."""
    longest = min(tokens, length - 1)
    if longest > _PREFIX:
        rehearsal.prompts([longest], start=_PREFIX)
        rehearsal.prompts([_PREFIX + 1], start=_PREFIX)
        rehearsal.wait()


def play_captured(rehearsal: Rehearsal, rows: int, tokens: int, length: int) -> None:
    """So many prompt tokens at once, of few prompts."""
    count = min(rows, -(-tokens // (length - 1)))
    each, more = divmod(tokens, count)
    rehearsal.prompts([each + (number < more) for number in range(count)])
    rehearsal.wait()


def rehearse(
    device: MeasuredDevice,
    make_runner: Callable[[], StepRunner],
    rows: int,
    tokens: int,
    length: int,
    capture: Sequence[int],
    captured_tokens: int,
) -> int:
    """Compile what steps need, then return how much memory they take at most beside weights and cache.

    `rows`, `tokens`: requests and tokens of the largest step; `length`: tokens of the longest request that the runner
    takes, at least SHORTEST; `capture`: rows of the decode steps that will be captured; `captured_tokens`: those of the
    largest captured step with prompt tokens, or 0.
    """
    block_size = device.limits.block_size
    few = [size for size in _FEW_SIZES if size < rows]

    def play(rehearsal: Rehearsal, rows: int) -> None:
        play_largest(rehearsal, rows, tokens, length)
        play_prompts(rehearsal, rows, tokens, length)
        play_decode(rehearsal, [rows, *few])
        play_decode(rehearsal, [rows, *few], SAMPLED)
        play_decode(rehearsal, few or [1], EVERYTHING)

    with device.compiling():
        rehearsal = Rehearsal(make_runner(), rows, block_size)
        play_prefix(rehearsal, tokens, length)  # first: its kernel takes longest
        play(rehearsal, min(rows, _FEW))
        play_decode(rehearsal, capture)
    del rehearsal
    made: list[Rehearsal] = []
    slots = device.peak_bytes(lambda: made.append(Rehearsal(make_runner(), rows, block_size)))
    play_decode(made[0], [rows, *few])  # makes workspaces, which stay
    # Captured steps have memory of their own, which they share.
    captured = max(
        device.peak_bytes(lambda params=params: play_decode(made[0], [rows], params)) for params in (_PLAIN, SAMPLED)
    )
    if captured_tokens:
        captured = max(captured, device.peak_bytes(lambda: play_captured(made[0], rows, captured_tokens, length)))
    return slots + captured + device.peak_bytes(lambda: play(made[0], rows))
