"""The load generator of `appliance bench`, which sends requests to any OpenAI-compatible server and streams
all answers. Client processes (`worker`) send the requests and record each chunk's arrival time. The parent
process plans the runs (`session`), starts the client processes (`processes`) and computes statistics
(`results`, `rates`).
"""
