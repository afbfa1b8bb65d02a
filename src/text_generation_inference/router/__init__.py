"""Which of several replicas a request goes to: the one that holds most of its prompt, unless it is far too busy.

Pure Python, no engine, no network: whoever holds replicas (the api process, a deployment elsewhere) tells a
`PrefixRouter` of them and asks it for each request. `prompt_key`: a prompt as a chain of hashes. `held_prefixes`: what
a replica is believed to hold. `router`: replicas, what they have to do, the choice.
"""

from text_generation_inference.router.held_prefixes import MAX_BLOCKS
from text_generation_inference.router.prompt_key import CHARACTERS_PER_TOKEN, PromptKey, key_of_text, key_of_tokens
from text_generation_inference.router.router import (
    NoReplicaError,
    PrefixRouter,
    ReplicaChoice,
    ReplicaLoad,
    ReplicaState,
    RoutingPolicy,
    Ticket,
)

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "MAX_BLOCKS",
    "NoReplicaError",
    "PrefixRouter",
    "PromptKey",
    "ReplicaChoice",
    "ReplicaLoad",
    "ReplicaState",
    "RoutingPolicy",
    "Ticket",
    "key_of_text",
    "key_of_tokens",
]
