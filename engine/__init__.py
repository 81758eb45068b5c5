"""The inference engine. It turns prompt token ids into output token ids and does not handle HTTP, text or
tenants. The service imports only the engine's interface modules, such as `engine.client`, `engine.messages`
and `engine.sizing`, which do not load torch.
"""
