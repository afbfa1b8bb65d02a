"""Room of which a part is for callers that have little."""

from text_generation_inference.pictures.shared_room import SharedRoom


def fill(room: SharedRoom, caller: str) -> int:
    """How much one gets, taken one by one."""
    count = 0
    while room.try_take(caller, 1):
        count += 1
    return count


def test_a_quarter_is_for_callers_with_little() -> None:
    room = SharedRoom(128, lambda: "")
    assert fill(room, "flood") == 96
    assert fill(room, "another flood") == 8  # a sixteenth: what it has by then is no longer little
    assert not room.try_take("third", 9)
    assert room.try_take("third", 8)
    room.give_back("flood", 96)
    assert fill(room, "another flood") == 96 - 8 - 8


def test_there_is_an_end() -> None:
    room = SharedRoom(128, lambda: "")
    assert sum(fill(room, f"caller {number}") for number in range(40)) == 128
    for number in range(40):
        room.give_back(f"caller {number}", 96 if not number else 8 if number < 5 else 0)
    assert room.used == 0
    assert room.try_take("caller 0", 96)


def test_without_callers_everything_may_be_had() -> None:
    room = SharedRoom(128)
    assert fill(room, room.caller()) == 128
