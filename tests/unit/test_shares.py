"""Room for a caller with few requests while another has many."""

from text_generation_inference.scheduler.shares import Shares


def try_take(shares: Shares, caller: str, count: int = 1, now_s: int = 0) -> bool:
    shares.see(caller, now_s * 10**9)
    if not shares.may_take(caller, count):
        return False
    shares.take(caller, count)
    return True


def fill(shares: Shares, caller: str, now_s: int = 0) -> int:
    taken = 0
    while try_take(shares, caller, now_s=now_s):
        taken += 1
    return taken


def test_alone_a_caller_has_everything():
    shares = Shares(128)
    assert fill(shares, "a") == 128
    assert not try_take(shares, "a", 1)
    shares.give_back("a", 128)
    assert shares.num_held == 0
    assert try_take(shares, "a", 128)


def test_with_another_one_a_part_is_for_who_has_few():
    shares = Shares(128)
    assert try_take(shares, "honest", 1)
    shares.give_back("honest", 1)
    assert fill(shares, "flood") == 120
    assert fill(shares, "honest") == 8
    assert not try_take(shares, "third", 1)  # full is full


def test_who_was_refused_is_known_from_then_on():
    shares = Shares(8)
    assert fill(shares, "flood") == 8
    assert not try_take(shares, "honest", 1)
    shares.give_back("flood", 1)
    assert not try_take(shares, "flood", 1)
    assert try_take(shares, "honest", 1)


def test_who_has_not_asked_for_long_is_forgotten():
    shares = Shares(8)
    assert try_take(shares, "honest", 1)
    shares.give_back("honest", 1)
    assert fill(shares, "flood", now_s=61) == 8


def test_a_limit_of_one_serves_everybody_in_turn():
    shares = Shares(1)
    for caller in ("a", "b", "a"):
        assert try_take(shares, caller, 1)
        shares.give_back(caller, 1)


def test_many_callers_are_not_remembered_for_ever():
    shares = Shares(8)
    for number in range(5000):
        assert try_take(shares, str(number), 1)
        shares.give_back(str(number), 1)
    assert len(shares._seen) <= 1024 and not shares._held
