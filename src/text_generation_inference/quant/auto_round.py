"""AutoRound: what config.json says of checkpoints whose tensors are those of GPTQ or AWQ.

`packing_format` tells which; files of before it was there have the same words in `backend`. In GPTQ's, stored zero
points are less by 1 (version 1) where the word is gptq, and are themselves where it is AutoRound's own.
"""

import re
from collections.abc import Mapping
from typing import Any

from text_generation_inference.quant import awq, gptq
from text_generation_inference.quant.config_fields import Fields, NamePattern
from text_generation_inference.quant.integer_fields import (
    NO_RULES,
    WAY_OUT,
    Changes,
    MatrixRules,
    read_bits,
    read_group_size,
)
from text_generation_inference.quant.quantization import Quantization

_OWN_NAMES = ("auto_round", "auto-round", "autoround")
_AWQ = ("awq", "auto_awq")
_GPTQ = ("gptq", "auto_gptq", "auto")
_GPTQ_V2 = ("", "gptqmodel", "exllamav2", "tritonv2", "triton", "torch", "marlin")  # behind its own name
_ROTATIONS = ("rotation_config", "spinquant_config", "hadamard_config", "transform_config")
_PLAIN_BITS = 16  # or more
_NAME = re.compile(r"[\w.-]+")  # of a matrix, or of what it is in; else an expression
_ORIGIN = "this checkpoint, which AutoRound wrote,"


def detect(config: Mapping[str, Any], source: str) -> Quantization:
    """`config` is the section of config.json."""
    fields = Fields(config, f"{source}: `quantization_config`", WAY_OUT)
    for name in _ROTATIONS:
        if fields.get(name):
            raise fields.refuse(name, "none")
    packing = _read_packing(fields)
    _check_integers(fields)
    widths = awq.BITS if packing == "awq" else gptq.BITS
    # What is left out is as AutoRound's own config has it, which differs from GPTQ's.
    bits, size = read_bits(fields, "bits", *widths), read_group_size(fields, "group_size", 128)
    symmetric = fields.truth("sym", True)
    rules = _read_rules(fields, widths, "has_zeros" if packing == "awq" else "is_symmetric")
    has_head = bool(rules.by_name.get("lm_head"))
    if packing == "awq":
        stored = awq.StoredAwq(bits, size, not symmetric)
        return awq.AwqQuantization(stored, origin=_ORIGIN, rules=rules, has_head=has_head)
    kept = gptq.Stored(bits, size, symmetric, zero_less=int(packing == "gptq"))
    return gptq.GptqQuantization(kept, origin=_ORIGIN, rules=rules, has_head=has_head)


def _read_packing(fields: Fields) -> str:
    """Of its words, divided by colons: `awq`, `gptq`, or `gptq_v2`."""
    name = "packing_format" if fields.get("packing_format") else "backend"
    first, _, rest = fields.text(name, "auto").partition(":")
    is_own = first in _OWN_NAMES
    word = rest.partition(":")[0] if is_own else first
    if word in _AWQ:
        return "awq"
    if word in _GPTQ:
        return "gptq"
    if is_own and word in _GPTQ_V2:
        return "gptq_v2"
    raise fields.refuse(name, "auto_round:auto_gptq, auto_round:auto_awq, auto_round")


def _check_integers(fields: Fields) -> None:
    if fields.text("data_type", "int") != "int":
        raise fields.refuse("data_type", "int")
    if fields.integer("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
        raise fields.refuse("act_bits", f"{_PLAIN_BITS} (inputs that are not rounded)")


def _read_rules(fields: Fields, widths: tuple[int, ...], zeros: str) -> MatrixRules:
    """Its `extra_config`: names come first, whatever their order, and expressions match anywhere in a name."""
    if not fields.get("extra_config"):
        return NO_RULES
    extra = fields.below("extra_config")
    by_name: dict[str, Changes] = {}
    by_pattern: list[tuple[NamePattern, Changes]] = []
    for name in extra.value:
        rule = extra.below(name)
        if not rule.value:
            continue
        changes = _read_changes(rule, widths, zeros)
        if _NAME.fullmatch(name):
            by_name[name] = changes
        else:
            expression = name if name.startswith((".*", "^")) else f".*(?:{name})"
            by_pattern.append((NamePattern(name, f"{fields.place}: `extra_config`", fields.work, expression), changes))
    return MatrixRules(by_name, tuple(by_pattern))


def _read_changes(rule: Fields, widths: tuple[int, ...], zeros: str) -> Changes:
    if rule.integer("bits", 0) >= _PLAIN_BITS:
        return None
    _check_integers(rule)
    changes: dict[str, Any] = {}
    if rule.get("bits") is not None:
        changes["bits"] = read_bits(rule, "bits", *widths)
    if rule.get("group_size") is not None:
        changes["group_size"] = read_group_size(rule, "group_size")
    if rule.get("sym") is not None:
        changes[zeros] = rule.truth("sym", True) == (zeros == "is_symmetric")
    return changes
