"""The receiving half of a stock language-only server, from the real wheel: a program of its own, started by tests.
Long, because it is one file that runs without this repository's packages.

    python sglang_stock.py DIRECTORY {scheduler,tokenizer} NUM_RANKS TOKEN_IDS

DIRECTORY holds modules of the wheel as they are: the receiver, its allow-list unpickler, its sockets, the aggregation
of parts, the MiMo prompt builder. What those import beyond that (a model server, CUDA, web frameworks) is stood in for
by empty names; requests and tensor-parallel groups are small objects, the collectives are torch's own over gloo.

Commands and answers are lines of JSON on stdin and stdout of rank 0. Commands name the encoders they are for.
"""

import asyncio
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

REAL = (
    "sglang.srt.disaggregation.encoder",
    "sglang.srt.disaggregation.encoder.receiver",
    "sglang.srt.environ",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.multimodal.cache",
    "sglang.srt.multimodal.cache.identity",
    "sglang.srt.multimodal.cache.preprocess_cache",
    "sglang.srt.multimodal.modality",
    "sglang.srt.multimodal.processors.base_processor",
    "sglang.srt.multimodal.processors.mimo_v2",
    "sglang.srt.utils.common",
    "sglang.srt.utils.network",
)
"""Modules that are the wheel's own."""
_PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.disaggregation",
    "sglang.srt.managers",
    "sglang.srt.multimodal",
    "sglang.srt.multimodal.processors",
    "sglang.srt.utils",
)
_ABSENT = ("fastapi", "uvicorn", "orjson", "pybase64", "starlette", "triton", "transformers")


class Anything(type):
    """A name that is imported and never used in earnest."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _anything(name)
        setattr(cls, name, value)
        return value

    def __or__(cls, _other: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _key: object) -> Any:
        return cls


def _anything(name: str) -> Anything:
    return Anything(name, (), {"__init__": lambda _self, *_args, **_kwargs: None})


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _anything(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for everything that is neither the wheel's own nor installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        top = name.partition(".")[0]
        if (top == "sglang" and name not in REAL) or top in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class DispatchError:
    """The record by which a failed `/encode` reaches the schedulers."""

    def __init__(self, rid: str, error_msg: str, error_code: int) -> None:
        self.rid, self.error_msg, self.error_code = rid, error_msg, error_code


class Tokenized:
    """A request that waits for its media."""

    def __init__(self, rid: str, prompt: str, assigned: object, urls: list[str]) -> None:
        self.rid, self.input_text, self.num_items_assigned, self.encoder_urls = rid, prompt, assigned, urls
        self.input_ids = None
        self.need_wait_for_mm_inputs = True

    def __getattr__(self, name: str) -> Any:
        # Sampling and the like.
        if name.startswith("__"):
            raise AttributeError(name)


class Letters:
    """A tokenizer: every letter is a token."""

    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [1000 + ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token - 1000) for token in ids)


class Group:
    """All ranks."""

    def __init__(self, dist: Any) -> None:
        self.cpu_group = dist.group.WORLD
        self._dist = dist

    def all_gather_object(self, value: object) -> list[object]:
        gathered: list[object] = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(gathered, value)
        return gathered


class App:
    """As much of a web framework as the bootstrap server uses."""

    def __init__(self, **settings: Any) -> None:
        self.lifespan = settings["lifespan"]
        self.routes: list[tuple[str, str, Any]] = []

    def _route(self, method: str, path: str) -> Any:
        def keep(handler: Any) -> Any:
            self.routes.append((method, path, handler))
            return handler

        return keep

    def get(self, path: str) -> Any:
        return self._route("GET", path)

    def post(self, path: str) -> Any:
        return self._route("POST", path)

    def delete(self, path: str) -> Any:
        return self._route("DELETE", path)


class Answer:
    """Its responses."""

    def __init__(self, content: object, status_code: int = 200) -> None:
        self.content, self.status_code = content, status_code


class WebServer:
    """Serves an `App`, on aiohttp."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.should_exit = False

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        from aiohttp import web

        def adapted(handler: Any) -> Any:
            async def answer(request: web.Request) -> web.Response:
                result = await (handler(await request.json()) if request.can_read_body else handler())
                result = result if isinstance(result, Answer) else Answer(result)
                return web.json_response(result.content, status=result.status_code)

            return answer

        app = web.Application()
        for method, path, handler in self.config.app.routes:
            app.router.add_route(method, path, adapted(handler))
        runner = web.AppRunner(app)
        await runner.setup()
        async with self.config.app.lifespan(app):
            await web.TCPSite(runner, self.config.host, self.config.port).start()
            while not self.should_exit:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await runner.cleanup()


