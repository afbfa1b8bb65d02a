"""Whose request this is: what shares are counted by.

A caller is the address that a connection comes from (of IPv6 the network, since one host has as many addresses
as it likes), or what a proxy says in the header named by `client_header`. It is set once for each request and read
wherever something is shared out: tasks started for the request see it too.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address
from typing import Any

current_caller: ContextVar[str] = ContextVar("current_caller", default="")
_MAX_LENGTH = 64


def caller_of(scope: Mapping[str, Any], headers: Mapping[str, str], client_header: str | None) -> str:
    """`headers` by their names in lower case."""
    if client_header:
        # Each proxy appends the address it was called from; the last one is by the proxy next to this server.
        named = headers.get(client_header.lower(), "").rpartition(",")[2].strip()
        if named:
            return _network(named[:_MAX_LENGTH])
    client = scope.get("client")
    return _network(client[0]) if client else ""


def _network(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(IPv6Address(int(parsed) >> 64 << 64))
    return str(parsed)
