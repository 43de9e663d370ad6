"""Download from an allowed domain, and from nowhere that its name may lead to instead.

A host's name is looked up once for each hop; every address it has must be public; the connection goes to one of
those addresses, whatever the name says a moment later (DNS rebinding). Redirects are hops like the first. The whole
of it, look-ups included, has one deadline, and a body is given up at the limit, while it streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from triptych.errors import MediaError
from triptych.media.fetch.policy import MediaPolicy, named, too_big

if TYPE_CHECKING:
    import httpx

Lookup = Callable[[str, int], Sequence[str]]  # host and port → IP addresses

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def download(url: str, policy: MediaPolicy, lookup: Lookup) -> bytes:
    """Blocks; must not be called from a running event loop. Raises MediaError."""
    if not policy.allowed_domains:
        raise MediaError("http(s) URLs are off", hint="the operator may allow hosts with --allowed-media-domains")
    try:
        return asyncio.run(_within_deadline(url, policy, lookup))
    except TimeoutError:
        raise MediaError(
            f"{named(url)} was not downloaded within {policy.timeout_s} s", hint="send the picture as a data: URL"
        ) from None


def look_up(host: str, port: int) -> Sequence[str]:
    """The system's resolver."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


async def _within_deadline(url: str, policy: MediaPolicy, lookup: Lookup) -> bytes:
    import httpx

    async with (
        asyncio.timeout(policy.timeout_s),
        httpx.AsyncClient(trust_env=False, verify=_tls(), timeout=None) as client,
    ):
        target = _parse(url)
        for _ in range(policy.max_redirects + 1):
            found = await _hop(client, target, policy, lookup)
            if isinstance(found, bytes):
                return found
            target = found
    raise MediaError(f"{named(url)} was redirected more than {policy.max_redirects} times")


async def _hop(client: httpx.AsyncClient, url: httpx.URL, policy: MediaPolicy, lookup: Lookup) -> bytes | httpx.URL:
    """One request to one pinned address: the body, or where it was redirected to."""
    import httpx

    host = _checked_host(url, policy)
    port = url.port or (443 if url.scheme == "https" else 80)
    addresses = await _looked_up(lookup, host, port)
    if not policy.allows_private and not all(map(is_public, addresses)):
        raise MediaError(f"{host} leads to an internal address", hint="only public addresses are fetched from")
    reason = "it has no address"
    for address in addresses:
        headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        request = client.build_request(
            "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": host}
        )
        try:
            response = await client.send(request, stream=True)
        except httpx.ConnectError as error:
            reason = str(error) or "connection refused"
            continue
        except httpx.HTTPError as error:
            raise MediaError(f"{host} did not answer: {type(error).__name__}") from None
        try:
            return await _read(response, url, policy)
        except httpx.HTTPError as error:
            raise MediaError(f"{host} broke off: {type(error).__name__}") from None
        finally:
            await response.aclose()
    raise MediaError(f"{host} cannot be reached: {reason[:120]}")


async def _read(response: httpx.Response, url: httpx.URL, policy: MediaPolicy) -> bytes | httpx.URL:
    if response.has_redirect_location:
        return _parse(response.headers["location"], url)
    if response.status_code != 200:
        raise MediaError(f"{url.host} answered {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise MediaError(f"{url.host} sent the picture compressed though asked not to")
    announced = response.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > policy.max_bytes:
        raise too_big(f"the picture at {url.host}", int(announced), policy)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > policy.max_bytes:
            raise too_big(f"the picture at {url.host}", len(body), policy)
    return bytes(body)


def _parse(url: str, base: httpx.URL | None = None) -> httpx.URL:
    import httpx

    try:
        parsed = httpx.URL(url) if base is None else base.join(url)
    except (httpx.InvalidURL, ValueError):
        raise MediaError(f"{named(url)} is malformed") from None
    if (parsed.port or 0) > 65_535:
        raise MediaError(f"{named(url)} names port {parsed.port:,}, the last is 65,535")
    if parsed.scheme not in ("http", "https"):
        raise MediaError(f"redirected to a {parsed.scheme[:16]!r} URL; http and https are followed")
    if parsed.userinfo:
        raise MediaError(f"{named(url)} holds a user name", hint="send the URL without it")
    return parsed


def _checked_host(url: httpx.URL, policy: MediaPolicy) -> str:
    host = url.raw_host.decode("ascii").lower().rstrip(".")
    if not host or ("*" not in policy.allowed_domains and host not in policy.allowed_domains):
        raise MediaError(
            f"pictures from {host[:100] or 'nowhere'} are not allowed",
            hint="the operator may allow the host with --allowed-media-domains",
        )
    if url.port is not None and host not in policy.allowed_domains and not policy.allows_private:
        raise MediaError(
            f"port {url.port} of {host[:100]} is not allowed: where any host is, only http's and https's own are",
            hint="the operator may allow the host by its name with --allowed-media-domains",
        )
    return host


def is_public(address: str) -> bool:
    """Whether it is one of the open internet's, as must be the IPv4 address that an IPv6 one may carry."""
    parsed = ipaddress.ip_address(address.split("%", 1)[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        carried = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if parsed in _NAT64:
            carried = ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)
        if carried is not None:
            return is_public(str(carried))
        if parsed.is_site_local:
            return False
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


async def _looked_up(lookup: Lookup, host: str, port: int) -> Sequence[str]:
    """In a thread that nobody waits for once the deadline is over: resolvers cannot be cancelled."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Sequence[str]] = loop.create_future()

    def settle(addresses: Sequence[str] | None) -> None:
        if answer.cancelled():
            return
        if addresses:
            answer.set_result(list(dict.fromkeys(addresses)))
        else:
            answer.set_exception(MediaError(f"{host} has no address"))

    def run() -> None:
        try:
            addresses = lookup(host, port)
        except (OSError, UnicodeError):
            addresses = []
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, addresses)

    threading.Thread(target=run, name="triptych-lookup", daemon=True).start()
    return await answer


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context(trust_env=False)
