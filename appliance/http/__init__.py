"""The HTTP/1.1 server used by the front processes, the admin API and the metrics listener. It serves sockets
that the core has bound or accepted. A custom asyncio protocol drives the ASGI application, and httptools
(llhttp) does the parsing. The protocol adds features that ASGI servers lack: the peer's identity
(`SO_PEERCRED`), time limits for headers, bodies and writes, per-client limits on bytes and connections, and a
direct way to write a stream (`Connection.write_chunk`).
"""

from appliance.http.connection import Connection
from appliance.http.counted_log import CountedLog
from appliance.http.errors import drop_frames, error_document
from appliance.http.headers import bearer
from appliance.http.peers import Peer
from appliance.http.server import HttpServer

__all__ = [
    "Connection",
    "CountedLog",
    "HttpServer",
    "Peer",
    "bearer",
    "drop_frames",
    "error_document",
]
