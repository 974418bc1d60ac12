"""A client of the key-value store in `horovod.runner.http.http_server`."""

from __future__ import annotations

import hmac
import http.client
import urllib.parse

from horovod.runner.http.http_server import DIGEST_HEADER, NOT_FOUND, OK, digest

_TIMEOUT_S = 600.0


def read_data_from_kvstore(addr: str, port: int, scope: str, key: str, timeout: float = _TIMEOUT_S) -> bytes:
    """Returns a value. Raises KeyError if there is none, and OSError if the server cannot be reached or fails."""
    status, body = _request(addr, port, "GET", scope, key, b"", timeout)
    if status == NOT_FOUND:
        raise KeyError(f"{scope}/{key}")
    return body


def put_data_into_kvstore(addr: str, port: int, scope: str, key: str, value: bytes, timeout: float = 30.0) -> None:
    """Stores a value. Raises OSError if the server cannot be reached or fails."""
    _request(addr, port, "PUT", scope, key, value, timeout)


def _request(addr: str, port: int, method: str, scope: str, key: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    path = f"/{urllib.parse.quote(scope)}/{urllib.parse.quote(key, safe=':')}"
    connection = http.client.HTTPConnection(addr, port, timeout=timeout)
    try:
        connection.request(method, path, body, {DIGEST_HEADER: digest(method, path, body)})
        response = connection.getresponse()
        answer = response.read()
        given = response.getheader(DIGEST_HEADER, "")
    except http.client.HTTPException as error:
        raise OSError(f"{addr}:{port} does not answer as a rendezvous server: {error}") from error
    finally:
        connection.close()
    if not hmac.compare_digest(given, digest(str(response.status), path, answer)):
        raise OSError(f"the answer of {addr}:{port} is not authenticated by the key of the job")
    if response.status not in (OK, NOT_FOUND):
        raise OSError(f"{addr}:{port} answered with {response.status}: {answer.decode(errors='replace')}")
    return response.status, answer
