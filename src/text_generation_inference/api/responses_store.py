"""Responses that can be continued by their id: the last ones, within bounds of number, bytes and time, in this process.

What is kept is text: the items of the conversation, and the answer, as JSON. Nobody finds what was stored with another
API key.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from text_generation_inference.api.errors import NotStoredError
from text_generation_inference.api.tenants import current_key

MAX_BYTES = 64 << 20
MAX_ENTRY_BYTES = 2 << 20  # a conversation beyond that is not kept: it would take the place of many
LIFETIME_S = 3600.0


class StoredResponse(msgspec.Struct):
    answer: bytes
    items: bytes  # of the conversation, the answer's too
    output: Mapping[str, bytes]  # the answer's items, by their ids
    key: str
    used_at: float

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.items) + sum(map(len, self.output.values())) + 512


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._found: OrderedDict[str, StoredResponse] = OrderedDict()  # those used last at the end
        self._of_item: dict[str, str] = {}  # an item's id -> its response's
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, number: str, answer: bytes, items: bytes, output: Mapping[str, bytes]) -> bool:
        """Keep a response, unless it is too large. The oldest ones make room."""
        entry = StoredResponse(answer, items, output, current_key.get(), time.monotonic())
        if not self.is_on or entry.size > min(MAX_ENTRY_BYTES, self._max_bytes):
            return False
        self._found[number] = entry
        self._of_item.update(dict.fromkeys(output, number))
        self._num_bytes += entry.size
        while len(self._found) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._found)))
        self._drop_old()
        return True

    def answer(self, number: str) -> bytes:
        return self._find(number, 404, None).answer

    def items(self, number: str) -> bytes:
        """The conversation up to the end of a response, to be continued: a list in JSON."""
        return self._find(number, 400, "previous_response_id").items

    def item(self, number: str) -> bytes:
        """One item of a response, by its own id."""
        self._drop_old()
        entry = self._found.get(self._of_item.get(number, ""))
        if entry is None or entry.key != current_key.get():
            raise NotStoredError(400, f"Item with id {number[:64]!r} not found: {self._why()}", "input", None)
        return entry.output[number]

    def delete(self, number: str) -> None:
        self._find(number, 404, None)
        self._drop(number)

    def _find(self, number: str, status: int, param: str | None) -> StoredResponse:
        self._drop_old()
        entry = self._found.get(number)
        if entry is None or entry.key != current_key.get():
            code = None if param is None else "previous_response_not_found"
            shown = number[:64]
            raise NotStoredError(status, f"Response with id {shown!r} not found: {self._why()}", param, code)
        entry.used_at = time.monotonic()
        self._found.move_to_end(number)
        return entry

    def _why(self) -> str:
        if not self.is_on:
            return "this server stores no responses (--responses-store), send the whole conversation instead"
        return (
            f"of those without `store: false` the last {self._max_responses} are kept, {self._max_bytes >> 20} MiB of "
            f"them, {LIFETIME_S / 60:.0f} minutes after their last use; send the whole conversation instead"
        )

    def _drop_old(self) -> None:
        limit = time.monotonic() - LIFETIME_S
        while self._found and next(iter(self._found.values())).used_at < limit:
            self._drop(next(iter(self._found)))

    def _drop(self, number: str) -> None:
        entry = self._found.pop(number)
        self._num_bytes -= entry.size
        for item_id in entry.output:
            if self._of_item.get(item_id) == number:
                del self._of_item[item_id]
