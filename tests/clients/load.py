"""How many sequences the LLM service has in hand, for clients that speak no gRPC."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc

from chiasm.v1 import llm_service_pb2, llm_service_pb2_grpc


@contextmanager
def load_told(llm: str) -> Iterator[str]:
    """The URL of a page that tells the load of the LLM service at `llm` as JSON."""
    with grpc.insecure_channel(llm) as channel:
        service = llm_service_pb2_grpc.LlmServiceStub(channel)

        class Load(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = service.GetLoad(llm_service_pb2.LlmServiceGetLoadRequest(), timeout=10)
                body = json.dumps({"active": told.active_call_count, "running": told.running_count})
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Load) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/"
            finally:
                server.shutdown()
