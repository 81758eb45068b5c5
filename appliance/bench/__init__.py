"""The load generator of `appliance bench`, which sends requests to any OpenAI-compatible server. All answers
are streamed.

Client processes (`worker`) send the requests and record when each chunk arrived. The parent process plans the
runs (`session`), starts the client processes (`processes`) and computes the statistics (`results`, `rates`).
"""
