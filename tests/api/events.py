"""The events of a streamed answer, read strictly: any other framing than `data: ...` and an empty line is a failure."""

import json
from typing import Any

DONE = "[DONE]"


def read_events(data: bytes) -> list[Any]:
    """Decoded events in order; the last one of OpenAI's streams stays the text `[DONE]`."""
    if not data:
        return []
    assert data.endswith(b"\n\n"), data[-200:]
    events: list[Any] = []
    for block in data[:-2].split(b"\n\n"):
        assert block.startswith(b"data: "), block
        assert b"\n" not in block, block
        assert b"\r" not in block, block
        payload = block[6:].decode()
        events.append(payload if payload == DONE else json.loads(payload))
    return events


def encode_like_serde(value: object) -> str:
    """Compact JSON as TGI prints it: no spaces, text as it is."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
