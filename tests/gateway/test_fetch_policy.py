"""Which URLs and addresses pictures may come from."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm import settings
from gateway.fetch.policy import Forbidden, UrlPolicy, is_public, is_web, listing, ports
from gateway.settings import GatewaySettings

OPEN = UrlPolicy()


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.COM:443/A.png", "https://example.com/A.png"),
        ("  http://example.com/a.png\n", "http://example.com/a.png"),
        ("http://example.com/a.png#part", "http://example.com/a.png"),
        ("http://1.1.1.1/a.png", "http://1.1.1.1/a.png"),
        ("http://[2606:4700::1111]/a.png", "http://[2606:4700::1111]/a.png"),
        ("http://m\u00fcnchen.example/\u00e4", "http://xn--mnchen-3ya.example/%C3%A4"),
        # Signatures are over the bytes: nothing is written otherwise.
        ("http://example.com/a%2Fb%7e?x=%2C&y=a+b~", "http://example.com/a%2Fb%7e?x=%2C&y=a+b~"),
        ("http://example.com?x=1", "http://example.com/?x=1"),
    ],
)
def test_public_urls_are_taken_as_they_are_without_their_fragment(url: str, sent: str) -> None:
    assert str(OPEN.target(url).url) == sent


PRIVATE = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1",
    "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200",
    "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "192.88.99.1",
    "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "100::1",
    "2001:db8::1", "3fff::1", "5f00::1", "4000::1",
    # Forms that carry an IPv4 address.
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808",
    "2002:7f00:1::", "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001::1", "2001:10::1", "2001:20::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700::1111", "2a00:1450::1", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_public_is_refused_as_an_address_and_behind_a_name(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    for scheme in ("http", "https"):
        with pytest.raises(Forbidden):
            OPEN.target(f"{scheme}://{host}/x.png")
    name = OPEN.target("http://example.com/x.png")
    for others in ([], [ipaddress.ip_address("1.1.1.1")]):
        with pytest.raises(Forbidden):
            OPEN.check_addresses(name, [*others, ipaddress.ip_address(address)])


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_taken(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    target = OPEN.target(f"http://{host}/x.png")
    OPEN.check_addresses(target, [ipaddress.ip_address(address)])


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_calls_private_or_of_this_link(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    special = address.is_private or address.is_link_local or address.is_multicast
    if special or address.is_loopback or address.is_reserved or address.is_unspecified:
        nat64 = address in ipaddress.ip_network("64:ff9b::/96")
        assert not is_public(address) or nat64


def test_a_name_without_addresses_is_refused() -> None:
    with pytest.raises(Forbidden):
        OPEN.check_addresses(OPEN.target("http://example.com/"), [])


ODD = [
    "http://2130706433/", "http://017700000001/", "http://0x7f000001/", "http://0x7F.1/",
    "http://127.1/", "http://0177.0.0.1/", "http://127.0.0.01/", "http://1.2.3.4.5/",
    "http://0/", "http://0x/", "http://300.1.1.1/", "http://example.0x7f/", "http://1.1.1.1./",
    "http://example.com./", "http://example..com/", "http://.example.com/", "http:///x.png",
    "http://-example.com/", "http://exa$mple.com/", "http://%31%32%37.0.0.1/",
    "http://127%2e0%2e0%2e1/", f"http://{'a' * 64}.com/", f"http://{'a.' * 130}com/",
    "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[::1", "http://[1.1.1.1]/",
    # Other alphabets' dots and digits are what they look like.
    "http://\u2460\u2461\u2466.\u24ea.\u24ea.\u2460/", "http://\uff11\uff12\uff17.0.0.1/",
    "http://127\u30020\u30020\u30021/",
    "http://\ud83d.com/",
]  # fmt: skip


@pytest.mark.parametrize("url", ODD)
def test_odd_forms_of_a_host_are_refused(url: str) -> None:
    with pytest.raises(Forbidden):
        OPEN.target(url)


CONFUSING = [
    "http://user@example.com/", "http://user:secret@example.com/", "http://@example.com/",
    "http://example.com@127.0.0.1/", "http://127.0.0.1\\@example.com/",
    "http://example.com\\.evil.example/", "http://example.com/a b", "http://exam\tple.com/",
    "http://example.com/\r\nx: y", "http://example.com/\x00", "http://example.com/\x7f",
    "ftp://example.com/x.png", "file:///etc/passwd", "gopher://example.com/", "//example.com/",
    "http:/example.com/", "http:example.com", "javascript:0", "", "http://",
    "http://example.com:22/", "http://example.com:8080/", "http://example.com:0/",
    "http://example.com:99999/", "http://example.com:80:80/", "http://example.com:+80/",
    "http://example.com:\u0668\u0660/", "http://example.com/" + "x" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("url", CONFUSING)
def test_urls_that_parsers_read_differently_or_that_are_not_served_are_refused(url: str) -> None:
    with pytest.raises(Forbidden) as refusal:
        OPEN.target(url)
    assert "secret" not in refusal.value.message
    assert len(refusal.value.message) < 300


@given(st.text(), st.sampled_from(["http://", "https://", "http:/", ""]))
def test_any_text_is_a_target_with_a_plain_host_or_is_refused(text: str, scheme: str) -> None:
    try:
        target = OPEN.target(scheme + text)
    except Forbidden:
        return
    assert target.url.raw_host == target.host
    assert target.host.isascii()
    assert target.port in {80, 443}
    assert str(target.url).isascii()
    assert not target.url.fragment
    assert target.url.user is None


@pytest.mark.parametrize("host", ["localhost", "metadata", "kubernetes", "com"])
def test_names_without_a_dot_are_taken_only_where_they_are_listed(host: str) -> None:
    with pytest.raises(Forbidden):
        OPEN.target(f"http://{host}/")
    listed = UrlPolicy(allowed=listing(host)).target(f"http://{host}/")
    UrlPolicy(allowed=listing(host)).check_addresses(listed, [ipaddress.ip_address("10.0.0.1")])


def test_what_the_operator_allows_is_fetched_although_private() -> None:
    policy = UrlPolicy(allowed=listing("10.1.0.0/16, 192.168.7.7,fd00::/8,.corp.example,minio"))
    for url in ("http://10.1.2.3/", "http://192.168.7.7/", "http://[fd00::1]/"):
        policy.target(url)
    for url in ("http://10.2.0.1/", "http://192.168.7.8/", "http://127.0.0.1/"):
        with pytest.raises(Forbidden):
            policy.target(url)
    private = [ipaddress.ip_address("172.16.0.1")]
    policy.check_addresses(policy.target("http://a.b.corp.example/"), private)
    for name in ("corp.example", "notcorp.example", "corp.example.org"):
        with pytest.raises(Forbidden):
            policy.check_addresses(policy.target(f"http://{name}/"), private)
    # A network that is allowed lets names in that lead there.
    policy.check_addresses(policy.target("http://example.com/"), [ipaddress.ip_address("10.1.0.1")])


def test_what_the_operator_denies_is_refused_be_it_public_or_allowed() -> None:
    policy = UrlPolicy(
        allowed=listing("10.0.0.0/8"), denied=listing("10.9.0.0/16,*.evil.example,1.1.1.0/24")
    )
    for url in ("http://10.9.0.1/", "http://a.evil.example/", "http://1.1.1.1/"):
        with pytest.raises(Forbidden):
            policy.target(url)
    for url in ("http://10.8.0.1/", "http://evil.example/", "http://1.1.2.1/"):
        policy.target(url)
    with pytest.raises(Forbidden):
        policy.check_addresses(
            policy.target("http://example.com/"), [ipaddress.ip_address("1.1.1.9")]
        )


def test_only_what_is_allowed_is_fetched_where_the_operator_says_so() -> None:
    policy = UrlPolicy(allowed=listing("cdn.example,8.8.0.0/16"), only_allowed=True)
    public = [ipaddress.ip_address("1.1.1.1")]
    policy.check_addresses(policy.target("https://cdn.example/x.png"), public)
    policy.target("http://8.8.4.4/")
    with pytest.raises(Forbidden):
        policy.target("http://1.1.1.1/")
    with pytest.raises(Forbidden):
        policy.check_addresses(policy.target("https://other.example/"), public)


def test_ports_are_those_that_the_operator_lists() -> None:
    policy = UrlPolicy(ports=ports("8080, 443"))
    assert policy.target("http://example.com:8080/").port == 8080
    assert policy.target("https://example.com/").port == 443
    with pytest.raises(Forbidden) as refusal:
        policy.target("http://example.com/")
    assert "443, 8080" in refusal.value.message


@pytest.mark.parametrize(
    "text", ["10.0.0.0/33", "a b", "http://x.example", "1.2.3", "x..y", "10.1.0.1/16"]
)
def test_a_list_with_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        listing(f"example.com,{text}")


@pytest.mark.parametrize("text", ["", "0", "65536", "80,x", "-1"])
def test_a_list_with_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no list of ports"):
        ports(text)


def test_the_settings_are_one_switch_and_lists_that_are_checked_at_start() -> None:
    def read(*flags: str) -> GatewaySettings:
        return settings.read(GatewaySettings, flags, program="gateway")

    assert read().url_pictures
    assert not read("--no-url-pictures").url_pictures
    policy = read("--url-allow", "10.0.0.0/8,minio", "--url-deny", "10.1.0.0/16").url_policy
    policy.target("http://10.2.0.1/")
    with pytest.raises(Forbidden):
        policy.target("http://10.1.0.1/")
    assert read("--url-ports", "8080").url_policy.ports == {8080}
    for flag, text in (("--url-allow", "a b"), ("--url-deny", "1.2.3"), ("--url-ports", "x"),
                       ("--url-ca-file", "nowhere.pem"), ("--url-seconds", "0")):  # fmt: skip
        with pytest.raises(SystemExit):
            read(flag, text)


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("/b.png", "http://example.com/b.png"),
        ("b.png?x=1", "http://example.com/a/b.png?x=1"),
        ("//other.example/", "http://other.example/"),
        ("https://other.example/x#y", "https://other.example/x"),
    ],
)
def test_a_redirect_is_read_from_where_it_stands(location: str, leads_to: str) -> None:
    target = OPEN.target("http://example.com/a/a.png")
    assert str(OPEN.redirected(target, location).url) == leads_to


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1/", "//10.0.0.1/", "file:///etc/passwd", "ftp://example.com/",
     "http://user@example.com/", "http://example.com:6379/", "http://[::1", "data:,x"],
)  # fmt: skip
def test_a_redirect_to_where_no_url_may_lead_is_refused(location: str) -> None:
    with pytest.raises(Forbidden):
        OPEN.redirected(OPEN.target("http://example.com/a.png"), location)


def test_web_urls_are_told_from_others() -> None:
    assert all(is_web(url) for url in ("http://x", " HTTPS://x", "\nhttp://"))
    assert not any(is_web(url) for url in ("data:,x", "http:/x", "file:///x", "", "xhttp://"))
