"""Two network namespaces with one link between them, made for a test and removed with it: nothing else is reached."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

__all__ = ["Link", "linked_nodes"]


class Link:
    """Two namespaces; ``address(0)`` and ``address(1)`` are the ends of their link."""

    def __init__(self, name: str) -> None:
        self._name = name

    def space(self, node: int) -> str:
        return f"{self._name}-{node}"

    def device(self, node: int) -> str:
        return f"ckm{os.getpid() % 100_000}v{node}"

    def address(self, node: int) -> str:
        return f"10.213.77.{node + 1}"

    def within(self, node: int, command: Sequence[str]) -> list[str]:
        """The command, as it runs on a node."""
        return ["ip", "netns", "exec", self.space(node), *command]

    def environment(self, node: int) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.device(node)}

    def cut(self) -> None:
        self._set("down")

    def heal(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        for node in (0, 1):
            _run("-n", self.space(node), "link", "set", self.device(node), state)

    def make(self) -> None:
        for node in (0, 1):
            _run("netns", "add", self.space(node))
        ends = [("name", self.device(node), "netns", self.space(node)) for node in (0, 1)]
        _run("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for node in (0, 1):
            _run("-n", self.space(node), "address", "add", f"{self.address(node)}/24", "dev", self.device(node))
            _run("-n", self.space(node), "link", "set", "lo", "up")
        self.heal()

    def remove(self) -> None:
        for node in (0, 1):
            subprocess.run(["ip", "netns", "delete", self.space(node)], capture_output=True, check=False)


def _run(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def linked_nodes() -> Iterator[Link]:
    """Make the namespaces, or skip the test with the reason."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the program ip")
    link = Link(f"ckptmirror-{os.getpid()}")
    try:
        try:
            link.make()
        except OSError as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        yield link
    finally:
        link.remove()
