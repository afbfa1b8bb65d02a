"""Where a picture may be fetched from: the one parser of URLs, and the policy on names and addresses.

`fetch` connects from the parts that are parsed here, never from the text, so no two programs read one URL in two ways.
What stands in an answer to a client is the text of an `AddressError`; it never tells what a name resolves to.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import quote, urljoin

IpAddress = IPv4Address | IPv6Address

_MAX_URL = 8192  # characters
_PORTS = {"http": 80, "https": 443}
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\xa0\\\u1680\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<target>[^#]*)(?:#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]*\]|[^\[\]:@%]*)(?::(?P<port>[0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_TARGET_SAFE = "".join(map(chr, range(0x21, 0x7F)))  # what is ASCII goes out as it came in

# Who is nobody, this machine, this network or all of a network. Listed here, as Python's own list differs by version.
_NOT_PUBLIC_4 = [
    IPv4Network(text)
    for text in (
        *("0.0.0.0/8", "127.0.0.0/8"),  # this machine
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # private networks
        "100.64.0.0/10",  # networks of providers, and of clouds among themselves
        "169.254.0.0/16",  # link-local: what clouds tell their machines, keys among it
        "168.63.129.16/32",  # the same on Azure, by a public number
        *("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),  # protocols, relays, measurements
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # documentation
        *("224.0.0.0/4", "240.0.0.0/4"),  # multicast, reserved, broadcast
    )
]
# IPv6 has public addresses in one block alone, and these are within it. Everything else is out: loopback, link-local,
# private, multicast, and IPv4 addresses in disguise (mapped ::ffff:0:0/96, translated 64:ff9b::/96).
_PUBLIC_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = [
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocols, Teredo among them
        "2002::/16",  # 6to4: IPv4 addresses in disguise
        *("2001:db8::/32", "3fff::/20"),  # documentation
    )
]
_NO_PUBLIC_ADDRESS = "the host has no public address"


class AddressError(Exception):
    """Nothing is fetched from there. The text is for the caller."""


@dataclass(frozen=True, slots=True)
class MediaAddress:
    scheme: str  # http or https
    host: str  # in small letters: a name, or an IP address without brackets
    port: int
    target: str  # path and query

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def ip(self) -> IpAddress | None:
        """The address that is written in the URL; None for a name."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.target}"


def parse_address(url: str) -> MediaAddress:
    """Raises `AddressError` for whatever is no plain http or https URL."""
    _check_text(url)
    found = _URL.fullmatch(url)
    if found is None:
        raise AddressError("the URL cannot be read")
    scheme = found["scheme"].lower()
    if scheme not in _PORTS:
        raise AddressError("the URL must begin with http:// or https://")
    authority = _AUTHORITY.fullmatch(found["authority"])
    if authority is None:
        # user@host shows one host and means another; %31 and the like are read differently by different programs
        raise AddressError("the URL must name a plain host: no user, no password, no encoded characters")
    port = int(authority["port"] or _PORTS[scheme])
    if not 0 < port < 65536:
        raise AddressError("the port of the URL is out of range")
    target = found["target"] if found["target"].startswith("/") else "/" + found["target"]
    return MediaAddress(scheme, _parse_host(authority["host"].lower()), port, quote(target, safe=_TARGET_SAFE))


def join_address(base: MediaAddress, location: str) -> MediaAddress:
    """Where a redirect leads to. Raises `AddressError`."""
    _check_text(location)
    try:
        joined = urljoin(str(base), location)
    except ValueError:  # of a host in brackets, or in letters that mean a slash
        raise AddressError("the URL cannot be read") from None
    return parse_address(joined)


def _check_text(url: str) -> None:
    if len(url) > _MAX_URL:
        raise AddressError(f"the URL has more than {_MAX_URL} characters")
    if _FORBIDDEN.search(url):
        raise AddressError("the URL holds white space, a backslash or control characters")
    try:
        url.encode()
    except UnicodeEncodeError:
        raise AddressError("the URL is no text") from None


def _parse_host(host: str) -> str:
    if host.startswith("["):
        try:
            return str(IPv6Address(host[1:-1]))
        except ValueError:
            raise AddressError("the URL has an IPv6 address that cannot be read") from None
    labels = host.split(".")
    if not host.isascii():
        raise AddressError("the host name must be ASCII: write it in its xn-- form")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise AddressError("the URL has no host name that can be read")
    if _NUMBER.fullmatch(labels[-1]):  # 2130706433, 0x7f.1, 127.1 and 0177.0.0.1 mean 127.0.0.1 to some
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise AddressError("an IPv4 address must be written as four decimal numbers") from None
    return host


def is_public(ip: IpAddress) -> bool:
    """Whether anybody on the internet could be meant."""
    if isinstance(ip, IPv4Address):
        return not any(ip in network for network in _NOT_PUBLIC_4)
    return ip in _PUBLIC_6 and ip.scope_id is None and not any(ip in network for network in _NOT_PUBLIC_6)


class AddressPolicy:
    """What `--allowed-media-domains` and `--allow-private-media` let through."""

    def __init__(self, allowed_domains: Iterable[str] | None = None, allow_private: bool = False) -> None:
        """`allowed_domains`: exact host names; None: any."""
        self._allowed = None if allowed_domains is None else frozenset(name.lower() for name in allowed_domains)
        self._allow_private = allow_private

    def check_host(self, address: MediaAddress) -> None:
        """Before anything is resolved. Raises `AddressError`."""
        if self._allowed is not None and address.host not in self._allowed:
            raise AddressError("pictures are not fetched from this host")

    def check_answers(self, answers: Sequence[IpAddress]) -> None:
        """All that a name resolved to must be allowed. Raises `AddressError`.

        The same words whether a name is unknown or private: who asks learns nothing of the network behind the server.
        """
        if not answers or not (self._allow_private or all(map(is_public, answers))):
            raise AddressError(_NO_PUBLIC_ADDRESS)

    def check_connection(self, ours: IpAddress, theirs: IpAddress) -> None:
        """Addresses of both ends, before anything is sent. One of this machine, public as it may be, is behind its
        firewall from here; whether anybody listens there is not told either. Raises `AddressError`.
        """
        if ours == theirs and not self._allow_private:
            raise AddressError(_NO_PUBLIC_ADDRESS)
