"""A worker of an eavesdropper that kills itself at a step: `python -m tests.services.dying_worker STEP EAVESDROPPER HOST`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from sottovoce_eavesdropper.service import EavesdropperConfig, join
from sottovoce_eavesdropper.worker import SendingWriter, Worker
from sottovoce_wire.v1.eavesdropper_pb2 import WorkResponse

STEPS = [
    ("checked", "open", "proxy", "flush", "stored", "close"),
    ("sent", "opened", "proxied", "flushed", "closed"),
]
"""Steps of two runs. A part is checked, sent, and confirmed as stored; a task begins, or is done and its result is not sent."""
_DONE = {"opened": "open", "proxied": "proxy", "flushed": "flush", "closed": "close"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patch(step: str) -> None:
    run, send, confirm = Worker._run_task, SendingWriter._send_part, SendingWriter.confirm_stored

    async def run_task(self: Worker, task: WorkResponse, send: Any) -> str:
        if task.WhichOneof("work") == step:
            die()
        address = await run(self, task, send)
        if task.WhichOneof("work") == _DONE.get(step):
            die()
        return address

    async def send_part(self: SendingWriter, part: Any) -> None:
        if step == "checked":
            die()
        sending = asyncio.ensure_future(send(self, part))
        if step == "sent":
            await asyncio.sleep(0)
            die()
        await sending

    def confirm_stored(self: SendingWriter, number: int) -> None:
        if step == "stored":
            die()
        confirm(self, number)

    Worker._run_task, SendingWriter._send_part = run_task, send_part  # type: ignore[method-assign]
    SendingWriter.confirm_stored = confirm_stored  # type: ignore[method-assign]


if __name__ == "__main__":
    patch(sys.argv[1])
    config = EavesdropperConfig("127.0.0.1:0", advertise_host=sys.argv[3], allow_imports=True)
    asyncio.run(join(config, sys.argv[2], stop_with_stdin=True))
