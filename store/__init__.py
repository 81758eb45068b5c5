"""The persistent data: the request log, tenants and keys, and the audit chain, in two SQLite files.

`history.db` (`store.requests`) and `control.db` (`store.control`, `store.audit`) each have one writer thread
(`store.writer`); all other code reads through `store.database.open_readonly`. `docs/store.md` is the
auditor's page.
"""
