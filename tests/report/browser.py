"""What headless Chromium exposes of a page to a screen reader: its accessibility tree, through a pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@dataclass(frozen=True)
class Node:
    """A node that is not hidden from screen readers."""

    role: str
    name: str
    description: str
    value: str
    is_focusable: bool
    is_focused: bool


class Browser:
    """One page; `call` sends a command of the DevTools protocol to it."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number, self._session = 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Accessibility.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return dict(self._wait(lambda found: found.get("id") == self._number)["result"])

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.absolute().as_uri())
        self._wait(lambda found: found.get("method") == "Page.loadEventFired")

    def tree(self) -> list[Node]:
        """In the order of reading."""
        found = self.call("Accessibility.getFullAXTree")["nodes"]
        by_id = {node["nodeId"]: node for node in found}
        ordered = list(_in_order(found[0], by_id))
        return [_node(each) for each in ordered if not each["ignored"]]

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def run(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def _wait(self, is_it: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._read:
                self._read += os.read(self._answers, 1 << 20) or _fail()
            text, _, self._read = self._read.partition(b"\0")
            found = json.loads(text)
            if is_it(found):
                assert "error" not in found, found
                return dict(found)


KEYS = {"Tab": 9, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the context."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe()
    answers_read, answers_write = os.pipe()
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    words += [f"--user-data-dir={profile}", "--no-first-run"]
    # The browser reads from descriptor 3 and writes to 4.
    shell = f'exec 3<&{to_read} 4>&{answers_write}; exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, *words],
        pass_fds=(to_read, answers_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(answers_write)
    try:
        yield Browser(to_write, answers_read)
    finally:
        os.close(to_write)
        os.close(answers_read)
        process.kill()
        process.wait()


def _fail() -> bytes:
    raise AssertionError("the browser has ended")


def _in_order(node: dict[str, Any], by_id: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("childIds", ()):
        if child in by_id:
            yield from _in_order(by_id[child], by_id)


def _node(found: dict[str, Any]) -> Node:
    def text(key: str) -> str:
        return str(found.get(key, {}).get("value", ""))

    properties = {each["name"]: each["value"].get("value") for each in found.get("properties", ())}
    focusable, focused = (bool(properties.get(name)) for name in ("focusable", "focused"))
    return Node(text("role"), text("name"), text("description"), text("value"), focusable, focused)
