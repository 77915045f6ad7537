"""``python -m ckptmirror.testing.gcs --port 0 --dir D``: run the server until SIGTERM or SIGINT.

When it listens it prints one line of JSON, ``{"port": …, "url": …}``, and nothing else on standard output. Options that
make no sense end it with one line on standard error and the exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError
from ckptmirror.testing.gcs.app import GcsServer, Options
from ckptmirror.testing.gcs.auth import read_custom_roles, read_tokens_file

_READ_BUFFER_BYTES = 1024 * 1024
_BACKLOG = 1024


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ckptmirror.testing.gcs", description="A strict test server for gs://"
    )
    parser.add_argument("--dir", type=Path, required=True, help="where everything is kept; survives kill -9")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--bucket", action="append", default=[], help="create this bucket if it is missing")
    parser.add_argument("--bucket-settings", type=_json_object, default={}, help="their fields, as a bucket resource")
    parser.add_argument("--token", action="append", default=[], help="a bearer token that is let in")
    parser.add_argument("--denied-token", action="append", default=[], help="a bearer token that gets 403")
    parser.add_argument("--tokens-file", type=Path, help="JSON: which token may do what; see docs/testing.md")
    parser.add_argument("--require-auth", action="store_true", help="only tokens from POST /token or --token get in")
    parser.add_argument("--token-lifetime-s", type=float, default=3600.0, help="of tokens from POST /token")
    parser.add_argument("--session-lifetime-s", type=float, default=7 * 86400.0, help="of resumable uploads")
    parser.add_argument("--no-md5", action="store_true", help="objects have no md5Hash: faster uploads")
    parser.add_argument("--mutations-per-s", type=_positive, help="one object changes so often at most, else 429")
    parser.add_argument("--rewrite-bytes-per-call", type=int, help="a longer rewrite takes several calls")
    parser.add_argument("--day-s", type=float, default=86400.0, help="how long a day of soft deletion takes")
    parser.add_argument("--tls-cert", type=Path, help="a certificate chain (PEM): answer over TLS")
    parser.add_argument("--tls-key", type=Path, help="its key, if it is not in the same file")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input does")
    return parser.parse_args(arguments)


def _json_object(text: str) -> Mapping[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("it is not a JSON object")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("it is more than 0")
    return value


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        directory=arguments.dir,
        buckets=tuple(arguments.bucket),
        bucket_settings=arguments.bucket_settings,
        tokens=tuple(arguments.token),
        denied_tokens=tuple(arguments.denied_token),
        callers=read_tokens_file(arguments.tokens_file) if arguments.tokens_file else {},
        custom_roles=read_custom_roles(arguments.tokens_file) if arguments.tokens_file else {},
        require_auth=arguments.require_auth,
        token_lifetime_s=arguments.token_lifetime_s,
        session_lifetime_s=arguments.session_lifetime_s,
        md5=not arguments.no_md5,
        mutations_per_s=arguments.mutations_per_s,
        rewrite_bytes_per_call=arguments.rewrite_bytes_per_call,
        day_s=arguments.day_s,
    )


def _tls(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    if arguments.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(arguments.tls_cert, arguments.tls_key)
    return context


async def _run(arguments: argparse.Namespace) -> None:
    try:
        server, tls = GcsServer(_options(arguments)), _tls(arguments)
    except (ValueError, OSError, ApiError) as error:
        sys.stderr.write(f"the server does not start: {error}\n")
        raise SystemExit(2) from None
    runner = web.AppRunner(
        server.app,
        access_log=None,
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
        shutdown_timeout=1.0,
        handle_signals=False,
    )
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port, backlog=_BACKLOG, ssl_context=tls)
    await site.start()
    port, scheme = runner.addresses[0][1], "http" if tls is None else "https"
    sys.stdout.write(json.dumps({"port": port, "url": f"{scheme}://{arguments.host}:{port}"}) + "\n")
    sys.stdout.flush()
    await _until_told(exit_with_stdin=arguments.exit_with_stdin)
    await runner.cleanup()
    server.close()


async def _until_told(*, exit_with_stdin: bool) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else stop.set())
    await stop.wait()


def main(arguments: list[str] | None = None) -> None:
    """Run the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_run(_parse(sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    main()
