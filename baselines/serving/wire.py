"""HTTP to a server on this machine, with the standard library: JSON calls, and replies that stream."""

import http.client
import json
import time
from collections.abc import Iterator

HOST = "127.0.0.1"
DONE = "[DONE]"
QUOTED = 300  # bytes of an answer that an error shows


class ServerError(RuntimeError):
    """A server that answered with an error, broke off, or did not answer."""


def call(port: int, method: str, path: str, body: dict | None = None, *, timeout: float = 60) -> tuple[int, bytes]:
    """Return (status, body) of one call; raises ServerError when there is no answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request(method, path, *_encoded(body))
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{method} {path}: no answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()


def get_json(port: int, path: str, *, timeout: float = 60) -> dict:
    """Return the JSON object of a GET; raises ServerError for another status, or for what is no object."""
    status, data = call(port, "GET", path, timeout=timeout)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if status != 200 or not isinstance(found, dict):
        raise ServerError(f"GET {path}: status {status}, {_brief(data)}")
    return found


def stream(port: int, path: str, body: dict, *, timeout: float) -> Iterator[dict]:
    """Yield the objects of a streamed reply as they come; closing the generator closes the connection.

    `timeout` is in seconds between two chunks, whatever else is sent between them. Raises ServerError for an error
    status, an error in a chunk, and a stream that ends before its end mark: a server that died in mid-request, or one
    that answered with something else, which is quoted.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("POST", path, *_encoded(body))
        reply = connection.getresponse()
        if reply.status != 200:
            raise ServerError(f"POST {path}: status {reply.status}, {_brief(reply.read())}")
        since, other = time.monotonic(), b""
        for line in _lines(reply):
            if not line.startswith(b"data:"):
                other += line[: QUOTED - len(other)]
                # a server that only keeps the connection alive makes no progress, and every byte restarts the socket's
                if time.monotonic() - since > timeout:
                    raise ServerError(f"POST {path}: no chunk for {timeout:g} s, only {_brief(other.strip())}")
                continue
            text = line[5:].strip().decode()
            if text == DONE:
                return
            chunk = json.loads(text)
            if not isinstance(chunk, dict) or chunk.get("error") is not None or chunk.get("object") == "error":
                found = chunk.get("error", text) if isinstance(chunk, dict) else text
                raise ServerError(f"POST {path}: {_brief(str(found).encode())}")
            yield chunk
            since, other = time.monotonic(), b""
        said = f"; it said {_brief(other.strip())}" if other.strip() else ""
        raise ServerError(f"POST {path}: the reply broke off before its end; the server died or gave up{said}")
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise ServerError(f"POST {path}: the reply broke off ({type(error).__name__}: {error})") from error
    finally:
        connection.close()


def _lines(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a reply without their ends, and an empty one for a piece that ends none: time goes on."""
    rest = b""
    while piece := reply.read1(1 << 16):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines or [b""]
    if rest:
        yield rest


def _encoded(body: dict | None) -> tuple[str | None, dict[str, str]]:
    return (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})


def _brief(data: bytes) -> str:
    return " ".join(data[:QUOTED].decode(errors="replace").split()) or "an empty body"
