"""The durable state of the service in three SQLite files: the request log, the stored prompts and answers,
and the tenants and keys with their audit chain.

`history.db` (`store.requests`), `contents.db` (`store.contents`) and `control.db` (`store.control`,
`store.audit`) each have one writer thread (`store.writer`). All other code opens the files with
`store.database.open_readonly`. `docs/store.md` describes the files for auditors.
"""
