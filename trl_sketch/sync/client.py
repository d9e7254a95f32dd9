"""The trainer's end over HTTP: talks to the development endpoints of one `vllm serve`. Nothing is retried."""

import base64
import contextlib
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .checksum import checksum, combine
from .update import UpdateMessage, WeightMessage, weight_messages


class SyncError(RuntimeError):
    """A sync did not succeed.

    Attributes:
        outcome: One of the table in `receiver` (`gap`, `foreign`, `broken`, ...); `unsupported` if the server cannot take
            these weights at all; `http` if it did not answer as it should; `away` if it was waited for in vain.
    """

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class ServerClient:
    """One vLLM server with the backend `sketch`.

    Args:
        base_url: Its address, `http://host:port`.
        run_id: Identity of this run, from [`new_run_id`].
        timeout: Seconds that one request may take.
    """

    def __init__(self, base_url: str, run_id: bytes, timeout: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.run_id = run_id
        self.timeout = timeout
        self.bytes_sent = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.cast: set[str] = set()

    # ------------------------------------------------------------------ protocol

    def wait_until_up(self, timeout: float) -> None:
        """Wait until the server answers.

        Raises:
            SyncError: It does not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            with contextlib.suppress(SyncError):
                self._request("GET", "/health", timeout=min(10.0, max(left, 1.0)))
                return
            if left <= 0:
                raise SyncError("away", f"the vLLM server at {self.base_url} did not answer for {timeout:g} s")
            time.sleep(min(0.5, max(left, 0.0)))

    def initialize(self, parameters: Mapping[str, torch.Tensor], sketched: Iterable[str]) -> dict[str, str]:
        """Say what will be sent. Nothing changes at the server until the first full sync.

        Args:
            parameters: All of the model's, by checkpoint name, each once; only shapes and types are read.
            sketched: The names of those that get updates.

        Returns:
            Those of `sketched` that take whole weights only, with the reason: of another type in the trainer than at the
            server, they would not be updated exactly.

        Raises:
            SyncError: The server was started without the backend, or cannot take some of the weights; the message says
                which flag is missing, or which weights and why.
        """
        self.check_backend()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        message_id = secrets.token_hex(8)
        info = {
            "id": message_id,
            "run_id": self.run_id.hex(),
            "parameters": [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in parameters.items()],
            "sketched": list(sketched),
        }
        self._post("/init_weight_transfer_engine", {"init_info": info})
        statuses = self.status()
        self._raise_unless_applied(statuses, message_id)
        problems: dict[str, str] = {}
        unsketchable: dict[str, str] = {}
        for status in statuses:
            sender = status["senders"][self.run_id.hex()]
            problems |= sender["refused"]
            unsketchable |= sender["unsketchable"]
            self.cast |= set(sender["cast"])
        problems |= self._uncovered(set(problems))
        if problems:
            listed = "; ".join(f"{name}: {reason}" for name, reason in list(problems.items())[:5])
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise SyncError(
                "unsupported", f"the vLLM server at {self.base_url} cannot take these weights: {listed}{more}"
            )
        return unsketchable

    def send_updates(self, message: UpdateMessage) -> None:
        """Send the updates of one or several steps.

        Raises:
            SyncError: They were not applied by every worker; `outcome` says why.
        """
        self._send([message])

    def send_weights(self, version: int, parameters: Mapping[str, torch.Tensor], chunk_bytes: int = 2**26) -> None:
        """A full sync: `parameters` are all that were said to be sent, or, at the server's version, some of them.

        Raises:
            SyncError: They were not written by every worker.
        """
        self._send(weight_messages(self.run_id, version, parameters, chunk_bytes))

    def status(self) -> list[dict[str, Any]]:
        """Each worker's status."""
        return self._rpc("sketch_status")

    def owners(self) -> set[str | None]:
        """Identities of the runs whose weights the workers have; `None` of one that has been sent none."""
        return {status["run_id"] for status in self.status()}

    def version(self) -> int | None:
        """The version that all workers have of this run's weights; `None` if they have none, or not the same."""
        versions = {
            status["version"] if status["run_id"] == self.run_id.hex() and status["broken"] is None else None
            for status in self.status()
        }
        return versions.pop() if len(versions) == 1 else None

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, int | None]:
        """Checksums of whole parameters, as [`checksum`] gives them for the trainer's; `None` where workers disagree."""
        wanted = list(self.shapes) if names is None else list(names)
        replies = self._rpc("sketch_checksums", [self.run_id.hex(), wanted])
        result: dict[str, int | None] = {}
        for name in wanted:
            boxes = [(tuple(s), tuple(n), value) for reply in replies for s, n, value in reply.get(name, [])]
            result[name] = combine(boxes, self.shapes[name])
        return result

    def differing(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the trainer's `parameters` that the server does not have to the last bit.

        Those that it holds in another type are left out.
        """
        theirs = self.checksums(name for name in parameters if name not in self.cast)
        return [name for name, value in theirs.items() if value != checksum(parameters[name].detach())]

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with older weights. To be called after every sync."""
        self._post("/reset_prefix_cache", {})

    # ------------------------------------------------------------------ helpers

    def _send(self, messages: Iterable[UpdateMessage | WeightMessage]) -> None:
        if any(status["update_active"] for status in self.status()):  # of a trainer that died while it sent
            self._post("/finish_weight_update", {})
        self._post("/start_weight_update", {})
        version = None
        try:
            for message in messages:
                self.send_bytes(message.to_bytes())
                version = message.version
        except BaseException:
            with contextlib.suppress(SyncError):  # what went wrong first is what has to be known
                self._post("/finish_weight_update", {})
            raise
        self._post("/finish_weight_update", {"weight_version": None if version is None else str(version)})

    def send_bytes(self, body: bytes) -> None:
        """Send one message as it is, between start and finish, and look at its outcome."""
        message_id = secrets.token_hex(8)
        self._post("/update_weights", {"update_info": {"id": message_id, "body": base64.b64encode(body).decode()}})
        self.bytes_sent += len(body)
        self._raise_unless_applied(self.status(), message_id)

    def _raise_unless_applied(self, statuses: list[dict[str, Any]], message_id: str) -> None:
        for status in statuses:
            last = status["last"]
            if last.get("id") != message_id:
                raise SyncError("foreign", f"{self.base_url}: another client has changed the weights meanwhile")
            if last["outcome"] not in ("applied", "replayed"):
                raise SyncError(last["outcome"], f"{self.base_url}: {last['error']}")

    def _uncovered(self, known: set[str]) -> dict[str, str]:
        """Parameters of which the workers together do not hold every element."""
        layouts = self._rpc("sketch_layout", [self.run_id.hex()])
        result = {}
        for name, shape in self.shapes.items():
            boxes = [(tuple(s), tuple(n), 0) for layout in layouts for s, n in layout.get(name, [])]
            if name not in known and combine(boxes, shape) is None:
                result[name] = "the workers' loaders leave out a part of it"
        return result

    def check_backend(self) -> None:
        """See that the server was started as it must be.

        Raises:
            SyncError: It was not, and which flag or variable is missing; or it does not answer.
        """
        try:
            config = self._request("GET", "/server_info?config_format=json")["vllm_config"]
        except SyncError as error:
            if "404" not in str(error):
                raise
            raise SyncError(
                "unsupported",
                f"the vLLM server at {self.base_url} has no development endpoints: start it with VLLM_SERVER_DEV_MODE=1 in "
                "its environment",
            ) from None
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend != "sketch":
            raise SyncError(
                "unsupported",
                f"the vLLM server at {self.base_url} was started with the weight-transfer backend {backend!r}: start it with "
                '--weight-transfer-config \'{"backend": "sketch"}\', in an environment where trl_sketch is installed',
            )

    def _rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        return self._post("/collective_rpc", {"method": method, "args": args or []})["results"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._request("POST", path, json.dumps(body).encode())

    def _request(self, method: str, path: str, body: bytes | None = None, timeout: float | None = None) -> Any:
        request = urllib.request.Request(
            self.base_url + path, body, {"Content-Type": "application/json"}, method=method
        )
        started = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=self.timeout if timeout is None else timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")[:500]
            raise SyncError("http", f"{self.base_url}{path} answered {error.code}: {answer}") from None
        except OSError as error:
            waited = time.monotonic() - started
            raise SyncError("http", f"{self.base_url}{path} did not answer ({error}; {waited:.0f} s)") from None
        return json.loads(text) if text else None
