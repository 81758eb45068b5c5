"""The inference engine. It turns prompt token ids into output token ids, and knows nothing of HTTP, text or
tenants. The service imports only the engine's interface, such as `engine.client`, `engine.messages` and
`engine.sizing`, which does not load torch.
"""
