"""The committee's members as engines."""

import asyncio
import threading
import time
from typing import Any

from mopdctl.config.committee import Member
from mopdctl.engines.chat import ChatEngine, Reply
from mopdctl.engines.openai import OpenAIServer
from mopdctl.engines.pace import Pace
from mopdctl.errors import InputError
from mopdctl.gensft.ask import Party
from mopdctl.runs import Workspace, model_identity


def endpoint(member: Member, workspace: Workspace) -> str:
    """What stands behind a member, for the key of its requests: another server or other weights, another answer."""
    if member.engine == "openai":
        return f"openai {member.base_url} {member.revision or ''}"
    if member.engine == "fake":
        return "fake"
    return f"hf {model_identity(workspace.resolve_model(member.model))}"


def enlist(alias: str, member: Member, workspace: Workspace) -> Party:
    """A member ready to be asked. Loads no weights yet; raises InputError for a missing key or model."""
    engine: ChatEngine
    if member.engine == "openai":
        assert member.base_url is not None
        engine = OpenAIServer(member.base_url, api_key_env=member.api_key_env, timeout_s=member.timeout_s)
    elif member.engine == "hf":
        engine = LocalModel(workspace.resolve_model(member.model), batch_size=member.max_concurrency)
    else:
        engine = Fake()
    pace = Pace(
        member.max_concurrency,
        requests_per_minute=member.requests_per_minute,
        tokens_per_minute=member.tokens_per_minute,
    )
    return Party(alias, engine, pace, member.price, member.max_attempts)


class Fake:
    """The fake model in this process, without a server."""

    async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
        """See `ChatEngine.complete`."""
        from mopdctl.engines.fake_chat import answer, score

        document = answer(body) if kind == "chat" else {"data": [{"data": [score(body["messages"])]}]}
        return reply(document)

    async def close(self) -> None:
        """Nothing to close."""


def reply(document: dict[str, Any]) -> Reply:
    """An answer that was made here, as a server would have sent it."""
    import json

    return Reply(document, json.dumps(document, ensure_ascii=False).encode(), status=200)


_LOADING = threading.Lock()
"""transformers builds a model on a device that it sets for all threads; two at once get each other's."""
_GATHER_S = 0.02
"""How long a batch waits for more requests once it has one."""


class LocalModel:
    """A transformers model in this process. Requests that come together are one batch; it runs in a thread of its own.

    The text of an answer is what was sampled, control tokens included, without the end token.
    """

    def __init__(self, path: str, *, batch_size: int) -> None:
        self._path, self._batch_size = path, batch_size
        self._model: Any = None
        self._queue: asyncio.Queue[tuple[dict[str, Any], str, asyncio.Future[Reply]]] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    async def complete(self, body: dict[str, Any], *, key: str, kind: str = "chat") -> Reply:
        """See `ChatEngine.complete`."""
        if kind != "chat":
            return Reply(None, b"null", "rejected", detail="engine hf gives no rewards")
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        await self._queue.put((body, key, future))
        return await future

    async def _work(self) -> None:
        while True:
            batch = [await self._queue.get()]
            end = time.monotonic() + _GATHER_S
            while len(batch) < self._batch_size and (left := end - time.monotonic()) > 0:
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                except TimeoutError:
                    break
            try:
                replies = await asyncio.to_thread(self._answer, [(body, key) for body, key, _ in batch])
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), found in zip(batch, replies, strict=True):
                if not future.done():
                    future.set_result(found)

    def _answer(self, batch: list[tuple[dict[str, Any], str]]) -> list[Reply]:
        from mopdctl.engines.base import SampleRequest, stream_seed
        from mopdctl.engines.hf import HFModel
        from mopdctl.train.data import prompt_token_ids, row_messages
        from mopdctl.train.runtime import settle_libraries

        if self._model is None:
            settle_libraries()
            with _LOADING:
                self._model = HFModel.load(self._path, batch_size=self._batch_size)
        model: HFModel = self._model
        replies: dict[int, Reply] = {}
        by_temperature: dict[float, list[tuple[int, SampleRequest]]] = {}
        for number, (body, key) in enumerate(batch):
            try:
                messages = row_messages(body, self._path)
                ids = tuple(prompt_token_ids(model, messages, body.get("tools"), {}, place=self._path))
            except InputError as error:
                replies[number] = Reply(None, b"null", "rejected", detail=str(error))
                continue
            room = model.max_length - len(ids)
            if room < 1:
                detail = f"{len(ids)} prompt tokens, the model's context holds {model.max_length}"
                replies[number] = Reply(None, b"null", "rejected", detail=detail)
                continue
            budget = min(int(body.get("max_tokens") or room), room)
            request = SampleRequest(key, ids, budget, stream_seed(body["seed"], "chat"))
            temperature = body.get("temperature")
            by_temperature.setdefault(1.0 if temperature is None else temperature, []).append((number, request))
        for temperature, requests in by_temperature.items():
            completions = model.sample([request for _, request in requests], temperature=temperature)
            for (number, request), completion in zip(requests, completions, strict=True):
                ids = completion.token_ids
                ended = completion.finish_reason == "stop"
                replies[number] = reply(
                    {
                        "object": "chat.completion",
                        "model": self._path,
                        "choices": [
                            {
                                "index": 0,
                                "message": {
                                    "role": "assistant",
                                    "content": model.tokenizer.decode(ids[: len(ids) - ended]),
                                },
                                "finish_reason": completion.finish_reason,
                            }
                        ],
                        "usage": {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(ids)},
                    }
                )
        return [replies[number] for number in range(len(batch))]

    async def close(self) -> None:
        """Ends the worker and drops the model."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._model = None
