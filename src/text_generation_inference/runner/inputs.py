"""Turns a plan into the tensors of one model pass."""

import torch
from torch import Tensor

from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.runner.slots import Slots
from text_generation_inference.types import Chunk, StepPlan


def build_batch(plan: StepPlan, slots: Slots, prompt_chunks: list[Chunk]) -> Batch:
    """Rows: the decode set, then the chunks. Logits: one per sampling row, then every token of `prompt_chunks`."""
    decode = slots.decode_index if plan.decode else slots.decode_index[:0]
    num_decode = decode.shape[0]
    decode_positions = slots.lengths[decode] - 1
    max_seq_len = int(slots.lengths_cpu[slots.decode_slots].max()) if num_decode else 0
    if not plan.chunks:
        rows, positions, token_rows = decode, decode_positions, decode
        seq_lens = decode_positions + 1
        logit_tokens = None
    else:
        chunk_slots = torch.tensor([chunk.slot for chunk in plan.chunks], device=slots.device)
        chunk_ends = torch.tensor([chunk.end for chunk in plan.chunks], device=slots.device)
        counts = torch.tensor([chunk.end - chunk.start for chunk in plan.chunks], device=slots.device)
        rows = torch.cat((decode, chunk_slots))
        positions = torch.cat((decode_positions, *(_range(chunk, slots.device) for chunk in plan.chunks)))
        token_rows = torch.cat((decode, chunk_slots.repeat_interleave(counts)))
        seq_lens = torch.cat((decode_positions + 1, chunk_ends))
        logit_tokens = _logit_tokens(plan, num_decode, prompt_chunks, slots.device)
        max_seq_len = max(max_seq_len, *(chunk.end for chunk in plan.chunks))
    size = slots.block_size
    blocks = slots.block_tables[token_rows, positions // size]
    return Batch(
        input_ids=slots.tokens[token_rows, positions].long(),
        positions=positions,
        kv_index=blocks.long() * size + positions % size,
        seq_lens=seq_lens.to(torch.int32),
        meta=PagedMeta(
            block_tables=slots.block_tables[rows, : -(-max_seq_len // size)],
            num_decode=num_decode,
            chunk_starts_cpu=[chunk.start for chunk in plan.chunks],
            chunk_ends_cpu=[chunk.end for chunk in plan.chunks],
            max_seq_len=max_seq_len,
        ),
        logit_tokens=logit_tokens,
    )


def _range(chunk: Chunk, device: torch.device) -> Tensor:
    return torch.arange(chunk.start, chunk.end, device=device)


def _logit_tokens(plan: StepPlan, num_decode: int, prompt_chunks: list[Chunk], device: torch.device) -> Tensor:
    tokens = list(range(num_decode))
    prompt_tokens: list[int] = []
    first = num_decode
    for chunk in plan.chunks:
        last = first + chunk.end - chunk.start
        if chunk.samples:
            tokens.append(last - 1)
        if chunk in prompt_chunks:
            prompt_tokens += range(first, last)
        first = last
    return torch.tensor(tokens + prompt_tokens, dtype=torch.int64, device=device)