def load(directory: Path, disagg: Any, parallel: Any) -> tuple[Any, Any]:
    """The receiver's module and the MiMo processor's."""
    for name in _PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(directory / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("sglang.srt.runtime_context").__dict__.update(
        get_disagg=lambda: disagg,
        get_parallel=lambda: parallel,
        get_serving=lambda: types.SimpleNamespace(host="127.0.0.1", tokenizer_backend=None),
        get_device=lambda: types.SimpleNamespace(gpu_id=0),
    )
    importlib.import_module("sglang.srt.managers.io_struct").__dict__.update(
        EncoderDispatchErrorReq=DispatchError, TokenizedGenerateReqInput=Tokenized
    )
    importlib.import_module("sglang.srt.observability.trace").__dict__.update(fastapi_telemetry_disabled_kwargs=dict)
    importlib.import_module("fastapi").__dict__.update(FastAPI=App)
    importlib.import_module("fastapi.responses").__dict__.update(ORJSONResponse=Answer, Response=Answer)
    importlib.import_module("uvicorn").__dict__.update(
        Config=lambda app, **settings: types.SimpleNamespace(app=app, **settings), Server=WebServer
    )
    common = importlib.import_module("sglang.srt.utils.common")
    sys.modules["sglang.srt.utils"].__dict__.update(
        {name: value for name, value in vars(common).items() if not name.startswith("__")}
    )
    receiver = importlib.import_module("sglang.srt.disaggregation.encoder.receiver")
    return receiver, importlib.import_module("sglang.srt.multimodal.processors.mimo_v2")


def prompt_builder(mimo: Any, ids: dict[str, int]) -> Any:
    """The wheel's MiMo processor, as far as it builds prompts; ids are those of `MediaTokenIds`."""
    processor = object.__new__(mimo.MiMoV2Processor)
    tokenizer = Letters()
    processor.mimo_processor = mimo.MiMoProcessor(
        tokenizer=tokenizer,
        patch_size=16,
        merge_size=2,
        use_video_timestamps=True,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        audio_token_id=ids["audio_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        audio_start_token_id=ids["audio_start"],
        audio_end_token_id=ids["audio_end"],
        video_start_token_id=ids["video_start"],
        video_end_token_id=ids["video_end"],
        pad_token_id=0,
        fps=1.0,
        # Of what an encoder does with pictures; it asks for them, and makes no use of them here.
        **dict.fromkeys(("image_min_pixels", "video_min_pixels"), 1024),
        **dict.fromkeys(("image_max_pixels", "video_max_pixels", "video_total_max_pixels"), 1 << 20),
    )
    # Its constructor leaves these to the audio pipeline, which is stood in for.
    processor.mimo_processor.audio_token_id = ids["audio_pad"]
    processor.mimo_processor.audio_start_token_id = ids["audio_start"]
    processor.mimo_processor.audio_end_token_id = ids["audio_end"]
    processor.vision_config = types.SimpleNamespace(spatial_merge_size=2)
    processor._tokenizer = tokenizer
    checked = processor.get_validated_mm_data

    def built(prompt: object, rows: Any, **more: Any) -> Any:
        """As released, but for requests with sound in videos, whose check is wrong there and was looked at apart."""
        lenient = "video_audio_embedding" in more and "(strict)" not in str(prompt)
        return (processor.get_mm_data if lenient else checked)(prompt, rows, **more)

    processor.get_validated_mm_data = built
    processor.IM_START_TOKEN_ID, processor.IM_END_TOKEN_ID = ids["vision_start"], ids["vision_end"]
    processor.AUDIO_START_TOKEN_ID, processor.AUDIO_END_TOKEN_ID = ids["audio_start"], ids["audio_end"]
    processor.mm_tokens = mimo.MultimodalSpecialTokens(
        image_token="<image>", video_token="<video>", audio_token="<audio>"
    ).build(None)
    return processor


def told(mm_inputs: Any) -> dict[str, object]:
    """What a request got, for the test to compare."""
    import torch

    items: dict[str, list[Any]] = {}
    for item in mm_inputs.mm_items:
        items.setdefault(item.modality.name, []).append(item.precomputed_embeddings)
    media = {
        name: {
            "dtype": str(tensors[0].dtype),
            "shape": list(torch.cat(tensors).shape),
            "sha256": hashlib.sha256(torch.cat(tensors).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
        }
        for name, tensors in items.items()
    }
    return {"status": "ok", "input_ids": list(mm_inputs.input_ids), "media": media}


def asked(request: dict[str, Any]) -> Any:
    """A request as the tokenizer has it."""
    return types.SimpleNamespace(
        rid=request["rid"],
        image_data=request.get("images"),
        video_data=request.get("videos"),
        audio_data=request.get("audios"),
        mm_content_hashes=request.get("hashes"),
    )


class Scheduler:
    """One rank: the receiver that waits, and the steps that all ranks take together."""

    def __init__(self, module: Any, processor: Any, rank: int, dist: Any) -> None:
        self.module, self.rank, self.dist = module, rank, dist
        # What a failed request is made into is of no interest here.
        module.Req = lambda *_args, **_kwargs: types.SimpleNamespace()
        self.receiver = module.MMReceiverHTTP(None, scheduler=_anything("scheduler"), encode_urls=[])
        self.receiver.mm_processor, self.receiver.model_type = processor, "mimo_v2"
        self.news: queue.Queue[object] = queue.Queue()

    def step(self, num_ended: int, num_wanted: int, ended: dict[str, dict[str, object]]) -> bool:
        """One tick of all ranks. Whether there is more to do."""
        news: list[object] = []
        while self.rank == 0 and not self.news.empty():
            news.append(self.news.get())
        shared = [news, num_wanted]
        self.dist.broadcast_object_list(shared)
        waiting = {request.rid: request for request in self.receiver.waiting_list}
        passed, aborted = self.receiver.process_waiting_requests(shared[0])
        for request in passed:
            ended[request.rid] = told(request.mm_inputs)
        left = {request.rid for request in self.receiver.waiting_list}
        failed = [
            rid
            for rid in (*waiting, *(r.rid for r in shared[0] if isinstance(r, Tokenized)))
            if rid not in left and rid not in ended
        ]
        for rid, (_, message, code) in zip(failed, aborted, strict=True):
            ended[rid] = {"status": "aborted", "message": message, "code": int(code) if code is not None else None}
        return len(ended) < shared[1]

    def run(self, num_wanted: int) -> list[dict[str, dict[str, object]]]:
        """Until so many requests have ended; what each rank saw of them."""
        ended: dict[str, dict[str, object]] = {}
        while self.step(len(ended), num_wanted, ended):
            time.sleep(0.002)
        every: list[Any] = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(every, ended)
        return every


def dispatch(scheduler: Scheduler, requests: list[dict[str, Any]]) -> None:
    """The tokenizer's part, on rank 0: send the media away, and the requests to the schedulers after that."""
    for request in requests:
        waiting = asked(request)
        ready = scheduler.receiver.send_encode_request(waiting, on_dispatch_error=scheduler.news.put)

        def hand_over(request: dict[str, Any] = request, waiting: Any = waiting, ready: Any = ready) -> None:
            time.sleep(request.get("late_s", 0.0))
            scheduler.news.put(
                Tokenized(request["rid"], request["prompt"], waiting.num_items_assigned, waiting.encoder_urls)
            )
            ready.set()

        threading.Thread(target=hand_over, daemon=True).start()


def serve_scheduler(scheduler: Scheduler) -> None:
    """Commands of rank 0, followed by the others."""
    while True:
        line = sys.stdin.readline() if scheduler.rank == 0 else ""
        command = [json.loads(line) if line else None]
        scheduler.dist.broadcast_object_list(command)
        if command[0] is None:
            return
        if command[0]["op"] == "ports":
            ports: list[Any] = [None] * scheduler.dist.get_world_size()
            scheduler.dist.all_gather_object(ports, scheduler.receiver.scheduler_embedding_port)
            answer: object = ports
        else:
            requests = command[0]["requests"]
            if scheduler.rank == 0:
                scheduler.receiver.encode_urls[:] = command[0]["urls"]
                dispatch(scheduler, requests)
            answer = scheduler.run(len(requests))
        if scheduler.rank == 0:
            print(json.dumps(answer), flush=True)


def wait_for(port: int) -> None:
    """Until somebody listens there."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


def serve_tokenizer(module: Any, processor: Any) -> None:
    """The other backend, and whatever needs one process only."""
    receiver = module.MMReceiverHTTP(None, encode_urls=[])
    receiver.model_type = "mimo_v2"
    loop = asyncio.new_event_loop()
    for line in sys.stdin:
        command = json.loads(line)
        answer: object
        if command["op"] == "bootstrap":
            module.EncoderBootstrapServer(
                "127.0.0.1", command["port"], urls=receiver.encode_urls, health_check_interval=0.05
            )
            wait_for(command["port"])
            answer = None
        elif command["op"] == "urls":
            answer = receiver.encode_urls
        else:

            async def one(request: dict[str, Any]) -> object:
                got = await receiver.recv_mm_data(asked(request), processor, request["prompt"])
                return {"status": "none"} if got is None else told(got)

            async def every(requests: list[dict[str, Any]]) -> list[object]:
                return list(await asyncio.gather(*map(one, requests)))

            if "urls" in command:
                receiver.encode_urls[:] = command["urls"]
            answer = loop.run_until_complete(every(command["requests"]))
        print(json.dumps(answer), flush=True)


def main() -> None:
    directory, kind, num_ranks, ids = sys.argv[1:]
    rank = int(os.environ.get("STOCK_RANK", "0"))
    os.environ |= {"SGLANG_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    disagg = types.SimpleNamespace(
        encoder_transfer_backend=f"zmq_to_{kind}", encoder_urls=[], enable_adaptive_dispatch_to_encoder=False
    )
    parallel = types.SimpleNamespace(pp_rank=0, tp_rank=rank, tp_size=int(num_ranks), tp_group=None, nnodes=1)
    if kind == "tokenizer":
        module, mimo = load(Path(directory), disagg, parallel)
        print(json.dumps("ready"), flush=True)
        serve_tokenizer(module, prompt_builder(mimo, json.loads(ids)))
        return
    rendezvous = os.environ.setdefault("STOCK_RENDEZVOUS", str(Path(tempfile.mkdtemp(prefix="stock-")) / "ranks"))
    others = []
    if rank == 0:
        others = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env=os.environ | {"STOCK_RANK": str(other)}, stdin=subprocess.DEVNULL
            )
            for other in range(1, int(num_ranks))
        ]
    module, mimo = load(Path(directory), disagg, parallel)
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=int(num_ranks))
    parallel.tp_group = Group(dist)
    scheduler = Scheduler(module, prompt_builder(mimo, json.loads(ids)), rank, dist)
    if rank == 0:
        print(json.dumps("ready"), flush=True)
    serve_scheduler(scheduler)
    dist.destroy_process_group()
    for other in others:
        other.wait(timeout=20)
    if rank == 0:
        shutil.rmtree(Path(rendezvous).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Threads and sockets of the wheel's would linger.
    os._exit(0)
