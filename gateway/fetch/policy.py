"""Which URLs a picture may be fetched from, and which addresses may be dialled for them.

Pure: nothing is looked up or dialled here. What is fetched is decided twice, for the URL as it is
written and then for every address that its name has. Whatever parses a URL after this one must take
`Target.url` as it is, so that nobody can read another host out of the same text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias
from urllib.parse import urljoin

from yarl import URL

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

MAX_URL: Final = 8192  # characters, as much as common servers take of a request line
_MAX_HOST: Final = 253  # characters of a name that DNS can carry (RFC 1035, 2.3.4)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_AUTHORITY: Final = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_HOST_AND_PORT: Final = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]{0,5})?")
_ODD: Final = re.compile(r"[\x00-\x20\x7f\\]")  # what parsers drop, mend or disagree about
_NAME: Final = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9-]{1,63}")
# WHATWG URL, 4.5 "ends in a number": resolvers take such hosts for IPv4 addresses.
_NUMBER: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")

# IANA's special-purpose registries, multicast, and the address of Azure's host agent, which is the
# one metadata service that lies in public space.
_NOT_PUBLIC_4: Final = tuple(
    IPv4Network(block)
    for block in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",
    )
)  # fmt: skip
# All else of IPv6 is loopback, mapped, local, multicast or not given out (RFC 4291, 2.4).
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
# Within it: protocol assignments and Teredo, documentation, 6to4, documentation again.
_NOT_PUBLIC_6: Final = tuple(
    IPv6Network(block) for block in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
# What DNS64 answers with where there is no IPv4 (RFC 6052): the last 32 bits say who is meant.
_NAT64: Final = IPv6Network("64:ff9b::/96")

_GRAMMAR: Final = "The image URL is against the grammar of URLs."
_HOST_FORM: Final = (
    "The host of the image URL is written in a form that is not taken; write a name, or a public "
    "address as four decimal numbers or in brackets."
)
_EXCLUDED: Final = (
    "Pictures are not fetched from the host of this image URL: it has no public address, or is "
    "not among those that this server allows. Send the picture as a data URL."
)


class Forbidden(Exception):
    """A URL that is not fetched. `message` is safe for the wire: it repeats nothing of the URL."""

    def __init__(self, message: str = _EXCLUDED) -> None:
        super().__init__(message)
        self.message: Final[str] = message


@dataclass(frozen=True)
class Target:
    """A URL that may be fetched if its addresses may be dialled.

    Attributes:
        url: without fragment, its host in lower case and ASCII.
        address: the host itself where it is one, and None for a name.
    """

    url: URL
    host: str
    port: int
    address: Address | None


@dataclass(frozen=True)
class Listing:
    """Hosts and networks as an operator lists them.

    `hosts` are names in lower case; one that begins with a dot stands for all names below it.
    """

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    def has_host(self, host: str) -> bool:
        labels = host.split(".")
        below = ("." + ".".join(labels[at:]) for at in range(1, len(labels)))
        return host in self.hosts or any(name in self.hosts for name in below)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def listing(text: str) -> Listing:
    """`text`: names, `.names`, addresses and networks (CIDR), separated by commas.

    Raises ValueError for what is none of them.
    """
    hosts: set[str] = set()
    networks: list[Network] = []
    for entry in (one.strip().lower() for one in text.split(",")):
        if not entry:
            continue
        try:
            networks.append(ip_network(entry))
            continue
        except ValueError:
            name = entry.removeprefix("*")
        if _NUMBER.fullmatch(name) or not _NAME.fullmatch(name.removeprefix(".")):
            raise ValueError(f"{entry!r} is no host, no .host, no address and no network")
        hosts.add(name)
    return Listing(frozenset(hosts), tuple(networks))


def ports(text: str) -> frozenset[int]:
    """`text`: ports, separated by commas. Raises ValueError."""
    found = [one.strip() for one in text.split(",") if one.strip()]
    if not found or not all(one.isdecimal() and 0 < int(one) < 65536 for one in found):
        raise ValueError(f"{text!r} is no list of ports")
    return frozenset(int(one) for one in found)


@dataclass(frozen=True)
class UrlPolicy:
    """What an operator lets be fetched.

    Attributes:
        allowed: fetched from although not public: names whatever their addresses, and addresses.
        denied: never fetched from, be it allowed or public.
        only_allowed: nothing else than `allowed` is fetched from.
        ports: that a URL may name.
    """

    allowed: Listing = Listing()
    denied: Listing = Listing()
    only_allowed: bool = False
    ports: frozenset[int] = frozenset(_DEFAULT_PORTS.values())

    def target(self, text: str) -> Target:
        """The target of an http or https URL. Raises Forbidden."""
        url = _parse(text)
        host, port = url.raw_host or "", url.port or 0
        if port not in self.ports:
            ports = ", ".join(str(one) for one in sorted(self.ports))
            raise Forbidden(f"Image URLs are fetched from these ports only: {ports}.")
        address = _literal(host)
        target = Target(url, host, port, address)
        if address is not None:
            self.check_addresses(target, [address])
        else:
            self._check_name(host)
        return target

    def redirected(self, target: Target, location: str) -> Target:
        """Where a redirect of `target` leads. Raises Forbidden."""
        try:
            text = urljoin(str(target.url), location)
        except ValueError:
            raise Forbidden("The image URL redirects to what is no URL.") from None
        return self.target(text)

    def check_addresses(self, target: Target, addresses: Iterable[Address]) -> None:
        """Raises Forbidden unless each of `addresses`, those of `target`, may be dialled.

        One bad address spoils the name: a name with good and bad ones is how guards are tricked.
        """
        known = list(addresses)
        if not known or not all(self._may_dial(target, address) for address in known):
            raise Forbidden

    def _may_dial(self, target: Target, address: Address) -> bool:
        if self.denied.has_address(address):
            return False
        by_name = target.address is None and self.allowed.has_host(target.host)
        if by_name or self.allowed.has_address(address):
            return True
        return not self.only_allowed and is_public(address)

    def _check_name(self, host: str) -> None:
        if len(host) > _MAX_HOST or _NUMBER.fullmatch(host) or not _NAME.fullmatch(host):
            raise Forbidden(_HOST_FORM)
        if self.denied.has_host(host):
            raise Forbidden
        if "." not in host and not self.allowed.has_host(host):
            raise Forbidden  # of this machine, or of a search domain: never public


def is_public(address: Address) -> bool:
    """Whether packets to `address` leave for the internet, as far as the address itself tells."""
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_4)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_UNICAST and not any(address in block for block in _NOT_PUBLIC_6)


def is_web(url: str) -> bool:
    """Whether `url` is an http or https URL, as against a data URL and all others."""
    return url.lstrip()[:8].lower().startswith(("http://", "https://"))


def _parse(text: str) -> URL:
    text = text.strip()
    if len(text) > MAX_URL:
        raise Forbidden(f"The image URL has more than {MAX_URL} characters.")
    authority = _AUTHORITY.match(text)
    if authority is None:
        raise Forbidden("Only http and https image URLs are fetched.")
    if _ODD.search(text):
        raise Forbidden("The image URL has blanks, control characters or backslashes; encode them.")
    if "@" in authority[1]:
        raise Forbidden("An image URL with a user name or a password is not fetched.")
    try:
        url = URL(text)
    except ValueError:
        raise Forbidden(_GRAMMAR) from None
    if not _HOST_AND_PORT.fullmatch(authority[1]):
        raise Forbidden(_GRAMMAR)
    if url.scheme not in _DEFAULT_PORTS or url.user is not None or url.password is not None:
        raise Forbidden(_HOST_FORM)
    return _as_written(url, text[authority.end() :].partition("#")[0])


def _as_written(url: URL, rest: str) -> URL:
    """`url` with path and query as they were sent, which signatures may be about."""
    if not rest.isascii():
        return url.with_fragment(None)
    return URL(f"{url.scheme}://{url.raw_authority}{rest or '/'}", encoded=True)


def _literal(host: str) -> Address | None:
    if "%" in host:  # a zone: of this machine
        raise Forbidden(_HOST_FORM)
    try:
        return ip_address(host)
    except ValueError:
        return None
