"""Where a request of ours may be sent: to the public internet, over https, and nowhere inside.

A name is resolved once, each of its addresses is checked, and the connection goes to the checked address, so that a name
that changes its mind between check and use (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

MAX_URL = 2048
_WRAPPERS = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96"))
"""IPv6 ranges that carry an IPv4 address, perhaps a private one."""


class AddressRefused(Exception):
    """The address is not one a request may be sent to; the message says why and what to do."""


def check_url(url: str, *, allow_private: bool) -> None:
    """What can be known of an address without asking the network. Raises AddressRefused."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise AddressRefused(f"the address must be at most {MAX_URL} printable ASCII characters without blanks; percent-encode others")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressRefused(f"the address is malformed: {error}; give one such as https://hooks.example.com/grpo") from error
    if parts.scheme != "https" and not (allow_private and parts.scheme == "http"):
        raise AddressRefused("the address must begin with https://; give one that does" + (" (or with http://)" if allow_private else ""))
    if not parts.hostname or port == 0:
        raise AddressRefused("the address names no host, or port 0; give one such as https://hooks.example.com/grpo")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise AddressRefused("the address must hold no user name, password or fragment; leave it out")
    if allow_private:
        return
    try:
        literal = ipaddress.ip_address(parts.hostname)
    except ValueError:
        if parts.hostname == "localhost" or parts.hostname.endswith(".localhost"):
            raise AddressRefused("the address means this machine; use a public one") from None
    else:
        _require_public(literal)


def resolve(host: str, port: int, *, allow_private: bool) -> list[str]:
    """The IP addresses of a host, all of them checked. Raises AddressRefused when one is not public, OSError when there is none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not allow_private:
        for text in addresses:
            _require_public(ipaddress.ip_address(text.partition("%")[0]))
    return addresses


def _require_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _require_public(address.ipv4_mapped)
        if any(address in network for network in _WRAPPERS):
            raise AddressRefused(f"{address} wraps another address; use a plain public one")
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        raise AddressRefused(
            f"{address} is not a public address; the operator may allow private ones "
            "(GRPO_WEBHOOK_ALLOW_PRIVATE, GRPO_REMOTE_GRADER_ALLOW_PRIVATE)"
        )
    return None
