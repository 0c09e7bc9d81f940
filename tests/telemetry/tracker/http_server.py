"""A loopback server in place of wandb's: it answers each request as the test says, or never."""

import contextlib
import socket
import threading


class Server:
    """A loopback server. `answer` maps a request's first line to bytes, or to None for no answer at all."""

    def __init__(self, answer):
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.requests = []
        self._thread = threading.Thread(target=self._accept)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.settimeout(5)
                self._open.append(connection)
                request = connection.recv(65536)
                self.requests.append(request)
                answer = self._answer(request.split(b"\r\n")[0])
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for connection in self._open:
            connection.close()


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
