"""Token ids in place of text: what a folder without a tokenizer says, and how ids are read and written."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.detokenize import open_stream
from text_generation_inference.text.ids_as_text import IdsAsText
from text_generation_inference.text.output import RequestText
from text_generation_inference.text.stopping import StopStrings


def folder(path: Path, generation: dict[str, Any], config: dict[str, Any]) -> Path:
    (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids", "pad_id"),
    [
        ({"eos_token_id": [7, 9], "pad_token_id": 4}, {"eos_token_id": 1, "pad_token_id": 5}, {7, 9}, 4),
        ({"eos_token_id": 7}, {"eos_token_id": 1, "pad_token_id": 5}, {7}, 5),
        ({}, {"eos_token_id": [3, 2]}, {2, 3}, 2),
        ({}, {}, set(), 0),
    ],
)
def test_ids_of_a_folder_without_a_tokenizer(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], eos_ids: set[int], pad_id: int
) -> None:
    found = IdsAsText.load(folder(tmp_path, generation, config))
    assert (found.eos_ids, found.pad_id) == (eos_ids, pad_id)
    assert found.encode("?,8, 9") == [pad_id, 8, 9]
    assert found.special_ids == eos_ids | {pad_id}


def test_ids_of_a_tokenizer(tmp_path: Path) -> None:
    """An answer ends where it would as text."""
    vocabulary = {"a": 0, "<end>": 1, "<pad>": 2}
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    found = IdsAsText.load(folder(tmp_path, {}, {"eos_token_id": 9}))
    assert (found.eos_ids, found.pad_id) == ({1}, 2)


def test_reading_and_writing() -> None:
    ids = IdsAsText(frozenset({3}), 0)
    assert ids.encode("5,6,7", truncate=2) == [6, 7]
    assert ids.decode([5, 3, 7], skip_special_tokens=True) == "5,3,7"
    assert ids.encode_with_offsets(" 5,66") == [(5, 0, 2), (66, 3, 5)]
    assert ids.before_output("5,6") == "5,6,"
    assert (ids.token_of(5), ids.id_of("5"), ids.id_of("x")) == ("5", 5, None)
    stream = open_stream(ids, [1, 2, 3])
    assert [stream.push(token) for token in (4, 3, 5)] == ["4", ",3", ",5"]
    assert stream.flush() == ""
    for text in ("", "a", "1,", "²"):
        with pytest.raises(ValidationError, match="token ids separated by commas"):
            ids.encode(text)
    with pytest.raises(ValidationError, match="grammar is not supported"):
        ids.to_json()


@pytest.mark.parametrize(
    ("stop", "ids", "told"),
    [
        (",13", [5, 134, 13, 6], "5,134"),  # not in the middle of 134
        (",1,1", [5, 1, 1, 6], "5"),
        (",1,1", [5, 1, 11, 1, 1, 6], "5,1,11"),
        (",13", [5, 134], "5,134"),
    ],
)
def test_a_stop_sequence_ends_with_an_id(stop: str, ids: list[int], told: str) -> None:
    text = RequestText(IdsAsText(frozenset(), 0), [1], StopStrings([stop], include_stop=False, whole_pieces=True))
    assert any(text.push(token)[1] for token in ids) == (ids[-1] == 6)
    text.finish()
    assert text.text == told


def test_the_id_that_ends_an_answer_is_told() -> None:
    text = RequestText(IdsAsText(frozenset({3}), 0), [1], StopStrings([], include_stop=False))
    assert [text.push(token)[0] for token in (9, 3)] == ["9", ",3"]
    assert text.finish() == "" and text.text == "9,3"
