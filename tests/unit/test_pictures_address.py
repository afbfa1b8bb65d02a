"""Which URLs may be fetched: everything that two programs could read in two ways is refused."""

from ipaddress import ip_address

import pytest

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import StartError
from text_generation_inference.pictures.address import (
    AddressError,
    AddressPolicy,
    MediaAddress,
    is_public,
    join_address,
    parse_address,
)

READ = [
    ("http://example.com", MediaAddress("http", "example.com", 80, "/")),
    ("HTTPS://Example.COM/a/B.png?x=1&y=%20#part", MediaAddress("https", "example.com", 443, "/a/B.png?x=1&y=%20")),
    ("https://example.com:8443?q", MediaAddress("https", "example.com", 8443, "/?q")),
    ("http://93.184.216.34/x", MediaAddress("http", "93.184.216.34", 80, "/x")),
    ("http://[2606:2800:0220:1::0001]:81/x", MediaAddress("http", "2606:2800:220:1::1", 81, "/x")),
    ("https://cdn_1.example.com/ü/图.png", MediaAddress("https", "cdn_1.example.com", 443, "/%C3%BC/%E5%9B%BE.png")),
    ("http://xn--bcher-kva.example/", MediaAddress("http", "xn--bcher-kva.example", 80, "/")),
    ("http://a.example/x@y:z", MediaAddress("http", "a.example", 80, "/x@y:z")),
]
REFUSED = [
    "http://127.0.0.1\\@good.example/x.png",  # CVE-2026-24779
    "http://good.example\\.evil.example/",
    "http:\\\\good.example/",
    "http://user@good.example/",
    "http://user:secret@good.example/",
    "http://good.example@127.0.0.1/",
    "http://good.example:80@127.0.0.1/",
    "http://127%2e0.0.1/",
    "http://%31%32%37.0.0.1/",
    "http://good.example%00.evil.example/",
    "http://2130706433/",  # 127.0.0.1 in one number
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://127.1/",
    "http://0177.0.0.1/",
    "http://127.0.0.1.:80/",
    "http://127.0.0.01/",
    "http://127.0.0.256/",
    "http://1.2.3.4.5/",
    "http://[::1%25lo]/",
    "http://[fe80::1%eth0]/",
    "http://[::1/",
    "http://::1/",
    "http://[]/",
    "http:///x",
    "http://:80/",
    "http://.example/",
    "http://example.com./",
    "http://-a.example/",
    "http://a..example/",
    "http://ⓛocalhost/",
    "http://bücher.example/",
    "http://good.example:0/",
    "http://good.example:65536/",
    "http://good.example:80:90/",
    "http://good.example:+80/",
    "http://good.example:８０/",
    "http://good.example/a b",
    " http://good.example/",
    "http://good.example/\n",
    "http://good.example/\r\nX: y",
    "http://good.example/\x00",
    "http://good.example/\u2028",
    "http://good.example/\ud800",
    "http:good.example",
    "http:/good.example/",
    "//good.example/",
    "good.example/x.png",
    "file:///etc/passwd",
    "ftp://good.example/",
    "gopher://127.0.0.1:6379/_x",
    "javascript://good.example/",
    "http://" + "a" * 64 + ".example/",
    "http://" + "a." * 127 + "example/",
    "http://good.example/" + "x" * 9000,
    "",
]


@pytest.mark.parametrize(("url", "address"), READ)
def test_plain_urls_are_read(url: str, address: MediaAddress) -> None:
    assert parse_address(url) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("url", REFUSED)
def test_others_are_refused(url: str) -> None:
    with pytest.raises(AddressError) as refusal:
        parse_address(url)
    assert not url or url not in str(refusal.value)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/y", "http://a.example:81/y"),
        ("y?z", "http://a.example:81/b/y?z"),
        ("../y", "http://a.example:81/y"),
        ("?z", "http://a.example:81/b/c.png?z"),
        ("//b.example/y", "http://b.example/y"),
        ("https://b.example", "https://b.example/"),
    ],
)
def test_redirects_lead_where_browsers_go(location: str, url: str) -> None:
    assert join_address(parse_address("http://a.example:81/b/c.png"), location) == parse_address(url)


@pytest.mark.parametrize(
    "location",
    [
        *("file:///x", "//a@b.example/", "/\\b.example/", "\thttp://b.example", "https:\\\\b"),
        *("http://[::1", "//[", "//b.example[x]/", "http://a\u2100b.example/", "//b.example\uff0fx/"),
    ],
)
def test_redirects_are_read_by_the_same_rules(location: str) -> None:
    with pytest.raises(AddressError):
        join_address(parse_address("http://a.example/"), location)


@pytest.mark.parametrize(
    "ip", ["8.8.8.8", "93.184.216.34", "1.1.1.1", "172.32.0.1", "2606:2800:220:1::1", "2a00:1450::1"]
)
def test_public_addresses(ip: str) -> None:
    assert is_public(ip_address(ip))


@pytest.mark.parametrize(
    "ip",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
        *("169.254.169.254", "168.63.129.16", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1"),
        *("192.0.2.1", "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "192.88.99.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fec0::1", "fd00:ec2::254", "fc00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "100::1"),
        *("2002:7f00:1::", "2001:0:7f00:1::", "2001:10::1", "3fff::1", "5f00::1"),
    ],
)
def test_addresses_that_are_not(ip: str) -> None:
    assert not is_public(ip_address(ip))
    with pytest.raises(AddressError, match="^the host has no public address$"):
        AddressPolicy().check_answers([ip_address("8.8.8.8"), ip_address(ip)])  # one of several is enough
    AddressPolicy(allow_private=True).check_answers([ip_address(ip)])


def test_unknown_and_private_names_get_the_same_answer() -> None:
    for answers in ([], [ip_address("10.0.0.1")]):
        with pytest.raises(AddressError, match="^the host has no public address$"):
            AddressPolicy().check_answers(answers)


def test_listed_hosts_alone() -> None:
    policy = AddressPolicy(["Images.Example.com", "8.8.8.8"])
    policy.check_host(parse_address("https://images.example.COM:444/x"))
    policy.check_host(parse_address("http://8.8.8.8/"))
    for url in ("http://example.com/", "http://a.images.example.com/", "http://images.example.com.evil.example/"):
        with pytest.raises(AddressError, match="not fetched from this host"):
            policy.check_host(parse_address(url))
    with pytest.raises(AddressError):
        AddressPolicy([]).check_host(parse_address("http://example.com/"))


@pytest.mark.parametrize("host", ["https://a.example", "a.example/x", "a.example:80", "*.example", "a b", "-a"])
def test_a_list_of_what_are_no_hosts_ends_the_start(host: str) -> None:
    with pytest.raises(StartError, match="allowed_media_domains"):
        ServerConfig(allowed_media_domains=["a.example", host]).check()
    ServerConfig(allowed_media_domains=["a.example", "::1", "10.0.0.1"]).check()
