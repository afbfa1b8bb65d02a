"""Where requests go: prefix first, load where it is too unequal, tenants apart."""

import pytest

from text_generation_inference.router import (
    NoReplicaError,
    PrefixRouter,
    ReplicaLoad,
    ReplicaState,
    RoutingPolicy,
    key_of_text,
    key_of_tokens,
)

CHAT = list(range(600))


def make_router(*names: str, **policy: float) -> PrefixRouter:
    router = PrefixRouter(RoutingPolicy(**policy))
    for name in names:
        router.add(name)
    return router


def test_the_next_turn_goes_where_the_last_one_was():
    router = make_router("a", "b", "c", "d")
    for number in range(8):
        router.place(key_of_tokens([number] * 40)).end()
    place = router.place(key_of_tokens(CHAT)).choice.name
    for number in range(8):
        router.place(key_of_tokens([number] * 40)).end()
    choice = router.choose(key_of_tokens([*CHAT, *range(5_000, 5_400)]))
    assert choice.name == place and choice.num_matched_tokens == 576 and not choice.fell_back


def test_the_answer_is_part_of_what_is_held():
    router = make_router("a", "b")
    place = router.place(key_of_tokens([1] * 20)).choice.name
    router.note(place, key_of_tokens([1] * 20 + [2] * 300))
    choice = router.choose(key_of_tokens([1] * 20 + [2] * 300 + [3] * 20))
    assert choice.name == place and choice.num_matched_tokens == 320


def test_who_is_new_goes_where_there_is_least_to_do():
    router = make_router("a", "b", "c")
    assert [router.place(key_of_tokens([number] * 100)).choice.name for number in range(6)] == ["a", "b", "c"] * 2
    router.set_load("b", ReplicaLoad(queued_tokens=5_000))
    router.set_load("c", ReplicaLoad(running=20))
    assert router.rank(key_of_tokens([9] * 100)) == ["a", "c", "b"]


def test_equal_prefixes_are_decided_by_load():
    router = make_router("a", "b")
    key = key_of_tokens(CHAT)
    for name in ("a", "b"):
        router.place_on(name, key).end()
    router.set_load("a", ReplicaLoad(queued_tokens=10))
    assert router.choose(key).name == "b"


def test_a_prefix_is_not_worth_any_wait():
    router = make_router("a", "b", imbalance_tokens=1_000)
    key = key_of_tokens(CHAT)  # of which 576 tokens are whole blocks
    router.place_on("a", key).end()
    router.set_load("a", ReplicaLoad(queued_tokens=1_576))
    assert router.choose(key).name == "a"
    router.set_load("a", ReplicaLoad(queued_tokens=1_577))
    choice = router.choose(key)
    assert choice.name == "b" and choice.fell_back and choice.num_matched_tokens == 0
    router.set_load("b", ReplicaLoad(queued_tokens=1_577 * 10))
    router.set_load("a", ReplicaLoad(queued_tokens=1_577 * 11))
    assert router.choose(key).name == "a"  # both have so much to do that the difference is small


def test_what_a_move_would_displace_counts_as_well():
    router = make_router(imbalance_tokens=1_000)
    for name in ("a", "b"):
        router.add(name, 1_024)
    key = key_of_tokens(CHAT)
    router.place_on("a", key).end()
    router.place_on("b", key_of_tokens([-token for token in range(1, 1_025)])).end()  # b is full of something else
    router.set_load("a", ReplicaLoad(queued_tokens=1_577))  # as far as above b would be chosen
    assert router.choose(key).name == "a"
    router.set_load("a", ReplicaLoad(queued_tokens=1_577 + len(CHAT)))
    choice = router.choose(key)
    assert choice.name == "b" and choice.fell_back


def test_a_full_cache_is_left_alone():
    router = make_router("a", "b")
    key = key_of_tokens(CHAT)
    router.place_on("a", key).end()
    router.set_load("a", ReplicaLoad(queued_tokens=1, kv_usage=0.97))
    assert router.choose(key).name == "b"
    router.set_load("b", ReplicaLoad(kv_usage=0.9))
    assert router.choose(key).name == "a"


def test_a_tiny_match_decides_nothing():
    router = make_router("a", "b")
    router.place_on("a", key_of_tokens(CHAT[:16])).end()
    router.set_load("a", ReplicaLoad(queued_tokens=1))
    assert router.choose(key_of_tokens(CHAT)).name == "b"
    assert router.choose(key_of_tokens(CHAT[:60])).name == "a"


def test_tenants_do_not_share():
    router = make_router("a", "b")
    router.place_on("a", key_of_tokens(CHAT, root=("salt", None, ()))).end()
    for root in (("other", None, ()), ("salt", "adapter", ()), ("salt", None, ("image",))):
        assert router.choose(key_of_tokens(CHAT, root)).num_matched_tokens == 0
    assert router.choose(key_of_tokens(CHAT, ("salt", None, ()))).num_matched_tokens == 576


def test_text_where_tokens_are_unknown():
    router = make_router("a", "b")
    for text in ("Once upon a time " * 40, b"Once upon a time " * 40):
        place = router.place(key_of_text(text)).choice.name
        assert router.choose(key_of_text(text + text[:3])).name == place
        assert router.choose(key_of_text(text, "salt")).num_matched_tokens == 0


def test_who_restarts_holds_nothing():
    key = key_of_tokens(CHAT)
    for restart in (
        lambda router: router.add("a"),
        lambda router: router.set_state("a", ReplicaState.DOWN),
        lambda router: router.forget("a"),
    ):
        router = make_router("a", "b")
        ticket = router.place_on("a", key)
        restart(router)
        router.set_state("a", ReplicaState.UP)
        assert router.choose(key).num_matched_tokens == 0
        ticket.end()  # of the one before: nobody's count falls below zero
        router.check()


def test_only_who_is_up_is_chosen():
    router = make_router("a", "b")
    key = key_of_tokens(CHAT)
    router.place_on("a", key).end()
    router.set_state("a", ReplicaState.DRAINING)
    assert router.rank(key) == ["b"]
    router.set_state("a", ReplicaState.UP)
    assert router.choose(key).num_matched_tokens == 576  # draining forgets nothing
    assert router.choose(key, among=["b"]).name == "b"
    router.set_state("a", ReplicaState.DOWN)
    router.remove("b")
    with pytest.raises(NoReplicaError):
        router.place(key)


def test_what_is_under_way_counts_until_it_ends():
    router = make_router("a", running_tokens=10)
    ticket = router.place(key_of_tokens(CHAT))
    assert router.work("a") == 610
    ticket.first_token()
    assert router.work("a") == 10
    router.set_load("a", ReplicaLoad(queued_tokens=50, running=1))
    assert router.work("a") == 60
    ticket.end()
    router.set_load("a", ReplicaLoad())
    assert router.work("a") == 0
