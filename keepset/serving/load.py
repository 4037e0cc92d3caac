"""A load, and the server that receives it."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from keepset.errors import KeepsetError
from keepset.serving.metrics import import_http

MAX_CONCURRENCY = 1_000


@dataclass(frozen=True)
class Load:
    """Requests of equal size.

    Attributes:
        requests: number of requests in a round, each with its own text.
        prompt_tokens: tokens of a text.
        output_tokens: tokens of an answer.
        concurrency: the most requests that are open at once.
        rounds: how often all requests are made, each time with other texts.
        seed: seed of the choice of texts.
        question_tokens: tokens of a question after each text. Then the texts are documents, the same in every round.

    Raises:
        KeepsetError: a number is out of range.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rounds: int = 1
    seed: int = 0
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


@dataclass(frozen=True)
class ServedModel:
    """A server's model: its name for requests, its folder or hub name, and the tokens of its context if known."""

    name: str
    root: str | None
    longest: int | None


def served_model(url: str) -> ServedModel:
    """Return the model that a server serves; raise `KeepsetError` if the server is not OpenAI-compatible."""
    library = import_http()
    try:
        answer = library.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
        answer.raise_for_status()
        model = answer.json()["data"][0]
        name, root, longest = str(model["id"]), model.get("root"), model.get("max_model_len")
    except (library.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        cause = str(error) if isinstance(error, library.HTTPError) else "it does not say what it serves"
        raise KeepsetError(f"There is no OpenAI-compatible server at {url} ({cause.splitlines()[0]}).") from error
    return ServedModel(
        name, root if isinstance(root, str) else None, longest if isinstance(longest, int) and longest > 0 else None
    )


def check_fits(load: Load, model: ServedModel) -> None:
    """Raise `KeepsetError` if a load's requests are longer than the server's context."""
    prompt = load.prompt_tokens + load.question_tokens
    if model.longest is not None and prompt + load.output_tokens > model.longest:
        raise KeepsetError(
            f"{prompt} tokens of prompt and {load.output_tokens} of output do not fit the server's "
            f"context of {model.longest}: ask for fewer, or give it a larger --max-model-len."
        )


def local_url(url: str) -> str:
    """Return the address of a server on this machine, without a slash at its end.

    Raises:
        KeepsetError: it is not such an address. Other machines never get a load.
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
    # IPv6 addresses that map or scope another address are refused.
    return address.is_loopback if address.version == 4 else str(address) == "::1"
