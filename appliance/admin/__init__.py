"""The admin API: what operators see and do, over `admin.sock`."""
