"""Routing over random replicas that come, drain, go and come back, with requests under way.

An oracle keeps what every replica was sent as plain lists of tokens, without bounds: the router may believe less than
that (it forgets what is old), never more, and never of a replica that has restarted or of another tenant.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from text_generation_inference.router import (
    NoReplicaError,
    PrefixRouter,
    ReplicaLoad,
    ReplicaState,
    RoutingPolicy,
    key_of_text,
    key_of_tokens,
)
from text_generation_inference.router.held_prefixes import HeldPrefixes
from text_generation_inference.router.prompt_key import block_sizes

NAMES = ("a", "b", "c")
ROOTS = ("", "tenant")


def common(left: list[int], right: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))


def make_prompt(conversation: int, length: int) -> list[int]:
    """Prompts of one conversation are prefixes of each other; all conversations begin alike."""
    shared = [7] * 40
    return (shared + [1_000 * (conversation + 1) + place % 900 for place in range(length)])[:length]


class Routing(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([None, 200, 2_000]), max_blocks=st.sampled_from([4, 40, 1_000]))
    def begin(self, capacity, max_blocks):
        self.router = PrefixRouter(RoutingPolicy(imbalance_tokens=100), max_blocks)
        self.capacity = capacity
        self.sent = {}  # (root, tokens) of each replica that is not down
        self.states = {}
        self.tickets = []

    @rule(name=st.sampled_from(NAMES))
    def come_up(self, name):
        self.router.add(name, self.capacity)
        self.states[name], self.sent[name] = ReplicaState.UP, []

    @rule(name=st.sampled_from(NAMES))
    def vanish(self, name):
        self.router.remove(name)
        self.states.pop(name, None)

    @rule(name=st.sampled_from(NAMES), state=st.sampled_from(list(ReplicaState)))
    def change_state(self, name, state):
        if name in self.states:
            self.router.set_state(name, state)
            self.states[name] = state
            if state is ReplicaState.DOWN:
                self.sent[name] = []

    @rule(name=st.sampled_from(NAMES), queued=st.integers(0, 3_000), running=st.integers(0, 50), kv=st.floats(0, 1))
    def report(self, name, queued, running, kv):
        if name in self.states:
            self.router.set_load(name, ReplicaLoad(queued, running, kv))

    @rule(conversation=st.integers(0, 4), length=st.integers(0, 700), root=st.sampled_from(ROOTS))
    def request(self, conversation, length, root):
        tokens = make_prompt(conversation, length)
        key = key_of_tokens(tokens, root)
        up = [name for name, state in self.states.items() if state is ReplicaState.UP]
        if not up:
            try:
                self.router.place(key)
            except NoReplicaError:
                return
            raise AssertionError("a replica was chosen that is not up")
        foreseen = self.router.choose(key)
        work = {name: self.router.work(name) for name in up}
        displaced = {name: self.displaced(name, key) for name in up}
        least = min(up, key=lambda name: work[name] + displaced[name])
        ranked = self.router.rank(key)
        ticket = self.router.place(key)
        choice = ticket.choice
        assert choice == foreseen and choice.name == ranked[0] and sorted(ranked) == sorted(up)
        held = max((common(tokens, other) for its, other in self.sent[choice.name] if its == root), default=0)
        assert choice.num_matched_tokens <= held
        policy = self.router.policy
        if choice.fell_back or not choice.by_prefix:
            assert work[choice.name] + displaced[choice.name] == work[least] + displaced[least]
        else:
            assert choice.num_matched_tokens >= policy.min_match * len(tokens)
            spared = choice.num_matched_tokens + max(0, displaced[least] - displaced[choice.name])
            assert (
                work[choice.name] - work[least] <= spared + policy.imbalance_tokens
                or work[choice.name] <= policy.imbalance_ratio * work[least]
            )
        self.sent[choice.name].append((root, tokens))
        self.tickets.append(ticket)

    def displaced(self, name, key):
        new = key.num_tokens - self.router.choose(key, [name]).num_matched_tokens
        return 0 if self.capacity is None else min(new, max(0, self.router.held_tokens(name) + new - self.capacity))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), how=st.sampled_from(["first", "end", "twice"]))
    def progress(self, data, how):
        ticket = data.draw(st.sampled_from(self.tickets))
        ticket.first_token()
        if how != "first":
            ticket.end()
            self.tickets.remove(ticket)
        if how == "twice":
            ticket.end()

    @invariant()
    def books_balance(self):
        if hasattr(self, "router"):
            self.router.check()

    def teardown(self):
        if not hasattr(self, "router"):
            return
        for ticket in self.tickets:
            ticket.end()
        for name in self.states:
            self.router.set_load(name, ReplicaLoad())
            assert self.router.work(name) == 0


def test_random_replicas():
    run_state_machine_as_test(Routing, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=400), min_size=1, max_size=20),
    asked=st.lists(st.integers(0, 2), max_size=400),
)
@settings(max_examples=60, deadline=None)
def test_what_is_held_is_the_longest_common_prefix_in_whole_blocks(prompts, asked):
    held = HeldPrefixes()
    for prompt in prompts:
        held.note(key_of_tokens(prompt))
    key = key_of_tokens(asked)
    longest = max(common(asked, prompt) for prompt in prompts)
    expected = max((n for n in range(len(key.hashes) + 1) if key.tokens_at(n) <= longest), default=0)
    assert held.match(key) == expected


@given(prompts=st.lists(st.lists(st.integers(0, 1), max_size=300), max_size=30), max_blocks=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_what_is_forgotten_are_ends_of_prompts(prompts, max_blocks):
    """No block is known without those before it, so a search by halves is right."""
    held = HeldPrefixes(1_000, max_blocks)
    for prompt in prompts:
        held.note(key_of_tokens(prompt))
        held.check()
        for other in prompts:
            key = key_of_tokens(other)
            known = [number in held for number in key.hashes]
            assert known == sorted(known, reverse=True)
            assert held.match(key) == sum(known)


@given(num_tokens=st.integers(0, 20_000))
@settings(max_examples=60, deadline=None)
def test_little_of_a_prompt_is_overlooked(num_tokens):
    key = key_of_tokens(range(num_tokens))
    covered = key.tokens_at(len(key.hashes))
    assert covered == sum(block_sizes()[: len(key.hashes)])
    assert num_tokens - covered < max(16, num_tokens / 5)


@given(text=st.text(max_size=600), more=st.text(min_size=1, max_size=100))
@settings(max_examples=60, deadline=None)
def test_text_is_cut_like_tokens(text, more):
    longer, key = key_of_text(text + more), key_of_text(text)
    assert longer.hashes[: len(key.hashes)] == key.hashes
    assert key_of_text(text, "salt").hashes[:1] != key.hashes[:1] or not key.hashes
    assert len(key.hashes) == len(key_of_tokens(range(len(text) // 4)).hashes)
