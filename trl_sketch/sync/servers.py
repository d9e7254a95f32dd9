"""The vLLM servers of one run, as its main process sees them: which are behind, what they get, who generates."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from .client import ServerClient, SyncError
from .update import Step, UpdateMessage, new_run_id


logger = logging.getLogger(__name__)

# After these a server takes a full sync. The other outcomes are mistakes, which it would not mend.
_FULL_SYNC_HELPS = ("unknown", "gap", "damaged", "broken", "failed", "http")
_ATTEMPTS = 3


class RolloutError(RuntimeError):
    """The rollout cannot be kept in step with the trainer. It is raised on all ranks alike."""


class Servers:
    """One or several servers with the backend `sketch`, that are to have the same weights.

    Args:
        urls: Their addresses.
        timeout: Seconds that one may stay away.

    Attributes:
        generator: TRL's client, which shares prompts out among them.

    Raises:
        SyncError: One does not answer in time, or was not started as it must be.
    """

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        run_id = new_run_id()
        self.timeout = timeout
        self.clients = [ServerClient(url, run_id, timeout) for url in urls]
        for client in self.clients:
            client.wait_until_up(timeout)
            client.check_backend()
        self.generator = RolloutClient(urls)
        self._behind = set(self.clients)
        self._taken: set[ServerClient] = set()  # that have had this run's weights

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages to all servers."""
        return sum(client.bytes_sent for client in self.clients)

    def send_updates(self, steps: Sequence[Step] | None) -> bool:
        """Send the updates of `steps` to every server that is not behind; `None`: nothing but whole weights will do.

        Returns:
            Whether [`send_weights`] is to follow, for some server.

        Raises:
            SyncError: The updates do not fit the server's model.
        """
        if steps is None:
            self._behind = set(self.clients)
        for client in self.clients:
            if client in self._behind or not steps:
                continue
            try:
                client.send_updates(UpdateMessage(client.run_id, list(steps)))
                client.reset_prefix_cache()
            except SyncError as error:
                self._raise_if_taken_over(client)
                if error.outcome not in _FULL_SYNC_HELPS:
                    raise
                logger.warning("%s: full sync.", error)
                self._behind.add(client)
        return bool(self._behind)

    def send_weights(
        self, version: int, weights: Mapping[str, torch.Tensor], sketched: Sequence[str], *, updates_only: bool
    ) -> dict[str, str]:
        """A full sync of the servers that are behind. One that is away is waited for.

        Args:
            version: Optimizer steps in `weights`.
            weights: All of the model's, by checkpoint name.
            sketched: The names of those that will get updates.
            updates_only: Refuse servers that cannot get updates.

        Returns:
            Those of `sketched` that a server takes whole only, with the reason.

        Raises:
            RolloutError: Another run has taken over a server, or `updates_only` is not possible.
            SyncError: A server stays away (`outcome` is `away`), or cannot take these weights.
        """
        unsketchable: dict[str, str] = {}
        for client in [client for client in self.clients if client in self._behind]:
            for attempt in range(1, _ATTEMPTS + 1):
                client.wait_until_up(self.timeout)
                try:
                    self._raise_if_taken_over(client)
                    unsketchable |= self._send_weights(client, version, weights, sketched, updates_only)
                    break
                except SyncError as error:
                    if error.outcome not in _FULL_SYNC_HELPS or attempt == _ATTEMPTS:
                        raise
                    logger.warning("%s: once more.", error)
            self._behind.remove(client)
            self._taken.add(client)
        return unsketchable

    def _send_weights(
        self,
        client: ServerClient,
        version: int,
        weights: Mapping[str, torch.Tensor],
        sketched: Sequence[str],
        updates_only: bool,
    ) -> dict[str, str]:
        is_fresh = version == 0 and client.owners() == {None}
        unsketchable = client.initialize(weights, sketched)
        if unsketchable and updates_only:
            raise RolloutError(
                f"vllm_sync='sketch' is not possible. {some_reason(unsketchable)}. Set vllm_sync='auto'"
            )
        if is_fresh:
            _check_start(client, weights)
        client.send_weights(version, weights)
        client.reset_prefix_cache()
        return unsketchable

    def _raise_if_taken_over(self, client: ServerClient) -> None:
        """A server that had this run's weights may have lost them, but must not have another's."""
        if client not in self._taken:
            return
        try:
            owners = client.owners()
        except SyncError:  # it is away: there is nothing to be known
            return
        if not owners <= {None, client.run_id.hex()}:
            raise RolloutError(
                f"another trainer has sent its weights to the vLLM server at {client.base_url}: stop one of the two, or give "
                "each its own server"
            )

    def compare(self, checksums: Mapping[str, int | None]) -> bool:
        """Compare every server's weights with the trainer's, of which `checksums` are given.

        Returns:
            Whether some differ: these servers are behind now, and a warning has named the weights.
        """
        for client in self.clients:
            try:
                theirs = client.checksums(name for name in checksums if name not in client.cast)
            except SyncError as error:
                logger.warning("%s: full sync.", error)
                self._behind.add(client)
                continue
            names = [name for name, value in theirs.items() if value != checksums[name]]
            if names:
                logger.warning(
                    "The weights of the vLLM server at %s are not the trainer's in %s: full sync.",
                    client.base_url,
                    some_names(names),
                )
                self._behind.add(client)
        return bool(self._behind)

    def look_back(self, version: int | None) -> tuple[bool, bool]:
        """After generating: whether all servers answered, and whether all have the weights of `version` still.

        Those that have not are behind.

        Raises:
            RolloutError: A server refused to generate.
        """
        failures = self.generator.take_failures()
        for error in failures:
            if not isinstance(error, requests.exceptions.RequestException):
                raise RolloutError(f"a vLLM server does not generate: {error}") from error
        for client in self.clients:
            try:
                has_strayed = client.version() != version
            except SyncError:
                has_strayed = True
            if has_strayed:
                logger.warning("The vLLM server at %s has lost the weights: full sync.", client.base_url)
                self._behind.add(client)
        return not failures, not self._behind


