"""Requests, logits and samplers for tests of sampling, of a vocabulary that one rank has or several share."""

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.sampling.parts import KnownTokens
from text_generation_inference.sampling.sampler import Sampler
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, GenerationRequest, SamplingParams

VOCAB, NUM_SLOTS, MAX_TOKENS, BLOCK_SIZE = 400, 6, 64, 4

MIXED = [
    {"watermark": True},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "temperature": 0.8},
    {"logit_bias": {3: 5.0, 399: -100.0}, "top_p": 0.8},
    {},
    {"top_n_tokens": 3, "top_k": 4},
    {"frequency_penalty": 1.0, "frequency_by_length": False, "top_n_tokens": 1, "top_n_sigma": 1.0},
]


def bf16_logits(rows: int, seed: int) -> Tensor:
    """Steps of 1/16 around 10: the best ids of a model in bfloat16 tie all the time."""
    made = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5 + 10
    return made.bfloat16().float()


def admission(slot: int, params: SamplingParams, length: int, tokens: list[int] | None = None) -> Admission:
    request = GenerationRequest(
        id=slot,
        token_ids=tokens or [7] * length,
        sampling=params,
        max_new_tokens=9,
        stop_token_ids=[],
        seed=slot * 77 + 5,
    )
    return Admission(slot, request, [], [])


def make_known(max_tokens: int) -> KnownTokens:
    """Each slot has blocks of its own, in an order of their own."""
    max_blocks = -(-max_tokens // BLOCK_SIZE)
    tables = np.random.default_rng(1).permutation(NUM_SLOTS * max_blocks).reshape(NUM_SLOTS, max_blocks)
    pages = np.zeros((tables.size, BLOCK_SIZE), dtype=np.int32)
    last, lengths = np.zeros(NUM_SLOTS, dtype=np.int32), np.zeros(NUM_SLOTS, dtype=np.int64)
    return KnownTokens(pages, tables.astype(np.int32), last, lengths, max_tokens)


def make_sampler(
    admissions: list[Admission], pads: bool, ops: Ops | None = None, vocabulary: VocabularyPart | None = None
) -> Sampler:
    known = make_known(MAX_TOKENS)
    of = vocabulary or VocabularyPart.whole(VOCAB)
    sampler = Sampler(ops or Ops(), torch.device("cpu"), known, of, (0.5, 2.0), pads)
    for admitted in admissions:
        slot, tokens = admitted.slot, admitted.request.token_ids
        for place, token in enumerate(tokens):
            known.pages[known.tables[slot, place // BLOCK_SIZE], place % BLOCK_SIZE] = token
        known.last[slot], known.lengths[slot] = tokens[-1], len(tokens)
        sampler.admit(admitted)
    return sampler
