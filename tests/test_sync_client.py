"""What the trainer says when a server is not as it should be. (With a real one: tests/vllm_sync.)"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from trl_sketch.sync.client import ServerClient, SyncError
from trl_sketch.sync.update import new_run_id


class FakeServer(ThreadingHTTPServer):
    """Answers each path with what `answers` has for it, and 404 otherwise."""

    answers: dict[str, tuple[int, object]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.requests = {}, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        code, body = self.server.answers.get(path, (404, {"detail": "Not Found"}))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_GET = do_POST = answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def client(fake: FakeServer) -> ServerClient:
    return ServerClient(fake.url, new_run_id(), timeout=5)


def initialize(client: ServerClient) -> None:
    client.initialize({"a.weight": torch.zeros(2, 2)}, ["a.weight"])


@pytest.mark.parametrize("config", [None, {"backend": "nccl"}])
def test_a_server_without_the_backend_is_told_the_flag(fake, client, config):
    fake.answers["/server_info"] = (200, {"vllm_config": {"weight_transfer_config": config}})
    with pytest.raises(SyncError, match=r"--weight-transfer-config '\{\"backend\": \"sketch\"\}'") as error:
        initialize(client)
    assert fake.url in str(error.value) and error.value.outcome == "unsupported"
    assert fake.requests == ["/server_info"]


def test_a_server_without_development_endpoints_is_told_the_variable(client):
    with pytest.raises(SyncError, match="VLLM_SERVER_DEV_MODE=1"):
        initialize(client)


def test_nothing_is_retried_and_the_answer_is_in_the_message(fake, client):
    fake.answers["/collective_rpc"] = (500, {"error": {"message": "worker died"}})
    with pytest.raises(SyncError, match="answered 500: .*worker died") as error:
        client.status()
    assert error.value.outcome == "http" and fake.requests == ["/collective_rpc"]


def test_a_server_that_is_gone_is_named():
    client = ServerClient("http://127.0.0.1:9", new_run_id(), timeout=1)
    with pytest.raises(SyncError, match=r"127\.0\.0\.1:9/collective_rpc did not answer") as error:
        client.version()
    assert error.value.outcome == "http"


def test_workers_that_disagree_have_no_version(fake, client):
    run = client.run_id.hex()
    mine = {"run_id": run, "version": 3, "broken": None}
    for statuses, version in [
        ([mine, mine], 3),
        ([mine, mine | {"version": 2}], None),
        ([mine, mine | {"broken": "writing failed"}], None),
        ([mine | {"run_id": None}], None),
    ]:
        fake.answers["/collective_rpc"] = (200, {"results": statuses})
        assert client.version() == version
