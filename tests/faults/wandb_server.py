"""A stand-in on loopback for the part of wandb's server that `wandb agent` talks to: four GraphQL requests.

Which answers the agent needs was read from wandb 0.31's sources. What a real server does beside that, such as
choosing values or early stopping, is what the test tells it to: `commands` are handed out one per heartbeat.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Command = dict[str, Any]


class SweepServer:
    """What the agent has asked, and what it will be told to do next."""

    def __init__(self, command: list[str]) -> None:
        self.config = json.dumps({"command": command, "method": "grid", "program": "none"})  # JSON is YAML
        self.commands: list[list[Command]] = []  # one entry per heartbeat; then it is told to wait
        self.running: list[dict[str, bool]] = []  # the runs that each heartbeat reports as running
        self.url = ""

    def run(self, run_id: str, parameters: dict[str, Any]) -> Command:
        """The command that starts a run with these values."""
        args = {key: {"value": value} for key, value in parameters.items()}
        return {"type": "run", "run_id": run_id, "program": "none", "args": args}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "agentHeartbeat" in query:
            self.running.append(json.loads(variables["runState"]))
            commands = self.commands.pop(0) if self.commands else []
            return {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": json.dumps(commands)}}
        if "createAgent" in query:
            return {"createAgent": {"agent": {"id": "agent"}}}
        if "sweep(" in query:
            return {
                "project": {"sweep": {"id": "s", "name": "s", "config": self.config, "runs": {"edges": []}}}
            }
        viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"cliVersionInfo": {"max_cli_version": "9"}}}


@contextmanager
def sweep_server(command: list[str]) -> Iterator[SweepServer]:
    told = SweepServer(command)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = json.loads(text or b"{}")  # its service also sends empty ones, to other pages
            answer = told.answer(request.get("query", ""), request.get("variables") or {})
            body = json.dumps({"data": answer}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