class RolloutClient(VLLMClient):
    """TRL's client for several servers, without the NCCL group that it sends weights through.

    Its own requests are about the first server. A request to generate is repeated for three seconds at most: who calls it
    sees to that the server has its weights before it tries again.

    Args:
        urls: Their addresses; they have to be up.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(base_url=urls[0])
        self.clients: list[VLLMClient] = [self, *(VLLMClient(base_url=url) for url in urls[1:])]
        retry = Retry(total=3, backoff_factor=0.5, status_forcelist=(500, 502, 503), allowed_methods=None)
        for client in self.clients:
            for scheme in ("http://", "https://"):
                client.session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=64))
        self._failures: list[Exception] = []

    def take_failures(self) -> list[Exception]:
        """What kept servers from generating since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def generate(self, prompts: Any, features: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As TRL's, with the prompts shared out. It raises nothing: if a server fails, all lists are empty."""
        size = -(-len(prompts) // len(self.clients))
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]

        def ask(client: VLLMClient, part: slice) -> dict[str, Any] | None:
            try:
                own_features = None if features is None else features[part]
                return VLLMClient.generate(client, prompts[part], own_features, *args, **kwargs)
            except Exception as error:  # other ranks wait for the result, whatever it is
                logger.warning("The vLLM server at %s did not generate: %s", client.base_url, error)
                self._failures.append(error)
                return None

        with ThreadPoolExecutor(len(parts)) as pool:
            answers = list(pool.map(ask, self.clients, parts))
        names = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")
        whole = [answer for answer in answers if answer is not None]
        if len(whole) < len(parts):
            return {name: [] for name in names}
        return {name: _joined([answer[name] for answer in whole]) for name in names}


def _joined(parts: list[list[Any] | None]) -> list[Any] | None:
    """One list of all parts; `None`, as TRL has it for log-probabilities, if one has none."""
    whole: list[Any] = []
    for part in parts:
        if part is None:
            return None
        whole += part
    return whole


def _check_start(client: ServerClient, weights: Mapping[str, torch.Tensor]) -> None:
    """Before anything is sent, what vLLM has loaded is what the trainer has: its places are those that were found."""
    differing = client.differing(weights)
    if differing:
        logger.warning(
            "The vLLM server at %s starts from other values than the trainer in %d of %d weights (%s). If it was started "
            "with another checkpoint, all is well after the first sync. If not, it re-packs them, and would generate with "
            "old weights: please report the model.",
            client.base_url,
            len(differing),
            len(weights),
            some_names(differing),
        )


def some_names(names: Iterable[str]) -> str:
    """The first three, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def some_reason(reasons: Mapping[str, str]) -> str:
    """The first name and its reason, and how many more there are."""
    name, reason = next(iter(reasons.items()))
    return f"{name}: {reason}" + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
