"""Chats to prompts, in two processes with limits: short chats do not wait for long ones; callers take turns at each."""

import asyncio

from text_generation_inference.api.callers import current_caller
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.turns import Turns
from text_generation_inference.errors import OverloadedError
from text_generation_inference.text.chat_template import ChatTemplate, read_prompt
from text_generation_inference.text.template_process import Rendering, TemplateProcess


class ChatRenderer:
    def __init__(self, template: ChatTemplate, max_wait_s: float, metrics: Metrics) -> None:
        template.probe()
        self._short = _Lane("template", template.process, max_wait_s, metrics)
        self._long = _Lane("long_template", TemplateProcess(), max_wait_s, metrics)

    async def render(self, job: bytes, long: bool) -> str:
        """The prompt of `ChatTemplate.job`. Raises `OverloadedError` when its turn does not come for long."""
        lane = self._long if long else self._short
        return read_prompt(await lane.exchange(job))

    def close(self) -> None:
        self._short.process.close()
        self._long.process.close()


class _Lane:
    def __init__(self, name: str, process: TemplateProcess, max_wait_s: float, metrics: Metrics) -> None:
        self.process = process
        self._name, self._metrics = name, metrics
        self._turns = Turns(1, max_wait_s, lambda count: metrics.waiting(name, count))

    async def exchange(self, job: bytes) -> Rendering:
        caller = current_caller.get()
        try:
            await self._turns.take(caller)
        except OverloadedError:
            self._metrics.refuse_waiting(self._name)
            raise

        def end(answer: asyncio.Future[Rendering]) -> None:
            self._turns.give_back(caller)
            if not answer.cancelled():
                answer.exception()  # seen, also where nobody waits any more

        try:
            answer = self.process.start(job)
        except BaseException:
            self._turns.give_back(caller)
            raise
        answer.add_done_callback(end)
        # Who leaves does not stop it: the next answer on that socket would be somebody else's.
        return await asyncio.shield(answer)
