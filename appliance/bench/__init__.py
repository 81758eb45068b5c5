"""The service's benchmark: load on any OpenAI-compatible server, every token streamed, and how it bore it.

Worker processes send the requests and note when each chunk came; the parent plans, watches and reckons.
"""
