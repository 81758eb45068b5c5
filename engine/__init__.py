"""The engine: tokens in, tokens out. It knows no HTTP, text or tenants.

`engine.client`, `engine.messages` and `engine.sizing` are its doors: they load no torch.
"""
