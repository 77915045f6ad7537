"""``python -m ckptmirror.testing.gcs --port 0 --dir D``: run the server until SIGTERM or SIGINT.

When it listens it prints one line of JSON, ``{"port": …, "url": …}``, and nothing else on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
from pathlib import Path

from aiohttp import web

from ckptmirror.testing.gcs.app import GcsServer, Options

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
    parser.add_argument("--token", action="append", default=[], help="a bearer token that is let in")
    parser.add_argument("--denied-token", action="append", default=[], help="a bearer token that gets 403")
    parser.add_argument("--require-auth", action="store_true", help="only tokens from POST /token or --token get in")
    parser.add_argument("--token-lifetime-s", type=float, default=3600.0, help="of tokens from POST /token")
    parser.add_argument("--session-lifetime-s", type=float, default=7 * 86400.0, help="of resumable uploads")
    parser.add_argument("--no-md5", action="store_true", help="objects have no md5Hash: faster uploads")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input does")
    return parser.parse_args(arguments)


async def _run(arguments: argparse.Namespace) -> None:
    server = GcsServer(
        Options(
            directory=arguments.dir,
            buckets=tuple(arguments.bucket),
            tokens=tuple(arguments.token),
            denied_tokens=tuple(arguments.denied_token),
            require_auth=arguments.require_auth,
            token_lifetime_s=arguments.token_lifetime_s,
            session_lifetime_s=arguments.session_lifetime_s,
            md5=not arguments.no_md5,
        )
    )
    runner = web.AppRunner(
        server.app,
        access_log=None,
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
        shutdown_timeout=1.0,
        handle_signals=False,
    )
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port, backlog=_BACKLOG)
    await site.start()
    port = runner.addresses[0][1]
    sys.stdout.write(json.dumps({"port": port, "url": f"http://{arguments.host}:{port}"}) + "\n")
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
