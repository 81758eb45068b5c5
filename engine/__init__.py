"""The inference engine: token ids in, token ids out. It does not handle HTTP, text or tenants.

The service imports only `engine.client`, `engine.messages` and `engine.sizing`, which do not load torch.
"""
