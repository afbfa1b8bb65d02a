"""Which rows of which pictures each token of Llama 3.2 Vision reads. What comes of it is in `test_pictures.py`."""

from text_generation_inference.runner.cross_pictures import Reading, find_readings
from text_generation_inference.types import PictureSpan, group_neighbours, name_group


def test_a_token_reads_the_last_picture_and_its_neighbours() -> None:
    assert find_readings([2, 3, 6], [10, 20, 5]) == [
        Reading(0, 2, None),
        Reading(2, 3, 0, 10),
        Reading(3, 6, 0, 30),
        Reading(6, None, 1, 5),
    ]
    assert find_readings([0], [4]) == [Reading(0, None, 0, 4)]
    assert find_readings([], []) == []


def test_neighbours_are_kept_together() -> None:
    spans = [PictureSpan(digest, [(place, 1)], [], []) for digest, place in zip("abcd", (0, 1, 3, 5), strict=True)]
    groups = group_neighbours(spans)
    assert groups == [[0, 1], [2], [3]]
    assert [name_group(spans, group) for group in groups] == ["a+b", "c", "d"]
