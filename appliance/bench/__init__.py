"""The load generator of `appliance bench`. It sends requests to any OpenAI-compatible server and streams
every token.

Client processes (`worker`) send the requests and record when each chunk arrived. The parent process plans the
runs (`session`), starts the client processes (`processes`) and computes the statistics (`results`, `rates`).
"""
