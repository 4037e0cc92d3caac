"""What a load consists of, and which server may be put under it."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from keepset.errors import KeepsetError

MAX_CONCURRENCY = 1_000


@dataclass(frozen=True)
class Load:
    """Requests of equal size, sent as soon as there is a free place.

    Attributes:
        requests: how many, each with a text of its own.
        question_tokens: of a question after each text; then the texts are documents, the same in every round.
        concurrency: how many may be outstanding at once.
        rounds: how often it all is repeated, with other texts.
        seed: for the choice of texts.
        timeout: seconds that a request may take.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rounds: int = 1
    seed: int = 0
    timeout: float = 600.0
    question_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("requests", self.requests, 1, 10_000),
            ("prompt-tokens", self.prompt_tokens, 1, 1_000_000),
            ("output-tokens", self.output_tokens, 1, 1_000_000),
            ("question-tokens", self.question_tokens, 0, 1_000_000),
            ("concurrency", self.concurrency, 1, MAX_CONCURRENCY),
            ("rounds", self.rounds, 1, 100),
            ("seed", self.seed, 0, 2**63 - 1),
        ):
            if not least <= value <= most:
                raise KeepsetError(f"--{name} {value} is out of range: use an integer from {least} to {most}.")
        if not 0 < self.timeout <= 86400:
            raise KeepsetError(f"--request-timeout {self.timeout} is out of range: use seconds from above 0 to 86400.")


def local_url(url: str) -> str:
    """The address of a server on this machine, without a slash at its end.

    Raises:
        KeepsetError: it is no such address; a load is put on nobody else's machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    plain = parts.scheme == "http" and parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    if not (plain and parts.password is None and host):
        raise KeepsetError(f"--url {url!r} is not the address of a server: write one such as http://127.0.0.1:8000.")
    if not _is_local(host):
        raise KeepsetError(
            f"--url {url!r} is not on this machine: a load is only put on localhost, 127.0.0.0/8 or [::1]."
        )
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}" if port is None else f"http://{name}:{port}"


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    # An IPv6 address that maps or scopes another one is not worth its doubts.
    return address.is_loopback if address.version == 4 else str(address) == "::1"
