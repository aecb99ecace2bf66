"""Ending requests in SGLang's scheduler, with all tokens that they have.

SGLang drops what waits, and what is computed in pieces: its server then answers with the tokens that it happens to know. A request that
was put back at a change of weights has tokens of its own, and is ended here instead.
"""

from collections.abc import Sequence
from typing import Any


def end_requests(scheduler: Any, names: Sequence[str]) -> None:
    """End requests, wherever they are; SGLang's server answers them with what there is. Called between two steps."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    waiting = [request for request in scheduler.waiting_queue if request.rid in names and request.output_ids]
    for request in waiting:
        scheduler.waiting_queue.remove(request)
        request.to_finish = FINISH_ABORT()
        request.update_finish_state()
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    left = set(names) - {request.rid for request in waiting}
    request = scheduler.chunked_req
    if request is not None and request.rid in left and request.output_ids:
        request.to_finish = FINISH_ABORT()  # with the next token, after its last piece
        left.remove(request.rid)
    for name in sorted(left):
        scheduler.abort_request(AbortReq(rid=name))
