"""The durable state of the service: the request log, the kept texts, tenants and keys, and the audit chain,
in three SQLite files.

`history.db` (`store.requests`), `contents.db` (`store.contents`) and `control.db` (`store.control`,
`store.audit`) each have one writer thread (`store.writer`). All other code reads through
`store.database.open_readonly`. `docs/store.md` describes the files for auditors.
"""
